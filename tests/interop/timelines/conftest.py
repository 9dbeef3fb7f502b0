"""Fixtures of the tests of timelines."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

import gpumem
from gpumem import _host
from gpumem.interop import HostTimeline, _host_timeline


@pytest.fixture(params=["page", "memory operations"])
def way(request):
    """How streams reach a HostTimeline: as the host device's do, and as a GPU's do."""
    _host_timeline._rehearse_memory_operations(request.param == "memory operations")
    yield request.param
    _host_timeline._rehearse_memory_operations(False)


@pytest.fixture
def timeline():
    with HostTimeline.create() as timeline:
        yield timeline


@pytest.fixture
def stream():
    return gpumem.Stream("host")


@pytest.fixture
def windows():
    """The host device takes Windows' handles."""
    _host.rehearse_windows(True)
    yield _host
    _host.rehearse_windows(False)


@pytest.fixture
def faults(host):
    """Faults of driver calls; none is left over, nor does an earlier test's end take one."""
    end_earlier_tests()
    yield host
    host.clear_faults()


def end_earlier_tests() -> None:
    """Give back what earlier tests dropped: in cycles, or put off while a stream used it."""
    gc.collect()
    device = gpumem.Device("host")
    device.synchronize()
    device.free_bytes  # noqa: B018


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def same_files():
    """Nothing is opened that is not closed again, nor mapped, registered or imported."""
    end_earlier_tests()
    files, live, maps = open_files(), _host.live(), timeline_maps()
    yield
    gpumem.Device("host").free_bytes  # noqa: B018
    now = _host.live()
    kinds = ("events", "allocations", "imports")
    assert open_files() == files
    assert {kind: now[kind] for kind in kinds} == {kind: live[kind] for kind in kinds}
    assert timeline_maps() == maps


def timeline_maps() -> int:
    return Path("/proc/self/maps").read_text().count("gpumem timeline")
