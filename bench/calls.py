"""One allocation from Python, compared with NumPy and the installed GPU libraries."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import gpumem
from bench.harness import Candidate, Timing, interleave

NBYTES = 4096
GPU_NBYTES = 1 << 20


def host_calls() -> Timing:
    """Allocate 4096 and drop on the host, against ``numpy.empty(4096)`` and drop."""
    arena = gpumem.Arena("host")
    keep = arena.allocate(1 << 20)
    timing = interleave(
        {
            "numpy.empty(4096)": partial(np.empty, NBYTES),
            "arena.allocate(4096)": partial(arena.allocate, NBYTES),
            "arena.allocate(4096, stream)": partial(arena.allocate, NBYTES, gpumem.Stream("host")),
            "bytearray(4096)": partial(bytearray, NBYTES),
        },
        "numpy.empty(4096)",
    )
    keep.close()
    return timing


def gpu_calls() -> Timing | None:
    """Allocate 1 MiB and drop on the GPU, against the installed libraries; None without one."""
    if not gpumem.driver_status().available:
        return None
    arena = gpumem.Arena("cuda:0")
    arena.allocate(1 << 30).close()
    candidates: dict[str, Candidate] = {"arena.allocate": partial(arena.allocate, GPU_NBYTES)}
    candidates |= _torch() | _cupy() | _rmm() | _cuda_core() | _driver_pool()
    return interleave(candidates, "arena.allocate")


def _torch() -> dict[str, Candidate]:
    try:
        import torch
    except ImportError:
        return {}
    torch.cuda.init()
    allocate: Any = torch._C._cuda_cudaCachingAllocator_raw_alloc
    delete: Any = torch._C._cuda_cudaCachingAllocator_raw_delete
    return {
        "torch raw_alloc/raw_delete": lambda: delete(allocate(GPU_NBYTES, 0)),
        "torch.empty": partial(torch.empty, GPU_NBYTES, dtype=torch.uint8, device="cuda"),
    }


def _cupy() -> dict[str, Candidate]:
    try:
        import cupy
    except ImportError:
        return {}
    return {
        "cupy.cuda.alloc": partial(cupy.cuda.alloc, GPU_NBYTES),
        "cupy.empty": partial(cupy.empty, GPU_NBYTES, cupy.uint8),
    }


def _rmm() -> dict[str, Candidate]:
    try:
        from rmm import mr
    except (ImportError, OSError):  # OSError: one of its libraries is missing
        return {}
    device = mr.CudaMemoryResource()
    resources = {
        "arena": mr.ArenaMemoryResource(device, 1 << 30),
        "pool": mr.PoolMemoryResource(device, 1 << 30),
        "async": mr.CudaAsyncMemoryResource(1 << 30),
    }
    return {f"rmm {name} allocate/deallocate": _pair(made) for name, made in resources.items()}


def _pair(resource: Any) -> Candidate:
    return lambda: resource.deallocate(resource.allocate(GPU_NBYTES), GPU_NBYTES)


def _cuda_core() -> dict[str, Candidate]:
    try:
        from cuda.core import Device, DeviceMemoryResource
    except ImportError:  # an older cuda-core, where it is experimental
        return {}
    device = Device(0)
    device.set_current()
    stream = device.default_stream
    resource = DeviceMemoryResource(device)
    return {
        "cuda.core allocate/close": lambda: resource.allocate(GPU_NBYTES, stream=stream).close()
    }


def _driver_pool() -> dict[str, Candidate]:
    from cuda.bindings import driver

    def pair() -> None:
        _, pointer = driver.cuMemAllocAsync(GPU_NBYTES, 0)
        driver.cuMemFreeAsync(pointer, 0)

    driver.cuInit(0)
    _, context = driver.cuDevicePrimaryCtxRetain(0)
    driver.cuCtxSetCurrent(context)
    pair()
    return {"cuMemAllocAsync/cuMemFreeAsync": pair}
