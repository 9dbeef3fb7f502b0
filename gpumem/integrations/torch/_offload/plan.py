"""Which saved storages a step moves to the host, by its own estimate or by the step before it.

A step is a forward pass and its backward pass. Its points are the moments at which autograd saves a
storage, or needs it the first time. Bytes are those of the allocator, as they would be if nothing
were moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

AHEAD = 1
"""The points before its use at which a storage is on the GPU again at the latest."""
_MARGIN = 128  # the part of the limit that is left, beside the known fragmentation
_MAX_WASTE = 8  # the part of it that the memory between blocks is taken for at most
_MAX_LACK = 16, 4  # the same after refusals, without storages that are back early and beside them
_CALM = 4  # steps without a refusal after which a quarter of the known fragmentation is forgotten
_GUESS = 4  # largest storages that an unknown step needs for a while, such as for gradients
_GRAINS = 512  # parts of the limit by which steps differ at least
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
    """The storages of a step in the order in which they were saved, and the bytes at its points.

    Attributes
    ----------
    items : list of Item
        The storages.
    lives : list of int
        Bytes at each point.
    bounds : list of float
        Bytes above those of both its ends that the time before each point needs at most.
    highest : int
        Bytes that were really allocated at the highest point.
    waste : int
        Bytes between the blocks at that point, which no large block can have.
    slack : int
        The most bytes that were seen to be needed between two points, above those at both.
    largest : int
        Bytes of the largest storage.
    tops : list of float
        Bytes that the time before each point needs. Known at the step's end.
    """

    items: list[Item] = field(default_factory=list)
    lives: list[int] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    highest: int = 0
    waste: int = 0
    slack: int = 0
    largest: int = 0
    tops: list[float] = field(default_factory=list)

    def end(self) -> None:
        # Slack is only seen where it makes a new peak; elsewhere there may be more of it. None is
        # seen below a peak of the time before, such as of a step without offload.
        slack = self.slack or self.largest
        self.tops = [
            max(pair) + min(bound, 2 * slack)
            for pair, bound in zip(pairwise([0, *self.lives]), self.bounds, strict=True)
        ]


def choose(
    items: Sequence[Item], tops: Sequence[float], limit: float, scale: float = 1
) -> set[int]:
    """Return the numbers of few items without which no time has more bytes than the limit.

    Of those that live at least half as long as the longest, the largest are chosen first: few
    copies, and places that any later block fits into. Then those that live longest, because their
    copies have the most time. `scale` is the size of the next step by that of the recorded one.
    """
    base = tops[0] if tops else 0
    above = base + (np.array(tops, float) - base) * scale - limit
    high = np.flatnonzero(above > 0)
    excess = above[high]
    begins = [each.begin + 1 for each in items]
    ends = [len(tops) if each.end is None else each.end - AHEAD + 1 for each in items]
    bounds = zip(np.searchsorted(high, begins), np.searchsorted(high, ends), strict=True)
    spans = {
        i: slice(*span) for i, span in enumerate(bounds) if items[i].frees and span[0] < span[1]
    }
    lengths = {i: ends[i] - begins[i] for i in spans}
    half = max(lengths.values(), default=0) / 2
    ranked = sorted(spans, key=lambda i: (-lengths[i], i))
    long = [i for i in ranked if lengths[i] >= half]
    chosen: list[int] = []
    for i in sorted(long, key=lambda i: -items[i].nbytes) + ranked[len(long) :]:
        if excess[spans[i]].max() > 0:
            chosen.append(i)
            excess[spans[i]] -= items[i].nbytes * scale
    for i in reversed(chosen):
        nbytes = items[i].nbytes * scale
        if excess[spans[i]].max() + nbytes <= 0:
            chosen.remove(i)
            excess[spans[i]] += nbytes
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
    out_before : int
        Those as the time since the last point began.
    leaving : int
        Bytes that are copied to the host, and can be freed on the GPU at any time.
    step : TrainingStep
        The step under way.
    plan : TrainingStep or None
        The recorded step that it follows. None: there is none, or it differs; then a running
        estimate decides.
    """

    def __init__(self, limit: int, *, sees_peaks: bool = False) -> None:
        self.limit = limit
        self._sees_peaks = sees_peaks
        self.coming = 0
        self.out = self.leaving = 0
        self.step = TrainingStep()
        self.plan: TrainingStep | None = None
        self._wanted = 0  # bytes with a request that was refused since the last point
        self._calm = 0  # steps since the last refusal
        self._steps: dict[str, TrainingStep] = {}  # the last one by the key of its first item
        self._chosen: set[int] = set()
        self._solved: tuple[object, ...] = ()
        self._scale = 1.0
        self._peak: int | None = None
        self._live = self.out_before = 0  # at the last point
        self._waste = [0, 0]  # without storages that are back early, and beside them
        self._is_backward = False

    def save(self, key: str, nbytes: int, live: int, peak: int, waste: int = 0) -> bool:
        """Note that a storage is saved; return whether it moves.

        `live` bytes are allocated, at most `peak` were, and `waste` lie between blocks.
        """
        if self._is_backward:
            self.end_step()
        self._add_point(live, peak, waste)
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
            return number in self._chosen or live - self.leaving > self.limit
        # Without a record, half of what is left is for the rest of the step.
        start = step.lives[0]
        return live - self.leaving > start + (self.usable() - start - self.coming) / 2

    def need(
        self, step: TrainingStep, number: int, live: int, peak: int, waste: int = 0, *, frees: bool
    ) -> None:
        """Note that the backward pass of a step needs a storage."""
        item = step.items[number]
        if step is not self.step or item.end is not None:
            return
        self._is_backward = True
        self._add_point(live, peak, waste)
        item.end, item.frees = len(step.lives) - 1, item.frees and frees

    def has_room(self, number: int, live: int) -> bool:
        """Whether a storage can be brought back now, where `live` bytes are allocated.

        Those that are needed before it are back then.
        """
        end: int | None = len(self.step.lives)
        if self.plan is not None:
            end = self.plan.items[number].end
            if end is not None and end - len(self.step.lives) < AHEAD:
                return True  # the plan has room for it
        return self.step.items[number].nbytes <= self.room(live, end)

    def room(self, live: int, end: int | None = 0) -> float:
        """Return the bytes that nothing needs up to a point, or up to the next one.

        `live` bytes are allocated.
        """
        if self.plan is None:
            known = max(self.step.slack, _GUESS * self.step.largest) if end else 0
            return self.usable() - known - live
        here = len(self.step.lives) - 1
        tops = self.plan.tops[here + 1 : None if end is None else max(end, here + 1) + 1]
        rise = max(tops, default=0) - self.plan.lives[here] if tops else 0
        return (self.limit - self.margin) - live - max(rise, 0) * self._scale

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
        step.end()
        self._calm += 1
        if self._calm > _CALM:
            self._waste = [each - each // 4 for each in self._waste]
            self._calm = 1
        between = min(step.waste, self.limit // _MAX_WASTE)
        self._waste = [max(between, each) for each in self._waste]
        if step.items:
            self._steps[step.items[0].key] = step

    def refuse(self, nbytes: int, live: int, *, early: bool) -> None:
        """Note that a request was refused, though the limit has room for it beside `live` bytes.

        `early`: storages were back that nothing had needed yet.
        """
        waste = min(self.limit - live - nbytes, self.limit // _MAX_LACK[early])
        self._waste[early] = max(self._waste[early], waste)
        self._wanted = max(self._wanted, live + nbytes + self.out)
        self._calm = 0

    def _add_point(self, live: int, peak: int, waste: int) -> None:
        step = self.step
        if live >= step.highest:
            step.waste = waste
        bound = math.inf  # the program has begun a new peak
        if self._peak is not None and (self._sees_peaks or peak > self._peak):
            before = step.lives[-1] if step.lives else live + self.out
            # A storage that moves counts as out before the program has released it.
            out = min(self.out, self.out_before)
            bound = max(peak + out, self._wanted) - max(before, live + self.out)
            bound = max(bound, 0)
            step.slack = max(step.slack, int(bound))
            step.highest = max(step.highest, peak)
        elif peak == self._peak:
            bound = peak - max(live, self._live)
        self._peak, self._live, self.out_before, self._wanted = peak, live, self.out, 0
        step.lives.append(live + self.out)
        step.bounds.append(bound if len(step.lives) > 1 else 0)
        step.highest = max(step.highest, live)

    @property
    def margin(self) -> int:
        """Bytes of the limit that are left to fragmentation, and to copies under way."""
        share = self.limit // _MARGIN
        return share + max(*self._waste[: 1 + self._is_backward], share)

    def usable(self) -> int:
        """Return the bytes that the points of a step without a plan may have."""
        return self.limit - max(self.step.slack, self.margin, _GUESS * self.step.largest)

    def _follow(self, key: str, nbytes: int, live: int) -> None:
        plan = self.plan = self._steps.get(key)
        if plan is None:
            return
        self._scale = nbytes / plan.items[0].nbytes
        self.step.slack = round(plan.slack * self._scale)
        limit = (self.limit - self.margin) - (live + self.out - plan.lives[0])
        # Small differences between steps do not cost a new choice.
        grain = self.limit // _GRAINS + 1
        rounded = [round(each / grain) for each in (limit, *plan.tops)]
        question = (rounded, [each.end for each in plan.items], round(self._scale, 3))
        if question != self._solved:
            self._solved = question
            self._chosen = choose(plan.items, plan.tops, limit, self._scale)

    def _is_like(self, number: int, key: str, nbytes: int) -> bool:
        if self.plan is None or number >= len(self.plan.items):
            return False
        recorded = self.plan.items[number]
        return recorded.key == key and (
            abs(nbytes - recorded.nbytes * self._scale) * _LIKENESS <= nbytes
        )
