"""Which saved storages a step moves to the host, by its own estimate or by the step before it.

A step is a forward pass and its backward pass. Its points are the moments at which autograd saves a
storage, or needs it the first time. Bytes are those of the allocator, as they would be if nothing
were moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

AHEAD = 1
"""The points before its use at which a storage is on the GPU again at the latest."""
LOOK_AHEAD = 64
"""The storages that are brought back ahead at most, if there is room for them."""
_MARGIN = 32  # the part of the limit that is left to fragmentation
_GUESS = 4  # largest storages that an unknown step needs for a while, such as for gradients
_LIKENESS = 8  # a storage is the recorded one if its size differs by less than this part


@dataclass
class Item:
    """A storage that a step saves.

    Attributes
    ----------
    key : str
        The module that saved it.
    nbytes : int
        Bytes of the storage.
    begin : int
        Point at which it was saved.
    end : int or None
        Point at which it was needed; None: not yet, or never.
    frees : bool
        Whether the program had released it when it was needed, so that moving it frees memory.
    """

    key: str
    nbytes: int
    begin: int
    end: int | None = None
    frees: bool = True


@dataclass
class TrainingStep:
    """The storages of a step in the order in which they were saved, and the bytes at its points."""

    items: list[Item] = field(default_factory=list)
    lives: list[int] = field(default_factory=list)
    highest: int = 0  # bytes that were really allocated
    slack: int = 0  # bytes above those at the points that the step needs for a while
    largest: int = 0  # bytes of the largest storage


def choose(items: Sequence[Item], lives: Sequence[int], limit: float, scale: float = 1) -> set[int]:
    """Return the numbers of few items without which no point has more bytes than the limit.

    Those that live longest are chosen first, because their copies have the most time. `scale` is
    the size of the next step by that of the recorded one.
    """
    base = lives[0] if lives else 0
    excess = [base + (each - base) * scale - limit for each in lives]
    spans = {
        i: range(each.begin + 1, (len(lives) if each.end is None else each.end) - AHEAD)
        for i, each in enumerate(items)
        if each.frees
    }
    chosen: list[int] = []
    for i in sorted(spans, key=lambda i: (-len(spans[i]), i)):
        if any(excess[point] > 0 for point in spans[i]):
            chosen.append(i)
            for point in spans[i]:
                excess[point] -= items[i].nbytes * scale
    for i in reversed(chosen):
        nbytes = items[i].nbytes * scale
        if all(excess[point] + nbytes <= 0 for point in spans[i]):
            chosen.remove(i)
            for point in spans[i]:
                excess[point] += nbytes
    return set(chosen)


class Planner:
    """Decides for each saved storage whether it moves; it sees steps go by and learns from them.

    Attributes
    ----------
    limit : int
        Bytes that the allocator may hold.
    coming : int
        Bytes of gradients that the backward pass of a first step will allocate.
    out : int
        Bytes that are on the host now and not on the GPU.
    step : TrainingStep
        The step under way.
    plan : TrainingStep or None
        The recorded step that it follows. None: there is none, or it differs; then a running
        estimate decides.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.coming = 0
        self.out = 0
        self.step = TrainingStep()
        self.plan: TrainingStep | None = None
        self._steps: dict[str, TrainingStep] = {}  # the last one by the key of its first item
        self._chosen: set[int] = set()
        self._solved: tuple[object, ...] = ()
        self._scale = 1.0
        self._peak: int | None = None
        self._out = 0  # at the last point
        self._is_backward = False

    def save(self, key: str, nbytes: int, live: int, peak: int) -> bool:
        """Note that a storage is saved; return whether it moves. `live` bytes are allocated."""
        if self._is_backward:
            self.end_step()
        self._add_point(live, peak)
        step = self.step
        number = len(step.items)
        step.largest = max(step.largest, nbytes)
        step.items.append(Item(key, nbytes, len(step.lives) - 1))
        if number == 0:
            self._follow(key, nbytes, live)
        elif self.plan is not None and not self._is_like(number, key, nbytes):
            self.plan = None
        if self.plan is not None:
            step.items[number].frees = self.plan.items[number].frees
            return number in self._chosen or live > self.limit
        # Without a record, half of what is left is for the rest of the step.
        start = step.lives[0]
        return live > start + (self.usable() - start - self.coming) / 2

    def need(self, step: TrainingStep, number: int, live: int, peak: int, *, frees: bool) -> None:
        """Note that the backward pass of a step needs a storage."""
        item = step.items[number]
        if step is not self.step or item.end is not None:
            return
        self._is_backward = True
        self._add_point(live, peak)
        item.end, item.frees = len(step.lives) - 1, item.frees and frees

    def has_room(self, number: int, live: int) -> bool:
        """Whether a storage can be brought back now, where `live` bytes are allocated.

        Those that are needed before it are back then. Twice the known slack is left: the slack of a
        point is only seen where it makes a new peak.
        """
        rise = 0.0
        if self.plan is not None:
            here = len(self.step.lives) - 1
            lives = self.plan.lives[here : self.plan.items[number].end]
            rise = (max(lives) - lives[0]) * self._scale if lives else 0
        room = self.usable() - max(self.step.slack, _GUESS * self.step.largest)
        return live + self.step.items[number].nbytes + rise <= room

    def order(self) -> list[int]:
        """Return the numbers of the items of this step, as its backward pass will need them."""
        numbers = range(len(self.step.items))
        if self.plan is None:
            return list(reversed(numbers))
        ends = [math.inf if each.end is None else each.end for each in self.plan.items]
        return sorted(numbers, key=ends.__getitem__)

    def end_step(self) -> None:
        """Keep the step under way as the plan of a next one like it."""
        step, self.step = self.step, TrainingStep(slack=self.step.slack)
        self._is_backward = False
        if self.plan is not None and step.highest > self.limit:
            step.slack += step.highest - self.limit
        if step.items:
            self._steps[step.items[0].key] = step

    def _add_point(self, live: int, peak: int) -> None:
        step = self.step
        if self._peak is not None and peak > self._peak:
            before = step.lives[-1] if step.lives else live + self.out
            # A storage that moves counts as out before the program has released it.
            out = min(self.out, self._out)
            step.slack = max(step.slack, peak + out - max(before, live + self.out))
            step.highest = max(step.highest, peak)
        self._peak, self._out = peak, self.out
        step.lives.append(live + self.out)
        step.highest = max(step.highest, live)

    def usable(self) -> int:
        """Return the bytes that the points of the step may have."""
        slack = max(self.step.slack, self.limit // _MARGIN)
        if self.plan is None:
            slack = max(slack, _GUESS * self.step.largest)
        return self.limit - slack

    def _follow(self, key: str, nbytes: int, live: int) -> None:
        plan = self.plan = self._steps.get(key)
        if plan is None:
            return
        self._scale = nbytes / plan.items[0].nbytes
        self.step.slack = round(plan.slack * self._scale)
        limit = self.usable() - (live + self.out - plan.lives[0])
        question = (plan.lives, [each.end for each in plan.items], limit, self._scale)
        if question != self._solved:
            self._solved = question
            self._chosen = choose(plan.items, plan.lives, limit, self._scale)

    def _is_like(self, number: int, key: str, nbytes: int) -> bool:
        if self.plan is None or number >= len(self.plan.items):
            return False
        recorded = self.plan.items[number]
        return recorded.key == key and (
            abs(nbytes - recorded.nbytes * self._scale) * _LIKENESS <= nbytes
        )
