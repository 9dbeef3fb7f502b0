"""Buffers as Python buffers and NumPy arrays: what a view shows, and that it is no copy."""

import ctypes
import hashlib
import io

import numpy as np
import pytest

from gpumem.errors import AsleepError, ClosedError


def test_memoryview_has_the_requested_bytes(arena):
    buffer = arena.allocate(1000)
    view = memoryview(buffer)
    assert (view.nbytes, view.itemsize, view.format, view.ndim) == (1000, 1, "B", 1)
    assert (view.shape, view.strides, view.readonly) == ((1000,), (1,), False)
    assert view.c_contiguous
    assert view.f_contiguous
    assert view.obj is buffer
    assert len(buffer) == 1000
    view.release()


def test_memoryview_shares_the_memory(arena):
    buffer = arena.allocate(1000)
    memoryview(buffer)[:5] = b"hello"
    assert ctypes.string_at(buffer.ptr, 5) == b"hello"
    ctypes.memset(buffer.ptr, 7, 1000)
    assert set(memoryview(buffer)) == {7}
    array = np.frombuffer(buffer, np.float32)
    assert array.ctypes.data == buffer.ptr
    assert array.flags.writeable
    assert array.size == 250


def test_buffer_works_with_readinto_and_write(arena):
    buffer = arena.allocate(1000)
    data = bytes(range(250)) * 4
    assert io.BytesIO(data).readinto(buffer) == 1000
    assert bytes(buffer) == bytearray(buffer) == data
    assert hashlib.sha256(buffer).digest() == hashlib.sha256(data).digest()
    assert (ctypes.c_char * 1000).from_buffer(buffer).raw == data


@pytest.mark.parametrize("dtype", ["u1", "f4", "c16", "M8[s]"])
def test_numpy_views_any_dtype_over_a_buffer(arena, dtype):
    buffer = arena.allocate(1024)
    array = np.ndarray(1024 // np.dtype(dtype).itemsize, dtype, buffer)
    array[:] = np.ones(array.shape, dtype)
    assert (np.frombuffer(buffer, dtype) == array).all()


def test_asarray_is_a_view_of_the_bytes(arena):
    buffer = arena.allocate(100)
    array = np.asarray(buffer)
    array[:] = 3
    assert (array.dtype, array.shape, set(memoryview(buffer))) == (np.uint8, (100,), {3})
    assert np.array(buffer, "u2").tolist() == [3] * 100


def test_asarray_of_a_buffer_without_bytes_raises(arena):
    """In place of an array of objects that has the buffer in it."""
    sleeping, closed = arena.allocate(100), arena.allocate(100)
    closed.close()
    with pytest.raises(ClosedError):
        np.asarray(closed)
    arena.sleep()
    with pytest.raises(AsleepError):
        np.asarray(sleeping)
    arena.wake()


def test_several_views_coexist(arena):
    buffer = arena.allocate(100)
    views = [memoryview(buffer) for _ in range(100)]
    for view in views[::2]:
        view.release()
    views[1][0] = 9
    assert views[99][0] == 9
    del views
    buffer.close()
    assert arena.stats().in_use == 0


def test_empty_buffer_has_an_empty_view(arena):
    buffer = arena.allocate(0)
    assert memoryview(buffer).nbytes == 0
    assert np.asarray(memoryview(buffer)).shape == (0,)


def test_dropped_views_leave_nothing(arena):
    buffer = arena.allocate(100)
    for _ in range(1000):
        np.frombuffer(buffer, np.uint8)
    buffer.close()
    assert arena.stats().in_use == 0
