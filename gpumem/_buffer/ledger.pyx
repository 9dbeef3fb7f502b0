"""The blocks that a resource has allocated for users."""

from cpython.ref cimport Py_INCREF, Py_XDECREF, PyObject
from libc.stdint cimport int32_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset

from gpumem._buffer.stream cimport stream_follow
from gpumem._native.budget cimport budget_admit, budget_charged, budget_drop, budget_uncharge
from gpumem._native.driver cimport (
    context_enter, context_is_dead, context_leave, CUDA_SUCCESS, CUresult, CUstream, DeviceContext,
)
from gpumem._support.atomics cimport count_add, store32
from gpumem._support.events cimport (
    event_source_close, event_source_name, event_source_note, event_source_open, is_recorded,
    OWNER_LEDGER, REC_ALLOC, REC_FREE, RecEvent, RecNoted,
)
from gpumem._support.lease cimport Lease, lease_create, uses_free
from gpumem._support.lock cimport lock_acquire, lock_init, lock_release
from gpumem._support.process cimport call_soon
from gpumem._support.retired cimport retire, Retired, take_retired
from gpumem._support.streams cimport (
    LEGACY_STREAM, PER_THREAD_STREAM, reclaim_is_due, reclaim_next,
)

from gpumem._support.releases import on_release


cdef extern from "Python.h" nogil:
    unsigned long thread_id "PyThread_get_thread_native_id"() noexcept

# Ledgers without references. The objects that they keep are released with the interpreter lock.
cdef Retired* retired = NULL


# ---- life of a ledger ----------------------------------------------------------------------------

cdef BlockLedger* ledger_make(size_t size, size_t block_size,
                              void (*free_block)(LedgerBlock*) noexcept nogil,
                              void (*end)(BlockLedger*) noexcept nogil) noexcept nogil:
    cdef BlockLedger* ledger = <BlockLedger*>calloc(1, size)
    if ledger == NULL:
        return NULL
    lock_init(&ledger.lock)
    ledger.references = 1
    ledger.granule = 1
    ledger.block_size = block_size
    ledger.free = free_block
    ledger.end = end
    return ledger


cdef bint ledger_open_streams(BlockLedger* ledger, CUstream default_stream) noexcept nogil:
    ledger.streams = <StreamSlot*>calloc(1, sizeof(StreamSlot))
    if ledger.streams == NULL:
        return False
    if <uintptr_t>default_stream == PER_THREAD_STREAM:
        ledger.default_per_thread = True
        default_stream = <CUstream><uintptr_t>LEGACY_STREAM     # waits for every thread's own
    ledger.streams[<int>DEFAULT_SLOT].handle = default_stream
    ledger.stream_count = 1
    return True


cdef void ledger_open_event_source(BlockLedger* ledger, const char* memory, const char* kind,
                                   const char* name) noexcept nogil:
    event_source_name(&ledger.events, memory, kind, name)
    ledger.events.budget = budget_charged(ledger.account)
    event_source_open(&ledger.events, ledger, OWNER_LEDGER)


cdef void ledger_keep(BlockLedger* ledger, object kept) noexcept:
    if ledger != NULL:
        Py_INCREF(kept)
        ledger.kept = <PyObject*>kept


cdef void ledger_drop(BlockLedger* ledger) noexcept nogil:
    if ledger == NULL or count_add(&ledger.references, -1) != 0:
        return
    if ledger.end != NULL:
        ledger.end(ledger)
    budget_drop(ledger.account)
    retire(&retired, &ledger.retired, ledger)
    call_soon(ledgers_release_retired)


cdef void ledgers_release_retired() noexcept:
    cdef Retired* link = take_retired(&retired)
    cdef BlockLedger* ledger
    while link != NULL:
        ledger = <BlockLedger*>link.thing
        link = link.next
        event_source_close(&ledger.events)
        Py_XDECREF(ledger.kept)
        free(ledger.streams)
        free(ledger)


# Released objects may hold arenas.
on_release("callbacks", lambda may_wait: ledgers_release_retired())


cdef LedgerStatus ledger_close(BlockLedger* ledger) noexcept nogil:
    cdef LedgerStatus status = LEDGER_OK
    cdef LedgerCounters* counters = &ledger.counters
    lock_acquire(&ledger.lock)
    # Another thread may still be inside a user's deallocate_raw.
    if counters.live or (ledger.is_users and counters.waiting):
        status = LEDGER_IN_USE
    else:
        store32(<uint32_t*>&ledger.closed, True)
    lock_release(&ledger.lock)
    return status


