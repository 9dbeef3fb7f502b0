"""How fast an arena sleeps and wakes, beside the bare driver calls and torch_memory_saver.

    python -m bench.sleep [--device cuda:0] [--gib 32] [--dead 0.3] [--repeats 5] [--json]

Sizes are of live blocks; `--dead` of them as much again is freed and cached. "first" makes pinned
memory, "again" copies into what was kept, "drop" copies nothing. torch_memory_saver is measured on
a GPU, where it is installed, in a process of its own, since both replace PyTorch's allocator. The
machine's memory is touched beforehand. Figures are medians, of "first" those of new arenas.

Two tenants whose peaks are out of phase share a limit of `--gib`: each has its blocks awake in
turn. The last line tells the largest peaks that fit, and those of two arenas with half of it each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import gpumem
from bench import markdown

GIB = 1 << 30
BLOCKS = 64  # live blocks
PATIENCE = 120  # seconds, for torch_memory_saver's process
TENANT = 8  # blocks of a tenant
STEP = TENANT << 21  # bytes, to which the largest peak is searched for
PEER = """
import json, sys, time, torch
from torch_memory_saver import torch_memory_saver as saver
saver.hook_mode = "torch"
nbytes, blocks, repeats = map(int, sys.argv[1:])
with saver.region(tag="bench", enable_cpu_backup=True):
    held = [torch.ones(nbytes // blocks, dtype=torch.uint8, device="cuda") for _ in range(blocks)]
def timed(call):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call("bench")
    torch.cuda.synchronize()
    return time.perf_counter() - begin
print(json.dumps([(timed(saver.pause), timed(saver.resume)) for _ in range(repeats)]))
"""


def seconds(call: Callable[..., object], *arguments: Any) -> float:
    begin = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begin


def touch(nbytes: int) -> None:
    """Let the machine have so much memory: what it never had costs its host too."""
    with mmap.mmap(-1, nbytes) as pages:
        bytes_of_pages = np.frombuffer(pages, np.uint8)
        bytes_of_pages[:: mmap.PAGESIZE] = 1
        del bytes_of_pages  # it holds the mapping


def cycles(device: str, nbytes: int, dead: float, repeats: int, mode: str) -> dict[str, float]:
    """Return the seconds of the first sleep, of later ones and of waking."""
    print(f"measuring {mode}, {dead:.0%} dead", file=sys.stderr)
    arena = gpumem.Arena(device, {"sleep_keep_bytes": 2 * nbytes})
    with arena.tag("bench", asleep=mode):
        live = [arena.allocate(nbytes // BLOCKS) for _ in range(BLOCKS)]
        cached = [arena.allocate(int(nbytes * dead) // BLOCKS) for _ in range(BLOCKS) if dead]
    del cached
    gpumem.Device(device).synchronize()
    slept, woke = [], []
    for _ in range(repeats + 1):
        slept.append(seconds(arena.sleep))
        woke.append(seconds(arena.wake))
    del live
    arena.close()
    return {
        "first": slept[0],
        "again": statistics.median(slept[1:]),
        "wake": statistics.median(woke[1:]),
    }


def peer(nbytes: int, repeats: int) -> dict[str, float] | None:
    """Return the same of torch_memory_saver; None: it is not installed, or does not work here."""
    if importlib.util.find_spec("torch_memory_saver") is None:
        return None
    command = [sys.executable, "-c", PEER, str(nbytes), str(BLOCKS), str(repeats + 1)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"torch_memory_saver is left out: {error}", file=sys.stderr)
        return None
    slept, woke = zip(*json.loads(done.stdout.splitlines()[-1]), strict=True)
    return {
        "first": slept[0],
        "again": statistics.median(slept[1:]),
        "wake": statistics.median(woke[1:]),
    }


def measure(device: str, nbytes: int, dead: float, repeats: int) -> dict[str, Any]:
    """Return GB/s of live bytes for each sort of sleep."""
    touch(2 * nbytes)
    found = {
        "keep": cycles(device, nbytes, 0, repeats, "keep"),
        f"keep, {dead:.0%} dead": cycles(device, nbytes, dead, repeats, "keep"),
        "drop": cycles(device, nbytes, 0, repeats, "drop"),
    }
    if device.startswith("cuda") and (other := peer(nbytes, repeats)):
        found["torch_memory_saver"] = other
    return {
        name: {step: nbytes / spent / 1e9 for step, spent in steps.items()}
        for name, steps in found.items()
    }


def shared_fits(device: str, limit: int, peak: int) -> bool:
    """Whether two tenants with such peaks fit under one limit, one of them awake at a time."""
    held: dict[str, list[gpumem.Buffer]] = {}
    with gpumem.Arena(device, max_mem=limit) as arena:
        try:
            for name in ("one", "other") * 2:
                if name in held:
                    arena.wake(name)
                else:
                    with arena.tag(name):
                        held[name] = [arena.allocate(peak // TENANT) for _ in range(TENANT)]
                arena.sleep(name)
        except gpumem.OutOfMemoryError:
            return False
        finally:
            held.clear()
    return True


def halves_fit(device: str, limit: int, peak: int) -> bool:
    """Whether each fits in an arena with half of the limit."""
    with gpumem.Arena(device, max_mem=limit // 2) as arena:
        try:
            held = [arena.allocate(peak // TENANT) for _ in range(TENANT)]
        except gpumem.OutOfMemoryError:
            return False
        del held
    return True


def tenants(device: str, limit: int) -> dict[str, int]:
    """Return the largest sum of two tenants' peaks that fits, under each regime."""

    def largest(fits: Callable[[str, int, int], bool]) -> int:
        low, high, step = 0, limit + STEP, STEP  # `low` fits, `high` does not
        while high - low > step:
            middle = (low + high) // 2 // step * step
            low, high = (middle, high) if fits(device, limit, middle) else (low, middle)
        return 2 * low

    return {"one limit": largest(shared_fits), "two halves": largest(halves_fit)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sleep", description=__doc__)
    parser.add_argument("--device", default=None, help="cuda:0 if there is one, else host")
    parser.add_argument("--gib", type=float, default=None, help="32, on the host 0.5")
    parser.add_argument("--dead", type=float, default=0.3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    device = given.device or ("cuda:0" if gpumem.driver_status().available else "host")
    gib = given.gib or (32 if device.startswith("cuda") else 0.5)
    found = measure(device, int(gib * GIB), given.dead, given.repeats)
    sums = tenants(device, int(gib * GIB))
    rows = [[name, *(f"{rate:.1f}" for rate in steps.values())] for name, steps in found.items()]
    heads = ("GB/s", "first sleep", "sleep again", "wake")
    if given.json:
        print(json.dumps({"rates": found, "tenants": sums}))
        return
    print(markdown.table(heads, rows))
    ratio = sums["one limit"] / sums["two halves"]
    print(
        f"\nTwo tenants out of phase under {gib:g} GiB: {sums['one limit'] / GIB:.3f} GiB in all, "
        f"in two halves {sums['two halves'] / GIB:.3f}; {ratio:.2f} times as much"
    )


if __name__ == "__main__":
    main()
