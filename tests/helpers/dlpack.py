"""A DLPack consumer in ctypes, to the letter of dlpack.h: reads, renames, deletes."""

from __future__ import annotations

import ctypes

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
    _fields_ = (
        ("tensor", Tensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


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
