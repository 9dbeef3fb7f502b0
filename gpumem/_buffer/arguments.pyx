"""Sizes and alignments that callers pass."""

from dataclasses import replace

from cpython.long cimport PyLong_AsSsize_t
from libc.stdint cimport uint64_t

from gpumem._native.bfc cimport ABSURD, QUANTUM

from gpumem._support.arguments import power_of_two
from gpumem._support.sizes import whole_bytes
from gpumem.errors import ConfigError, OutOfMemoryError


cdef enum:
    MOST_ALIGNMENT = 1 << 21    # bytes

cdef uint64_t size_of(object nbytes, object resource) except? <uint64_t>-1:
    cdef Py_ssize_t size
    if type(nbytes) is not int:
        nbytes = whole_bytes("nbytes", nbytes)
    try:
        size = PyLong_AsSsize_t(nbytes)
    except OverflowError:
        size = -1 if nbytes < 0 else refuse_absurd(nbytes, resource)
    if size < 0:
        raise ValueError(f"invalid nbytes = {nbytes}: expected 0 or more bytes")
    return size


cdef int refuse_absurd(object nbytes, object resource) except -2:
    if resource is None:
        raise ValueError(f"invalid nbytes = {nbytes}: expected 0 to 2**63 - 1 bytes")
    try:
        # Which none serves: its refusal has all other figures.
        resource.allocate(<uint64_t>ABSURD)
    except OutOfMemoryError as error:
        raise OutOfMemoryError.of(replace(
            error.report, requested_nbytes=nbytes,
            allocated_nbytes=-(-nbytes // QUANTUM) * QUANTUM)) from None
    raise MemoryError(f"{resource!r} cannot allocate {nbytes} bytes")


cdef uint64_t alignment_of(object alignment) except? 0:
    cdef uint64_t number
    if type(alignment) is int and 1 <= alignment <= MOST_ALIGNMENT:
        number = alignment
        if number & (number - 1) == 0:
            return number
    return power_of_two("alignment", alignment, MOST_ALIGNMENT, "2097152")


cdef uint64_t alignment_in(object memory) except? 0:
    if memory.alignment > MOST_ALIGNMENT:
        raise ConfigError(f"invalid alignment = {memory.alignment} of {memory} for the blocks of "
                          f"an arena or a pool: expected at most {<int>MOST_ALIGNMENT}")
    return memory.alignment
