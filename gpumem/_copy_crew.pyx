"""Jobs for the crew; see _copy_crew.pxd."""

from libc.stdint cimport int64_t

from gpumem._copy_plan cimport Cut, Rows, rows_bytes, rows_cut, rows_move, rows_piece

cdef extern from "crew.h" nogil:
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
