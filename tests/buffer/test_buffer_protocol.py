"""Buffers as Python buffers and NumPy arrays: what a view shows, and that it is no copy."""

import ctypes
import hashlib
import io

import numpy as np
import pytest


def test_a_memoryview_is_the_bytes_that_were_asked_for(arena):
    buffer = arena.allocate(1000)
    view = memoryview(buffer)
    assert (view.nbytes, view.itemsize, view.format, view.ndim) == (1000, 1, "B", 1)
    assert (view.shape, view.strides, view.readonly) == ((1000,), (1,), False)
    assert view.c_contiguous
    assert view.f_contiguous
    assert view.obj is buffer
    assert len(buffer) == 1000
    view.release()


def test_a_view_is_the_memory_itself(arena):
    buffer = arena.allocate(1000)
    memoryview(buffer)[:5] = b"hello"
    assert ctypes.string_at(buffer.ptr, 5) == b"hello"
    ctypes.memset(buffer.ptr, 7, 1000)
    assert set(memoryview(buffer)) == {7}
    array = np.frombuffer(buffer, np.float32)
    assert array.ctypes.data == buffer.ptr
    assert array.flags.writeable
    assert array.size == 250


def test_bytes_come_in_and_go_out_through_whatever_takes_a_buffer(arena):
    buffer = arena.allocate(1000)
    data = bytes(range(250)) * 4
    assert io.BytesIO(data).readinto(buffer) == 1000
    assert bytes(buffer) == bytearray(buffer) == data
    assert hashlib.sha256(buffer).digest() == hashlib.sha256(data).digest()
    assert (ctypes.c_char * 1000).from_buffer(buffer).raw == data


@pytest.mark.parametrize("dtype", ["u1", "f4", "c16", "M8[s]"])
def test_numpy_shows_any_type_over_it(arena, dtype):
    buffer = arena.allocate(1024)
    array = np.ndarray(1024 // np.dtype(dtype).itemsize, dtype, buffer)
    array[:] = np.ones(array.shape, dtype)
    assert (np.frombuffer(buffer, dtype) == array).all()


def test_many_views_live_side_by_side(arena):
    buffer = arena.allocate(100)
    views = [memoryview(buffer) for _ in range(100)]
    for view in views[::2]:
        view.release()
    views[1][0] = 9
    assert views[99][0] == 9
    del views
    buffer.close()
    assert arena.stats().in_use == 0


def test_an_empty_buffer_has_an_empty_view(arena):
    buffer = arena.allocate(0)
    assert memoryview(buffer).nbytes == 0
    assert np.asarray(memoryview(buffer)).shape == (0,)


def test_views_made_and_dropped_leave_nothing_behind(arena):
    buffer = arena.allocate(100)
    for _ in range(1000):
        np.frombuffer(buffer, np.uint8)
    buffer.close()
    assert arena.stats().in_use == 0
