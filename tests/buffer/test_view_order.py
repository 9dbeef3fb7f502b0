"""Views of a buffer's bytes come after what gpumem queued on them, and wait for nothing else."""

from __future__ import annotations

import os

import numpy as np
import pytest
from helpers.driver import HostDriver
from helpers.waiting import opened_soon

import gpumem
from gpumem.interop import Importer, MemoryDescriptor, MemoryHandleType

NBYTES = 1 << 16
VIEWS = [memoryview, np.from_dlpack, lambda buffer: np.frombuffer(buffer, np.uint8)]


@pytest.fixture
def buffer(stream):
    with gpumem.Arena("host").allocate(NBYTES, stream) as buffer:
        memoryview(buffer)[:] = bytes(NBYTES)
        yield buffer


@pytest.mark.parametrize("view", VIEWS)
def test_view_of_a_buffer_shows_what_a_queued_copy_writes(view, buffer, stream):
    with gpumem.Arena("host").allocate(NBYTES) as source:
        memoryview(source)[:] = bytes([7]) * NBYTES
        gate = HostDriver().block(stream)
        gpumem.copy(buffer, source, stream)
        with opened_soon(gate):
            assert set(bytes(view(buffer))) == {7}


@pytest.mark.parametrize("view", VIEWS)
def test_view_that_may_be_written_waits_for_a_queued_copy_that_reads(view, buffer, stream):
    with gpumem.Arena("host").allocate(NBYTES) as taken:
        memoryview(buffer)[:] = bytes([7]) * NBYTES
        gate = HostDriver().block(stream)
        gpumem.copy(taken, buffer, stream)
        with opened_soon(gate):
            np.asarray(view(buffer))[:] = 9
        stream.synchronize()
        assert set(bytes(taken)) == {7}


@pytest.mark.parametrize("view", VIEWS)
def test_view_of_a_new_block_does_not_wait_for_its_stream(view, buffer, stream):
    with HostDriver().block(stream):
        assert len(view(buffer)) == NBYTES
        assert not stream.query()


def test_cpu_waits_for_a_copy_that_another_tensor_over_the_same_bytes_queued(stream):
    descriptor = os.memfd_create("pages")
    os.truncate(descriptor, 4096)
    described = MemoryDescriptor(descriptor, MemoryHandleType.MEMFD, 4096)
    memory = Importer.for_device("host").import_memory(described, consume=True)
    first, second = (memory.tensor((4096,), "u1") for _ in range(2))
    second.numpy()  # has waited, before anything was queued
    source = gpumem.full((4096,), 7, "u1", memory="host/host_accessible")
    gate = HostDriver().block(stream)
    gpumem.copy(first, source, stream)
    with opened_soon(gate):
        assert set(second.numpy().tolist()) == {7}
