"""Arithmetic of shapes and strides."""

from importlib import import_module

cimport cython
from cpython.slice cimport PySlice_AdjustIndices, PySlice_Unpack
from libc.stdint cimport INT64_MAX, int64_t, uint64_t

from gpumem._buffer cimport (
    DL_BFLOAT, DL_BOOL, DL_COMPLEX, DL_FLOAT, DL_FLOAT8_E3M4, DL_FLOAT8_E4M3, DL_FLOAT8_E4M3B11FNUZ,
    DL_FLOAT8_E4M3FN, DL_FLOAT8_E4M3FNUZ, DL_FLOAT8_E5M2, DL_FLOAT8_E5M2FNUZ, DL_FLOAT8_E8M0FNU,
    DL_INT, DL_UINT, DLDataType,
)
from gpumem._support.instances cimport forbid_instantiation
from gpumem._support.interpreter cimport HAS_INTERPRETER_LOCK
from gpumem._support.arguments import whole_number
from gpumem._support.texts import shown


cdef extern from *:
    """
    static inline int gm_mul(int64_t a, int64_t b, int64_t *product) {
        return __builtin_mul_overflow(a, b, product);
    }
    static inline int gm_add(int64_t a, int64_t b, int64_t *sum) {
        return __builtin_add_overflow(a, b, sum);
    }
    """
    bint gm_mul(int64_t a, int64_t b, int64_t* product) noexcept nogil
    bint gm_add(int64_t a, int64_t b, int64_t* sum) noexcept nogil


cdef int64_t layout_size(int ndim, const int64_t* shape, int64_t itemsize) noexcept nogil:
    # Bytes count a zero as one, as in NumPy: (0, 2**62) is refused like (1, 2**62), so that strides
    # never overflow.
    cdef int64_t size = 1
    cdef int64_t nbytes = itemsize
    cdef int i
    for i in range(ndim):
        size *= shape[i]
        if shape[i] > 1 and gm_mul(nbytes, shape[i], &nbytes):
            return -1
    return size


cdef void layout_c_strides(int ndim, const int64_t* shape, int64_t itemsize,
                           int64_t* strides) noexcept nogil:
    cdef int64_t step = itemsize
    cdef int i
    # A length of 0 counts as 1, so that strides of an empty tensor are those of NumPy.
    for i in range(ndim - 1, -1, -1):
        strides[i] = step
        if shape[i] > 1:
            step *= shape[i]


cdef bint layout_is_c(int ndim, const int64_t* shape, const int64_t* strides,
                      int64_t itemsize) noexcept nogil:
    return is_dense(ndim, shape, strides, itemsize, ndim - 1, -1)


cdef bint layout_is_f(int ndim, const int64_t* shape, const int64_t* strides,
                      int64_t itemsize) noexcept nogil:
    return is_dense(ndim, shape, strides, itemsize, 0, 1)


cdef inline bint is_dense(int ndim, const int64_t* shape, const int64_t* strides, int64_t itemsize,
                          int innermost, int outwards) noexcept nogil:
    cdef int64_t step = itemsize
    cdef bint dense = True
    cdef int axis = innermost
    while 0 <= axis < ndim:
        if shape[axis] == 0:        # no elements: in every order, whatever the strides
            return True
        if shape[axis] != 1:
            dense = dense and strides[axis] == step
            step *= shape[axis]
        axis += outwards
    return dense


cdef bint layout_is_nested(int ndim, const int64_t* shape, const int64_t* strides,
                           int64_t itemsize) noexcept nogil:
    cdef int64_t reach = itemsize       # bytes of the dimensions so far
    cdef int64_t step, least
    cdef uint64_t seen = 0              # a bit for each of them
    cdef int i, inner
    while True:
        inner = -1
        least = INT64_MAX
        for i in range(ndim):
            step = strides[i] if strides[i] >= 0 else -strides[i]
            if shape[i] > 1 and not seen >> i & 1 and step <= least:
                inner = i
                least = step
        if inner < 0:
            return True
        if least < reach:
            return False
        seen |= <uint64_t>1 << inner
        reach += (shape[inner] - 1) * least


