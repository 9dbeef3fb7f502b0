"""Pairs of calls: one thread changes a state that other threads use.

Each user writes a pattern of its own, reads it back and finds it. A call may be refused by an error
that names the state; then the bytes are as before. Nothing stands still for `PATIENCE` seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

import gpumem
from gpumem.errors import AsleepError, ClosedError, InUseError, OutOfMemoryError
from gpumem.interop import Importer, MemoryDescriptor, MemoryHandleType

from .patterns import WrongBytes
from .scenario import Outcome

NBYTES = 3 << 20  # of a user's tensor: more than a page, so that its memory is unmapped
USERS = 2
PATIENCE = 30  # seconds
PAUSE = 5e-4  # seconds of a user without a tensor, in which a close may succeed
SWITCH = 1e-5  # seconds between two threads' turns in the interpreter
REFUSALS = (AsleepError, ClosedError, InUseError)


@dataclass
class Held:
    """A user's tensor, and the byte that all of it holds."""

    tensor: gpumem.Tensor
    value: int

    def check(self, seen: Any = None) -> None:
        """Compare all bytes, by default as the CPU reads them."""
        seen = self.tensor if seen is None else seen
        bytes_ = np.asarray(seen.to("host").numpy() if isinstance(seen, gpumem.Tensor) else seen)
        wrong = bytes_ != self.value
        if wrong.any():
            at = int(wrong.argmax())
            raise WrongBytes(
                f"{int(wrong.sum())} wrong bytes in {self.tensor!r}: "
                f"at {at} {int(bytes_[at])}, not {self.value}"
            )

    def next(self) -> int:
        """Return the value of the next pattern."""
        return self.value % 255 + 1


# ---- changes -------------------------------------------------------------------------------------


class Ground:
    """An arena, its users' tensors, and the call that changes the state of both."""

    config: ClassVar[dict[str, Any]] = {"backing": "virtual"}
    refusals: tuple[type[Exception], ...] = REFUSALS
    # One of these is in the text of each refusal.
    names: tuple[str, ...] = ("'pairs", "this buffer is closed")

    def __init__(self, memory: str, rng: random.Random) -> None:
        self.memory, self.rng = memory, rng
        self.arena = self.opened()
        self.stream, self.side = (gpumem.Stream(self.arena.memory.device) for _ in range(2))
        self.held: list[Held | None] = [None] * USERS

    def opened(self) -> gpumem.Arena:
        return gpumem.Arena(self.memory, self.config, name="pairs")

    def tagged(self, number: int) -> contextlib.AbstractContextManager:
        """Return the block in which a user allocates."""
        return contextlib.nullcontext()

    def tensor(self, number: int) -> gpumem.Tensor:
        """Make a tensor for a user."""
        with self.tagged(number):
            return gpumem.empty(NBYTES, "uint8", resource=self.arena)

    def full(self, number: int, value: int) -> gpumem.Tensor:
        with self.tagged(number):
            return gpumem.full(NBYTES, value, "uint8", resource=self.arena)

    def row(self, number: int) -> gpumem.Tensor:
        """Commit a row for a user, and return it as a part of `VirtualTensor.full`."""
        with self.tagged(number):
            return self.arena.virtual((1, NBYTES), "uint8", committed=1).full[0]

    def change(self) -> None:
        """Change the state once."""
        raise NotImplementedError

    def end(self) -> None:
        self.arena.check_invariants()


class Filled(Ground):
    """Here a full tensor is one of the users' tensors, which is filled."""

    def full(self, number: int, value: int) -> gpumem.Tensor:
        made = self.tensor(number)
        made.fill(value, self.side)
        return made


class Sleep(Ground):
    def change(self) -> None:
        self.arena.sleep()
        self.arena.wake()


class Wake(Ground):
    """A wake in part: each user has a tag, and one is woken before the other."""

    def tagged(self, number: int) -> contextlib.AbstractContextManager:
        return self.arena.tag(f"user {number}")

    def change(self) -> None:
        try:
            self.arena.sleep()
        finally:
            for name in self.rng.sample(self.arena.asleep, len(self.arena.asleep)):
                self.arena.wake(name)


