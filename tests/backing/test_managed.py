"""Managed memory: hints as settings and on buffers, checked and handed to the driver."""

import numpy as np
import pytest
from helpers.driver import HostDriver

import gpumem

MIB = 1 << 20
MANAGED = "host/managed"
ADVISE, PREFETCH = "cuMemAdvise", "cuMemPrefetchAsync"
OUT_OF_MEMORY, UNKNOWN = 2, 999


@pytest.fixture
def faults(host):
    yield host
    host.clear_faults()


@pytest.mark.parametrize(
    ("settings", "advised", "prefetched"),
    [
        ({}, 0, 0),
        ({"managed_read_mostly": "true"}, 1, 0),
        ({"arena.managed_preferred_location": "host"}, 1, 0),
        ({"managed_accessed_by": "device"}, 1, 0),
        ({"managed_prefetch": "device"}, 0, 1),
        (
            {
                "managed_read_mostly": True,
                "managed_preferred_location": "device",
                "managed_accessed_by": "host",
                "managed_prefetch": "host",
            },
            3,
            1,
        ),
    ],
)
def test_managed_hints_are_given_once_per_region(make_arena, host, settings, advised, prefetched):
    before = host.call_count(ADVISE), host.call_count(PREFETCH)
    arena = make_arena(settings, MANAGED)
    held = [arena.allocate(MIB // 2) for _ in range(2)]
    after = host.call_count(ADVISE), host.call_count(PREFETCH)
    assert after == (before[0] + advised, before[1] + prefetched)
    assert arena.config == gpumem.ArenaConfig.from_mapping(arena.config.to_mapping())
    held.clear()


@pytest.mark.parametrize("memory", ["host", "host/host_accessible"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("managed_read_mostly", True),
        ("managed_preferred_location", "host"),
        ("managed_accessed_by", "device"),
        ("managed_prefetch", "device"),
    ],
)
def test_managed_hints_on_other_memory_are_refused(memory, field, value):
    with pytest.raises(gpumem.ConfigError, match=f"{field} = .* it takes managed memory"):
        gpumem.Arena(memory, {field: value})


@pytest.mark.parametrize("value", ["cpu", "", "cuda:0", 1, True])
def test_managed_prefetch_rejects_unknown_values(value):
    with pytest.raises(gpumem.ConfigError, match='"none", "device", "host"'):
        gpumem.ArenaConfig(managed_prefetch=value)


@pytest.mark.parametrize("call", [1, 2, 3, 4])
@pytest.mark.parametrize("error", [OUT_OF_MEMORY, UNKNOWN])
def test_region_is_released_when_its_hint_fails(faults, call, error):
    before = faults.live()["allocations"]
    settings = {
        "managed_read_mostly": True,
        "managed_preferred_location": "device",
        "managed_accessed_by": "host",
        "managed_prefetch": "device",
        "extend_strategy": "same_as_requested",
    }
    with gpumem.Arena(MANAGED, settings) as arena:
        faults.fail(ADVISE if call < 4 else PREFETCH, call if call < 4 else 1, error, 0)
        with pytest.raises((gpumem.OutOfMemoryError, gpumem.errors.DriverError)) as caught:
            arena.allocate(MIB)
        if error == UNKNOWN:
            assert caught.value.call == (ADVISE if call < 4 else PREFETCH)
        assert faults.live()["allocations"] == before
        assert arena.stats().reserved == 0


def test_prefetch_is_ordered_on_its_stream(make_arena, host):
    stream, driver = gpumem.Stream("host"), HostDriver()
    buffer = make_arena(memory=MANAGED).allocate(MIB, stream)
    calls = host.call_count(PREFETCH)
    with driver.block(stream):
        buffer.prefetch()
        assert not stream.query()
        buffer.prefetch("host", gpumem.Stream("host"))
    stream.synchronize()
    assert host.call_count(PREFETCH) == calls + 2
    buffer.close()


def test_prefetch_and_advise_keep_the_bytes(make_arena):
    buffer = make_arena(memory=MANAGED).allocate(1000)
    np.frombuffer(buffer, np.uint8)[:] = 5
    buffer.prefetch("host:0")
    for advice in ("read_mostly", "preferred_location", "accessed_by"):
        buffer.advise(advice)
        buffer.advise(advice, "host")
        buffer.advise(f"unset_{advice}", gpumem.Device("host"))
    assert (np.frombuffer(buffer, np.uint8) == 5).all()


@pytest.mark.parametrize("memory", ["host", "host/host_accessible"])
def test_prefetch_and_advise_on_other_memory_are_refused(make_arena, memory):
    buffer = make_arena(memory=memory).allocate(10)
    with pytest.raises(ValueError, match="is not managed memory and cannot be prefetched"):
        buffer.prefetch()
    with pytest.raises(ValueError, match="is not managed memory and cannot be advised"):
        buffer.advise("read_mostly")


def test_advise_rejects_unknown_hints_by_name(make_arena):
    buffer = make_arena(memory=MANAGED).allocate(10)
    with pytest.raises(ValueError, match="advice 'fast' is not one of"):
        buffer.advise("fast")
    with pytest.raises(ValueError, match="unknown device 'cpu'"):
        buffer.prefetch("cpu")
    with pytest.raises(ValueError, match='it takes a host device or "host"'):
        buffer.prefetch("cuda:0")
    with pytest.raises(TypeError, match="is not a stream"):
        buffer.prefetch(stream="fast")


def test_prefetch_of_closed_and_empty_buffers(make_arena, host):
    arena = make_arena(memory=MANAGED)
    calls = host.call_count(PREFETCH), host.call_count(ADVISE)
    empty, buffer = arena.allocate(0), arena.allocate(10)
    empty.prefetch()
    empty.advise("read_mostly")
    buffer.close()
    with pytest.raises(gpumem.errors.ClosedError):
        buffer.prefetch()
    with pytest.raises(gpumem.errors.ClosedError):
        buffer.advise("read_mostly")
    assert (host.call_count(PREFETCH), host.call_count(ADVISE)) == calls


def test_prefetch_raises_the_drivers_error(make_arena, faults):
    buffer = make_arena(memory=MANAGED).allocate(10)
    faults.fail(PREFETCH, 1, UNKNOWN)
    with pytest.raises(gpumem.errors.DriverError, match=PREFETCH):
        buffer.prefetch()
