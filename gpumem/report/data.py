"""The data of a page: facts as JSON, columns as packed numbers."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpumem._events.refusals import RefusedRequest
from gpumem._support.texts import counted
from gpumem.errors import TraceError
from gpumem.replay.policies import PAGES, Policy, policies, policy
from gpumem.report.blocks import MAX_BLOCKS, BlockTable, blocks_of, draw_together, owners_of
from gpumem.traces import ALLOC, Curve, Segments, Trace
from gpumem.traces.frames import own_frames
from gpumem.traces.groups import (
    Groups,
    Rules,
    bytes_at,
    groups_of,
    peak_event,
    phase_at,
    phase_table,
)
from gpumem.traces.trace import Frames


@dataclass(frozen=True)
class Figures:
    """The main figures of a trace.

    Attributes
    ----------
    name : str
        Name of the trace, or of one of several runs.
    events, allocations, streams : int
        Number of each. An event is an allocation or a free, as the page counts them: a request
        for a free, which some traces also hold, is not one, nor is a block of 0 bytes.
    peak_live_bytes : int
        Maximum of live bytes, as requested.
    live_at_end_blocks, live_at_end_bytes : int
        Blocks and bytes live at the end.
    failed_allocs : int
        Failed allocations, as far as the file records them.
    lost_events : int
        Events that the recording lost, as far as it knows: the oldest ones of a ring, those that
        did not fit on a full disk, those that a torn file holds in part.
    """

    name: str
    events: int
    allocations: int
    streams: int
    peak_live_bytes: int
    live_at_end_blocks: int
    live_at_end_bytes: int
    failed_allocs: int
    lost_events: int


def figures_of(trace: Trace, blocks: BlockTable) -> Figures:
    """Compute the main figures of a trace."""
    return Figures(
        name=trace.name,
        events=len(blocks.moving),
        allocations=trace.allocs,
        streams=trace.streams,
        peak_live_bytes=trace.peak_requested,
        live_at_end_blocks=int(np.count_nonzero(~blocks.freed)),
        live_at_end_bytes=int(blocks.size[~blocks.freed].sum()),
        failed_allocs=len(trace.details.refusals) if trace.details else 0,
        lost_events=_plain_int(trace.meta, "lost") + _plain_int(trace.meta, "torn"),
    )


def notice_of(trace: Trace) -> str:
    """Describe the gaps of a trace; "" if it has none."""
    lost, torn = _plain_int(trace.meta, "lost"), _plain_int(trace.meta, "torn")
    begun = trace.meta.get("began_with")
    texts = []
    if lost and isinstance(begun, int):
        texts.append(
            f"The {counted(lost, 'event')} before the first one shown {_were(lost)} lost: the "
            f"report begins with the {counted(begun, 'block')} live then."
        )
    elif lost:
        texts.append(
            f"{counted(lost, 'event')} {_were(lost)} lost: blocks may be missing, or shown as live "
            "at the end."
        )
    if torn:
        texts.append(
            f"The file is torn, {counted(torn, 'event')} {_were(torn)} not whole: blocks may be "
            "missing, or shown as live at the end."
        )
    told = trace.meta.get("notice")
    return " ".join([*texts, *([told] if isinstance(told, str) and told else [])])


def notice_of_runs(traces: Sequence[Trace], labels: Sequence[str]) -> str:
    """Describe the gaps of all traces of a page, each under its label if there are several."""
    notices = [(label, notice_of(trace)) for trace, label in zip(traces, labels, strict=True)]
    named = (f"{label}: {text}" if len(notices) > 1 else text for label, text in notices if text)
    return " ".join(named)


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


def recorded_policy(trace: Trace) -> Policy | None:
    """Return the reserved bytes that the log records, with an estimate of those before its begin.

    The log lacks the latter; the estimate is the minimum that has room for the live blocks.
    """
    held = trace.details.held if trace.details else None
    if trace.details is None or held is None:
        return None
    missing = trace.live_bytes() - held.by_event(trace.events)
    if trace.details.asleep is not None:
        missing -= trace.details.asleep.by_event(trace.events)
    before = max(int(np.max(missing, initial=0)), 0)
    if before:
        held = Curve(np.append(0, held.at), np.append(before, held.nbytes + before))
    return policy(trace, "as recorded", "at least" if before else "recorded", held)


def policies_of(trace: Trace, doing: Callable[[str], None]) -> Iterator[Policy]:
    """Serve a trace in every way, first as recorded if the log has its reserved bytes."""
    if recorded := recorded_policy(trace):
        yield recorded
    for each in policies(trace):
        doing(f"{each.name}: done")
        yield each


MAX_PHASES = 1 << 13
"""Maximum number of phases that a page draws."""

# The groupings that a page has besides those that it makes of owners, stacks, streams and sizes.
_GROUPINGS = ["rule", "category", "phase", "module", "function", "file"]


def run_data(
    trace: Trace, served: Sequence[Policy], label: str = "", rules: Rules = ()
) -> dict[str, Any]:
    """Collect everything that a page draws of one run.

    Parameters
    ----------
    trace : Trace
        The trace to draw.
    served : sequence of Policy
        The policies to show; the first is drawn first.
    label : str, optional
        Name of the run on the page, next to others.
    rules : sequence of (str, str), optional
        Names and regular expressions of groups, as of `groups_of`.
    """
    blocks = blocks_of(trace)
    kept = blocks.largest(MAX_BLOCKS)
    shown = kept[blocks.block]  # moves of the blocks that are kept
    owner, names, named = owners_of(trace, blocks)
    address, segments, placed = _addresses(trace, blocks, served)
    # Blocks and segments are drawn in one picture; its gaps are closed for both alike.
    drawn = draw_together(
        np.concatenate([address[kept], segments.address]),
        np.concatenate([blocks.size[kept], segments.nbytes]),
    )
    moving = blocks.moving[shown]
    ends = np.searchsorted(moving, segments.end)
    stack, stacks = _stacks(trace, blocks, kept)
    own = [own_frames(each) for each in stacks]
    frames, stack_frames = _frames_of([*stacks, *own])
    wanted = _GROUPINGS if rules else _GROUPINGS[1:]
    groupings = {by: found for by in wanted if (found := groups_of(trace, by, rules))}
    return {
        "label": label or trace.name,
        "figures": vars(figures_of(trace, blocks)),
        "kept": int(np.count_nonzero(kept)),
        "blocks": blocks.count,
        "streams": _stream_names(trace),
        "owners": names,
        "frames": frames,
        "ownersNamed": named,
        "groupings": {by: groups.names for by, groups in groupings.items()},
        "placed": placed,
        "notice": notice_of(trace),
        "moment": bool(trace.meta.get("moment", False)),
        "endedUs": max(int(np.max(trace.time_us, initial=0)), _plain_int(trace.meta, "ended_us")),
        "ranges": [[f"{base:#x}", place, extent] for base, place, extent in drawn.ranges],
        "meta": {key: value for key, value in trace.meta.items() if _is_plain(value)},
        "refusals": _refusals(trace, moving),
        "phases": _phases(trace, moving, groupings.get("category")),
        "steps": np.searchsorted(moving, trace.step_start).tolist(),
        "policies": [_policy_facts(each, moving) for each in served],
        "columns": {
            "time": column(trace.time_us[moving], rising=True),
            "back": column(_back(blocks, kept, shown)),
            "size": column(blocks.size[kept]),
            "stream": column(trace.stream[moving[blocks.is_alloc[shown]]]),
            "owner": column(owner[kept]),
            "offset": column(drawn.offset[: np.count_nonzero(kept)]),
            "rest": column(_rest(blocks, shown)),
            **{
                f"by_{by}": column(groups.of[blocks.allocation[kept]])
                for by, groups in groupings.items()
            },
            "stack": column(stack),
            "stackSizes": column(sizes := [len(each) for each in stacks]),
            "stackFrames": column(stack_frames[: sum(sizes)]),
            "ownSizes": column([len(each) for each in own]),
            "ownFrames": column(stack_frames[sum(sizes) :]),
            "segmentOffset": column(drawn.offset[np.count_nonzero(kept) :]),
            "segmentSize": column(segments.nbytes),
            "segmentBegin": column(np.searchsorted(moving, segments.begin)),
            # A segment that never ends has the number of moves.
            "segmentEnd": column(np.where(segments.end < 0, moving.size, ends)),
        },
    }


_NO_SEGMENTS = Segments(np.empty(0, np.uint64), *(np.empty(0, np.int64) for _ in range(3)))


def _addresses(
    trace: Trace, blocks: BlockTable, served: Sequence[Policy]
) -> tuple[NDArray[np.uint64], Segments, str]:
    """Return the addresses of blocks and the segments: the log's, else the default policy's."""
    if trace.details is not None:
        address = trace.details.address[blocks.allocation]
        return address, trace.details.segments or _NO_SEGMENTS, "recorded"
    for each in served:
        if each.placement is not None and each.name == PAGES:
            address = each.placement.address[blocks.allocation]
            return address, each.placement.segments or _NO_SEGMENTS, "replayed"
    return np.zeros(blocks.count, np.uint64), _NO_SEGMENTS, "unknown"


def _stacks(
    trace: Trace, blocks: BlockTable, kept: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], list[Frames]]:
    """Return the stack of each kept block, from 1, 0 for none, and those that occur."""
    details = trace.details
    if details is None or details.stack is None:
        return np.zeros(int(np.count_nonzero(kept)), np.int64), []
    numbers = details.stack[blocks.allocation][kept]
    used, place = np.unique(np.append(-1, numbers), return_inverse=True)  # none sorts first
    return place[1:].astype(np.int64), [details.stacks[number] for number in used[1:].tolist()]


def _frames_of(stacks: Sequence[Frames]) -> tuple[list[list[Any]], list[int]]:
    """List each different frame once, and the frames of all stacks one after the other."""
    numbers: dict[tuple[str, int, str], int] = {}
    listed = [numbers.setdefault(frame, len(numbers)) for each in stacks for frame in each]
    return [list(frame) for frame in numbers], listed


def _back(
    blocks: BlockTable, kept: NDArray[np.bool_], shown: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Write moves as small numbers: 0 allocates the next block, n frees the n-th last one."""
    number = np.cumsum(kept) - 1
    block, is_alloc = number[blocks.block[shown]], blocks.is_alloc[shown]
    back: NDArray[np.int64] = np.where(is_alloc, 0, np.cumsum(is_alloc) - block)
    return back