cdef bint layout_extent(int ndim, const int64_t* shape, const int64_t* strides, int64_t itemsize,
                        int64_t* low, int64_t* high) noexcept nogil:
    cdef int64_t reach
    cdef int i
    low[0] = 0
    high[0] = 0
    for i in range(ndim):
        if shape[i] == 0:
            low[0] = 0
            high[0] = 0
            return True
        # Steps backwards extend the tensor below its first element, the others above it.
        if gm_mul(shape[i] - 1, strides[i], &reach):
            return False
        if gm_add(low[0] if reach < 0 else high[0], reach, low if reach < 0 else high):
            return False
    # The difference may overflow although neither end does.
    return not gm_add(high[0], itemsize, high) and high[0] - low[0] >= 0


cdef bint layout_reshape(int ndim, const int64_t* shape, const int64_t* strides, int64_t itemsize,
                         int to_ndim, const int64_t* to_shape, int64_t* to_strides) noexcept nogil:
    # Both shapes are cut into groups of dimensions with equal products; a group of the old shape
    # must be one run of equal steps, which the group of the new shape then divides anew.
    cdef int64_t old_shape[MAX_RANK]
    cdef int64_t old_strides[MAX_RANK]
    cdef int64_t old_product
    cdef int64_t new_product
    cdef int old_ndim = 0
    cdef int old_end
    cdef int new_end
    cdef int old_begin = 0
    cdef int new_begin = 0
    cdef int i
    if layout_is_c(ndim, shape, strides, itemsize):
        layout_c_strides(to_ndim, to_shape, itemsize, to_strides)
        return True
    for i in range(ndim):           # the stride of a dimension of one element is arbitrary
        if shape[i] != 1:
            old_shape[old_ndim] = shape[i]
            old_strides[old_ndim] = strides[i]
            old_ndim += 1
    while old_begin < old_ndim:
        old_end = old_begin + 1
        old_product = old_shape[old_begin]
        new_end = new_begin
        new_product = 1
        # The side with the smaller product takes its next dimension, until both are equal.
        while new_product != old_product:
            if new_product < old_product:
                new_product *= to_shape[new_end]
                new_end += 1
            else:
                old_product *= old_shape[old_end]
                old_end += 1
        # Inside the group the next element of each dimension lies where the inner ones end.
        for i in range(old_begin, old_end - 1):
            if old_strides[i] != old_shape[i + 1] * old_strides[i + 1]:
                return False
        layout_c_strides(new_end - new_begin, &to_shape[new_begin], old_strides[old_end - 1],
                         &to_strides[new_begin])
        old_begin = old_end
        new_begin = new_end
    for i in range(new_begin, to_ndim):     # trailing dimensions of one element
        to_strides[i] = itemsize
    return True


# ---- Reading keys and shapes ---------------------------------------------------------------------


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
    # The first pass counts the named dimensions, because Ellipsis keeps the others.
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
    # Adds the slice's dimension; returns the offset of its first element in bytes.
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
    number = whole_number(part)
    if number is None:
        given = " ".join(shown(part, 80).split())       # an array's has several lines
        raise TypeError(f"invalid index {given}: expected integers, slices, Ellipsis and None")
    if not -length <= number < length:
        raise IndexError(f"index {number} is out of range for dimension {axis} of {length} "
                         "elements")
    return number if number >= 0 else number + length


