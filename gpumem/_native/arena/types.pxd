"""The arena below the interpreter: its state, its locks and its stream rules.

The functions over it are in fast_path, slow_path, arena (its life), streams (epochs) and others.
Each is `noexcept nogil`, may be called from any thread and returns a status; the Python classes
in _core and foreign allocator hooks call the same ones.

Locks, in this order: the interpreter's, `grow_lock`, `caches_lock`, a cache's, `lock`.
  lock         everything in ArenaCore. Under it: no driver call, no Python object, no wait.
  a cache's    blocks that one thread has cached (arena/thread_cache). Only its owner takes it in
               steady state.
  caches_lock  the list of caches; held while all of them are visited.
  grow_lock    one thread at a time reserves or releases regions. Held across driver calls.

Streams have slots, the same in the arena and in its chunk tables; slot 0 is "released".
A block freed on stream s is stamped with the running epoch of s. When the requesting stream
changes, one event is recorded on the stream that was served last, if anything was freed on it;
that closes its epoch. A miss polls each outstanding event once. One stream alone needs no event.

A block with recorded streams is *pending free* after its free, see arena/streams.

A slot is vacated, and given to the next new stream, when nothing is marked with it: no chunk, no
pending-free block, no recorded use, and no epoch that may have work left. Epochs go on counting.
"""

from libc.stdint cimport int32_t, uint32_t, uint64_t, uint8_t

from gpumem._native.arena.debug_heap.types cimport DebugHeap
from gpumem._native.arena.values cimport (
    ALLOCATE_ALONE, ALLOCATE_INTERRUPTIBLE, ALLOCATE_NO_WAIT, ALLOCATE_PERSISTENT,
    ALLOCATE_SHAREABLE, ALLOCATE_TRANSPORT, APART_KINDS, APART_SHAREABLE, APART_TRANSPORT,
    arena_admits, ARENA_ASLEEP, ARENA_BEYOND_DEVICE, ARENA_CAPTURING, ARENA_CLOSED, ARENA_DEAD,
    ARENA_DETOUR, ARENA_DRIVER_REFUSED, ARENA_HALF_ASLEEP, arena_has_memory, ARENA_IN_USE,
    ARENA_INTERRUPTED, arena_is_open, ARENA_MISS, ARENA_NO_COPY, ARENA_NO_METADATA,
    ARENA_NO_STREAM_SLOT, ARENA_OK, ARENA_OVER_BUDGET, ARENA_OVER_LIMIT, ARENA_STALE, arena_state,
    ARENA_TAGGED, ArenaSettings, ArenaState, ArenaStats, Block, BlockNote, EXTEND_SAME_AS_REQUESTED,
    MAX_STREAMS, REUSE_NEVER, REUSE_WAIT, STATE_ASLEEP, STATE_CLOSED, STATE_CLOSING, STATE_FALLING,
    STATE_OPEN, STREAM_DRAINED, STREAM_LEFT, STREAM_NAMED, STREAM_VACANT, StreamState, unlikely,
)
from gpumem._native.backing cimport Backing, mapped_around, THE_DEVICE
from gpumem._native.bfc cimport Bfc
from gpumem._native.budget cimport budget_load, BUDGET_UNLIMITED, BudgetCore
from gpumem._native.driver cimport Access, CUevent, CUresult, CUstream, DeviceContext
from gpumem._native.pages cimport MoveBudget, Sleeper, Space, Span
from gpumem._support.atomics cimport (
    load32, load64, publish_pointer, published64, published_pointer, store32,
)
from gpumem._support.events cimport EventSource
from gpumem._support.lease cimport Uses, ViewCount
from gpumem._support.lock cimport Lock, OwnerLock
from gpumem._support.memory cimport LineStart
from gpumem._support.retired cimport Retired

cdef extern from *:
    """
    typedef struct ThreadMark ThreadMark;       /* see thread_cache.h */
    """
    ctypedef struct ThreadMark:
        pass

