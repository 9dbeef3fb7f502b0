"""Allocator hooks and the table of their blocks."""

from libc.stdint cimport uint32_t, uint64_t, uint8_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from gpumem._native.arena.debug_heap.heap cimport heap_bad_free
from gpumem._native.arena.detours cimport arena_free, arena_free_used
from gpumem._native.arena.family cimport arena_drop, arena_retain, part_next, tag_now
from gpumem._native.arena.arena cimport arena_allocate_range, pool_for_tag
from gpumem._native.arena.slow_path cimport arena_allocate, arena_allocate_slow
from gpumem._native.arena.streams cimport arena_record, arena_stream, slot_drop
from gpumem._native.arena.types cimport (
    arena_admits, ARENA_ASLEEP, ARENA_DEAD, ARENA_MISS, ARENA_NO_METADATA, ARENA_OK, ARENA_STALE,
    ArenaCore, Block, IN_SMALL, index_of, is_graph_pool, root_of, STREAM_NAMED, table_of, unlikely,
)
from gpumem._native.bfc cimport Chunk
from gpumem._native.driver cimport context_is_dead, CUstream
from gpumem._support.atomics cimport count_add, count_now, count_retain_live, publish32, published32
from gpumem._support.contexts cimport innermost_label
from gpumem._support.events cimport is_recorded, thread_set_framework
from gpumem._support.lease cimport Uses
from gpumem._support.lock cimport (
    biased_enter, biased_leave, Lock, lock_acquire, lock_init, lock_release, owner_is_biased,
    owner_lock_init, OwnerLock,
)
from gpumem._support.memory cimport lines_alloc
from gpumem._support.process cimport on_fork, process, process_is_exiting
from gpumem._support.streams cimport LEGACY_STREAM, PER_THREAD_STREAM


cdef enum:
    FIRST_ENTRIES = 64          # of a shard; a power of two
    OWNED_BY_BLOCKS = 0xFFFFFFFF    # instead of a count of live blocks: each has a reference

# Two entries fill a cache line, since a search of a large table waits for memory. Figures of the
# block are read from its chunk, with the shard's lock: the block is live.
cdef struct Entry:
    uint64_t address            # 0: free
    uint64_t handle             # of the block
    AllocatorHook* hook
    Extra* extra                # NULL: the arena is the hook's, and the chunk says all else

cdef struct Extra:              # of a tag's blocks, a debug heap's, those with uses, shared ones
    ArenaCore* arena            # the hook's, or a tag's, then a reference
    Uses* uses                  # streams recorded for the block; NULL: none
    uint64_t nbytes             # as requested
    uint64_t size               # with padding
    uint32_t slot               # of the stream it was allocated for
    bint shared                 # another process was given its memory; its arena counts it

cdef struct Shard:
    OwnerLock lock
    uint64_t mask               # entries - 1
    uint64_t count
    Entry* entries              # NULL: none yet
    uint64_t padding[2]         # a cache line each

cdef bint biased = owner_is_biased()
cdef Shard shards[HOOK_SHARDS]

cdef AllocatorHook* hooks = NULL    # all of them, the newest first
cdef Lock hooks_lock
lock_init(&hooks_lock)
empty_shards()


# ---- hooks ---------------------------------------------------------------------------------------

cdef AllocatorHook* hook_create(ArenaCore* arena, AllocatorHook* counted, bint counts,
                                uint8_t framework) noexcept nogil:
    global hooks
    cdef AllocatorHook* hook = <AllocatorHook*>calloc(1, sizeof(AllocatorHook))
    if hook == NULL:
        return NULL
    lock_init(&hook.lock)
    owner_lock_init(&hook.counting, biased)
    arena_retain(arena)
    hook.arena = arena
    hook.owners = 1
    hook.references = 1         # the owners'
    hook.counted = counted
    hook.framework = framework
    if counts:
        hook.counter = counted if counted != NULL else hook
    if counted != NULL:
        hook_retain(counted)
    lock_acquire(&hooks_lock)
    hook.next = hooks
    hooks = hook
    lock_release(&hooks_lock)
    return hook