# ---- the life of a block -------------------------------------------------------------------------

cdef LedgerStatus ledger_claim(BlockLedger* ledger, uint64_t requested, uint64_t size,
                               uint32_t slot, bint persistent, LedgerBlock** out) noexcept nogil:
    cdef LedgerBlock* block = <LedgerBlock*>calloc(1, ledger.block_size)
    cdef bint closed
    if block == NULL:
        return LEDGER_NO_METADATA
    lock_acquire(&ledger.lock)
    closed = ledger.closed
    if not closed:
        ledger.counters.live += 1
        add_reference(ledger, slot, 1)
    lock_release(&ledger.lock)
    if closed:
        free(block)
        return LEDGER_CLOSED
    count_add(&ledger.references, 1)
    block.ledger = ledger
    block.requested = requested
    block.size = size
    block.slot = slot
    block.persistent = persistent
    out[0] = block
    return LEDGER_OK


cdef bint ledger_charge(LedgerBlock* block) noexcept nogil:
    if block.ledger.account == NULL or block.size == 0:
        return True
    if not budget_admit(block.ledger.account, block.size):
        return False
    block.charged = block.size
    return True


cdef void uncharge(LedgerBlock* block) noexcept nogil:
    # A fork's child has an empty budget, because the block is its parent's.
    if block.charged and not context_is_dead(block.ledger.context):
        budget_uncharge(block.ledger.account, block.charged)
    block.charged = 0


cdef void ledger_cancel(LedgerBlock* block) noexcept nogil:
    cdef BlockLedger* ledger = block.ledger
    uncharge(block)
    lock_acquire(&ledger.lock)
    ledger.counters.live -= 1
    add_reference(ledger, block.slot, -1)
    lock_release(&ledger.lock)
    free(block)
    ledger_drop(ledger)


cdef void ledger_deliver(LedgerBlock* block) noexcept nogil:
    cdef BlockLedger* ledger = block.ledger
    cdef LedgerCounters* counters = &ledger.counters
    lock_acquire(&ledger.lock)
    counters.num_allocs += 1
    counters.num_reserves += block.persistent
    counters.requested += block.requested
    counters.total_bytes += block.requested
    counters.in_use += block.size
    counters.max_in_use = max(counters.max_in_use, counters.in_use)
    counters.max_held = max(counters.max_held, counters.in_use + counters.waiting)
    counters.max_block = max(counters.max_block, block.size)
    counters.max_blocks = max(counters.max_blocks, counters.num_allocs - counters.num_frees)
    block.number = counters.num_allocs
    block.older = ledger.newest
    if block.older != NULL:
        block.older.newer = block
    ledger.newest = block
    lock_release(&ledger.lock)
    ledger_note(block, REC_ALLOC)


cdef Lease* ledger_lease(LedgerBlock* block, uint64_t address, uint64_t nbytes) noexcept nogil:
    return lease_create(<uintptr_t>block, address, nbytes, block.slot, NULL, release_lease)


cdef void release_lease(Lease* lease) noexcept nogil:
    cdef LedgerBlock* block = <LedgerBlock*><uintptr_t>lease.handle
    block.uses = lease.uses
    block.ledger.free(block)


cdef void ledger_return(LedgerBlock* block, bint waits) noexcept nogil:
    cdef BlockLedger* ledger = block.ledger
    cdef LedgerCounters* counters = &ledger.counters
    if context_is_dead(ledger.context):
        return
    ledger_note(block, REC_FREE)
    lock_acquire(&ledger.lock)
    if block.newer != NULL:
        block.newer.older = block.older
    else:
        ledger.newest = block.older
    if block.older != NULL:
        block.older.newer = block.newer
    counters.live -= 1
    counters.num_frees += 1
    counters.requested -= block.requested
    counters.in_use -= block.size
    if waits:
        counters.waiting += block.size
    lock_release(&ledger.lock)
    block.waits = waits
    if ledger.counts_in_use or not waits:
        uncharge(block)


cdef CUresult ledger_order_uses(LedgerBlock* block, CUstream stream) noexcept nogil:
    cdef DeviceContext* context = block.ledger.context
    cdef CUresult code
    cdef uint32_t i, slot
    if block.uses == NULL:
        return CUDA_SUCCESS
    code = context_enter(context)
    if code != CUDA_SUCCESS:
        return code
    for i in range(block.uses.count):
        slot = block.uses.at[i].slot
        # A stream that was reset is drained.
        if code == CUDA_SUCCESS and not (slot and ledger_is_default(block.ledger, slot)):
            code = stream_follow(context, ledger_stream(block.ledger, slot), context, stream)
    context_leave(context)
    return code


