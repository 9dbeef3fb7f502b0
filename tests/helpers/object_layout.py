"""What is read from CPython's layout of an object, because nothing else tells it."""

from __future__ import annotations

import ctypes
from typing import Any

# Words of CPython's own, before a DriverDevice's first fields: the table, the context. Two, or more
# in a free-threaded Python.
HEAD = object.__basicsize__ // ctypes.sizeof(ctypes.c_uint64)


def table_and_context_of(opened: Any) -> tuple[int, int]:
    """Return the addresses of an opened device's driver table and context.

    HostDriver asserts, by the version that the driver tells, that this is still the layout.
    """
    words = (ctypes.c_uint64 * (HEAD + 2)).from_address(id(opened))
    return words[HEAD], words[HEAD + 1]


def set_table(opened: Any, address: int) -> None:
    """Let an opened device call through another driver table, from the next call on."""
    ctypes.c_uint64.from_address(id(opened) + HEAD * ctypes.sizeof(ctypes.c_uint64)).value = address
