"""The debug heap of an arena: its record of each block, and its findings.

A block of a debugged arena lies between two guards:

    base                   address              address + requested
     | ... | front guard    | the user's bytes   | rear guard, from the first byte after them  |

Its states; each change is one function of arena/debug_heap/heap.pyx:
  live      in use; guards are written and the user's bytes held the fresh pattern at first
  freed     by its user, perhaps in a finalizer; not examined since, because streams were not done
            or another thread had the turn
  quarantined  the stream of the free and recorded ones have reached the free; guards were
            examined, and the user's bytes hold the freed pattern
A quarantined block is freed to the arena once its own stream, too, has reached the free, and its
bytes and guards were examined again. So free memory of the arena is idle, and a write to a
quarantined block is a write after free.

Locks: `turn` comes before every lock of the arena, and is waited for without the interpreter lock;
its holder reads and writes the memory of blocks, and moves blocks into the quarantine and out of
the heap. `lock` comes last and protects the lists and the table: a free takes only that one, and
the turn if no thread has it.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uint8_t

from gpumem._native.arena.values cimport (
    HEAP_DOUBLE_FREE, HEAP_FINDINGS, HEAP_FRAMES, HEAP_FREED, HEAP_INVALID_FREE, HEAP_LATE_WRITE,
    HEAP_LIVE, HEAP_NO_STACK, HEAP_OVERRUN, HEAP_QUARANTINED, HEAP_SEEN, HEAP_STATES,
    HEAP_STRAY_WRITE, HEAP_STREAM_GONE, HEAP_UNDERRUN, HeapBlock, HeapFault, HeapFinding, HeapHooks,
    HeapSettings, HeapSite, HeapState,
)
from gpumem._native.driver cimport CUstream
from gpumem._support.lease cimport Uses
from gpumem._support.lock cimport Lock

cdef struct DebugHeap "DebugHeap":
    int32_t references      # of the arena and of Python (atomic)
    HeapSettings settings
    HeapHooks hooks
    # Frees a block to its arena after its charge was refunded: an `ArenaCore*`, handle, slot.
    int (*free_block)(void* arena, uint64_t handle, uint32_t slot) noexcept nogil
    Lock turn
    Lock lock
    bint gone               # its arena has ended
    uint64_t numbers        # blocks allocated so far
    uint64_t sites          # calls so far that might have stored a stack (atomic)
    HeapBlock** table       # by handle, chained
    uint64_t table_mask
    HeapBlock* first[HEAP_STATES]       # the oldest
    HeapBlock* last[HEAP_STATES]
    uint64_t count[HEAP_STATES]
    uint64_t requested[HEAP_STATES]     # bytes of users
    uint64_t held[HEAP_STATES]          # bytes of the arena's blocks
    HeapFinding* findings   # the oldest first
    HeapFinding* last_finding
    uint32_t finding_count
    uint64_t lost_findings  # above HEAP_FINDINGS, or out of host memory
    CUstream stream         # the heap's own, non-blocking; NULL: none yet
    uint8_t* staging        # for copies from the device; NULL: none yet
    DebugHeap* next         # list of all heaps