cdef void ledger_end(LedgerBlock* block, bint counted) noexcept nogil:
    cdef BlockLedger* ledger = block.ledger
    cdef uint32_t i
    if not context_is_dead(ledger.context):
        lock_acquire(&ledger.lock)
        if block.waits:
            ledger.counters.waiting -= block.size
        add_reference(ledger, block.slot, -1)
        for i in range(0 if block.uses == NULL else block.uses.count):
            add_reference(ledger, block.uses.at[i].slot, -1)
        lock_release(&ledger.lock)
    uncharge(block)
    uses_free(block.uses)
    free(block)
    if counted:
        ledger_drop(ledger)


# ---- counters ------------------------------------------------------------------------------------

cdef LedgerCounters ledger_counters(BlockLedger* ledger) noexcept nogil:
    cdef LedgerCounters now
    lock_acquire(&ledger.lock)
    now = ledger.counters
    lock_release(&ledger.lock)
    return now


cdef void ledger_reset_peaks(BlockLedger* ledger) noexcept nogil:
    cdef LedgerCounters* counters = &ledger.counters
    lock_acquire(&ledger.lock)
    counters.max_in_use = counters.in_use
    counters.max_blocks = counters.num_allocs - counters.num_frees
    lock_release(&ledger.lock)


cdef void ledger_count_call(BlockLedger* ledger, uint64_t shrinks) noexcept nogil:
    lock_acquire(&ledger.lock)
    ledger.counters.calls += 1
    ledger.counters.num_shrinks += shrinks
    lock_release(&ledger.lock)


cdef void ledger_note(LedgerBlock* block, uint32_t kind) noexcept nogil:
    cdef RecEvent event
    cdef RecNoted noted
    if not is_recorded(&block.ledger.events):
        return
    event.kind = kind
    event.address = block.base
    event.nbytes = block.requested
    event.block = block.size
    event.stream = <uint64_t>ledger_stream(block.ledger, block.slot)
    event_source_note(&block.ledger.events, &event, True, &noted)


cdef char* ledger_copy_blocks(BlockLedger* ledger, uint64_t* count) noexcept nogil:
    cdef size_t size = ledger.block_size
    cdef uint64_t room = ledger_counters(ledger).live + 64      # other threads may allocate
    cdef char* blocks = <char*>calloc(room, size)
    cdef LedgerBlock* block
    count[0] = 0
    if blocks == NULL:
        return NULL
    lock_acquire(&ledger.lock)
    block = ledger.newest
    while block != NULL and count[0] < room:
        memcpy(blocks + count[0] * size, block, size)
        count[0] += 1
        block = block.older
    lock_release(&ledger.lock)
    return blocks


cdef dict counted_fields(const LedgerCounters* now):
    return {
        "in_use": now.in_use,
        "requested_in_use": now.requested,
        "max_in_use": now.max_in_use,
        "num_allocs": now.num_allocs,
        "num_frees": now.num_frees,
        "num_reserves": now.num_reserves,
        "num_extensions": 0,
        "num_regions": 0,
        "num_shrinkages": now.num_shrinks,
        "max_alloc_size": now.max_block,
        "largest_free": 0,
        "pages_moved": 0,
        "driver_calls": now.calls,
    }


# ---- streams -------------------------------------------------------------------------------------

cdef inline CUstream named(CUstream handle) noexcept nogil:
    # Handles 0 and 1 are both the legacy default stream.
    return NULL if <uintptr_t>handle == LEGACY_STREAM else handle


cdef bint ledger_find_stream(BlockLedger* ledger, CUstream handle, uint32_t* slot,
                             bint* vacated) noexcept nogil:
    cdef int32_t thread = 0
    cdef bint found
    vacated[0] = False
    if <uintptr_t>handle == PER_THREAD_STREAM:
        thread = <int32_t>thread_id()
    lock_acquire(&ledger.lock)
    found = find_slot(ledger, handle, thread, slot)
    if not found:
        vacated[0] = vacate_idle(ledger)
        found = take_slot(ledger, handle, thread, slot)
    if found:
        ledger.streams[slot[0]].references += 1
    lock_release(&ledger.lock)
    return found


