"""One arena under several threads for some seconds, and what must be true at its end."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpumem
from gpumem._support.releases import release_retired as release_kept
from gpumem._testing import host_device
from gpumem._testing.arenas import release_retired

from ..helpers.driver import HostDriver
from ..helpers.quiesce import held_by_kind
from .blocks import Shared
from .patterns import Patterns
from .worker import Worker

MIB = 1 << 20


@dataclass(frozen=True)
class Scenario:
    """Where, with which settings, from which seed; `lie` asks for wrong bytes."""

    memory: str
    config: dict[str, Any]
    seed: int
    seconds: float
    threads: int = 3
    beside: tuple[str, ...] = ()  # memories that copies go through
    without: tuple[str, ...] = ()
    lag_us: int = 0
    lie: bool = False
    node_limit: int | None = None  # bytes of a node that the arenas share


@dataclass
class Outcome:
    """What a scenario did and what went wrong; no problem: it ran clean."""

    done: Counter = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    wrong_bytes: bool = False


def run(scenario: Scenario) -> Outcome:
    """Run one scenario to its end."""
    memory = gpumem.MemoryInfo(scenario.memory) if "/" not in scenario.memory else scenario.memory
    driver = HostDriver(str(scenario.memory).partition("/")[0])
    _make_what_stays()
    before = _alive()
    outcome = Outcome()
    host_device.set_lag(scenario.lag_us * 1000)
    try:
        _run(scenario, memory, driver, outcome)
    finally:
        host_device.set_lag(0)
        Path(f"/dev/shm/gpumem-node-{os.geteuid()}-{_node(scenario)}").unlink(missing_ok=True)
    if not outcome.problems:
        patience = time.monotonic() + 5  # a destroyed stream finishes its queued work first
        while _alive() != before and time.monotonic() < patience:
            time.sleep(0.01)
        if _alive() != before:
            outcome.problems.append(f"left behind: {_alive()}, before it was {before}")
    return outcome


def _make_what_stays() -> None:
    """Give a region back on each device: the stream that does so stays for good."""
    for device in gpumem.devices():
        with gpumem.Arena(device, {"backing": "regions"}) as arena:
            arena.allocate(256).close()


def _run(scenario: Scenario, memory: Any, driver: HostDriver, outcome: Outcome) -> None:
    budget = None
    if scenario.node_limit is not None:
        budget = gpumem.Budget(scenario.node_limit, node=_node(scenario))
    arena = gpumem.Arena(memory, scenario.config, budget=budget)
    device = arena.memory.device
    beside = [
        gpumem.Arena(memory, {"max_mem": 64 * MIB}, budget=budget) for memory in scenario.beside
    ]
    shared = Shared(
        arena=arena,
        beside=beside,
        streams=[gpumem.Stream(device) for _ in range(2)],
        peers=_peers(device, beside),
        bytes_per_thread=int(arena.config.max_mem / scenario.threads),
        lie=scenario.lie,
        without=scenario.without,
    )
    seeds = random.Random(scenario.seed)
    end = time.monotonic() + scenario.seconds
    threads = [
        threading.Thread(target=_thread, args=(shared, driver, number, seed, end, outcome))
        for number, seed in enumerate(seeds.sample(range(1 << 30), scenario.threads), 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not outcome.problems:
        _end(shared, outcome)


def _node(scenario: Scenario) -> str:
    return f"stress-{os.getpid()}-{scenario.seed}"


def _peers(device: gpumem.Device, beside: list[gpumem.Arena]) -> list:
    """Of the other devices that can reach a device's memory, the driver and the arena."""
    others = [(arena.memory.device, arena) for arena in beside if arena.memory.device != device]
    own = device._open()
    return [(HostDriver(str(to)), arena) for to, arena in others if own.is_reached_by(to.index)]


def _thread(
    shared: Shared, driver: HostDriver, number: int, seed: int, end: float, outcome: Outcome
) -> None:
    patterns = Patterns(driver, number)
    worker = Worker(shared, patterns, number, seed)
    try:
        while time.monotonic() < end and not shared.stopped:
            worker.step()
        worker.finish()
    except BaseException as error:
        shared.stopped = True
        outcome.wrong_bytes |= isinstance(error, AssertionError)
        outcome.problems.append(f"thread {number}: {''.join(traceback.format_exception(error))}")
        return
    outcome.done += worker.done
    for each in (patterns, *worker.peers.patterns):
        each.close()
        outcome.done["checks"] += each.checks
        outcome.done["bytes checked"] += each.bytes_checked


def _end(shared: Shared, outcome: Outcome) -> None:
    """Everything is given back, and the books say so."""
    shared.inbox.clear()
    for stream in shared.streams:
        stream.synchronize()
    for beside in shared.beside:
        beside.memory.device.synchronize()
        beside.close()
    # What copies keep until they are done is dropped by another thread.
    release_kept()
    arena = shared.arena
    arena.check_invariants()
    stats = arena.stats()
    outcome.done["pages moved"] += stats.pages_moved
    outcome.done["regions added"] += stats.num_extensions
    outcome.done["regions released"] += stats.num_shrinkages
    if stats.in_use or stats.requested_in_use or stats.num_allocs != stats.num_frees:
        outcome.problems.append(f"a block was never taken back: {stats}")
    arena.close()
    if arena.stats().reserved:
        outcome.problems.append(f"a closed arena holds memory: {arena.stats()}")
    if arena.budget is not None and arena.budget.used:
        outcome.problems.append(f"closed arenas are charged: {arena.budget}")


def _alive() -> dict[str, int]:
    """What the host devices hold; for a GPU, nothing can tell its own from other programs'."""
    gc.collect()
    release_retired()
    ordinals = [each.index for each in gpumem.devices() if each.type == "host"]
    return held_by_kind() | {"bytes": sum(map(host_device.used, ordinals))}
