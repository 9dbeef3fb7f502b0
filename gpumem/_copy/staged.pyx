"""Staged copies, the arenas of pinned memory that they go through, and their worker threads."""

from libc.stdint cimport int64_t, uint64_t

from gpumem._arena cimport Arena
from gpumem._buffer cimport Buffer
from gpumem._copy.plan cimport (
    call_result, CallResult, Cut, End, END_ORIGIN, END_TO, Rows, rows_box, rows_bytes, rows_cut,
    rows_move, rows_pack, rows_piece, rows_queue,
)
from gpumem._native.driver cimport (
    context_is_dead, CU_EVENT_DISABLE_TIMING, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUevent,
    CUresult, CUstream, DeviceContext, DriverDevice,
)

from gpumem.device import Device, MemoryInfo, MemoryKind
from gpumem.errors import DriverError, OutOfMemoryError


cdef extern from "workers.h" nogil:
    ctypedef struct WorkBatch:
        pass
    enum:
        MAX_WORKERS
    int batch_begin(WorkBatch* batch, void* work)
    void batch_end(WorkBatch* batch)
    void batch_add(WorkBatch* batch, WorkJob* job, int64_t number,
                   void (*run)(void*, int64_t) noexcept nogil, int threads)
    void batch_wait(WorkBatch* batch, WorkJob* job)
    void job_detach(WorkJob* job, void* work, void (*run)(void*, int64_t) noexcept nogil)
    void jobs_wait_detached()
    int worker_cpus()

cdef extern from "past_caches.h" nogil:
    void copy_past_caches(void* to, const void* origin, size_t nbytes)

cdef enum:
    MAX_SLOTS = 64
    MIN_SLOT = 1 << 16    # bytes
    # On the H200's machine six threads saturate its link in both directions; more slow small copies
    # down (bench/results/copies.md). Half of the CPUs are left to the program.
    MAX_THREADS = 6
    # Bytes of a copy between host memories: below, waking threads costs more than they save.
    TOGETHER_FROM = 8 << 20
    MAX_JOBS = 32
    MIN_JOB = 1 << 16     # bytes
    # Jobs of one slot: its bytes are copied by several threads, because no transfer overlaps with
    # the copy of the last slot.
    PARTS = 4
    # Bytes of a copy from which the program's memory is written past the caches.
    PAST_CACHES_FROM = 32 << 20

# Bytes of a slot: large enough that a driver call costs little in comparison, small enough that the
# first and the last piece, which overlap with no other, cost little too (bench/results/copies.md).
SLOT_BYTES = 4 << 20
# Slots on the bus at once: one is transferred, the others keep the bus busy until the calling
# thread queues the next.
SLOTS_IN_FLIGHT = 4
# Bytes: room for some copies at once, each with its own ring.
STAGING_LIMIT = 256 << 20

cdef uint64_t slot_bytes = SLOT_BYTES
cdef int in_flight = SLOTS_IN_FLIGHT
cdef int threads_wanted = 0     # 0: by the number of CPUs

cdef struct Staged:
    const Rows* rows
    End device
    Ring ring
    Cut cut
    WorkBatch batch
    WorkJob jobs[MAX_SLOTS][PARTS]
    bint busy[MAX_SLOTS]           # its jobs were queued and not yet waited for
    CUevent events[MAX_SLOTS]      # the slot's latest transfer
    int event_count
    DeviceContext* context
    CUstream stream
    bint past_caches               # the program's memory is written past the caches


# ---- Staged copies -------------------------------------------------------------------------------