cdef void hook_retain(AllocatorHook* hook) noexcept nogil:
    count_add(&hook.owners, 1)


cdef void hook_drop(AllocatorHook* hook) noexcept nogil:
    if count_add(&hook.owners, -1) == 0:
        give_references_to_blocks(hook)
        hook_let_go(hook)


cdef void give_references_to_blocks(AllocatorHook* hook) noexcept nogil:
    # Nothing is allocated any more: from here on each live block keeps the hook. A free that found
    # the hook's count in a shard has either ended with the shard's lock, or taken a reference.
    cdef int number
    for number in range(HOOK_SHARDS):
        biased_enter(&shards[number].lock)
        count_add(&hook.references, hook.live[number])
        hook.live[number] = OWNED_BY_BLOCKS
        biased_leave(&shards[number].lock)


cdef void hook_let_go(AllocatorHook* hook) noexcept nogil:
    cdef uint32_t i
    if count_add(&hook.references, -1) != 0:
        return
    unlist(hook)
    # In a fork's child the slots are those of the parent's arena, which stays as it is.
    if not context_is_dead(hook.arena.context):
        for i in range(hook.count):
            slot_drop(hook.arena, hook.names[i].slot)
    arena_drop(hook.arena)
    if hook.counted != NULL:
        hook_drop(hook.counted)
    free(hook)


cdef void unlist(AllocatorHook* hook) noexcept nogil:
    global hooks
    cdef AllocatorHook** link = &hooks
    lock_acquire(&hooks_lock)
    while link[0] != hook:
        link = &link[0].next
    link[0] = hook.next
    lock_release(&hooks_lock)


cdef uint64_t hooks_of(uint8_t framework, AllocatorHook** found, uint64_t most) noexcept nogil:
    cdef AllocatorHook* hook
    cdef uint64_t count = 0
    lock_acquire(&hooks_lock)
    hook = hooks
    while hook != NULL:
        # One that is ending has no references left, and is in the list until it is taken out.
        if hook.framework == framework and count < most and count_retain_live(&hook.references):
            found[count] = hook
            count += 1
        hook = hook.next
    lock_release(&hooks_lock)
    return count


# ---- figures of an entry -------------------------------------------------------------------------

cdef inline ArenaCore* arena_of(const Entry* entry) noexcept nogil:
    return entry.extra.arena if entry.extra != NULL else entry.hook.arena


cdef inline const Chunk* chunk_of(const Entry* entry) noexcept nogil:
    return &table_of(entry.hook.arena, entry.handle).chunks[index_of(entry.handle)]


cdef inline uint64_t nbytes_of(const Entry* entry) noexcept nogil:
    return entry.extra.nbytes if entry.extra != NULL else chunk_of(entry).requested


cdef inline uint64_t size_of(const Entry* entry) noexcept nogil:
    return entry.extra.size if entry.extra != NULL else chunk_of(entry).size


cdef inline uint32_t slot_of(const Entry* entry) noexcept nogil:
    return entry.extra.slot if entry.extra != NULL else chunk_of(entry).stream_slot


cdef Extra* extra_of(Entry* entry) noexcept nogil:
    # Made at the first need; NULL: out of host memory.
    if entry.extra == NULL:
        entry.extra = extra_make(entry.hook.arena, nbytes_of(entry), size_of(entry), slot_of(entry))
    return entry.extra


cdef Extra* extra_make(ArenaCore* arena, uint64_t nbytes, uint64_t size,
                       uint32_t slot) noexcept nogil:
    cdef Extra* extra = <Extra*>malloc(sizeof(Extra))
    if extra != NULL:
        extra[0] = Extra(arena, NULL, nbytes, size, slot, False)
    return extra


# ---- counting ------------------------------------------------------------------------------------

