"""One GPU and another: copies between them over pages of each size, and the cost of peer access.

Every candidate takes its turn in each round. PyTorch's copies run in two processes, one with its
own allocator and one with arenas in its place.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import gpumem
from bench import markdown
from bench.harness import ratios_within_rounds

MIB, GIB = 1 << 20, 1 << 30
Samples = dict[str, list[float]]


def in_turn(candidates: dict[str, Callable[[], float]], rounds: int) -> Samples:
    """Call each candidate once a round, after a round that does not count; seconds of each."""
    samples: Samples = {name: [] for name in candidates}
    for number in range(-1, rounds):
        for name, candidate in candidates.items():
            seconds = candidate()
            if number >= 0:
                samples[name].append(seconds)
    return samples


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class Driver:
    """cuda-python's driver calls, with the devices' primary contexts."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.names = driver
        self.call("cuInit", 0)
        self.contexts = [
            self.call("cuDevicePrimaryCtxRetain", index)
            for index in range(self.call("cuDeviceGetCount"))
        ]

    def call(self, name: str, *arguments: object) -> Any:
        status, *results = getattr(self.names, name)(*arguments)
        if status != self.names.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name} failed: {status}")
        return results[0] if len(results) == 1 else results

    def use(self, index: int) -> None:
        self.call("cuCtxSetCurrent", self.contexts[index])


# ---- copies --------------------------------------------------------------------------------------


def copies(driver: Driver, rounds: int) -> str:
    """Copy 1 GiB between each ordered pair of GPUs, by the driver and by gpumem."""
    count = len(driver.contexts)
    body = []
    for origin, to in itertools.permutations(range(count), 2):
        samples = in_turn(copies_of_pair(driver, origin, to), rounds)
        ratios = ratios_within_rounds(samples, DRIVER)
        for name, times in samples.items():
            rate = GIB / statistics.median(times) / 1e9
            body.append([f"{origin} to {to}", name, f"{rate:.1f}", f"{1 / ratios[name]:.3f}"])
    return markdown.table(["GPUs", "1 GiB by", "GB/s", "/ driver"], body)


DRIVER = "driver, cudaMalloc's memory"


def copies_of_pair(driver: Driver, origin: int, to: int) -> dict[str, Callable[[], float]]:
    tensors = [
        gpumem.empty(GIB, "uint8", resource=gpumem.Arena(f"cuda:{index}")) for index in (to, origin)
    ]
    stream = gpumem.Stream(f"cuda:{origin}")

    def ours() -> None:
        gpumem.copy(*tensors, stream)
        stream.synchronize()

    return {
        DRIVER: driver_copy(driver, origin, to, stream),
        "gpumem.copy, default pages": lambda: timed(ours),
    }


def driver_copy(driver: Driver, origin: int, to: int, stream: gpumem.Stream) -> Callable[[], float]:
    """Time the driver's peer copy between memory of its own."""
    raw = {}
    for index, other in ((to, origin), (origin, to)):
        driver.use(index)
        driver.names.cuCtxEnablePeerAccess(driver.contexts[other], 0)  # perhaps it is already
        raw[index] = driver.call("cuMemAlloc", GIB)
    ends = (raw[to], driver.contexts[to], raw[origin], driver.contexts[origin])
    return timed_copy(driver, "cuMemcpyPeerAsync", *ends, GIB, stream=stream)


def timed_copy(
    driver: Driver, call: str, *arguments: object, stream: gpumem.Stream
) -> Callable[[], float]:
    def run() -> None:
        driver.use(stream.device.index)
        driver.call(call, *arguments, stream.ptr)
        stream.synchronize()

    return lambda: timed(run)


PAGE_SIZES = [size * MIB for size in (2, 4, 8, 16, 32, 1024)]


def copies_by_page(driver: Driver, rounds: int) -> str:
    """Copy 1 GiB from the first GPU to the second over bare mappings, as a peer copy and as any."""
    stream = gpumem.Stream("cuda:0")
    candidates = {DRIVER: driver_copy(driver, 0, 1, stream)}
    for size in PAGE_SIZES:
        here, there = (mapped(driver, index, (0, 1), size) for index in (0, 1))
        ends = (there, driver.contexts[1], here, driver.contexts[0])
        candidates[f"peer copy, {size}"] = timed_copy(
            driver, "cuMemcpyPeerAsync", *ends, GIB, stream=stream
        )
        candidates[f"copy, {size}"] = timed_copy(
            driver, "cuMemcpyAsync", there, here, GIB, stream=stream
        )
    ratios = ratios_within_rounds(in_turn(candidates, rounds), DRIVER)
    hows = ("peer copy", "copy")
    body = [
        [f"{size // MIB} MiB", *(f"{1 / ratios[f'{how}, {size}']:.3f}" for how in hows)]
        for size in PAGE_SIZES
    ]
    return markdown.table(["1 GiB in pages of", *(f"{how} / driver" for how in hows)], body)


# ---- PyTorch's copies ----------------------------------------------------------------------------


