"""Tensors that grow and shrink: commits compared with bare driver calls, and attention over them.

    python -m bench.virtual [--device cuda:0] [--gib 1] [--rounds 9] [--json]

Commits and the bare calls (create, map, set access; unmap, release) have the same number of handles
of the same size, alternate, and begin with the same state. The bare calls go through ctypes, which
adds some tenths of a microsecond to each. The rate is that of handles of 32 MiB over 2 MiB.
Attention needs a GPU and PyTorch: its SDPA, and flex attention, which it compiles with Triton.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import gpumem
from gpumem._testing.driver import driver_entry_names, table_and_context_of

MIB, GIB = 1 << 20, 1 << 30
ALLOCATION = ctypes.c_int * 8  # CUmemAllocationProp: pinned, no handle type, on the device
ACCESS = ctypes.c_int * 3  # CUmemAccessDesc: the device, its number, reading and writing
STEPS = 1000


class Bare:
    """The driver's own calls for one range of addresses, called as from C."""

    def __init__(self, device: str, nbytes: int) -> None:
        self.place = gpumem.Device(device)._open()
        word = ctypes.sizeof(ctypes.c_void_p)
        table, context = table_and_context_of(self.place)
        names = [name for name, _ in driver_entry_names()]

        def entry(name: str, *types: Any) -> Any:
            address = ctypes.c_void_p.from_address(table + names.index(name) * word).value
            return ctypes.CFUNCTYPE(ctypes.c_int, *types)(address or 0)

        number, pointer, size = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t
        assert entry("cuCtxPushCurrent", number)(context) == 0
        self.create = entry("cuMemCreate", pointer, size, pointer, number)
        self.map = entry("cuMemMap", number, size, size, number, number)
        self.set_access = entry("cuMemSetAccess", number, size, pointer, size)
        self.unmap = entry("cuMemUnmap", number, size)
        self.release = entry("cuMemRelease", number)
        index = gpumem.Device(device).index
        self.allocation, self.access = ALLOCATION(1, 0, 1, index), ACCESS(1, index, 3)
        base = number()
        reserve = entry("cuMemAddressReserve", pointer, size, size, number, number)
        assert reserve(ctypes.byref(base), nbytes, 32 * MIB, 0, 0) == 0
        self.base = base.value

    def seconds(self, pages: Sequence[int]) -> tuple[float, float]:
        """Return the time to map handles of these sizes side by side, and to take them away."""
        handles = [ctypes.c_uint64() for _ in pages]
        offsets = list(itertools.accumulate(pages, initial=self.base))
        nbytes = offsets.pop() - self.base
        begin = time.perf_counter()
        for handle, page in zip(handles, pages, strict=True):
            assert self.create(ctypes.byref(handle), page, self.allocation, 0) == 0
        for handle, page, offset in zip(handles, pages, offsets, strict=True):
            assert self.map(offset, page, 0, handle.value, 0) == 0
        assert self.set_access(self.base, nbytes, self.access, 1) == 0
        there = time.perf_counter()
        assert self.unmap(self.base, nbytes) == 0
        for handle in handles:
            assert self.release(handle.value) == 0
        return there - begin, time.perf_counter() - there


def ours(arena: gpumem.Arena, rows: gpumem.VirtualTensor) -> tuple[float, float]:
    """Return the same of a commit, and of a release with the shrink that finds its work done."""
    begin = time.perf_counter()
    rows.commit(len(rows))
    there = time.perf_counter()
    rows.release(0, len(rows))
    while rows.held_nbytes:
        arena.shrink()
    return there - begin, time.perf_counter() - there