cdef enum:
    # Bytes; smaller blocks have their own range, so that long-lived small ones do not pin large
    # pages.
    SMALL_BLOCK = 262144
    SHARED_BLOCK = 1048576      # bytes; of an arena with exact regions smaller blocks share theirs
    IN_SMALL = 0x80000000       # bit of a handle's chunk index: it is a chunk of `small`

cdef enum:
    LARGE_SPACE = 0
    SMALL_SPACE = 1
    PERSISTENT_SPACE = 2
    SPACES = 3

# A slot is in one StreamState, and its event in one of three states: none is outstanding
# (`event_epoch` is 0), one is outstanding, or one is outstanding and a wait of the host for it ran
# out of time (`timed_out_epoch` is `event_epoch`). `in_driver` locks a slot during a driver call.
cdef struct StreamSlot:
    LineStart of_the_slot
    CUstream handle
    ThreadMark* thread      # of a per-thread default stream, retained; NULL for all others
    uint32_t dirty          # something was freed in the running epoch; set without the lock
    # Memory after a new block is free in the running epoch: see mark_remainders_dirty.
    bint has_remainder
    bint in_driver          # a thread calls the driver for this slot, without the lock
    CUevent event           # pooled: created at the first need, recorded again and again
    uint64_t epoch          # running; starts at 1; read without the lock
    uint64_t event_epoch    # the epoch that the outstanding event closes; 0: none outstanding
    uint64_t done           # epochs <= done are known to have completed
    int32_t references      # that keep the slot: recorded uses, calls on their way (atomic)
    uint32_t pending_frees  # freed blocks that wait for this stream
    bint holds_region       # its unfinished work held an idle region at the last poll of regions
    uint64_t timed_out_epoch
    StreamState state
    CUresult refusal        # why the last event was not recorded, unless by a capture

# Cached blocks of one stream: a stack per size in quanta, linked by bin_next, as index + 1.
cdef struct Stacks:
    uint32_t head[257]
    uint8_t depth[257]
    uint32_t chunks

cdef struct ThreadCache:
    uint64_t remote         # list of blocks that other threads freed; alone in its cache line
    LineStart of_the_owner
    OwnerLock lock
    uint32_t slot_count     # of stacks
    Stacks** stacks         # per stream's slot; NULL: none yet
    uint64_t last_size      # bytes of the block freed last, if it is not in a stack; 0: none
    uint32_t last_slot      # its stream's slot
    uint32_t last           # its handle's chunk index
    uint64_t cached_bytes   # in its stacks, or freed last
    uint64_t min_cached     # minimum of `cached_bytes` since it last published
    uint64_t published      # its part of the arena's cached_bytes
    uint64_t requested      # bytes that each table's requested_in_use has changed by, modulo 2**64
    uint64_t requested_small
    uint64_t allocs         # not yet in the arena's statistics
    uint64_t frees
    ThreadMark* owner
    ThreadCache* next

cdef struct ArenaCore "ArenaCore"       # below
cdef struct ArenaSpan "ArenaSpan"

# A range of addresses, of rows that a view shows: they are not released while it lives.
cdef struct SpanView "SpanView":
    ArenaSpan* span         # a reference
    uint64_t first          # bytes from the span's base
    uint64_t last
    SpanView* next          # in the span's list; a view that holds no rows is in none
    SpanView** link

# A stream that uses pages of a span, too. It keeps its slot until they have left.
cdef struct SpanNote:
    uint32_t slot
    bint whole              # all pages, as long as the span lives: noted for the view of all rows
    uint32_t count          # of the pages it uses; `whole` is not counted
    uint8_t* page           # by page: 1 if it uses it

# The memory of a virtual tensor: pages that its user commits and releases. grow_lock, but for what
# names another; which pages are in use, and the list of spans, change with the arena lock, too.
cdef struct ArenaSpan "ArenaSpan":
    Span pages
    ArenaCore* arena        # a reference, as long as `references` is not 0
    ArenaSpan* next         # of the arena
    int32_t references      # the tensor's and its views' (atomic); 0: it ends with its work
    uint32_t closed         # nothing is committed any more (atomic)
    uint32_t stream_slot    # of its own stream, retained
    SpanNote* notes         # further streams; arena lock
    uint32_t note_count
    uint32_t note_capacity
    Uses* leaving           # releases that may not be done: streams, epochs, as `handle` a number
    Uses* end               # for the last one, with room for every note; NULL: it is stamped
    uint64_t releases       # the number of the latest, arena lock
    uint64_t last           # and of that of the end; 0: not yet
    Lock lock               # of `views`
    SpanView* views

