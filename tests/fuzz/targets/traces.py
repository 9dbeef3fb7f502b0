"""Files of traces, recordings and snapshots."""

from __future__ import annotations

import contextlib
import pickle

from gpumem.errors import EventFileError, SnapshotError, TraceError
from gpumem.observe import Snapshot, read
from gpumem.report.blocks import blocks_of, owners_of
from gpumem.report.data import figures_of, notice_of, recorded_policy
from gpumem.traces import Trace, load_trace

from .. import changes
from . import Target
from .files import written


def _used(trace: Trace) -> object:
    """Use what a trace holds, as a report does; returns its size."""
    blocks = blocks_of(trace)
    owners_of(trace, blocks)
    figures = figures_of(trace, blocks)
    notice_of(trace)
    recorded_policy(trace)
    return (
        figures.events.bit_length(),
        figures.streams.bit_length(),
        figures.peak_live_bytes.bit_length() // 8,
        figures.failed_allocs.bit_length(),
        figures.live_at_end_blocks.bit_length(),
        trace.details is None,
        tuple(trace.meta),
    )


def _trace(data: bytes) -> object:
    return _used(load_trace(written(data)))


def _device_one(data: bytes) -> object:
    """Read the busiest device, and the second one."""
    path = written(data)
    try:
        return _used(load_trace(path))
    finally:
        with contextlib.suppress(TraceError):
            load_trace(path, device=1)


def _recording(data: bytes) -> object:
    """Read events both ways, go through them, and write them in PyTorch's form."""
    path = written(data)
    shape: object = None
    try:
        events = read(path)
    except EventFileError as error:
        shape = str(error)[:20]
    else:
        for event in events:
            repr(event)
        empty = Snapshot((), 0, 0)
        pickle.dumps(empty.to_torch(events))
        shape = (
            events.torn.bit_length(),
            len(events.tags),
            len(events.stacks),
            len(events.threads),
        )
    return shape, _device_one(data)


def _snapshot(data: bytes) -> object:
    """Read a snapshot both ways; what was read can be written and compared."""
    path = written(data)
    found: object = None
    try:
        made = Snapshot.load(path)
    except SnapshotError as error:
        found = str(error)[:40]
    else:
        for resource in made.resources:
            resource.blocks, resource.by_owner(), resource.by_framework()
        again = Snapshot.from_dict(made.as_dict())
        assert str(again.diff(made)) == str(made.diff(again))
        made.to_json()
        pickle.dumps(made.to_torch())
        repr(made)
        found = len(made.resources), len(made.by_owner())
    return found, _device_one(data)


_SLOT_FIELDS = (
    *((0, 8), (8, 8), (16, 8), (24, 8), (30, 2), (32, 8), (40, 1), (40, 1)),
    *((41, 1), (42, 2), (44, 2), (46, 2), (46, 2)),
)
_OF_ENTRIES = (
    *(b"device_traces", b"segments", b"action", b"alloc", b"free_requested", b"free_completed"),
    *(b"segment_alloc", b"oom", b"addr", b"size", b"stream", b"frames", b"time_us", b"blocks"),
    *(
        b"state",
        b"active_allocated",
        b"requested_size",
        b"device",
        b"q\x00",
        b"h\x00",
        b"r\xff\xff\xff\x7f",
    ),
    *(
        b"\x8d",
        b"\x8e",
        b"\x96",
        b"\x95",
        b"2",
        b"cos\nsystem\n",
        b"R",
        b"b",
        b"\x93",
        b"P1\n",
        b"Q",
    ),
)
_OF_SNAPSHOTS = (
    *(b'"format"', b'"gpumem.snapshot"', b'"version"', b'"resources"', b'"stacks"', b'"blocks"'),
    *(
        b'"age_ns"',
        b'"address"',
        b"[[[[[[[[",
        b"null",
        b"1e999",
        b"NaN",
        b"Infinity",
        b'"cuda:\xc2\xb2"',
    ),
)

TARGETS = (
    Target(
        "recording",
        _recording,
        (TraceError,),
        structured=(changes.slots(96, 48, _SLOT_FIELDS),),
        tokens=(b"gpumemEV", b"\t", b"\xff", b"[[", "²".encode(), b"cuda:1\tarena\t"),
    ),
    Target(
        "npz",
        _trace,
        (TraceError,),
        structured=(changes.in_zip,),
        tokens=(
            b"PK\x03\x04",
            b"PK\x01\x02",
            b"\x93NUMPY\x01\x00",
            b"\x0e\x00",
            b"'<i8'",
            b"'|O'",
            b"(",
            b"meta.npy",
        ),
    ),
    Target(
        "torch_snapshot",
        _device_one,
        (TraceError,),
        structured=(changes.in_pickle,),
        tokens=_OF_ENTRIES,
    ),
    Target(
        "rmm_log",
        _trace,
        (TraceError,),
        tokens=(
            b"allocate",
            b"free",
            b"allocate failure",
            b"(nil)",
            b"0x",
            b",",
            b"\n",
            b"23:59:59.999999",
            b"00:00:00:1",
        ),
    ),
    Target(
        "snapshot", _snapshot, (TraceError,), structured=(changes.in_json,), tokens=_OF_SNAPSHOTS
    ),
)
