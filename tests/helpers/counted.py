"""Counting the driver calls that gpumem makes, by wrapping entries of a device's driver table."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import gpumem
from gpumem._testing.driver import driver_entry_names, table_and_context_of

_ARGUMENTS = {
    "cuCtxSynchronize": 0,
    "cuStreamSynchronize": 1,
    "cuEventSynchronize": 1,
    "cuWaitExternalSemaphoresAsync": 4,
    "cuSignalExternalSemaphoresAsync": 4,
}
SYNCHRONISATIONS = ("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize")


@contextmanager
def counted(device: str) -> Iterator[Counter]:
    """Count gpumem's synchronisations and its calls for external semaphores within a block.

    Only where the table can be written: a GPU's is filled when the driver is first asked.
    """
    calls: Counter = Counter()
    names = [name for name, _ in driver_entry_names()]
    address, _ = table_and_context_of(gpumem.Device(device)._open())
    table = (ctypes.c_void_p * len(names)).from_address(address)
    before = {names.index(name): table[names.index(name)] for name in _ARGUMENTS}
    wrappers = []
    for index, address in before.items():
        wrappers.append(_wrapper(names[index], address, calls))
        table[index] = ctypes.cast(wrappers[-1], ctypes.c_void_p).value
    try:
        yield calls
    finally:
        for index, address in before.items():
            table[index] = address


def _wrapper(name: str, address: int, calls: Counter):
    signature = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * _ARGUMENTS[name])
    inner = signature(address)

    def call(*arguments: int) -> int:
        calls[name] += 1
        return inner(*arguments)

    return signature(call)
