"""Plain values that pass through the arena's face, and the names of its opaque structs.

Other folders reach these names through `api.pxd`.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uint8_t

from gpumem._native.bfc cimport Chunk, Region
from gpumem._support.atomics cimport load32
from gpumem._support.lease cimport Uses

cdef extern from *:
    """
    typedef struct AllocatorHook AllocatorHook;
    typedef struct ArenaCore ArenaCore;
    typedef struct ArenaSpan ArenaSpan;
    typedef struct DebugHeap DebugHeap;
    typedef struct SpanView SpanView;
    """
    ctypedef struct AllocatorHook:
        pass
    ctypedef struct ArenaCore:
        pass
    ctypedef struct ArenaSpan:
        pass
    ctypedef struct DebugHeap:
        pass
    ctypedef struct SpanView:
        pass

# A macro of every C file that Cython writes: the compiler lays code for a rare condition out of the
# way.
cdef extern from *:
    bint unlikely(bint condition) noexcept nogil

cdef enum:
    MAX_STREAMS = 65536         # slots of one arena

# Which stream a slot names, and whether the driver may be given its handle. A caller that names a
# handle brings its slot from any state to STREAM_NAMED. A fresh slot is vacant.
cdef enum StreamState:
    STREAM_VACANT = 0           # no stream: the next new one gets the slot
    STREAM_NAMED = 1            # a stream that exists
    # A stream that may have ended since the Arena object left; its work may be under way.
    STREAM_LEFT = 2
    STREAM_DRAINED = 3          # a stream that was reset, its work done; it may have ended

cdef enum ArenaStatus:
    ARENA_OK = 0
    ARENA_OVER_LIMIT = 1        # max_mem leaves no room for the block
    ARENA_DRIVER_REFUSED = 2    # the driver has no memory left, or failed: see `last_code`
    ARENA_NO_METADATA = 3       # out of host memory for metadata
    ARENA_STALE = 4             # the handle names no live block
    ARENA_DEAD = 5              # the arena belongs to the parent process
    ARENA_IN_USE = 6
    ARENA_MISS = 7              # the fast path cannot serve it; nothing changed
    ARENA_CLOSED = 8            # closed, or about to be
    ARENA_BEYOND_DEVICE = 9     # the device does not have that much memory
    ARENA_NO_COPY = 10          # out of host memory for a copy of the live bytes
    ARENA_CAPTURING = 11        # the stream captures a graph: a graph pool has to serve it
    # The driver refused to release a page, and then to restore those already released.
    ARENA_HALF_ASLEEP = 12
    ARENA_OVER_BUDGET = 13      # its budget refused `over_budget` bytes
    ARENA_INTERRUPTED = 14      # a signal's handler raised: the exception is set
    ARENA_TAGGED = 15           # the calling context allocates under a tag: see `tag_now`
    ARENA_NO_STREAM_SLOT = 16   # all are in use, and none can be vacated; nothing changed
    ARENA_DETOUR = 17           # the fast path leaves it to detours; nothing changed
    ARENA_ASLEEP = 18           # asleep, or about to be

cdef enum AllocateFlags:        # of the slow path
    ALLOCATE_PERSISTENT = 1     # in a region of exactly this block
    ALLOCATE_SHAREABLE = 2      # the same, and other processes may be given it
    ALLOCATE_TRANSPORT = 16     # the same, in one driver allocation, which never moves
    ALLOCATE_ALONE = 19         # any of these three
    ALLOCATE_NO_WAIT = 4        # does not wait for other streams' work
    ALLOCATE_INTERRUPTIBLE = 8  # Ctrl-C ends that wait, with ARENA_INTERRUPTED

cdef enum:                      # memory apart from regions and pages; a sleep leaves it
    APART_SHAREABLE             # other processes may be given it
    APART_TRANSPORT             # of a paged arena: legacy IPC and network cards can register it
    APART_KINDS

cdef enum ArenaState:           # unless open, no allocation succeeds
    STATE_OPEN = 0
    STATE_CLOSING = 1           # with its tags and graph pools, if none of them is in use
    # In the next two no view and no access of a block may begin. Frees are allowed.
    STATE_FALLING = 2           # it will sleep, if no view and no access is left
    STATE_ASLEEP = 3            # its bytes are in a copy, or dropped
    STATE_CLOSED = 4

cdef enum ExtendStrategy:
    EXTEND_NEXT_POWER_OF_TWO = 0
    EXTEND_SAME_AS_REQUESTED = 1

cdef enum StreamReuse:
    REUSE_COMPLETED = 0         # another stream's block, once its event is known to be done
    REUSE_WAIT = 1              # at once: the requesting stream waits for the event on the device
    REUSE_NEVER = 2             # only the stream of a block reuses it, until that stream is reset

cdef struct ArenaSettings:
    uint64_t max_mem                # bytes at first, see family_limit; 0: unlimited
    uint64_t initial_chunk          # bytes of the first region
    uint64_t initial_growth_chunk   # bytes of the next region after a shrink
    uint64_t max_extend             # cap of doubling, bytes
    uint64_t max_dead               # bytes, "ort" split rule
    ExtendStrategy extend
    StreamReuse reuse
    bint ort_split
    bint exact                      # large blocks have regions of their own sizes
    bint paged                      # blocks live in address ranges backed by pages that move
    double move_share               # reserved memory may pass the live peak by this share unmoved
    double move_budget              # of the time may go into moving; 1: no bound
    uint64_t oom_wait               # ns to wait for other streams' work before memory is out
    bint passthrough                # every block is a driver allocation of its own

# An ArenaCore begins with these fields, which callers read before every allocation.
cdef struct ArenaFront:
    uint32_t state
    int32_t detour

cdef inline uint32_t arena_state(const ArenaCore* arena) noexcept nogil:
    # An unlocked read; allocation re-checks it under the arena lock.
    return load32(&(<const ArenaFront*>arena).state)

cdef inline bint arena_is_open(const ArenaCore* arena) noexcept nogil:
    return arena_state(arena) == STATE_OPEN

cdef inline int arena_admits(const ArenaCore* arena) noexcept nogil:
    # ARENA_OK, or the status of a refused allocation. One read: the state may change at any time.
    cdef uint32_t state = arena_state(arena)
    if state == STATE_OPEN:
        return ARENA_OK
    return ARENA_ASLEEP if state == STATE_FALLING or state == STATE_ASLEEP else ARENA_CLOSED

cdef inline bint arena_has_memory(const ArenaCore* arena) noexcept nogil:
    return arena_state(arena) < STATE_ASLEEP

cdef struct Block:
    uint64_t address
    uint64_t handle         # generation and chunk index
    uint64_t size           # bytes, padding included

# Copied as a whole with `lock` held, so it changes only with that lock; by locked_add64 and similar
# functions, since a single word is loaded without it.
cdef struct ArenaStats:
    uint64_t max_in_use
    uint64_t max_reserved
    uint64_t max_alloc_size
    uint64_t num_allocs
    uint64_t num_frees
    uint64_t num_reserves
    uint64_t num_extensions         # regions added for ordinary blocks; spaces count their pages
    uint64_t num_shrinkages         # of those, released to the driver since
    uint64_t events_recorded
    uint64_t events_asked
    uint64_t events_waited          # device-side waits enqueued

# The record of a block's allocation; of no block if the generation is not its chunk's.
cdef struct BlockNote:
    uint64_t number         # of the allocation in its recording
    uint64_t time           # ns, of the monotonic clock
    uint64_t seal           # as in include/recorder.h: framework, thread, tag, stack
    uint32_t recorder       # serial, low half
    uint32_t generation     # of the chunk; 0 while the others are written

# ---- Tags, virtual tensors, sleep ----------------------------------------------------------------


# The memory that a commit lacked.
cdef struct Lack:
    uint64_t missing        # bytes that it had to make
    uint64_t completions    # the arena's, when it began
    uint64_t refunds_until  # as in await_refund

# Sums of an arena and its graph pools: bytes that they hold from the driver, bytes in stores, the
# room in a file that they need at most, and the number of blocks that other processes have.
cdef struct SleepSums:
    uint64_t held
    uint64_t copied
    uint64_t room
    uint64_t shared_blocks

# ---- Counters ------------------------------------------------------------------------------------


# Bytes, if the name does not say otherwise; most are the fields of `gpumem.Stats`.
cdef struct ArenaCounts:
    uint64_t limit              # 0: none
    uint64_t in_use             # blocks with padding, and rows of virtual tensors
    uint64_t requested_in_use
    uint64_t spanned            # held by virtual tensors
    uint64_t reserved
    uint64_t max_in_use
    uint64_t max_reserved
    uint64_t num_allocs
    uint64_t num_frees
    uint64_t num_reserves
    uint64_t num_extensions
    uint64_t num_regions
    uint64_t num_shrinkages
    uint64_t max_alloc_size
    uint64_t largest_free
    uint64_t pages_moved
    uint64_t asleep_bytes
    uint64_t kept_for_sleep
    uint64_t moves_refused
    uint64_t driver_calls
    uint64_t rows_in_use        # of `in_use`: rows of virtual tensors
    uint64_t live_spans         # open virtual tensors
    uint64_t graphs             # that retain a graph pool of the arena, or the pool that it is

# The limit that an arena shares with its tags and graph pools, 0 for none; the bytes that count in
# it: held, or about to be made, without bytes that sleep; and their maximum.
cdef struct FamilyCounts:
    uint64_t limit
    uint64_t held
    uint64_t held_peak


# ---- Copies of an arena's metadata ---------------------------------------------------------------


cdef struct TableCopy:
    Chunk* chunks           # slots as in the table, unused ones too
    uint32_t count
    Region* regions
    uint32_t region_count

cdef struct PageCopy:
    uint64_t address
    uint64_t nbytes

cdef struct ArenaCopy:
    TableCopy tables[2]     # `table`, `small`
    PageCopy* pages         # pages of blocks with physical memory; none while the arena sleeps
    uint32_t page_count
    PageCopy* span_pages    # of virtual tensors: those in use
    uint32_t span_page_count
    uint64_t* streams       # handle by slot
    uint32_t stream_count
    ArenaStats stats        # of that moment, with counts that caches had not published
    uint64_t reserved       # with what virtual tensors hold, without what sleeps
    uint64_t persistent_free    # bytes of pages that only persistent blocks may have
    uint64_t limit
    uint32_t state          # ArenaState
    uint64_t held           # ns for which other threads could not allocate here

# Figures of one arena for statistics, without a copy; of `table` and of `small`.
cdef struct ArenaFigures:
    uint64_t reserved[2]        # bytes
    uint64_t segments[2]        # regions or pages, of blocks without one of their own
    uint64_t pending[2]         # blocks freed that other streams still use
    uint64_t pending_bytes[2]
    uint64_t idle[2]            # free pieces of what is in use
    uint64_t idle_bytes[2]
    uint64_t retries            # growths after idle memory was released
    uint64_t waits              # waits on the host for other streams' work
    uint64_t extensions         # regions and pages made, and released by shrinks
    uint64_t shrinkages

# ---- Hooks of other libraries --------------------------------------------------------------------


cdef enum HookKind:         # of blocks
    HOOK_LARGE              # all others
    HOOK_SMALL              # in the range for small blocks
    HOOK_KINDS

cdef struct HookSums:       # so far
    uint64_t allocs
    uint64_t frees
    uint64_t requested      # bytes
    uint64_t requested_freed
    uint64_t allocated      # the same, with padding
    uint64_t allocated_freed

cdef struct HookLive:       # differences of those sums
    uint64_t blocks
    uint64_t requested
    uint64_t allocated

# Counts of one hook, of all that its arena serves.
cdef struct HookCounts:
    HookSums sums[2]        # by HookKind
    HookLive peaks[3]       # the highest, by HookKind; the last: of both together
    HookLive earlier        # that of both together before the last `hook_peak_since`

cdef struct HookBlock:
    uint64_t address
    uint64_t nbytes         # requested
    uint64_t size           # with padding
    uint64_t stream         # handle of the stream it was allocated for
    uint64_t label[2]       # of its hook
    int32_t device          # ordinal

# ---- Debug heap ----------------------------------------------------------------------------------


cdef enum:
    HEAP_FRAMES = 12        # return addresses that are stored where the interpreter has no stack
    HEAP_SEEN = 16          # wrong bytes that a finding shows
    HEAP_FINDINGS = 1000    # that wait to be read at most; more are only counted
    HEAP_NO_STACK = 0xFFFFFFFF  # of a site without a stored stack

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
    bint orphaned           # a stream that it waits for has ended, which was reported
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
    HEAP_OVERRUN            # a byte after the block was written
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
    uint64_t address        # passed to a bad free, or the handle of a stream that has ended
    HeapSite again          # where the bad free was called
    HeapFinding* next

cdef struct HeapSettings:
    uint64_t guard          # bytes before and after each block, a multiple of 256
    uint64_t quarantine     # bytes in quarantine at most, guards and padding included
    int guard_byte
    int fresh_byte          # in a new block; -1: not written
    int freed_byte          # in a quarantined block; -1: neither written nor examined
    uint32_t stack_depth    # calls of the interpreter's stack that are stored; 0: none
    uint32_t stack_every    # one of this many allocations and frees stores its stack
    bint by_cpu             # the CPU touches the memory; else the driver's copies

# Functions of the layer above: called without a lock, except that `found` may be under `turn`.
cdef struct HeapHooks:
    # Stores the calling thread's stack of so many calls and returns its number; 0: it has none.
    uint32_t (*stack)(uint32_t depth) noexcept nogil
    void (*found)() noexcept nogil      # there is a finding; may only schedule its report

cdef struct HeapCounts:
    uint64_t live           # blocks, and the bytes requested for them
    uint64_t live_bytes
    uint64_t held           # freed by their users, but not yet to the arena
    uint64_t held_bytes     # guards and padding included
