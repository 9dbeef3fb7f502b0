"""Managed memory: advice and prefetches of buffers, checked and handed to the driver."""

import numpy as np
import pytest

import gpumem

MIB = 1 << 20
MANAGED = "host/managed"
ADVISE, PREFETCH = "cuMemAdvise", "cuMemPrefetchAsync"
OUT_OF_MEMORY, UNKNOWN = 2, 999


def test_managed_regions_get_no_advice_of_their_own(make_arena, host):
    before = host.call_count(ADVISE), host.call_count(PREFETCH)
    with make_arena(memory=MANAGED).allocate(MIB):
        assert (host.call_count(ADVISE), host.call_count(PREFETCH)) == before


@pytest.mark.parametrize("location", [None, "host", "host:0"])
@pytest.mark.parametrize("advice", ["read_mostly", "preferred_location", "accessed_by"])
def test_advise_and_prefetch_are_one_driver_call_each(make_arena, host, advice, location):
    advised, prefetched = host.call_count(ADVISE), host.call_count(PREFETCH)
    with make_arena(memory=MANAGED).allocate(MIB) as buffer:
        buffer.advise(advice, location)
        buffer.prefetch(location)
    assert host.call_count(ADVISE) == advised + 1
    assert host.call_count(PREFETCH) == prefetched + 1


@pytest.mark.parametrize(
    "field",
    [
        "managed_read_mostly",
        "managed_preferred_location",
        "managed_accessed_by",
        "managed_prefetch",
    ],
)
def test_settings_for_managed_hints_are_unknown_keys(field):
    with pytest.raises(gpumem.ConfigError, match=f"unknown key '{field}'"):
        gpumem.Arena(MANAGED, {field: "device"})


def test_prefetch_is_ordered_on_its_stream(make_arena, host, driver, stream):
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
    with pytest.raises(ValueError, match=r"advice \['fast'\] is not one of"):
        buffer.advise(["fast"])
    for absent in ("cuda:0", "host:77"):
        with pytest.raises(ValueError, match='expected a host device that is there, or "host"'):
            buffer.prefetch(absent)
        with pytest.raises(ValueError, match="is not a device that host:0/managed can move to"):
            buffer.advise("preferred_location", absent)
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


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, UNKNOWN])
@pytest.mark.parametrize("call", [ADVISE, PREFETCH])
def test_prefetch_and_advise_raise_the_drivers_error(make_arena, host, call, error):
    buffer = make_arena(memory=MANAGED).allocate(10)
    host.fail(call, 1, error)
    with pytest.raises(gpumem.errors.DriverError, match=call):
        buffer.prefetch() if call == PREFETCH else buffer.advise("accessed_by")
