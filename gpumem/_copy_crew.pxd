"""Copying by several CPU threads: jobs for include/crew.h, whose state is this module's."""

from libc.stdint cimport int64_t

from gpumem._copy_plan cimport Rows

cdef extern from "crew.h" nogil:
    ctypedef struct CrewBatch:
        pass
    ctypedef struct CrewJob:
        pass

ctypedef void (*work_on)(void* work, int64_t number) noexcept nogil

# False: the host has no memory for it.
cdef bint batch_begin(CrewBatch* batch, void* work) noexcept nogil
cdef void batch_end(CrewBatch* batch) noexcept nogil
# run(work, number), in another thread, soon; it must wait for nothing.
cdef void batch_give(CrewBatch* batch, CrewJob* job, int64_t number, work_on run) noexcept nogil
cdef void batch_wait(CrewBatch* batch, CrewJob* job) noexcept nogil
# The same for a job that nobody waits for, and that may free itself.
cdef void job_leave(CrewJob* job, void* work, work_on run) noexcept nogil
# Waits until all such jobs have run; without the interpreter lock, which they may take.
cdef void jobs_left_wait() noexcept nogil
cdef int crew_threads() noexcept nogil
# All rows, by several threads where that is faster; returns when done.
cdef void rows_move_together(const Rows* rows) noexcept nogil
