"""The bench of buffers of RMM, over a made-up RMM that allocates from the host."""

import sys
import types
from contextlib import contextmanager

import pytest

import gpumem
from bench import frameworks
from gpumem.integrations import rmm as integration


@pytest.fixture
def used(monkeypatch):
    """Which resource each buffer came from, in order; `integration.using` sets device 0's."""
    rmm, mr, order = types.ModuleType("rmm"), types.ModuleType("rmm.mr"), []
    sources = {0: "before"}
    mr.get_per_device_resource = sources.__getitem__
    mr.set_per_device_resource = sources.__setitem__
    mr.CudaMemoryResource = lambda: "device"
    mr.ArenaMemoryResource = lambda above, nbytes: "own"
    rmm.mr, rmm.DeviceBuffer = mr, lambda size: order.append((sources[0], size))

    @contextmanager
    def using(arena):
        before, sources[0] = sources[0], arena
        yield
        sources[0] = before

    monkeypatch.setitem(sys.modules, "rmm", rmm)
    monkeypatch.setattr(integration, "using", using)
    monkeypatch.setattr(frameworks, "ROUNDS", 5)
    yield order
    assert sources == {0: "before"}


def status(monkeypatch, reason):
    now = types.SimpleNamespace(why_python=reason)
    monkeypatch.setattr(integration, "status", lambda: now)


def test_rmm_buffers_are_timed_over_either_arena(used, monkeypatch):
    status(monkeypatch, None)
    timing = frameworks.rmm_buffer("host")
    assert timing.ratios.keys() == {"RMM's arena", "gpumem"}
    assert timing.reference == "RMM's arena"
    assert {size for _, size in used} == {1 << 20}
    sources = {source for source, _ in used}
    assert "own" in sources
    assert {type(each) for each in sources - {"own"}} == {gpumem.Arena}
    assert frameworks.goal("rmm.DeviceBuffer", "gpumem") == "<= 0.8"


def test_rmm_that_has_to_call_python_is_not_measured(used, monkeypatch):
    status(monkeypatch, "it was not compiled: g++ is not found")
    with pytest.raises(RuntimeError, match=r"has to call Python: .* g\+\+ is not found"):
        frameworks.rmm_buffer("host")
    assert not used
