"""Refused requests in recordings, traces and figures of a run."""

import pytest
from helpers.torch_snapshots import entry, snapshot_file

import gpumem
from gpumem._events import recorder
from gpumem._events.refusals import RefusedRequest, refusal_of
from gpumem.errors import OutOfMemoryError
from gpumem.observe import peak, record
from gpumem.traces import load_trace

MIB = 1 << 20


def ask(arena, nbytes):
    with pytest.raises(OutOfMemoryError):
        arena.allocate(nbytes)


@pytest.fixture(params=["file", "ring"])
def recorded(request, tmp_path):
    """Record a run; returns a function that returns its trace."""

    def run(work, resource=None):
        path = tmp_path / "run" if request.param == "file" else None
        with record(resource, path) as recording:
            work()
        return recording.trace() if path is None else load_trace(path)

    return run


def test_refusal_has_limit_stack_owner_free_bytes_and_advice(recorded):
    arena = gpumem.Arena("host", max_mem=8 * MIB)

    def work():
        kept = arena.allocate(5 * MIB)
        with gpumem.observe.tag("batch"):
            ask(arena, 6 * MIB)
        kept.close()

    ((at, refusal),) = recorded(work, arena).details.refusals
    assert at == 1
    assert (refusal.nbytes, refusal.memory, refusal.owner) == (6 * MIB, "host:0", "batch")
    assert (refusal.limit_name, refusal.limit) == ("max_mem", 8 * MIB)
    assert refusal.in_use == 5 * MIB
    assert refusal.free == refusal.largest_free == refusal.reserved - refusal.in_use
    assert "max_mem" in refusal.advice
    assert refusal.stack[0][0] == __file__
    assert refusal.stack[0][2].endswith("ask")


def test_refusal_by_a_budget_names_the_budget(recorded):
    budget = gpumem.Budget(MIB, name="small")
    arena = gpumem.Arena("host", budget=budget)

    def work():
        arena.allocate(1000).close()
        ask(arena, 2 * MIB)

    ((_, refusal),) = recorded(work).details.refusals
    assert (refusal.limit_name, refusal.limit) == ("small", MIB)


def test_refusal_without_frames_belongs_to_the_phase(recorded, monkeypatch):
    monkeypatch.setattr(recorder, "frames_here", list)  # as on a thread of autograd
    arena = gpumem.Arena("host", max_mem=MIB)

    def work():
        arena.allocate(1000).close()
        with gpumem.observe.phase("step"), gpumem.observe.phase("backward"):
            ask(arena, 2 * MIB)

    ((_, refusal),) = recorded(work).details.refusals
    assert refusal.owner == "backward"


def test_refusals_of_other_resources_are_left_out(recorded):
    arena, other = (gpumem.Arena("host", max_mem=MIB, name=name) for name in ("this", "other"))

    def work():
        arena.allocate(1000).close()
        ask(other, 2 * MIB)

    assert recorded(work, arena).details.refusals == ()


def test_facts_of_a_damaged_file_are_left_out():
    for text in ("", "[]", "{}", '{"stack": [1]}', '{"stack": [], "nbytes": "x"}', "[" * 10_000):
        assert refusal_of(text) is None
    assert refusal_of('{"stack": [], "nbytes": -5, "time": 0, "limit": 1e30}').limit == 1 << 62


def test_oom_entry_of_pytorch_is_a_refusal_with_the_bytes_live_then(tmp_path):
    frame = {"filename": "/job/train.py", "line": 3, "name": "step"}
    oom = {"action": "oom", "size": 4096, "stream": 0, "device_free": 100, "frames": [frame]}
    (refusal,) = peak(snapshot_file(tmp_path / "snapshot", [entry("alloc", 256, 512), oom])).refused
    assert refusal == RefusedRequest(
        4096,
        memory="device 0",
        owner="step (/job/train.py:3)",
        in_use=512,
        reserved=refusal.reserved,
        device_free=100,
        stack=(("/job/train.py", 3, "step"),),
    )
