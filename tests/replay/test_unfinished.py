"""What unfinished work withholds from other streams, and what an arena reserves above that."""

from __future__ import annotations

import pytest

from gpumem.replay import replay
from gpumem.replay.unfinished import peak_live_or_unfinished
from gpumem.traces import Trace

MIB = 1 << 20


def trace_of(*events):
    """Make a trace of (action, block, size, stream, microseconds)."""
    action, block, size, stream, time = zip(*events, strict=True)
    return Trace(action, block, size, stream, time)


def freed_then_taken(taker, after):
    return trace_of((0, 0, 100, 0, 0), (2, 0, 100, 0, 10), (0, 1, 60, taker, 10 + after))


@pytest.mark.parametrize(
    ("taker", "after", "peak"), [(0, 1, 100), (1, 1, 160), (1, 5, 100), (1, 4, 160)]
)
def test_unfinished_memory_counts_until_its_work_is_done_or_its_stream_reuses_it(
    taker, after, peak
):
    assert peak_live_or_unfinished(freed_then_taken(taker, after), 5) == peak


def test_stream_reuses_what_it_freed_last():
    # What it freed first is finished when the other stream takes; the rest of the last is not.
    trace = trace_of(
        (0, 0, 100, 0, 0),
        (0, 1, 100, 0, 0),
        (2, 0, 100, 0, 10),
        (2, 1, 100, 0, 14),
        (0, 2, 70, 0, 14),
        (0, 3, 200, 1, 15),
    )
    assert peak_live_or_unfinished(trace, 5) == 70 + 30 + 200
    assert peak_live_or_unfinished(trace, 6) == 70 + 30 + 100 + 200


def test_block_from_before_the_recording_is_left_out():
    trace = trace_of((2, -1, 100, 0, 0), (0, 0, 50, 1, 1))
    assert peak_live_or_unfinished(trace, 1000) == 50


def test_replay_without_lag_has_no_unfinished_memory():
    result = replay(freed_then_taken(1, 1), "host")
    assert result.peak_live_or_unfinished_bytes == result.peak_requested_bytes == 100


@pytest.mark.parametrize("policy", ["completed", "wait"])
def test_replay_reports_unfinished_memory_that_the_arena_holds(policy):
    trace = trace_of((0, 0, 100 * MIB, 0, 0), (2, 0, 100 * MIB, 0, 10), (0, 1, 60 * MIB, 1, 11))
    result = replay(trace, "host", config={"stream_reuse": policy}, lag_us=5)
    assert result.peak_live_or_unfinished_bytes == 160 * MIB
    expected = {"completed": 160, "wait": 100}[policy]
    assert result.peak_reserved_bytes == pytest.approx(expected * MIB, rel=0.02)
