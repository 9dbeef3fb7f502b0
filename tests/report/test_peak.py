"""The peak of a run, and how two peaks differ."""

import time

import pytest
from helpers.runs import MIB, told_run, with_details

import gpumem
from gpumem.cli.peak import rows_of
from gpumem.errors import ConfigError, TraceError
from gpumem.observe import Change, peak, record
from gpumem.report.peak import peak_of


def load(nbytes, arena):
    return arena.allocate(nbytes)


def recorded(path, *sizes):
    arena = gpumem.Arena("host")
    with record(arena, path, stacks=True), gpumem.observe.phase("step"):
        blocks = [load(size, arena) for size in sizes]
        other = arena.allocate(256 * MIB)
        other.close()
    del blocks
    return path


def test_peak_has_the_live_groups_and_the_phase(tmp_path):
    found = peak(recorded(tmp_path / "run", 2 * MIB, 3 * MIB))
    assert found.live_bytes == 261 * MIB
    assert found.reserved_bytes >= found.live_bytes
    assert found.phase == "step"
    assert [(each.nbytes, each.blocks) for each in found.groups["stack"]] == [
        (256 * MIB, 1),
        (5 * MIB, 2),
    ]
    assert found.groups["stack"][1].name.startswith("load (")
    assert found.as_dict()["groups"]["stack"][1]["nbytes"] == 5 * MIB


def test_peak_groups_by_rules():
    found = peak(told_run(), rules=[("model", "weights")])
    assert [row[:2] for row in found.groups["rule"]] == [("model", 4 * MIB), ("no rule", 3 * MIB)]
    with pytest.raises(ConfigError):
        peak(told_run(), rules=[("model", "(")])


def test_peaks_are_compared_by_stack_in_both_directions(tmp_path):
    sizes = {"before": [2 * MIB], "after": [2 * MIB, 3 * MIB]}
    before, after = (peak(recorded(tmp_path / name, *sizes[name])) for name in sizes)
    (grown,) = before.diff(after)
    assert grown[1:] == (2 * MIB, 5 * MIB)
    assert grown.grown == 3 * MIB
    (shrunk,) = after.diff(before)
    assert shrunk == Change(grown.name, 5 * MIB, 2 * MIB)
    assert before.diff(before) == ()


def test_lines_that_an_edit_moved_are_the_same_sites():
    before = told_run()
    stacks = tuple(
        tuple((file, line + (file == "/job/model.py"), name) for file, line, name in stack)
        for stack in before.details.stacks
    )
    after = told_run(more=MIB)
    after = with_details(after, stacks=stacks)
    (change,) = peak(before).diff(peak(after))
    assert change[1:] == (2 * MIB, 3 * MIB)
    assert change.name.startswith("forward (/job/model.py) < main")


def test_peaks_without_stacks_are_compared_by_owner():
    before, after = (
        with_details(run, stack=None, stacks=()) for run in (told_run(), told_run(more=MIB))
    )
    change = Change("activations", 2 * MIB, 3 * MIB)
    assert peak(before).diff(peak(after)) == (change,)


def test_a_peak_is_compared_with_a_peak_only():
    with pytest.raises(TypeError, match="Peak"):
        peak(told_run()).diff(told_run())


def test_peak_of_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(TraceError, match="no such file"):
        peak(tmp_path / "none")


def test_peak_of_a_snapshot():
    arena = gpumem.Arena("host")
    kept = arena.allocate(MIB)
    assert peak(arena.snapshot()).live_bytes == MIB == kept.nbytes


def test_peak_names_the_bytes_of_other_memories_at_that_time():
    arena, pinned = gpumem.Arena("host"), gpumem.Arena("host/host_accessible")
    with record(pinned) as of_pinned, record(arena) as run:
        first, second = pinned.allocate(3 * MIB), pinned.allocate(MIB)
        time.sleep(0.001)  # events are known to a microsecond
        first.close()
        time.sleep(0.001)
        kept = arena.allocate(2 * MIB)
        time.sleep(0.001)
        second.close()
    found = peak_of(run.trace(), others=[of_pinned.trace()])
    assert (found.live_bytes, found.beside) == (kept.nbytes, {"host:0/host_accessible": MIB})
    assert rows_of(found)["beside"] == "host:0/host_accessible 1.0 MiB"
    found = peak_of(of_pinned.trace(), others=[run.trace()])
    assert (found.live_bytes, found.beside) == (4 * MIB, {"host:0": 0})
    assert "beside" not in rows_of(found)


def test_peak_of_a_recording_names_its_other_memories(tmp_path):
    arena, pinned = gpumem.Arena("host"), gpumem.Arena("host/host_accessible")
    with record(path=tmp_path / "run"):
        kept = pinned.allocate(MIB)
        for _ in range(20):
            arena.allocate(MIB).close()
    # Resources that another test left alive are in the file as well.
    assert peak(tmp_path / "run").beside["host:0/host_accessible"] >= kept.nbytes
