"""Recordings end: after Ctrl-C, where host memory is refused, and with one owner."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
from helpers.child import run_quietly
from helpers.interrupting import interrupt_again
from helpers.refused_memory import refused_allocations

import gpumem
from gpumem import observe


def is_free(arena):
    """Whether an arena can be recorded: no recording has it any more."""
    with observe.record(arena) as recording:
        arena.allocate(100).close()
    return len(recording.events()) >= 2


@pytest.mark.parametrize("held", [False, True])
def test_interrupt_leaves_no_arena_recorded_after_the_block(held):
    arena = gpumem.Arena("host")
    recordings = []  # references, as a caller's variable is one

    def record():
        recordings.clear()
        recording = observe.record(arena, capacity=4)
        if held:
            recordings.append(recording)
        with recording:
            arena.allocate(100).close()

    def stop():
        # One that was made and whose block was not entered is its caller's to stop.
        for each in recordings:
            each.stop()
        recordings.clear()

    interrupt_again(record, 200, 400e-6, seed=5, after=stop)
    gc.collect()
    assert is_free(arena)


def test_interrupted_stop_at_the_end_of_a_block_ends_the_recording(monkeypatch):
    arena = gpumem.Arena("host")
    recording = observe.record(arena)

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(recording, "stop", interrupt)
    with pytest.raises(KeyboardInterrupt), recording:
        arena.allocate(100).close()
    assert not recording.running
    assert is_free(arena)


@pytest.mark.parametrize("to_file", [False, True])
def test_refused_host_memory_leaves_no_arena_recorded(tmp_path, to_file):
    arena = gpumem.Arena("host")
    path = tmp_path / "events" if to_file else None
    arena.allocate(100).close()

    def record():
        observe.record(arena, path, capacity=4).stop()

    record()
    number = 0
    # Python's os.open raises the others for it.
    for number in refused_allocations(record, (MemoryError, TypeError, SystemError)):
        assert is_free(arena), number
    assert number > 30


def test_owner_is_neither_copied_nor_pickled():
    arena, published = gpumem.Arena("host"), observe.publish()
    owners = [
        observe.record(arena),
        gpumem.Environment(),
        arena,
        arena.allocate(100),
        gpumem.Stream("host"),
        gpumem.Budget(1 << 20),
        arena.tag("a"),
        gpumem.using_resource(arena),
        arena.virtual((4, 4), "uint8"),
        published,
    ]
    for owner in owners:
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError):
                call(owner)
    published.close()
    assert owners[0].running
    arena.allocate(100).close()
    owners[0].stop()
    assert len(owners[0].events()) >= 2


def test_process_with_very_many_tags_goes_on():
    program = """
    import gpumem
    from gpumem import observe
    arena = gpumem.Arena("host")
    for number in range(66_000):
        with observe.tag(f"request {number}"):
            pass
    with observe.record(arena) as recording:
        for name in ("request 7", "request 65999", "new"):
            with observe.tag(name):
                arena.allocate(100).close()
    found = [event.tag for event in recording.events() if event.action == "alloc"]
    assert found == ["request 7", "further tags", "further tags"], found
    """
    run_quietly(program)
