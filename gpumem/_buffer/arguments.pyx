"""Reading of arguments; see arguments.pxd."""

from cpython.long cimport PyLong_AsSsize_t
from libc.stdint cimport uint64_t

from gpumem._native.backing cimport HOST_SIDE
from gpumem._native.bfc cimport ABSURD
from gpumem._native.driver cimport (
    CU_MEM_ADVISE_SET_ACCESSED_BY, CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
    CU_MEM_ADVISE_SET_READ_MOSTLY, CU_MEM_ADVISE_UNSET_ACCESSED_BY,
    CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, CU_MEM_ADVISE_UNSET_READ_MOSTLY,
)

from gpumem._support.arguments import power_of_two
from gpumem.device import Device


cdef enum:
    MOST_ALIGNMENT = 1 << 21    # bytes

cdef dict ADVICE = {
    "read_mostly": <int>CU_MEM_ADVISE_SET_READ_MOSTLY,
    "unset_read_mostly": <int>CU_MEM_ADVISE_UNSET_READ_MOSTLY,
    "preferred_location": <int>CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
    "unset_preferred_location": <int>CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION,
    "accessed_by": <int>CU_MEM_ADVISE_SET_ACCESSED_BY,
    "unset_accessed_by": <int>CU_MEM_ADVISE_UNSET_ACCESSED_BY,
}


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


cdef int side_of(object memory, object location) except? -2:
    own = memory.device
    if location is None:
        return own.index
    device = Device(location)
    if device.type == "host":
        return HOST_SIDE
    if device.type != own.type:
        raise ValueError(f"{device} is not a device that {memory} can move to: expected "
                         f'a {own.type} device or "host"')
    return device.index


cdef int advice_of(object advice) except -1:
    if advice not in ADVICE:
        accepted = ", ".join(f'"{name}"' for name in ADVICE)
        raise ValueError(f"advice {advice!r} is not one of {accepted}")
    return ADVICE[advice]