cdef inline HookKind kind_of(uint64_t handle) noexcept nogil:
    return HOOK_SMALL if handle & IN_SMALL else HOOK_LARGE


cdef void count_allocate(AllocatorHook* hook, const Block* block, uint64_t nbytes) noexcept nogil:
    cdef HookCounts* counts = &hook.counter.counts
    cdef HookKind kind = kind_of(block.handle)
    cdef HookSums* sums = &counts.sums[<int>kind]
    biased_enter(&hook.counter.counting)
    sums.allocs += 1
    sums.requested += nbytes
    sums.allocated += block.size
    raise_peaks(&counts.peaks[<int>kind], live_of(sums))
    raise_peaks(&counts.peaks[<int>HOOK_KINDS], live_of_both(counts))
    biased_leave(&hook.counter.counting)


cdef void count_free(const Entry* entry) noexcept nogil:
    cdef AllocatorHook* counter = entry.hook.counter
    cdef HookSums* sums = &counter.counts.sums[<int>kind_of(entry.handle)]
    cdef uint64_t nbytes = nbytes_of(entry)
    cdef uint64_t size = size_of(entry)
    biased_enter(&counter.counting)
    sums.frees += 1
    sums.requested_freed += nbytes
    sums.allocated_freed += size
    biased_leave(&counter.counting)


cdef inline HookLive live_of(const HookSums* sums) noexcept nogil:
    return HookLive(sums.allocs - sums.frees, sums.requested - sums.requested_freed,
                    sums.allocated - sums.allocated_freed)


cdef inline HookLive live_of_both(const HookCounts* counts) noexcept nogil:
    cdef HookLive large = live_of(&counts.sums[<int>HOOK_LARGE])
    cdef HookLive small = live_of(&counts.sums[<int>HOOK_SMALL])
    return HookLive(large.blocks + small.blocks, large.requested + small.requested,
                    large.allocated + small.allocated)


cdef inline void raise_peaks(HookLive* peaks, HookLive now) noexcept nogil:
    peaks.blocks = max(peaks.blocks, now.blocks)
    peaks.requested = max(peaks.requested, now.requested)
    peaks.allocated = max(peaks.allocated, now.allocated)


cdef HookCounts hook_counts(AllocatorHook* hook) noexcept nogil:
    cdef HookCounts counts
    biased_enter(&hook.counting)
    counts = hook.counts
    biased_leave(&hook.counting)
    raise_peaks(&counts.peaks[<int>HOOK_KINDS], counts.earlier)
    return counts


cdef HookLive hook_peak_since(AllocatorHook* hook, HookLive* now) noexcept nogil:
    cdef HookLive* peak = &hook.counts.peaks[<int>HOOK_KINDS]
    cdef HookLive found
    biased_enter(&hook.counting)
    found = peak[0]
    raise_peaks(&hook.counts.earlier, found)
    now[0] = peak[0] = live_of_both(&hook.counts)
    biased_leave(&hook.counting)
    return found


cdef uint64_t hook_live(const AllocatorHook* hook) noexcept nogil:
    cdef uint64_t count = 0
    cdef int number
    for number in range(HOOK_SHARDS):
        biased_enter(&shards[number].lock)
        count += hook.live[number]
        biased_leave(&shards[number].lock)
    return count


cdef void hook_reset_peak(AllocatorHook* hook) noexcept nogil:
    cdef HookCounts* counts = &hook.counts
    biased_enter(&hook.counting)
    cdef int kind
    for kind in range(<int>HOOK_KINDS):
        counts.peaks[kind] = live_of(&counts.sums[kind])
    counts.peaks[<int>HOOK_KINDS] = live_of_both(counts)
    counts.earlier = HookLive(0, 0, 0)
    biased_leave(&hook.counting)


# ---- streams -------------------------------------------------------------------------------------