cdef int shape_from(object shape, int64_t* numbers) except -1:
    cdef int ndim = 0
    if type(shape) is not tuple:
        shape = (shape,) if hasattr(shape, "__index__") else _tuple_of(shape)
    if len(shape) > MAX_RANK:
        raise ValueError(f"invalid shape of {len(shape)} dimensions: expected up to "
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
    # A bool has __index__, but is a mistake here. NumPy's integers have it, too.
    if type(length) is not int:
        found = whole_number(length)
        if found is None:
            raise TypeError(f"shape {shape!r} has {length!r}, which is not an integer")
        length = found
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
    # The unknown length counts as 1 until the others are read and checked.
    wanted = list(shape)
    for i, length in enumerate(shape):
        if type(length) is int and length == -1:
            if unknown >= 0:
                raise ValueError(f"shape {shape!r} has more than one -1")
            unknown = i
            wanted[i] = 1
    ndim = shape_from(tuple(wanted), numbers)
    # The total is a Python integer, because the product of a wrong shape may overflow.
    total = 1
    for i in range(ndim):
        total *= <object>numbers[i]
    if unknown >= 0 and total and size % total == 0:
        numbers[unknown] = size // total
    elif unknown >= 0 or total != size:
        raise ValueError(f"a tensor of {size} elements cannot have the shape {shape!r}")
    return ndim


# ---- Reading dtypes ------------------------------------------------------------------------------


# Dtypes of ml_dtypes that NumPy does not have: name -> (DLPack code, minor version that has it).
_ML_DTYPES = {
    "bfloat16": (DL_BFLOAT, 0),
    "float8_e3m4": (DL_FLOAT8_E3M4, 1),
    "float8_e4m3": (DL_FLOAT8_E4M3, 1),
    "float8_e4m3b11fnuz": (DL_FLOAT8_E4M3B11FNUZ, 1),
    "float8_e4m3fn": (DL_FLOAT8_E4M3FN, 1),
    "float8_e4m3fnuz": (DL_FLOAT8_E4M3FNUZ, 1),
    "float8_e5m2": (DL_FLOAT8_E5M2, 1),
    "float8_e5m2fnuz": (DL_FLOAT8_E5M2FNUZ, 1),
    "float8_e8m0fnu": (DL_FLOAT8_E8M0FNU, 1),
}
# Short names of formats, which have no meaning in NumPy.
_SHORT = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64",
    "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "fp8_e8m0": "float8_e8m0fnu",
}
# A letter and a number is a name of NumPy, and counts bytes: "u8" is uint64. So names that count
# bits are refused, and "f16", which in NumPy is a long double of 16 bytes.
_IN_BITS = {
    f"{word[0]}{bits}": (f"{word}{bits}", f"{word[0]}{bits // 8}")
    for word, sizes in (("int", (16, 32, 64)), ("uint", (16, 32, 64)), ("float", (16, 32, 64)),
                        ("complex", (64, 128)))
    for bits in sizes
}
_KINDS = {"b": DL_BOOL, "i": DL_INT, "u": DL_UINT, "f": DL_FLOAT, "c": DL_COMPLEX}
_LETTERS = {code: letter for letter, code in _KINDS.items()}
_CODES = {code: name for name, (code, _) in _ML_DTYPES.items()}

# Element types by argument: a type, a dtype, a name. The number is bounded, because a program may
# always make new structured dtypes.
cdef dict _known = {}
cdef dict _named = {}
cdef enum:
    MAX_KNOWN = 1024

# The latest argument is found by identity, because most programs use one dtype repeatedly. Without
# an interpreter lock a thread could see only one of the two changed, and use the element type of
# another dtype, so they are not used there.
cdef object last_given = None
cdef ElementType last_element = None


@cython.final
@cython.no_gc
cdef class ElementType:
    """One dtype and its names in every protocol."""


cdef object _numpy = None


cdef object numpy():
    global _numpy
    if _numpy is None:
        import numpy as module

        _numpy = module
    return _numpy


cdef ElementType element_of(object dtype):
    # Returns the element type of a dtype in any form of NumPy's. Raises TypeError if it is not a
    # dtype, or its elements are Python objects, have no size, or are arrays.
    if HAS_INTERPRETER_LOCK and dtype is last_given and last_element is not None:
        return last_element
    return look_up(dtype)


cdef ElementType look_up(object dtype):
    global last_given, last_element
    cdef ElementType element
    try:
        element = _known.get(dtype)
    except TypeError:       # not hashable: a list of fields, which may change, is not stored
        return _element_of_dtype(dtype_from(dtype))
    if element is None:
        element = _element_of_dtype(dtype_from(dtype))
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        _known[dtype] = element
    if HAS_INTERPRETER_LOCK:
        last_given, last_element = dtype, element
    return element


cdef ElementType element_named(DLDataType named):
    cdef ElementType element
    # Producers describe few types, each many times.
    key = (named.code, named.bits, named.lanes)
    found = _named.get(key)
    if found is not None:
        return <ElementType>found
    element = _element_named(named)
    if element is None:
        raise BufferError(f"no dtype holds DLPack's type code {named.code} with {named.bits} bits "
                          f"and {named.lanes} lanes")
    _named[key] = element
    return element


