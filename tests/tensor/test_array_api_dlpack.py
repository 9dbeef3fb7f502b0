"""The DLPack part of the array API standard, over a thin namespace around `gpumem.Tensor`.

Our own equivalent of what the standard's suite (array-api-tests, test_dlpack) asks of a library,
written from the standard's text because that suite is not installable here: devices that may be
named, every combination of keywords, and `from_dlpack`, which keeps device and values. Wider than
it in rank, emptiness, read-only memory and layouts.
"""

import itertools
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import dlpack

import gpumem

# Each dtype is one test, which goes through every shape and keyword: a failure names the case.
DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
          "float32", "float64", "complex64", "complex128"]  # fmt: skip
SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (2, 3, 4), (1, 1, 1, 1, 1)]
DEVICE_TYPES = {1, 2, 3, 4, 7, 8, 9, 10, 13, 14}  # that the suite accepts
ABSENT = Enum("Keyword", ["ABSENT"]).ABSENT  # which, unlike an object(), names itself in tests' ids
COPIES = [ABSENT, True, False, None]
VERSIONS = [ABSENT, (0, 0), (1, 0), (2, 0)]
DEVICES = [ABSENT, (1, 0)]


def asarray(array):
    tensor = gpumem.empty(array.shape, array.dtype, memory="host")
    tensor.numpy()[...] = array
    return tensor


xp = SimpleNamespace(
    asarray=asarray,
    from_dlpack=gpumem.from_dlpack,
    cpu=gpumem.Device("host"),
    device=lambda x: x.device,
)


def arrays(dtype, shapes, rng):
    """Yield tensors of random elements in each shape, and in other layouts, beside NumPy's."""
    for shape in shapes:
        bits = np.frombuffer(rng.randbytes(int(np.prod(shape)) * 16), "u1")
        values = bits[: int(np.prod(shape))].astype(dtype).reshape(shape)
        yield values, xp.asarray(values)
        for axis in range(len(shape)):
            twice = np.repeat(values, 2, axis)
            every = (slice(None),) * axis + (slice(None, None, 2),)
            yield values, xp.asarray(twice)[every]


def keywords(**values):
    return {name: value for name, value in values.items() if value is not ABSENT}


@pytest.mark.parametrize("dtype", DTYPES)
def test_dlpack_device_is_a_pair_that_the_standard_knows(dtype, rng):
    for values, tensor in arrays(dtype, SHAPES, rng):
        device_type, device_id = tensor.__dlpack_device__()
        assert device_type in DEVICE_TYPES, values.shape
        assert type(device_id) is int, values.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_combination_of_keywords_gives_a_capsule(dtype, rng):
    each = itertools.product(arrays(dtype, SHAPES, rng), COPIES, VERSIONS, DEVICES)
    for (values, tensor), copy, version, device in each:
        given = keywords(copy=copy, max_version=version, dl_device=device)
        case = (values.shape, tensor.strides, given)
        capsule = tensor.__dlpack__(**given)
        versioned = version in ((1, 0), (2, 0))
        assert (dlpack.kind_of(capsule) is dlpack.VERSIONED) == versioned, case
        seen = dlpack.tensor_of(capsule)
        assert tuple(seen.shape[: seen.ndim]) == values.shape, case
        if values.size:
            assert (seen.data == tensor.ptr) == (copy is not True), case


@pytest.mark.parametrize("dtype", DTYPES)
def test_from_dlpack_keeps_device_dtype_and_values(dtype, rng):
    each = itertools.product(arrays(dtype, SHAPES, rng), COPIES, [ABSENT, xp.cpu])
    for (values, tensor), copy, device in each:
        given = keywords(copy=copy, device=device)
        case = (values.shape, tensor.strides, given)
        made = xp.from_dlpack(tensor, **given)
        assert (made.shape, made.dtype) == (values.shape, values.dtype), case
        assert xp.device(made) == xp.device(tensor) == xp.cpu, case
        assert made.numpy().tobytes() == values.tobytes(), case
        if values.size:
            assert (made.buffer is tensor.buffer) == (copy is not True), case


@pytest.mark.parametrize("copy", [ABSENT, False, None])
def test_view_sees_later_writes_and_a_copy_does_not(copy, rng):
    for _, tensor in arrays("int32", [(2, 3)], rng):
        shared = xp.from_dlpack(tensor, **keywords(copy=copy))
        apart = xp.from_dlpack(tensor, copy=True)
        before = apart.numpy().copy()
        tensor.numpy()[...] = 77
        assert (shared.numpy() == 77).all()
        assert np.array_equal(apart.numpy(), before)


@pytest.mark.parametrize("device", [(2, 0), (3, 0), (10, 0), (1, 1), (99, 0)])
def test_export_to_an_unreachable_device_is_a_buffer_error(device):
    tensor = xp.asarray(np.arange(3))
    for copy in COPIES:
        with pytest.raises(BufferError):
            tensor.__dlpack__(**keywords(dl_device=device, copy=copy))


def test_read_only_memory_is_exported_only_with_its_flag():
    tensor = xp.asarray(np.arange(3)).as_read_only()
    assert dlpack.managed_of(tensor.__dlpack__(max_version=(1, 0))).flags == 1
    for version in (ABSENT, None, (0, 8)):
        with pytest.raises(BufferError, match="read-only"):
            tensor.__dlpack__(**keywords(max_version=version))
    assert dlpack.managed_of(tensor.__dlpack__(max_version=(1, 0), copy=True)).flags == 2
    assert xp.from_dlpack(tensor).read_only
    assert not xp.from_dlpack(tensor, copy=True).read_only


def test_legacy_copy_of_read_only_memory_is_allowed():
    tensor = xp.asarray(np.arange(3)).as_read_only()
    assert dlpack.kind_of(tensor.__dlpack__(copy=True)) is dlpack.LEGACY