cdef inline bint remembered(const AllocatorHook* hook, uint64_t handle,
                            uint32_t* stream_slot) noexcept nogil:
    # Without the lock: entries never change, and the count rises after its entry is written.
    cdef uint32_t i
    for i in range(published32(&hook.count)):
        if hook.names[i].handle == handle:
            stream_slot[0] = hook.names[i].slot
            return True
    return False


cdef inline int slot_for(AllocatorHook* hook, CUstream stream, uint32_t* stream_slot,
                         bint* retained) noexcept nogil:
    # `retained`: the caller drops the slot after use.
    cdef uint64_t handle = <uint64_t>stream if stream != NULL else LEGACY_STREAM
    retained[0] = False
    # The arena needs the name again if the stream may have ended.
    if (remembered(hook, handle, stream_slot)
            and hook.arena.streams[stream_slot[0]].state == STREAM_NAMED):
        return ARENA_OK
    return find_or_make_slot(hook, stream, handle, stream_slot, retained)


cdef int find_or_make_slot(AllocatorHook* hook, CUstream stream, uint64_t handle,
                           uint32_t* stream_slot, bint* retained) noexcept nogil:
    cdef bint fresh
    cdef int status = arena_stream(hook.arena, stream, True, stream_slot, &fresh)
    if status == ARENA_OK:
        retained[0] = not remember(hook, handle, stream_slot[0])
    return status


cdef inline int slot_of_arena(AllocatorHook* hook, ArenaCore* arena, CUstream stream,
                              uint32_t* stream_slot, bint* retained) noexcept nogil:
    # The hook remembers slots of its own arena; a tag's are searched.
    cdef bint fresh
    if arena == hook.arena:
        return slot_for(hook, stream, stream_slot, retained)
    retained[0] = True
    return arena_stream(arena, stream, True, stream_slot, &fresh)


cdef bint remember(AllocatorHook* hook, uint64_t handle, uint32_t stream_slot) noexcept nogil:
    # Takes over the caller's reference. False: another thread was first, or there is no room.
    cdef uint32_t known
    cdef bint done = False
    # That handle names another stream in each thread.
    if handle == PER_THREAD_STREAM:
        return False
    # Looked up again with the lock: another thread may have added the handle.
    lock_acquire(&hook.lock)
    if hook.count < HOOK_STREAMS and not remembered(hook, handle, &known):
        hook.names[hook.count].handle = handle
        hook.names[hook.count].slot = stream_slot
        publish32(&hook.count, hook.count + 1)
        done = True
    lock_release(&hook.lock)
    return done


# ---- blocks --------------------------------------------------------------------------------------

cdef int hook_allocate(AllocatorHook* hook, uint64_t nbytes, CUstream stream, uint32_t flags,
                       uint64_t* address) noexcept nogil:
    cdef ArenaCore* arena
    cdef Block block
    cdef uint32_t slot
    cdef bint retained
    cdef uint8_t before
    cdef int status
    if context_is_dead(hook.arena.context):
        return ARENA_DEAD
    arena = arena_for(hook.arena)
    if arena == NULL:
        return ARENA_NO_METADATA
    status = arena_admits(arena)
    if status == ARENA_OK:
        status = slot_of_arena(hook, arena, stream, &slot, &retained)
    if status != ARENA_OK:
        return status
    if not is_recorded(&arena.events):
        status = block_allocate(arena, nbytes, slot, flags, &block)
    else:
        # The recorder reads the caller from the thread, whichever call writes the event; and its
        # label, for which no lock of ours may be held if the interpreter lock is needed.
        innermost_label(True)
        before = thread_set_framework(hook.framework)
        status = block_allocate(arena, nbytes, slot, flags, &block)
        thread_set_framework(before)
    if status == ARENA_OK:
        status = enter(hook, arena, nbytes, slot, &block)
        address[0] = block.address
    # The block's chunk keeps the slot from here on.
    if retained:
        slot_drop(arena, slot)
    return status


