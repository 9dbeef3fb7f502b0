"""A DLPack consumer in ctypes, to the letter of dlpack.h: reads, renames, deletes."""

from __future__ import annotations

import ctypes

import numpy as np

# Older ones ask for legacy capsules, which have no flag for read-only memory: they take everything
# for read-only, give nothing read-only away, and their from_dlpack has no `device` and `copy`.
NUMPY_KNOWS_VERSIONS = np.lib.NumpyVersion(np.__version__) >= "2.1.0"

LEGACY = b"dltensor"
VERSIONED = b"dltensor_versioned"


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class ManagedLegacy(ctypes.Structure):
    _fields_ = (("tensor", Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


assert [ctypes.sizeof(s) for s in (Tensor, ManagedLegacy, ManagedVersioned)] == [48, 64, 80]

_LAYOUT = {LEGACY: ManagedLegacy, VERSIONED: ManagedVersioned}
_USED = {LEGACY: b"used_dltensor", VERSIONED: b"used_dltensor_versioned"}


def _function(name, result, *arguments):
    function = getattr(ctypes.pythonapi, name)
    function.restype, function.argtypes = result, arguments
    return function


_is_valid = _function("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_pointer = _function("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_set_name = _function("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)


def kind_of(capsule) -> bytes:
    return next(kind for kind in _LAYOUT if _is_valid(capsule, kind))


def managed_of(capsule):
    kind = kind_of(capsule)
    return _LAYOUT[kind].from_address(_pointer(capsule, kind))


def tensor_of(capsule) -> Tensor:
    return managed_of(capsule).tensor


class Consumed:
    """A managed tensor whose capsule was renamed: to be deleted exactly once."""

    def __init__(self, managed) -> None:
        self._address = ctypes.addressof(managed)
        self._deleter = managed.deleter
        self.tensor = managed.tensor

    def delete(self) -> None:
        """Call the deleter from this thread, without the interpreter lock."""
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._deleter)(self._address)

    def delete_on(self, driver, stream) -> None:
        """Queue the deleter as a host function: a thread of the stream's calls it."""
        driver.call("cuLaunchHostFunc", stream.ptr, self._deleter, self._address)


def consume(capsule) -> Consumed:
    """Take a capsule over, as a consumer does."""
    kind = kind_of(capsule)
    managed = managed_of(capsule)
    _set_name(capsule, _USED[kind])
    return Consumed(managed)


# ---- a producer ----------------------------------------------------------------------------------

_new_capsule = _function(
    "PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Producer:
    """A DLPack producer of whatever a test says, right or wrong; counts its deleter's calls."""

    def __init__(self, memory=None, *, kind=VERSIONED, shape=(4,), strides=None, **fields) -> None:
        self.memory = memory if memory is not None else ctypes.create_string_buffer(1024)
        self.kind = kind
        self.deleted = 0
        self.asked: list[dict] = []
        self._numbers = [
            (ctypes.c_int64 * max(1, len(numbers)))(*numbers) if numbers is not None else None
            for numbers in (shape, strides)
        ]
        self._deleter = _DELETER(self._delete)
        self.managed = _LAYOUT[kind]()
        self.managed.deleter = ctypes.cast(self._deleter, ctypes.c_void_p).value
        if kind is VERSIONED:
            self.managed.major, self.managed.flags = 1, 0
        tensor = self.managed.tensor
        tensor.data = ctypes.addressof(self.memory)
        tensor.device_type, tensor.ndim = 1, len(shape) if shape is not None else 1
        tensor.code, tensor.bits, tensor.lanes = 1, 8, 1
        for name, numbers in zip(("shape", "strides"), self._numbers, strict=True):
            if numbers is not None:
                setattr(tensor, name, ctypes.cast(numbers, ctypes.POINTER(ctypes.c_int64)))
        for name, value in fields.items():
            setattr(tensor if hasattr(tensor, name) else self.managed, name, value)

    def _delete(self, managed) -> None:
        assert managed == ctypes.addressof(self.managed)
        self.deleted += 1

    def __dlpack_device__(self):
        return self.managed.tensor.device_type, self.managed.tensor.device_id

    def __dlpack__(self, **arguments):
        self.asked.append(arguments)
        return self.capsule()

    def capsule(self):
        return _new_capsule(ctypes.addressof(self.managed), self.kind, None)


# ---- the C exchange API --------------------------------------------------------------------------

_int = ctypes.c_int
SET_ERROR = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)


class ExchangeTable(ctypes.Structure):
    # The functions that touch objects are called with the interpreter lock, and set exceptions.
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("prev_api", ctypes.c_void_p),
        (
            "allocate",
            ctypes.CFUNCTYPE(
                _int,
                ctypes.POINTER(Tensor),
                ctypes.POINTER(ctypes.c_void_p),
                ctypes.c_void_p,
                SET_ERROR,
            ),
        ),
        ("export", ctypes.PYFUNCTYPE(_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))),
        ("wrap", ctypes.PYFUNCTYPE(_int, ctypes.c_void_p, ctypes.POINTER(ctypes.py_object))),
        ("borrow", ctypes.PYFUNCTYPE(_int, ctypes.py_object, ctypes.POINTER(Tensor))),
        ("stream", ctypes.CFUNCTYPE(_int, _int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))),
    )


assert ctypes.sizeof(ExchangeTable) == 56


def exchange_table(cls) -> ExchangeTable:
    """Return the table that a type shows to C consumers."""
    capsule = cls.__dlpack_c_exchange_api__
    assert _is_valid(capsule, b"dlpack_exchange_api")
    return ExchangeTable.from_address(_pointer(capsule, b"dlpack_exchange_api"))


def managed_at(address: int) -> ManagedVersioned:
    return ManagedVersioned.from_address(address)
