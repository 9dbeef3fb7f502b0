"""Epochs, events and pending frees: from a free on one stream to a reuse on another."""

from libc.stdint cimport uint32_t, uint64_t, uint8_t
from libc.stdlib cimport calloc, free

from gpumem._native.arena.bookkeeping cimport note_chunk, note_event, padding_has_room
from gpumem._native.arena.thread_cache cimport (
    cache_find, cache_publish, caches_flush, thread_drop, thread_now, thread_retain,
)
from gpumem._native.arena.types cimport (
    ARENA_NO_METADATA, ARENA_NO_STREAM_SLOT, ARENA_OK, ARENA_OVER_BUDGET, ArenaCore, IN_SMALL,
    index_of, LARGE_SPACE, MAX_STREAMS, REUSE_NEVER, SMALL_SPACE, stamp_free, STREAM_DRAINED,
    STREAM_LEFT, STREAM_NAMED, STREAM_VACANT, StreamSlot, switch_needs_event, table_of, ThreadMark,
)
from gpumem._native.bfc cimport (
    ANY_EPOCH, Bfc, bfc_add_stream_slot, bfc_allocate_from, bfc_begin_pending_free, bfc_block_size,
    bfc_end_pending_free, bfc_free, bfc_has, BFC_OK, bfc_release_completed, bfc_resolve, Chunk,
    CHUNK_HOLE, CHUNK_UNUSED, NIL, round_to_quantum, SLOT_RELEASED, state_of,
)
from gpumem._native.driver cimport (
    AWAIT_EVENT, context_enter, context_leave, context_relax, context_restore, context_synchronize,
    CU_EVENT_DISABLE_TIMING, CUDA_SUCCESS, CUevent, CUresult, CUstream, CUstreamCaptureMode,
    device_wait, DeviceContext, ends_with_capture, may_capture, point_wait, stream_refusal,
)
from gpumem._support.atomics cimport (
    count_add, load32, load64, locked_add64, publish64, store32, store64,
)
from gpumem._support.clock cimport sleep_ns
from gpumem._support.events cimport is_recorded, REC_FREE_COMPLETED, REC_FREE_REQUESTED, REC_RESET
from gpumem._support.interpreter cimport interpreter_release, interpreter_restore, PyThreadState
from gpumem._support.lease cimport Uses, uses_add, uses_free
from gpumem._support.lock cimport lock_acquire, lock_release
from gpumem._support.memory cimport reserved_close, reserved_grow
from gpumem._support.streams cimport LEGACY_STREAM, PER_THREAD_STREAM, reclaim_is_due, reclaim_next


# ---- An event closes an epoch, after the work of the freed blocks --------------------------------

