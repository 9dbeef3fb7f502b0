"""Tensors with ones, and tensors like another array."""

import numpy as np
import pytest

import gpumem


@pytest.fixture
def tensor():
    return gpumem.full((2, 3), 7, "int16", memory="host/managed")


def test_ones_are_one_in_every_element():
    ones = gpumem.ones((2, 2), "float32", memory="host")
    assert ones.numpy().tolist() == [[1, 1], [1, 1]]
    assert ones.dtype == "float32"


def test_like_has_the_shape_dtype_and_memory_of_the_array(tensor):
    for made in (gpumem.empty_like(tensor), gpumem.zeros_like(tensor), tensor.copy()):
        assert (made.shape, made.dtype, made.memory) == (tensor.shape, tensor.dtype, tensor.memory)
        assert made.ptr != tensor.ptr
    assert not gpumem.zeros_like(tensor).numpy().any()
    assert gpumem.zeros_like(np.ones(3, "i8"), "f4").dtype == "float32"


def test_like_may_be_in_other_memory(tensor, arena):
    assert str(gpumem.zeros_like(tensor, memory="host").memory) == "host:0"
    made = gpumem.empty_like(tensor, resource=arena)
    assert made.buffer.resource is arena
    del made


def test_a_copy_is_in_c_order_and_of_its_own(tensor):
    column = tensor.T[1:]
    copied = column.copy()
    assert copied.strides == (4, 2)
    column.fill(1)
    assert copied.numpy().tolist() == [[7, 7], [7, 7]]


def test_values_that_are_no_arrays_are_refused():
    with pytest.raises(TypeError, match="invalid array of type int: expected a Tensor"):
        gpumem.zeros_like(3)
    with pytest.raises(TypeError, match="unknown keyword 'device': did you mean 'memory'"):
        gpumem.ones(3, "f4", device="host")
