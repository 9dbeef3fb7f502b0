"""Arrays and blocks of one content, in every kind of memory of the host device."""

from __future__ import annotations

import numpy as np

import gpumem

MEMORIES = ["host", "host/host_accessible", "host/managed", "numpy"]


def put(array, memory: str):
    """Return an array of the same elements in a memory; "numpy" is a plain one of NumPy's."""
    if memory == "numpy":
        return array.copy()
    tensor = gpumem.empty(array.shape, array.dtype, memory=memory)
    tensor.numpy()[...] = array
    return tensor


def elements(array):
    """Return the elements, once what gpumem queued for them is done."""
    return array if isinstance(array, np.ndarray) else array.numpy()


def fill(buffer, value: int) -> None:
    """Write one value to every byte of a block, by the CPU."""
    np.frombuffer(buffer, np.uint8)[:] = value


def holds(buffer, value: int) -> bool:
    return bool((np.frombuffer(buffer, np.uint8) == value).all())
