"""Address spaces and their pages: idle pages, moves of their memory, driver calls."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.bfc cimport Bfc
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
# Notes for the search for swaps that a view has become dormant and the other one active.
cdef void note_dormant(Space* space, const Page* page) noexcept nogil
# Updates the idle pages of the chunk that was cut off above a chunk.
cdef void see_above(Space* space, uint32_t index) noexcept nogil
# Turns granules that are a hole into free memory.
cdef void fill_granules(Space* space, uint32_t first, uint32_t granules, uint32_t stream_slot,
                        uint64_t epoch) noexcept nogil
cdef uint32_t hole_at(const Space* space, uint64_t address) noexcept nogil
# Makes an empty space, without a driver call. `first_bytes` of addresses are reserved when needed.
cdef void space_create(Space* space, Bfc* table, DeviceContext* context, const Access* access,
                       uint64_t* calls, EventSource* events, uint64_t first_bytes,
                       bint large) noexcept nogil
# Records an event of a page, if anything records: its memory was made, released or moved to a
# granule from `origin` (NIL: it did not move). Caller holds the arena lock.
cdef void page_note(const Space* space, const Page* page, uint32_t kind, uint32_t at,
                    uint32_t origin) noexcept nogil
# Reserves addresses that hold a block of `size` bytes; less than planned if they are scarce.
cdef CUresult range_reserve(const Space* space, uint64_t size, Range* fresh) noexcept nogil
# Adds a reserved range. False: the host has no memory, and the reservation is still the caller's.
cdef bint space_add_range(Space* space, const Range* fresh) noexcept nogil
# The arena is not used any more.
cdef void space_destroy(Space* space) noexcept nogil
# Keeps memory that the driver refused to release, to try again. Caller holds `grow_lock`.
cdef void orphan_add(Space* space, uint64_t memory) noexcept nogil
cdef void orphans_release(Space* space) noexcept nogil
# Make room in the arrays, so that the changes that follow cannot fail.
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
# Inactive views have numbers below page_count + retired_count. Returns a view's page, or NIL where
# there is none. No number changes while the space sleeps.
cdef uint32_t kept_view(const Space* space, uint32_t i, uint32_t* first) noexcept nogil
# No graph uses its views any more: from then on they are unmapped, and pages are released, as in
# any space. Caller holds the arena lock.
cdef void space_give_up_views(Space* space) noexcept nogil
# Frees the slot of a released page.
cdef void page_give_slot(Space* space, Page* page) noexcept nogil


# ---- How much time moving pages may take: a token bucket in nanoseconds --------------------------
#
# It fills with a share of the time that passes, up to 100 ms, and starts full. The driver's time
# for moves is subtracted afterwards, which may overdraw it. The further it is overdrawn, the more
# pages are made instead of moves.


cdef struct MoveBudget:
    double share            # of the time that passes; 1 and more: no bound
    double saved            # nanoseconds
    uint64_t filled_at      # reading of the clock; 0: never

cdef void budget_init(MoveBudget* budget, double share) noexcept nogil
cdef void budget_fill(MoveBudget* budget, uint64_t now) noexcept nogil
# Returns the bytes of pages that may be made above the share instead of moves: 0 while there is
# time left.
cdef double budget_slack(MoveBudget* budget, uint64_t now, uint64_t live_peak) noexcept nogil
# Whether half of it is saved: then there is time for work that can wait.
cdef bint budget_rested(MoveBudget* budget, uint64_t now) noexcept nogil
cdef void budget_spend(MoveBudget* budget, uint64_t nanoseconds) noexcept nogil
cdef void budget_earn(MoveBudget* budget, uint64_t nanoseconds) noexcept nogil


# ---- Driver calls of pages; the device's context is current --------------------------------------


cdef struct MappedPage:
    uint64_t begin          # of its active view
    uint64_t nbytes
    uint64_t memory         # physical handle of the driver

# Reserves addresses that are aligned for pages of any size.
cdef CUresult address_reserve(DeviceContext* context, uint64_t nbytes,
                              uint64_t* address) noexcept nogil
# Pages that are made from now on can be exported, in the whole process.
cdef void pages_make_exportable() noexcept nogil
cdef bint pages_are_exportable() noexcept nogil
cdef CUresult page_create(DeviceContext* context, uint64_t nbytes, uint64_t* memory) noexcept nogil
# Sets one device's access to every view of a page that has memory; stops where the driver refuses.
# Caller holds `grow_lock`.
cdef CUresult space_set_access(const Space* space, const CUmemAccessDesc* place) noexcept nogil
# Whether bytes from an address on lie in one of its ranges. Caller holds the arena lock.
cdef bint space_reserves(const Space* space, uint64_t address, uint64_t size) noexcept nogil
# Caller holds `grow_lock`. Finds the page that has an address in its active view; False: none.
cdef bint space_page_around(const Space* space, uint64_t address, MappedPage* found) noexcept nogil
# Unmaps all retired views, through which no work is queued; stops where the driver refuses. Each is
# forgotten under the lock, unless it is NULL: no other thread uses the space.
cdef CUresult space_drop_retired(Space* space, Lock* lock) noexcept nogil
# Unmaps one view of a page.
cdef CUresult view_unmap(const Space* space, uint32_t first, uint32_t granules) noexcept nogil


# ---- Invariants of pages and the chunks over them; never on a fast path --------------------------


# Returns 0, or the number, from 40 on, of the first broken invariant.
cdef int pages_check(const Space* space) noexcept nogil
cdef const char* pages_invariant(int number) noexcept nogil
