"""The life of an arena; arena/types has its state, locks and rules."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.bookkeeping cimport BlockCopy
from gpumem._native.arena.debug_heap.types cimport DebugHeap
from gpumem._native.arena.types cimport ArenaCore, ArenaSettings, Block
from gpumem._native.backing cimport Backing
from gpumem._native.driver cimport CUgraph, CUresult
from gpumem._support.lease cimport Lease

cdef ArenaCore* arena_create(const ArenaSettings* settings, Backing backing) noexcept nogil
cdef int arena_close(ArenaCore* arena) noexcept nogil
# Before a close: waits for the streams that may still use memory which it will release; for the
# device, if it cannot name one of them. ARENA_INTERRUPTED: Ctrl-C ended that, and the exception is
# set.
cdef int arena_close_wait(ArenaCore* arena) noexcept nogil
# Would a close now neither be refused nor wait for the device? Asks the driver; as an allocation,
# only the streams that arenas know.
cdef bint arena_is_idle(ArenaCore* arena) noexcept nogil
# The Arena object ends, and what it kept alive: its blocks may live on.
cdef void arena_leave(ArenaCore* arena) noexcept nogil
# Releases the arenas that nothing refers to, once their work is done; without a wait, so that
# memory which the driver takes back only when the device is idle stays. Returns whether it does.
cdef bint arenas_release_retired() noexcept nogil
# The same before an allocation with these flags grows. If its memory is of a kind that the driver
# takes back only when the device is idle, and no stream is at work, so that nothing waits, it
# releases those arenas, too, and returns True: then freed persistent regions can be released.
cdef bint arenas_release_before_growth(ArenaCore* arena, uint32_t flags) noexcept nogil
# The same with that memory: the driver waits for the device, without a bound. Returns whether an
# arena was released.
cdef bint arenas_release_retired_wait() noexcept nogil
# The same, once the work that is queued on the blocks that those arenas freed has completed.
cdef void arenas_release_after_work() noexcept nogil
# Has every stream that an arena has a block of ended its work, on all devices, as each has pinned
# memory mapped? The driver's wait for the device is short then. Without a lock.
cdef bint devices_are_quiet() noexcept nogil
# The last step of an allocation that found no memory: releases idle memory that the driver takes
# back only when the device is idle, once all devices are quiet. ARENA_OK: some was released, try
# again. ARENA_OVER_LIMIT: there is none, or `until` (ns of the monotonic clock) has passed.
cdef int release_once_quiet(ArenaCore* arena, uint32_t flags, uint64_t until) noexcept nogil

# Of a paged arena: makes pages for so many bytes more than it holds.
cdef int arena_prepare(ArenaCore* arena, uint64_t nbytes) noexcept nogil
cdef int arena_shrink(ArenaCore* arena, uint64_t* released) noexcept nogil
# Waits for the work behind which blocks were freed, then shrinks.
cdef int arena_shrink_after_work(ArenaCore* arena, uint64_t* released) noexcept nogil

# Bytes it may hold from now on; 0: unlimited. An excess stays until a shrink.
cdef void arena_set_limit(ArenaCore* arena, uint64_t nbytes) noexcept nogil
# The highest of bytes in use and reserved are what they are now.
cdef void arena_reset_peaks(ArenaCore* arena) noexcept nogil

# Puts a debug heap in front of an arena that has handed nothing out; takes a reference.
cdef void arena_debug(ArenaCore* arena, DebugHeap* heap) noexcept nogil

cdef int arena_check(ArenaCore* arena) noexcept nogil
# Copies every chunk that names memory, region by region in address order; the caller frees it.
cdef BlockCopy* arena_copy_blocks(ArenaCore* arena, uint32_t* count) noexcept nogil

cdef Lease* arena_lease(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil
# The block is freed on another stream than it was taken for.
cdef void arena_move_lease(ArenaCore* arena, Lease* lease, uint32_t stream_slot) noexcept nogil

# ---- Graph pools: memory that a graph may write whenever it is launched --------------------------
#
# A *graph pool* is an arena of its own, a child of the one whose stream is captured: a slot for
# each captured stream and no reuse between them, so that it neither records nor polls events, and
# memory freed inside a capture stays in the pool. `max_mem` of the parent bounds both together.
# Beside a paged arena it has pages, which move as the arena's do but keep every view: the graph's
# addresses stay valid (see _native/pages/types.pxd). Moves have no budget of time, since a capture
# happens once. Otherwise, and where work outside of captures uses it too, it has plain regions.
#
# It sleeps with its parent, or with the arena of a tag, where that can sleep: regions are physical
# handles then. Blocks with another tag come from a further pool, which the first one has. Each
# graph that retains it counts as a reference, dropped by the driver with the graph and its last
# instance.

# A graph pool for blocks with the tag of an arena, with its reference; NULL: out of host memory, or
# the arena's memory is not plain memory of the device and no other backing is given. `part_of`: the
# pool that it belongs to; NULL: it is one by itself. `splits`: else a block is all of the region or
# block that it is put in. `captured`: only captures use it.
cdef ArenaCore* pool_create(ArenaCore* owner, ArenaCore* part_of, const Backing* given,
                            bint splits, bint captured) noexcept nogil
# Makes a fresh arena, without a region, such a pool. No lock is held, nor the interpreter's.
cdef void pool_adopt(ArenaCore* pool, ArenaCore* owner, ArenaCore* part_of) noexcept nogil
# The part of a pool that serves the tag which the calling thread has open; made at the first use,
# and kept by the pool. NULL: out of host memory.
cdef ArenaCore* pool_for_tag(ArenaCore* pool) noexcept nogil
# Before a capture, none being under way: what was freed earlier, and has no unfinished work behind
# it, is free for all its streams.
cdef void pool_begin(ArenaCore* pool) noexcept nogil
# No graph will be launched any more: freed blocks can be released to the driver, one by one.
cdef void pool_end(ArenaCore* pool) noexcept nogil
# Is a part of it asleep, so that its graphs would touch addresses without memory?
cdef bint pool_sleeps(ArenaCore* pool) noexcept nogil
# The pool lives as long as the graph and what was instantiated of it. Legal while it is captured.
cdef CUresult pool_retain_with(ArenaCore* pool, CUgraph graph) noexcept nogil
# Allocates exactly these bytes, where an earlier block of a graph pool was; the work of its streams
# is done. ARENA_STALE: they are not free.
cdef int arena_allocate_range(ArenaCore* arena, uint64_t address, uint64_t size, uint64_t requested,
                              uint32_t stream_slot, Block* block) noexcept nogil
