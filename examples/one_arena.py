"""PyTorch, CuPy and Numba in one process, one arena and one limit beneath all three.

    python examples/one_arena.py [--max-mem 4GiB]

A CuPy array, a Numba kernel and a PyTorch tensor take turns; what one of them frees the next one
gets, so the process holds what the largest step needs and not the sum of three pools. Needs a GPU;
what is not installed is left out, and said so.
"""

from __future__ import annotations

import argparse
import gc
import warnings

import gpumem
import gpumem.integrations.cupy
import gpumem.integrations.numba
import gpumem.integrations.torch

MIB = 1 << 20
STEP = 256 * MIB


def with_torch() -> float:
    """Return what PyTorch computes in its turn."""
    import torch

    values = torch.ones(STEP // 4, dtype=torch.float32, device="cuda")
    return float((values[: STEP // 8] * 2).sum())


def with_cupy() -> float:
    """Return what CuPy computes in its turn."""
    import cupy

    values = cupy.ones(STEP // 4, cupy.float32)
    return float((values[: STEP // 8] * 2).sum())


def with_numba() -> float:
    """Return what Numba computes in its turn."""
    from numba import cuda

    @cuda.jit
    def double(values):
        i = cuda.grid(1)
        if i < values.size:
            values[i] *= 2

    values = cuda.device_array(STEP // 4, "float32")
    values[:] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Numba's advice on how many blocks to launch
        double[1024, 256](values)
    return float(values[: STEP // 8].copy_to_host().sum())


LIBRARIES = {
    "torch": (gpumem.integrations.torch, with_torch),
    "cupy": (gpumem.integrations.cupy, with_cupy),
    "numba": (gpumem.integrations.numba, with_numba),
}


def enable(arena: gpumem.Arena) -> list[str]:
    """Put the arena beneath every library that is installed; return their names."""
    enabled = []
    for name, (integration, _) in LIBRARIES.items():
        try:
            integration.enable(arena)
            enabled.append(name)
        except gpumem.errors.MissingFrameworkError as error:
            print(f"{name}: left out ({error})")
    return enabled


def main() -> None:
    """Take turns, and print what the arena holds after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-mem", default=str(1 << 30), help="bytes, for all together")
    chosen = parser.parse_args()
    if not (driver := gpumem.driver_status()).available:
        raise SystemExit(f"this example needs a GPU: {driver.reason}")
    arena = gpumem.Arena("cuda:0", {"max_mem": chosen.max_mem})
    for name in enable(arena):
        LIBRARIES[name][1]()
        gc.collect()
        stats = arena.stats()
        held = (stats.in_use, stats.reserved, stats.max_in_use)
        print(
            "{:<6} in use {:>5}, reserved {:>5}, most in use {:>5} MiB".format(
                name, *(nbytes // MIB for nbytes in held)
            )
        )


if __name__ == "__main__":
    main()
