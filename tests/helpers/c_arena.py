"""gpumem.h as ctypes has it: an arena's C functions, called without a compiler.

ctypes lets the interpreter lock go around each call, as a program in C would.
"""

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int32, c_size_t, c_uint32, c_uint64
from ctypes import c_void_p as pointer

import gpumem.integrations.c
from gpumem.integrations.c._calls import address_of

OK, OUT_OF_MEMORY, INVALID, NOT_FOUND, CLOSED, CAPTURING, NO_HOST_MEMORY, DRIVER_ERROR = range(8)


class Stats(ctypes.Structure):
    _fields_ = [("size", c_size_t)] + [
        (name, c_uint64)
        for name in (
            "in_use",
            "max_in_use",
            "reserved",
            "max_reserved",
            "limit",
            "allocations",
            "frees",
        )
    ]


class Calls(ctypes.Structure):
    _fields_ = [
        ("version", c_uint32),
        ("size", c_uint32),
        ("allocate", CFUNCTYPE(c_int, pointer, c_size_t, c_size_t, pointer, POINTER(pointer))),
        ("deallocate", CFUNCTYPE(c_int, pointer, pointer)),
        ("deallocate_on", CFUNCTYPE(c_int, pointer, pointer, pointer)),
        ("record_stream", CFUNCTYPE(c_int, pointer, pointer, pointer)),
        ("stats", CFUNCTYPE(c_int, pointer, POINTER(Stats))),
        ("shrink", CFUNCTYPE(c_int, pointer, POINTER(c_uint64))),
        ("text", CFUNCTYPE(c_char_p, c_int)),
        ("synchronize", CFUNCTYPE(c_int, pointer, pointer)),
        ("report", CFUNCTYPE(pointer, pointer, c_size_t, pointer, c_int)),
        ("retain", CFUNCTYPE(None, pointer)),
        ("release", CFUNCTYPE(None, pointer)),
    ]


class Face(ctypes.Structure):
    _fields_ = [("calls", POINTER(Calls)), ("identity", pointer), ("device", c_int32)]


class Failed(Exception):
    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


class CArena:
    """An arena as C sees it; a status other than OK raises `Failed`."""

    def __init__(self, arena, **options):
        self.capsule = gpumem.integrations.c.allocator(arena, **options)
        self.address = address_of(self.capsule)
        self.face = Face.from_address(self.address)
        self.calls = self.face.calls.contents

    def text(self, status):
        return self.calls.text(status).decode()

    def _check(self, status):
        if status != OK:
            raise Failed(status, self.text(status))

    def allocate(self, nbytes, stream=None, alignment=256):
        address = pointer(1)
        status = self.calls.allocate(
            self.address, nbytes, alignment, stream and stream.ptr, ctypes.byref(address)
        )
        assert status == OK or address.value is None
        self._check(status)
        return address.value

    def deallocate(self, address):
        self._check(self.calls.deallocate(self.address, address))

    def deallocate_on(self, address, stream=None):
        self._check(self.calls.deallocate_on(self.address, address, stream and stream.ptr))

    def record_stream(self, address, stream):
        self._check(self.calls.record_stream(self.address, address, stream.ptr))

    def stats(self, size=None):
        stats = Stats(ctypes.sizeof(Stats) if size is None else size)
        self._check(self.calls.stats(self.address, ctypes.byref(stats)))
        return stats

    def shrink(self):
        released = c_uint64()
        self._check(self.calls.shrink(self.address, ctypes.byref(released)))
        return released.value

    def synchronize(self, stream):
        self._check(self.calls.synchronize(self.address, stream.ptr))

    def report(self, nbytes, status):
        text = self.calls.report(self.address, nbytes, None, status)
        found = text and ctypes.string_at(text).decode()
        ctypes.CDLL(None).free(pointer(text))
        return found

    def retain(self):
        self.calls.retain(self.address)

    def release(self):
        self.calls.release(self.address)
