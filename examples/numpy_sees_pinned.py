"""NumPy over pinned memory that the GPU writes: one piece of memory, both sides, no copy of it.

    python examples/numpy_sees_pinned.py                    # the GPU, else the host device
    python examples/numpy_sees_pinned.py --device host

A step's result arrives in pinned memory on a stream. The array is made once; an event says when
what it shows is there.
"""

from __future__ import annotations

import argparse

import numpy as np

import gpumem

SHAPE = (256, 1024)


def main(arguments: list[str] | None = None) -> None:
    """Let a device write four results where NumPy looks; prints their means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=str(gpumem.default_device()))
    device = gpumem.Device(parser.parse_args(arguments).device)

    pinned = gpumem.zeros(SHAPE, "float32", memory=f"{device}/host_accessible")
    array = pinned.numpy()
    assert array.ctypes.data == pinned.ptr
    stream = gpumem.Stream(device)
    for step in range(4):
        result = gpumem.full(SHAPE, 2.0**step, "float32", memory=str(device), stream=stream)
        gpumem.copy(pinned, result, stream)
        arrived = stream.record()
        # Here the CPU is free, and `array` may show an older result.
        arrived.synchronize()
        print(f"step {step}: {np.mean(array):g}")


if __name__ == "__main__":
    main()
