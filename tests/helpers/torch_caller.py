"""PyTorch's side of the table of functions in hooks.h, without PyTorch."""

import ctypes
import re
from pathlib import Path

from gpumem import integrations
from gpumem._testing import torch_hooks

HEADER = (Path(integrations.__file__).parent / "torch" / "hooks.h").read_text()
FUNCTIONS = re.findall(r"\(\*(\w+)\)\(", HEADER.partition("typedef struct TorchCalls {")[2])
ARENAS = torch_hooks.PINNED + 1  # pointers to their hooks lie in front of the functions
POINTER, SIZE, INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
FREED, NO_INTERPRETER = 1, 2  # outcomes of a garbage collection
ALL = 0  # the part of a device's statistics that counts all its memory


class Refused(Exception):
    """A block was refused; the text is the one that PyTorch would raise."""


class Block(ctypes.Structure):
    """TorchBlock of hooks.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("address", "size", "requested", "stream")),
        ("pool", ctypes.c_uint64 * 2),
        ("segment", ctypes.c_uint32),
        ("device", ctypes.c_int32),
        *((name, ctypes.c_uint8) for name in ("state", "is_small", "is_expandable")),
    ]


def sums(text):
    return [(name, ctypes.c_uint64) for name in text.split()]


class Figures(ctypes.Structure):
    """TorchFigures of hooks.h."""

    _fields_ = sums(
        "allocs frees requested requested_freed allocated allocated_freed peak_blocks "
        "peak_requested peak_allocated pending pending_bytes reserved segments idle idle_bytes"
    )


class Stats(ctypes.Structure):
    """TorchStats of hooks.h."""

    _fields_ = [
        ("parts", Figures * 3),
        *sums("peak_reserved retries waits device_allocs device_frees failures"),
    ]


class Caller:
    """The functions as methods; a stream is a native handle, a pool the address of its hook."""

    def alloc(self, nbytes, device=0, stream=0, pool=None):
        """Return the address of a block, from a pool if one is given."""
        hook, address = pool or self.hook(device), POINTER()
        where = POINTER(hook), SIZE(nbytes), POINTER(stream), ctypes.byref(address)
        status = self._call("allocate", INT, *where)
        outcome, said = self._collect(device, nbytes, status) if status else (0, "")
        if outcome == FREED:
            status = self._call("allocate", INT, *where)
        if outcome == NO_INTERPRETER:
            raise Refused(said)
        if status != 0:
            raise Refused(f"{self._report(device, nbytes, stream, status)}\n{said}".rstrip())
        return address.value

    def free(self, address):
        """Free a block; return 0, or the status of a refusal."""
        return self._call("release", INT, POINTER(address))

    def record_stream(self, address, stream):
        assert self._call("record", INT, POINTER(address), POINTER(stream)) == 0

    def block(self, address):
        """Return a description of the block at an address; None if no block begins there."""
        found = Block()
        return found if self._call("block", INT, POINTER(address), ctypes.byref(found)) else None

    def hook(self, device):
        """Return the hook of a device, found if the device has none yet."""
        hooks = (POINTER * ARENAS).from_address(torch_hooks.table())
        hook = hooks[device] or self._call("find", POINTER, INT(device))
        if not hook:
            raise Refused(f"no arena serves cuda:{device}")
        return hook

    def shrink(self):
        self._call("shrink", None)

    def limit(self, fraction, device=0):
        self._call("limit", None, INT(device), ctypes.c_double(fraction))

    def stats(self, device=0):
        now = Stats()
        self._call("stats", None, INT(device), ctypes.byref(now))
        return now

    def live_bytes(self, device=0):
        """Return the requested bytes of the device's live blocks."""
        now = self.stats(device).parts[ALL]
        return now.requested - now.requested_freed

    def reset_peaks(self, device=0):
        self._call("reset_peaks", None, INT(device))

    # ---- pools -----------------------------------------------------------------------------------

    def open_pool(self, number, device=0, captured=True):
        """Open a pool beside the device's arena: of captured graphs, or a MemPool's."""
        name = (ctypes.c_uint64 * 2)(0, number)
        hook = POINTER(self.hook(device))
        pool = self._call("open_pool", POINTER, hook, name, POINTER(), INT(1), INT(captured))
        if not pool:
            raise Refused(f"no pool can be opened beside the arena of cuda:{device}")
        return pool

    def begin_pool(self, pool):
        """Begin another capture, after the work of all earlier ones."""
        self._call("begin_pool", None, POINTER(pool))

    def drop_pool(self, pool):
        self._call("drop_pool", None, POINTER(pool))

    def restore(self, pool, block):
        """Return whether the block is live again, at its address."""
        return self._call("restore", INT, POINTER(pool), ctypes.byref(block)) == 0

    # ---- calls -----------------------------------------------------------------------------------

    def _report(self, device, nbytes, stream, status):
        is_memory = INT()
        where = INT(device), SIZE(nbytes), POINTER(stream), INT(status), ctypes.byref(is_memory)
        text = self._call("report", POINTER, *where)
        said = ctypes.string_at(text).decode() if text else f"status {status}"
        ctypes.CDLL(None).free(POINTER(text))
        return said

    def _collect(self, device, nbytes, status):
        text = POINTER()
        where = INT(device), SIZE(nbytes), INT(status), ctypes.byref(text)
        outcome = self._call("collect", INT, *where)
        said = ctypes.string_at(text.value).decode() if text else ""
        ctypes.CDLL(None).free(text)
        return outcome, said

    def address_of(self, name):
        """Return the address of a function."""
        place = torch_hooks.table() + ctypes.sizeof(POINTER) * (ARENAS + FUNCTIONS.index(name))
        return POINTER.from_address(place).value

    def _call(self, name, result, *arguments):
        return ctypes.CFUNCTYPE(result)(self.address_of(name))(*arguments)
