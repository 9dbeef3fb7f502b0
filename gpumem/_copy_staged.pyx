"""The pipeline of a staged copy; see _copy_staged.pxd."""

from libc.stdint cimport int64_t, uint64_t

from gpumem._copy_crew cimport (
    CrewBatch,
    CrewJob,
    batch_begin,
    batch_end,
    batch_give,
    batch_wait,
    crew_threads,
)
from gpumem._copy_driver cimport Answer, answer, rows_queue
from gpumem._copy_plan cimport (
    END_ORIGIN,
    END_TO,
    Cut,
    End,
    Rows,
    rows_box,
    rows_cut,
    rows_move,
    rows_pack,
    rows_piece,
)
from gpumem._driver cimport (
    CU_EVENT_DISABLE_TIMING,
    CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_SUCCESS,
    CUevent,
    CUresult,
    CUstream,
    Place,
)

cdef enum:
    MOST_SLOTS = 64
    LEAST_SLOT = 1 << 16    # bytes

# Bytes of a slot: large enough that a driver call is little beside it, small enough that the first
# and the last, which nothing overlaps, are too (bench/results/copies.md).
SLOT_BYTES = 2 << 20
# Slots on the bus at once: one moves, the others keep it busy until the calling thread comes round.
SLOTS_IN_FLIGHT = 4

cdef uint64_t slot_bytes = SLOT_BYTES
cdef int in_flight = SLOTS_IN_FLIGHT

cdef struct Staged:
    const Rows* rows
    End device
    Ring ring
    Cut cut
    CrewJob jobs[MOST_SLOTS]
    bint busy[MOST_SLOTS]           # its job was given and not yet waited for
    CUevent events[MOST_SLOTS]
    int event_count


