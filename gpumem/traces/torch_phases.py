"""Phases in PyTorch's memory snapshots: ranges of ``record_function``, and passes by stacks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gpumem._events.labels import range_name
from gpumem._support.texts import shown, visible
from gpumem.errors import TraceError
from gpumem.traces.builder import TraceBuilder
from gpumem.traces.categories import KINDS
from gpumem.traces.torch_entries import integer
from gpumem.traces.trace import Frames

_NEVER = 1 << 62
_NONE, _FORWARD, _BACKWARD = range(3)
_AUTOGRAD = "/torch/autograd/__init__.py"
_MAX_NAME = 300


def add_phases(builder: TraceBuilder, snapshot: object) -> None:
    """Add the phases of a snapshot to the recorded entries of a device.

    Passes without a range are found by the stacks of allocations: autograd's threads have frames of
    its engine, or none of Python. Ranges of other threads and devices are phases, too.
    """
    ranges = sorted(_ranges(snapshot), key=lambda each: (each[1], -each[2]))
    begins = builder.events_until([begin - 1 for _, begin, _ in ranges])
    ends = builder.events_until([end for _, _, end in ranges])
    names = [name for name, _, _ in ranges]
    for phase in zip(names, begins, ends, strict=True):
        builder.add_phase(*phase)
    lacking = [
        number for number in (_FORWARD, _BACKWARD) if not any(map(KINDS[number - 1].search, names))
    ]
    events, stacks, frames = builder.allocations()
    passes = np.array([*map(_pass_of, frames), _NONE])
    if not np.any(passes == _FORWARD):
        return  # not a program of modules, or nothing has a stack
    passes[-1] = _BACKWARD
    found = passes[stacks]
    changes = np.flatnonzero(np.diff(found, prepend=_NONE, append=_NONE))
    limits = np.append(events, len(builder))
    for first, stop in zip(changes[:-1].tolist(), changes[1:].tolist(), strict=True):
        if found[first] in lacking:
            name = ("forward", "backward")[found[first] - 1]
            builder.add_phase(name, int(limits[first]), int(limits[stop]))


def _pass_of(stack: Frames) -> int:
    """Return the pass in which a stack allocates."""
    for file, _, name in stack:
        if name.startswith("torch::autograd::Engine") or file.endswith(_AUTOGRAD):
            return _BACKWARD
    return _FORWARD if any(name == "_call_impl" for _, _, name in stack) else _NONE


def _ranges(snapshot: object) -> Iterator[tuple[str, int, int]]:
    """Yield name, begin and end of the ranges of a snapshot, or raise TraceError."""
    listed = snapshot.get("external_annotations") if isinstance(snapshot, dict) else None
    if listed is None:
        return
    if not isinstance(listed, list):
        raise TraceError(
            f"the snapshot's external_annotations are {shown(listed)}, expected a list"
        )
    begun: dict[str, list[int]] = {}
    for index, entry in enumerate(listed):
        where = f"annotation {index}"
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise TraceError(f"{where} is {shown(entry)}, expected a dict with a name")
        name = visible(f"{range_name(entry['name']):.{_MAX_NAME}}")
        time_us = integer(entry, "time_us", where, default=0)
        if entry.get("stage") == "START":
            begun.setdefault(name, []).append(time_us)
        elif entry.get("stage") == "END":  # it may have begun before the recording
            yield name, begun[name].pop() if begun.get(name) else 0, time_us
    for name, times in begun.items():
        yield from ((name, time_us, _NEVER) for time_us in times)
