"""Which blocks were alive, why, and in which phase: groups of a trace's allocations, and phases."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpumem._support.arguments import refuse, require_each
from gpumem._support.texts import shown
from gpumem.errors import ConfigError
from gpumem.traces.frames import line_of, own_frames
from gpumem.traces.trace import Details, Frames, Phase, Trace

OUTSIDE = "outside of phases"
NO_STACK = "no stack"
NO_MODULE = "no module"
REST = "no rule"
_MAX_DEPTH = 16  # of phases that are named together

Rules: TypeAlias = Sequence[tuple[str, str]]
"""Names and regular expressions of groups."""


class Groups(NamedTuple):
    """A group of each allocation.

    Attributes
    ----------
    of : ndarray of int64, shape (allocs,)
        Index of `names`.
    names : tuple of str
    """

    of: NDArray[np.int64]
    names: tuple[str, ...]


def groups_of(trace: Trace, by: str = "owner", rules: Rules = ()) -> Groups | None:
    """Group the allocations of a trace.

    Parameters
    ----------
    trace : Trace
    by : str
        One of `GROUPINGS`. "phase" is the innermost one in which a block was allocated, with those
        around it; "function" and "file" are of the innermost line outside of libraries.
    rules : sequence of (str, str)
        Name and regular expression of groups; the first that is found in the owner of a block, or
        in a frame, ``file:line name``, applies. Without rules, or for "rule" alone, `by` counts.

    Returns
    -------
    Groups or None
        None: the trace does not have it.

    Raises
    ------
    ConfigError
        `by` is unknown, or a rule is not a regular expression.
    """
    if by not in GROUPINGS and by != "rule":
        expected = ", ".join([*GROUPINGS, "rule"])
        raise ConfigError(f"invalid grouping = {shown(by)}: expected {expected}")
    details = trace.details
    if details is None:
        return None
    if by == "rule":
        return _by_rules(details, rules)
    return GROUPINGS[by](trace, details)


def bytes_at(trace: Trace, event: int, groups: Groups) -> list[tuple[str, int, int]]:
    """Return name, bytes and blocks of the groups that are alive after an event, largest first."""
    begin, end = trace.lives()
    alive = (begin <= event) & (end > event)
    of, size = groups.of[alive], trace.size[begin[alive]]
    nbytes = np.bincount(of, size.astype(np.float64), len(groups.names)).astype(np.int64)
    count = np.bincount(of, minlength=len(groups.names))
    order = np.argsort(-nbytes, kind="stable")
    found = [(groups.names[n], int(nbytes[n]), int(count[n])) for n in order.tolist()]
    return [row for row in found if row[2]]


def peak_event(trace: Trace) -> int:
    """Return the first event after which the most bytes are live; 0 without events."""
    return int(np.argmax(trace.live_bytes())) if trace.events else 0


# ---- groupings -----------------------------------------------------------------------------------


def _by_owner(trace: Trace, details: Details) -> Groups | None:
    if not any(details.owners):
        return None
    names = tuple(name or "unnamed" for name in details.owners)
    return Groups(details.owner.astype(np.int64), names)


def _by_category(trace: Trace, details: Details) -> Groups | None:
    if details.category is None:
        return None
    return Groups(details.category.astype(np.int64), details.categories)


def _by_phase(trace: Trace, details: Details) -> Groups | None:
    number = innermost(details.phases, trace.events)[trace.lives()[0]] if details.phases else None
    return _grouped(number, phase_paths(details.phases), OUTSIDE)


def _by_stack(name_of: Callable[[Frames], str]) -> Callable[[Trace, Details], Groups | None]:
    return lambda _, details: _grouped(details.stack, map(name_of, details.stacks), NO_STACK)


def _grouped(
    number: NDArray[np.integer[Any]] | None, names: Iterable[str], missing: str
) -> Groups | None:
    """Group by the numbers of names, of which some may be alike; -1 means the missing one."""
    if number is None:
        return None
    places = {missing: 0}
    of = np.array([0, *(places.setdefault(name, len(places)) for name in names)])
    return Groups(of[number.astype(np.int64) + 1], tuple(places))


GROUPINGS: dict[str, Callable[[Trace, Details], Groups | None]] = {
    "owner": _by_owner,
    "category": _by_category,
    "phase": _by_phase,
    "module": lambda _, details: _grouped(details.module, details.modules, NO_MODULE),
    "stack": _by_stack(lambda stack: " < ".join(map(line_of, own_frames(stack)))),
    "function": _by_stack(lambda stack: own_frames(stack)[0][2]),
    "file": _by_stack(lambda stack: own_frames(stack)[0][0]),
}
"""Functions that group by each name but "rule"."""


def expressions_of(rules: Rules) -> list[tuple[str, re.Pattern[str]]]:
    """Compile rules, or raise TypeError or ConfigError."""
    found = []
    for rule in require_each("rules", rules, (tuple, list), "a name and a regular expression"):
        if len(rule) != 2 or not all(isinstance(part, str) for part in rule):
            refuse("rule", rule, "two str: a name and a regular expression")
        name, text = rule
        try:
            found.append((name, re.compile(text, re.MULTILINE)))
        except re.error as error:
            raise ConfigError(
                f"invalid rule {shown(name)}: {shown(text)} is not a regular expression: {error}"
            ) from None
    return found


def _by_rules(details: Details, rules: Rules) -> Groups | None:
    """Group by the first rule that is found in the owner or the stack."""
    of_owner = np.full(len(details.owners), len(rules))
    of_stack = np.full(len(details.stacks) + 1, len(rules))  # the last: no stack
    for place, (_, expression) in reversed(list(enumerate(expressions_of(rules)))):
        of_owner[[*map(bool, map(expression.search, details.owners))]] = place
        texts = (
            "\n".join(f"{file}:{line} {name}" for file, line, name in stack)
            for stack in details.stacks
        )
        of_stack[[*map(bool, map(expression.search, texts)), False]] = place
    first = of_owner[details.owner]
    if details.stack is not None:
        first = np.minimum(first, of_stack[details.stack])
    return _grouped(first, [*(name for name, _ in rules), REST], REST)


# ---- phases --------------------------------------------------------------------------------------


class PhaseUse(NamedTuple):
    """The memory of all phases of one name.

    Attributes
    ----------
    name : str
        Those around it are named before it.
    times : int
        Number of the phases.
    peak : int
        Largest number of bytes that are live in any of them.
    at : int
        The event after which they are.
    growth : int
        Largest number of bytes that are live at the end of one more than at its begin.
    """

    name: str
    times: int
    peak: int
    at: int
    growth: int


def phase_at(trace: Trace, event: int) -> str:
    """Name the innermost phase that is open at an event, behind those around it; "": none."""
    phases = trace.details.phases if trace.details else ()
    number = int(innermost(phases, trace.events)[event]) if trace.events else -1
    return phase_paths(phases)[number] if number >= 0 else ""


def phase_table(trace: Trace) -> list[PhaseUse]:
    """Return the memory of the phases by name, in the order in which they began."""
    phases = trace.details.phases if trace.details else ()
    live = np.concatenate([np.zeros(1, np.int64), trace.live_bytes()])  # by events before
    rows: dict[str, PhaseUse] = {}
    for phase, name in zip(phases, phase_paths(phases), strict=True):
        highest = phase.begin + int(np.argmax(live[phase.begin : phase.end + 1]))
        peak, growth = int(live[highest]), int(live[phase.end] - live[phase.begin])
        row = rows.get(name, PhaseUse(name, 0, -1, 0, growth))
        at = row.at if row.peak >= peak else max(highest - 1, 0)
        most = max(row.peak, peak), at, max(row.growth, growth)
        rows[name] = PhaseUse(name, row.times + 1, *most)
    return list(rows.values())


def phase_paths(phases: Iterable[Phase]) -> list[str]:
    """Return the name of each phase, behind those of the phases around it."""
    open_now: list[tuple[Phase, str]] = []
    paths = []
    for phase in phases:
        open_now = [each for each in open_now if each[0].end > phase.begin]
        around = [path for each, path in open_now if each.end >= phase.end][-1:]
        if len(open_now) > _MAX_DEPTH:
            around = []  # a function that calls itself
        paths.append(" / ".join([*around, phase.name]))
        open_now.append((phase, paths[-1]))
    return paths


def innermost(phases: Sequence[Phase], events: int) -> NDArray[np.int64]:
    """Return the number of the innermost phase that is open at each event; -1: none."""
    found = np.full(events, -1)
    for number, phase in enumerate(phases):
        found[phase.begin : phase.end] = number
    return found
