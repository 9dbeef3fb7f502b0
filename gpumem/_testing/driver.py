"""The driver table: the names and versions of its functions, where it is, how CUDA's is opened."""

import ctypes
from typing import Any

from gpumem._native.driver.table import driver_entry_names
from gpumem._native.driver.table import load as load_cuda_driver

__all__ = ["HEAD", "driver_entry_names", "load_cuda_driver", "table_and_context_of"]

# CPython's own words before a DriverDevice's first fields, the table and the context: two, or more
# in a free-threaded Python.
HEAD = object.__basicsize__ // ctypes.sizeof(ctypes.c_uint64)


def table_and_context_of(opened: Any) -> tuple[int, int]:
    """Return the addresses of an opened device's driver table and context.

    No public function returns them. The tests' HostDriver checks this layout by the version that
    the driver returns.
    """
    words = (ctypes.c_uint64 * (HEAD + 2)).from_address(id(opened))
    return words[HEAD], words[HEAD + 1]