def commits(device: str, nbytes: int, rounds: int) -> dict[str, Any]:
    """Measure commits of handles of 2 and of 32 MiB, and the bare calls."""
    arena, bare = gpumem.Arena(device), Bare(device, nbytes)
    found: dict[str, Any] = {}
    for page in (2 * MIB, 32 * MIB):
        rows = arena.virtual((nbytes // page, page), "uint8", step=1)
        pages = [page] * (nbytes // page)
        runs = [(ours(arena, rows), bare.seconds(pages)) for _ in range(rounds + 1)][1:]
        rows.close()
        found[f"{page // MIB} MiB"] = {
            "commit_ms": 1e3 * statistics.median(own[0] for own, _ in runs),
            "bare_ms": 1e3 * statistics.median(other[0] for _, other in runs),
            "commit / bare": statistics.median(own[0] / other[0] for own, other in runs),
            "release / bare": statistics.median(own[1] / other[1] for own, other in runs),
        }
    found["rate over 2 MiB handles"] = found["2 MiB"]["commit_ms"] / found["32 MiB"]["commit_ms"]
    arena.shrink()
    return found


def steps(device: str) -> dict[str, Any]:
    """Grow and shrink many times; every step writes and reads rows."""
    arena = gpumem.Arena(device)
    rows = arena.virtual((256, MIB), "uint8", step=4, committed=4)
    rng = np.random.default_rng(5)
    wrong, address, begin = 0, rows.ptr, time.perf_counter()
    mark = gpumem.full(1, 0, "uint8", memory=device)
    for step in range(STEPS):
        rows.resize(4 + int(rng.integers(0, 252)))
        gpumem.copy(rows.tensor(3, 4)[0, :1], np.full(1, step % 251, np.uint8))
        gpumem.copy(mark, rows.tensor(3, 4)[0, :1])
        wrong += mark.item() != step % 251
    took = time.perf_counter() - begin
    return {
        "steps": STEPS,
        "us a step": 1e6 * took / STEPS,
        "wrong": int(wrong),
        "address changed": rows.ptr != address,
    }


def attention(device: str, rounds: int) -> dict[str, float] | None:
    """Time attention over a virtual tensor and over torch.empty, in turn: SDPA and in Triton."""
    try:
        import torch
        from torch.nn.attention.flex_attention import flex_attention
    except ImportError:
        return None
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return None
    shape = (16, 8, 8192, 128)
    arena = gpumem.Arena(device)
    virtual = [arena.virtual(shape, "float16", committed=shape[0]) for _ in range(2)]
    kinds = {
        "virtual": [torch.from_dlpack(each.full).normal_() for each in virtual],
        "torch": [torch.empty(shape, device=device, dtype=torch.float16) for _ in range(2)],
    }
    for own, other in zip(*kinds.values(), strict=True):
        other.copy_(own)
    query = torch.randn(16, 8, 128, 128, device=device, dtype=torch.float16)
    kernels = {
        "SDPA": torch.nn.functional.scaled_dot_product_attention,
        "Triton": torch.compile(flex_attention, dynamic=False),  # compiled to a kernel of its own
    }

    def seconds(kernel: Callable[..., Any], tensors: list[Any]) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(20):
            kernel(query, *tensors)
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last))

    found = {}
    for name, kernel in kernels.items():
        runs = [
            {kind: seconds(kernel, each) for kind, each in kinds.items()} for _ in range(rounds + 1)
        ][1:]
        found[f"{name}, virtual / torch.empty"] = statistics.median(
            run["virtual"] / run["torch"] for run in runs
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", default="cuda:0" if gpumem.driver_status().available else "host"
    )
    parser.add_argument("--gib", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    nbytes = max(round(chosen.gib * GIB / (32 * MIB)), 1) * 32 * MIB  # whole handles
    parts: dict[str, Callable[[], Any]] = {
        "commit": lambda: commits(chosen.device, nbytes, chosen.rounds),
        "growing and shrinking": lambda: steps(chosen.device),
        "attention": lambda: attention(chosen.device, chosen.rounds),
    }
    found = {name: part() for name, part in parts.items()}
    if chosen.json:
        print(json.dumps({"device": chosen.device, "gib": chosen.gib, **found}, indent=2))
        return
    print(f"{chosen.device}, {chosen.gib} GiB\n")
    for name, figures in found.items():
        print(f"{name}: {'not here' if figures is None else ''}")
        for key, value in (figures or {}).items():
            inner = value.items() if isinstance(value, dict) else [("", value)]
            text = ", ".join(
                f"{k} {v:.3f}".strip() if isinstance(v, float) else f"{k} {v}".strip()
                for k, v in inner
            )
            print(f"  {key}: {text}")


if __name__ == "__main__":
    main()