cdef inline ArenaCore* arena_for(ArenaCore* arena) noexcept nogil:
    # Returns the arena of the tag which the calling context has open.
    cdef ArenaCore* tagged = NULL
    if not count_now(&root_of(arena).detour):
        return arena
    if is_graph_pool(arena):
        return pool_for_tag(arena)
    tagged = tag_now(arena)
    return tagged if tagged != NULL else arena


cdef int hook_allocate_range(AllocatorHook* hook, uint64_t address, uint64_t size, uint64_t nbytes,
                             CUstream stream) noexcept nogil:
    # The part of a pool that has the memory serves the request.
    cdef int status = allocate_range(hook, hook.arena, address, size, nbytes, stream)
    cdef ArenaCore* part = NULL
    if status == ARENA_STALE and is_graph_pool(hook.arena):
        part = part_next(hook.arena, NULL)
    while part != NULL and status == ARENA_STALE:
        status = allocate_range(hook, part, address, size, nbytes, stream)
        part = part_next(hook.arena, part)
    if part != NULL:
        arena_drop(part)
    return status


cdef int allocate_range(AllocatorHook* hook, ArenaCore* arena, uint64_t address, uint64_t size,
                        uint64_t nbytes, CUstream stream) noexcept nogil:
    cdef Block block
    cdef uint32_t slot
    cdef bint retained
    cdef int status
    if context_is_dead(hook.arena.context):
        return ARENA_DEAD
    status = slot_of_arena(hook, arena, stream, &slot, &retained)
    if status != ARENA_OK:
        return status
    status = arena_allocate_range(arena, address, size, nbytes, slot, &block)
    if status == ARENA_OK:
        status = enter(hook, arena, nbytes, slot, &block)
    if retained:
        slot_drop(arena, slot)
    return status


cdef inline int block_allocate(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                               uint32_t flags, Block* block) noexcept nogil:
    # A block with flags has no fast path.
    if flags:
        return arena_allocate_slow(arena, nbytes, stream_slot, flags, block)
    return arena_allocate(arena, nbytes, stream_slot, block)


cdef int hook_free(uint64_t address) noexcept nogil:
    cdef Shard* shard = shard_of(address)
    cdef Entry entry
    cdef Entry* found
    cdef uint32_t slot = 0
    cdef int status = ARENA_STALE
    biased_enter(&shard.lock)
    found = find(shard, address)
    if found != NULL:
        slot = slot_of(found)
        status = take_out(shard, found, slot, &entry)
    biased_leave(&shard.lock)
    if status == ARENA_OK:
        return ARENA_OK
    if found == NULL:
        heap_bad_free(address)
    elif status == ARENA_MISS:
        status = free_entry(&entry, slot)
    return freed(status)


cdef int hook_free_on(uint64_t address, CUstream stream) noexcept nogil:
    cdef Shard* shard = shard_of(address)
    cdef ArenaCore* arena = NULL
    cdef Entry entry
    cdef Entry* found
    cdef uint32_t slot = 0      # of a dead arena: it is not used
    cdef int status = ARENA_STALE
    cdef bint retained = False
    cdef bint named = True
    biased_enter(&shard.lock)
    found = find(shard, address)
    if found != NULL:
        arena = arena_of(found)
        # With the shard's lock, so that the block stays in the table if its stream has no slot.
        if not context_is_dead(arena.context):
            status = slot_of_arena(found.hook, arena, stream, &slot, &retained)
            named = status == ARENA_OK
        if unlikely(retained):
            arena_retain(arena)     # the slot lies in it, and the entry's may be the last reference
        if named:
            status = take_out(shard, found, slot, &entry)
    biased_leave(&shard.lock)
    if unlikely(not named):
        return status
    if unlikely(found == NULL):
        heap_bad_free(address)
    elif unlikely(status == ARENA_MISS):
        status = free_entry(&entry, slot)
    if unlikely(retained):
        slot_drop(arena, slot)
        arena_drop(arena)
    return freed(status)


