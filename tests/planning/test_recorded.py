"""Plans of a recorded iteration: no overlap, near the requested peak, and back from JSON."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpumem
from gpumem.errors import ConfigError, ModelGraphError
from gpumem.planning import IterationPlan, IterationRecording, plan
from gpumem.planning.iteration.recorded import ALIGNMENT
from gpumem.traces import Trace, load_trace

ALLOC, DROPPED, FREED = 0, 1, 2


def trace_of(*events, step_start=(), streams=None):
    """Make a trace of (action, block, size)."""
    actions, blocks, sizes = zip(*events, strict=True) if events else ((), (), ())
    return Trace(
        action=np.array(actions, np.int8),
        block=np.array(blocks, np.int32),
        size=np.array(sizes, np.int64),
        stream=np.array([0] * len(events) if streams is None else streams, np.int16),
        time_us=np.arange(len(events)),
        step_start=np.array(step_start, np.int64),
    )


def live_at_once(plan):
    """Return each pair of allocations that live at the same time."""
    n = np.arange(len(plan))
    together = (plan.first[:, None] <= plan.last) & (plan.first <= plan.last[:, None])
    return np.argwhere(together & (n[:, None] < n))


def assert_apart(plan):
    ends = plan.offsets + plan.sizes
    for a, b in live_at_once(plan):
        assert ends[a] <= plan.offsets[b] or ends[b] <= plan.offsets[a], (a, b)


@st.composite
def recordings(draw):
    """Traces in which blocks come and go, are dropped before they are free, or stay."""
    events, live, sizes = [], [], {}
    for number in range(draw(st.integers(0, 25))):
        sizes[number] = draw(st.sampled_from([0, 1, 256, 257, 1000, 5000]))
        events.append((ALLOC, number, sizes[number]))
        live.append(number)
        while live and draw(st.booleans()):
            gone = live.pop(draw(st.integers(0, len(live) - 1)))
            if draw(st.booleans()):
                events.append((DROPPED, gone, sizes[gone]))
            events.append((FREED, gone, sizes[gone]))
    return trace_of(*events)


@given(recordings(), st.sampled_from(["auto", "greedy_by_size", "best_fit_by_time"]))
def test_live_blocks_never_overlap(trace, strategy):
    made = plan(trace, strategy=strategy)
    assert_apart(made)
    assert made.verify()
    assert made.peak_bytes >= made.lower_bound_bytes >= made.requested_bytes
    assert made.requested_bytes == trace.peak_requested
    assert len(made) == np.count_nonzero((trace.action == ALLOC) & (trace.size > 0))


def test_block_lives_until_its_free_has_completed():
    events = [(ALLOC, 0, 256), (DROPPED, 0, 256), (ALLOC, 1, 256), (FREED, 0, 256), (ALLOC, 2, 256)]
    made = plan(trace_of(*events))
    assert made.offsets[0] != made.offsets[1]
    assert made.offsets[2] == made.offsets[0]


def test_step_is_planned_alone():
    events = [(ALLOC, 0, 1000), (ALLOC, 1, 256), (FREED, 1, 256), (ALLOC, 2, 512), (FREED, 0, 1000)]
    trace = trace_of(*events, step_start=[1, 3], streams=[7, 5, 5, 3, 7])
    whole, first, second = plan(trace), plan(trace, 0), plan(trace, 1)
    assert [len(one) for one in (whole, first, second)] == [3, 1, 1]
    assert first.sizes.tolist() == [256]
    assert second.sizes.tolist() == [512], "what the step frees and did not allocate has no place"
    assert whole.streams.tolist() == [0, 1, 2], "numbered as they come"
    assert second.last.tolist() == [2], "to the end of the step"


@pytest.mark.parametrize("step", [-1, 2, 1.0, True, "0"])
def test_missing_step_is_refused(step):
    with pytest.raises(ConfigError, match="0 to 1"):
        plan(trace_of((ALLOC, 0, 1), step_start=[0, 1]), step)
    with pytest.raises(ConfigError, match="marks no steps"):
        plan(trace_of((ALLOC, 0, 1)), 0)


def test_recorded_training_plan_is_close_to_its_requested_bytes():
    trace = load_trace("gpt2_varlen_train")
    for step in range(1, len(trace.step_start), 5):
        made = plan(trace, step)
        assert made.verify()
        assert made.peak_bytes <= 1.015 * made.requested_bytes
    several = plan(load_trace("multistream_train"))
    assert several.verify()
    assert set(several.streams.tolist()) == {0, 1, 2}
    assert several.peak_bytes <= 1.015 * several.requested_bytes


# ---- what a plan is ------------------------------------------------------------------------------


def small():
    events = [(ALLOC, 0, 300), (ALLOC, 1, 256), (FREED, 0, 300), (ALLOC, 2, 100)]
    return plan(trace_of(*events))


def test_iteration_plan_round_trips_through_json():
    made = small()
    back = IterationPlan.from_dict(json.loads(json.dumps(made.as_dict())))
    assert back.as_dict() == made.as_dict()
    assert (back.peak_bytes, back.strategy) == (made.peak_bytes, made.strategy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": [0, 0, 0]}, "overlap"),
        ({"offsets": [0, 256, 0]}, "overlap"),
        ({"offsets": [0, 100, 0]}, "multiples of 256"),
        ({"offsets": [0, 512]}, "differ in length"),
        ({"offsets": [0, -256, 0]}, "offsets of a plan are from 0"),
        ({"offsets": [0, 512.0, 0]}, "not a row of integers"),
        ({"sizes": [0, 256, 100]}, "sizes of a plan are from 1"),
        ({"sizes": [1 << 48, 256, 100]}, "sizes of a plan are from 1"),
        ({"sizes": [[300, 256, 100]]}, "not a row of integers"),
        ({"sizes": [[300], [256, 100], 1]}, "sizes of a plan is not a row of integers"),
        ({"streams": [1, 0, 2]}, "stream = 1 of allocation 0: expected 0 to 0"),
        ({"streams": [0, 1 << 40, 0]}, "stream = 1099511627776 of allocation 1: expected 0 to 1"),
        ({"last": [0, 0, 0]}, "ends before it begins"),
        ({"first": [1, 0, 3]}, "before the one that came earlier"),
        ({"more": 1}, "and no other"),
    ],
)
def test_invalid_plan_json_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        IterationPlan.from_dict({**small().as_dict(), **change})
    with pytest.raises(ConfigError, match="and no other"):
        IterationPlan.from_dict([])


def test_verify_finds_a_block_moved_onto_another():
    made = small()
    columns = {**made.as_dict(), "offsets": [256, 0, 0]}
    with pytest.raises(ModelGraphError, match="allocations 1 and 2"):
        IterationPlan(**columns).verify()


def test_plan_columns_are_read_only():
    with pytest.raises(ValueError, match="read-only"):
        small().offsets[0] = ALIGNMENT


# ---- recording -----------------------------------------------------------------------------------


def test_recording_holds_the_allocations_made_through_it(arena):
    stream = gpumem.Stream("host")
    recording = IterationRecording(arena)
    outside = arena.allocate(1 << 20)
    kept = recording.resource.allocate(300, stream)
    recording.resource.allocate_persistent(1 << 20).close()
    recording.resource.allocate(0).close()
    recording.resource.allocate(500).close()
    trace = recording.trace("a step")
    assert trace.name == "a step"
    assert trace.action.tolist() == [ALLOC, ALLOC, FREED]
    assert trace.size.tolist() == [300, 500, 500]
    assert trace.stream.tolist() == [0, 1, 1]
    assert plan(trace).peak_bytes == 512 + 512
    kept.close()
    outside.close()


def test_recording_accepts_a_late_free_of_reused_bytes(arena):
    recording = IterationRecording(arena)
    first = recording.resource.allocate(256)
    first.close()
    recording.resource.allocate(256).close()
    events = recording._events
    assert events[0].ptr == events[2].ptr
    events[1], events[2] = events[2], events[1]  # as two threads may tell it
    assert recording.trace().action.tolist() == [ALLOC, FREED, ALLOC, FREED]


def test_recording_rejects_what_is_no_resource():
    with pytest.raises(TypeError, match="MemoryResource"):
        IterationRecording("host")
