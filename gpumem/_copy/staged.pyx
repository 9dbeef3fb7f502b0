"""The pipeline of a staged copy."""

from libc.stdint cimport int64_t, uint64_t

from gpumem._buffer cimport Buffer
from gpumem._copy.driver cimport Answer, answer, rows_queue
from gpumem._copy.plan cimport (
    Cut, End, END_ORIGIN, END_TO, Rows, rows_box, rows_bytes, rows_cut, rows_move, rows_pack,
    rows_piece,
)
from gpumem._core cimport Arena
from gpumem._native.driver cimport (
    context_is_dead, CU_EVENT_DISABLE_TIMING, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUevent,
    CUresult, CUstream, DeviceContext, DriverDevice,
)

from gpumem.device import Device, MemoryInfo, MemoryKind
from gpumem.errors import DriverError, OutOfMemoryError


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


cdef Answer rows_stage(DeviceContext* context, CUstream stream, const Rows* rows, End device,
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
    said = make_events(&staged, context)
    if said.code == CUDA_SUCCESS:
        if device == END_TO:
            said = pump_up(&staged, &batch, context, stream)
        else:
            said = pump_down(&staged, &batch, context, stream)
        said = settle(&staged, &batch, context, stream, said)
    drop_events(&staged, context)
    batch_end(&batch)
    return said


# ---- the two directions --------------------------------------------------------------------------

cdef Answer pump_up(Staged* staged, CrewBatch* batch, DeviceContext* context,
                    CUstream stream) noexcept nogil:
    cdef Answer said = answer(CUDA_SUCCESS, NULL)
    cdef int slots = staged.ring.slots
    cdef int lag = lag_of(slots)
    cdef int64_t number, sent
    for number in range(min(<int64_t>slots, staged.cut.count)):
        give(staged, batch, number)
    for number in range(staged.cut.count):
        wait(staged, batch, number)
        said = send(staged, context, stream, number)
        sent = number - lag
        if said.code == CUDA_SUCCESS and sent >= 0 and sent + slots < staged.cut.count:
            said = arrive(staged, context, sent)
            if said.code == CUDA_SUCCESS:
                give(staged, batch, sent + slots)
        if said.code != CUDA_SUCCESS:
            break
    return said


cdef Answer pump_down(Staged* staged, CrewBatch* batch, DeviceContext* context,
                      CUstream stream) noexcept nogil:
    cdef Answer said = answer(CUDA_SUCCESS, NULL)
    cdef int lag = lag_of(staged.ring.slots)
    cdef int64_t number, sent
    for number in range(staged.cut.count + lag):
        if number < staged.cut.count:
            wait(staged, batch, number)         # until the slot's last piece was taken out
            said = send(staged, context, stream, number)
        sent = number - lag
        if said.code == CUDA_SUCCESS and 0 <= sent < staged.cut.count:
            said = arrive(staged, context, sent)
            if said.code == CUDA_SUCCESS:
                give(staged, batch, sent)
        if said.code != CUDA_SUCCESS:
            break
    return said


cdef Answer settle(Staged* staged, CrewBatch* batch, DeviceContext* context, CUstream stream,
                   Answer said) noexcept nogil:
    """Wait until nothing uses the ring; a failure that came first is the one that counts."""
    cdef CUresult code
    cdef int slot
    for slot in range(staged.ring.slots):
        wait(staged, batch, slot)
    code = context.table.cuStreamSynchronize(stream)
    if code != CUDA_SUCCESS:
        context.table.cuCtxSynchronize()    # all that is left to try
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


cdef Answer send(Staged* staged, DeviceContext* context, CUstream stream,
                 int64_t number) noexcept nogil:
    cdef Rows piece
    cdef Answer said
    rows_piece(staged.rows, staged.cut, number, &piece)
    rows_pack(&piece, END_ORIGIN if staged.device == END_TO else END_TO,
              slot_address(staged, number))
    said = rows_queue(context, stream, &piece, rows_box(&piece))
    if said.code != CUDA_SUCCESS:
        return said
    return answer(context.table.cuEventRecord(staged.events[number % staged.ring.slots], stream),
                  "cuEventRecord")


cdef Answer arrive(Staged* staged, DeviceContext* context, int64_t number) noexcept nogil:
    return answer(context.table.cuEventSynchronize(staged.events[number % staged.ring.slots]),
                  "cuEventSynchronize")


cdef Answer make_events(Staged* staged, DeviceContext* context) noexcept nogil:
    cdef CUresult code = CUDA_SUCCESS
    cdef int slot
    for slot in range(staged.ring.slots):
        staged.busy[slot] = False
        code = context.table.cuEventCreate(&staged.events[slot], CU_EVENT_DISABLE_TIMING)
        if code != CUDA_SUCCESS:
            break
        staged.event_count += 1
    return answer(code, "cuEventCreate")


cdef void drop_events(Staged* staged, DeviceContext* context) noexcept nogil:
    cdef int slot
    for slot in range(staged.event_count):
        context.table.cuEventDestroy(staged.events[slot])


def set_pipeline(int nbytes, int flight):
    """Set the bytes of a slot and the slots on the bus at once, for measurements."""
    global slot_bytes, in_flight
    if not LEAST_SLOT <= nbytes <= 1 << 30 or not 1 <= flight < MOST_SLOTS // 2:
        raise ValueError(f"a slot of {nbytes!r} bytes with {flight!r} in flight: it takes from "
                         f"{LEAST_SLOT} to {1 << 30} bytes, and from 1 to {MOST_SLOTS // 2 - 1}")
    slot_bytes, in_flight = nbytes, flight


# ---- Arenas for staged copies --------------------------------------------------------------------


# Bytes: room for some copies at once, each with its own ring.
STAGING_LIMIT = 256 << 20

# Device -> its arena; made anew in a fork's child.
cdef dict arenas = {}


cdef Buffer ring_memory(DriverDevice driver_device, object nbytes):
    try:
        return staging_arena(f"{driver_device.type}:{driver_device.ordinal}").allocate(nbytes)
    except (OutOfMemoryError, DriverError):
        return None


def staging_arena(device):
    """Return the pinned arena of a device's staged copies; see `Arena.staging`."""
    cdef Arena arena
    device = Device(device)
    arena = arenas.get(device)
    if arena is None or arena.closed or context_is_dead(&arena.driver_device.context):
        memory = MemoryInfo(device, MemoryKind.HOST_ACCESSIBLE)
        arena = arenas[device] = Arena(memory, {"max_mem": STAGING_LIMIT},
                                       name=f"staging for {device}")
    return arena


# ---- Jobs for the crew ---------------------------------------------------------------------------


cdef extern from "workers.h" nogil:
    int CREW_MOST
    int crew_begin(CrewBatch* batch, void* work)
    void crew_end(CrewBatch* batch)
    void crew_give(CrewBatch* batch, CrewJob* job, int64_t number,
                   void (*run)(void*, int64_t) noexcept nogil, int threads)
    void crew_wait(CrewBatch* batch, CrewJob* job)
    void crew_leave(CrewJob* job, void* work, void (*run)(void*, int64_t) noexcept nogil)
    void crew_wait_left()
    int crew_cpus()

cdef enum:
    # On the H200's machine six fill its link in both directions; more get into each other's way
    # with small copies (bench/results/copies.md). Half of the CPUs are left to the program.
    MOST_THREADS = 6
    # Bytes: below, waking threads costs more than they save.
    TOGETHER_FROM = 8 << 20
    MOST_JOBS = 32
    LEAST_JOB = 1 << 16     # bytes

# 0: as many as the machine suggests.
cdef int threads_wanted = 0


cdef int crew_threads() noexcept nogil:
    cdef int found
    if threads_wanted:
        return threads_wanted
    found = crew_cpus() // 2
    return max(1, min(found, MOST_THREADS))


cdef bint batch_begin(CrewBatch* batch, void* work) noexcept nogil:
    return crew_begin(batch, work) == 0


cdef void batch_end(CrewBatch* batch) noexcept nogil:
    crew_end(batch)


cdef void batch_give(CrewBatch* batch, CrewJob* job, int64_t number, work_on run) noexcept nogil:
    crew_give(batch, job, number, run, crew_threads())


cdef void batch_wait(CrewBatch* batch, CrewJob* job) noexcept nogil:
    crew_wait(batch, job)


cdef void job_leave(CrewJob* job, void* work, work_on run) noexcept nogil:
    crew_leave(job, work, run)


cdef void jobs_left_wait() noexcept nogil:
    crew_wait_left()


# ---- one copy, shared out ------------------------------------------------------------------------

cdef struct Shared:
    const Rows* rows
    Cut cut


cdef void rows_move_together(const Rows* rows) noexcept nogil:
    cdef int64_t total = rows_bytes(rows)
    cdef CrewJob jobs[MOST_JOBS]
    cdef CrewBatch batch
    cdef Shared shared
    cdef int64_t i
    shared.rows = rows
    # Pieces are more than half full, so there are fewer than twice as many as their size says.
    shared.cut = rows_cut(rows, max(total // (MOST_JOBS // 2 - 1), LEAST_JOB))
    if (total < TOGETHER_FROM or crew_threads() == 1 or shared.cut.count > MOST_JOBS
            or not batch_begin(&batch, &shared)):
        rows_move(rows)
        return
    for i in range(shared.cut.count):
        batch_give(&batch, &jobs[i], i, move_piece)
    for i in range(shared.cut.count):
        batch_wait(&batch, &jobs[i])
    batch_end(&batch)


cdef void move_piece(void* work, int64_t number) noexcept nogil:
    cdef Shared* shared = <Shared*>work
    cdef Rows piece
    rows_piece(shared.rows, shared.cut, number, &piece)
    rows_move(&piece)


def set_threads(int count):
    """Let so many threads copy, for measurements; 0 is what the machine suggests."""
    global threads_wanted
    if not 0 <= count <= CREW_MOST:
        raise ValueError(f"count {count!r} is not an integer from 0 to {CREW_MOST}")
    threads_wanted = count