cdef inline int freed(int status) noexcept nogil:
    # At exit memory is left to the driver. In a fork's child a block that is not found may be its
    # parent's.
    if status == ARENA_DEAD or status == ARENA_STALE and (
            process.generation != 0 or process_is_exiting()):
        return ARENA_OK
    return status


cdef inline int take_out(Shard* shard, Entry* found, uint32_t slot, Entry* entry) noexcept nogil:
    # Caller holds the shard's lock. Removes the entry before the block is freed, since its address
    # may be allocated again at once, and the new entry must not meet the old one. The lock keeps
    # the block's hook, so that an ordinary free takes no reference. ARENA_MISS: call free_entry
    # without the lock, because it may call other code; for that `entry` has a reference to its
    # hook.
    cdef AllocatorHook* hook = found.hook
    cdef ArenaCore* arena = hook.arena
    cdef uint64_t handle = found.handle
    cdef uint32_t* live = &hook.live[shard - shards]
    if unlikely(hook.counter != NULL):
        count_free(found)
    if unlikely(found.extra != NULL or live[0] == OWNED_BY_BLOCKS or count_now(&arena.detour)
                or is_recorded(&arena.events) or context_is_dead(arena.context)):
        entry[0] = found[0]
        if live[0] != OWNED_BY_BLOCKS:
            count_add(&hook.references, 1)
            live[0] -= 1
        remove(shard, found)
        return ARENA_MISS
    live[0] -= 1
    remove(shard, found)
    return arena_free(arena, handle, slot)


cdef int free_entry(Entry* entry, uint32_t slot) noexcept nogil:
    cdef Extra* extra = entry.extra
    cdef ArenaCore* arena = arena_of(entry)
    cdef int status = ARENA_DEAD
    if not context_is_dead(arena.context):
        if extra != NULL and extra.uses != NULL:
            status = arena_free_used(arena, entry.handle, slot, extra.uses)
        else:
            status = arena_free(arena, entry.handle, slot)
    if extra != NULL and extra.shared:
        count_add(&arena.shared_blocks, -1)
    if arena != entry.hook.arena:
        arena_drop(arena)
    free(extra)
    hook_let_go(entry.hook)
    return status


cdef int hook_record(uint64_t address, CUstream stream) noexcept nogil:
    cdef Shard* shard = shard_of(address)
    cdef Entry* found
    cdef uint32_t slot
    cdef bint retained
    cdef int status = ARENA_STALE
    # Under the shard's lock, so that the block is not freed while its list of uses changes.
    biased_enter(&shard.lock)
    found = find(shard, address)
    if found != NULL:
        status = slot_of_arena(found.hook, arena_of(found), stream, &slot, &retained)
    if status == ARENA_OK:
        if extra_of(found) != NULL:
            status = arena_record(found.extra.arena, &found.extra.uses, slot)
        else:
            status = ARENA_NO_METADATA
        if retained:
            slot_drop(arena_of(found), slot)
    biased_leave(&shard.lock)
    return status


cdef bint hook_find(uint64_t address, HookBlock* block) noexcept nogil:
    cdef Shard* shard = shard_of(address)
    cdef const Entry* entry
    biased_enter(&shard.lock)
    entry = find(shard, address)
    if entry != NULL:
        block.address = address
        block.nbytes = nbytes_of(entry)
        block.size = size_of(entry)
        block.stream = <uint64_t>arena_of(entry).streams[slot_of(entry)].handle
        block.label = entry.hook.label
        block.device = entry.hook.arena.context.ordinal
    biased_leave(&shard.lock)
    return entry != NULL


cdef ArenaCore* hook_arena(uint64_t address, uint64_t* nbytes) noexcept nogil:
    cdef Shard* shard = shard_of(address)
    cdef ArenaCore* arena = NULL
    cdef Entry* entry
    biased_enter(&shard.lock)
    entry = find(shard, address)
    if entry != NULL:
        arena = arena_of(entry)
        nbytes[0] = nbytes_of(entry)
        arena_retain(arena)
    biased_leave(&shard.lock)
    return arena


