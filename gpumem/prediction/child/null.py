"""The null CUDA, loaded into this process: see ../null."""

from __future__ import annotations

import ctypes
from typing import Any

MAX_ATTRIBUTES = 160

READ, REFUSED, ASSUMED = range(3)
"""Kinds of calls that a `Listener` hears of."""


class NullDevice(ctypes.Structure):
    """The struct of that name in null.h."""

    _fields_ = [
        ("count", ctypes.c_int),
        ("cuda", ctypes.c_int),
        ("total", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
        ("name", ctypes.c_char * 256),
        ("attributes", ctypes.c_int * MAX_ATTRIBUTES),
    ]


Listener = ctypes.CFUNCTYPE(
    None,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_int,
)


def load(path: str, device: dict[str, Any]) -> ctypes.CDLL:
    """Load the null CUDA, so that libraries loaded later call it, and set its devices."""
    library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    attributes = (ctypes.c_int * MAX_ATTRIBUTES)()
    for number, value in device["attributes"].items():
        attributes[int(number)] = value
    numbers = (device["count"], device["cuda"], device["total"], device["context"])
    made = NullDevice(*numbers, device["name"].encode(), attributes)
    library.null_configure(ctypes.byref(made))
    return library


def memory_of(library: ctypes.CDLL, device: int) -> tuple[int, int]:
    """Return the bytes of a device that are used, and their peak."""
    used, peak = ctypes.c_uint64(), ctypes.c_uint64()
    library.null_memory(device, ctypes.byref(used), ctypes.byref(peak))
    return used.value, peak.value
