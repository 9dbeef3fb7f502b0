"""Tensors as values: dtypes, shapes, strides, indexing, reshape and view, against NumPy."""

import copy
import gc
import itertools
import operator
import pickle
from operator import add, eq, floordiv, matmul, mod, mul, ne, sub, truediv

import ml_dtypes
import numpy as np
import pytest
from helpers import child
from helpers.dlpack import NUMPY_KNOWS_VERSIONS as KNOWS_VERSIONS
from helpers.driver import HostDriver

import gpumem
from gpumem.errors import ClosedError

NUMPY = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
ML = [
    "bfloat16",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]
# What NumPy stores and DLPack has no name for.
ODD = [">f4", "g", "S5", "U3", "M8[s]", "m8[ns]", "V6", [("a", "i4"), ("b", "f8")]]
SHAPES = [(), (0,), (1,), (5,), (2, 3), (0, 4), (3, 0, 2), (1, 1, 1), (2, 3, 4, 5, 6), (1,) * 32]


def tensor_like(array):
    """A tensor in gpumem's own memory with an array's elements."""
    tensor = gpumem.empty(array.shape, array.dtype, memory="host")
    tensor.numpy()[...] = array
    return tensor


def same(tensor, array):
    assert tensor.shape == array.shape
    assert tensor.dtype == array.dtype
    seen = tensor.numpy()
    assert np.array_equal(seen.view("u1") if seen.dtype.kind == "V" else seen, array)
    return True


# ---- making --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMPY + ML + ODD, ids=str)
def test_zeros_of_every_dtype_in_every_shape(dtype):
    for shape in SHAPES:
        tensor = gpumem.zeros(shape, dtype, memory="host")
        array = np.zeros(shape, tensor.dtype)
        assert (tensor.shape, tensor.ndim, tensor.size) == (shape, len(shape), array.size)
        assert (tensor.nbytes, tensor.itemsize) == (array.nbytes, array.itemsize), shape
        assert tensor.nbytes == tensor.buffer.nbytes, shape
        seen = tensor.numpy()
        assert (seen.shape, seen.dtype, seen.nbytes) == (shape, array.dtype, array.nbytes)
        assert seen.tobytes() == array.tobytes(), shape
        if array.size:
            assert seen.strides == tensor.strides == array.strides, shape
            assert seen.ctypes.data == tensor.ptr == tensor.buffer.ptr, shape


@pytest.mark.parametrize(
    "given", [np.float32, "float32", "f4", np.dtype("f4"), float, bool, ml_dtypes.bfloat16]
)
def test_dtype_accepts_numpys_forms(given):
    assert gpumem.empty(3, given, memory="host").dtype == np.dtype(given)


@pytest.mark.parametrize(
    "dtype", [object, "O", [("a", object)], "V0", "S0", ("f4", (2,)), None, "nonsense", 7]
)
def test_unsupported_dtype_is_refused(dtype):
    with pytest.raises(TypeError):
        gpumem.empty(3, dtype, memory="host")


@pytest.mark.parametrize(
    ("shape", "expected"), [(3, (3,)), (np.int64(3), (3,)), ([2, 3], (2, 3)), (range(3), (0, 1, 2))]
)
def test_shape_is_an_integer_or_a_sequence(shape, expected):
    assert gpumem.empty(shape, "i1", memory="host").shape == expected


@pytest.mark.parametrize(
    ("shape", "error"),
    [
        ((-1,), ValueError),
        ((2**63,), ValueError),
        ((2**62, 2**62), ValueError),
        ((0, 2**62, 2**62), ValueError),
        ((1,) * 65, ValueError),
        ((1.0,), TypeError),
        ((True,), TypeError),
        ("ab", TypeError),
        (None, TypeError),
        (2.5, TypeError),
    ],
)
def test_invalid_shape_is_refused(arena, shape, error):
    with pytest.raises(error, match="shape"):
        gpumem.empty(shape, "f4", resource=arena)
    assert arena.stats().num_allocs == 0


def test_shape_beyond_the_address_space_is_out_of_memory(arena):
    with pytest.raises(gpumem.OutOfMemoryError):
        gpumem.empty(2**60, "u1", resource=arena)


