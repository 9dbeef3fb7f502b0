"""PyTorch's side of the hooks, without PyTorch: a small C++ library, compiled for the tests."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

from gpumem._testing import torch_hooks

SOURCE = Path(__file__).with_suffix(".cpp")
ROOM = 1024


class Refused(Exception):
    """A hook threw."""


class Caller:
    """The hooks as methods; streams are native handles."""

    @classmethod
    def built_in(cls, folder):
        """Compile it into a folder."""
        compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
        library = Path(folder) / "torch_caller.so"
        subprocess.run(
            [compiler, "-std=c++17", "-shared", "-fPIC", "-o", library, SOURCE], check=True
        )
        return cls(str(library))

    def __init__(self, path):
        self.path = path
        self.library = ctypes.CDLL(path)
        self.hooks = torch_hooks.addresses()
        self.said = ctypes.create_string_buffer(ROOM)

    def alloc(self, nbytes, device=0, stream=0, hook="alloc"):
        address = ctypes.c_void_p()
        self._guard(
            self.library.caller_alloc,
            self._hook(hook),
            ctypes.c_size_t(nbytes),
            device,
            ctypes.c_void_p(stream),
            ctypes.byref(address),
        )
        return address.value

    def free(self, address, nbytes=0, device=0, stream=0):
        self.library.caller_free(
            self._hook("free"),
            ctypes.c_void_p(address),
            ctypes.c_size_t(nbytes),
            device,
            ctypes.c_void_p(stream),
        )

    def record_stream(self, address, stream):
        self._guard(
            self.library.caller_record,
            self._hook("record_stream"),
            ctypes.c_void_p(address),
            ctypes.c_void_p(stream),
        )

    def begin_pool(self, number, stream, device=0):
        self._guard(
            self.library.caller_begin,
            self._hook("begin_pool"),
            device,
            ctypes.c_ulonglong(number),
            ctypes.c_void_p(stream),
        )

    def end_pool(self, number, device=0):
        self.library.caller_pool(self._hook("end_pool"), device, ctypes.c_ulonglong(number))

    def release_pool(self, number, device=0):
        self.library.caller_pool(self._hook("release_pool"), device, ctypes.c_ulonglong(number))

    def reset(self):
        ctypes.CFUNCTYPE(None)(self.hooks["reset"])()

    def memory_fraction(self, fraction, device=0):
        ctypes.CFUNCTYPE(None, ctypes.c_double, ctypes.c_int)(self.hooks["memory_fraction"])(
            fraction, device
        )

    def base_alloc(self, address):
        nbytes = ctypes.c_size_t()
        kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        base = kind(self.hooks["base_alloc"])(address, ctypes.byref(nbytes))
        return base, nbytes.value

    def _hook(self, name):
        return ctypes.c_void_p(self.hooks[name])

    def _guard(self, function, *arguments):
        done = function(*arguments, self.said, ctypes.c_size_t(ROOM))
        if done:
            raise Refused(self.said.value.decode())
