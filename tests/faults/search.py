"""Runs a scenario once for every call and error, and compares what is left of each run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

import gpumem
from gpumem._testing import host_device

from ..helpers.descriptors import open_descriptors
from ..helpers.quiesce import held_by_kind, quiesce
from ..helpers.threads import in_a_thread
from .kinds import DriverCalls, Fault, Kind
from .stage import Stage, Wrong

# What a refusal of these functions may leave with the driver: it has no memory, nothing refers to
# it, and a driver that refuses such a call has lost its context.
MAY_STAY = {
    "cuEventDestroy": {"events"},
    "cuStreamDestroy": {"streams"},
    "cuMemAddressFree": {"reservations"},
    "cuCtxPushCurrent": {"events", "streams", "reservations"},
}

Scenario = Callable[[Stage], None]


@dataclass
class Outcome:
    """What the runs of one scenario came to."""

    calls: int = 0
    runs: int = 0
    seen: Counter[tuple[str, str | None]] = field(default_factory=Counter)  # function, error class
    problems: list[str] = field(default_factory=list)

    def note(self, stage: Stage, problem: str | None) -> None:
        """Count a run."""
        self.runs += 1
        happened = stage.happened
        if happened:
            self.seen[happened.function, happened.raised] += 1
        if problem:
            where = f"{happened.function} in {happened.step!r}" if happened else "no fault"
            self.problems.append(f"{stage.fault}, {where}: {problem}")


def search(
    scenario: Scenario,
    seed: int,
    errors_of: Callable[[int], Iterable[int]],
    choose: Callable[[int], Iterable[int]] = lambda total: count(1),
    tell: Callable[[str], None] = lambda text: None,
    kind: Kind | None = None,
) -> Outcome:
    """Let each call fail that `choose` names, given how many there are.

    By default these are call 1, call 2, ..., until a run has no such call.
    """
    outcome = Outcome()
    kind = kind or DriverCalls()
    for _ in range(2):  # what is made once per process is there from now on
        stage, _problem = perform(scenario, None, seed, kind)
        expected = left()
    for number in choose(stage.calls):
        for error in errors_of(number):
            tell(f"call {number}, error {error}")
            stage, problem = perform(scenario, Fault(number, error), seed, kind)
            found = left()
            outcome.note(stage, problem or leaked(stage, expected, found))
            expected = found
        if not stage.happened and stage.calls < number:
            break
        outcome.calls += 1
    return outcome


def perform(
    scenario: Scenario, fault: Fault | None, seed: int, kind: Kind
) -> tuple[Stage, str | None]:
    """Run once, in a thread of its own: a pop that fails leaves its context on the stack."""
    stage = Stage(fault, random.Random(seed), kind)
    problem = None
    try:
        in_a_thread(lambda: scenario(stage))
    except Exception as error:
        if fault is None:
            raise
        name = "" if isinstance(error, Wrong) else f"{type(error).__name__}: "
        problem = f"{name}{error}"
        error.__traceback__ = error.__cause__ = error.__context__ = None
    finally:
        kind.disarm()
        stage.held.clear()
        stage.resources.clear()
    return stage, problem


@dataclass(frozen=True)
class Left:
    """What exists at one moment."""

    live: dict[str, int]  # the device's objects
    used: int  # bytes of the device
    files: dict[int, str]  # open descriptors


def left() -> Left:
    """Release what nothing refers to, and return what exists then."""
    quiesce()
    with gpumem.Arena("host", {"backing": "regions"}) as arena:
        arena.allocate(256).close()  # the stream that gives regions back stays for good
    return Left(held_by_kind(), host_device.used(0), open_descriptors())


def leaked(stage: Stage, expected: Left, found: Left) -> str | None:
    """Tell what a run left behind, but for what may stay."""
    may_stay = MAY_STAY.get(stage.happened.function, set()) if stage.happened else set()
    live = {name: number - expected.live[name] for name, number in found.live.items()}
    extra = {name: number for name, number in live.items() if number}
    same = (found.used, found.files) == (expected.used, expected.files)
    if same and (not extra or (extra.keys() <= may_stay and sum(extra.values()) == 1)):
        return None
    files = {number: link for number, link in found.files.items() if number not in expected.files}
    return f"left behind: {extra}, {found.used - expected.used} bytes of the device, files {files}"