@pytest.mark.parametrize("dtype", NUMPY + ML, ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_full_has_its_value_everywhere(dtype, stream):
    given = gpumem.Stream("host") if stream else None
    for size in (0, 1, 7, 1000):
        tensor = gpumem.full(size, 1, dtype, memory="host", stream=given)
        assert (tensor.numpy() == np.full(size, 1, tensor.dtype)).all(), size
        value = 3.25 if tensor.dtype.kind in "fc" else 1
        odd = gpumem.full((size, 2), value, dtype, memory="host")
        expected = np.full((size, 2), odd.numpy().flat[0] if size else 0, odd.dtype)
        assert (odd.numpy() == expected).all(), size


def test_full_infers_the_dtype_and_refuses_values_out_of_range():
    assert gpumem.full(2, 1.5, memory="host").dtype == np.float64
    assert gpumem.full(2, True, memory="host").dtype == np.bool_
    with pytest.raises(OverflowError):
        gpumem.full(2, 300, "u1", memory="host")
    with pytest.raises(ValueError, match="not a scalar"):
        gpumem.full(2, [1, 2], "u1", memory="host")


def test_tensor_is_256_byte_aligned():
    assert gpumem.empty(3, "f4", memory="host").ptr % 256 == 0


def test_tensor_attributes_and_repr(arena):
    tensor = gpumem.empty((2, 3), "f4", resource=arena)
    assert (tensor.memory, tensor.device) == (arena.memory, gpumem.Device("host"))
    assert tensor.buffer.resource is arena
    assert not tensor.read_only
    assert len(tensor) == 2
    assert "(2, 3) float32" in repr(tensor)
    with pytest.raises(TypeError, match="no length"):
        len(gpumem.empty((), "f4", resource=arena))


@pytest.mark.parametrize("make", [gpumem.Tensor, lambda: gpumem.Tensor.__new__(gpumem.Tensor)])
def test_tensor_cannot_be_constructed_directly(make):
    with pytest.raises(TypeError):
        make()
    with pytest.raises(TypeError):
        object.__new__(gpumem.Tensor)


def test_dropping_the_last_tensor_frees_the_block(arena):
    tensor = gpumem.empty((2, 3), "f4", resource=arena)
    view = tensor[1:]
    del tensor
    assert arena.stats().in_use > 0
    del view
    assert arena.stats().in_use == 0


def test_tensor_operations_leak_nothing(arena):
    """Counts of objects and of blocks after many of each kind of view."""

    def use():
        tensor = gpumem.zeros((4, 4, 1, 1, 1), "f4", resource=arena)
        for view in (tensor[1:], tensor.reshape(16), tensor.view("u1"), tensor.as_read_only()):
            (
                np.from_dlpack(view) if not view.read_only or KNOWS_VERSIONS else None,
                view.numpy(),
                memoryview(view),
                view.__dlpack__(max_version=(1, 0)),
            )
        for wrong in (lambda: tensor["a"], lambda: tensor.reshape(3), lambda: tensor.view("V5")):
            with pytest.raises((TypeError, ValueError)):
                wrong()

    use()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(200):
        use()
    gc.collect()
    assert len(gc.get_objects()) - before < 50
    assert arena.stats().in_use == 0


def test_missing_ml_dtypes_is_named_in_the_error():
    child.run_quietly("""
import sys
sys.modules["ml_dtypes"] = None
import gpumem
try:
    gpumem.empty(3, "bfloat16", memory="host")
except TypeError as error:
    assert "pip install ml_dtypes" in str(error)
else:
    raise AssertionError
""")


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("fp32", "float32"),
        ("fp64", "float64"),
        ("fp8_e4m3", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        ("f2", "float16"),  # one letter is NumPy's, and counts bytes
        ("i8", "int64"),
        ("u8", "uint64"),
        ("c16", "complex128"),
    ],
)
def test_short_names_of_dtypes(short, name):
    assert gpumem.empty(3, short, memory="host").dtype.name == name