# The fast path reads the first fields without the lock; fields that threads change are a cache line
# apart. The first two are those of an ArenaFront.
cdef struct ArenaCore "ArenaCore":
    uint32_t state          # ArenaState; stored with both locks, read by arena_state alone
    # Reasons to leave the fast path: passed through, counted one by one, a debug heap, tags that
    # are open on some thread (atomic).
    int32_t detour
    uint64_t serial         # of this arena, never used again
    DeviceContext* context
    StreamSlot* streams     # parallel to the stream slots of both tables; never moves
    # Bytes; smaller blocks live in `small`. 0 until a paged arena has grown; always where regions
    # are exact.
    uint64_t small_below
    ArenaSettings settings
    EventSource events      # where a recorder is attached
    BlockNote* notes[2]     # by chunk, of `table` and of `small`; NULL until something is recorded
    LineStart of_locks
    Lock lock
    Lock grow_lock
    Lock caches_lock
    uint32_t last_stream    # slot served last
    ThreadCache* caches
    uint64_t cached_bytes   # bytes in caches, which the tables count as used
    int32_t references      # the Arena object and every lease (atomic)
    LineStart of_tables     # the first part of each is read without the lock, too
    Bfc table               # blocks; of a large paged arena those from SMALL_BLOCK on
    Bfc small               # the blocks below `small_below`; empty without any
    Bfc persistent          # of a paged arena: what its persistent regions are cut from; else empty
    Space spaces[SPACES]    # of a paged arena: where the blocks of these three live
    MoveBudget move_budget
    # Bytes above its share of the live peak that it made because the time for moving was used up,
    # and has not released since; grow_lock.
    uint64_t overdraft
    uint64_t replayed_at    # ns of the time of the trace that a replay runs; 0: none does
    # The account of the bytes that it holds: an arena's, its tags' and its graph pools' lie below
    # one level. Its limit is max_mem, and its parent is the user's budget, if any.
    BudgetCore* level
    BudgetCore* in_use_level    # the account of its blocks in use, of a user's budget; NULL: none
    uint64_t over_budget        # bytes that a user's budget refused last (atomic)
    Sleeper sleeper         # what sleeps, and where its bytes are; grow_lock
    int32_t shared_blocks   # of library hooks: other processes were given their memory (atomic)
    ViewCount views         # of all its blocks, and of rows of its virtual tensors
    Access access           # devices that may access its pages and other mapped memory; grow_lock
    Backing backing
    Backing apart[APART_KINDS]  # of blocks with memory of their own; no `reserve`: none was made
    LineStart of_stats
    ArenaStats stats
    uint64_t num_retries    # growths after idle memory was released (atomic)
    uint64_t num_waits      # waits on the host for other streams' work (atomic)
    uint64_t next_region    # bytes the next region will have, if it need not be larger
    uint32_t stream_capacity
    uint32_t vacant_slots
    uint32_t reclaim_at     # slots from which on unused ones are reclaimed before a new one
    uint64_t completions    # how often work had ended, or the limit changed: a wait ends then
    Uses* pending_free      # freed blocks that wait for the streams recorded for them
    uint32_t retired        # persistent regions to release: their block was freed
    ArenaCore* parent       # of a graph pool and of a tag's arena; a reference; NULL for all others
    ArenaCore* tagged       # the first arena of a tag; with `lock`
    ArenaCore* pools        # the first graph pool; with `lock`
    ArenaCore* next_child   # in its parent's list of one of these; with the parent's `lock`
    bint has_tag            # it is a tag's arena
    bint is_bare            # an allocator hook's pool: Python has no object of it, and no view
    ArenaCore* sleeps_with  # of a graph pool: the arena of its blocks' tag; a reference
    ArenaCore* part_of      # of a graph pool: the one that has it for another tag, and refers to it
    uint64_t held_peak      # highest bytes held by it and its children together (atomic)
    uint64_t family_peak    # bytes in use by it and its tags when one of them grew (atomic)
    int32_t graphs          # that retain this pool, or a pool of this arena (atomic)
    ArenaSpan* spans        # of virtual tensors; grow_lock
    int32_t live_spans      # of those, not closed and with references (atomic)
    uint64_t spanned        # bytes that they hold; changed with both locks
    uint64_t span_used      # of those, bytes in use
    uint64_t span_peak      # peak of blocks and spans in use before `span_used` changed last
    uint64_t block_peak     # the highest `max_in_use` before that, which counts blocks alone
    uint32_t last_code      # CUresult of the driver's last refusal: last_refusal (atomic)
    void* last_call         # the call's name, likewise; NULL: the backing's own
    Retired end             # in the list of arenas that nothing refers to any more
    uint64_t end_wait       # a wait for the device of that number has seen the end of its work
    DebugHeap* heap         # a reference; NULL: none. Only where there is a `detour`

