"""Sizes and alignments that callers pass."""

from cpython.long cimport PyLong_AsSsize_t
from libc.stdint cimport uint64_t

from gpumem._native.bfc cimport ABSURD

from gpumem._support.arguments import power_of_two


cdef enum:
    MOST_ALIGNMENT = 1 << 21    # bytes

cdef uint64_t size_of(object nbytes) except? <uint64_t>-1:
    cdef Py_ssize_t size
    if type(nbytes) is not int:
        if isinstance(nbytes, bool) or not hasattr(nbytes, "__index__"):
            raise TypeError(f"nbytes must be an integer, not {type(nbytes).__name__}")
        nbytes = nbytes.__index__()
    try:
        size = PyLong_AsSsize_t(nbytes)
    except OverflowError:
        size = -1 if nbytes < 0 else <Py_ssize_t>ABSURD
    if size < 0:
        raise ValueError(f"invalid nbytes = {nbytes}: expected 0 or more bytes")
    return size


cdef uint64_t alignment_of(object alignment) except? 0:
    cdef uint64_t number
    if type(alignment) is int and 1 <= alignment <= MOST_ALIGNMENT:
        number = alignment
        if number & (number - 1) == 0:
            return number
    return power_of_two("alignment", alignment, MOST_ALIGNMENT, "2097152")
