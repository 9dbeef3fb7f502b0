"""Files in memory, an importer of the host device, and what must be as it was afterwards."""

from __future__ import annotations

import gc
import os

import pytest
from helpers.descriptors import open_descriptors

import gpumem
from gpumem.interop import Importer, MemoryDescriptor, MemoryHandleType

NBYTES = 1 << 16
ALWAYS_THERE = {"workers", "streams", "events", "handles", "mappings", "reservations"}


def things_alive(host) -> dict[str, int]:
    """Return what imports hold on the host devices; default arenas hold pages and streams."""
    gpumem.Device("host").synchronize()  # a dropped arena stays until its work is done
    gpumem.Device("host").free_bytes  # noqa: B018  # releases unreferenced arenas
    gpumem.Device("host").synchronize()  # a pool's blocks are freed in stream order
    gpumem.get_default_resource("host").shrink()  # its pages are files, and come with its growth
    return {name: count for name, count in host.live().items() if name not in ALWAYS_THERE}


@pytest.fixture
def importer():
    return Importer.for_device("host")


@pytest.fixture
def fd():
    number = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(number, NBYTES)
    yield number
    os.close(number)


@pytest.fixture
def describe(fd):
    """Make a descriptor of the test's file; what is given differs from the usual."""

    def make(**changes) -> MemoryDescriptor:
        values = {"handle": fd, "handle_type": MemoryHandleType.MEMFD, "size": NBYTES, **changes}
        return MemoryDescriptor(**values)

    return make


@pytest.fixture
def memory(importer, describe):
    with importer.import_memory(describe()) as memory:
        yield memory


@pytest.fixture
def nothing_left(host):
    """After the test: as many descriptors, imports and registered pages as before."""
    gc.collect()
    before = things_alive(host), open_descriptors()
    yield
    gc.collect()
    assert (things_alive(host), open_descriptors()) == before
