"""The memory of a debug heap's blocks: guards and patterns, written and examined.

With `turn` held. The CPU does it where it may; else the driver's copies, on a stream of the heap's
own that waits for no other, so that nothing here waits for work of the user's. Every function
returns the driver's code, and has done its work when it returns.
"""

from gpumem._arena_heap_types cimport DebugHeap, HeapBlock, HeapFinding
from gpumem._driver cimport CUresult, Place

# Writes the guards, and the fresh pattern between them.
cdef CUresult block_prepare(DebugHeap* heap, Place* place, const HeapBlock* block) noexcept nogil
# Looks at the guards; of a resting block also at its bytes. NULL in `findings`: all is well; else a
# list, and what was wrong is as it should be again. NULL for lack of host memory, too.
cdef CUresult block_examine(DebugHeap* heap, Place* place, const HeapBlock* block,
                            HeapFinding** findings) noexcept nogil
# Writes the freed pattern over the user's bytes.
cdef CUresult block_lay(DebugHeap* heap, Place* place, const HeapBlock* block) noexcept nogil
# Gives up the stream and the staging.
cdef void zones_end(DebugHeap* heap, Place* place) noexcept nogil
