"""RMM's integration over a made-up RMM; tests/gpu/test_rmm_on_gpu.py has the real one."""

import gc
import re
import sys
import types

import pytest

import gpumem
import gpumem.integrations.rmm as integration
from gpumem._testing.integrations import Resources
from gpumem.errors import ConfigError, IntegrationError, MissingFrameworkError
from gpumem.integrations.rmm import RmmStatus, _native


class DeviceMemoryResource:
    pass


class CallbackMemoryResource(DeviceMemoryResource):
    def __init__(self, allocate, deallocate):
        self.allocate, self.deallocate = allocate, deallocate


@pytest.fixture
def mr(monkeypatch):
    """RMM's ``rmm.mr`` with the host as device 0."""
    rmm, mr, stream = (types.ModuleType(name) for name in ("rmm", "rmm.mr", "rmm.stream"))
    rmm.__version__, rmm.mr = "26.10.00", mr
    mr.DeviceMemoryResource, mr.CallbackMemoryResource = (
        DeviceMemoryResource,
        CallbackMemoryResource,
    )
    mr.own = DeviceMemoryResource()
    mr.sources = {0: mr.own}
    mr.get_per_device_resource = mr.sources.__getitem__
    mr.set_per_device_resource = mr.sources.__setitem__
    stream.Stream = lambda obj: obj
    monkeypatch.setitem(sys.modules, "rmm", rmm)
    monkeypatch.setitem(sys.modules, "rmm.pylibrmm", types.ModuleType("rmm.pylibrmm"))
    monkeypatch.setitem(sys.modules, "rmm.pylibrmm.stream", stream)
    monkeypatch.setattr(
        integration,
        "Resources",
        lambda name, given=None: Resources(
            name, given, kinds=(gpumem.MemoryKind.HOST,), device_type="host"
        ),
    )
    monkeypatch.setattr(integration._Rmm, "device_type", "host")
    _native._parts.cache_clear()
    yield mr
    _native._parts.cache_clear()
    assert integration._switch.current() is None


@pytest.fixture
def arena():
    with gpumem.Arena("host", {"max_mem": 1 << 24}) as arena:
        yield arena
        gc.collect()


def test_enable_serves_the_device_and_disable_gives_it_back(mr, arena, stream):
    integration.enable(arena)
    source = mr.sources[0]
    address = source.allocate(1000, stream)
    assert arena.stats().requested_in_use == 1000
    integration.disable()
    assert mr.sources[0] is mr.own
    source.deallocate(address, 1000, stream)
    assert arena.stats().in_use == 0


def test_out_of_memory_is_a_memory_error(mr, arena):
    with integration.using(arena), pytest.raises(MemoryError, match="out of memory"):
        mr.sources[0].allocate(1 << 30, gpumem.Stream("host"))


def test_none_means_the_default_resource_of_the_first_block(mr):
    with integration.using(), gpumem.using_resource(gpumem.Arena("host")) as default:
        address = mr.sources[0].allocate(1, gpumem.Stream("host"))
        assert default.stats().in_use
        mr.sources[0].deallocate(address, 1, gpumem.Stream("host"))


def test_rmm_resource_serves_gpumem(mr, arena):
    with integration.using(arena):
        resource = integration.resource(mr.sources[0], memory="host")
        with resource.allocate(1000):
            assert arena.stats().requested_in_use == 1000
    assert arena.stats().in_use == 0


def test_allocator_is_their_resource_over_ours_and_switches_nothing(mr, arena):
    source, stream = integration.allocator(arena), gpumem.Stream("host")
    assert isinstance(source, DeviceMemoryResource)
    assert mr.sources[0] is mr.own
    address = source.allocate(1000, stream)
    assert arena.stats().requested_in_use == 1000
    source.deallocate(address, 1000, stream)
    assert arena.stats().in_use == 0


