"""The debug heap beneath an arena: guards, patterns, quarantine; arena/debug_heap/types has the
rules.

It stands between the arena's own functions and their callers, so that Python's buffers, leases and
the hooks of other libraries use it alike. An arena passed here has a heap. Findings stay in the
heap until `heap_findings` of arena/debug_heap/guards takes them.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.debug_heap.types cimport DebugHeap, HeapHooks, HeapSettings
from gpumem._native.arena.types cimport ArenaCore, Block
from gpumem._native.driver cimport CUresult
from gpumem._support.lease cimport Uses

# The arena's function that allocates a block; `flags` are AllocateFlags. Returns an ArenaStatus.
ctypedef int (*HeapSource)(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot, uint32_t flags,
                           Block* block) noexcept nogil

# NULL: out of host memory. The caller has one reference, ended by heap_drop.
cdef DebugHeap* heap_create(const HeapSettings* settings, const HeapHooks* hooks) noexcept nogil
cdef void heap_drop(DebugHeap* heap) noexcept nogil
# Attaches a heap to an arena that has allocated no block; retains the heap. `free_block` frees a
# block of the arena, which is its first argument.
cdef void heap_attach(ArenaCore* arena, DebugHeap* heap,
                      int (*free_block)(void*, uint64_t, uint32_t) noexcept nogil) noexcept nogil
# The arena ends: no thread uses it any more.
cdef void heap_detach(ArenaCore* arena) noexcept nogil

# Allocates a block between guards; without guards if other processes may be given it. May wait, as
# the arena's slow path; empties the quarantine before memory is out.
cdef int heap_allocate(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot, uint32_t flags,
                       HeapSource source, Block* block) noexcept nogil
# Leaves the user this part of a live block; the other bytes become guards.
cdef CUresult heap_narrow(ArenaCore* arena, uint64_t handle, uint64_t address,
                          uint64_t nbytes) noexcept nogil
# Takes ownership of `uses`; NULL: none. If its streams are done the block is quarantined, which may
# call the driver, but waits for no lock that a thread may hold for long.
cdef int heap_free(ArenaCore* arena, uint64_t handle, uint32_t stream_slot,
                   Uses* uses) noexcept nogil
# An address was freed where no block of a hook begins: reports it to the heap that has it.
cdef void heap_bad_free(uint64_t address) noexcept nogil

# Examines the blocks that no stream uses any more, and frees those to the arena that the quarantine
# has no room for.
cdef void heap_pump(ArenaCore* arena) noexcept nogil
# The same with at most `most` bytes in quarantine. Returns the bytes freed to the arena.
cdef uint64_t heap_release(ArenaCore* arena, uint64_t most) noexcept nogil
# Waits for the device, and frees every block that its user has freed.
cdef void heap_drain(ArenaCore* arena) noexcept nogil
# Examines every block now; waits for nothing. The driver's code if it refused.
cdef CUresult heap_check(ArenaCore* arena) noexcept nogil
# For a sleep of the arena: acquires `turn`, so that no thread examines memory until heap_unlock
# releases it, and drains the heap.
cdef void heap_lock_drained(ArenaCore* arena) noexcept nogil
cdef void heap_unlock(ArenaCore* arena) noexcept nogil