def _rest(blocks: BlockTable, shown: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the bytes of blocks that are not kept, at each move of a kept one; empty if none."""
    if shown.all():
        return np.empty(0, np.int64)
    signed = np.where(blocks.is_alloc, 1, -1) * blocks.size[blocks.block]
    rest: NDArray[np.int64] = np.cumsum(np.where(shown, 0, signed))[shown]
    return rest


def _stream_names(trace: Trace) -> list[str]:
    names = list(trace.details.streams) if trace.details else []
    return names + [f"stream {number}" for number in range(len(names), trace.streams)]


def refusals_of(trace: Trace) -> list[tuple[int, RefusedRequest]]:
    """Return refused requests, with the bytes that the trace shows where a log has no figures."""
    found = trace.details.refusals if trace.details else ()
    if not found or trace.details is None:
        return []
    live, held = np.append(trace.live_bytes(), 0), trace.details.held
    reserved = None if held is None else held.by_event(trace.events)
    filled = []
    for at, refusal in found:
        before = at - 1 if at else -1  # of `live` the last is 0
        known: dict[str, Any] = {}
        if refusal.in_use is None:
            known["in_use"] = int(live[before])
        if refusal.reserved is None and reserved is not None and at:
            known["reserved"] = int(reserved[before])
        filled.append((at, refusal._replace(**known)))
    return filled


def _refusals(trace: Trace, moving: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Return the refusals of a page; `ended` are those after which nothing was allocated."""
    last = int(np.max(np.flatnonzero(trace.action == ALLOC), initial=-1))
    return [
        {
            "move": int(np.searchsorted(moving, at)),
            "ended": at > last,
            "own": own_frames(refusal.stack),
            **refusal._asdict(),
        }
        for at, refusal in refusals_of(trace)
    ]


def _phases(trace: Trace, moving: NDArray[np.int64], category: Groups | None) -> dict[str, Any]:
    """Return the phases in moves, the outer ones if there are too many, and a table by name.

    The peak has its phase and its categories.
    """
    phases = sorted(trace.details.phases if trace.details else (), key=lambda each: each.depth)
    shown = sorted(phases[:MAX_PHASES], key=lambda each: each.begin)
    begins, ends = (
        np.searchsorted(moving, [getattr(each, of) for each in shown]).tolist()
        for of in ("begin", "end")
    )
    peak = peak_event(trace)
    table = [
        (*row[:3], int(np.searchsorted(moving, row.at)), row.growth) for row in phase_table(trace)
    ]
    return {
        "shown": [
            [each.name, begin, end, each.depth]
            for each, begin, end in zip(shown, begins, ends, strict=True)
        ],
        "table": table,
        "atPeak": phase_at(trace, peak),
        "categories": bytes_at(trace, peak, category) if category else [],
    }


def _policy_facts(each: Policy, moving: NDArray[np.int64]) -> dict[str, Any]:
    at = np.searchsorted(moving, each.held.at)
    # Of several changes at one move the last counts.
    last = np.flatnonzero(np.append(np.diff(at) > 0, True)[: at.size])
    return {
        **each.as_dict(),
        "at": column(at[last], rising=True),
        "held": column(np.maximum(each.held.nbytes[last], 0)),
    }


def _plain_int(meta: Mapping[str, Any], key: str) -> int:
    value = meta.get(key)
    return value if isinstance(value, int) and 0 <= value < 1 << 53 else 0


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


# ---- columns -------------------------------------------------------------------------------------


_WIDTHS = (("u1", 1 << 8), ("u2", 1 << 16), ("u4", 1 << 32))
_MAX_NUMBER = 1 << 53  # JavaScript's numbers are doubles, exact up to this


def column(values: ArrayLike, *, rising: bool = False) -> dict[str, Any]:
    """Write whole numbers as a column.

    Parameters
    ----------
    values : array_like of int, shape (n,)
        0 to 2**53.
    rising : bool, optional
        Write the differences of values that never decrease.

    Returns
    -------
    dict
        ``type`` of the stored numbers ("u1", "u2", "u4" or "f8"), ``length``, ``unit`` by which
        each is to be multiplied, ``rising``, and ``data``: zlib's format in base64.

    Raises
    ------
    TraceError
        A number is below 0 or above 2**53, or `rising` values decrease.

    Examples
    --------
    >>> written = column([512, 1024, 4096], rising=True)
    >>> written["type"], written["unit"], written["length"]
    ('u1', 512, 3)
    """
    numbers = np.asarray(values).astype(np.int64)
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) <= _MAX_NUMBER:
        raise TraceError(
            f"a page shows numbers from 0 to {_MAX_NUMBER}, not {numbers.min()} to {numbers.max()}"
        )
    if rising:
        numbers = np.diff(numbers, prepend=0)
        if numbers.size and int(numbers.min()) < 0:
            raise TraceError("a rising column never decreases")
    unit = max(int(np.gcd.reduce(numbers)) if numbers.size else 1, 1)
    stored = numbers // unit
    largest = int(np.max(stored, initial=0))
    width = next((name for name, limit in _WIDTHS if largest < limit), "f8")
    packed = zlib.compress(stored.astype(f"<{width}").tobytes(), 6)
    return {
        "type": width,
        "length": int(numbers.size),
        "unit": unit,
        "rising": rising,
        "data": base64.b64encode(packed).decode("ascii"),
    }