def test_status_names_the_resources_that_serve_rmm_and_how(mr, arena, monkeypatch):
    def not_compiled():  # whether librmm is there or not
        raise RuntimeError("g++ is not found")

    monkeypatch.setattr(_native, "_library", not_compiled)
    off = RmmStatus(False, {}, None, None)
    assert integration.status() == off
    with integration.using(arena):
        now = integration.status()
        assert (now.enabled, now.resources, now.calls) == (True, {0: arena}, "python")
        assert now.why_python == "it was not compiled: g++ is not found"
    with integration.using():
        assert integration.status().resources == {}
    assert integration.status() == off


def test_rmm_of_another_layout_is_called_through_python(mr, arena, monkeypatch):
    library = types.SimpleNamespace(gpumem_rmm_field_bytes=lambda: 1 << 10)
    monkeypatch.setattr(_native, "_library", lambda: library)
    with integration.using(arena):
        assert isinstance(mr.sources[0], CallbackMemoryResource)
        reason = integration.status().why_python
    assert re.fullmatch(
        r"this RMM's DeviceMemoryResource has \d+ bytes, and as declared it has \d+", reason
    )


@pytest.fixture
def compiled(monkeypatch):
    """The C++ resource as far as RMM's Python sees it."""

    class ArenaResource(DeviceMemoryResource):
        def __init__(self, arena):
            self.arena = arena

    monkeypatch.setattr(_native, "why_not", lambda: None)
    monkeypatch.setattr(_native, "resource_over", ArenaResource)
    return ArenaResource


def test_arena_is_called_directly_where_that_can_be_compiled(mr, arena, compiled):
    with integration.using(arena):
        assert isinstance(mr.sources[0], compiled)
        assert mr.sources[0].arena is arena
        assert (integration.status().calls, integration.status().why_python) == ("c++", None)
    assert mr.sources[0] is mr.own
    assert isinstance(integration.allocator(arena), compiled)


def test_resource_that_is_no_arena_is_called_through_python(mr, arena, compiled):
    limited = gpumem.adaptors.limit(arena, 1 << 20)
    assert isinstance(integration.allocator(limited), CallbackMemoryResource)


def test_default_arena_is_called_directly_after_its_first_block(mr, compiled, stream):
    with integration.using(), gpumem.using_resource(gpumem.Arena("host")) as default:
        first = mr.sources[0]
        address = first.allocate(1, stream)
        assert mr.sources[0].arena is default
        first.deallocate(address, 1, stream)
    assert mr.sources[0] is mr.own


def test_default_arena_does_not_replace_a_resource_that_another_thread_has_set(mr, compiled):
    stream, other = gpumem.Stream("host"), DeviceMemoryResource()
    with integration.using(), gpumem.using_resource(gpumem.Arena("host")):
        first = mr.sources[0]
        mr.sources[0] = other
        first.deallocate(first.allocate(1, stream), 1, stream)
        assert mr.sources[0] is other


def test_invalid_arguments_are_named(mr, arena):
    with pytest.raises(TypeError, match=r"is not an rmm\.mr\.DeviceMemoryResource"):
        integration.resource(arena)
    for wrong in (None, mr.own, [arena]):
        with pytest.raises(TypeError, match=r"is not a gpumem\.MemoryResource"):
            integration.allocator(wrong)
    with pytest.raises(ConfigError, match="host_accessible"):
        integration.using(gpumem.Arena("host/host_accessible"))


def test_unsupported_rmm_is_named_with_the_reason(mr, monkeypatch):
    sys.modules["rmm"].__version__ = "24.12.00"
    calls = (integration.enable, lambda: integration.allocator(gpumem.Arena("host")))
    for call in calls:
        with pytest.raises(IntegrationError, match=r"RMM 24\.12\.00 was found"):
            call()
    monkeypatch.setitem(sys.modules, "rmm", None)
    for call in calls:
        _native._parts.cache_clear()
        with pytest.raises(MissingFrameworkError, match="rmm-cu13"):
            call()
