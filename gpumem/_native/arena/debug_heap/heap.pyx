"""Blocks of a debug heap, from their allocation out of the quarantine."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc

from gpumem._native.arena.bookkeeping cimport count_out, counted_bytes, note_event
from gpumem._native.arena.debug_heap.guards cimport (
    block_examine, block_fill_freed, block_prepare, finding_of, guards_end, list_add, list_after,
    list_first, list_remove, note_finding, site_here, table_add, table_create, table_find,
    table_remove,
)
from gpumem._native.arena.debug_heap.types cimport (
    DebugHeap, HEAP_DOUBLE_FREE, HEAP_FREED, HEAP_INVALID_FREE, HEAP_LIVE, HEAP_QUARANTINED,
    HEAP_STATES, HEAP_STREAM_GONE, HeapBlock, HeapFault, HeapFinding, HeapHooks, HeapSettings,
    HeapSite, HeapState,
)
from gpumem._native.arena.growth cimport memory_is_out, pause, wait_for_streams
from gpumem._native.arena.streams cimport (
    drain_streams, slot_drop, slot_retain, streams_may_work, uses_release,
)
from gpumem._native.arena.types cimport (
    ALLOCATE_SHAREABLE, arena_has_memory, ARENA_INTERRUPTED, ARENA_NO_METADATA, ARENA_OK,
    ARENA_OVER_BUDGET, ARENA_OVER_LIMIT, ARENA_STALE, arena_state, ArenaCore, Block, driver_refused,
    stamp_free, STATE_ASLEEP, STREAM_DRAINED,
)
from gpumem._native.bfc cimport MAX_BYTES
from gpumem._native.driver cimport (
    context_enter, context_is_dead, context_leave, context_relax, context_restore,
    CU_STREAM_CAPTURE_STATUS_NONE, CUDA_ERROR_INVALID_HANDLE, CUDA_SUCCESS, CUresult,
    CUstreamCaptureMode, CUstreamCaptureStatus,
)
from gpumem._support.atomics cimport count_add, load64, store64
from gpumem._support.clock cimport clock_ns
from gpumem._support.events cimport is_recorded, REC_FREE
from gpumem._support.interpreter cimport interpreter_release, interpreter_restore, PyThreadState
from gpumem._support.lease cimport Uses
from gpumem._support.lock cimport Lock, lock_acquire, lock_init, lock_release, lock_try
from gpumem._support.process cimport on_fork


cdef enum:
    POLL_INTERVAL = 100000      # ns between two examinations while streams are not done

# Heaps of arenas that live, for frees of unknown addresses. `heaps_lock` comes before a heap's.
cdef DebugHeap* heaps = NULL
cdef Lock heaps_lock
lock_init(&heaps_lock)


# ---- life ----------------------------------------------------------------------------------------

cdef DebugHeap* heap_create(const HeapSettings* settings, const HeapHooks* hooks) noexcept nogil:
    cdef DebugHeap* heap = <DebugHeap*>calloc(1, sizeof(DebugHeap))
    if heap == NULL:
        return NULL
    if not table_create(heap):
        free(heap)
        return NULL
    heap.settings = settings[0]
    heap.hooks = hooks[0]
    # The caller's; heap_attach adds the arena's.
    heap.references = 1
    lock_init(&heap.turn)
    lock_init(&heap.lock)
    return heap


cdef void heap_drop(DebugHeap* heap) noexcept nogil:
    cdef HeapFinding* finding
    if count_add(&heap.references, -1) != 0:
        return
    # Its blocks ended with the arena; findings outlive that, until Python has read them.
    while heap.findings != NULL:
        finding = heap.findings
        heap.findings = finding.next
        free(finding)
    free(heap.table)
    free(heap)


cdef void heap_attach(ArenaCore* arena, DebugHeap* heap,
                      int (*free_block)(void*, uint64_t, uint32_t) noexcept nogil) noexcept nogil:
    global heaps
    count_add(&heap.references, 1)
    heap.free_block = free_block
    arena.heap = heap
    # Allocations and frees leave the fast path: its caches would allocate a freed block at once.
    arena.detour += 1
    lock_acquire(&heaps_lock)
    heap.next = heaps
    heaps = heap
    lock_release(&heaps_lock)


cdef void heap_detach(ArenaCore* arena) noexcept nogil:
    # Only with a dead context are there blocks left: their memory is the parent process's.
    global heaps
    cdef DebugHeap* heap = arena.heap
    cdef DebugHeap** link = &heaps
    cdef HeapBlock* block
    cdef int state
    # The heap leaves the list first, so that no bad free finds a heap without blocks.
    lock_acquire(&heaps_lock)
    while link[0] != NULL and link[0] != heap:
        link = &link[0].next
    if link[0] != NULL:
        link[0] = heap.next
    lock_release(&heaps_lock)
    for state in range(<int>HEAP_STATES):
        while heap.first[state] != NULL:
            block = heap.first[state]
            list_remove(heap, block)
            free(block)
    if not context_is_dead(arena.context):
        guards_end(heap, arena.context)
    heap.gone = True
    if heap.findings != NULL:
        heap.hooks.found()      # no later call of the arena can report them
    heap_drop(heap)


cdef void forget_after_fork() noexcept nogil:
    # The heaps are the parent's; a thread that the child does not have may have held the lock.
    global heaps
    heaps = NULL
    lock_init(&heaps_lock)


on_fork(NULL, NULL, forget_after_fork)


# ---- allocating ----------------------------------------------------------------------------------

cdef int heap_allocate(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot, uint32_t flags,
                       HeapSource source, Block* block) noexcept nogil:
    cdef bint guarded = not flags & ALLOCATE_SHAREABLE
    cdef uint64_t guards = 2 * arena.heap.settings.guard if guarded else 0
    cdef HeapBlock* made
    cdef int status
    if nbytes > MAX_BYTES - guards:
        return ARENA_OVER_LIMIT
    # Before the turn: storing the caller's stack may wait for the interpreter lock.
    made = make(arena, nbytes, stream_slot, guarded)
    if made == NULL:
        return ARENA_NO_METADATA
    # The turn is held until the block is listed: no other thread examines memory after its guards
    # are written and before the block is known.
    lock_acquire(&arena.heap.turn)
    status = find_room(arena, nbytes + guards, stream_slot, flags, source, block)
    if status == ARENA_OK and guarded:
        status = finish_guarded(arena, made, block)
    elif status == ARENA_OK:
        enter(arena.heap, made, block, block.address)
    lock_release(&arena.heap.turn)
    if status != ARENA_OK:
        slot_drop(arena, stream_slot)
        free(made)
    return status


cdef HeapBlock* make(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                     bint guarded) noexcept nogil:
    cdef HeapBlock* made = <HeapBlock*>calloc(1, sizeof(HeapBlock))
    if made == NULL:
        return NULL
    site_here(arena.heap, &made.taken)
    made.requested = nbytes
    made.guarded = guarded
    made.slot = stream_slot
    made.stream = <uint64_t>arena.streams[stream_slot].handle
    slot_retain(arena, stream_slot)
    return made


cdef int find_room(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot, uint32_t flags,
                   HeapSource source, Block* block) noexcept nogil:
    # The quarantine is emptied before memory is out, and before a budget's callbacks are called.
    cdef uint64_t until = 0
    cdef int waited
    cdef int status = source(arena, nbytes, stream_slot, flags, block)
    while memory_is_out(arena, nbytes, status) or status == ARENA_OVER_BUDGET:
        if not examine_and_release(arena, 0, False):
            waited = wait_for_room(arena, nbytes, stream_slot, flags, &until)
            if waited != ARENA_OK:
                return ARENA_INTERRUPTED if waited == ARENA_INTERRUPTED else status
        status = source(arena, nbytes, stream_slot, flags, block)
    return status


cdef int wait_for_room(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot, uint32_t flags,
                       uint64_t* until) noexcept nogil:
    # The turn is released during the wait, so that other threads can free and examine.
    cdef int waited
    lock_release(&arena.heap.turn)
    waited = wait_for_streams(arena, nbytes, stream_slot, flags, until)
    while waited == ARENA_OVER_LIMIT and holds_any(arena.heap) and clock_ns() < until[0]:
        if pause(POLL_INTERVAL, flags):
            waited = ARENA_INTERRUPTED
        elif heap_release(arena, 0) != 0:
            waited = ARENA_OK
    lock_acquire(&arena.heap.turn)
    return waited


cdef int finish_guarded(ArenaCore* arena, HeapBlock* made, Block* block) noexcept nogil:
    cdef CUresult code
    made.address = block.address + arena.heap.settings.guard
    code = block_prepare(arena.heap, arena.context, made)
    if code != CUDA_SUCCESS:
        # A block without guards is not returned. Its charge was complete: it is refunded here.
        count_out(arena, counted_bytes(arena, block.handle))
        arena.heap.free_block(arena, block.handle, made.slot)
        return driver_refused(arena, code, "cuMemsetD8Async")
    enter(arena.heap, made, block, made.address)
    block.address = made.address
    return ARENA_OK


cdef void enter(DebugHeap* heap, HeapBlock* made, const Block* block,
                uint64_t address) noexcept nogil:
    made.handle = block.handle
    made.base = block.address
    made.size = block.size
    made.address = made.event_address = address
    made.event_bytes = made.requested
    # Numbered under the lock, so that numbers follow the order of the list.
    lock_acquire(&heap.lock)
    heap.numbers += 1
    made.number = heap.numbers
    table_add(heap, made)
    list_add(heap, made, HEAP_LIVE)
    lock_release(&heap.lock)


cdef CUresult heap_narrow(ArenaCore* arena, uint64_t handle, uint64_t address,
                          uint64_t nbytes) noexcept nogil:
    cdef DebugHeap* heap = arena.heap
    cdef HeapBlock* block
    cdef CUresult code = CUDA_SUCCESS
    lock_acquire(&heap.turn)
    lock_acquire(&heap.lock)
    block = table_find(heap, handle)
    # An aligned buffer begins after the block's first byte: the bytes before it become guard.
    if block != NULL:
        store64(&heap.requested[<int>block.state],
                heap.requested[<int>block.state] - block.requested + nbytes)
        block.address = address
        block.requested = nbytes
    lock_release(&heap.lock)
    if block != NULL and block.guarded:
        code = block_prepare(heap, arena.context, block)
    lock_release(&heap.turn)
    return code


# ---- freeing -------------------------------------------------------------------------------------

cdef int heap_free(ArenaCore* arena, uint64_t handle, uint32_t stream_slot,
                   Uses* uses) noexcept nogil:
    cdef DebugHeap* heap = arena.heap
    cdef HeapBlock* block
    cdef HeapSite site
    cdef uint64_t counted = 0
    cdef bint live
    site_here(heap, &site)
    if is_recorded(&arena.events):
        record_free(arena, handle, stream_slot)    # before: the next owner's event comes after it
    lock_acquire(&heap.lock)
    block = table_find(heap, handle)
    live = block != NULL and block.state == HEAP_LIVE
    if live:
        # The bytes are read while the handle is valid, and refunded below, without the lock.
        counted = counted_bytes(arena, handle)
        note_freed(arena, block, stream_slot, uses)
        block.freed = site
        list_remove(heap, block)
        list_add(heap, block, HEAP_FREED)
    elif block != NULL:
        note_finding(heap, finding_of(block, HEAP_DOUBLE_FREE, block.address, &site))
    lock_release(&heap.lock)
    if live:
        count_out(arena, counted)
        quarantine_now(arena)
        return ARENA_OK
    # A double or invalid free changes nothing but the list of findings.
    if uses != NULL:
        uses_release(arena, uses)
    heap.hooks.found()
    return ARENA_STALE


cdef void quarantine_now(ArenaCore* arena) noexcept nogil:
    # At once, so that the very next write is found. The holder of the turn may wait for work that
    # waits for this thread; then the block is quarantined with the next call of the arena.
    cdef PyThreadState* interpreter
    if context_is_dead(arena.context) or not lock_try(&arena.heap.turn):
        return
    interpreter = interpreter_release()
    examine_and_release(arena, arena.heap.settings.quarantine, False)
    lock_release(&arena.heap.turn)
    interpreter_restore(interpreter)


cdef void record_free(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil:
    # The event is written without the lock, because its file may have to grow first.
    cdef HeapBlock* block
    cdef uint64_t address, nbytes, held
    lock_acquire(&arena.heap.lock)
    block = table_find(arena.heap, handle)
    if block == NULL or block.state != HEAP_LIVE:
        lock_release(&arena.heap.lock)
        return
    address, nbytes, held = block.event_address, block.event_bytes, block.size
    lock_release(&arena.heap.lock)
    note_event(arena, REC_FREE, address, nbytes, held, stream_slot, True)


cdef void note_freed(ArenaCore* arena, HeapBlock* block, uint32_t stream_slot,
                     Uses* uses) noexcept nogil:
    # Work queued on its streams until now may still use it. `strayed`: the stream of the free is
    # neither the block's own nor ordered after it.
    cdef uint32_t i
    cdef bint recorded = stream_slot == block.slot
    slot_retain(arena, stream_slot)
    block.freed_slot = stream_slot
    block.freed_stream = <uint64_t>arena.streams[stream_slot].handle
    block.freed_epoch = stamp_free(&arena.streams[stream_slot])
    block.epoch = stamp_free(&arena.streams[block.slot])
    block.uses = uses
    if uses != NULL:
        for i in range(uses.count):
            uses.at[i].until = stamp_free(&arena.streams[uses.at[i].slot])
            recorded = recorded or uses.at[i].slot == block.slot
    block.strayed = not recorded


cdef void heap_bad_free(uint64_t address) noexcept nogil:
    cdef HeapSite site
    cdef DebugHeap* heap
    cdef HeapBlock* block
    cdef HeapFault fault = HEAP_INVALID_FREE
    # Without the lock: a program without debug heaps pays nothing for its invalid frees.
    if heaps == NULL:
        return
    lock_acquire(&heaps_lock)
    heap = heaps
    while heap != NULL and not covers(heap, address):
        heap = heap.next
    # A reference keeps it: its arena may end once the lock is released.
    if heap != NULL:
        count_add(&heap.references, 1)
    lock_release(&heaps_lock)
    if heap == NULL:
        return
    site_here(heap, &site)
    lock_acquire(&heap.lock)
    # The block may have left the heap since `covers`.
    block = block_around(heap, address)
    if block != NULL:
        if block.state != HEAP_LIVE and block.address == address:
            fault = HEAP_DOUBLE_FREE
        note_finding(heap, finding_of(block, fault, address, &site))
    lock_release(&heap.lock)
    heap.hooks.found()
    heap_drop(heap)


cdef bint covers(DebugHeap* heap, uint64_t address) noexcept nogil:
    cdef bint known
    lock_acquire(&heap.lock)
    known = block_around(heap, address) != NULL
    lock_release(&heap.lock)
    return known


cdef HeapBlock* block_around(DebugHeap* heap, uint64_t address) noexcept nogil:
    cdef HeapBlock* block
    cdef int state
    for state in range(<int>HEAP_STATES):
        block = heap.first[state]
        while block != NULL:
            if block.address <= address < block.address + block.requested:
                return block
            block = block.after
    return NULL


# ---- examining everything ------------------------------------------------------------------------

cdef void heap_pump(ArenaCore* arena) noexcept nogil:
    heap_release(arena, arena.heap.settings.quarantine)


cdef uint64_t heap_release(ArenaCore* arena, uint64_t most) noexcept nogil:
    cdef uint64_t released
    if context_is_dead(arena.context):
        return 0
    lock_acquire(&arena.heap.turn)
    released = examine_and_release(arena, most, False)
    lock_release(&arena.heap.turn)
    return released


cdef void heap_drain(ArenaCore* arena) noexcept nogil:
    if context_is_dead(arena.context):
        return
    lock_acquire(&arena.heap.turn)
    drain(arena)
    lock_release(&arena.heap.turn)


cdef void heap_lock_drained(ArenaCore* arena) noexcept nogil:
    lock_acquire(&arena.heap.turn)
    if arena_has_memory(arena):
        drain(arena)


cdef void heap_unlock(ArenaCore* arena) noexcept nogil:
    lock_release(&arena.heap.turn)


cdef CUresult heap_check(ArenaCore* arena) noexcept nogil:
    cdef DebugHeap* heap = arena.heap
    cdef CUresult code = CUDA_SUCCESS
    if context_is_dead(arena.context):
        return code
    lock_acquire(&heap.turn)
    examine_and_release(arena, heap.settings.quarantine, False)
    if arena_has_memory(arena):
        code = check_all(arena, HEAP_QUARANTINED)
    if arena_has_memory(arena) and code == CUDA_SUCCESS:
        code = check_all(arena, HEAP_LIVE)
    lock_release(&heap.turn)
    return code


cdef CUresult check_all(ArenaCore* arena, HeapState state) noexcept nogil:
    # The list is copied, because memory is read without the lock. A block that is freed during the
    # check moves to another list, but ends only with the turn, which is held here.
    cdef DebugHeap* heap = arena.heap
    cdef CUresult code = CUDA_SUCCESS
    cdef HeapBlock* block
    cdef HeapBlock** found
    cdef uint64_t count = 0
    cdef uint64_t i
    lock_acquire(&heap.lock)
    found = <HeapBlock**>malloc((heap.count[<int>state] + 1) * sizeof(HeapBlock*))
    block = heap.first[<int>state]
    while found != NULL and block != NULL:
        found[count] = block
        count += 1
        block = block.after
    lock_release(&heap.lock)
    for i in range(count):
        if code == CUDA_SUCCESS:
            code = block_check(arena, found[i])
    free(found)
    return code


# ---- from the quarantine to the arena ------------------------------------------------------------

cdef inline bint holds_any(const DebugHeap* heap) noexcept nogil:
    return heap.count[<int>HEAP_FREED] + heap.count[<int>HEAP_QUARANTINED] != 0


cdef uint64_t examine_and_release(ArenaCore* arena, uint64_t most, bint forced) noexcept nogil:
    # Caller holds `turn`. Examines the blocks that their streams have finished with, frees blocks
    # until at most `most` bytes remain, and returns the freed bytes. `forced`: all streams are
    # done, and blocks that the driver does not let be examined are freed unexamined.
    cdef CUstreamCaptureMode mode
    if not arena_has_memory(arena) or not holds_any(arena.heap):
        return 0
    # Polled first: an event that has completed lets blocks of either list go on.
    mode = context_relax(arena.context)
    streams_may_work(arena)
    context_restore(arena.context, mode)
    return quarantine_freed(arena, most, forced) + release_oldest(arena, most, forced)


cdef uint64_t quarantine_freed(ArenaCore* arena, uint64_t most, bint forced) noexcept nogil:
    # A block larger than the quarantine is freed at once: it is not filled, nor are others released
    # to make room for it.
    cdef HeapBlock* block = list_first(arena.heap, HEAP_FREED)
    cdef HeapBlock* following
    cdef uint64_t released = 0
    while block != NULL:
        following = list_after(arena.heap, block)
        if not is_quiet(arena, block):
            report_gone_streams(arena, block)
        elif not (forced or is_done(arena, block.slot, block.epoch)):
            # Its own stream may still write: the pattern shows whether it does.
            if block.guarded:
                move_to_quarantine(arena, block, forced)
        elif block.guarded and block.size <= most:
            move_to_quarantine(arena, block, forced)
        elif examine(arena, block, forced):
            released += release_block(arena, block)
        block = following
    return released


cdef uint64_t release_oldest(ArenaCore* arena, uint64_t most, bint forced) noexcept nogil:
    cdef DebugHeap* heap = arena.heap
    cdef HeapBlock* block = list_first(heap, HEAP_QUARANTINED)
    cdef HeapBlock* following
    cdef uint64_t released = 0
    # The oldest first: a late write has had the most time to happen.
    while block != NULL and heap.held[<int>HEAP_QUARANTINED] > most:
        following = list_after(heap, block)
        if (forced or is_done(arena, block.slot, block.epoch)) and examine(arena, block, forced):
            released += release_block(arena, block)
        block = following
    return released


cdef inline bint is_done(ArenaCore* arena, uint32_t stream_slot, uint64_t epoch) noexcept nogil:
    # A stream that was reset and is not named again has been drained.
    return (arena.streams[stream_slot].state == STREAM_DRAINED
            or load64(&arena.streams[stream_slot].done) >= epoch)


cdef bint is_quiet(ArenaCore* arena, const HeapBlock* block) noexcept nogil:
    cdef uint32_t i
    if not is_done(arena, block.freed_slot, block.freed_epoch):
        return False
    if block.uses != NULL:
        for i in range(block.uses.count):
            if not is_done(arena, block.uses.at[i].slot, block.uses.at[i].until):
                return False
    return True


cdef void move_to_quarantine(ArenaCore* arena, HeapBlock* block, bint forced) noexcept nogil:
    if not examine(arena, block, forced):
        return
    if block.guarded and block_fill_freed(arena.heap, arena.context,
                                          block) != CUDA_SUCCESS and not forced:
        return
    lock_acquire(&arena.heap.lock)
    list_remove(arena.heap, block)
    list_add(arena.heap, block, HEAP_QUARANTINED)
    lock_release(&arena.heap.lock)


cdef bint examine(ArenaCore* arena, const HeapBlock* block, bint forced) noexcept nogil:
    # False: the driver did not copy its bytes, so that the block has to wait.
    return block_check(arena, block) == CUDA_SUCCESS or forced


cdef CUresult block_check(ArenaCore* arena, const HeapBlock* block) noexcept nogil:
    # Stores a finding for each wrong run of bytes. The driver's code if it refused.
    cdef DebugHeap* heap = arena.heap
    cdef HeapFinding* findings = NULL
    cdef HeapFinding* following
    cdef HeapBlock seen
    cdef CUresult code
    if not block.guarded:
        return CUDA_SUCCESS
    lock_acquire(&heap.lock)
    seen = block[0]             # a free may change it while its memory is read
    lock_release(&heap.lock)
    code = block_examine(heap, arena.context, &seen, &findings)
    if findings == NULL:
        return code
    lock_acquire(&heap.lock)
    while findings != NULL:
        following = findings.next
        note_finding(heap, findings)
        findings = following
    lock_release(&heap.lock)
    heap.hooks.found()
    return code


cdef uint64_t release_block(ArenaCore* arena, HeapBlock* block) noexcept nogil:
    # All work queued on its streams is done: recorded uses have ended. Out of the table before the
    # arena's free, because the handle may be valid again right after.
    cdef DebugHeap* heap = arena.heap
    cdef uint64_t nbytes = block.size
    lock_acquire(&heap.lock)
    list_remove(heap, block)
    table_remove(heap, block)
    lock_release(&heap.lock)
    if block.uses != NULL:
        uses_release(arena, block.uses)
    heap.free_block(arena, block.handle, block.freed_slot)
    slot_drop(arena, block.freed_slot)
    slot_drop(arena, block.slot)
    free(block)
    return nbytes


cdef void drain(ArenaCore* arena) noexcept nogil:
    if not holds_any(arena.heap):
        return
    if arena_state(arena) == STATE_ASLEEP:
        # The device was drained, and there is no memory to examine.
        release_all(arena, HEAP_FREED)
        release_all(arena, HEAP_QUARANTINED)
        return
    drain_streams(arena, NULL)
    examine_and_release(arena, 0, True)


cdef void release_all(ArenaCore* arena, HeapState state) noexcept nogil:
    cdef HeapBlock* block = list_first(arena.heap, state)
    while block != NULL:
        release_block(arena, block)
        block = list_first(arena.heap, state)


# ---- streams that have ended ---------------------------------------------------------------------

cdef void report_gone_streams(ArenaCore* arena, HeapBlock* block) noexcept nogil:
    # A stream that got no event although it was polled may be destroyed.
    cdef uint32_t i
    if block.orphaned:
        return
    report_if_gone(arena, block, block.freed_slot)
    if block.uses != NULL:
        for i in range(block.uses.count):
            report_if_gone(arena, block, block.uses.at[i].slot)


cdef void report_if_gone(ArenaCore* arena, HeapBlock* block, uint32_t stream_slot) noexcept nogil:
    cdef DebugHeap* heap = arena.heap
    cdef HeapFinding* finding
    if block.orphaned or arena.streams[stream_slot].event_epoch or not is_gone(arena, stream_slot):
        return
    block.orphaned = True       # reported once
    lock_acquire(&heap.lock)
    finding = finding_of(block, HEAP_STREAM_GONE, <uint64_t>arena.streams[stream_slot].handle,
                         &block.freed)
    note_finding(heap, finding)
    lock_release(&heap.lock)
    heap.hooks.found()


cdef bint is_gone(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    # The query for a capture is legal at any time, and refuses a handle that is not a stream.
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUresult code = context_enter(arena.context)
    if code == CUDA_SUCCESS and arena.context.table.cuStreamIsCapturing != NULL:
        code = arena.context.table.cuStreamIsCapturing(arena.streams[stream_slot].handle, &status)
    context_leave(arena.context)
    return code == CUDA_ERROR_INVALID_HANDLE
