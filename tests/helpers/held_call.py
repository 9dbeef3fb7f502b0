"""A driver call that waits, without the interpreter, until a Python thread ends the wait."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gpumem
from gpumem._testing.driver import HEAD, driver_entry_names, table_and_context_of

from .waiting import wait_until

READS = {"0", "63"}  # the system call `read`, on x86-64 and on AArch64

_copies: list[ctypes.Array] = []  # alive as long as the process


@contextmanager
def held_call(
    name: str, device: str = "host", meanwhile: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Let a driver function wait at its next call, in whichever thread, and then return success.

    It does nothing else. A Python thread ends the wait, once it has seen it and called `meanwhile`.
    The block must make the call. Takes the standard input, so the process is a test's own.
    """
    entries = [entry for entry, _ in driver_entry_names()]
    opened = gpumem.Device(device)._open()
    address, _ = table_and_context_of(opened)
    # A copy, to which the device points from now on: the table itself cannot be written.
    table = (ctypes.c_void_p * len(entries)).from_buffer_copy(
        (ctypes.c_void_p * len(entries)).from_address(address)
    )
    _copies.append(table)
    _set_table(opened, ctypes.addressof(table))
    before = table[entries.index(name)]
    receiver, sender = os.pipe()
    os.dup2(receiver, 0)
    ended = []

    def end() -> None:
        wait_until(_input_is_read)
        meanwhile()
        table[entries.index(name)] = before
        os.write(sender, bytes(1))
        ended.append(name)

    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    # All arguments are ignored, and the byte that is read is 0: success.
    table[entries.index(name)] = ctypes.cast(ctypes.CDLL(None).getchar, ctypes.c_void_p).value
    yield
    thread.join()
    assert ended == [name], f"{name} was not called"


def _set_table(opened: object, address: int) -> None:
    """Let an opened device call through another driver table: it is written into the object."""
    ctypes.c_uint64.from_address(id(opened) + HEAD * ctypes.sizeof(ctypes.c_uint64)).value = address


def _input_is_read() -> bool:
    """Whether a thread of this process sleeps in a read of the standard input."""
    for task in Path("/proc/self/task").iterdir():
        try:
            call = (task / "syscall").read_text().split()
        except OSError:  # the thread has ended
            continue
        if call[0] in READS and call[1] == "0x0":
            return True
    return False
