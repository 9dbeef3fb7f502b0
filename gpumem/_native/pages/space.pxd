"""Address spaces and their pages: which are idle, taking one out, putting memory in."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.bfc cimport Bfc, Chunk
from gpumem._native.driver cimport Access, CUmemAccessDesc, CUresult, DeviceContext
from gpumem._native.pages.types cimport Page, Range, Space
from gpumem._support.events cimport EventSource
from gpumem._support.lock cimport Lock

cdef void view_set(Space* space, uint32_t first, uint32_t granules, uint32_t page) noexcept nogil
# Begins a plan: marks every page inside a free chunk that `stream_slot` may take.
cdef void see_idle_pages(Space* space, uint32_t stream_slot) noexcept nogil
# Marks those that swaps may use; returns the address of their lowest dormant view, -1 for none.
cdef uint64_t see_swappable(Space* space, uint32_t stream_slot) noexcept nogil
# Makes the active place of an idle page a hole; returns the mark of the chunk it lay in.
cdef void take_out(Space* space, Page* page, uint32_t* stream_slot, uint64_t* epoch) noexcept nogil
# To be called once a view has become dormant and the other active: for the search for swaps.
cdef void note_dormant(Space* space, const Page* page) noexcept nogil
# Updates the idle pages of what was cut off above a chunk.
cdef void see_above(Space* space, uint32_t index) noexcept nogil
# Turns granules that are a hole into free memory.
cdef void fill_granules(Space* space, uint32_t first, uint32_t granules, uint32_t stream_slot,
                        uint64_t epoch) noexcept nogil
cdef uint32_t hole_at(const Space* space, uint64_t address) noexcept nogil
# An empty space; no driver call. `first_bytes` of addresses are reserved at the first need.
cdef void space_create(Space* space, Bfc* table, DeviceContext* context, const Access* access,
                       uint64_t* calls, EventSource* events, uint64_t first_bytes,
                       bint large) noexcept nogil
# Records what happened to a page, if anything records: memory came or went at a granule, or moved
# there from `origin` (NIL: it is no move). With the arena lock.
cdef void page_note(const Space* space, const Page* page, uint32_t kind, uint32_t at,
                    uint32_t origin) noexcept nogil
# Reserves addresses that hold a block of `size` bytes; less than planned if they are scarce.
cdef CUresult range_reserve(const Space* space, uint64_t size, Range* fresh) noexcept nogil
# Adds what was reserved. False: out of host memory, the reservation is still the caller's.
cdef bint space_add_range(Space* space, const Range* fresh) noexcept nogil
# The arena is not used any more.
cdef void space_destroy(Space* space) noexcept nogil
# Keeps memory that the driver refused to take back, to try again; with the grow lock.
cdef void orphan_add(Space* space, uint64_t memory) noexcept nogil
cdef void orphans_release(Space* space) noexcept nogil
# Room in the arrays, so that what follows cannot fail.
cdef bint granules_ready(Space* space, uint32_t count) noexcept nogil
cdef bint pages_ready(Space* space, uint32_t count) noexcept nogil
cdef bint retired_ready(Space* space, uint32_t count) noexcept nogil
cdef uint32_t page_slot(Space* space) noexcept nogil
# A page's view is retired, after retired_ready.
cdef void retired_add(Space* space, uint32_t page, uint32_t first, uint32_t stream_slot,
                      uint64_t epoch) noexcept nogil
# Number `i` of the retired views is unmapped, or will be before anything is mapped there.
cdef void retired_remove(Space* space, uint32_t i) noexcept nogil
cdef bint has_retired(const Space* space, uint32_t page) noexcept nogil
# The views beside the active ones, numbered below kept_count: the page, or NIL where there is none.
# No number changes while the space sleeps.
cdef uint32_t kept_count(const Space* space) noexcept nogil
cdef uint32_t kept_view(const Space* space, uint32_t i, uint32_t* first) noexcept nogil
# No graph uses its views any more: from here on they and the pages go as any. With the arena lock.
cdef void space_give_up_views(Space* space) noexcept nogil
# The page is gone, and its slot unused.
cdef void page_give_slot(Space* space, Page* page) noexcept nogil


# ---- How much time moving pages may take: a token bucket in nanoseconds --------------------------
#
# It fills with a share of the time that passes, up to 100 ms, and starts full. The time that moves
# took at the driver is taken out afterwards, which may overdraw it. The further it is overdrawn,
# the more pages are made instead of moves.


cdef struct MoveBudget:
    double share            # of the time that passes; 1 and more: no bound
    double saved            # nanoseconds
    uint64_t filled_at      # reading of the clock; 0: never

cdef void budget_init(MoveBudget* budget, double share) noexcept nogil
cdef void budget_fill(MoveBudget* budget, uint64_t now) noexcept nogil
# Bytes that may be made above the share instead of moves: 0 while there is time left.
cdef double budget_slack(MoveBudget* budget, uint64_t now, uint64_t live_peak) noexcept nogil
# Is half of it saved up? Then there is time for what can wait.
cdef bint budget_rested(MoveBudget* budget, uint64_t now) noexcept nogil
cdef void budget_spend(MoveBudget* budget, uint64_t nanoseconds) noexcept nogil
cdef void budget_earn(MoveBudget* budget, uint64_t nanoseconds) noexcept nogil


# ---- Driver calls behind pages, with the device's context current --------------------------------


cdef struct MappedPage:
    uint64_t begin          # of its active view
    uint64_t nbytes
    uint64_t memory         # physical handle of the driver

# Addresses that begin where a page of any size may.
cdef CUresult address_reserve(DeviceContext* context, uint64_t nbytes,
                              uint64_t* address) noexcept nogil
# Pages that are made from now on can be exported, in the whole process.
cdef void pages_make_exportable() noexcept nogil
cdef bint pages_are_exportable() noexcept nogil
cdef CUresult page_create(DeviceContext* context, uint64_t nbytes, uint64_t* memory) noexcept nogil
# Sets one device's access to every view of a page that has memory; stops where the driver refuses.
# With the grow lock.
cdef CUresult space_set_access(const Space* space, const CUmemAccessDesc* place) noexcept nogil
# Do bytes from an address on lie in one of its ranges? With the arena lock.
cdef bint space_reserves(const Space* space, uint64_t address, uint64_t size) noexcept nogil
# Caller holds `grow_lock`. Finds the page that has an address in its active view; False: none.
cdef bint space_page_around(const Space* space, uint64_t address, MappedPage* found) noexcept nogil
# Unmaps all retired views, through which no work is queued; stops where the driver refuses. Each is
# forgotten under the lock, unless it is NULL: no other thread uses the space.
cdef CUresult space_drop_retired(Space* space, Lock* lock) noexcept nogil
# Unmaps one view of a page.
cdef CUresult view_unmap(const Space* space, uint32_t first, uint32_t granules) noexcept nogil


# ---- What must hold of pages and the chunks over them; never on a fast path ----------------------


# 0, or the number, from 40 on, of the first invariant that does not hold.
cdef int pages_check(const Space* space) noexcept nogil
cdef const char* pages_invariant(int number) noexcept nogil
