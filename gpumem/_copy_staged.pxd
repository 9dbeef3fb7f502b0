"""Copies between the CPU's memory and a device, through pinned memory, by several threads.

The calling thread makes every driver call; the crew moves bytes between the program's memory and
the slots of a ring of pinned memory, of any strides on either side. While some slots are on
their way over the bus, others are filled or emptied. Everything has arrived when it returns.
"""

from libc.stdint cimport int64_t, uint64_t

from gpumem._copy_driver cimport Answer
from gpumem._copy_plan cimport End, Rows
from gpumem._driver cimport CUstream, Place

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
cdef Answer rows_stage(Place* place, CUstream stream, const Rows* rows, End device,
                       Ring ring) noexcept nogil