@pytest.mark.parametrize(
    ("short", "names"),
    [
        ("i16", ("int16", "i2")),
        ("i64", ("int64", "i8")),
        ("u16", ("uint16", "u2")),
        ("u32", ("uint32", "u4")),
        ("f16", ("float16", "f2")),  # NumPy's long double
        ("f32", ("float32", "f4")),
        ("c64", ("complex64", "c8")),
        ("c128", ("complex128", "c16")),
    ],
)
@pytest.mark.parametrize(
    "take",
    [
        lambda dtype: gpumem.empty(3, dtype, memory="host"),
        lambda dtype: gpumem.full(3, 1, dtype, memory="host"),
        lambda dtype: gpumem.zeros(8, "u1", memory="host").view(dtype),
        lambda dtype: gpumem.Arena("host").allocate(64).tensor(2, dtype),
        lambda dtype: gpumem.Arena("host").virtual(8, dtype),
        lambda dtype: gpumem.planning.GraphBuilder().input("x", dtype, (2,)),
    ],
)
def test_short_name_that_counts_bits_is_refused_with_the_right_spellings(short, names, take):
    with pytest.raises(TypeError, match=rf"'{short}': .* expected '{names[0]}' or '{names[1]}'"):
        take(short)


def test_dtypes_of_pytorch_are_read_without_importing_it():
    # What a dtype of PyTorch is to a program: a class of the module torch, and a repr.
    names = ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "complex64"]
    kind = type("dtype", (), {"__module__": "torch", "__repr__": lambda self: f"torch.{self.name}"})
    for name in names:
        given = kind()
        given.name = name
        assert gpumem.zeros(2, given, memory="host").dtype.name == name
    given = kind()
    given.name = "qint8"
    with pytest.raises(TypeError, match=r"invalid dtype torch\.qint8: expected"):
        gpumem.empty(2, given, memory="host")


def test_unknown_dtype_is_named_with_what_is_accepted():
    with pytest.raises(TypeError, match=r"invalid dtype 'float99': expected .* 'bfloat16'"):
        gpumem.empty(2, "float99", memory="host")


# ---- which resource ------------------------------------------------------------------------------


def test_memory_and_resource_arguments_must_agree(arena):
    assert gpumem.empty(3, "f4", memory="host:0", resource=arena).buffer.resource is arena
    with pytest.raises(ValueError, match="not that of the resource"):
        gpumem.empty(3, "f4", memory="host/managed", resource=arena)
    with pytest.raises(TypeError, match="not a MemoryResource"):
        gpumem.empty(3, "f4", resource="host")
    with pytest.raises(ValueError, match="unknown device"):
        gpumem.empty(3, "f4", memory="nonsense")


class Environment:
    def __init__(self, **allocators) -> None:
        self.allocators = allocators

    def shared_allocator(self, memory):
        return self.allocators.get(str(memory.kind.value))


def test_environment_argument_selects_its_allocator(arena):
    environment = Environment(host=arena)
    assert gpumem.empty(3, "f4", memory="host", environment=environment).buffer.resource is arena
    with pytest.raises(gpumem.errors.NoAllocatorError, match="host:0/managed"):
        gpumem.zeros(3, "f4", memory="host/managed", environment=environment)
    with pytest.raises(ValueError, match="both"):
        gpumem.empty(3, "f4", resource=arena, environment=environment)


def test_tensor_stream_is_the_blocks(arena, stream):
    for make in (gpumem.empty, gpumem.zeros):
        assert make(3, "f4", resource=arena, stream=stream).buffer.stream == stream
    assert gpumem.empty(3, "f4", resource=arena).buffer.stream.ptr in (0, 1)  # the legacy stream


# ---- indexing ------------------------------------------------------------------------------------


def keys(rng, rank, count):
    parts = [
        lambda: rng.randint(-2, 1),
        lambda: slice(rng.choice([None, -9, -2, 0, 1, 9]), rng.choice([None, -9, -1, 0, 2, 9]),
                      rng.choice([None, 1, 2, -1, -2, 7, -(2**62), 2**62])),
        lambda: None,
    ]  # fmt: skip
    for _ in range(count):
        key = [rng.choice(parts)() for _ in range(rng.randint(0, rank))]
        if rng.random() < 0.4:
            key.insert(rng.randint(0, len(key)), Ellipsis)
        yield tuple(key)


