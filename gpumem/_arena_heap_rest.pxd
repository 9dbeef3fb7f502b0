"""The quarantine of a debug heap: from a free to the arena. With `turn` held.

Which stream has come how far is the arena's knowledge: a free is a stamp of an epoch, as every free
is one, and the events behind epochs are recorded and asked here, where the driver may be called.
"""

from libc.stdint cimport uint64_t

from gpumem._arena_heap_types cimport DebugHeap, HEAP_FREED, HEAP_RESTING, HeapBlock
from gpumem._arena_types cimport ArenaCore
from gpumem._driver cimport CUresult

cdef inline bint holds_any(const DebugHeap* heap) noexcept nogil:
    return heap.count[<int>HEAP_FREED] + heap.count[<int>HEAP_RESTING] != 0

# Examines what its streams have finished with, and gives back what is beyond `most` bytes, which it
# counts. `forced`: all streams are done, and what the driver does not let be seen goes back unseen.
cdef uint64_t turn_over(ArenaCore* arena, uint64_t most, bint forced) noexcept nogil
# Waits for the device, and gives everything back.
cdef void drain(ArenaCore* arena) noexcept nogil
# Notes what is wrong with a block. The driver's code if it refused.
cdef CUresult look_at(ArenaCore* arena, const HeapBlock* block) noexcept nogil