cdef Ring ring_for(uint64_t nbytes) noexcept nogil:
    cdef Ring ring
    cdef uint64_t slots = min(worker_threads() + in_flight, MAX_SLOTS)
    ring.address = 0
    # A small copy is cut into as many pieces as there are slots, so that all threads have work.
    ring.slot_bytes = slot_bytes
    while ring.slot_bytes > MIN_SLOT and ring.slot_bytes * slots > nbytes:
        ring.slot_bytes //= 2
    # One more than the division, because pieces end at whole rows, and seldom fill their slots.
    ring.slots = min(slots, nbytes // ring.slot_bytes + 1)
    return ring


cdef uint64_t ring_bytes(Ring ring) noexcept nogil:
    return ring.slots * ring.slot_bytes


cdef CallResult rows_stage(DeviceContext* context, CUstream stream, const Rows* rows, End device,
                           Ring ring) noexcept nogil:
    cdef Staged staged
    cdef CallResult result
    staged.rows = rows
    staged.device = device
    staged.ring = ring
    staged.cut = rows_cut(rows, ring.slot_bytes)
    staged.context = context
    staged.stream = stream
    staged.past_caches = device == END_ORIGIN and rows_bytes(rows) >= PAST_CACHES_FROM
    if batch_begin(&staged.batch, &staged) != 0:
        return call_result(CUDA_ERROR_OUT_OF_MEMORY, "pthread_cond_init")
    result = create_events(&staged)
    if result.code == CUDA_SUCCESS:
        result = copy_to_device(&staged) if device == END_TO else copy_from_device(&staged)
        result = drain(&staged, result)
    # Nothing uses the slots, the events or the batch any more: `drain` has waited.
    destroy_events(&staged)
    batch_end(&staged.batch)
    return result


cdef CallResult copy_to_device(Staged* staged) noexcept nogil:
    # Workers fill slots, this thread queues each full slot's transfer. `lag` pieces later, that
    # transfer is over and the slot is filled anew: the wait overlaps the transfers in between.
    cdef CallResult result = call_result(CUDA_SUCCESS, NULL)
    cdef int slots = staged.ring.slots
    cdef int lag = min(in_flight, slots - 1)
    cdef int64_t number, sent
    for number in range(min(<int64_t>slots, staged.cut.count)):
        start_job(staged, number)
    for number in range(staged.cut.count):
        finish_job(staged, number)
        result = queue_transfer(staged, number)
        sent = number - lag
        if result.code == CUDA_SUCCESS and sent >= 0 and sent + slots < staged.cut.count:
            result = finish_transfer(staged, sent)
            if result.code == CUDA_SUCCESS:
                start_job(staged, sent + slots)
        if result.code != CUDA_SUCCESS:
            break
    return result


cdef CallResult copy_from_device(Staged* staged) noexcept nogil:
    # This thread queues transfers into free slots, and workers empty each slot after its transfer.
    # The last `lag` rounds only empty slots.
    cdef CallResult result = call_result(CUDA_SUCCESS, NULL)
    cdef int lag = min(in_flight, staged.ring.slots - 1)
    cdef int64_t number, sent
    for number in range(staged.cut.count + lag):
        if number < staged.cut.count:
            finish_job(staged, number)          # the slot's previous piece was copied out
            result = queue_transfer(staged, number)
        sent = number - lag
        if result.code == CUDA_SUCCESS and 0 <= sent < staged.cut.count:
            result = finish_transfer(staged, sent)
            if result.code == CUDA_SUCCESS:
                start_job(staged, sent)
        if result.code != CUDA_SUCCESS:
            break
    return result


cdef CallResult drain(Staged* staged, CallResult result) noexcept nogil:
    # Waits until neither workers nor the device use the ring; an earlier failure is reported.
    cdef CUresult code
    cdef int slot
    for slot in range(staged.ring.slots):
        finish_job(staged, slot)
    code = staged.context.table.cuStreamSynchronize(staged.stream)
    if code != CUDA_SUCCESS:
        staged.context.table.cuCtxSynchronize()   # the only other way to wait for the device
    return call_result(code, "cuStreamSynchronize") if result.code == CUDA_SUCCESS else result


# ---- One piece: number n uses slot n % slots -----------------------------------------------------

cdef inline uint64_t slot_address(const Staged* staged, int64_t number) noexcept nogil:
    return staged.ring.address + number % staged.ring.slots * staged.ring.slot_bytes


cdef void start_job(Staged* staged, int64_t number) noexcept nogil:
    cdef int slot = number % staged.ring.slots
    cdef int part
    staged.busy[slot] = True
    for part in range(PARTS):
        batch_add(&staged.batch, &staged.jobs[slot][part], number * PARTS + part, run_job,
                  worker_threads())


cdef void finish_job(Staged* staged, int64_t number) noexcept nogil:
    cdef int slot = number % staged.ring.slots
    cdef int part
    if staged.busy[slot]:
        for part in range(PARTS):
            batch_wait(&staged.batch, &staged.jobs[slot][part])
        staged.busy[slot] = False


cdef void run_job(void* work, int64_t number) noexcept nogil:
    # Runs in a worker: copies a part of one piece between the program's memory and the slot, which
    # replaces the device's end. Bytes with gaps between them are one part.
    cdef const Staged* staged = <const Staged*>work
    cdef uint64_t part = number % PARTS
    cdef uint64_t first
    cdef Rows piece
    rows_piece(staged.rows, staged.cut, number // PARTS, &piece)
    rows_pack(&piece, staged.device, slot_address(staged, number // PARTS))
    if piece.ndim == 0:
        first = piece.width * part // PARTS
        piece.width = piece.width * (part + 1) // PARTS - first
        piece.to += first
        piece.origin += first
    elif part != 0:
        return
    if piece.ndim == 0 and staged.past_caches:
        copy_past_caches(<void*>piece.to, <const void*>piece.origin, piece.width)
    else:
        rows_move(&piece)


cdef CallResult queue_transfer(Staged* staged, int64_t number) noexcept nogil:
    # The slot replaces the program's end.
    cdef Rows piece
    cdef CallResult result
    rows_piece(staged.rows, staged.cut, number, &piece)
    rows_pack(&piece, END_ORIGIN if staged.device == END_TO else END_TO,
              slot_address(staged, number))
    result = rows_queue(staged.context, staged.stream, &piece, rows_box(&piece), NULL)
    if result.code != CUDA_SUCCESS:
        return result
    return call_result(staged.context.table.cuEventRecord(
        staged.events[number % staged.ring.slots], staged.stream), "cuEventRecord")


cdef CallResult finish_transfer(Staged* staged, int64_t number) noexcept nogil:
    return call_result(staged.context.table.cuEventSynchronize(
        staged.events[number % staged.ring.slots]), "cuEventSynchronize")


cdef CallResult create_events(Staged* staged) noexcept nogil:
    cdef CUresult code = CUDA_SUCCESS
    cdef int slot
    staged.event_count = 0
    for slot in range(staged.ring.slots):
        staged.busy[slot] = False
        code = staged.context.table.cuEventCreate(&staged.events[slot], CU_EVENT_DISABLE_TIMING)
        if code != CUDA_SUCCESS:
            break
        staged.event_count += 1
    return call_result(code, "cuEventCreate")


cdef void destroy_events(Staged* staged) noexcept nogil:
    cdef int slot
    for slot in range(staged.event_count):
        staged.context.table.cuEventDestroy(staged.events[slot])


# ---- Pinned memory for the rings: one bounded arena per device -----------------------------------

# Device -> its arena; replaced in a forked child.
cdef dict arenas = {}


cdef Buffer ring_memory(DriverDevice driver_device, object nbytes):
    # Without pinned memory the caller has a slower way.
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
        # It does not wait, because dropped pinned memory is released only when the device is idle,
        # and a copy without a ring has a slower way.
        arena = arenas[device] = Arena(memory, {"max_mem": STAGING_LIMIT, "oom_wait_ms": 0},
                                       name=f"staging for {device}")
    return arena


# ---- Copies between host memories, and other work of the threads ---------------------------------

cdef struct SharedCopy:
    const Rows* rows
    Cut cut


cdef void rows_move_together(const Rows* rows) noexcept nogil:
    cdef int64_t total = rows_bytes(rows)
    cdef WorkJob jobs[MAX_JOBS]
    cdef WorkBatch batch
    cdef SharedCopy shared
    cdef int64_t i
    shared.rows = rows
    # Pieces are more than half full, so there are fewer than twice as many as their size suggests.
    shared.cut = rows_cut(rows, max(total // (MAX_JOBS // 2 - 1), MIN_JOB))
    if (total < TOGETHER_FROM or worker_threads() == 1 or shared.cut.count > MAX_JOBS
            or batch_begin(&batch, &shared) != 0):
        rows_move(rows)
        return
    for i in range(shared.cut.count):
        batch_add(&batch, &jobs[i], i, move_piece, worker_threads())
    for i in range(shared.cut.count):
        batch_wait(&batch, &jobs[i])
    batch_end(&batch)


cdef void move_piece(void* work, int64_t number) noexcept nogil:
    cdef SharedCopy* shared = <SharedCopy*>work
    cdef Rows piece
    rows_piece(shared.rows, shared.cut, number, &piece)
    rows_move(&piece)


cdef int worker_threads() noexcept nogil:
    return threads_wanted if threads_wanted else max(1, min(worker_cpus() // 2, MAX_THREADS))


cdef void detach_job(WorkJob* job, void* work,
                     void (*run)(void*, int64_t) noexcept nogil) noexcept nogil:
    job_detach(job, work, run)


cdef void wait_for_detached_jobs() noexcept nogil:
    jobs_wait_detached()


# ---- Settings for measurements; see gpumem._testing.copies ---------------------------------------

def set_pipeline(int nbytes, int flight):
    """Set the bytes of a slot and the slots on the bus at once, for measurements."""
    global slot_bytes, in_flight
    if not MIN_SLOT <= nbytes <= 1 << 30 or not 1 <= flight < MAX_SLOTS // 2:
        raise ValueError(f"slots of {nbytes!r} bytes with {flight!r} in flight: expected from "
                         f"{MIN_SLOT} to {1 << 30} bytes, and from 1 to {MAX_SLOTS // 2 - 1}")
    slot_bytes, in_flight = nbytes, flight


def set_threads(int count):
    """Copy with `count` threads, for measurements; 0 restores the default."""
    global threads_wanted
    if not 0 <= count <= MAX_WORKERS:
        raise ValueError(f"count {count!r} is not an integer from 0 to {MAX_WORKERS}")
    threads_wanted = count
