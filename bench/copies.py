"""Copies of host memory to and from a GPU, compared with PyTorch's and the driver's own."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

import gpumem
from bench.harness import Candidate, Timing, interleave
from gpumem._testing.copies import (
    SLOT_BYTES,
    SLOTS_IN_FLIGHT,
    set_pipeline,
    set_staged_from,
    set_threads,
)

MIB = 1 << 20
SIZES = (64 * MIB, 1024 * MIB)
ROUNDS = 7


def copies() -> dict[str, Timing]:
    """Copy 64 MiB and 1 GiB each way, pinned and pageable; nothing without a GPU."""
    if not gpumem.driver_status().available:
        return {}
    return {
        f"copy_{memory}_{way}_{nbytes // MIB}MiB": timed(memory, way, nbytes)
        for memory, way, nbytes in itertools.product(("pinned", "pageable"), ("up", "down"), SIZES)
    }


def timed(memory: str, way: str, nbytes: int) -> Timing:
    """Time one copy from its call to its end."""
    host = host_array(memory, nbytes)
    candidates = {"gpumem.copy": ours(host, way, nbytes)}
    candidates |= driver(host, way, nbytes) | torch(memory, way, nbytes)
    return interleave(candidates, "gpumem.copy", rounds=ROUNDS, batch_seconds=0.05)


def host_array(memory: str, nbytes: int) -> Any:
    if memory == "pinned":
        tensor = gpumem.empty(nbytes, "uint8", memory="cuda:0/host_accessible")
        tensor.numpy()[:] = 1
        return tensor
    return np.ones(nbytes, np.uint8)


def ours(host: Any, way: str, nbytes: int) -> Candidate:
    device = gpumem.empty(nbytes, "uint8", memory="cuda:0")
    stream = gpumem.Stream("cuda:0")
    ends = (device, host) if way == "up" else (host, device)

    def run() -> None:
        gpumem.copy(*ends, stream)
        stream.synchronize()

    return run


def driver(host: Any, way: str, nbytes: int) -> dict[str, Candidate]:
    from cuda.bindings import driver as cu

    device = gpumem.empty(nbytes, "uint8", memory="cuda:0")
    stream = gpumem.Stream("cuda:0")
    address = host.ptr if isinstance(host, gpumem.Tensor) else host.ctypes.data
    cu.cuInit(0)
    cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])

    def up() -> object:
        cu.cuMemcpyHtoDAsync(device.ptr, address, nbytes, stream.ptr)
        return cu.cuStreamSynchronize(stream.ptr), host

    def down() -> object:
        cu.cuMemcpyDtoHAsync(address, device.ptr, nbytes, stream.ptr)
        return cu.cuStreamSynchronize(stream.ptr), host

    return {"driver": up if way == "up" else down}


def torch(memory: str, way: str, nbytes: int) -> dict[str, Candidate]:
    try:
        import torch as library
    except ImportError:
        return {}
    host = library.ones(nbytes, dtype=library.uint8, pin_memory=memory == "pinned")
    device = library.ones(nbytes, dtype=library.uint8, device="cuda")
    dst, src = (device, host) if way == "up" else (host, device)

    def run() -> None:
        dst.copy_(src, non_blocking=memory == "pinned")
        library.cuda.synchronize()

    return {"torch": run}


# ---- between two GPUs ----------------------------------------------------------------------------


def between_gpus() -> dict[str, Timing]:
    """Copy from one GPU to another, from pages and from regions; nothing with fewer than two."""
    if sum(device.type == "cuda" for device in gpumem.devices()) < 2:
        return {}
    return {
        f"copy_between_{nbytes // MIB}MiB": interleave(
            {
                "pages": from_gpu_to_gpu("virtual", nbytes),
                "regions": from_gpu_to_gpu("regions", nbytes),
            }
            | torch_between(nbytes),
            "pages",
            rounds=ROUNDS,
            batch_seconds=0.05,
        )
        for nbytes in (MIB, *SIZES)
    }


def from_gpu_to_gpu(backing: str, nbytes: int) -> Candidate:
    arenas = [gpumem.Arena(f"cuda:{i}", {"backing": backing}) for i in range(2)]
    src, dst = (gpumem.full(nbytes, 1, "uint8", resource=arena) for arena in arenas)
    stream = gpumem.Stream("cuda:0")

    def run() -> None:
        gpumem.copy(dst, src, stream)
        stream.synchronize()

    return run


def torch_between(nbytes: int) -> dict[str, Candidate]:
    try:
        import torch as library
    except ImportError:
        return {}
    src, dst = (library.ones(nbytes, dtype=library.uint8, device=f"cuda:{i}") for i in range(2))

    def run() -> None:
        dst.copy_(src, non_blocking=True)
        library.cuda.synchronize(0)
        library.cuda.synchronize(1)

    return {"torch": run}


# ---- the constants of staging --------------------------------------------------------------------


def sweep(threads: int) -> None:
    """Print gigabytes a second by slot and slots on the bus; then where staging begins to pay.

    A process for each number of threads: those that were started stay.
    """
    set_threads(threads)
    for nbytes, slot, flight in itertools.product((64 * MIB, 512 * MIB), (1, 2, 4), (2, 4)):
        set_pipeline(slot * MIB, flight)
        show(f"{nbytes // MIB:5d} MiB threads={threads} slot={slot} in_flight={flight}", nbytes)
    set_pipeline(SLOT_BYTES, SLOTS_IN_FLIGHT)
    for shift in range(18, 26):
        for staged in (0, 1 << 60):
            set_staged_from(staged)
            way = "driver" if staged else "staged"
            show(f"{1 << shift:9d} bytes threads={threads} {way}", 1 << shift)
    set_staged_from(-1)


def show(label: str, nbytes: int) -> None:
    rates = []
    for way in ("up", "down"):
        run: Callable[[], Any] = ours(np.ones(nbytes, np.uint8), way, nbytes)
        run()
        timing = interleave({"copy": run}, "copy", rounds=5, batch_seconds=0.01)
        rates.append(f"{way} {nbytes / timing.nanoseconds['copy']:6.2f} GB/s")
    print(label, *rates, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.copies", description=__doc__)
    parser.add_argument("--sweep", type=int, metavar="THREADS", help="measure staging")
    threads = parser.parse_args().sweep
    if threads is not None:
        sweep(threads)
    else:
        for name, timing in (copies() | between_gpus()).items():
            print(name)
            for call, nanoseconds in timing.nanoseconds.items():
                print(f"  {call:12} {nanoseconds / 1e3:10.1f} us {timing.ratios[call]:.3f}")
