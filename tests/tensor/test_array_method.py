"""``Tensor.__array__``: each dtype and each copy, by NumPy 2's rules also under NumPy 1.26."""

import numpy as np
import pytest

import gpumem

NUMPY_2 = np.lib.NumpyVersion(np.__version__) >= "2.0.0"
OTHER, SAME = np.dtype("f8"), np.dtype("f4")


@pytest.fixture
def tensor():
    return gpumem.full((2, 3), 5, "f4", memory="host")


def is_shared(array, tensor):
    return array.ctypes.data == tensor.ptr


@pytest.mark.parametrize("dtype", [None, SAME, "f4", np.float32])
@pytest.mark.parametrize(("copy", "shared"), [(None, True), (False, True), (True, False)])
def test_same_dtype_gives_a_view_unless_copy_is_true(tensor, dtype, copy, shared):
    array = tensor.__array__(dtype, copy=copy)
    assert (array.dtype, array.shape) == (SAME, (2, 3))
    assert is_shared(array, tensor) == shared
    assert (array == 5).all()
    array[0] = 6
    assert (tensor.numpy()[0] == (6 if shared else 5)).all()


@pytest.mark.parametrize("dtype", [OTHER, "i2", ">f4", complex])
@pytest.mark.parametrize("copy", [None, True])
def test_other_dtype_gives_a_copy(tensor, dtype, copy):
    array = tensor.__array__(dtype, copy=copy)
    assert array.dtype == np.dtype(dtype)
    assert not is_shared(array, tensor)
    assert (array == 5).all()


@pytest.mark.parametrize("dtype", [OTHER, "i2", ">f4"])
def test_other_dtype_with_copy_false_is_refused(tensor, dtype):
    with pytest.raises(ValueError, match="needs a copy"):
        tensor.__array__(dtype, copy=False)


def test_array_method_accepts_positional_and_bare_calls():
    tensor = gpumem.zeros(3, "i4", memory="host")
    assert is_shared(tensor.__array__(), tensor)
    assert tensor.__array__(OTHER).dtype == OTHER


def test_invalid_dtype_is_refused(tensor):
    with pytest.raises(TypeError):
        tensor.__array__("nonsense")


def test_read_only_tensor_gives_a_read_only_view_and_a_writable_copy(tensor):
    held = tensor.as_read_only()
    assert not held.__array__().flags.writeable
    assert held.__array__(copy=True).flags.writeable
    assert held.__array__(OTHER).flags.writeable


@pytest.mark.parametrize(("dtype", "shared"), [(None, True), (SAME, True), (OTHER, False)])
def test_numpy_asarray_copies_only_for_another_dtype(tensor, dtype, shared):
    assert is_shared(np.asarray(tensor, dtype), tensor) == shared
    assert not is_shared(np.array(tensor, dtype), tensor)


@pytest.mark.skipif(not NUMPY_2, reason="NumPy before 2.0 asks __array__ for no copy")
def test_numpy_2_passes_copy(tensor):
    assert is_shared(np.asarray(tensor, copy=False), tensor)
    assert is_shared(np.array(tensor, copy=None), tensor)
    assert not is_shared(np.asarray(tensor, copy=True), tensor)
    with pytest.raises(ValueError, match="copy"):  # NumPy's own, or that of __array__
        np.asarray(tensor, OTHER, copy=False)


@pytest.mark.skipif(NUMPY_2, reason="before NumPy 2.0 copy=False means: only if needed")
def test_numpy_1_copies_only_if_needed(tensor):
    assert is_shared(np.array(tensor, copy=False), tensor)
    assert np.array(tensor, OTHER, copy=False).dtype == OTHER