cdef Ring ring_for(uint64_t nbytes) noexcept nogil:
    cdef Ring ring
    cdef uint64_t slots = min(crew_threads() + in_flight, MOST_SLOTS)
    ring.address = 0
    # A small copy is cut into as many pieces as there are slots, for all threads to have some.
    ring.slot_bytes = slot_bytes
    while ring.slot_bytes > LEAST_SLOT and ring.slot_bytes * slots > nbytes:
        ring.slot_bytes //= 2
    ring.slots = min(slots, nbytes // ring.slot_bytes + 1)
    return ring


cdef uint64_t ring_bytes(Ring ring) noexcept nogil:
    return ring.slots * ring.slot_bytes


cdef Answer rows_stage(Place* place, CUstream stream, const Rows* rows, End device,
                       Ring ring) noexcept nogil:
    cdef Staged staged
    cdef CrewBatch batch
    cdef Answer said
    staged.rows = rows
    staged.device = device
    staged.ring = ring
    staged.cut = rows_cut(rows, ring.slot_bytes)
    staged.event_count = 0
    if not batch_begin(&batch, &staged):
        return answer(CUDA_ERROR_OUT_OF_MEMORY, "pthread_cond_init")
    said = make_events(&staged, place)
    if said.code == CUDA_SUCCESS:
        if device == END_TO:
            said = pump_up(&staged, &batch, place, stream)
        else:
            said = pump_down(&staged, &batch, place, stream)
        said = settle(&staged, &batch, place, stream, said)
    drop_events(&staged, place)
    batch_end(&batch)
    return said


# ---- the two directions --------------------------------------------------------------------------

cdef Answer pump_up(Staged* staged, CrewBatch* batch, Place* place,
                    CUstream stream) noexcept nogil:
    cdef Answer said = answer(CUDA_SUCCESS, NULL)
    cdef int slots = staged.ring.slots
    cdef int lag = lag_of(slots)
    cdef int64_t number, sent
    for number in range(min(<int64_t>slots, staged.cut.count)):
        give(staged, batch, number)
    for number in range(staged.cut.count):
        wait(staged, batch, number)
        said = send(staged, place, stream, number)
        sent = number - lag
        if said.code == CUDA_SUCCESS and sent >= 0 and sent + slots < staged.cut.count:
            said = arrive(staged, place, sent)
            if said.code == CUDA_SUCCESS:
                give(staged, batch, sent + slots)
        if said.code != CUDA_SUCCESS:
            break
    return said


cdef Answer pump_down(Staged* staged, CrewBatch* batch, Place* place,
                      CUstream stream) noexcept nogil:
    cdef Answer said = answer(CUDA_SUCCESS, NULL)
    cdef int lag = lag_of(staged.ring.slots)
    cdef int64_t number, sent
    for number in range(staged.cut.count + lag):
        if number < staged.cut.count:
            wait(staged, batch, number)         # until the slot's last piece was taken out
            said = send(staged, place, stream, number)
        sent = number - lag
        if said.code == CUDA_SUCCESS and 0 <= sent < staged.cut.count:
            said = arrive(staged, place, sent)
            if said.code == CUDA_SUCCESS:
                give(staged, batch, sent)
        if said.code != CUDA_SUCCESS:
            break
    return said


cdef Answer settle(Staged* staged, CrewBatch* batch, Place* place, CUstream stream,
                   Answer said) noexcept nogil:
    """Wait until nothing uses the ring; a failure that came first is the one that counts."""
    cdef CUresult code
    cdef int slot
    for slot in range(staged.ring.slots):
        wait(staged, batch, slot)
    code = place.table.cuStreamSynchronize(stream)
    if code != CUDA_SUCCESS:
        place.table.cuCtxSynchronize()      # all that is left to try
    if said.code == CUDA_SUCCESS:
        said = answer(code, "cuStreamSynchronize")
    return said


cdef inline int lag_of(int slots) noexcept nogil:
    return min(in_flight, slots - 1)


# ---- one piece -----------------------------------------------------------------------------------

cdef inline uint64_t slot_address(const Staged* staged, int64_t number) noexcept nogil:
    return staged.ring.address + number % staged.ring.slots * staged.ring.slot_bytes


cdef void give(Staged* staged, CrewBatch* batch, int64_t number) noexcept nogil:
    cdef int slot = number % staged.ring.slots
    staged.busy[slot] = True
    batch_give(batch, &staged.jobs[slot], number, move_by_cpu)


cdef void wait(Staged* staged, CrewBatch* batch, int64_t number) noexcept nogil:
    cdef int slot = number % staged.ring.slots
    if staged.busy[slot]:
        batch_wait(batch, &staged.jobs[slot])
        staged.busy[slot] = False


cdef void move_by_cpu(void* work, int64_t number) noexcept nogil:
    cdef const Staged* staged = <const Staged*>work
    cdef Rows piece
    rows_piece(staged.rows, staged.cut, number, &piece)
    rows_pack(&piece, staged.device, slot_address(staged, number))
    rows_move(&piece)


cdef Answer send(Staged* staged, Place* place, CUstream stream, int64_t number) noexcept nogil:
    cdef Rows piece
    cdef Answer said
    rows_piece(staged.rows, staged.cut, number, &piece)
    rows_pack(&piece, END_ORIGIN if staged.device == END_TO else END_TO,
              slot_address(staged, number))
    said = rows_queue(place, stream, &piece, rows_box(&piece))
    if said.code != CUDA_SUCCESS:
        return said
    return answer(place.table.cuEventRecord(staged.events[number % staged.ring.slots], stream),
                  "cuEventRecord")


cdef Answer arrive(Staged* staged, Place* place, int64_t number) noexcept nogil:
    return answer(place.table.cuEventSynchronize(staged.events[number % staged.ring.slots]),
                  "cuEventSynchronize")


cdef Answer make_events(Staged* staged, Place* place) noexcept nogil:
    cdef CUresult code = CUDA_SUCCESS
    cdef int slot
    for slot in range(staged.ring.slots):
        staged.busy[slot] = False
        code = place.table.cuEventCreate(&staged.events[slot], CU_EVENT_DISABLE_TIMING)
        if code != CUDA_SUCCESS:
            break
        staged.event_count += 1
    return answer(code, "cuEventCreate")


cdef void drop_events(Staged* staged, Place* place) noexcept nogil:
    cdef int slot
    for slot in range(staged.event_count):
        place.table.cuEventDestroy(staged.events[slot])


def set_pipeline(int nbytes, int flight):
    """Set the bytes of a slot and the slots on the bus at once, for measurements."""
    global slot_bytes, in_flight
    if not LEAST_SLOT <= nbytes <= 1 << 30 or not 1 <= flight < MOST_SLOTS // 2:
        raise ValueError(f"a slot of {nbytes!r} bytes with {flight!r} in flight: it takes from "
                         f"{LEAST_SLOT} to {1 << 30} bytes, and from 1 to {MOST_SLOTS // 2 - 1}")
    slot_bytes, in_flight = nbytes, flight
