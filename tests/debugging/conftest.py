"""Arenas with a debug heap, and faults that really write."""

import ctypes

import pytest

# HOST memory is looked at by the CPU, the other kinds by the driver's copies.
MEMORIES = ["host", "host/host_accessible", "host/managed"]


@pytest.fixture(params=MEMORIES)
def memory(request):
    return request.param


@pytest.fixture
def debugged(make_arena, memory):
    return make_arena(memory=memory, debug_heap=True, name="debugged")


@pytest.fixture
def write(driver):
    """Write bytes at an address: by the CPU, or queued on a stream."""

    def write(address, nbytes=1, value=7, stream=None):
        if stream is None:
            ctypes.memset(address, value, nbytes)
        else:
            driver.call("cuMemsetD8Async", address, value, nbytes, stream.ptr)

    return write
