"""Reading keys and shapes; see _indexing.pxd."""

from cpython.slice cimport PySlice_AdjustIndices, PySlice_Unpack
from libc.stdint cimport int64_t

from gpumem._layout cimport MAX_RANK, Layout

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object number, int* overflow) except? -1


cdef int layout_index(object key, int ndim, const int64_t* shape, const int64_t* strides,
                      Layout* result, int64_t* offset) except -1:
    cdef int axis = 0
    cdef int taken = 0          # dimensions of the source that the key names
    cdef bint dots = False
    result.ndim = 0
    offset[0] = 0
    if type(key) is not tuple:
        key = (key,)
    for part in key:
        if part is Ellipsis:
            if dots:
                raise IndexError("an index can only have one Ellipsis ('...')")
            dots = True
        elif part is not None:
            taken += 1
    if taken > ndim:
        raise IndexError(f"too many indices: the tensor has {ndim} dimensions, but {taken} were "
                         "indexed")
    for part in key:
        if part is None:
            add_axis(result, 1, 0)
        elif part is Ellipsis:
            axis = keep_axes(result, axis, axis + ndim - taken, shape, strides)
        elif isinstance(part, slice):
            offset[0] += take_slice(part, shape[axis], strides[axis], result)
            axis += 1
        else:
            offset[0] += take_integer(part, axis, shape[axis]) * strides[axis]
            axis += 1
    keep_axes(result, axis, ndim, shape, strides)
    return 0


cdef int add_axis(Layout* result, int64_t length, int64_t stride) except -1:
    if result.ndim == MAX_RANK:
        raise IndexError(f"a tensor has at most {MAX_RANK} dimensions")
    result.shape[result.ndim] = length
    result.strides[result.ndim] = stride
    result.ndim += 1
    return 0


cdef int keep_axes(Layout* result, int begin, int end, const int64_t* shape,
                   const int64_t* strides) except -1:
    cdef int axis
    for axis in range(begin, end):
        add_axis(result, shape[axis], strides[axis])
    return max(begin, end)


cdef int64_t take_slice(object part, int64_t length, int64_t stride,
                        Layout* result) except? -1:
    """Add the slice's dimension; return the offset of its first element in bytes."""
    cdef Py_ssize_t start = 0
    cdef Py_ssize_t stop = 0
    cdef Py_ssize_t step = 1
    cdef Py_ssize_t count
    PySlice_Unpack(part, &start, &stop, &step)
    count = PySlice_AdjustIndices(length, &start, &stop, step)
    # One element or none has no next one: a huge step must not overflow the stride.
    add_axis(result, count, stride * step if count > 1 else stride)
    return start * stride if count > 0 else 0


cdef int64_t take_integer(object part, int axis, int64_t length) except? -1:
    if isinstance(part, bool) or not hasattr(part, "__index__"):
        raise TypeError(f"index {part!r} is not accepted: a tensor takes integers, slices, "
                        "Ellipsis and None")
    number = part.__index__()
    if not -length <= number < length:
        raise IndexError(f"index {number} is out of range for dimension {axis} of {length} "
                         "elements")
    return number if number >= 0 else number + length


cdef int shape_from(object shape, int64_t* numbers) except -1:
    cdef int ndim = 0
    if type(shape) is not tuple:
        shape = (shape,) if hasattr(shape, "__index__") else _tuple_of(shape)
    if len(shape) > MAX_RANK:
        raise ValueError(f"a shape of {len(shape)} dimensions is not accepted: it takes up to "
                         f"{MAX_RANK}")
    for length in shape:
        numbers[ndim] = length_from(length, shape)
        ndim += 1
    return ndim


def _tuple_of(shape):
    try:
        return tuple(shape)
    except TypeError as error:
        raise TypeError(f"shape {shape!r} is not an integer or a sequence of integers") from error


cdef inline int64_t length_from(object length, object shape) except -1:
    cdef int overflow = 0
    cdef int64_t number
    if type(length) is not int:
        if isinstance(length, bool) or not hasattr(length, "__index__"):
            raise TypeError(f"shape {shape!r} has {length!r}, which is not an integer")
        length = length.__index__()
    number = PyLong_AsLongLongAndOverflow(length, &overflow)
    if number < 0 or overflow:
        raise ValueError(f"shape {shape!r} has {length}: a dimension has from 0 to 2**63 - 1 "
                         "elements")
    return number


cdef int new_shape_from(object shape, int64_t size, int64_t* numbers) except -1:
    cdef int unknown = -1
    cdef int i
    if len(shape) == 1 and not hasattr(shape[0], "__index__"):
        shape = shape[0]
    shape = tuple(shape)
    wanted = list(shape)
    for i, length in enumerate(shape):
        if type(length) is int and length == -1:
            if unknown >= 0:
                raise ValueError(f"shape {shape!r} has more than one -1")
            unknown = i
            wanted[i] = 1
    ndim = shape_from(tuple(wanted), numbers)
    total = 1
    for i in range(ndim):
        total *= <object>numbers[i]
    if unknown >= 0 and total and size % total == 0:
        numbers[unknown] = size // total
    elif unknown >= 0 or total != size:
        raise ValueError(f"a tensor of {size} elements cannot have the shape {shape!r}")
    return ndim