cdef int hook_share(uint64_t address) noexcept nogil:
    cdef Shard* shard = shard_of(address)
    cdef Extra* extra
    cdef Entry* entry
    cdef int status = ARENA_STALE
    biased_enter(&shard.lock)
    entry = find(shard, address)
    if entry != NULL:
        extra = extra_of(entry)
        status = ARENA_OK if extra != NULL else ARENA_NO_METADATA
        if extra != NULL and not extra.shared:
            # Counted first: a sleep reads the count once its state refuses this.
            extra.shared = True
            count_add(&extra.arena.shared_blocks, 1)
            if arena_admits(extra.arena) == ARENA_ASLEEP:
                status = ARENA_ASLEEP
                extra.shared = False
                count_add(&extra.arena.shared_blocks, -1)
    biased_leave(&shard.lock)
    return status


# Where a visit of an arena's live blocks stores its results.
cdef struct Visit:
    uint64_t* addresses         # of the first `most`, with their frameworks; NULL: none
    uint8_t* frameworks
    uint64_t most
    uint64_t count
    uint64_t* by_framework      # sums of bytes; NULL: none


cdef uint64_t hooks_blocks(const ArenaCore* arena, uint64_t* addresses, uint8_t* frameworks,
                           uint64_t most) noexcept nogil:
    cdef Visit visit = Visit(addresses, frameworks, most, 0, NULL)
    visit_blocks(arena, &visit)
    return visit.count


cdef void hooks_bytes(const ArenaCore* arena, uint64_t* by_framework) noexcept nogil:
    cdef Visit visit = Visit(NULL, NULL, 0, 0, by_framework)
    visit_blocks(arena, &visit)


cdef void visit_blocks(const ArenaCore* arena, Visit* visit) noexcept nogil:
    # One shard at a time: each block is seen as it was at some moment of the call.
    cdef uint64_t i
    cdef int number
    cdef Shard* shard
    for number in range(HOOK_SHARDS):
        shard = &shards[number]
        biased_enter(&shard.lock)
        for i in range(shard.mask + 1 if shard.entries != NULL else 0):
            if shard.entries[i].address != 0 and arena_of(&shard.entries[i]) == arena:
                visit_one(&shard.entries[i], visit)
        biased_leave(&shard.lock)


cdef inline void visit_one(const Entry* entry, Visit* visit) noexcept nogil:
    if visit.count < visit.most:
        visit.addresses[visit.count] = entry.address
    if visit.count < visit.most and visit.frameworks != NULL:
        visit.frameworks[visit.count] = entry.hook.framework
    if visit.by_framework != NULL:
        visit.by_framework[entry.hook.framework] += nbytes_of(entry)
    visit.count += 1


# ---- the table -----------------------------------------------------------------------------------

cdef inline uint64_t hash_of(uint64_t address) noexcept nogil:
    # Blocks begin at multiples of 256; the factor is 2**64 over the golden ratio (TAOCP 6.4).
    return (address >> 8) * <uint64_t>0x9E3779B97F4A7C15


cdef inline uint64_t bucket_of(const Shard* shard, uint64_t address) noexcept nogil:
    return (hash_of(address) >> 20) & shard.mask


cdef inline Shard* shard_of(uint64_t address) noexcept nogil:
    return &shards[hash_of(address) >> 58]


cdef void forget_after_fork() noexcept nogil:
    # In a fork's child the blocks are the parent's.
    cdef AllocatorHook* hook = hooks
    empty_shards()
    lock_init(&hooks_lock)
    while hook != NULL:
        lock_init(&hook.lock)
        owner_lock_init(&hook.counting, biased)
        hook = hook.next