def test_basic_indexing_equals_numpys(rng):
    array = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)[:, ::-1, :, 1:]
    tensor = tensor_like(np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5))[:, ::-1, :, 1:]
    for key in keys(rng, 4, 2000):
        try:
            expected = array[key]
        except IndexError:
            with pytest.raises(IndexError):
                tensor[key]
        else:
            view = tensor[key]
            assert np.array_equal(view.numpy(), expected), key
            assert view.shape == np.shape(expected), key
            again = key[:1]
            assert view[None].shape == (1, *view.shape), again


@pytest.mark.parametrize("key", [3, -3, (0, 5), (0, 0, 0), 2**70])
def test_index_out_of_range_is_refused(key):
    with pytest.raises(IndexError):
        gpumem.zeros((2, 3), "i1", memory="host")[key]


@pytest.mark.parametrize(
    "key", ["a", 1.0, [0, 1], True, (True,), np.array([0, 1]), np.ones((2, 3), bool), np.True_]
)
def test_advanced_indexing_is_refused_with_what_is_accepted(key):
    with pytest.raises(TypeError, match=r"invalid index .*: expected integers, slices, Ellipsis"):
        gpumem.zeros((2, 3), "i1", memory="host")[key]


def test_iteration_covers_the_first_dimension():
    tensor = tensor_like(np.arange(6).reshape(3, 2))
    assert [row.numpy().tolist() for row in tensor] == [[0, 1], [2, 3], [4, 5]]


# ---- reshape and view ----------------------------------------------------------------------------


