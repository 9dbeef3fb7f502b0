"""The debug heap of an arena: its record of each block, and its findings.

A block of a debugged arena lies between two guards:

    base                   address              address + requested
     | ... | front guard    | the user's bytes   | rear guard, from the first byte behind them |

Its states; each change is one function of arena/debug_heap/heap.pyx:
  live      handed out; guards are written and the user's bytes hold the fresh pattern
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

from gpumem._native.driver cimport CUstream
from gpumem._support.lease cimport Uses
from gpumem._support.lock cimport Lock

cdef enum:
    HEAP_FRAMES = 12        # return addresses that are stored where the interpreter has no stack
    HEAP_SEEN = 16          # wrong bytes that a finding shows
    HEAP_FINDINGS = 1000    # that wait to be read at most; more are only counted
    HEAP_NO_STACK = 0xFFFFFFFF  # of a site whose stack is not stored

# Where a call came from.
cdef struct HeapSite:
    uint64_t thread         # as threading.get_ident has it
    uint32_t stack          # number of the interpreter's stack, by `HeapHooks.stack`; 0: none
    uint32_t depth          # of `frames`
    void* frames[HEAP_FRAMES]

cdef enum HeapState:
    HEAP_LIVE
    HEAP_FREED
    HEAP_QUARANTINED
    HEAP_STATES

cdef struct HeapBlock:
    uint64_t handle         # of the arena's block
    uint64_t base           # of the arena's block, and its bytes: guards and padding included
    uint64_t size
    uint64_t address        # of the user's first byte
    uint64_t requested      # bytes
    uint64_t event_address  # the same in recordings: before the user's alignment
    uint64_t event_bytes
    uint64_t number         # of the allocation in its heap, from 1
    HeapState state
    bint guarded            # else only counted, not examined: other processes may map it
    bint strayed            # freed on a stream that was neither its own nor recorded
    bint orphaned           # a stream that it waits for is gone, which was reported
    uint32_t slot           # of the stream that it was allocated for; retained
    uint32_t freed_slot     # of the stream that it was freed on; retained
    uint64_t stream         # their native handles, for reports
    uint64_t freed_stream
    uint64_t epoch          # of each at the free
    uint64_t freed_epoch
    Uses* uses              # recorded streams, each with its epoch at the free; retained
    HeapSite taken
    HeapSite freed
    HeapBlock* chained      # in the table of handles
    HeapBlock* before       # in the list of its state
    HeapBlock* after

cdef enum HeapFault:
    HEAP_OVERRUN            # a byte behind the block was written
    HEAP_UNDERRUN           # a byte before it
    HEAP_LATE_WRITE         # a byte of a freed block
    HEAP_STRAY_WRITE        # the same of one that was freed on a stream not its own nor recorded
    HEAP_DOUBLE_FREE
    HEAP_INVALID_FREE       # of an address inside a live block
    HEAP_STREAM_GONE        # a stream that a freed block waits for names nothing

cdef struct HeapFinding:
    HeapFault fault
    HeapBlock block         # as it was then; its pointers are not to be followed
    int64_t offset          # of the first wrong byte from the block's first
    uint64_t wrong          # how many bytes are wrong
    uint8_t expected
    uint8_t seen[HEAP_SEEN]     # from the first wrong one on
    uint32_t seen_count
    uint64_t address        # passed to a bad free, or the handle of a stream that is gone
    HeapSite again          # where the bad free was called
    HeapFinding* next

cdef struct HeapSettings:
    uint64_t guard          # bytes before and behind each block, a multiple of 256
    uint64_t quarantine     # bytes in quarantine at most, guards and padding included
    int guard_byte
    int fresh_byte          # in a new block; -1: not written
    int freed_byte          # in a quarantined block; -1: neither written nor examined
    uint32_t stack_depth    # calls of the interpreter's stack that are stored; 0: none
    uint32_t stack_every    # of so many allocations and frees one stores its stack
    bint by_cpu             # the CPU touches the memory; else the driver's copies

# Functions of the layer above: called without a lock, except that `found` may be under `turn`.
cdef struct HeapHooks:
    # Stores the calling thread's stack of so many calls and returns its number; 0: it has none.
    uint32_t (*stack)(uint32_t depth) noexcept nogil
    void (*found)() noexcept nogil      # there is a finding; may only schedule its report

cdef struct DebugHeap:
    int32_t references      # of the arena and of Python (atomic)
    HeapSettings settings
    HeapHooks hooks
    # Frees a block, whose charge has ended, to its arena: an `ArenaCore*`, handle, slot.
    int (*free_block)(void* arena, uint64_t handle, uint32_t slot) noexcept nogil
    Lock turn
    Lock lock
    bint gone               # its arena has ended
    uint64_t numbers        # blocks handed out so far
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
    uint64_t lost_findings  # beyond HEAP_FINDINGS, or out of host memory
    CUstream stream         # the heap's own, non-blocking; NULL: none yet
    uint8_t* staging        # for copies from the device; NULL: none yet
    DebugHeap* next         # list of all heaps