cdef void empty_shards() noexcept nogil:
    cdef int number
    memset(shards, 0, sizeof(shards))
    for number in range(HOOK_SHARDS):
        owner_lock_init(&shards[number].lock, biased)


on_fork(NULL, NULL, forget_after_fork)


cdef Entry* find(Shard* shard, uint64_t address) noexcept nogil:
    cdef uint64_t i
    if shard.entries == NULL:
        return NULL
    i = bucket_of(shard, address)
    # A free entry ends the search first: its address is that of NULL.
    while shard.entries[i].address != 0:
        if shard.entries[i].address == address:
            return &shard.entries[i]
        i = (i + 1) & shard.mask
    return NULL


cdef inline int enter(AllocatorHook* hook, ArenaCore* arena, uint64_t nbytes, uint32_t slot,
                      const Block* block) noexcept nogil:
    # Without host memory for the entry the block is freed: no caller could free it by its address.
    cdef Shard* shard = shard_of(block.address)
    cdef Extra* extra = NULL
    cdef bint entered
    if unlikely(arena != hook.arena or arena.heap != NULL):
        extra = extra_make(arena, nbytes, block.size, slot)
        if extra == NULL:
            return refuse(arena, slot, block)
    biased_enter(&shard.lock)
    # At most half full: linear probing mostly ends at its first entry, which then is foreseen.
    entered = shard.entries != NULL and 2 * shard.count <= shard.mask
    if unlikely(not entered):
        entered = enlarge(shard)
    if entered:
        put(shard, hook, block, extra)
        if unlikely(hook.counter != NULL):
            count_allocate(hook, block, nbytes)
    biased_leave(&shard.lock)
    if unlikely(not entered):
        free(extra)
        return refuse(arena, slot, block)
    return ARENA_OK


cdef int refuse(ArenaCore* arena, uint32_t slot, const Block* block) noexcept nogil:
    arena_free(arena, block.handle, slot)
    return ARENA_NO_METADATA


cdef inline void put(Shard* shard, AllocatorHook* hook, const Block* block,
                     Extra* extra) noexcept nogil:
    cdef Entry* entry = vacancy(shard, block.address)
    entry.address = block.address
    entry.handle = block.handle
    entry.hook = hook
    entry.extra = extra
    shard.count += 1
    hook.live[shard - shards] += 1
    if unlikely(extra != NULL) and extra.arena != hook.arena:
        arena_retain(extra.arena)


cdef inline Entry* vacancy(const Shard* shard, uint64_t address) noexcept nogil:
    cdef uint64_t i = bucket_of(shard, address)
    while shard.entries[i].address != 0:
        i = (i + 1) & shard.mask
    return &shard.entries[i]


cdef bint enlarge(Shard* shard) noexcept nogil:
    cdef Entry* before = shard.entries
    cdef uint64_t capacity = shard.mask + 1 if before != NULL else 0
    cdef uint64_t larger = 2 * capacity if capacity else FIRST_ENTRIES
    cdef uint64_t i
    cdef Entry* entries = <Entry*>lines_alloc(larger * sizeof(Entry))
    if entries == NULL:
        return False
    shard.entries = entries
    shard.mask = larger - 1
    for i in range(capacity):
        if before[i].address != 0:
            vacancy(shard, before[i].address)[0] = before[i]
    free(before)
    return True


cdef inline void remove(Shard* shard, const Entry* entry) noexcept nogil:
    # An entry that was pushed past the gap moves back into it (D. Knuth, TAOCP 6.4, algorithm R).
    cdef uint64_t gap = entry - shard.entries
    cdef uint64_t i = gap
    cdef uint64_t bucket
    shard.count -= 1
    while True:
        i = (i + 1) & shard.mask
        if shard.entries[i].address == 0:
            break
        bucket = bucket_of(shard, shard.entries[i].address)
        if ((i - bucket) & shard.mask) >= ((i - gap) & shard.mask):
            shard.entries[gap] = shard.entries[i]
            gap = i
    shard.entries[gap].address = 0
