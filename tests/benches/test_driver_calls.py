"""The driver calls of a replay, made again by themselves."""

import pytest
from helpers.marks import NEEDS_CXX

import gpumem
from bench.replays import DriverCalls
from gpumem._testing import host_device
from gpumem.traces import load_trace

VIRTUAL = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease")

pytestmark = NEEDS_CXX


@pytest.fixture
def calls():
    return DriverCalls(load_trace("gpt2_varlen_train"), "host", {"backing": "virtual"})


def test_repeating_makes_the_recorded_calls_and_leaves_nothing_behind(calls):
    before, alive = {name: host_device.call_count(name) for name in VIRTUAL}, host_device.live()
    assert calls.nanoseconds() > 0
    made = {name: host_device.call_count(name) - before[name] for name in VIRTUAL}
    # Each handle is released, and each of its mappings taken away.
    assert made["cuMemCreate"] == made["cuMemRelease"] > 100
    assert made["cuMemMap"] >= made["cuMemCreate"]
    assert made["cuMemUnmap"] > 0 < made["cuMemSetAccess"] <= made["cuMemMap"]
    assert sum(made.values()) + 2 * _reservations(calls) == len(calls.record)
    assert host_device.live() == alive


def test_a_record_leaves_the_device_as_it_was(calls):
    noted = len(calls.record)
    gpumem.Arena("host", {"backing": "virtual"}).allocate(1 << 24)
    assert len(calls.record) == noted


def _reservations(calls):
    before = host_device.call_count("cuMemAddressReserve")
    calls.nanoseconds()
    return host_device.call_count("cuMemAddressReserve") - before
