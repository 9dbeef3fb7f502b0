"""Programs under one limit of a node: leases, an idle cache, pressure, peaks in turn, kills.

    python -m bench.nodes [--device cuda:0 [cuda:1]] [--limit 24GiB] [--only PART ...] [--json]

On a GPU each program is a process of PyTorch that `gpumem run --node-limit` starts; on the host
device it has an arena. `--limit` is that of the node (24 GiB; on the host device 256 MiB). Parts:

- lease: microseconds of a charge that leases a chunk, of a name and of the device, where each
  lease asks the driver, and of one without a node.
- idle: milliseconds until a program has two thirds of the limit that another one's cache holds.
- many: two and eight programs that allocate and free at random for some seconds.
- spread: eight such programs, which take turns among the devices given.
- peaks: the largest sum of two VirtualTensors that grow and shrink in turn, over the limit.
- start: two programs that at once take nine tenths of the memory that they find free, 20 times.
- kill: after a SIGKILL, milliseconds until the process has ended, until its slot can be refunded,
  until the device has the memory again, and whether another program gets it at once, of a name and
  of the device.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import count, cycle
from pathlib import Path
from typing import Any

import gpumem
from bench import markdown
from gpumem import Budget
from gpumem._node import NodeView
from gpumem._support.sizes import parse_size
from gpumem.device import set_host_device_count
from gpumem.errors import NodeError

MIB, GIB = 1 << 20, 1 << 30
ROOT = Path(__file__).resolve().parents[1]
SECONDS = 5.0  # of random work
ROUNDS = 20
KILLS = 5
PATIENCE = 8.0  # seconds

numbers = count()


# ---- a program -----------------------------------------------------------------------------------


class Work:
    """A program's memory: PyTorch's tensors on a GPU, blocks of an arena on the host device."""

    def __init__(self, device: str, node: str) -> None:
        self.kept: list[Any] = []
        self.refusal = ""
        self.refusals: tuple[type[Exception], ...] = (MemoryError, gpumem.errors.OutOfMemoryError)
        self.torch: Any = None
        if device.startswith("host"):
            set_host_device_count(1 + int(device.partition(":")[2] or 0))
            self.budget = Budget(None, node=node)
            self.arena = gpumem.Arena(device, budget=self.budget)
            return
        import torch

        self.torch = torch
        torch.empty(1, device=device)
        self.refusals += (torch.OutOfMemoryError,)
        self.device = device
        self.arena = gpumem.get_default_resource(device)

    def take(self, nbytes: int) -> float | None:
        """Allocate; return the seconds, or None if the request is refused."""
        begin = time.perf_counter()
        try:
            if self.torch is None:
                self.kept.append(self.arena.allocate(nbytes))
            else:
                self.kept.append(
                    self.torch.empty(nbytes, dtype=self.torch.uint8, device=self.device)
                )
        except self.refusals as error:
            self.refusal = str(error)
            return None
        return time.perf_counter() - begin

    def drop(self) -> None:
        """Free all; the memory stays in the cache."""
        self.kept.clear()
        if self.torch is not None:
            self.torch.cuda.synchronize()

    def churn(self, largest: int, most: int, seed: int, seconds: float) -> tuple[int, int]:
        """Allocate and free at random; return how often, and how often it was refused."""
        rng = random.Random(seed)
        allocated = refused = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.take(rng.randrange(1, largest)) is None:
                refused += 1
                self.kept[: len(self.kept) // 2] = []
                continue
            allocated += 1
            if self.torch is not None:
                self.kept[-1].fill_(1)
            while len(self.kept) > most or (self.kept and rng.random() < 0.4):
                self.kept.pop(rng.randrange(len(self.kept)))
        self.drop()
        return allocated, refused

    def size_by_free_memory(self) -> bool:
        """Take nine tenths of the memory that is free, until it is dropped."""
        free = self.budget.free if self.torch is None else self.torch.cuda.mem_get_info()[0]
        return self.take(free * 9 // 10) is not None

    def cache(self, nbytes: int) -> None:
        """Make a VirtualTensor of up to as many bytes."""
        self.rows = self.arena.virtual((nbytes // MIB, MIB), "uint8", committed=0)

    def resize(self, nbytes: int) -> bool:
        """Grow or shrink it; return whether it has the memory."""
        try:
            self.rows.resize(nbytes // MIB)
        except self.refusals as error:
            self.refusal = str(error)
            return False
        return True


def serve(device: str, node: str) -> None:
    """Answer each line, a name of a method and its arguments, with the value."""
    answers, sys.stdout = sys.stdout, sys.stderr
    work = Work(device, node)
    print(json.dumps(None), file=answers, flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        value = getattr(work, name)
        value = value(*arguments) if callable(value) else value
        print(json.dumps(value), file=answers, flush=True)


class Program:
    """A process under the node's limit."""

    def __init__(self, device: str, node: str) -> None:
        command = [sys.executable, "-m"]
        if not device.startswith("host"):
            command += ["gpumem", "run", "--node-limit", node, "-m"]
        self.process = subprocess.Popen(
            [*command, "bench.nodes", "--serve", node, "--device", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self._read()

    def __call__(self, name: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a program has ended with {self.process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def programs(
    device: str | list[str], limit: int, names: list[str], prefix: str = ""
) -> Iterator[tuple[str, list[Program]]]:
    """Start programs on a node of their own; `names` are below it, or empty.

    Of several devices they take turns.
    """
    devices = cycle([device] if isinstance(device, str) else device)
    node = f"{prefix}bench-{os.getpid()}-{next(numbers)}"
    keeper = Budget(limit, node=node)  # its slot holds nothing
    with ExitStack() as stack, ThreadPoolExecutor(len(names)) as pool:
        made = list(pool.map(lambda name, device: Program(device, node + name), names, devices))
        for each in made:
            stack.callback(each.end)
        yield node, made
    assert keeper.used == 0
    remove(keeper)


def remove(budget: Budget) -> None:
    """Remove the file of a node; this process still has a slot of it."""
    with suppress(OSError):
        node = str(budget.node).partition("/")[0]
        Path(f"/dev/shm/gpumem-node-{os.geteuid()}-{node}").unlink()


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


# ---- parts ---------------------------------------------------------------------------------------


def lease(device: str, limit: int) -> dict[str, Any]:
    """Time charges of 256 MiB, each of which leases a chunk."""
    name = f"bench-{os.getpid()}-{next(numbers)}"
    budgets = {
        "name": Budget("1TiB", node=name),
        "device": Budget("1TiB", node=f"{gpumem.Device(device)}/{name}"),
        "without": Budget("1TiB"),
    }
    samples: dict[str, list[float]] = {name: [] for name in budgets}
    kept = []
    for _ in range(2000):
        for name, budget in budgets.items():
            begin = time.perf_counter_ns()
            kept.append(budget.reserve(256 * MIB))
            samples[name].append(time.perf_counter_ns() - begin)
            kept[-1].commit()
    remove(budgets["name"])
    remove(budgets["device"])
    return {f"us, {name}": statistics.median(each) / 1e3 for name, each in samples.items()}


def idle(device: str, limit: int) -> dict[str, Any]:
    """Let two programs take two thirds of the limit in turn; each leaves it in its cache."""
    nbytes = limit * 2 // 3
    seconds = []
    with programs(device, limit, ["", ""]) as (_, both):
        both[0]("take", nbytes)
        both[0]("drop")
        for turn in range(1, 9):
            one = both[turn % 2]
            seconds.append(one("take", nbytes))
            if seconds[-1] is None:
                return {"refused": one("refusal")}
            one("drop")
    best = sorted(seconds)
    return {"ms, median": statistics.median(best) * 1e3, "ms, longest": best[-1] * 1e3}


def many(device: str, limit: int) -> dict[str, Any]:
    """Let programs allocate at random, and read how much they hold."""
    return churned(device, limit, 2, 8)


def spread(devices: list[str], limit: int) -> dict[str, Any]:
    """Let programs of several devices do so."""
    return churned(devices, limit, 8)


def churned(device: str | list[str], limit: int, *numbers: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number in numbers:
        with programs(device, limit, [""] * number) as (node, each):
            view = NodeView(node)
            largest = [0]

            def watch(view: NodeView = view, largest: list[int] = largest) -> None:
                end = time.monotonic() + SECONDS
                while time.monotonic() < end:
                    (level,), _ = view.read()
                    largest[0] = max(largest[0], level.used)
                    time.sleep(0.001)

            work = [
                lambda one=one, i=i: one("churn", limit // 8, 6, i, SECONDS)
                for i, one in enumerate(each)
            ]
            counts = at_once([*work, watch])[:-1]
        found |= {
            f"{number} programs, allocations": sum(done for done, _ in counts),
            f"{number} programs, refused": sum(refused for _, refused in counts),
            f"{number} programs, largest sum / limit": largest[0] / limit,
        }
    return found


def peaks(device: str, limit: int) -> dict[str, Any]:
    """Find the largest peak that two caches reach in turn, in steps of a hundredth."""
    low = limit // 50
    with programs(device, limit, ["", ""]) as (_, both):
        at_once([lambda one=one: one("cache", limit) for one in both])
        for one in both:
            one("resize", low)
        for hundredths in range(100, 50, -1):
            peak = limit * hundredths // 100
            fits = []
            for turn in range(6):
                both[1 - turn % 2]("resize", low)
                fits.append(both[turn % 2]("resize", peak))
            if all(fits):
                break
            for one in both:
                one("resize", low)
    return {"largest sum of peaks / limit": 2 * peak / limit, "low / limit": low / limit}


def start(device: str, limit: int) -> dict[str, Any]:
    """Let two programs, each with half of the limit, size themselves at once."""
    ended = {}
    for title, parts in {"a half each": ["/a", "/b"], "one limit": ["", ""]}.items():
        failed = 0
        with programs(device, limit, parts) as (node, both):
            for part in filter(None, parts):
                NodeView(node + part).set_limit(limit // 2)
            for _ in range(ROUNDS):
                done = at_once([lambda one=one: one("size_by_free_memory") for one in both])
                failed += not all(done)
                at_once([lambda one=one: one("drop") for one in both])
        ended[f"rounds in which one failed, {title}"] = f"{failed} of {ROUNDS}"
    return ended


def kill(device: str, limit: int) -> dict[str, Any]:
    """Kill programs that hold seven tenths of the device, or of the limit on the host device."""
    where = gpumem.Device(device)
    is_host = device.startswith("host")
    nbytes = limit * 7 // 10 if is_host else where.total_bytes * 7 // 10
    times: dict[str, list[float]] = {"ended": [], "slot": [], "memory": []}
    with programs(device, nbytes * 11 // 10, [""] * KILLS) as (node, each):
        view = NodeView(node)
        for one in each:
            if one("take", nbytes) is None:
                return {"refused": one("refusal")}
            process = one.process.pid
            before = where.free_bytes
            begin = time.perf_counter()
            one.process.kill()
            missing = set(times) - ({"memory"} if is_host else set())
            while missing and time.perf_counter() < begin + PATIENCE:
                now = {
                    "ended": "ended" in missing and has_ended(process),
                    "slot": "slot" in missing and is_dead(view, process),
                    "memory": "memory" in missing
                    and where.free_bytes >= before + nbytes * 99 // 100,
                }
                for name in [name for name in missing if now[name]]:
                    times[name].append((time.perf_counter() - begin) * 1e3)
                    missing.discard(name)
            one.end()
    found: dict[str, Any] = {
        f"ms until {name}": " ".join(f"{each:.1f}" for each in sorted(values))
        for name, values in times.items()
    }
    for title, prefix in {"name": "", "device": f"{where}/"}.items():
        with programs(device, nbytes * 11 // 10, [""] * 2, prefix) as (_, each):
            each[0]("take", nbytes)
            each[0].process.kill()
            took = each[1]("take", nbytes)
            why = each[1]("refusal") if took is None else f"{took * 1e3:.1f} ms"
            found[f"next program, of a {title}"] = why.partition("\n")[0]
    return found


def has_ended(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return True
    return state.rpartition(")")[2].split()[0] == "Z"


def is_dead(view: NodeView, process: int) -> bool:
    try:
        return all(each.process != process for each in view.read()[1])
    except NodeError:
        return False


PARTS: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    each.__name__: each for each in (lease, idle, many, spread, peaks, start, kill)
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.nodes")
    parser.add_argument("--device", nargs="+", default=["host"], help="the first, but for spread")
    parser.add_argument("--limit", type=parse_size)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--serve", metavar="NODE", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    if chosen.serve:
        serve(chosen.device[0], chosen.serve)
        return 0
    device = chosen.device[0]
    limit = chosen.limit or (256 * MIB if device.startswith("host") else 24 * GIB)
    found = {}
    for part in chosen.only:
        begin = time.monotonic()
        try:
            found[part] = PARTS[part](chosen.device if part == "spread" else device, limit)
        except Exception as error:  # the other parts are measured all the same
            found[part] = {"failed": repr(error)}
        text = f"{part}, {time.monotonic() - begin:.0f} s: {found[part]}"
        print(text, file=sys.stderr, flush=True)
    if chosen.json:
        print(json.dumps(found))
        return 0
    rows = [[part, name, shown(value)] for part in found for name, value in found[part].items()]
    print(markdown.table(["part", "figure", "value"], rows))
    return 0


def shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
