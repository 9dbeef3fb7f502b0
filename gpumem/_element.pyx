"""Reading dtypes; see _element.pxd."""

cimport cython

from gpumem._dlpack cimport (
    DL_BFLOAT,
    DL_BOOL,
    DL_COMPLEX,
    DL_FLOAT,
    DL_FLOAT8_E3M4,
    DL_FLOAT8_E4M3,
    DL_FLOAT8_E4M3B11FNUZ,
    DL_FLOAT8_E4M3FN,
    DL_FLOAT8_E4M3FNUZ,
    DL_FLOAT8_E5M2,
    DL_FLOAT8_E5M2FNUZ,
    DL_FLOAT8_E8M0FNU,
    DL_INT,
    DL_UINT,
    DLDataType,
)
from gpumem._support.instances cimport forbid_instantiation

from importlib import import_module

# What NumPy has no dtype for and ml_dtypes has: name -> (DLPack code, minor version that has it).
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
_KINDS = {"b": DL_BOOL, "i": DL_INT, "u": DL_UINT, "f": DL_FLOAT, "c": DL_COMPLEX}
_LETTERS = {code: letter for letter, code in _KINDS.items()}
_CODES = {code: name for name, (code, _) in _ML_DTYPES.items()}

# What was asked for before, by whatever was given: a type, a dtype, a name. Bounded, because
# anybody may make ever new structured dtypes.
cdef dict _known = {}
cdef dict _named = {}
cdef enum:
    MOST_KNOWN = 1024

# The one asked for last, found by identity.
cdef object last_given = None
cdef ElementType last_element = None


@cython.final
@cython.no_gc
cdef class ElementType:
    """One dtype and what every protocol calls it."""


cdef object _numpy = None


cdef object numpy():
    global _numpy
    if _numpy is None:
        import numpy as module

        _numpy = module
    return _numpy


cdef ElementType element_of(object dtype):
    """Return the element type of anything that NumPy takes for a dtype.

    Raises
    ------
    TypeError
        No dtype, or one whose elements are Python objects, have no size, or are arrays.
    """
    if dtype is last_given and last_element is not None:
        return last_element
    return look_up(dtype)


cdef ElementType look_up(object dtype):
    global last_given, last_element
    cdef ElementType element
    try:
        element = _known.get(dtype)
    except TypeError:       # not hashable: a list of fields, which may change
        return _element_of_dtype(_dtype_from(dtype))
    if element is None:
        element = _element_of_dtype(_dtype_from(dtype))
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[dtype] = element
    last_given, last_element = dtype, element
    return element


cdef ElementType element_named(DLDataType named):
    cdef ElementType element
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

def _dtype_from(given):
    if isinstance(given, numpy().dtype):
        return given
    if given is None:
        raise TypeError("dtype None is not a dtype: name one, such as numpy.float32")
    if isinstance(given, str) and given in _ML_DTYPES:
        return _ml_dtype(given)
    return numpy().dtype(given)


def _ml_dtype(str name):
    try:
        ml_dtypes = import_module("ml_dtypes")
    except ImportError as error:
        raise TypeError(f"dtype {name!r} needs the package ml_dtypes, which is not "
                        "installed") from error
    return numpy().dtype(getattr(ml_dtypes, name))


cdef ElementType _element_of_dtype(object dtype):
    cdef ElementType element = ElementType.__new__(ElementType)
    if dtype.hasobject:
        raise TypeError(f"dtype {dtype} is not accepted: its elements are Python objects")
    if dtype.subdtype is not None:
        raise TypeError(f"dtype {dtype} is not accepted: make its shape part of the tensor's")
    if dtype.itemsize == 0:
        raise TypeError(f"dtype {dtype} is not accepted: its elements have no bytes")
    element.dtype = dtype
    element.itemsize = dtype.itemsize
    _name_for_dlpack(element)
    element.format = _buffer_format(dtype)
    element.typestr = None if dtype.name in _ML_DTYPES else dtype.str
    return element


cdef int _name_for_dlpack(ElementType element) except -1:
    # Leaves bits at 0 for byte orders, paddings and kinds that DLPack has no word for.
    dtype = element.dtype
    if dtype.name in _ML_DTYPES:
        code, element.dl_minor = _ML_DTYPES[dtype.name]
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
    try:
        return memoryview(numpy().empty(0, dtype)).format.encode()
    except (ValueError, BufferError):
        return None


cdef ElementType _element_named(DLDataType named):
    if named.lanes != 1 or named.bits % 8 != 0 or named.bits == 0:
        return None
    if named.code in _CODES:
        try:
            element = element_of(_CODES[named.code])
        except TypeError as error:
            raise BufferError(str(error)) from error
    elif named.code in _LETTERS:
        try:
            element = element_of(numpy().dtype(f"{_LETTERS[named.code]}{named.bits // 8}"))
        except TypeError:
            return None
    else:
        return None
    # NumPy reads "f16" as its long double, which is not the type that the producer means.
    return element if (<ElementType>element).dl.bits == named.bits else None


forbid_instantiation(ElementType)
