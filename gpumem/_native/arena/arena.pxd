"""The life of an arena; arena/types has its state, locks and rules."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.debug_heap.types cimport DebugHeap
from gpumem._native.arena.types cimport ArenaCore, ArenaSettings, Block
from gpumem._native.backing cimport Backing
from gpumem._native.driver cimport CUgraph, CUresult
from gpumem._support.lease cimport Lease

cdef ArenaCore* arena_create(const ArenaSettings* settings, Backing backing) noexcept nogil
cdef int arena_close(ArenaCore* arena) noexcept nogil
# Before a close: waits for the streams that may still use memory which the close will release; for
# the device, if it cannot name one of them. ARENA_INTERRUPTED: Ctrl-C ended the wait, and the
# exception is set.
cdef int arena_close_wait(ArenaCore* arena) noexcept nogil
# Returns whether a close now would neither be refused nor wait for the device. Queries the driver
# for the streams that arenas know, as an allocation does.
cdef bint arena_is_idle(ArenaCore* arena) noexcept nogil
# The Arena object ends, and the objects that it kept alive; its blocks may live on.
cdef void arena_leave(ArenaCore* arena) noexcept nogil
# Releases the arenas that nothing refers to, if their work is done. Without `with_wait` memory that
# the driver releases only when the device is idle stays; with it the driver waits for the device,
# without a bound. `stays`: whether such memory is left. Returns whether an arena was released.
cdef bint arenas_release_retired(bint with_wait, bint* stays) noexcept nogil
# The same before an allocation with these flags grows. If the driver releases memory of its kind
# only when the device is idle, and no stream is at work, so that nothing waits, it releases those
# arenas, too, and returns True: then freed persistent regions can be released, and surplus ones of
# an arena with exact regions.
cdef bint arenas_release_before_growth(ArenaCore* arena, uint64_t nbytes,
                                       uint32_t flags) noexcept nogil
# Waits for the work that is queued on blocks which those arenas freed, then releases them.
cdef void arenas_release_after_work() noexcept nogil
# Returns whether every stream of a block of any arena has ended its work, on all devices, because
# each has pinned memory mapped. The driver's wait for the device is short then. Caller holds no
# lock.
cdef bint devices_are_quiet() noexcept nogil
# The last step of an allocation that found no memory: releases idle memory that the driver releases
# only when the device is idle, once all devices are quiet. If `status` is a refusal of the driver,
# also the host memory that arenas have kept for their next sleep. ARENA_OK: some was released, try
# again. ARENA_OVER_LIMIT: there is none, or `until` (ns of the monotonic clock) has passed.
cdef int release_once_quiet(ArenaCore* arena, int status, uint32_t flags,
                            uint64_t until) noexcept nogil

# Makes pages of a paged arena for `nbytes` more than it holds.
cdef int arena_prepare(ArenaCore* arena, uint64_t nbytes) noexcept nogil
# Releases idle memory. `after_work`: waits first for the work that was queued when blocks were
# freed.
cdef int arena_shrink(ArenaCore* arena, bint after_work, uint64_t* released) noexcept nogil

# Sets the bytes that the arena may hold from now on; 0: unlimited. An excess stays until a shrink.
cdef void arena_set_limit(ArenaCore* arena, uint64_t nbytes) noexcept nogil
# Sets the peaks of bytes in use and of reserved bytes to the values of now.
cdef void arena_reset_peaks(ArenaCore* arena) noexcept nogil

# Attaches a debug heap to an arena that has allocated no block; retains the heap.
cdef void arena_debug(ArenaCore* arena, DebugHeap* heap) noexcept nogil

cdef int arena_check(ArenaCore* arena) noexcept nogil

cdef Lease* arena_lease(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil
# From here on the block is freed on this stream, not on the one that it was allocated for.
cdef void arena_move_lease(ArenaCore* arena, Lease* lease, uint32_t stream_slot) noexcept nogil

# ---- Graph pools: memory that a graph may write whenever it is launched --------------------------
#
# A *graph pool* is an arena of its own, a child of the captured stream's: a slot for
# each captured stream and no reuse between them, so that it neither records nor polls events, and
# memory freed inside a capture stays in the pool. `max_mem` of the parent bounds both together.
# The pool of a paged arena has pages, which move as the arena's do but keep every view: the graph's
# addresses stay valid (see _native/pages/types.pxd). Moves have no budget of time, since a capture
# happens once. Otherwise, and where work outside of captures uses it too, it has plain regions.
#
# It sleeps with its parent, or with the arena of a tag, where that can sleep: regions are physical
# handles then. Blocks with another tag come from a further pool, which the first one has. Each
# graph that retains it counts as a reference, dropped by the driver with the graph and its last
# instance.

# A graph pool for blocks with the tag of an arena, with its reference; NULL: out of host memory, or
# the arena's memory is not plain memory of the device and no other backing is given. `part_of`: the
# pool that it belongs to; NULL: none. Without `splits` a block is all of the region or free block
# that it is allocated from. `captured`: only captures use it.
cdef ArenaCore* pool_create(ArenaCore* owner, ArenaCore* part_of, const Backing* given,
                            bint splits, bint captured) noexcept nogil
# Makes a fresh arena, without a region, a graph pool. Caller holds no lock, nor the interpreter's.
cdef void pool_adopt(ArenaCore* pool, ArenaCore* owner, ArenaCore* part_of) noexcept nogil
# The part of a pool that serves the tag which the calling context has open; made at the first use,
# and kept by the pool. NULL: out of host memory.
cdef ArenaCore* pool_for_tag(ArenaCore* pool) noexcept nogil
# Before a capture, while none is under way: makes memory that was freed earlier, and that no
# unfinished work uses, free for all streams of the pool.
cdef void pool_begin(ArenaCore* pool) noexcept nogil
# No graph will be launched any more: freed blocks can be released to the driver, one by one.
cdef void pool_end(ArenaCore* pool) noexcept nogil
# The pool lives as long as the graph and its instances. Legal while the graph is captured.
cdef CUresult pool_retain_with(ArenaCore* pool, CUgraph graph) noexcept nogil
# Allocates exactly these bytes, where an earlier block of a graph pool was. The work of its streams
# is done. ARENA_STALE: the bytes are not free.
cdef int arena_allocate_range(ArenaCore* arena, uint64_t address, uint64_t size, uint64_t requested,
                              uint32_t stream_slot, Block* block) noexcept nogil
