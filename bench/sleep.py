"""The speed of sleep and wake, compared with bare driver calls and torch_memory_saver.

    python -m bench.sleep [--device cuda:0] [--gib 32] [--dead 0.3] [--repeats 5] [--limit 60]
                          [--only STEP ...] [--json]

Each step is a process of its own that may take `--limit` seconds, starting it included. A line is
printed when a step ends; of a step that the limit ended it has the figures until then.

Sizes are of live blocks; `--dead` of them as much again is freed and cached. "first" makes pinned
memory, "again" copies into kept memory, "drop" copies nothing. "bare" are the driver's own calls
for handles of the sizes that the arena has: unmap and release, then create, map and set access.
"peer" sleeps on the next GPU. torch_memory_saver is measured on a GPU, where it is installed.
"model" are PyTorch's tensors of a Llama of 8 billion bf16 parameters, made one after another,
"adamw" the same with two states for each, whatever `--gib` is, and "model-peer" those of "model"
that sleep on the next GPU; "plain" of each is a copy of as many bytes between one GiB of the GPU
and one of pinned memory or the next GPU, in the same process.
Before a first copy to the host its process touches as much memory and frees it, because a virtual
machine may have to get that memory from its host. Figures are medians, of "first" the only one.

Two tenants with peaks out of phase share a limit of `--gib`: each has its blocks awake in
turn, and drops its bytes, since only addresses count. The last line has the largest peaks that
fit, and those of two arenas with half of it each.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import json
import mmap
import os
import selectors
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gpumem
from bench import markdown, peers
from bench.virtual import Bare

MIB, GIB = 1 << 20, 1 << 30
BLOCKS = 64  # live blocks
TENANT = 8  # blocks of a tenant
STEP = TENANT << 21  # bytes, to which the largest peak is searched for
PART = 256 * MIB  # touched by a thread at a time
TOUCHED = 1.25  # of the live bytes, so that other memory of the machine is there too
STEPS = ("keep", "saver", "keep-dead", "saver-dead", "model", "adamw", "drop", "bare", "peer")
STEPS += ("model-peer", "tenants")
MODELS = ("model", "adamw", "model-peer")
SORTS = ("first", "again", "wake", "plain down", "plain up")
WIDTH, MLP, LAYERS, WORDS, HEADS = 4096, 14336, 32, 128256, 1024  # of the model; of keys, values
Figures = Iterator[tuple[str, float]]  # the sort of a figure, and its seconds
SAVER = """
import json, sys, time, torch
from torch_memory_saver import torch_memory_saver as saver
from bench.sleep import touch
saver.hook_mode = "torch"
nbytes, dead, blocks, repeats = map(int, sys.argv[1:])
def made(nbytes):
    return [torch.ones(nbytes // blocks, dtype=torch.uint8, device="cuda") for _ in range(blocks)]
with saver.region(tag="bench", enable_cpu_backup=True):
    held = made(nbytes)
    cached = made(dead)
del cached
touch(nbytes)
def timed(name, call):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call("bench")
    torch.cuda.synchronize()
    print(json.dumps((name, time.perf_counter() - begin)), flush=True)
for turn in range(repeats + 1):
    timed("again" if turn else "first", saver.pause)
    timed("wake", saver.resume)
"""


# ---- what is measured ----------------------------------------------------------------------------


def touch(copied: int) -> None:
    """Let the machine have memory for a copy, in huge pages and by several threads."""
    nbytes = int(TOUCHED * copied)
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages.madvise(mmap.MADV_HUGEPAGE)
        word = ctypes.c_char.from_buffer(pages)
        address = ctypes.addressof(word)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            for offset in range(0, nbytes, PART):
                threads.submit(ctypes.memset, address + offset, 1, min(PART, nbytes - offset))
        del word  # it holds the mapping


def seconds(call: Callable[..., object], *arguments: Any) -> float:
    begin = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begin


def cycles(
    device: str, nbytes: int, dead: float, repeats: int, mode: str, to: str = "host"
) -> Figures:
    """Sleep and wake: a new arena for the first time, then again and again."""
    arena = gpumem.Arena(device)
    with arena.tag("bench", asleep=mode):
        live = [arena.allocate(nbytes // BLOCKS) for _ in range(BLOCKS)]
        cached = [arena.allocate(int(nbytes * dead) // BLOCKS) for _ in range(BLOCKS) if dead]
    del cached
    gpumem.Device(device).synchronize()
    if mode == "keep" and to == "host":
        touch(nbytes)
    for turn in range(repeats + 1):
        yield ("again" if turn else "first"), seconds(lambda: arena.sleep(to=to))
        yield "wake", seconds(arena.wake)
    del live
    arena.close()


def model_shapes() -> list[tuple[int, ...]]:
    attention = [(WIDTH, WIDTH), (HEADS, WIDTH), (HEADS, WIDTH), (WIDTH, WIDTH)]
    layer = [*attention, (MLP, WIDTH), (MLP, WIDTH), (WIDTH, MLP), (WIDTH,), (WIDTH,)]
    return [(WORDS, WIDTH), *layer * LAYERS, (WIDTH,), (WORDS, WIDTH)]


def plain_copies(
    device: str, nbytes: int, to: str = "host"
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return calls that copy as many bytes from a GPU, and to it, through one GiB beside.

    Between GPUs it is the driver's memory: a copy between tensors would give the other GPU access
    to the arena's pages, which each sleep then pays for.
    """
    if to != "host":
        driver, stream = peers.Driver(), gpumem.Stream(device)
        here, there = gpumem.Device(device).index, gpumem.Device(to).index
        down = peers.driver_copy(driver, here, there, stream)
        up = peers.driver_copy(driver, there, here, stream)
        count = -(-nbytes // GIB)
        return (lambda: [down() for _ in range(count)], lambda: [up() for _ in range(count)])

    import torch

    beside = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(GIB, dtype=torch.uint8, device=device)

    def copy(to: Any, source: Any) -> None:
        for begin in range(0, nbytes, GIB):
            part = min(GIB, nbytes - begin)
            to[:part].copy_(source[:part], non_blocking=True)
        torch.cuda.synchronize()

    return functools.partial(copy, beside, on_device), functools.partial(copy, on_device, beside)


def model(device: str, repeats: int, states: int, to: str = "host") -> Figures:
    """Sleep and wake of a model's own tensors, made by PyTorch, and plain copies beside."""
    import torch

    from gpumem.integrations import torch as integration

    arena = gpumem.Arena(device)
    integration.enable(arena)
    kinds: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    with arena.tag("model"):
        tensors = [torch.ones(shape, **kinds) for shape in model_shapes()]
        for shape in model_shapes():
            tensors += [torch.ones(shape, **kinds) for _ in range(states)]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    yield "nbytes", nbytes
    copy_down, copy_up = plain_copies(device, nbytes, to)
    torch.cuda.synchronize()
    if to == "host":
        touch(nbytes)
    for turn in range(repeats + 1):
        yield ("again" if turn else "first"), seconds(lambda: arena.sleep("model", to))
        yield "wake", seconds(lambda: arena.wake("model"))
        yield "plain down", seconds(copy_down)
        yield "plain up", seconds(copy_up)
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def bare(device: str, nbytes: int, repeats: int) -> Figures:
    """Call the driver for the same handles, without an arena."""
    with gpumem.Arena(device) as arena:
        live = [arena.allocate(nbytes // BLOCKS) for _ in range(BLOCKS)]
        pages = [size for _, size in arena.snapshot().resources[0].pages]
        del live
    calls = Bare(device, sum(pages))
    for turn in range(repeats + 1):
        wake, sleep = calls.seconds(pages)
        yield ("again" if turn else "first"), sleep
        yield "wake", wake


def fits(device: str, limit: int, peak: int, tenants: int) -> bool:
    """Whether `tenants` with this peak fit under one limit, one of them awake at a time."""
    held: dict[str, list[gpumem.Buffer]] = {}
    with gpumem.Arena(device, max_mem=limit) as arena:
        try:
            for name in [f"tenant {number}" for number in range(tenants)] * 2:
                if name in held:
                    arena.wake(name)
                else:
                    with arena.tag(name, asleep="drop"):
                        held[name] = [arena.allocate(peak // TENANT) for _ in range(TENANT)]
                arena.sleep(name)
        except gpumem.OutOfMemoryError:
            return False
        finally:
            held.clear()
    return True


def tenants(device: str, limit: int) -> dict[str, int]:
    """Return the largest sum of two tenants' peaks that fits, under each regime."""

    def largest(limit: int, tenants: int) -> int:
        low, high = 0, limit + STEP  # `low` fits, `high` does not
        while high - low > STEP:
            middle = (low + high) // 2 // STEP * STEP
            low, high = (middle, high) if fits(device, limit, middle, tenants) else (low, middle)
        return 2 * low

    return {"one limit": largest(limit, 2), "two halves": largest(limit // 2, 1)}


def measured(step: str, device: str, nbytes: int, dead: float, repeats: int) -> Figures:
    """Measure one step in this process."""
    index = gpumem.Device(device).index
    steps: dict[str, Callable[[], Figures]] = {
        "keep": lambda: cycles(device, nbytes, 0, repeats, "keep"),
        "keep-dead": lambda: cycles(device, nbytes, dead, repeats, "keep"),
        "model": lambda: model(device, repeats, 0),
        "adamw": lambda: model(device, repeats, 2),
        "drop": lambda: cycles(device, nbytes, 0, repeats, "drop"),
        "bare": lambda: bare(device, nbytes, repeats),
        "peer": lambda: cycles(device, nbytes, 0, repeats, "keep", f"cuda:{index + 1}"),
        "model-peer": lambda: model(device, repeats, 0, f"cuda:{index + 1}"),
        "tenants": lambda: iter(tenants(device, nbytes).items()),
    }
    return steps[step]()


# ---- steps as processes --------------------------------------------------------------------------


def absent(step: str, device: str) -> str | None:
    """Return why a step cannot be measured here; None: it can."""
    index = gpumem.Device(device).index
    if step.startswith("saver"):
        if not device.startswith("cuda"):
            return "needs a GPU"
        if importlib.util.find_spec("torch_memory_saver") is None:
            return "torch_memory_saver is not installed"
    if step in MODELS:
        if not device.startswith("cuda"):
            return "needs a GPU"
        if importlib.util.find_spec("torch") is None:
            return "PyTorch is not installed"
    if step == "peer" and not device.startswith("cuda"):
        return "needs two GPUs"
    needs_another = step in ("peer", "model-peer")
    if needs_another and gpumem.Device(f"cuda:{index + 1}") not in gpumem.devices():
        return "needs another GPU"
    return None


def command(step: str, given: argparse.Namespace, nbytes: int) -> list[str]:
    """Return the command line of a step's process."""
    if step.startswith("saver"):
        dead = int(nbytes * given.dead) if step == "saver-dead" else 0
        sizes = map(str, (nbytes, dead, BLOCKS, given.repeats))
        return [sys.executable, "-c", SAVER, *sizes]
    settings = {"device": given.device, "nbytes": nbytes, "dead": given.dead}
    return [
        sys.executable,
        "-c",
        "import json, sys\n"
        "from bench.sleep import measured\n"
        "for figure in measured(sys.argv[1], **json.loads(sys.argv[2])):\n"
        "    print(json.dumps(figure), flush=True)",
        step,
        json.dumps(settings | {"repeats": given.repeats}),
    ]


def run(arguments: list[str], limit: float) -> tuple[list[tuple[str, float]], str]:
    """Return the figures of a step's process within the limit, and how it ended."""
    until = time.monotonic() + limit
    read, ended = b"", ""
    with (
        subprocess.Popen(arguments, stdout=subprocess.PIPE) as process,
        selectors.DefaultSelector() as selector,
    ):
        assert process.stdout is not None
        selector.register(process.stdout, selectors.EVENT_READ)
        while not ended:
            if not selector.select(max(until - time.monotonic(), 0)):
                process.kill()
                ended = f"ended after {limit:g} s"
            elif piece := os.read(process.stdout.fileno(), 1 << 16):
                read += piece
            else:
                ended = "done" if process.wait() == 0 else f"failed with {process.returncode}"
    # Of a line that the limit cut nothing is used.
    return [tuple(json.loads(line)) for line in read.split(b"\n")[:-1]], ended


def medians(figures: list[tuple[str, float]]) -> dict[str, float]:
    """Return the seconds of each sort; the first wake is not measured in a state of its own."""
    found: dict[str, list[float]] = {}
    for sort, spent in figures:
        found.setdefault(sort, []).append(spent)
    found["wake"] = found.get("wake", [])[1:] or found.get("wake", [])
    return {sort: statistics.median(spent) for sort, spent in found.items() if spent}


def ratios(rates: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the ratios between rows, as far as they were measured."""
    pairs = {
        "first sleep / torch_memory_saver": ("keep", "saver", "first"),
        "sleep again / torch_memory_saver": ("keep", "saver", "again"),
        "wake / torch_memory_saver": ("keep", "saver", "wake"),
        "sleep again, dead / torch_memory_saver": ("keep-dead", "saver-dead", "again"),
        "wake, dead / torch_memory_saver": ("keep-dead", "saver-dead", "wake"),
        "time of drop / bare": ("bare", "drop", "again"),
        "time of wake after drop / bare": ("bare", "drop", "wake"),
    }
    found = {
        name: rates[one][sort] / rates[other][sort]
        for name, (one, other, sort) in pairs.items()
        if sort in rates.get(one, {}) and sort in rates.get(other, {})
    }
    plain = {"first": "plain down", "again": "plain down", "wake": "plain up"}
    for step in MODELS:
        for sort, beside in plain.items():
            if {sort, beside} <= rates.get(step, {}).keys():
                found[f"{step}, {sort} / plain copy"] = rates[step][sort] / rates[step][beside]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sleep", description=__doc__)
    parser.add_argument("--device", default=None, help="cuda:0 if there is one, else host")
    parser.add_argument("--gib", type=float, default=None, help="32, on the host 0.5")
    parser.add_argument("--dead", type=float, default=0.3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=60, help="seconds for each step")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=STEPS, metavar="STEP")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    given.device = given.device or ("cuda:0" if gpumem.driver_status().available else "host")
    gib = given.gib or (32 if given.device.startswith("cuda") else 0.5)
    nbytes = int(gib * GIB)
    rates: dict[str, dict[str, float]] = {}
    sums: dict[str, float] = {}
    for step in given.only:
        reason = absent(step, given.device)
        begin = time.monotonic()
        figures, ended = ([], reason) if reason else run(command(step, given, nbytes), given.limit)
        if step == "tenants":
            sums = dict(figures)
            line = f"{ {name: int(each) >> 20 for name, each in sums.items()} } MiB"
        else:
            spans = medians(figures)
            copied = spans.pop("nbytes", nbytes)
            rates[step] = {sort: copied / each / 1e9 for sort, each in spans.items()}
            line = ", ".join(f"{sort} {rate:.1f} GB/s" for sort, rate in rates[step].items())
        spent = time.monotonic() - begin
        print(f"{step}: {line or 'nothing'} ({ended}, {spent:.1f} s)", file=sys.stderr, flush=True)
    if given.json:
        print(json.dumps({"rates": rates, "ratios": ratios(rates), "tenants": sums}))
        return
    rows = [
        [step, *(f"{found[sort]:.1f}" if sort in found else "" for sort in SORTS)]
        for step, found in rates.items()
    ]
    print(markdown.table(("GB/s", "first sleep", "sleep again", "wake", *SORTS[3:]), rows))
    for name, ratio in ratios(rates).items():
        print(f"\n{name}: {ratio:.2f}", end="")
    print()
    if len(sums) == 2:
        print(
            f"\nTwo tenants out of phase under {gib:g} GiB: {sums['one limit'] / GIB:.3f} GiB in "
            f"all, in two halves {sums['two halves'] / GIB:.3f}; "
            f"{sums['one limit'] / sums['two halves']:.2f} times as much"
        )


if __name__ == "__main__":
    main()