# ---- to and from NumPy ---------------------------------------------------------------------------

def dtype_from(given):
    """Return NumPy's dtype of a dtype of PyTorch, of a name, or of any form of NumPy's.

    Raises
    ------
    TypeError
        It names no dtype, or ml_dtypes has it and is not installed.
    """
    if isinstance(given, numpy().dtype):
        return given
    if given is None:
        raise TypeError(f"invalid dtype None: {_EXPECTED}")
    name = given
    if type(given).__module__ == "torch":       # torch.float32; NumPy does not know it
        name = str(given).removeprefix("torch.")
    if isinstance(name, str):
        if name in _IN_BITS:
            full, short = _IN_BITS[name]
            raise TypeError(f"invalid dtype {given!r}: the number in a short name of NumPy counts "
                            f"bytes; for {name[1:]} bits expected {full!r} or {short!r}")
        name = _SHORT.get(name, name)
        if name in _ML_DTYPES:
            return _ml_dtype(name)
    try:
        return numpy().dtype(name)
    except TypeError as error:
        raise TypeError(f"invalid dtype {given!r}: {_EXPECTED}") from error


_EXPECTED = ("expected a dtype of NumPy or PyTorch, or a name such as 'float32', 'bfloat16', "
             "'bf16' or 'fp8_e4m3'")


def _ml_dtype(str name):
    try:
        ml_dtypes = import_module("ml_dtypes")
    except ImportError as error:
        raise TypeError(f"dtype {name!r} needs the package ml_dtypes, which is not "
                        "installed; `pip install ml_dtypes` installs it") from error
    return numpy().dtype(getattr(ml_dtypes, name))


cdef ElementType _element_of_dtype(object dtype):
    cdef ElementType element = ElementType.__new__(ElementType)
    # Other devices and processes cannot count references to Python objects.
    if dtype.hasobject:
        raise TypeError(f"invalid dtype {dtype}: its elements are Python objects")
    if dtype.subdtype is not None:
        raise TypeError(f"invalid dtype {dtype}: make its shape part of the tensor's")
    if dtype.itemsize == 0:
        raise TypeError(f"invalid dtype {dtype}: its elements have no bytes")
    element.dtype = dtype
    element.itemsize = dtype.itemsize
    _name_for_dlpack(element)
    # Other libraries read ml_dtypes' typestr as plain bytes, so there is none.
    element.format = _buffer_format(dtype)
    element.typestr = None if dtype.name in _ML_DTYPES else dtype.str
    return element


cdef int _name_for_dlpack(ElementType element) except -1:
    # Bits stay 0 for byte orders, paddings and kinds that DLPack has no code for.
    dtype = element.dtype
    if dtype.name in _ML_DTYPES:
        code, element.dl_minor = _ML_DTYPES[dtype.name]
    # "g" and "G" are long doubles: 16 bytes of which not all are the number.
    elif dtype.kind in _KINDS and dtype.isnative and dtype.char not in "gG":
        code = _KINDS[dtype.kind]
    else:
        return 0
    element.dl.code = code
    element.dl.bits = 8 * dtype.itemsize
    element.dl.lanes = 1
    element.shift = int(dtype.itemsize).bit_length() - 1
    return 0


def _buffer_format(dtype):
    # NumPy knows the format of every dtype that has one.
    try:
        return memoryview(numpy().empty(0, dtype)).format.encode()
    except (ValueError, BufferError):
        return None


cdef ElementType _element_named(DLDataType named):
    cdef ElementType element = None
    letter = _LETTERS.get(named.code)
    name = f"{letter}{named.bits // 8}" if letter else _CODES.get(named.code)
    if name is not None and named.lanes == 1 and named.bits and named.bits % 8 == 0:
        try:
            element = element_of(name)
        except TypeError as error:
            if letter is None:      # the package that has it is not installed
                raise BufferError(str(error)) from error
    # NumPy reads "f16" as its long double, which is not the type that the producer means.
    return element if element is not None and element.dl.bits == named.bits else None


forbid_instantiation(ElementType)
