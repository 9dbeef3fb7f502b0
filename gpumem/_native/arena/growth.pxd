"""Growth of an arena. Caller holds `grow_lock`, not `lock`, unless a comment says otherwise."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.types cimport ArenaCore, Block
from gpumem._native.backing cimport Backing
from gpumem._native.bfc cimport Bfc
from gpumem._native.driver cimport CUresult
from gpumem._native.pages cimport MappedPage

# Makes a new region, or pages, and allocates the block from them in one step. `own_region`: a
# region of exactly this block; `flags` are AllocateFlags.
cdef int grow(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot, bint own_region,
              uint32_t flags, Block* block) noexcept nogil
# Polls the events once more: those of idle streams, recorded for this allocation, have completed
# since. Search the table after it.
cdef void release_before_growth(ArenaCore* arena, uint64_t nbytes,
                                uint32_t stream_slot) noexcept nogil
# Of an arena with exact regions. Bounds the bytes that it may hold without use: by its share above
# the live peak, or by the live peak itself unless the streams are `quiet`. Returns whether a new
# region would exceed that. `lock` alone is enough. Search the table after it.
cdef bint bound_idle(ArenaCore* arena, uint64_t nbytes, bint quiet) noexcept nogil
# Then releases the idle regions that would be too many beside the new one, or beyond a limit. The
# driver waits for the device.
cdef void release_surplus(ArenaCore* arena, uint64_t nbytes) noexcept nogil
# Caller holds `lock`. Allocates a block as low as swaps of idle pages allow; see bfc_allocate.
cdef uint32_t allocate_lower(ArenaCore* arena, Bfc* table, uint64_t nbytes, uint32_t stream_slot,
                             int* status) noexcept nogil
# Returns the backing that an allocation with these AllocateFlags is made from.
cdef Backing* backing_for(ArenaCore* arena, uint32_t flags) noexcept nogil
# From here on a block's region counts as made for transports, and is released as those are.
# CUDA_ERROR_OUT_OF_MEMORY: the host has no memory for that.
cdef CUresult list_for_transport(ArenaCore* arena, uint64_t address) noexcept nogil
# Lets a further device access memory that the driver maps for the arena, now and later. A refusal
# of cuMemSetAccess leaves the list of devices as it was.
cdef CUresult arena_add_peer(ArenaCore* arena, int device) noexcept nogil
# Caller holds no lock. Finds the page that an address of a live block lies in. It stays while the
# block lives and its tag is awake. False: the memory is not pages.
cdef bint arena_page_around(ArenaCore* arena, uint64_t address, MappedPage* found) noexcept nogil
# Returns whether a growth may succeed after idle memory was released.
cdef bint shrink_may_help(const ArenaCore* arena, uint64_t nbytes, int status) noexcept nogil
# Returns whether memory is out, so that memory of other streams may serve the block once it is
# free.
cdef bint memory_is_out(const ArenaCore* arena, uint64_t nbytes, int status) noexcept nogil
# Waits a moment if the driver lacks memory that an ended process of the arena's node had; False:
# there is none. No lock is held. `until` is that of await_refund.
cdef bint refund_may_help(ArenaCore* arena, int status, uint64_t* until) noexcept nogil
# Makes pages of a paged arena for `nbytes` more, free for every stream.
cdef int prepare_pages(ArenaCore* arena, uint64_t nbytes) noexcept nogil

# ---- Out of memory: waiting on the host for the work of other streams ----------------------------
#
# The last resort, when the driver and every other source have refused. Caller holds no lock.
# The wait is bounded, because a stream may itself wait for what this thread does next; an event
# that did not complete in one wait is not waited for again until it has completed.

cdef enum:
    FIRST_PAUSE = 20000         # ns between two polls of the driver; doubles
    LONGEST_PAUSE = 1000000

# Waits for work that holds memory which a block of `nbytes` may use once the work is done.
# ARENA_OK: memory has become free since, by that work or by another thread, or the limit has
# changed: try again. ARENA_OVER_LIMIT: neither. `flags` are AllocateFlags. `until` is 0 at first,
# then the moment (ns of the monotonic clock) at which the allocation fails.
cdef int wait_for_streams(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot, uint32_t flags,
                          uint64_t* until) noexcept nogil
# Pauses; True: Ctrl-C ends the wait that the pause is a part of.
cdef bint pause(uint64_t nanoseconds, uint32_t flags) noexcept nogil
