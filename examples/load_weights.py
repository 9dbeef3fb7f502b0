"""Weights from a safetensors file into tensors of an arena, read by fastsafetensors.

    python examples/load_weights.py                    # the GPU, else the host device
    python examples/load_weights.py --device host

The file is written by `Arena.copy_out`. The loader reads it into a buffer of its own, from which
each tensor is copied to its place in the arena. Printed are both rates: the loader alone, and with
that copy.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import gpumem

try:
    import torch
    from fastsafetensors import fastsafe_open
except ImportError as error:
    print(f"this example needs PyTorch and fastsafetensors: {error}")
    sys.exit()

LAYERS, WIDTH = 16, 2048


def main(arguments: list[str] | None = None) -> None:
    """Write a file of weights, load it, and compare what was loaded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=str(gpumem.default_device()))
    device = gpumem.Device(parser.parse_args(arguments).device)

    arena = gpumem.Arena(device)
    weights = {
        f"layers.{number}.weight": gpumem.full((WIDTH, WIDTH), number, "float32", resource=arena)
        for number in range(LAYERS)
    }
    with tempfile.TemporaryDirectory() as folder:
        path = arena.copy_out(weights, Path(folder) / "model.safetensors").wait()
        for weight in weights.values():
            weight.fill(-1)
        device.synchronize()
        where = torch.empty(1, device="cpu" if device.type == "host" else str(device)).device
        began = time.perf_counter()
        with fastsafe_open([str(path)], nogds=True, device=str(where)) as file:
            loaded = time.perf_counter()
            for name, weight in weights.items():
                gpumem.copy(weight, file.get_tensor(name))
            device.synchronize()
            copied = time.perf_counter()
        nbytes = path.stat().st_size
    print(f"the loader alone: {nbytes / (loaded - began) / 1e9:.1f} GB/s")
    print(f"into the arena:   {nbytes / (copied - began) / 1e9:.1f} GB/s")
    right = all(weight[-1, -1].item() == number for number, weight in enumerate(weights.values()))
    print(f"right: {right}")


if __name__ == "__main__":
    main()
