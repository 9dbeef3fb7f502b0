"""Views of a buffer's bytes come after what gpumem queued on them, and wait for nothing else."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from helpers.driver import HostDriver

import gpumem

NBYTES = 1 << 16
VIEWS = [memoryview, np.from_dlpack, lambda buffer: np.frombuffer(buffer, np.uint8)]


@pytest.fixture
def stream():
    return gpumem.Stream("host")


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
        opener = threading.Timer(0.05, gate.open)
        opener.start()
        assert set(bytes(view(buffer))) == {7}
        opener.join()


@pytest.mark.parametrize("view", VIEWS)
def test_view_that_may_be_written_waits_for_a_queued_copy_that_reads(view, buffer, stream):
    with gpumem.Arena("host").allocate(NBYTES) as taken:
        memoryview(buffer)[:] = bytes([7]) * NBYTES
        gate = HostDriver().block(stream)
        gpumem.copy(taken, buffer, stream)
        opener = threading.Timer(0.05, gate.open)
        opener.start()
        np.asarray(view(buffer))[:] = 9
        opener.join()
        stream.synchronize()
        assert set(bytes(taken)) == {7}


@pytest.mark.parametrize("view", VIEWS)
def test_view_of_a_new_block_does_not_wait_for_its_stream(view, buffer, stream):
    with HostDriver().block(stream):
        assert len(view(buffer)) == NBYTES
        assert not stream.query()
