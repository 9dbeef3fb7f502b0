"""Phases of the program and categories of blocks, in recordings."""

import threading

import pytest

from gpumem import observe
from gpumem._events import recorder
from gpumem._events.labels import label_of
from gpumem.errors import TraceError
from gpumem.traces import load_trace


@pytest.fixture
def arena(make_arena):
    return make_arena()


def phases_of(trace):
    return [(phase.name, phase.begin, phase.end, phase.depth) for phase in trace.details.phases]


@pytest.mark.parametrize("into_a_file", [False, True])
def test_recording_holds_the_nested_phases_of_a_program(arena, tmp_path, into_a_file):
    path = tmp_path / "events" if into_a_file else None
    with observe.record(arena, path) as recording, observe.phase("step"):
        arena.allocate(100).close()
        with observe.phase("forward"):
            arena.allocate(100).close()
    trace = load_trace(path) if into_a_file else recording.trace()
    assert phases_of(trace) == [("step", 0, 4, 0), ("forward", 2, 4, 1)]


def test_decorated_function_is_a_phase_at_each_call(arena):
    @observe.phase("load")
    def load():
        arena.allocate(100).close()

    with observe.record(arena) as recording:
        load()
        load()
    assert phases_of(recording.trace()) == [("load", 0, 2, 0), ("load", 2, 4, 0)]


def test_phases_that_began_before_or_end_after_the_recording_reach_its_ends(arena):
    with observe.phase("outer"):
        with observe.phase("inner"):
            recording = observe.record(arena)
            arena.allocate(100).close()
        arena.allocate(100).close()
    with observe.phase("late"):
        arena.allocate(100).close()
        recording.stop()
    found = phases_of(recording.trace())
    assert found == [("outer", 0, 4, 0), ("inner", 0, 2, 1), ("late", 4, 6, 0)]


def test_phase_ends_with_an_exception(arena):
    @observe.phase("load")
    def fail():
        arena.allocate(100).close()
        raise KeyError

    with observe.record(arena) as recording:
        with pytest.raises(KeyError):
            fail()
        arena.allocate(100).close()
    assert phases_of(recording.trace()) == [("load", 0, 2, 0)]


def test_blocks_of_other_threads_are_allocated_in_the_phase_of_the_program(arena):
    with observe.record(arena) as recording, observe.phase("backward"):
        thread = threading.Thread(target=lambda: arena.allocate(100).close())
        thread.start()
        thread.join()
    assert phases_of(recording.trace()) == [("backward", 0, 2, 0)]


def test_category_is_of_the_block_that_is_live_at_the_address(arena):
    with observe.record(arena) as recording:
        first = arena.allocate(100)
        address = first.ptr
        first.close()
        second = arena.allocate(100)
        assert second.ptr == address
        recorder.set_category(label_of("parameters"), [address, 4096], label_of("Net / Linear"))
        third = arena.allocate(100)
    details = recording.trace().details
    assert [details.categories[n] for n in details.category] == ["other", "parameters", "other"]
    assert (details.module.tolist(), details.modules) == ([-1, 0, -1], ("Net / Linear",))
    second.close()
    third.close()


def test_every_memory_of_a_recording_has_the_phases(make_arena):
    arenas = make_arena(), make_arena(memory="host/host_accessible")
    with observe.record() as recording, observe.phase("load"):
        for arena in arenas:
            arena.allocate(100).close()
    assert [phases_of(trace) for trace in recording._traces(None)] == [[("load", 0, 2, 0)]] * 2


def test_events_of_phases_have_names_and_no_resource(arena):
    with observe.record(arena) as recording, observe.phase("load"):
        pass
    begin, end = recording.events()
    assert (begin.action, end.action) == ("phase_begin", "phase_end")
    assert begin.tag == end.tag == "load"
    assert begin.resource.kind == ""
    assert begin.address == end.address
    with pytest.raises(TraceError, match="no allocations"):
        recording.trace()


@pytest.mark.parametrize(("name", "error"), [("", ValueError), (7, TypeError)])
def test_name_of_a_phase_is_a_text(name, error):
    with pytest.raises(error, match="a phase "):
        observe.phase(name)
