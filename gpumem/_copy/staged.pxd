"""Copies between the CPU's memory and a device, through pinned memory, by several threads.

The calling thread makes every driver call; worker threads copy bytes between the program's memory
and the slots of a ring of pinned memory, with any strides on either side. While some slots are
transferred over the bus, others are filled or emptied. All bytes have arrived when it returns.
"""

from libc.stdint cimport int64_t, uint64_t

from gpumem._buffer cimport Buffer
from gpumem._copy.plan cimport CallResult, End, Rows
from gpumem._native.driver cimport CUstream, DeviceContext, DriverDevice

# ---- Staged copies -------------------------------------------------------------------------------

cdef struct Ring:
    uint64_t address
    uint64_t slot_bytes
    int slots

# The ring for a copy of `nbytes`; it needs `ring_bytes` of memory.
cdef Ring ring_for(uint64_t nbytes) noexcept nogil
cdef uint64_t ring_bytes(Ring ring) noexcept nogil
# From the device's staging arena; None if the driver has no pinned memory, or other copies use it.
cdef Buffer ring_memory(DriverDevice driver_device, object nbytes)
# `device` is the end that the driver reaches, and the leading end of the rows. The copy is ordered
# after work queued on the stream. After a failure part of the destination may be written, and
# neither the ring nor the program's memory is in use any more.
cdef CallResult rows_stage(DeviceContext* context, CUstream stream, const Rows* rows, End device,
                           Ring ring) noexcept nogil

# ---- Worker threads; their state (workers.c) belongs to this module ------------------------------

cdef extern from "workers.h" nogil:
    ctypedef struct WorkJob:
        pass

# All rows, by several threads where that is faster; returns when done.
cdef void rows_move_together(const Rows* rows) noexcept nogil
# Queues run(work, 0) for a worker, which waits for nothing; it may free the job. Never blocks.
cdef void detach_job(WorkJob* job, void* work,
                     void (*run)(void*, int64_t) noexcept nogil) noexcept nogil
# Waits until all detached jobs have run; without the interpreter lock, which they may take.
cdef void wait_for_detached_jobs() noexcept nogil