class Close(Ground):
    """The arena closes with a tag of one of its users, or both stay open."""

    def tagged(self, number: int) -> contextlib.AbstractContextManager:
        return self.arena.tag("a tag") if number else contextlib.nullcontext()

    def change(self) -> None:
        try:
            self.arena.close()
        except InUseError:
            self.arena.allocate(256).close()
            with self.arena.tag("a tag"):
                self.arena.allocate(256).close()
            raise
        self.arena = self.opened()


class Shrink(Ground):
    def change(self) -> None:
        self.arena.shrink()


class SetLimit(Ground):
    refusals = (*REFUSALS, OutOfMemoryError)
    names = (*Ground.names, " limit ")

    def change(self) -> None:
        self.arena.set_limit(self.rng.choice([0, 1, NBYTES, 2 * NBYTES, 8 * NBYTES]))


class ResetStream(Ground):
    """Streams that no user has: their work is done, as the call demands."""

    def change(self) -> None:
        own = gpumem.Stream(self.arena.memory.device)
        self.arena.allocate(NBYTES, own).close()
        own.synchronize()
        self.arena.reset_stream(own)
        if self.arena.memory.host_accessible:  # where users queue nothing
            self.arena.reset_stream(None)


class EndPool(Ground):
    """A graph pool that serves the users' stream, from its capture to its close."""

    refusals = (*REFUSALS, OutOfMemoryError)

    def tensor(self, number: int) -> gpumem.Tensor:
        return gpumem.empty(NBYTES, "uint8", resource=self.arena, stream=self.stream)

    def change(self) -> None:
        with self.arena.capture(self.stream) as pool:
            time.sleep(0.0005)
        for _ in range(100):
            try:
                return pool.close()
            except InUseError:
                time.sleep(0)


class Release(Filled):
    """Rows of a virtual tensor: two for each user, of which one is used through `full` alone."""

    refusals = (*REFUSALS, ValueError)
    names = ("rows of pairs", "is being recorded already")

    def __init__(self, memory: str, rng: random.Random) -> None:
        super().__init__(memory, rng)
        self.rows = self.arena.virtual((2 * USERS, NBYTES), "uint8", step=1, name="rows of pairs")

    def tensor(self, number: int) -> gpumem.Tensor:
        self.rows.commit(number, number + 1)
        return self.rows.tensor(number, number + 1)[0]

    def row(self, number: int) -> gpumem.Tensor:
        self.rows.commit(USERS + number, USERS + number + 1)
        return self.rows.full[USERS + number]

    def change(self) -> None:
        first = self.rng.randrange(2 * USERS)
        self.rows.release(first, first + 1)


class Resize(Release):
    def change(self) -> None:
        self.rows.resize(self.rng.randrange(USERS + 1))  # commits none that is used through `full`


class CloseImport(Filled):
    """Memory of another owner, imported and closed again."""

    names = (*Ground.names, "this imported memory is closed", "ExternalMemory")

    def __init__(self, memory: str, rng: random.Random) -> None:
        self.file = os.memfd_create("pairs", os.MFD_CLOEXEC)
        os.truncate(self.file, USERS * NBYTES)
        super().__init__(memory, rng)
        self.imported = self.opened_import()

    def opened_import(self) -> Any:
        described = MemoryDescriptor(self.file, MemoryHandleType.MEMFD, USERS * NBYTES)
        return Importer.for_device(self.arena.memory.device).import_memory(described)

    def tensor(self, number: int) -> gpumem.Tensor:
        return self.imported.tensor(NBYTES, "uint8", offset=number * NBYTES)

    def change(self) -> None:
        self.imported.close(timeout=self.rng.choice([None, 0.001]))
        self.imported = self.opened_import()
        time.sleep(PAUSE)

    def end(self) -> None:
        super().end()
        self.imported.close()
        os.close(self.file)


class Drop(Ground):
    """One thread closes the block that another one uses."""

    def change(self) -> None:
        held = self.rng.choice(self.held)
        if held is not None:
            held.tensor.buffer.close()


