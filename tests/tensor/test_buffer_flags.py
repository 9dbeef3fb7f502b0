"""The buffer protocol, flag by flag, through the C call that consumers make."""

import ctypes
import gc

import numpy as np
import pytest

import gpumem

SIMPLE, WRITABLE, FORMAT, ND = 0, 1, 4, 8
STRIDES = 0x10 | ND
C_ORDER, F_ORDER, ANY_ORDER = 0x20 | STRIDES, 0x40 | STRIDES, 0x80 | STRIDES
INDIRECT = 0x100 | STRIDES


class View(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    )


_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = (ctypes.py_object, ctypes.POINTER(View), ctypes.c_int)
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.POINTER(View),)


@pytest.fixture
def ask():
    """Ask for a view with flags; views are released at the end."""
    held = []

    def ask(tensor, flags):
        view = View()
        _get(tensor, view, flags)
        held.append(view)
        return view

    yield ask
    for view in held:
        _release(view)


def tensors(resource):
    """One tensor for each order of elements."""
    whole = gpumem.zeros((4, 6), "f4", resource=resource)
    turned = gpumem.asarray(whole.numpy().T)
    return {"C": whole, "F": turned, "neither": whole[:, ::2], "backwards": whole[::-1]}


ORDERS = {
    "C": {SIMPLE, ND, STRIDES, C_ORDER, ANY_ORDER, INDIRECT},
    "F": {STRIDES, F_ORDER, ANY_ORDER, INDIRECT},
    "neither": {STRIDES, INDIRECT},
    "backwards": {STRIDES, INDIRECT},
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("flags", [SIMPLE, ND, STRIDES, C_ORDER, F_ORDER, ANY_ORDER, INDIRECT])
@pytest.mark.parametrize("more", [0, FORMAT, WRITABLE, FORMAT | WRITABLE])
def test_buffer_view_is_given_where_its_flags_describe_the_layout(arena, ask, order, flags, more):
    tensor = tensors(arena)[order]
    if flags not in ORDERS[order]:
        with pytest.raises(BufferError, match="not in the order asked for"):
            ask(tensor, flags | more)
        return
    view = ask(tensor, flags | more)
    assert (view.buf, view.len, view.itemsize) == (tensor.ptr, tensor.nbytes, 4)
    assert (view.readonly, view.ndim) == (0, 2)
    assert view.format == (b"f" if more & FORMAT else None)
    assert bool(view.shape) == bool(flags & ND)
    assert bool(view.strides) == (flags & STRIDES == STRIDES)
    assert not view.suboffsets
    if view.shape:
        assert tuple(view.shape[:2]) == tensor.shape
    if view.strides:
        assert tuple(view.strides[:2]) == tensor.strides


@pytest.mark.parametrize("flags", [SIMPLE, ND, STRIDES, C_ORDER, INDIRECT | FORMAT])
def test_read_only_memory_refuses_writable_views(arena, ask, flags):
    tensor = gpumem.zeros(3, "i4", resource=arena).as_read_only()
    assert ask(tensor, flags).readonly == 1
    with pytest.raises(BufferError, match="read-only"):
        ask(tensor, flags | WRITABLE)
    with pytest.raises(TypeError, match="not writable"):
        (ctypes.c_char * 4).from_buffer(tensor)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "M8[s]", "m8[ns]"])
def test_dtype_without_a_format_is_given_without_the_format_flag(arena, ask, dtype):
    tensor = gpumem.zeros(3, dtype, resource=arena)
    view = ask(tensor, STRIDES)
    assert (view.format, view.itemsize) == (None, tensor.itemsize)
    with pytest.raises(BufferError, match="no format for"):
        ask(tensor, STRIDES | FORMAT)
    with pytest.raises(BufferError, match="no format for"):
        memoryview(tensor)
    assert memoryview(tensor.view(f"u{tensor.itemsize}")).nbytes == tensor.nbytes


@pytest.mark.parametrize("dtype", ["?", "i2", "u8", "f2", "c8", ">f4", "S5", "U3", "V6", "g"])
def test_buffer_format_equals_numpys(arena, dtype):
    tensor = gpumem.zeros((2, 3), dtype, resource=arena)
    expected = memoryview(np.zeros((2, 3), dtype))
    seen = memoryview(tensor)
    assert (seen.format, seen.shape, seen.strides) == (
        expected.format,
        expected.shape,
        expected.strides,
    )


def test_zero_dimensional_view_has_no_shape_and_strides(ask):
    tensor = gpumem.zeros((), "f8", memory="host")
    view = ask(tensor, INDIRECT | FORMAT)
    assert (view.ndim, view.len, bool(view.shape), bool(view.strides)) == (0, 8, False, False)
    assert memoryview(tensor).tolist() == 0.0


def test_refused_view_holds_no_reference(arena, ask):
    tensor = gpumem.zeros((4, 6), "f4", resource=arena)
    for part, flags in ((tensor[:, ::2], ND), (tensor.as_read_only(), WRITABLE)):
        with pytest.raises(BufferError):
            ask(part, flags)
    del part, tensor
    gc.collect()
    assert arena.stats().in_use == 0


def test_view_keeps_the_memory_of_a_dropped_tensor(arena):
    view = memoryview(gpumem.full(4, 7, "u1", resource=arena))
    gc.collect()
    assert view.tolist() == [7, 7, 7, 7]
    assert arena.stats().in_use > 0
    view.release()
    del view
    assert arena.stats().in_use == 0
