"""Where an arena puts the blocks of a trace: a replay on the host, recorded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpumem._buffer.stream import Stream
from gpumem._core import Arena
from gpumem.device import Device
from gpumem.observe._recording import RecorderHandle
from gpumem.observe.events import parse
from gpumem.replay._replay import run
from gpumem.replay.staging import settings_of, stage
from gpumem.traces.details import Curve
from gpumem.traces.trace import ALLOC, FREE_REQUESTED, UNKNOWN_BLOCK, Trace

__all__ = ["BlockAddresses", "place"]

_ALLOC, _FREE, _FREE_REQUESTED, _FREE_COMPLETED, _FAILURE, _RESERVE, _RELEASE = range(1, 8)


@dataclass(frozen=True, eq=False)
class BlockAddresses:
    """Where each block lay, and what was held.

    Attributes
    ----------
    address : ndarray of uint64, shape (allocs,)
        In the order of the allocations; 0 of empty and of refused blocks.
    held : Curve
        Bytes held from the device.
    """

    address: NDArray[np.uint64]
    held: Curve


def place(trace: Trace, config: Mapping[str, object] | None = None) -> BlockAddresses:
    """Replay a trace on a fresh arena of the host and record it.

    No memory is read or written, so any trace fits.

    Parameters
    ----------
    trace : Trace
        What to replay.
    config : Mapping, optional
        Settings of the arena.

    Raises
    ------
    OSError
        There is no room for a temporary file of 48 bytes an event.
    InUseError
        Every resource of the process is being recorded already.

    Examples
    --------
    >>> trace = Trace(action=[0, 0], block=[0, 1], size=[256, 256], stream=[0, 0], time_us=[0, 1])
    >>> first, second = place(trace).address.tolist()
    >>> second - first
    256
    """
    host = Device("host")
    with (
        tempfile.TemporaryFile() as file,
        stage(host, 0),
        Arena(host, settings_of(config, 0)) as arena,
    ):
        streams = [Stream(host) for _ in range(trace.streams)]
        recorder = RecorderHandle(0, file.fileno(), 0)
        recorder.begin([arena])
        try:
            run(
                arena,
                streams,
                trace.action,
                trace.block,
                trace.size,
                trace.stream,
                trace.time_us,
                trace.allocs,
                False,
            )
        finally:
            recorder.end()
        recorder.finish_file()
        if recorder.failed:
            raise OSError(recorder.failed, os.strerror(recorder.failed), tempfile.gettempdir())
        return _placement(trace, parse(file.read()).records)


def _placement(trace: Trace, records: NDArray[np.void]) -> BlockAddresses:
    """Match recorded events with the trace's; both are in order, a refused block has one too."""
    kind = records["kind"]
    moving = np.flatnonzero(
        (trace.action != FREE_REQUESTED) & (trace.block != UNKNOWN_BLOCK) & (trace.size > 0)
    )
    taken = (kind == _ALLOC) | (kind == _FAILURE)
    address = np.zeros(trace.allocs, np.uint64)
    filled = trace.size[trace.action == ALLOC] > 0
    address[filled] = np.where(kind == _FAILURE, 0, records["address"])[taken]

    # A change of what is held comes before the event that asked for it. What follows the last
    # event is the replay's own cleaning up.
    events_before = np.cumsum(kind <= _FAILURE)
    change = np.flatnonzero((kind == _RESERVE) | (kind == _RELEASE))
    change = change[events_before[change] < moving.size]
    sign = np.where(kind[change] == _RESERVE, 1, -1)
    held = np.cumsum(sign * records["nbytes"][change].astype(np.int64))
    return BlockAddresses(address, Curve(moving[events_before[change]], held))
