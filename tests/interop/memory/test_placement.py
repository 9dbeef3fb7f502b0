"""Where a tensor may lie in imported memory, and what is said of one that may not."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumem.errors import AlignmentError, InvalidDescriptorError, OutOfBoundsError
from gpumem.interop import MemoryDescriptor, MemoryHandleType
from gpumem.interop.memory.placement import place_tensor

pytestmark = pytest.mark.usefixtures("nothing_left")

NBYTES = 1 << 16


def test_overlapping_tensors_share_bytes(memory):
    words = memory.tensor(8, "u4").numpy()
    octets = memory.tensor((4, 4), "u1", offset=8).numpy()
    words[2] = 0x04030201
    assert octets[0].tolist() == [1, 2, 3, 4]


def test_memory_and_tensor_offsets_add_up(importer, describe, fd):
    with importer.import_memory(describe(offset=4096)) as memory:
        assert (memory.offset, memory.nbytes, memory.size) == (4096, NBYTES - 4096, NBYTES)
        os.pwrite(fd, b"\x2a", 4096 + 7)
        tensor = memory.tensor(1, "u1", offset=7)
        assert tensor.numpy()[0] == 42
        assert tensor.ptr == memory.ptr + 7
        with pytest.raises(OutOfBoundsError) as caught:
            memory.tensor(1, "u1", offset=NBYTES - 4096)
        error = caught.value
        assert (error.size, error.memory_offset, error.tensor_offset, error.extent) == (
            NBYTES, 4096, NBYTES - 4096, 1,
        )  # fmt: skip
        for number in ("65536", "4096", "61440"):
            assert number in str(error)
        del tensor


def test_row_pitch_may_exceed_the_row(memory, fd):
    tensor = memory.tensor((3, 2, 5), "u2", offset=256, row_pitch=64)
    assert tensor.strides == (128, 64, 2)
    tensor.numpy()[...] = np.arange(30).reshape(3, 2, 5)
    assert np.frombuffer(os.pread(fd, 10, 256 + 64 * 3), "u2").tolist() == [15, 16, 17, 18, 19]
    assert os.pread(fd, 54, 256 + 10) == bytes(54)


def test_last_row_needs_no_padding(memory):
    rows = NBYTES // 4096
    memory.tensor((rows, 100), "u1", offset=NBYTES - 4096 * (rows - 1) - 100, row_pitch=4096)
    with pytest.raises(OutOfBoundsError):
        memory.tensor((rows, 100), "u1", offset=NBYTES - 4096 * (rows - 1) - 99, row_pitch=4096)


@pytest.mark.parametrize(
    ("shape", "dtype", "more"),
    [
        ((), "f8", {"offset": NBYTES - 8}),
        ((0,), "f8", {"offset": NBYTES}),
        ((5, 0), "f8", {"strides": (1 << 62, 8)}),
        (NBYTES, "u1", {}),
        ((2, 3), "u1", {"strides": (0, 1)}),
    ],
)
def test_tensor_that_exactly_fits_is_accepted(memory, shape, dtype, more):
    tensor = memory.tensor(shape, dtype, **more)
    assert tensor.numpy().shape == np.empty(shape, "u1").shape


@pytest.mark.parametrize(
    ("shape", "dtype", "more", "error", "says"),
    [
        ((), "f8", {"offset": NBYTES - 7}, OutOfBoundsError, "8 B at offset 65529"),
        ((), "f8", {"offset": 4}, AlignmentError, "not a multiple of float64's 8 bytes"),
        ((0,), "u1", {"offset": NBYTES + 1}, OutOfBoundsError, "65537"),
        ((1 << 62,), "f8", {}, OutOfBoundsError, "36893488147419103232"),
        ((1 << 40, 1 << 40), "u1", {}, OutOfBoundsError, "1208925819614629174706176"),
        ((2,), "u1", {"strides": (1 << 63,)}, InvalidDescriptorError, "9223372036854775808"),
        ((2, 2), "u1", {"strides": ((1 << 63) - 1, 1)}, OutOfBoundsError, "9223372036854775809"),
        ((4,), "f4", {"strides": (6,)}, AlignmentError, "stride 6"),
        ((4,), "f4", {"strides": (-4,)}, InvalidDescriptorError, "stride -4"),
        ((4,), "f4", {"strides": (4, 4)}, InvalidDescriptorError, "2 numbers for 1 dim"),
        ((4,), "f4", {"strides": 4}, InvalidDescriptorError, "strides 4"),
        ((4,), "f4", {"row_pitch": 64}, InvalidDescriptorError, "two dimensions"),
        ((2, 4), "f4", {"row_pitch": 15}, InvalidDescriptorError, "less than a row's 16"),
        ((2, 4), "f4", {"row_pitch": 18}, AlignmentError, "stride 18"),
        ((2, 4), "f4", {"row_pitch": True}, InvalidDescriptorError, "row_pitch True"),
        (
            (2, 4),
            "f4",
            {"row_pitch": 16, "strides": (16, 4)},
            InvalidDescriptorError,
            "cannot be combined",
        ),
        ((-1,), "f4", {}, InvalidDescriptorError, "-1"),
        ((True,), "f4", {}, InvalidDescriptorError, "True"),
        ((2.0,), "f4", {}, InvalidDescriptorError, r"2\.0"),
        ("22", "f4", {}, InvalidDescriptorError, "shape '22'"),
        (None, "f4", {}, InvalidDescriptorError, "shape None"),
        ((1,) * 65, "f4", {}, InvalidDescriptorError, "65 dimensions"),
        ((1 << 62, 1 << 62), "u1", {"strides": (0, 0)}, InvalidDescriptorError, "more than"),
        ((1 << 62,), "f8", {"strides": (0,)}, InvalidDescriptorError, "more than"),
        ((0, 1 << 62, 1 << 62), "u1", {}, InvalidDescriptorError, "more than"),
        ((4,), "no such", {}, InvalidDescriptorError, "no such"),
        ((4,), object, {}, InvalidDescriptorError, "Python objects"),
        ((4,), "f4", {"offset": -4}, InvalidDescriptorError, "offset -4"),
        ((4,), "f4", {"read_only": "no"}, InvalidDescriptorError, "read_only 'no'"),
    ],
)
def test_tensor_beyond_the_memory_is_refused_with_numbers(memory, shape, dtype, more, error, says):
    with pytest.raises(error, match=says):
        memory.tensor(shape, dtype, **more)
    assert memory.exports == 0


def test_read_only_memory_gives_read_only_tensors(importer, describe, fd):
    os.pwrite(fd, b"\x05", 0)
    with importer.import_memory(describe(read_only=True)) as memory:
        tensor = memory.tensor(4, "u1")
        assert (tensor.read_only, tensor.numpy().flags.writeable) == (True, False)
        assert tensor.numpy()[0] == 5
        with pytest.raises(InvalidDescriptorError, match="read_only = False"):
            memory.tensor(4, "u1", read_only=False)
        with pytest.raises(BufferError, match="read-only"):
            tensor.__dlpack__()  # a capsule without the flag
        with pytest.raises(BufferError, match="read-only"):
            tensor.buffer.__dlpack__()
        assert memoryview(tensor.buffer).readonly
        assert not np.from_dlpack(tensor.buffer).flags.writeable
        assert tensor[1:].view("i1").read_only
        del tensor


def test_tensor_of_writable_memory_can_be_read_only(memory):
    assert memory.tensor(4, "u1", read_only=True).read_only
    assert not memory.tensor(4, "u1").read_only


class Extents:
    """Every byte that a tensor's elements touch, by walking over all of them."""

    @staticmethod
    def of(shape, strides, itemsize):
        starts = (
            sum(i * step for i, step in zip(at, strides, strict=True))
            for at in itertools.product(*map(range, shape))
        )
        return max(start + itemsize for start in starts)


@settings(max_examples=300)
@given(
    shape=st.lists(st.integers(1, 4), max_size=3),
    data=st.data(),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    offset=st.integers(0, 40),
    memory_offset=st.integers(0, 40),
)
def test_bounds_check_matches_a_reference(shape, data, itemsize, offset, memory_offset):
    strides = [data.draw(st.integers(0, 12)) * itemsize for _ in shape]
    reach = memory_offset + offset * itemsize + Extents.of(shape, strides, itemsize)
    size = data.draw(st.integers(max(1, memory_offset, reach - 2), reach + 2))
    memory = MemoryDescriptor(0, MemoryHandleType.MEMFD, size, memory_offset)

    def place():
        return place_tensor(
            memory, 0, shape, np.dtype(f"u{itemsize}"), offset * itemsize, strides, None, None, 64
        )

    if reach > size:
        with pytest.raises(OutOfBoundsError):
            place()
    else:
        assert place().extent == Extents.of(shape, strides, itemsize)
