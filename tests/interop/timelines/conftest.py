"""Fixtures of the tests of timelines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.quiesce import quiesce

import gpumem
from gpumem._testing import host_device, timelines
from gpumem.interop import HostTimeline


@pytest.fixture(params=["page", "memory operations"])
def way(request):
    """How streams reach a HostTimeline: as the host device's do, and as a GPU's do."""
    timelines.rehearse_memory_operations(request.param == "memory operations")
    yield request.param
    timelines.rehearse_memory_operations(False)


@pytest.fixture
def timeline():
    with HostTimeline.create() as timeline:
        yield timeline


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def same_files():
    """Nothing is opened that is not closed again, nor mapped, registered or imported."""
    quiesce()
    files, live, maps = open_files(), host_device.live(), timeline_maps()
    yield
    gpumem.Device("host").free_bytes  # noqa: B018
    now = host_device.live()
    kinds = ("events", "allocations", "imports")
    assert open_files() == files
    assert {kind: now[kind] for kind in kinds} == {kind: live[kind] for kind in kinds}
    assert timeline_maps() == maps


def timeline_maps() -> int:
    return Path("/proc/self/maps").read_text().count("gpumem timeline")