CHANGES: dict[str, type[Ground]] = {
    "sleep": Sleep,
    "wake": Wake,
    "close": Close,
    "shrink": Shrink,
    "release": Release,
    "resize": Resize,
    "reset_stream": ResetStream,
    "end_pool": EndPool,
    "set_limit": SetLimit,
    "close_import": CloseImport,
    "drop_used": Drop,
}


# ---- uses ----------------------------------------------------------------------------------------


def _make(ground: Ground, number: int) -> Held:
    made = ground.tensor(number)
    held = Held(made, ground.rng.randrange(1, 256))
    made[...] = np.uint8(held.value)
    return held


def allocate(ground: Ground, held: Held, number: int) -> None:
    if not isinstance(ground, (Release, CloseImport)):  # there the next tensor is the same memory
        _make(ground, number).check()


def drop(ground: Ground, held: Held, number: int) -> None:
    ground.held[number] = None
    held.tensor.buffer.close()


def view(ground: Ground, held: Held, number: int) -> None:
    if not ground.arena.memory.host_accessible:  # a library's view may be there, not be used
        return held.check(held.tensor[:])
    array = held.tensor.numpy()
    held.check(array)
    array[...] = held.value = held.next()
    held.check(array)
    held.check(memoryview(held.tensor))


def read(ground: Ground, held: Held, number: int) -> None:
    for found in (held.tensor[-1].item(), *held.tensor[:: NBYTES // 8].tolist()):
        if found != held.value:
            raise WrongBytes(f"{found}, not {held.value}, in {held.tensor!r}")
    held.check()


def assign(ground: Ground, held: Held, number: int) -> None:
    held.tensor[...] = np.full(NBYTES, held.next(), "uint8")
    held.value = held.next()
    held.check()


def fill(ground: Ground, held: Held, number: int) -> None:
    # Work beside a stream that another thread captures has no order with that stream's.
    held.tensor.fill(held.next(), None if isinstance(ground, EndPool) else ground.side)
    held.value = held.next()
    held.check()


def copy(ground: Ground, held: Held, number: int) -> None:
    array = np.zeros(NBYTES, "uint8")
    gpumem.copy(array, held.tensor)
    held.check(array)
    array += np.uint8(1)
    array[array == 0] = 1
    gpumem.copy(held.tensor, array)
    held.value = held.next()
    held.check(held.tensor.to("host", copy=True))
    beside = ground.arena if not isinstance(ground, CloseImport) else None
    other = gpumem.empty(NBYTES, "uint8", memory=None if beside else "host", resource=beside)
    gpumem.copy(other, held.tensor)
    Held(other, held.value).check()


def full(ground: Ground, held: Held, number: int) -> None:
    if isinstance(ground, (Release, CloseImport)):
        held.value = held.next()
    value = held.value
    Held(ground.full(number, value), value).check()


def whole(ground: Ground, held: Held, number: int) -> None:
    """Use a row through `VirtualTensor.full`, which holds it only during a call."""
    drop(ground, held, number)
    row, value = ground.row(number), held.next()
    row.fill(value)
    for found in (row[-1].item(), *row[:: NBYTES // 8].tolist()):
        if found != value:
            raise WrongBytes(f"{found}, not {value}, in {row!r}")
    row[...] = np.full(NBYTES, held.value, "uint8")
    held.check(row.to("host", copy=True))


def export(ground: Ground, held: Held, number: int) -> None:
    if ground.arena.memory.host_accessible:
        held.check(np.from_dlpack(held.tensor))
    held.tensor.__dlpack__()
    held.tensor.buffer.__dlpack__()


def record(ground: Ground, held: Held, number: int) -> None:
    with gpumem.observe.record(ground.arena):
        allocate(ground, held, number)
        held.check()


USES = (allocate, drop, view, read, assign, fill, copy, full, whole, export, record)
PAIRS = tuple(f"{change}/{use.__name__}" for change in CHANGES for use in USES)


# ---- one pair ------------------------------------------------------------------------------------


@dataclass
class Result(Outcome):
    """What the threads of a pair did, and what went wrong."""

    turns: list[int] = field(default_factory=lambda: [0] * (USERS + 1))


def run_pair(name: str, memory: str, seed: int, seconds: float, rounds: int | None) -> Result:
    """Let users and one changing thread run for some seconds, or for some rounds of each user."""
    change, _, named = name.partition("/")
    use = next(each for each in USES if each.__name__ == named)
    ground = CHANGES[change](memory, random.Random(seed))
    result = Result()
    left = threading.Event()  # the users are done
    until = time.monotonic() + seconds

    def goes_on(number: int) -> bool:
        if result.problems or left.is_set():
            return False
        return result.turns[number] < rounds if rounds else time.monotonic() < until

    users = [_thread(_use, ground, use, number, goes_on, result) for number in range(USERS)]
    changer = _thread(_change, ground, left, result)
    _wait_for(users, result)
    left.set()
    _wait_for([changer], result)
    ground.held.clear()
    if not result.problems:
        ground.end()
    return result


def _thread(target: Callable, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=_told, args=(target, *arguments), daemon=True)
    thread.start()
    return thread


def _told(target: Callable, *arguments: Any) -> None:
    result: Result = arguments[-1]
    try:
        target(*arguments)
    except BaseException as error:
        result.wrong_bytes |= isinstance(error, WrongBytes)
        result.problems.append("".join(traceback.format_exception(error)))


def _use(
    ground: Ground, use: Callable, number: int, goes_on: Callable[[int], bool], result: Result
) -> None:
    while goes_on(number):
        result.turns[number] += 1
        try:
            if ground.held[number] is None:
                ground.held[number] = _make(ground, number)
            use(ground, ground.held[number], number)
        except ground.refusals as error:
            _require_named(ground, error)
            result.done[f"{type(error).__name__} of a use"] += 1
            if isinstance(error, ClosedError):
                ground.held[number] = None
        else:
            result.done["uses"] += 1
        if result.turns[number] % 3 == 0:
            ground.held[number] = None
            time.sleep(PAUSE)


def _change(ground: Ground, left: threading.Event, result: Result) -> None:
    while not (left.is_set() or result.problems):
        result.turns[USERS] += 1
        try:
            ground.change()
        except (InUseError, OutOfMemoryError) as error:
            _require_named(ground, error)
            result.done[f"{type(error).__name__} of a change"] += 1
            time.sleep(0.0001)
        else:
            result.done["changes"] += 1


def _require_named(ground: Ground, error: Exception) -> None:
    if not any(name in str(error) for name in ground.names):
        raise AssertionError(f"names no state of {ground.names[0]}: {error!r}") from error


def _wait_for(threads: list[threading.Thread], result: Result) -> None:
    """Join threads; end the process where none of them has moved for `PATIENCE` seconds."""
    seen, since = list(result.turns), time.monotonic()
    while any(thread.is_alive() for thread in threads):
        # Armed anew as long as this thread gets its turns, too.
        faulthandler.dump_traceback_later(2 * PATIENCE, exit=True)
        time.sleep(0.002)
        if result.turns != seen:
            seen, since = list(result.turns), time.monotonic()
        if time.monotonic() - since > PATIENCE:
            print(f"nothing moved for {PATIENCE} s", flush=True)
            faulthandler.dump_traceback(all_threads=True)
            os._exit(3)
    faulthandler.cancel_dump_traceback_later()


def run_pairs(names: list[str], memory: str, seed: int, seconds: float, rounds: int | None) -> int:
    """Run pairs in turn until the time is over, each of them at least once; the exit status."""
    faulthandler.enable()
    sys.setswitchinterval(SWITCH)
    rng = random.Random(seed)
    end = time.monotonic() + seconds
    total: Counter = Counter()
    each = min(0.5, seconds / len(names))
    while True:
        for name in names:
            print(f"{name}: ", end="", flush=True)
            result = run_pair(name, memory, rng.randrange(1 << 32), each, rounds)
            total += result.done
            print("WRONG" if result.problems else "ok", dict(sorted(result.done.items())))
            if result.problems:
                print("\n".join(result.problems), flush=True)
                os._exit(2 if result.wrong_bytes else 1)
        if rounds or time.monotonic() >= end:
            break
    print(", ".join(f"{count:,} {what}" for what, count in sorted(total.items())))
    print(f"{len(names)} pairs, 0 wrong bytes, 0 wrong errors")
    return 0
