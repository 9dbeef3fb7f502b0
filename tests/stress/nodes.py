"""Processes under one node's limits, which are killed, stopped and forked at random.

Each reserves and releases memory, directly or through an arena, and asks the others when it lacks
some. Another thread only reads, and finds each sum above a limit. At the end, every process that
lives must go on, and all bytes must be there again.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import gpumem
from gpumem import Budget
from gpumem._node import NodeView
from gpumem.errors import NodeError, OutOfMemoryError

MIB = 1 << 20
LIMITS = {"": 256 * MIB, "/a": 100 * MIB, "/a/b": 60 * MIB, "/c": None}
LARGEST = 40 * MIB  # of one reservation
PATIENCE = 120  # seconds until a process that waits for nothing has gone on
COUNTS = struct.Struct("QQ")  # reservations: granted, refused
ROOT = Path(__file__).resolve().parents[2]


# ---- a process -----------------------------------------------------------------------------------


def work(name: str, seed: int, counts: int, place: int) -> None:
    """Reserve and release at random, in forks too, until it is killed."""
    rng = random.Random(seed)
    kept: list = []
    budget = Budget(
        None,
        node=name,
        deadline=0.05,
        priority=seed % 3,
        on_pressure=lambda budget, nbytes: kept.clear(),
    )
    arena = gpumem.Arena("host", budget=budget) if seed % 4 == 0 else None

    def reserve(number: int, arena: gpumem.Arena | None) -> list[int]:
        found = [0, 0]
        for _ in range(number):
            nbytes = rng.randrange(1, LARGEST)
            try:
                if arena is not None:
                    kept.append(arena.allocate(nbytes))
                else:
                    room = budget.reserve(nbytes)
                    room.commit()
                    kept.append(Room(room))
                found[0] += 1
            except OutOfMemoryError:
                found[1] += 1
            while len(kept) > 5 or (kept and rng.random() < 0.4):
                del kept[int(rng.random() * len(kept)) :]
        return found

    total = [0, 0]
    while True:
        total = [a + b for a, b in zip(total, reserve(30, arena), strict=True)]
        os.pwrite(counts, COUNTS.pack(*total), place * COUNTS.size)
        if rng.random() < 0.2:
            child = os.fork()
            if child == 0:
                os._exit(0 if sum(reserve(10, None)) else 1)
            if rng.random() < 0.5:
                os.waitpid(child, 0)


class Room:
    """A committed reservation, released when it is dropped, as memory of another library is."""

    def __init__(self, room: gpumem.Reservation) -> None:
        self.room = room

    def __del__(self) -> None:
        self.room.release()


# ---- all of them ---------------------------------------------------------------------------------


class Stress:
    """The processes, and the thread that reads."""

    def __init__(self, seed: int, processes: int) -> None:
        self.rng = random.Random(seed)
        self.node = f"stress-{os.getpid()}"
        self.budgets = {
            name: Budget(limit, node=self.node + name) for name, limit in LIMITS.items()
        }
        self.view = NodeView(self.node)
        self.counts = os.memfd_create("counts")
        self.places = itertools.count()
        self.problems: list[str] = []
        self.reads = self.kills = self.stops = 0
        self.is_over = threading.Event()
        self.running = [self.start() for _ in range(processes)]
        self.stopped: list[int] = []

    def start(self) -> tuple[subprocess.Popen[bytes], int]:
        """Start a process; return it with its place in the file of counts."""
        place = next(self.places)
        name = self.node + self.rng.choice(list(LIMITS))
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.stress.nodes"]
        order = [name, str(self.rng.randrange(1 << 20)), str(self.counts)]
        command += [*order, str(place)]
        return subprocess.Popen(command, cwd=ROOT, pass_fds=(self.counts,)), place

    def count(self, place: int) -> tuple[int, ...]:
        found = os.pread(self.counts, COUNTS.size, place * COUNTS.size)
        return COUNTS.unpack(found.ljust(COUNTS.size, b"\0"))

    def watch(self) -> None:
        """Read until it is over; note each sum above a limit."""
        while not self.is_over.is_set():
            try:
                levels, _ = self.view.read()
            except NodeError as error:
                self.problems.append(str(error))
                return
            self.reads += 1
            for name, used, limit in levels:
                if limit is not None and used > limit:
                    self.problems.append(f"{name} has {used} of {limit} bytes")

    def disturb(self) -> None:
        """Kill one and start another, or stop one and let one that was stopped before go on."""
        i = self.rng.randrange(len(self.running))
        process, _ = self.running[i]
        if process.poll() is not None:
            self.problems.append(f"a process has ended with {process.returncode}")
        if self.rng.random() < 0.7:
            process.kill()
            process.wait()
            self.stopped = [each for each in self.stopped if each != i]
            self.running[i] = self.start()
            self.kills += 1
        else:
            process.send_signal(signal.SIGSTOP)
            self.stopped.append(i)
            self.stops += 1
        if len(self.stopped) > len(self.running) // 4:
            self.running[self.stopped.pop(0)][0].send_signal(signal.SIGCONT)

    def run(self, seconds: float) -> None:
        """Disturb the processes until the time is over, and check what is left."""
        watcher = threading.Thread(target=self.watch)
        watcher.start()
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end and not self.problems:
                self.disturb()
                time.sleep(self.rng.random())
            for process, _ in self.running:
                process.send_signal(signal.SIGCONT)
            self.expect("a process does not go on", self.go_on())
        finally:
            for process, _ in self.running:
                process.kill()
                process.wait()
            self.is_over.set()
            watcher.join()
        # A forked process runs to its end.
        self.expect("a forked process does not end", lambda: len(self.alive()) == len(LIMITS))
        if not self.problems:
            self.budgets[""].reserve(LIMITS[""]).commit()
            levels = {level.name: level.used for level in self.view.read()[0]}
            if sum(levels.values()) != LIMITS[""]:
                self.problems.append(f"bytes are lost: {levels}")

    def go_on(self):
        """Return a condition: every process has reserved again since now."""
        before = {place: sum(self.count(place)) for _, place in self.running}
        return lambda: all(sum(self.count(place)) > before[place] for place in before)

    def alive(self) -> list[int]:
        return [each.process for each in self.view.read()[1]]

    def expect(self, problem: str, condition) -> None:
        end = time.monotonic() + PATIENCE
        while not self.problems and not condition():
            if time.monotonic() > end:
                self.problems.append(f"{problem} within {PATIENCE} s: {self.view.read()}")
            time.sleep(0.05)


def run_nodes(seed: int, seconds: float, processes: int) -> int:
    """Run as many processes; return the exit status."""
    stress = Stress(seed, processes)
    try:
        stress.run(seconds)
    finally:
        Path(f"/dev/shm/gpumem-node-{os.geteuid()}-{stress.node}").unlink()
    granted, refused = map(sum, zip(*map(stress.count, range(next(stress.places))), strict=True))
    print(
        f"{granted:,} reservations, {refused:,} refused, {stress.kills} kills, {stress.stops} "
        f"stops, {stress.reads:,} reads"
    )
    if stress.problems:
        print("\n".join(stress.problems[:10]))
        return 1
    print("0 sums above a limit, 0 bytes lost")
    return 0


if __name__ == "__main__":
    work(sys.argv[1], *map(int, sys.argv[2:]))
