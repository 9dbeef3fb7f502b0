"""Runs for reports: small ones of known figures, one of many owners, one of a million events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gpumem.traces import Curve, Details, Segments, Trace
from gpumem.traces.frames import line_of, own_frames

MIB = 1 << 20


def small_run() -> Trace:
    """Make a run of two streams: 1, 2 and 4 MiB; the 2 MiB are never freed. 7 MiB live at most."""
    return Trace(
        action=[0, 0, 0, 1, 2, 2],
        block=[0, 1, 2, 2, 2, 0],
        size=[1 * MIB, 2 * MIB, 4 * MIB, 4 * MIB, 4 * MIB, 1 * MIB],
        stream=[0, 0, 1, 1, 1, 0],
        time_us=[0, 1_000_000, 2_000_000, 3_000_000, 3_500_000, 4_000_000],
        name="small run",
    )


LOAD = (("/job/train.py", 3, "load"), ("/job/train.py", 40, "main"))
FORWARD = (("/lib/torch/nn.py", 9, "call"), ("/job/model.py", 7, "forward"), *LOAD[1:])


def told_run(name: str = "told", more: int = 0, **meta: int) -> Trace:
    """Make a run with owners, stacks, addresses and segments; 7 MiB live at most, at event 3.

    4 MiB of weights, which stay, and 2 MiB of activations lie in a segment of 8 MiB; 1 MiB of a
    workspace, without a stack, in a segment of 4 MiB that lasts as long. `more` is added
    to the bytes of the activations.
    """
    base, far = 0x10000000, 0x40000000
    details = Details(
        address=np.array([base, base + 4 * MIB, far], np.uint64),
        owner=np.array([0, 1, 2], np.int32),
        owners=("weights", "activations", "workspace"),
        streams=("default", "copies"),
        held=Curve(np.array([0, 2, 5]), np.array([8, 12, 8]) * MIB),
        stack=np.array([0, 1, -1], np.int32),
        stacks=(LOAD, FORWARD),
        segments=Segments(
            np.array([base, far], np.uint64),
            np.array([8, 4]) * MIB,
            np.array([0, 2]),
            np.array([-1, 5]),
        ),
    )
    activations = 2 * MIB + more
    return Trace(
        action=[0, 0, 0, 2, 2],
        block=[0, 1, 2, 1, 2],
        size=[4 * MIB, activations, MIB, activations, MIB],
        stream=[0, 0, 1, 0, 1],
        time_us=[0, 1_000_000, 2_000_000, 3_000_000, 4_000_000],
        name=name,
        meta=meta,
        details=details,
    )


def with_details(run: Trace, **details: Any) -> Trace:
    """Make a run with other details."""
    assert run.details is not None
    return replace(run, details=replace(run.details, **details))


def million_events(events: int = 1_000_000, streams: int = 4, seed: int = 7) -> Trace:
    """Make a run in which a few thousand blocks of many sizes live at once."""
    rng = np.random.default_rng(seed)
    allocs = events // 2
    size = (2.0 ** rng.uniform(8, 24, allocs)).astype(np.int64)
    begin = np.sort(rng.uniform(0, 60e6, allocs))
    end = begin + rng.exponential(0.2e6, allocs)
    time = np.concatenate([begin, end])
    order = np.argsort(time, kind="stable")
    number = np.concatenate([np.arange(allocs)] * 2)[order]
    return Trace(
        action=np.repeat([0, 2], allocs)[order],
        block=number,
        size=size[number],
        stream=(number % streams),
        time_us=time[order].astype(np.int64),
        name="a million events",
    )


def many_owners(owners: int = 223) -> Trace:
    """Make a run in which lines of two functions own 1 MiB each, and 20 s pass before them.

    A third of the lines is in ``attend``, the others in ``project``; a ``probe`` owns 4 KiB from
    the beginning.
    """
    probe = (("/job/probe.py", 1, "probe"), ("/job/train.py", 9, "main"))
    stacks = [probe]
    for n in range(owners - 1):
        inner, caller = ("attend", 20) if n % 3 == 0 else ("project", 30)
        callee = ("/job/nn/block.py", 100 + n, inner)
        library = ("/lib/torch/nn.py", 7, "call")
        stacks.append((library, callee, ("/job/model.py", caller, "forward"), probe[1]))
    names = [line_of(own_frames(stack)[0]) for stack in stacks]
    number = np.arange(owners)
    return Trace(
        action=[0] * owners,
        block=number,
        size=[4096, *[MIB] * (owners - 1)],
        stream=[0] * owners,
        time_us=[0, *range(20_000_000, 20_000_000 + 1000 * (owners - 1), 1000)],
        name="many owners",
        details=Details(
            address=4096 + number.astype(np.uint64) * MIB,
            owner=number.astype(np.int32),
            owners=tuple(names),
            streams=("legacy default",),
            held=None,
            stack=number.astype(np.int32),
            stacks=tuple(stacks),
        ),
    )