cdef bint find_slot(const BlockLedger* ledger, CUstream handle, int32_t thread,
                    uint32_t* slot) noexcept nogil:
    cdef const StreamSlot* stream
    cdef uint32_t i
    for i in range(ledger.stream_count):
        stream = &ledger.streams[i]
        if (named(stream.handle) == named(handle) and stream.thread == thread
                and not stream.drained and not stream.vacant):
            slot[0] = i
            return True
    return False


cdef bint take_slot(BlockLedger* ledger, CUstream handle, int32_t thread,
                    uint32_t* slot) noexcept nogil:
    cdef StreamSlot* grown
    cdef uint32_t i
    if ledger.vacant_slots:
        ledger.vacant_slots -= 1
        i = 0
        while not ledger.streams[i].vacant:
            i += 1
    else:
        i = ledger.stream_count
        grown = <StreamSlot*>realloc(ledger.streams, (i + 1) * sizeof(StreamSlot))
        if grown == NULL:
            return False
        ledger.streams = grown
        ledger.stream_count += 1
    memset(&ledger.streams[i], 0, sizeof(StreamSlot))
    ledger.streams[i].handle = handle
    ledger.streams[i].thread = thread
    slot[0] = i
    return True


cdef bint vacate_idle(BlockLedger* ledger) noexcept nogil:
    cdef uint32_t i
    if not reclaim_is_due(ledger.stream_count, ledger.vacant_slots, ledger.reclaim_at):
        return False
    for i in range(DEFAULT_SLOT + 1, ledger.stream_count):
        if ledger.streams[i].references == 0:
            vacate(ledger, i)
    ledger.reclaim_at = reclaim_next(ledger.stream_count, ledger.vacant_slots)
    return True


cdef void vacate(BlockLedger* ledger, uint32_t slot) noexcept nogil:
    memset(&ledger.streams[slot], 0, sizeof(StreamSlot))
    ledger.streams[slot].vacant = True
    ledger.vacant_slots += 1


cdef inline void add_reference(BlockLedger* ledger, uint32_t slot, int32_t count) noexcept nogil:
    # Caller holds `lock`. An adaptor's blocks have slots of its upstream, which counts its own
    # block.
    if ledger.streams != NULL:
        ledger.streams[slot].references += count


cdef void ledger_retain_slot(BlockLedger* ledger, uint32_t slot) noexcept nogil:
    lock_acquire(&ledger.lock)
    add_reference(ledger, slot, 1)
    lock_release(&ledger.lock)


cdef void ledger_drop_slot(BlockLedger* ledger, uint32_t slot) noexcept nogil:
    lock_acquire(&ledger.lock)
    add_reference(ledger, slot, -1)
    lock_release(&ledger.lock)


cdef bint ledger_is_vacant(BlockLedger* ledger, uint32_t slot) noexcept nogil:
    cdef bint answer
    lock_acquire(&ledger.lock)
    answer = ledger.streams[slot].vacant
    lock_release(&ledger.lock)
    return answer


cdef void ledger_move(LedgerBlock* block, uint32_t slot) noexcept nogil:
    # A fork's child frees nothing, and another thread may have held the lock at the fork.
    if slot == block.slot or context_is_dead(block.ledger.context):
        return
    lock_acquire(&block.ledger.lock)
    add_reference(block.ledger, slot, 1)
    add_reference(block.ledger, block.slot, -1)
    lock_release(&block.ledger.lock)
    block.slot = slot


cdef void ledger_drain(BlockLedger* ledger, uint32_t slot) noexcept nogil:
    cdef uint32_t references
    lock_acquire(&ledger.lock)
    references = ledger.streams[slot].references
    if references == 0:
        vacate(ledger, slot)
    else:
        ledger.streams[slot] = ledger.streams[<int>DEFAULT_SLOT]
        ledger.streams[slot].drained = True
        ledger.streams[slot].references = references
    lock_release(&ledger.lock)


cdef CUstream ledger_stream(BlockLedger* ledger, uint32_t slot) noexcept nogil:
    cdef StreamSlot stream
    lock_acquire(&ledger.lock)
    stream = ledger.streams[slot]
    lock_release(&ledger.lock)
    if stream.thread and stream.thread != <int32_t>thread_id():
        # Another thread's default stream cannot be named here; the legacy stream waits for it.
        return <CUstream><uintptr_t>LEGACY_STREAM
    return stream.handle


cdef bint ledger_is_default(BlockLedger* ledger, uint32_t slot) noexcept nogil:
    cdef bint answer
    lock_acquire(&ledger.lock)
    answer = slot == DEFAULT_SLOT or ledger.streams[slot].drained
    lock_release(&ledger.lock)
    return answer
