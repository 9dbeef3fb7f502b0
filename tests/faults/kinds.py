"""What can fail: the host device's driver calls, and gpumem's own calls for host memory."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import gpumem
from gpumem._testing import host_device
from gpumem.errors import (
    BadHandleError,
    BudgetExceededError,
    ConfigError,
    DriverError,
    OutOfMemoryError,
    SourceError,
    UnsupportedHandleTypeError,
)

INVALID_VALUE, OUT_OF_MEMORY = 1, 2
HOST_DEVICE = "_native/driver/host."  # the module with its code


@dataclass(frozen=True)
class Fault:
    """The call of a scenario that fails, from 1, and the error."""

    call: int
    error: int


class Kind(ABC):
    """A kind of call, of which one can be made to fail."""

    name: str
    errors: dict[str, int]

    @abstractmethod
    def count(self) -> int:
        """Return how many calls there were in this process."""

    @abstractmethod
    def arm(self, due: int, error: int) -> None:
        """Let the call fail that comes `due` calls from now: 1 is the next."""

    @abstractmethod
    def failed(self) -> str | None:
        """Name the call that failed since `arm`, if one did."""

    @abstractmethod
    def disarm(self) -> None:
        """Let no call fail from now on."""

    @abstractmethod
    def explains(self, error: Exception, function: str, code: int) -> bool:
        """Whether the failure of a call is what an error tells of."""


class DriverCalls(Kind):
    """Calls of the host device's driver, from anywhere."""

    name = "driver"
    errors: ClassVar[dict[str, int]] = {
        "OUT_OF_MEMORY": OUT_OF_MEMORY,
        "INVALID_VALUE": INVALID_VALUE,
        "NOT_SUPPORTED": 801,
        "UNKNOWN": 999,
    }

    def count(self) -> int:
        texts = sum(map(host_device.call_count, ("cuGetErrorName", "cuGetErrorString")))
        return host_device.call_count() - texts  # a fault of "any" call leaves these out

    def arm(self, due: int, error: int) -> None:
        host_device.fail(None, due, error)

    def failed(self) -> str | None:
        return host_device.last_fault()

    def disarm(self) -> None:
        host_device.clear_faults()

    def explains(self, error: Exception, function: str, code: int) -> bool:
        if isinstance(error, DriverError):
            return error.code == code
        if isinstance(error, OutOfMemoryError):
            # What relieves a budget may have failed; then the budget is exceeded.
            return code == OUT_OF_MEMORY or isinstance(error, BudgetExceededError)
        if isinstance(error, SourceError):
            # A resource allocates from another one, whose error is named.
            return f"({code})" in str(error)
        if isinstance(error, ConfigError | UnsupportedHandleTypeError | BadHandleError):
            # The driver was asked what the device can, or what a handle stands for; INVALID_VALUE
            # is its answer about an attribute that it does not know, which means no.
            asked = function == "cuDeviceGetAttribute"
            return f"({code})" in str(error) or (asked and code == INVALID_VALUE)
        return False


class HeapCalls(Kind):
    """malloc, calloc, realloc, aligned_alloc and strdup where gpumem's compiled modules call them.

    Those of the host device are left out: it stands for a driver. The C library's functions are
    replaced by `heap.c`, which has to be loaded before anything else: see `start_with_heap_calls`.
    """

    name = "heap"
    errors: ClassVar[dict[str, int]] = {"ENOMEM": 12}

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.heap_watch.argtypes = [ctypes.c_size_t] * 2
        self._library.heap_count.restype = ctypes.c_long
        self._library.heap_fail.argtypes = [ctypes.c_long]
        self._library.heap_failed.restype = ctypes.c_size_t
        self._watched: dict[tuple[int, int], str] = {}
        self._modules = 0

    def watch(self) -> None:
        """Count the calls of all modules that are imported by now."""
        if len(sys.modules) == self._modules:
            return  # reading the process's mappings takes longer than most steps
        self._modules = len(sys.modules)
        folder = str(Path(gpumem.__file__).parent)
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, access, _, _, _, *path = line.split(maxsplit=5)
            begin, end = (int(text, 16) for text in span.split("-"))
            if "x" not in access or not path or not path[0].startswith(folder):
                continue
            module = Path(path[0]).relative_to(folder)
            if (begin, end) not in self._watched and not str(module).startswith(HOST_DEVICE):
                self._watched[begin, end] = str(module).split(".")[0]
                self._library.heap_watch(begin, end)

    def count(self) -> int:
        self.watch()
        return self._library.heap_count()

    def arm(self, due: int, error: int) -> None:
        self._library.heap_fail(due)

    def failed(self) -> str | None:
        address = self._library.heap_failed()
        for (begin, end), module in self._watched.items():
            if begin <= address < end:
                return f"{module}+{address - begin:#x}"
        return None

    def disarm(self) -> None:
        self._library.heap_fail(0)

    def explains(self, error: Exception, function: str, code: int) -> bool:
        # A call on the way to the driver fails as the driver's own would without host memory.
        if isinstance(error, DriverError):
            return error.code == OUT_OF_MEMORY
        if isinstance(error, ConfigError):
            return f"({OUT_OF_MEMORY})" in str(error)
        return isinstance(error, MemoryError)  # OutOfMemoryError too


KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in (DriverCalls, HeapCalls)}


def start_with_heap_calls() -> None:
    """Start this program again, with the replaced functions, unless it has them."""
    if hasattr(ctypes.CDLL(None), "heap_watch"):
        shutil.rmtree(Path(os.environ.pop("LD_PRELOAD")).parent)  # it is loaded
        return
    library = Path(tempfile.mkdtemp(prefix="gpumem-heap-")) / "heap.so"
    flags = ["-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-o", str(library)]
    subprocess.run(["gcc", *flags, str(Path(__file__).with_name("heap.c"))], check=True)
    os.execve(
        sys.executable,
        [sys.executable, *sys.orig_argv[1:]],
        {**os.environ, "LD_PRELOAD": str(library)},
    )