# The backing of a region that lies apart, by its first address; NULL: the arena's own.
cdef inline Backing* apart_from(ArenaCore* arena, uint64_t address) noexcept nogil:
    cdef int kind
    for kind in range(APART_KINDS):
        if mapped_around(&arena.apart[kind], address) != NULL:
            return &arena.apart[kind]
    return NULL

cdef inline uint64_t apart_bytes(const ArenaCore* arena) noexcept nogil:
    return (load64(&arena.apart[APART_SHAREABLE].mapped_bytes)
            + load64(&arena.apart[APART_TRANSPORT].mapped_bytes))

cdef inline uint64_t backing_calls(const ArenaCore* arena) noexcept nogil:
    return (load64(&arena.backing.calls) + load64(&arena.apart[APART_SHAREABLE].calls)
            + load64(&arena.apart[APART_TRANSPORT].calls))

cdef inline Bfc* table_for(ArenaCore* arena, uint64_t size) noexcept nogil:
    return &arena.small if size < arena.small_below else &arena.table

cdef inline Bfc* table_of(ArenaCore* arena, uint64_t handle) noexcept nogil:
    return &arena.small if handle & IN_SMALL else &arena.table

cdef inline Bfc* table_at(ArenaCore* arena, int number) noexcept nogil:
    return &arena.small if number else &arena.table

cdef inline uint64_t arena_in_use(const ArenaCore* arena) noexcept nogil:
    # Changes under the arena lock; reports of memory that is out read it without the lock.
    return (load64(&arena.table.in_use) + load64(&arena.small.in_use)
            - load64(&arena.cached_bytes))

cdef inline uint64_t arena_reserved(const ArenaCore* arena) noexcept nogil:
    # Persistent regions are cut from pages; the unused bytes of these pages count, too.
    return (load64(&arena.table.reserved) + load64(&arena.small.reserved)
            + load64(&arena.persistent.reserved) - load64(&arena.persistent.in_use))

cdef inline uint64_t live_peak(const ArenaCore* arena) noexcept nogil:
    # In bytes, of blocks alone.
    return max(load64(&arena.stats.max_in_use), load64(&arena.block_peak))

cdef inline uint64_t with_share(const ArenaCore* arena, uint64_t peak) noexcept nogil:
    # Bytes that may be reserved for this live peak before idle pages move.
    return peak + <uint64_t>(<double>peak * arena.settings.move_share)

cdef inline uint64_t move_clock(const ArenaCore* arena) noexcept nogil:
    # In ns; of the trace where one is replayed, as a replay is faster than the program was.
    return arena.replayed_at or arena.context.now()

cdef inline uint64_t arena_reserved_now(const ArenaCore* arena) noexcept nogil:
    # Bytes that it holds from the driver now: none of a sleeping arena's pages.
    return load64(&arena.spanned) + (
        apart_bytes(arena) if arena_state(arena) == STATE_ASLEEP else arena_reserved(arena))

cdef inline uint64_t arena_max_in_use(const ArenaCore* arena) noexcept nogil:
    # Blocks and virtual tensors: while the tensors do not change, `max_in_use` counts blocks.
    return max(load64(&arena.span_peak),
               load64(&arena.stats.max_in_use) + load64(&arena.span_used))

