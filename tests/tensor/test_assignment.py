"""Writing into tensors: one value, parts, arrays of the host and of others."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.driver import HostDriver

import gpumem

MEMORIES = ["host", "host/host_accessible", "host/managed"]


@pytest.mark.parametrize("memory", MEMORIES)
def test_fill_writes_every_element(memory):
    tensor = gpumem.zeros((3, 4), "int16", memory=memory)
    tensor.fill(7)
    assert tensor.tolist() == [[7] * 4] * 3


def test_fill_of_a_part_leaves_the_rest():
    tensor = gpumem.zeros((3, 4), "float32", memory="host")
    tensor[:, ::2].fill(2.5)
    assert tensor.tolist() == [[2.5, 0, 2.5, 0]] * 3


@pytest.mark.parametrize(
    ("dtype", "value", "error"),
    [
        ("int8", 128, OverflowError),
        ("uint8", -1, OverflowError),
        ("int8", [1, 2], ValueError),
        ("int8", "x", ValueError),
    ],
)
def test_value_that_the_dtype_does_not_hold_is_refused(dtype, value, error):
    tensor = gpumem.full((2, 2), 3, dtype, memory="host")
    with pytest.raises(error):
        tensor.fill(value)
    assert tensor.tolist() == [[3, 3], [3, 3]]


def test_read_only_and_closed_tensors_are_not_written():
    tensor = gpumem.zeros(3, "int8", memory="host")
    for write in (lambda view: view.fill(1), lambda view: view.__setitem__(0, 1)):
        with pytest.raises(BufferError, match="read-only"):
            write(tensor.as_read_only())
    assert tensor.tolist() == [0, 0, 0]
    tensor.buffer.close()
    with pytest.raises(gpumem.errors.ClosedError):
        tensor.fill(1)


@pytest.mark.parametrize(
    "value",
    [
        5,
        2.0,
        np.int8(4),
        np.array(9),
        [1, 2, 3],
        ((1, 2, 3), (4, 5, 6)),
        np.arange(3, dtype="int64"),
        np.arange(6, dtype="float16").reshape(2, 3)[:, ::-1],
        np.ones((1, 3), "float64"),
        np.ones((1, 1, 2, 3), "int8"),
    ],
    ids=repr,
)
def test_items_take_what_numpy_would_assign(value):
    tensor = gpumem.full((4, 3), -1, "float32", memory="host")
    expected = np.full((4, 3), -1, "float32")
    tensor[1:3] = value
    expected[1:3] = value
    assert tensor.tolist() == expected.tolist()


def test_item_is_one_element():
    tensor = gpumem.zeros((2, 2), "int32", memory="host")
    tensor[1, 0] = 6
    tensor[...] += np.int32(1)  # reads, adds as NumPy does, and writes back
    assert tensor.tolist() == [[1, 1], [7, 1]]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (np.zeros(3, "float64"), TypeError),  # floats into integers
        (np.zeros(4, "int32"), ValueError),
        ([1, 2], ValueError),
        ([300, 0, 0], OverflowError),
        (object(), TypeError),
        (gpumem.zeros(3, "int16", memory="host"), TypeError),  # nothing of others is converted
    ],
    ids=["kind", "shape", "list", "range", "object", "dtype"],
)
def test_invalid_items_leave_the_tensor_as_it_was(value, error):
    tensor = gpumem.full(3, 1, "int8", memory="host")
    with pytest.raises(error):
        tensor[:] = value
    assert tensor.tolist() == [1, 1, 1]


def test_values_of_another_shape_are_refused_with_both_shapes():
    tensor = gpumem.zeros((2, 3), "int8", memory="host")
    with pytest.raises(ValueError, match=r"shape \(2,\) do not fit into a tensor of shape \(3,\)"):
        tensor[0] = [1, 2]


def test_items_may_be_another_tensor():
    tensor = gpumem.zeros((2, 3), "int32", memory="host")
    tensor[:, :2] = gpumem.full((2, 2), 4, "int32", memory="host/host_accessible")
    tensor[0] = tensor[0, ::-1]  # overlapping
    assert tensor.tolist() == [[0, 4, 4], [4, 4, 0]]


def test_items_cannot_be_deleted():
    tensor = gpumem.zeros(3, "int8", memory="host")
    with pytest.raises((TypeError, NotImplementedError)):
        del tensor[0]


def test_fill_waits_for_a_queued_copy_out():
    """The fill is ordered behind work on the buffer's stream; the copy has the old value."""
    stream = gpumem.Stream("host")
    tensor = gpumem.zeros(4, "int32", memory="host/host_accessible", stream=stream)
    out = gpumem.zeros(4, "int32", memory="host/host_accessible", stream=stream)
    with HostDriver().block(stream) as gate:
        gpumem.copy(out, tensor, stream)
        tensor.fill(5, stream)
        gate.open()
    assert (out.tolist(), tensor.tolist()) == ([0] * 4, [5] * 4)


def test_transposed_view_has_the_dimensions_in_reverse():
    tensor = gpumem.asarray(np.arange(24, dtype="int16").reshape(2, 3, 4))
    assert tensor.T.shape == (4, 3, 2)
    assert tensor.T.ptr == tensor.ptr
    assert np.array_equal(tensor.T.numpy(), tensor.numpy().T)
    assert tensor.T.T.strides == tensor.strides
    assert gpumem.zeros((), "int8", memory="host").T.shape == ()


@pytest.mark.parametrize("memory", MEMORIES)
def test_elements_as_a_list(memory):
    tensor = gpumem.asarray(np.arange(6, dtype="int64").reshape(2, 3)).to(memory, copy=True)
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensor[1, 1].tolist() == 4


@pytest.mark.parametrize(
    "value", [300, np.int64(300), np.array(300), np.uint8(200), 300.0, np.float32(300)]
)
def test_number_that_the_dtype_does_not_hold_is_refused(value):
    tensor = gpumem.zeros(3, "int8", memory="host")
    with pytest.raises(OverflowError):
        tensor[0] = value
    with pytest.raises(OverflowError):
        tensor.fill(value)
    with pytest.raises(OverflowError):
        gpumem.full(3, value, "int8", memory="host")
    assert tensor.tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", [7, np.int64(7), np.uint8(7), 7.5, np.float32(7.5), True])
def test_number_that_the_dtype_holds_is_converted_by_numpys_rules(value):
    tensor = gpumem.zeros(3, "int8", memory="host")
    tensor[0] = value
    tensor[1:].fill(value)
    assert tensor.tolist() == [int(value)] * 3