def torch_child(mode: str) -> None:
    """Answer each line with the seconds of one copy_ and one to(), there and back."""
    import torch

    if mode == "gpumem":
        from gpumem.integrations import torch as integration

        integration.enable([gpumem.Arena(f"cuda:{index}") for index in range(2)], mode="full")
    here = torch.full((GIB // 4,), 3.0, device="cuda:0")
    there = torch.empty_like(here, device="cuda:1")

    def done(call: Callable[[], object]) -> float:
        def run() -> None:
            call()
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)

        return timed(run)

    for _ in sys.stdin:
        seconds = {
            "copy_, 0 to 1": done(lambda: there.copy_(here)),
            "to, 0 to 1": done(lambda: here.to("cuda:1")),
            "copy_, 1 to 0": done(lambda: here.copy_(there)),
        }
        assert bool((there == 3).all())
        print(json.dumps(seconds), flush=True)


def torch_copies(rounds: int) -> str:
    children = {
        mode: subprocess.Popen(
            [sys.executable, "-m", "bench.peers", "--child", mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for mode in ("native", "gpumem")
    }

    def ask(mode: str) -> dict[str, float]:
        child = children[mode]
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write("\n")
        child.stdin.flush()
        answer: dict[str, float] = json.loads(child.stdout.readline())
        return answer

    rows = [{mode: ask(mode) for mode in children} for _ in range(rounds + 1)][1:]
    for child in children.values():
        child.communicate()
    body = []
    for operation in rows[0]["native"]:
        samples = {mode: [row[mode][operation] for row in rows] for mode in children}
        ratio = ratios_within_rounds(samples, "native")["gpumem"]
        rates = [f"{GIB / statistics.median(samples[mode]) / 1e9:.1f}" for mode in children]
        body.append([operation, *rates, f"{1 / ratio:.3f}"])
    return markdown.table(["PyTorch, 1 GiB", "native, GB/s", "gpumem, GB/s", "/ native"], body)


# ---- pages ---------------------------------------------------------------------------------------


def pages(driver: Driver, rounds: int) -> str:
    """Make 256 MiB in pages of 2 MiB, bare and by an arena, with peers and without."""
    count = len(driver.contexts)
    sizes = {"no peer": (), "each other GPU": tuple(range(1, count))}
    candidates: dict[str, Callable[[], float]] = {}
    for name, peers in sizes.items():
        candidates[f"bare calls, {name}"] = bare_pages(driver, peers)
        candidates[f"arena, {name}"] = arena_pages(peers)
    samples = in_turn(candidates, rounds)
    body = []
    for name in sizes:
        ratio = ratios_within_rounds(samples, f"bare calls, {name}")[f"arena, {name}"]
        for who in ("bare calls", "arena"):
            each = 1e6 * statistics.median(samples[f"{who}, {name}"]) / PAGES
            body.append([name, who, f"{each:.1f}", f"{ratio:.3f}" if who == "arena" else ""])
    return markdown.table(["access", "by", "us a page", "/ bare"], body)


PAGE = 2 * MIB
PAGES = 128


def bare_pages(driver: Driver, peers: tuple[int, ...]) -> Callable[[], float]:
    made, access = properties(driver, 0), access_list(driver, (0, *peers))
    base = int(driver.call("cuMemAddressReserve", PAGES * PAGE, 0, 0, 0))

    def run() -> float:
        driver.use(0)
        handles = []
        begin = time.perf_counter()
        for page in range(PAGES):
            handles.append(driver.call("cuMemCreate", PAGE, made, 0))
            driver.call("cuMemMap", base + page * PAGE, PAGE, 0, handles[-1], 0)
            driver.call("cuMemSetAccess", base + page * PAGE, PAGE, access, len(access))
        seconds = time.perf_counter() - begin
        for page, handle in enumerate(handles):
            driver.call("cuMemUnmap", base + page * PAGE, PAGE)
            driver.call("cuMemRelease", handle)
        return seconds

    return run


def properties(driver: Driver, index: int) -> Any:
    """Return the properties of a page of a device."""
    names = driver.names
    made = names.CUmemAllocationProp()
    made.type = names.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = index
    return made


def access_list(driver: Driver, indices: tuple[int, ...]) -> list[Any]:
    names = driver.names
    entries = []
    for index in indices:
        entry = names.CUmemAccessDesc()
        entry.location.type = names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        entry.location.id = index
        entry.flags = names.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        entries.append(entry)
    return entries


def mapped(driver: Driver, index: int, users: tuple[int, ...], size: int) -> int:
    """Map 1 GiB of a device in pages of `size` bytes, for the devices that use it; its address."""
    driver.use(index)
    made, access = properties(driver, index), access_list(driver, users)
    base = int(driver.call("cuMemAddressReserve", GIB, 0, 0, 0))
    for address in range(base, base + GIB, size):
        driver.call("cuMemMap", address, size, 0, driver.call("cuMemCreate", size, made, 0), 0)
    driver.call("cuMemSetAccess", base, GIB, access, len(access))
    return base


def arena_pages(peers: tuple[int, ...]) -> Callable[[], float]:
    arena = gpumem.Arena("cuda:0", {"peers": [f"cuda:{index}" for index in peers] or "none"})

    def run() -> float:
        begin = time.perf_counter()
        blocks = [arena.allocate(PAGE) for _ in range(PAGES)]
        seconds = time.perf_counter() - begin
        del blocks
        arena.shrink()
        return seconds

    return run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--child", choices=["native", "gpumem"], help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        torch_child(chosen.child)
        return 0
    driver = Driver()
    if len(driver.contexts) < 2:
        print(f"needs two CUDA devices: {len(driver.contexts)} found", file=sys.stderr)
        return 1
    tables = [copies, copies_by_page, pages]
    print(*(table(driver, chosen.rounds) for table in tables), sep="\n\n")
    print("\n" + torch_copies(chosen.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