cdef inline uint64_t arena_extensions(const ArenaCore* arena) noexcept nogil:
    # Regions added, and pages made, for ordinary blocks.
    return (load64(&arena.stats.num_extensions) + load64(&arena.spaces[LARGE_SPACE].created)
            + load64(&arena.spaces[SMALL_SPACE].created))

cdef inline uint64_t arena_shrinkages(const ArenaCore* arena) noexcept nogil:
    # Of those, released to the driver.
    return (load64(&arena.stats.num_shrinkages) + load64(&arena.spaces[LARGE_SPACE].released)
            + load64(&arena.spaces[SMALL_SPACE].released))

cdef inline const ArenaCore* root_of(const ArenaCore* arena) noexcept nogil:
    # The arena that has the limit: a child keeps to its parent's, and counts in it.
    return <const ArenaCore*>arena.parent if arena.parent != NULL else arena

cdef inline bint is_graph_pool(const ArenaCore* arena) noexcept nogil:
    return arena.parent != NULL and not arena.has_tag

cdef inline bint arena_can_sleep(const ArenaCore* arena) noexcept nogil:
    # Its memory is physical handles of the device, mapped by the driver: pages, or regions of a
    # graph pool.
    return (arena.settings.paged
            or arena.backing.has_handles and arena.backing.node == THE_DEVICE)

cdef inline BudgetCore* family_level(const ArenaCore* arena) noexcept nogil:
    # The level that an arena shares with its tags and graph pools. Its limit is max_mem.
    return arena.level.parent

cdef inline uint64_t family_held(const ArenaCore* arena) noexcept nogil:
    # Bytes that count in max_mem: held, or about to be made, without bytes that sleep.
    return budget_load(&family_level(arena).used)

cdef inline uint64_t family_limit(const ArenaCore* arena) noexcept nogil:
    # max_mem in bytes; 0: no limit.
    cdef uint64_t limit = budget_load(&family_level(arena).limit)
    return limit if limit != BUDGET_UNLIMITED else 0

cdef inline uint64_t arena_limit(const ArenaCore* arena) noexcept nogil:
    # The same of an arena that is not a child of another; 0 for a child.
    return family_limit(arena) if arena.parent == NULL else 0

cdef inline bint switch_needs_event(const ArenaCore* arena) noexcept nogil:
    # Caller holds `lock`, and is to serve another stream than the last one. Returns whether an
    # event has to be recorded first, after the frees of the last one.
    cdef const StreamSlot* before = &arena.streams[arena.last_stream]
    return (load32(&before.dirty) and before.event_epoch == 0 and not before.in_driver
            and arena.settings.reuse != REUSE_NEVER)

cdef inline uint64_t stamp_free(StreamSlot* stream) noexcept nogil:
    # Returns the epoch of a free on the stream, which has work now that the next event must follow.
    # A free reads the epoch, then sees whether the stream is dirty; closing an epoch does both in
    # the opposite order. So no free of the new epoch goes unnoticed.
    cdef uint64_t epoch = published64(&stream.epoch)
    if not load32(&stream.dirty):
        store32(&stream.dirty, True)
    return epoch

cdef inline uint32_t index_of(uint64_t handle) noexcept nogil:
    # Returns the index of a block's chunk, in the table that table_of returns.
    return <uint32_t>handle & ~<uint32_t>IN_SMALL

cdef inline int driver_refused(ArenaCore* arena, CUresult code, const char* call) noexcept nogil:
    # Stores the code and the call that an error will name; NULL: the call of the arena's backing.
    publish_pointer(&arena.last_call, <void*>call)
    store32(&arena.last_code, <uint32_t>code)
    return ARENA_DRIVER_REFUSED

cdef inline CUresult last_refusal(const ArenaCore* arena) noexcept nogil:
    return <CUresult>load32(&arena.last_code)

cdef inline const char* last_refused_call(const ArenaCore* arena) noexcept nogil:
    return <const char*>published_pointer(&arena.last_call)