def shapes_of(size):
    found = {(size,), (-1,), (1, size), (size, 1), (1, size, 1)}
    for a, b in itertools.product(range(1, size + 1), repeat=2):
        if size % (a * b) == 0:
            found |= {(a, b, size // (a * b)), (a, -1, b)}
    return sorted(found)


@pytest.mark.parametrize("copy", ["no", 0, 1, np.True_, []])
def test_reshape_takes_a_bool_or_none_for_copy(copy):
    with pytest.raises(TypeError, match="copy"):
        tensor_like(np.arange(6).reshape(2, 3)).reshape(6, copy=copy)


def test_reshape_gives_a_view_exactly_where_numpy_does(rng):
    base = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    cuts = [(), (Ellipsis, slice(None, None, -1)), (slice(None), 1), (slice(None), slice(1)),
            (slice(None), None, slice(None, 2)), (Ellipsis, slice(None, None, 2))]  # fmt: skip
    tensor = tensor_like(base)
    for cut in cuts:
        array, view = base[cut], tensor[cut]
        for shape in shapes_of(array.size):
            expected, got = array.reshape(shape), view.reshape(shape)
            assert np.array_equal(got.numpy(), expected)
            shared = got.buffer is tensor.buffer
            assert shared == np.shares_memory(expected, base), (cut, shape)
            if shared:
                assert view.reshape(*shape, copy=False).shape == expected.shape
            else:
                with pytest.raises(BufferError, match="without a copy"):
                    view.reshape(shape, copy=False)


def test_reshape_of_empty_and_single_elements():
    empty = gpumem.empty((0, 3), "f4", memory="host")
    assert empty.reshape(3, 0, 5).shape == (3, 0, 5)
    one = gpumem.zeros((), "f4", memory="host")
    assert one.reshape(1, 1).reshape(()).shape == ()
    assert one.reshape([1]).shape == (1,)
    assert one.reshape(1, copy=True).ptr != one.ptr


@pytest.mark.parametrize("shape", [(5,), (4, -1), (-1, -1), (-2, 3), (0, -1)])
def test_reshape_to_another_size_is_refused(shape):
    with pytest.raises(ValueError, match="shape"):
        gpumem.zeros((2, 3), "i1", memory="host").reshape(shape)


def test_view_reinterprets_the_bytes():
    array = np.arange(24, dtype="u4").reshape(4, 6)
    tensor = tensor_like(array)
    for dtype in ("f4", "u2", "u1", "u8", "c8", ">i4", "bfloat16"):
        seen = tensor.view(dtype)
        expected = array.view(seen.dtype)
        assert seen.shape == expected.shape
        assert seen.numpy().tobytes() == expected.tobytes()
        assert seen.ptr == tensor.ptr
    assert tensor[:, ::-1].view("i4").shape == (4, 6)
    for wrong in (tensor[:, ::2], tensor[:, ::-1]):
        with pytest.raises(ValueError, match="adjacent"):
            wrong.view("u2")
    with pytest.raises(ValueError, match="multiple"):
        tensor[:, :3].view("u8")
    with pytest.raises(ValueError, match="without dimensions"):
        tensor[0, 0].view("u1")


def test_contiguous_copies_only_non_contiguous_tensors(stream):
    tensor = tensor_like(np.arange(12).reshape(3, 4))
    assert tensor.contiguous() is tensor
    turned = tensor[::-1, ::2]
    copy = turned.contiguous()
    assert np.array_equal(copy.numpy(), turned.numpy())
    assert (copy.strides, copy.memory) == ((16, 8), tensor.memory)
    assert np.array_equal(turned.contiguous(stream).numpy(), turned.numpy())
    assert turned.contiguous(stream).buffer.stream == stream


# ---- to another memory ---------------------------------------------------------------------------

MEMORIES = ["host", "host/host_accessible", "host/managed"]


@pytest.mark.parametrize("source", MEMORIES)
@pytest.mark.parametrize("target", MEMORIES)
def test_to_copies_only_between_incompatible_memories(source, target):
    array = np.arange(12).reshape(3, 4)
    tensor = gpumem.empty((3, 4), array.dtype, memory=source)
    tensor.numpy()[:] = array
    shared = gpumem.MemoryInfo.parse(source).shares_memory_with(target)
    moved = tensor[:, 1:].to(target)
    assert np.array_equal(moved.numpy(), array[:, 1:])
    assert (moved.buffer is tensor.buffer) == shared
    if not shared:
        assert str(moved.memory) == str(gpumem.MemoryInfo.parse(target))
        with pytest.raises(BufferError, match="copy=False"):
            tensor.to(target, copy=False)
    forced = tensor.to(target, gpumem.Stream("host"), copy=True)
    assert forced.buffer is not tensor.buffer
    assert np.array_equal(forced.numpy(), array)
    assert forced.memory == gpumem.MemoryInfo.parse(target)


# ---- asarray -------------------------------------------------------------------------------------


def test_asarray_shares_existing_memory():
    tensor = gpumem.zeros(3, "f4", memory="host")
    assert gpumem.asarray(tensor) is tensor
    for array in (
        np.arange(6).reshape(2, 3).T,
        np.zeros(2, [("a", "i4")]),
        np.array(5.0),
        np.arange(4)[::-1],
        np.zeros((0, 3)),
        np.zeros(3, ml_dtypes.bfloat16),
    ):
        seen = gpumem.asarray(array)
        assert (seen.shape, seen.dtype) == (array.shape, array.dtype)
        assert np.array_equal(seen.numpy(), array)
        assert seen.ptr == array.ctypes.data or not array.size


def test_asarray_accepts_sequences_scalars_and_buffers():
    assert gpumem.asarray([[1, 2], [3, 4]]).numpy().tolist() == [[1, 2], [3, 4]]
    assert gpumem.asarray(3).shape == ()
    data = bytearray(b"abc")
    seen = gpumem.asarray(data)
    assert seen.dtype == np.uint8
    data[0] = 7
    assert seen.numpy()[0] == 7
    assert gpumem.asarray(b"abc").read_only
    with pytest.raises(TypeError, match="Python objects"):
        gpumem.asarray([object()])
    pinned = gpumem.zeros(2, "i1", memory="host/host_accessible")
    assert gpumem.asarray(pinned, memory="host/managed").memory.kind is gpumem.MemoryKind.MANAGED


def test_read_only_array_stays_read_only():
    array = np.arange(3)
    array.flags.writeable = False
    makers = [gpumem.asarray]
    if KNOWS_VERSIONS:
        makers.append(gpumem.from_dlpack)
    else:
        with pytest.raises(BufferError, match="readonly"):  # NumPy's own refusal
            gpumem.from_dlpack(array)
    for make in makers:
        seen = make(array)
        assert seen.read_only
        assert not seen.numpy().flags.writeable
        assert seen[1:].read_only


def test_numpy_array_lives_as_long_as_its_tensor():
    class Array(np.ndarray):
        gone = 0

        def __del__(self):
            Array.gone += 1

    view = gpumem.asarray(np.arange(5).view(Array))[1:].numpy()
    gc.collect()
    assert (view.tolist(), Array.gone) == ([1, 2, 3, 4], 0)
    del view
    assert Array.gone == 1


# ---- one element as a Python scalar --------------------------------------------------------------


def test_one_element_converts_to_scalars_as_in_numpy():
    for dtype in [*NUMPY, *ML]:
        array = np.ones((1, 1), dtype)
        tensor = gpumem.full((1, 1), 1, dtype, memory="host")
        assert tensor.item() == array.item(), dtype
        assert bool(tensor) is True
        if array.dtype.kind != "c":
            assert (int(tensor), float(tensor)) == (1, 1.0), dtype
        assert complex(tensor) == 1 + 0j, dtype
    assert not gpumem.zeros((), "f4", memory="host")
    assert [10, 20, 30][gpumem.full((), 2, "i8", memory="host")] == 30


def test_bytes_of_a_tensor_are_its_elements():
    """Python asks an object for an integer first, and makes so many zeros."""
    for array in (np.full((1, 1), 3), np.full(1, 3), np.arange(6, dtype="u2").reshape(2, 3).T):
        tensor = gpumem.asarray(array, memory="host")
        assert bytes(tensor) == bytearray(tensor) == array.tobytes(), array
        with pytest.raises(TypeError, match="not an integer"):
            operator.index(tensor)
    scalar = gpumem.full((), 3, memory="host")
    assert (bytes(scalar), operator.index(scalar)) == (np.array(3).tobytes(), 3)


def test_scalar_waits_for_the_tensors_stream(host):
    host.set_lag(2_000_000)
    assert gpumem.full((), 7, "i4", memory="host", stream=gpumem.Stream("host")).item() == 7


def test_tensors_of_other_lengths_are_no_scalars():
    for shape in (0, 2, (1, 2)):
        tensor = gpumem.zeros(shape, "f4", memory="host")
        for convert in (float, int, bool, complex, gpumem.Tensor.item):
            with pytest.raises(ValueError, match="expected exactly 1"):
                convert(tensor)


def test_only_integers_are_an_index():
    with pytest.raises(TypeError, match="float32 is not an integer"):
        [0][gpumem.zeros((), "f4", memory="host")]


# ---- a buffer's bytes as elements ----------------------------------------------------------------


def test_buffer_is_seen_as_elements_in_place():
    buffer = gpumem.Arena("host").allocate(64)
    whole = buffer.tensor((4, 4), "float32")
    assert (whole.ptr, whole.shape, whole.dtype) == (buffer.ptr, (4, 4), np.dtype("float32"))
    part = buffer.tensor(3, "int16", offset=8)
    part.fill(0x0101)
    assert bytes(memoryview(buffer)[8:14]) == b"\x01" * 6
    assert buffer.tensor((0, 5), "int64", offset=64).size == 0
    del buffer, whole  # a tensor keeps the block
    assert part.tolist() == [0x0101] * 3


@pytest.mark.parametrize(
    ("shape", "dtype", "offset", "told"),
    [
        (17, "float32", 0, "does not fit"),
        (16, "float32", 4, "does not fit"),
        ((1 << 40, 1 << 40), "float32", 0, "does not fit"),
        (1, "float32", 2, "invalid offset = 2: expected a multiple of 4"),
        (1, "int8", 65, "invalid offset = 65"),
        (1, "int8", -1, "invalid offset = -1"),
        (1, "int8", "1", "invalid offset = '1'"),
        (-1, "int8", 0, "-1"),
    ],
)
def test_elements_beyond_a_buffer_are_refused(shape, dtype, offset, told):
    buffer = gpumem.Arena("host").allocate(64)
    with pytest.raises(ValueError, match=told):
        buffer.tensor(shape, dtype, offset=offset)


def test_closed_buffer_has_no_elements():
    buffer = gpumem.Arena("host").allocate(64)
    buffer.close()
    with pytest.raises(gpumem.errors.ClosedError):
        buffer.tensor(1, "int8")


@pytest.mark.parametrize("make", [gpumem.empty, gpumem.zeros])
def test_new_tensors_may_be_shareable(make):
    tensor = make((4, 4), "int32", memory="host", shareable=True)
    gpumem.interop.export(tensor)
    assert gpumem.full(3, 7, memory="host", shareable=True).tolist() == [7, 7, 7]
    with pytest.raises(Exception, match="shareable"):
        gpumem.interop.export(make((4, 4), "int32", memory="host"))


def test_pinned_is_another_name_of_host_accessible():
    assert gpumem.MemoryInfo.parse("host/pinned") == gpumem.MemoryInfo.parse("host/host_accessible")
    assert gpumem.MemoryInfo("host", "pinned").kind is gpumem.MemoryKind.HOST_ACCESSIBLE
    assert str(gpumem.empty(3, "int8", memory="host/pinned").memory) == "host:0/host_accessible"


# ---- equality ------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [9, 9.0, 9j, True, [9], (9,)])
def test_tensor_and_a_number_or_a_list_are_not_compared(other):
    tensor = gpumem.full(1, 9, "int32", memory="host")
    for compare in (
        lambda: tensor == other,
        lambda: other == tensor,
        lambda: tensor[0] == other,
        lambda: tensor != other,
    ):
        with pytest.raises(TypeError, match=r"item\(\)"):
            compare()


def test_tensors_do_not_compare_and_are_found_by_identity_as_keys():
    one, two = (gpumem.full(2, 9, "int32", memory="host") for _ in range(2))
    for compare in (eq, ne):
        for other in (one, two, one[:], one.as_read_only()):
            with pytest.raises(
                TypeError, match=r"cannot be compared: expected item\(\), numpy\(\)"
            ):
                compare(one, other)
    for search in (lambda: one in [two, one], lambda: [two, one].index(one)):
        with pytest.raises(TypeError, match=r"cannot be compared"):
            search()
    assert one is not None
    assert one != "host"
    assert {one: 1, two: 2}[two] == 2
    assert one[:] not in {one, two}
    assert [one, two].index(one) == 0


def test_tensor_without_dimensions_has_nothing_to_iterate_over():
    scalar = gpumem.zeros((), "float32", memory="host")
    for use in (list, tuple, sum, iter, len, lambda it: 0.0 in it, lambda it: [*reversed(it)]):
        with pytest.raises(TypeError, match=r"without dimensions|not iterable"):
            use(scalar)
    rows = list(gpumem.asarray(np.arange(6).reshape(2, 3)))
    assert [row.tolist() for row in rows] == [[0, 1, 2], [3, 4, 5]]
    assert list(gpumem.zeros((0, 3), "f4", memory="host")) == []


def test_copy_module_returns_a_view_and_deepcopy_memory_of_the_same_resource(make_arena):
    arena = make_arena({})
    stream = gpumem.Stream("host")
    tensor = gpumem.full((2, 3), 7, "int16", resource=arena, stream=stream).T.as_read_only()
    view = copy.copy(tensor)
    assert (view.ptr, view.strides, view.buffer) == (tensor.ptr, tensor.strides, tensor.buffer)
    assert view.read_only
    made = copy.deepcopy(tensor)
    assert made.tolist() == tensor.tolist()
    assert made.buffer.resource is arena
    assert made.buffer.stream == stream
    assert made.ptr != tensor.ptr
    assert not made.read_only  # as NumPy's copy of a read-only array
    first, second = copy.deepcopy([tensor, {"again": tensor}])
    assert first is second["again"] is not tensor
    assert copy.deepcopy(gpumem.asarray(np.arange(3))).tolist() == [0, 1, 2]
    tensor.buffer.close()
    with pytest.raises(ClosedError):
        copy.deepcopy(tensor)


def test_deepcopy_comes_after_the_work_that_is_queued_on_the_tensors_stream(make_arena, host):
    stream = gpumem.Stream("host")
    tensor = gpumem.zeros(3, "int16", resource=make_arena({}, "host/managed"), stream=stream)
    stream.synchronize()
    with HostDriver().block(stream):
        tensor.fill(5, stream)
        made = copy.deepcopy(tensor)
    assert made.tolist() == [5, 5, 5]


@pytest.mark.parametrize("alignment", [512, 4096, 1 << 21])
def test_alignment_of_a_named_memory_is_honoured(make_arena, alignment):
    memory = gpumem.MemoryInfo("host", alignment=alignment)
    arena, source = make_arena({}), np.zeros(1001, "u1")[1:]
    with gpumem.using_resource(arena):
        for _ in range(3):
            kept = [
                gpumem.empty(100, "u1", memory=memory),
                gpumem.zeros(100, "u1", memory=memory, resource=arena),
                gpumem.full(100, 1, "u1", memory=memory, stream=gpumem.Stream("host")),
                gpumem.asarray(source, memory),
                gpumem.asarray(source).to(memory),
                gpumem.from_dlpack(source, device=memory),
            ]
            assert [tensor.ptr % alignment for tensor in kept] == [0] * len(kept)
        assert kept[0].to(memory) is kept[0]
        with pytest.raises(BufferError, match=rf"not aligned to {alignment} bytes"):
            gpumem.asarray(source).to(memory, copy=False)


def test_alignment_of_a_sessions_output_is_honoured():
    memory, seen = gpumem.MemoryInfo("host", alignment=4096), []
    with gpumem.Session("host") as session:
        session.bind_output("y", memory)
        for _ in range(3):
            session.run(lambda ctx: seen.append(ctx.output("y", 100, "u1")))
    assert [tensor.ptr % 4096 for tensor in seen] == [0, 0, 0]


def test_alignment_of_a_memory_counts_beside_an_environment():
    memory = gpumem.MemoryInfo("host", alignment=4096)
    with gpumem.Environment() as environment:
        environment.register("host")
        kept = [gpumem.empty(9, "u1", memory=memory, environment=environment) for _ in range(3)]
        assert [tensor.ptr % 4096 for tensor in kept] == [0, 0, 0]
        del kept


def test_alignment_above_that_of_any_block_is_refused(arena):
    memory = gpumem.MemoryInfo("host", alignment=1 << 22)
    with pytest.raises(ValueError, match=r"alignment 4194304 is not a power of two from 1 to"):
        gpumem.empty(3, "u1", memory=memory, resource=arena)


@pytest.mark.parametrize("other", [1, 2.0, 1j, True])
@pytest.mark.parametrize("compute", [add, sub, mul, truediv, floordiv, mod, matmul])
def test_tensor_does_not_compute_and_names_what_does(compute, other):
    tensor = gpumem.full(2, 9, "float32", memory="host")
    for left, right in ((tensor, other), (other, tensor), (tensor, tensor)):
        with pytest.raises(TypeError, match=r"does not compute: .* x\.numpy\(\)"):
            compute(left, right)
    with pytest.raises(TypeError, match=r"unsupported operand"):
        compute(tensor, object())
    assert not hasattr(tensor, "__add__")


def test_arrays_and_numpys_numbers_compute_with_a_tensor():
    tensor = gpumem.full(2, 9, "float64", memory="host")
    for other in (np.float64(1), np.int64(1), np.array([1.0, 1.0])):
        assert (tensor + other).tolist() == (other + tensor).tolist() == [10, 10]
    tensor += np.array([1.0, 1.0])
    assert tensor.tolist() == [10, 10]


def test_tensor_names_what_makes_one():
    for make in (gpumem.Tensor, lambda: gpumem.Tensor([1]), lambda: gpumem.Tensor(shape=3)):
        with pytest.raises(TypeError, match=r"made by gpumem\.empty, zeros, .* from_dlpack"):
            make()
    for make in (gpumem.Tensor.__new__, object.__new__):
        with pytest.raises(TypeError):
            make(gpumem.Tensor)


def test_tensor_refuses_to_be_pickled_and_names_the_way():
    tensor = gpumem.zeros(2, "float32", memory="host", shareable=True)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match=r"shareable=True, .* gpumem\.interop\.export\(tensor"):
            pickle.dumps(tensor, protocol)
    assert gpumem.interop.export(tensor) is not None


def test_tensor_and_numpys_numbers_compare_elements():
    tensor = gpumem.full(2, 9, "int32", memory="host")
    for other in (np.int64(9), np.float64(9), np.array([9, 9])):
        assert (tensor == other).tolist() == [True, True]
        assert (other == tensor).tolist() == [True, True]
