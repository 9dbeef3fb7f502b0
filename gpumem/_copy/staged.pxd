"""Copies between the CPU's memory and a device, through pinned memory, by several threads.

The calling thread makes every driver call; the crew moves bytes between the program's memory and
the slots of a ring of pinned memory, of any strides on either side. While some slots are on
their way over the bus, others are filled or emptied. Everything has arrived when it returns.
"""

from libc.stdint cimport int64_t, uint64_t

from gpumem._buffer cimport Buffer
from gpumem._copy.driver cimport Answer
from gpumem._copy.plan cimport End, Rows
from gpumem._native.driver cimport CUstream, DeviceContext, DriverDevice

cdef struct Ring:
    uint64_t address
    uint64_t slot_bytes
    int slots

# The ring that a copy of so many bytes wants; `nbytes` of memory for it.
cdef Ring ring_for(uint64_t nbytes) noexcept nogil
cdef uint64_t ring_bytes(Ring ring) noexcept nogil
# `device` is the end that the driver reaches, and the rows' leading one. Work that is queued on
# the stream comes before. After a failure part of the destination may be written, and nothing uses
# the ring or the program's memory any more.
cdef Answer rows_stage(DeviceContext* context, CUstream stream, const Rows* rows, End device,
                       Ring ring) noexcept nogil


# ---- The pinned memory that staged copies go through: one bounded arena per device ---------------


# None: the driver gives none, or other copies have it all.
cdef Buffer ring_memory(DriverDevice driver_device, object nbytes)


# ---- Copying by several CPU threads: jobs for include/crew.h, whose state is this module's


cdef extern from "workers.h" nogil:
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