cdef void switch_stream(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    lock_acquire(&arena.lock)
    if arena.last_stream != stream_slot and switch_needs_event(arena):
        close_epoch(arena, arena.last_stream)
        arena.table.shared = True
        arena.small.shared = True
    arena.last_stream = stream_slot
    lock_release(&arena.lock)


cdef void close_epoch(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    # Caller holds `lock`, which is released for the driver. Records an event after all work that
    # was queued on the stream when its blocks were freed; later frees belong to the next epoch.
    cdef StreamSlot* stream = &arena.streams[stream_slot]
    cdef uint64_t epoch = stream.epoch
    cdef CUstream handle = stream.handle
    cdef CUevent event = stream.event
    cdef CUresult code
    if stream.state != STREAM_NAMED:
        return
    if not arena_stream_is_callers(arena, stream_slot):
        # Another thread's default stream cannot be named here; the legacy stream waits for it.
        handle = <CUstream><uint64_t>LEGACY_STREAM
    # `dirty` before the epoch, the opposite of a free, which reads the epoch and then sets `dirty`:
    # no free of the new epoch goes unnoticed.
    store32(&stream.dirty, False)
    stream.has_remainder = False
    publish64(&stream.epoch, epoch + 1)
    stream.in_driver = True
    lock_release(&arena.lock)
    # The driver is called without the lock: it may wait for another thread's call.
    code = record_event(arena.context, handle, &event)
    lock_acquire(&arena.lock)
    stream.in_driver = False
    stream.event = event
    stream.refusal = CUDA_SUCCESS if ends_with_capture(code) else code
    if code == CUDA_SUCCESS:
        stream.event_epoch = epoch
        locked_add64(&arena.stats.events_recorded, 1)
    else:
        # The work is still not covered: the next event will cover it too.
        store32(&stream.dirty, True)


cdef CUresult record_event(DeviceContext* context, CUstream stream, CUevent* event) noexcept nogil:
    # Never into a capture: the event would become a part of the graph and never complete.
    cdef CUresult code = stream_refusal(context, stream)
    if code == CUDA_SUCCESS:
        code = context_enter(context)
    if code != CUDA_SUCCESS:
        return code
    if event[0] == NULL:
        code = context.table.cuEventCreate(event, CU_EVENT_DISABLE_TIMING)
    if code == CUDA_SUCCESS:
        code = context.table.cuEventRecord(event[0], stream)
    context_leave(context)
    return code


# ---- An event that has completed makes the blocks of its epoch free for every stream -------------

cdef bint release_completed(ArenaCore* arena, uint32_t requesting) noexcept nogil:
    cdef bint completed = False
    cdef uint32_t stream_slot
    lock_acquire(&arena.lock)
    for stream_slot in range(1, arena.table.stream_slot_count):
        if is_worth_polling(arena, stream_slot, requesting) and end_epochs(arena, stream_slot):
            completed = True
    if arena.pending_free != NULL and free_completed(arena):
        completed = True
    lock_release(&arena.lock)
    return completed


cdef void find_idle(ArenaCore* arena) noexcept nogil:
    # Caches first: their blocks count as used, and carry epochs too.
    caches_flush(arena)
    mark_remainders_dirty(arena, SLOT_RELEASED)
    release_completed(arena, SLOT_RELEASED)


cdef void mark_remainders_dirty(ArenaCore* arena, uint32_t requesting) noexcept nogil:
    # The remainder of a new place is its stream's, so that the stream's next blocks lie
    # side by side. Nothing was freed, so no event is recorded for it; here it is said to be freed.
    cdef uint32_t stream_slot
    lock_acquire(&arena.lock)
    for stream_slot in range(1, arena.table.stream_slot_count):
        if arena.streams[stream_slot].has_remainder and stream_slot != requesting:
            store32(&arena.streams[stream_slot].dirty, True)
    lock_release(&arena.lock)


cdef bint is_worth_polling(const ArenaCore* arena, uint32_t stream_slot,
                           uint32_t requesting) noexcept nogil:
    # With reuse="never" no epoch is released, but pending frees that wait for the stream end, and
    # regions without a block are released. They may wait for the requesting stream's own work.
    if arena.streams[stream_slot].pending_frees or arena.streams[stream_slot].holds_region:
        return True
    return arena.settings.reuse != REUSE_NEVER and stream_slot != requesting and (
        has_free(arena, stream_slot) or dormant_views_wait(arena, stream_slot))


cdef inline bint has_free(const ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    return (arena.table.bins[stream_slot].free_chunks != 0
            or arena.small.bins[stream_slot].free_chunks != 0)


cdef inline bint dormant_views_wait(const ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    # All that was freed on the stream is in use again. But where a page moved, its mapping from
    # before, the dormant view, stays until the stream's work is known to be done. Another thread
    # may move pages now, without the arena lock.
    cdef uint64_t moved = (load64(&arena.spaces[LARGE_SPACE].moved)
                           + load64(&arena.spaces[SMALL_SPACE].moved))
    return moved != 0 and has_unknown_work(arena, stream_slot)


cdef bint end_epochs(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    # Polls an event of the last switch first; then one after the frees since.
    cdef StreamSlot* stream = &arena.streams[stream_slot]
    if stream.in_driver:
        return False
    if stream.event_epoch and not poll_event(arena, stream_slot):
        return False
    if load32(&stream.dirty) and not stream.in_driver:
        close_epoch(arena, stream_slot)
        if stream.event_epoch:
            poll_event(arena, stream_slot)
    return True


cdef bint poll_event(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    # Caller holds `lock`, which is released for the driver; `in_driver` then keeps other threads
    # off the slot.
    cdef StreamSlot* stream = &arena.streams[stream_slot]
    cdef uint64_t epoch = stream.event_epoch
    cdef CUevent event = stream.event
    cdef CUstreamCaptureMode mode
    cdef CUresult code
    stream.in_driver = True
    lock_release(&arena.lock)
    code = context_enter(arena.context)
    if code == CUDA_SUCCESS:
        mode = context_relax(arena.context)
        code = arena.context.table.cuEventQuery(event)
        context_restore(arena.context, mode)
        context_leave(arena.context)
    lock_acquire(&arena.lock)
    stream.in_driver = False
    locked_add64(&arena.stats.events_asked, 1)
    if code != CUDA_SUCCESS:
        return False
    end_epoch(arena, stream_slot, epoch)
    return True


cdef void end_epoch(ArenaCore* arena, uint32_t stream_slot, uint64_t epoch) noexcept nogil:
    cdef StreamSlot* stream = &arena.streams[stream_slot]
    if stream.event_epoch <= epoch:
        stream.event_epoch = 0
    # Another thread may have polled a later event while the lock was released.
    if epoch > stream.done:
        stream.done = epoch
        store64(&arena.completions, arena.completions + 1)
    if epoch > arena.table.bins[stream_slot].completed and arena.settings.reuse != REUSE_NEVER:
        release_epochs(arena, stream_slot, epoch)


cdef void query_stream(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    # An event that is recorded now is done some microseconds later, even on an idle stream. Another
    # thread's default stream cannot be named.
    cdef StreamSlot* stream = &arena.streams[stream_slot]
    cdef uint64_t epoch = stream.epoch
    cdef bint idle
    if stream.state != STREAM_NAMED or stream.in_driver or stream.thread != NULL:
        return
    # In the order of close_epoch, and for its reason.
    store32(&stream.dirty, False)
    publish64(&stream.epoch, epoch + 1)
    stream.in_driver = True
    lock_release(&arena.lock)
    idle = stream_is_idle(arena.context, stream.handle)
    lock_acquire(&arena.lock)
    stream.in_driver = False
    if idle:
        stream.has_remainder = False
        end_epoch(arena, stream_slot, epoch)
    else:
        store32(&stream.dirty, True)


cdef bint stream_is_idle(DeviceContext* context, CUstream stream) noexcept nogil:
    # A query would invalidate a capture.
    cdef CUresult code
    if may_capture(context, stream):
        return False
    code = context_enter(context)
    if code == CUDA_SUCCESS:
        code = context.table.cuStreamQuery(stream)
        context_leave(context)
    return code == CUDA_SUCCESS


cdef bint streams_are_idle(ArenaCore* arena) noexcept nogil:
    cdef uint32_t stream_slot
    cdef uint8_t* marked
    cdef CUstream handle
    cdef bint idle = True
    lock_acquire(&arena.lock)
    marked = marked_stream_slots(arena)
    for stream_slot in range(1, arena.table.stream_slot_count):
        # The arena itself holds the first slot. Without a block a handle may name nothing any more.
        if arena.streams[stream_slot].state != STREAM_NAMED or not (
                marked == NULL or marked[stream_slot] or has_unknown_work(arena, stream_slot)
                or load32(<const uint32_t*>&arena.streams[stream_slot].references) > (
                    stream_slot == 1)):
            continue
        handle = arena.streams[stream_slot].handle
        if arena.streams[stream_slot].thread != NULL:
            handle = <CUstream><uint64_t>LEGACY_STREAM      # which waits for it
        lock_release(&arena.lock)
        # Work that is being captured does not run.
        idle = may_capture(arena.context, handle) or stream_is_idle(arena.context, handle)
        lock_acquire(&arena.lock)
        if not idle:
            break
    lock_release(&arena.lock)
    free(marked)
    return idle


cdef void release_epochs(ArenaCore* arena, uint32_t stream_slot, uint64_t epoch) noexcept nogil:
    # Memory that was freed on the stream up to this epoch becomes free for every stream.
    bfc_release_completed(&arena.table, stream_slot, epoch)
    bfc_release_completed(&arena.small, stream_slot, epoch)


# ---- A requesting stream waits on the device for unfinished blocks -------------------------------

cdef enum:
    SHORT_PAUSE = 20000         # ns; longer than most calls of the driver


cdef uint32_t allocate_behind(ArenaCore* arena, Bfc* table, uint64_t nbytes, uint32_t requesting,
                              int* status) noexcept nogil:
    # A queued wait cannot be undone, and queueing it releases the lock. So the memory is allocated
    # to the requesting stream first: no other thread can take it, and no wait is queued in vain.
    cdef uint64_t size = round_to_quantum(nbytes)
    cdef uint32_t index = NIL
    cdef uint32_t stream_slot
    for stream_slot in range(1, arena.table.stream_slot_count):
        if index == NIL and stream_slot != requesting and bfc_has(table, size, stream_slot):
            index = take_behind(arena, table, size, nbytes, stream_slot, requesting, status)
    if index == NIL and arena.pending_free != NULL:
        index = take_pending_behind(arena, table, size, nbytes, requesting, status)
    return index


cdef uint32_t take_behind(ArenaCore* arena, Bfc* table, uint64_t size, uint64_t nbytes,
                          uint32_t stream_slot, uint32_t requesting, int* status) noexcept nogil:
    cdef uint32_t index
    cdef uint64_t epoch
    cdef int found = BFC_OK
    record_event_if_dirty(arena, stream_slot)
    # The chunk's own epoch may be an earlier one, which ends with the same event.
    epoch = arena.streams[stream_slot].event_epoch
    index = bfc_allocate_from(table, size, nbytes, stream_slot, epoch, requesting, &found)
    if index == NIL:
        return NIL
    if not padding_has_room(arena, size, table.chunks[index].size):
        status[0] = ARENA_OVER_BUDGET
    elif wait_behind(arena, stream_slot, epoch, requesting):
        return index
    bfc_free(table, index, stream_slot, epoch)      # as it was
    return NIL


cdef uint32_t take_pending_behind(ArenaCore* arena, Bfc* table, uint64_t size, uint64_t nbytes,
                                  uint32_t requesting, int* status) noexcept nogil:
    # A pending-free block is allocated to the requesting stream, which waits for all its uses.
    cdef Uses* uses = pending_free_best(arena, table, size)
    cdef uint64_t handle
    cdef int found = BFC_OK
    if uses == NULL:
        return NIL
    handle = uses.handle
    if not padding_has_room(arena, size, bfc_block_size(
            table, table.chunks[index_of(handle)].size, size)):
        status[0] = ARENA_OVER_BUDGET
        return NIL
    # No other thread frees or allocates it from here on; only the arena's end frees it.
    uses.taken = True
    # All events before the first wait: any of them may be refused.
    if (order_uses(arena, uses, handle, requesting, False)
            and order_uses(arena, uses, handle, requesting, True)):
        free_pending_behind(arena, uses, requesting)
        return bfc_allocate_from(table, size, nbytes, requesting, <uint64_t>ANY_EPOCH, requesting,
                                 &found)
    if is_pending_free(arena, uses, handle):
        uses.taken = False
    return NIL


cdef bint order_uses(ArenaCore* arena, const Uses* uses, uint64_t handle, uint32_t requesting,
                     bint waits) noexcept nogil:
    # Makes the requesting stream wait for every use of a block; without `waits` only records the
    # events for it. False: the driver refused, or the block is not pending free any more.
    cdef uint32_t i = 0
    if not order_epoch(arena, uses.stream_slot, uses.epoch, requesting, waits):
        return False
    while is_pending_free(arena, uses, handle):
        if i == uses.count:
            return True
        if not order_epoch(arena, uses.at[i].slot, uses.at[i].until, requesting, waits):
            return False
        i += 1
    return False


cdef inline bint order_epoch(ArenaCore* arena, uint32_t stream_slot, uint64_t epoch,
                             uint32_t requesting, bint waits) noexcept nogil:
    if waits:
        return wait_behind(arena, stream_slot, epoch, requesting)
    return cover_epoch(arena, stream_slot, epoch)


cdef bint cover_epoch(ArenaCore* arena, uint32_t stream_slot, uint64_t epoch) noexcept nogil:
    cdef StreamSlot* stream = &arena.streams[stream_slot]
    if stream.done < epoch and stream.epoch == epoch and not stream.in_driver:
        close_epoch(arena, stream_slot)     # it still runs: no event was recorded after it
    return stream.done >= epoch or stream.event_epoch >= epoch


cdef void record_event_if_dirty(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    if load32(&arena.streams[stream_slot].dirty) and not arena.streams[stream_slot].in_driver:
        close_epoch(arena, stream_slot)


cdef bint wait_behind(ArenaCore* arena, uint32_t stream_slot, uint64_t epoch,
                      uint32_t requesting) noexcept nogil:
    cdef StreamSlot* stream = &arena.streams[stream_slot]
    while stream.in_driver:       # another thread's call of the driver for it, which does not wait
        lock_release(&arena.lock)
        sleep_ns(SHORT_PAUSE)
        lock_acquire(&arena.lock)
    return (stream_slot == requesting or stream.done >= epoch
            or enqueue_wait(arena, stream_slot, requesting))


cdef void record_events_of_others(ArenaCore* arena, uint32_t requesting) noexcept nogil:
    cdef uint32_t stream_slot
    for stream_slot in range(1, arena.table.stream_slot_count):
        if stream_slot != requesting and has_free(arena, stream_slot):
            record_event_if_dirty(arena, stream_slot)


cdef void set_cross_stream_search(ArenaCore* arena, uint32_t requesting, bint on) noexcept nogil:
    cdef uint32_t stream_slot
    cdef uint64_t behind
    for stream_slot in range(1, arena.table.stream_slot_count):
        behind = arena.streams[stream_slot].event_epoch if on and stream_slot != requesting else 0
        arena.table.bins[stream_slot].behind = arena.small.bins[stream_slot].behind = behind


cdef bint enqueue_wait(ArenaCore* arena, uint32_t stream_slot, uint32_t requesting) noexcept nogil:
    # Caller holds `lock`, which is released for the driver; `in_driver` keeps other threads from
    # recording the event again.
    cdef CUevent event = arena.streams[stream_slot].event
    cdef CUstream stream = arena.streams[requesting].handle
    cdef CUresult code
    arena.streams[stream_slot].in_driver = True
    lock_release(&arena.lock)
    code = context_enter(arena.context)
    if code == CUDA_SUCCESS:
        code = arena.context.table.cuStreamWaitEvent(stream, event, 0)
        context_leave(arena.context)
    lock_acquire(&arena.lock)
    arena.streams[stream_slot].in_driver = False
    locked_add64(&arena.stats.events_waited, 1)
    return code == CUDA_SUCCESS


# ---- Pending free: blocks that recorded streams may still use ------------------------------------

cdef bint free_later(ArenaCore* arena, uint64_t handle, uint32_t stream_slot,
                     Uses* uses) noexcept nogil:
    cdef Bfc* table = table_of(arena, handle)
    cdef uint32_t index
    if bfc_resolve(table, handle & ~<uint64_t>IN_SMALL, &index) != BFC_OK:
        uses_release(arena, uses)
        return False
    # Only the stream of the free, or drained ones: a stamp of that stream covers all.
    if not stamp_uses(arena, stream_slot, uses):
        uses_free(uses)
        return False
    # The block leaves the used ones: the table needs what this thread's cache has not published.
    cache_publish(arena, cache_find(arena))
    uses.handle = handle
    uses.stream_slot = stream_slot
    uses.epoch = stamp_free(&arena.streams[stream_slot])
    if is_recorded(&arena.events):
        note_chunk(arena, REC_FREE_REQUESTED, handle, stream_slot, False)
    bfc_begin_pending_free(table, index, stream_slot, uses.epoch)
    uses.next = arena.pending_free
    arena.pending_free = uses
    locked_add64(&arena.stats.num_frees, 1)
    return True


cdef bint stamp_uses(ArenaCore* arena, uint32_t stream_slot, Uses* uses) noexcept nogil:
    # References become pending frees: a use ends with what is queued now. The stream of the free is
    # in order anyway. A stream in STREAM_LEFT may still work: its epoch stays open until a wait for
    # the device.
    cdef uint32_t i, slot
    cdef uint32_t left = 0
    for i in range(uses.count):
        slot = uses.at[i].slot
        count_add(&arena.streams[slot].references, -1)
        # `pending_frees` keeps the slot from here on, as the reference did.
        if slot == stream_slot or arena.streams[slot].state == STREAM_DRAINED:
            continue
        uses.at[left].slot = slot
        uses.at[left].until = stamp_free(&arena.streams[slot])
        arena.streams[slot].pending_frees += 1
        left += 1
    uses.count = left
    return left != 0


cdef void uses_release(ArenaCore* arena, Uses* uses) noexcept nogil:
    cdef uint32_t i
    for i in range(uses.count):
        count_add(&arena.streams[uses.at[i].slot].references, -1)
    uses_free(uses)


cdef bint free_completed(ArenaCore* arena) noexcept nogil:
    cdef Uses** link = &arena.pending_free
    cdef Uses* uses
    cdef bint found = False
    while link[0] != NULL:
        uses = link[0]
        if not uses.taken and uses_done(arena, uses):
            link[0] = uses.next
            free_pending(arena, uses, uses.stream_slot, uses.epoch)
            found = True
        else:
            link = &uses.next
    return found


cdef bint uses_done(const ArenaCore* arena, const Uses* uses) noexcept nogil:
    cdef uint32_t i
    for i in range(uses.count):
        # `until` is the epoch that ran on the stream at the free.
        if uses.at[i].until > arena.streams[uses.at[i].slot].done:
            return False
    return True


cdef void free_pending(ArenaCore* arena, Uses* uses, uint32_t stream_slot,
                       uint64_t epoch) noexcept nogil:
    # Caller has removed `uses` from the list.
    cdef Bfc* table = table_of(arena, uses.handle)
    cdef uint32_t index = index_of(uses.handle)
    cdef uint32_t i
    for i in range(uses.count):
        arena.streams[uses.at[i].slot].pending_frees -= 1
    if is_recorded(&arena.events):
        note_chunk(arena, REC_FREE_COMPLETED, uses.handle, uses.stream_slot, False)
    bfc_end_pending_free(table, index, stream_slot, epoch)
    # A persistent region is released to the driver at the next growth or shrink, not under the
    # lock.
    if table.chunks[index].persistent:
        arena.retired += 1
    uses_free(uses)


cdef void free_all_pending(ArenaCore* arena) noexcept nogil:
    cdef Uses* uses
    lock_acquire(&arena.lock)
    while arena.pending_free != NULL:
        uses = arena.pending_free
        arena.pending_free = uses.next
        free_pending(arena, uses, uses.stream_slot, uses.epoch)
    lock_release(&arena.lock)


cdef Uses* pending_free_best(ArenaCore* arena, const Bfc* table, uint64_t size) noexcept nogil:
    cdef Uses* best = NULL
    cdef uint64_t best_size = <uint64_t>-1
    cdef Uses* uses = arena.pending_free
    cdef const Chunk* chunk
    while uses != NULL:
        chunk = &table.chunks[index_of(uses.handle)]
        # A linear search: pending frees are few, and this is the path after every other has failed.
        if (table_of(arena, uses.handle) == table and not uses.taken
                and size <= chunk.size < best_size
                and not chunk.persistent):
            best = uses
            best_size = chunk.size
        uses = uses.next
    return best


cdef bint is_pending_free(const ArenaCore* arena, const Uses* uses, uint64_t handle) noexcept nogil:
    cdef const Uses* at = arena.pending_free
    while at != NULL:
        # The host may have reused the address of `uses`; the handle has the block's generation.
        if at == uses:
            return at.handle == handle
        at = at.next
    return False


cdef void free_pending_behind(ArenaCore* arena, Uses* uses, uint32_t requesting) noexcept nogil:
    # As if it had been freed on the requesting stream now.
    cdef Uses** link = &arena.pending_free
    while link[0] != uses:
        link = &link[0].next
    link[0] = uses.next
    free_pending(arena, uses, requesting, stamp_free(&arena.streams[requesting]))


# ---- The host has waited: everything is free -----------------------------------------------------

cdef void wait_for_frees(ArenaCore* arena, bint* interrupted) noexcept nogil:
    # Streams that other threads name during the wait are not waited for.
    cdef CUstreamCaptureMode mode = context_relax(arena.context)
    cdef uint32_t count, stream_slot
    lock_acquire(&arena.lock)
    count = arena.table.stream_slot_count
    lock_release(&arena.lock)
    for stream_slot in range(1, count):
        wait_for_stream(arena, stream_slot, interrupted)
        if interrupted != NULL and interrupted[0]:
            break
    context_restore(arena.context, mode)


cdef void drain_streams(ArenaCore* arena, bint* interrupted) noexcept nogil:
    cdef CUstreamCaptureMode mode = context_relax(arena.context)
    wait_for_frees(arena, interrupted)
    if (interrupted == NULL or not interrupted[0]) and streams_may_work(arena):
        if interrupted == NULL:
            wait_for_device(arena)
        else:
            device_wait(arena.context, interrupted)
    if interrupted == NULL or not interrupted[0]:
        complete_streams(arena)
    context_restore(arena.context, mode)


cdef void wait_for_stream(ArenaCore* arena, uint32_t stream_slot, bint* interrupted) noexcept nogil:
    # During the wait other threads may poll the event, or record it again, later in the stream.
    cdef StreamSlot* stream = &arena.streams[stream_slot]
    cdef CUevent event = NULL
    lock_acquire(&arena.lock)
    if load32(&stream.dirty) and not stream.in_driver:
        close_epoch(arena, stream_slot)
    if stream.event_epoch:
        event = stream.event
    lock_release(&arena.lock)
    if event == NULL:
        return
    if interrupted != NULL:
        point_wait(arena.context, AWAIT_EVENT, event, interrupted)
    elif context_enter(arena.context) == CUDA_SUCCESS:
        arena.context.table.cuEventSynchronize(event)
        context_leave(arena.context)


cdef bint streams_may_work(ArenaCore* arena) noexcept nogil:
    cdef bint unknown = False
    cdef uint32_t stream_slot
    lock_acquire(&arena.lock)
    for stream_slot in range(1, arena.table.stream_slot_count):
        if has_unknown_work(arena, stream_slot):
            end_epochs(arena, stream_slot)
        if has_unknown_work(arena, stream_slot) or arena.streams[stream_slot].in_driver:
            unknown = True
    lock_release(&arena.lock)
    return unknown


cdef bint streams_are_done(ArenaCore* arena) noexcept nogil:
    cdef uint32_t stream_slot
    lock_acquire(&arena.lock)
    for stream_slot in range(1, arena.table.stream_slot_count):
        if has_unknown_work(arena, stream_slot):
            query_stream(arena, stream_slot)
    lock_release(&arena.lock)
    return not streams_may_work(arena)


cdef void leave_streams(ArenaCore* arena) noexcept nogil:
    cdef CUstreamCaptureMode mode = context_relax(arena.context)
    cdef uint32_t stream_slot
    cdef StreamSlot* stream
    lock_acquire(&arena.lock)
    for stream_slot in range(1, arena.table.stream_slot_count):
        stream = &arena.streams[stream_slot]
        if has_unknown_work(arena, stream_slot):
            query_stream(arena, stream_slot)
        if load32(&stream.dirty) and not stream.in_driver:
            close_epoch(arena, stream_slot)
        if load32(&stream.dirty) and not stream.in_driver:
            close_epoch(arena, stream_slot)     # once more if the driver refused
        # The default streams do not end.
        if stream.state == STREAM_NAMED and <uint64_t>stream.handle > PER_THREAD_STREAM:
            stream.state = STREAM_LEFT
    lock_release(&arena.lock)
    context_restore(arena.context, mode)


cdef CUresult wait_for_device(ArenaCore* arena) noexcept nogil:
    cdef CUresult code = context_enter(arena.context)
    if code == CUDA_SUCCESS:
        code = context_synchronize(arena.context)
        context_leave(arena.context)
    return code


cdef void complete_streams(ArenaCore* arena) noexcept nogil:
    cdef uint32_t stream_slot
    for stream_slot in range(1, arena.table.stream_slot_count):
        complete_all(arena, stream_slot)


cdef void complete_done_streams(ArenaCore* arena) noexcept nogil:
    cdef CUstreamCaptureMode mode = context_relax(arena.context)
    cdef uint32_t stream_slot
    cdef bint unknown
    caches_flush(arena)
    for stream_slot in range(1, arena.table.stream_slot_count):
        lock_acquire(&arena.lock)
        if has_unknown_work(arena, stream_slot):
            query_stream(arena, stream_slot)
        if has_unknown_work(arena, stream_slot):
            end_epochs(arena, stream_slot)
        unknown = has_unknown_work(arena, stream_slot) or arena.streams[stream_slot].in_driver
        lock_release(&arena.lock)
        if not unknown:
            complete_all(arena, stream_slot)
    context_restore(arena.context, mode)


cdef void complete_all(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    cdef StreamSlot* stream = &arena.streams[stream_slot]
    # Cached blocks carry epochs too: in the table they are released with the others.
    caches_flush(arena)
    lock_acquire(&arena.lock)
    stream.done = stream.epoch
    store64(&arena.completions, arena.completions + 1)
    release_epochs(arena, stream_slot, stream.epoch)
    store32(&stream.dirty, False)
    stream.has_remainder = False
    publish64(&stream.epoch, stream.epoch + 1)
    stream.event_epoch = 0
    stream.refusal = CUDA_SUCCESS
    free_completed(arena)
    lock_release(&arena.lock)


cdef void destroy_events(ArenaCore* arena) noexcept nogil:
    cdef uint32_t stream_slot
    cdef StreamSlot* stream
    if context_enter(arena.context) != CUDA_SUCCESS:
        return
    for stream_slot in range(1, arena.table.stream_slot_count):
        stream = &arena.streams[stream_slot]
        # An event that the driver does not destroy stays, for another try.
        if (stream.event != NULL
                and arena.context.table.cuEventDestroy(stream.event) == CUDA_SUCCESS):
            stream.event = NULL
            stream.event_epoch = 0
    context_leave(arena.context)


# ---- Slots: found and made -----------------------------------------------------------------------

cdef bint arena_stream_is_callers(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    cdef const ThreadMark* thread = arena.streams[stream_slot].thread
    return thread == NULL or thread == thread_now()


cdef int arena_stream(ArenaCore* arena, CUstream handle, bint retain, uint32_t* stream_slot,
                      bint* fresh) noexcept nogil:
    cdef ThreadMark* thread = NULL
    cdef PyThreadState* interpreter
    cdef int status = ARENA_OK
    cdef bint known
    fresh[0] = False
    if <uint64_t>handle == 0:
        handle = <CUstream><uint64_t>LEGACY_STREAM
    elif <uint64_t>handle == PER_THREAD_STREAM:
        thread = thread_now()
        if thread == NULL:
            return ARENA_NO_METADATA
    lock_acquire(&arena.lock)
    known = find_stream(arena, handle, thread, stream_slot)
    if not known and reclaim_is_due(arena.table.stream_slot_count, arena.vacant_slots,
                                    arena.reclaim_at):
        # Calls the driver, so without the lock; then another thread may have made the slot.
        lock_release(&arena.lock)
        interpreter = interpreter_release()
        reclaim(arena)
        interpreter_restore(interpreter)
        lock_acquire(&arena.lock)
        known = find_stream(arena, handle, thread, stream_slot)
    if not known:
        status = add_stream(arena, handle, thread, stream_slot)
        fresh[0] = status == ARENA_OK
    if status == ARENA_OK:
        # A caller names the handle, so that the stream exists.
        arena.streams[stream_slot[0]].state = STREAM_NAMED
        if retain:
            slot_retain(arena, stream_slot[0])
    lock_release(&arena.lock)
    return status


cdef bint find_stream(const ArenaCore* arena, CUstream handle, const ThreadMark* thread,
                      uint32_t* stream_slot) noexcept nogil:
    cdef uint32_t i
    for i in range(1, arena.table.stream_slot_count):
        if arena.streams[i].handle == handle and arena.streams[i].thread == thread:
            stream_slot[0] = i
            return True
    return False


cdef int add_stream(ArenaCore* arena, CUstream handle, ThreadMark* thread,
                    uint32_t* stream_slot) noexcept nogil:
    # Slot 0 is that of memory that is free for every stream; streams begin with 1.
    stream_slot[0] = 1
    if arena.vacant_slots == 0:
        stream_slot[0] = arena.table.stream_slot_count      # of the one that is added
        if not add_slot(arena):
            return (ARENA_NO_STREAM_SLOT if arena.table.stream_slot_count == MAX_STREAMS
                    else ARENA_NO_METADATA)
    while arena.streams[stream_slot[0]].state != STREAM_VACANT:
        stream_slot[0] += 1
    if thread != NULL:
        thread_retain(thread)
    arena.vacant_slots -= 1
    arena.streams[stream_slot[0]].state = STREAM_NAMED
    arena.streams[stream_slot[0]].handle = handle
    arena.streams[stream_slot[0]].thread = thread
    return ARENA_OK


cdef bint add_slot(ArenaCore* arena) noexcept nogil:
    cdef uint32_t stream_slot
    # The array never moves, so that it is read without the lock.
    if (arena.table.stream_slot_count >= arena.stream_capacity
            and not reserved_grow(<void**>&arena.streams, &arena.stream_capacity, MAX_STREAMS,
                                  sizeof(StreamSlot))):
        return False
    # A slot that only one table got is found again by the next try; loops follow the other table.
    if (arena.small.stream_slot_count <= arena.table.stream_slot_count
            and bfc_add_stream_slot(&arena.small, &stream_slot) != BFC_OK):
        return False
    if bfc_add_stream_slot(&arena.table, &stream_slot) != BFC_OK:
        return False
    # All other fields of a fresh slot are 0. Epochs begin with 1, so that epoch 0 is before every
    # free and 0 can mean that no event is outstanding.
    arena.streams[stream_slot].epoch = 1
    arena.vacant_slots += 1
    return True


cdef void streams_free(ArenaCore* arena) noexcept nogil:
    cdef uint32_t stream_slot
    for stream_slot in range(1, arena.table.stream_slot_count):
        if arena.streams[stream_slot].thread != NULL:
            thread_drop(arena.streams[stream_slot].thread)
    reserved_close(arena.streams, MAX_STREAMS * sizeof(StreamSlot))


# ---- Slots: retained by recorded uses and calls --------------------------------------------------

cdef void slot_retain(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    count_add(&arena.streams[stream_slot].references, 1)


cdef void slot_drop(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    count_add(&arena.streams[stream_slot].references, -1)


cdef int arena_record(ArenaCore* arena, Uses** uses, uint32_t stream_slot) noexcept nogil:
    cdef bint added
    if not uses_add(uses, stream_slot, &added):
        return ARENA_NO_METADATA
    if added:
        slot_retain(arena, stream_slot)
    return ARENA_OK


# ---- Slots: reset and vacated --------------------------------------------------------------------

cdef bint arena_reset_stream(ArenaCore* arena, uint32_t stream_slot,
                             bint may_end) noexcept nogil:
    cdef uint8_t* marked
    cdef bint vacated = False
    if is_recorded(&arena.events):
        note_event(arena, REC_RESET, 0, 0, 0, stream_slot, True)
    complete_all(arena, stream_slot)
    lock_acquire(&arena.lock)
    # The slot stays if blocks in use are still marked with it.
    marked = marked_stream_slots(arena)
    if marked != NULL and is_idle(arena, stream_slot, marked):
        vacate(arena, stream_slot)
        vacated = True
    elif may_end:
        arena.streams[stream_slot].state = STREAM_DRAINED
    lock_release(&arena.lock)
    free(marked)
    return vacated


cdef void reclaim(ArenaCore* arena) noexcept nogil:
    # Vacates slots that mark no chunk: of per-thread streams mostly those of threads that ended.
    cdef uint32_t stream_slot
    cdef uint8_t* marked
    find_idle(arena)        # which takes marks off slots
    lock_acquire(&arena.lock)
    for stream_slot in range(1, arena.table.stream_slot_count):
        if has_unknown_work(arena, stream_slot) and arena.settings.reuse != REUSE_NEVER:
            end_epochs(arena, stream_slot)
    marked = marked_stream_slots(arena)
    if marked != NULL:
        for stream_slot in range(1, arena.table.stream_slot_count):
            if is_idle(arena, stream_slot, marked):
                vacate(arena, stream_slot)
    arena.reclaim_at = reclaim_next(arena.table.stream_slot_count, arena.vacant_slots)
    lock_release(&arena.lock)
    free(marked)


cdef uint8_t* marked_stream_slots(const ArenaCore* arena) noexcept nogil:
    # One byte per stream slot: a chunk is marked with it. NULL: out of host memory.
    cdef uint8_t* marked = <uint8_t*>calloc(arena.table.stream_slot_count + 1, 1)
    if marked != NULL:
        mark_stream_slots(&arena.table, marked)
        mark_stream_slots(&arena.small, marked)
    return marked


cdef void mark_stream_slots(const Bfc* table, uint8_t* marked) noexcept nogil:
    cdef uint32_t index, state
    for index in range(table.count):
        state = state_of(table, index)
        if state != CHUNK_UNUSED and state != CHUNK_HOLE:
            marked[table.chunks[index].stream_slot] = True


cdef inline bint is_idle(const ArenaCore* arena, uint32_t stream_slot,
                         const uint8_t* marked) noexcept nogil:
    cdef const StreamSlot* stream = &arena.streams[stream_slot]
    return (stream.state != STREAM_VACANT and not marked[stream_slot] and stream.pending_frees == 0
            and not stream.in_driver and load32(<const uint32_t*>&stream.references) == 0
            and not has_unknown_work(arena, stream_slot))


cdef void vacate(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    # Its epochs go on: stamps of the stream before must differ from those of the next.
    cdef StreamSlot* stream = &arena.streams[stream_slot]
    if stream.thread != NULL:
        thread_drop(stream.thread)
    stream.thread = NULL
    stream.handle = NULL
    stream.state = STREAM_VACANT
    arena.vacant_slots += 1
