"""Tensors through DLPack, both ways: what is exported, what is refused, what odd producers do."""

import ctypes
import gc
import itertools
import re

import numpy as np
import pytest
from helpers import child, dlpack
from helpers.driver import HostDriver
from helpers.single_block import BLOCK, next_address, single_block_arena

import gpumem

KINDS = [dlpack.LEGACY, dlpack.VERSIONED]
LIMIT = 2**63 - 1


def export(tensor, kind, **arguments):
    if kind is dlpack.VERSIONED:
        arguments.setdefault("max_version", (1, 0))
    return tensor.__dlpack__(**arguments)


# ---- out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", [..., slice(1, None), (slice(None), slice(None, None, 2)), 0])
def test_capsule_has_the_real_address_and_strides(arena, kind, key):
    tensor = gpumem.zeros((3, 4), "f4", resource=arena)[key]
    capsule = export(tensor, kind)
    seen = dlpack.tensor_of(capsule)
    rank = tensor.ndim
    assert (seen.data, seen.byte_offset, seen.ndim) == (tensor.ptr, 0, rank)
    assert tuple(seen.shape[:rank]) == tensor.shape
    assert tuple(4 * step for step in seen.strides[:rank]) == tensor.strides


def test_exports_that_live_together_have_their_own_numbers(arena, rng):
    tensor = gpumem.zeros((2, 6), "f4", resource=arena)
    shapes = [(12,), (2, 6), (6, 2), (3, 4), (1, 2, 2, 3), (1, 2, 1, 2, 3)]
    alive = []
    for _ in range(300):
        if alive and rng.random() < 0.5:
            alive.pop(rng.randrange(len(alive)))[0].delete()
        else:
            view = tensor.reshape(rng.choice(shapes))
            alive.append((dlpack.consume(export(view, rng.choice(KINDS))), view))
            export(view, rng.choice(KINDS))  # dropped at once
        for taken, view in alive:
            assert tuple(taken.tensor.shape[: view.ndim]) == view.shape
            assert tuple(4 * step for step in taken.tensor.strides[: view.ndim]) == view.strides
    for taken, _ in alive:
        taken.delete()


def test_export_outlives_its_tensor_and_buffer(arena):
    tensor = gpumem.zeros((2, 6), "f4", resource=arena)
    taken = dlpack.consume(export(tensor, dlpack.VERSIONED))
    tensor.buffer.close()
    del tensor
    assert taken.tensor.shape[:2] == [2, 6]
    taken.delete()
    assert arena.stats().in_use == 0


@pytest.mark.parametrize("what", ["tensor", "buffer"])
def test_call_reads_its_keywords_in_every_order(arena, what):
    tensor = gpumem.zeros(4, "u1", resource=arena)
    producer = tensor if what == "tensor" else tensor.buffer
    good = {"stream": None, "max_version": (1, 0), "dl_device": (1, 0), "copy": what == "tensor"}
    wrong = {"stream": 3, "max_version": 5, "dl_device": (2, 0)}
    for count in range(len(good) + 1):
        for names in itertools.permutations(good, count):
            capsule = producer.__dlpack__(**{name: good[name] for name in names})
            versioned = "max_version" in names
            assert dlpack.kind_of(capsule) is (dlpack.VERSIONED if versioned else dlpack.LEGACY)
            is_copy = dlpack.tensor_of(capsule).data != tensor.ptr
            assert is_copy == (what == "tensor" and "copy" in names)
            for name in wrong.keys() & set(names):
                given = {each: good[each] for each in names} | {name: wrong[name]}
                with pytest.raises((BufferError, ValueError), match=re.escape(str(wrong[name]))):
                    producer.__dlpack__(**given)


class Name(str):
    pass


@pytest.mark.parametrize("what", ["tensor", "buffer"])
def test_call_with_other_names_is_read_as_any_call(arena, what):
    tensor = gpumem.zeros(4, "u1", resource=arena)
    producer = tensor if what == "tensor" else tensor.buffer
    capsule = producer.__dlpack__(**{Name("max_version"): (1, 0)})
    assert dlpack.kind_of(capsule) is dlpack.VERSIONED
    for names in (["copies"], ["max_version", "copies"], ["copies", "max_version"]):
        with pytest.raises(TypeError, match="unexpected keyword argument 'copies'"):
            producer.__dlpack__(**dict.fromkeys(names))
    with pytest.raises(TypeError, match="positional"):
        producer.__dlpack__((1, 0), copy=None)


@pytest.mark.parametrize("what", ["tensor", "buffer"])
@pytest.mark.parametrize("default", [1, 2])
def test_block_is_not_reused_while_a_consumers_default_stream_uses_it(
    make_arena, host, what, default
):
    arena, pin = single_block_arena(lambda config: make_arena(config, "host/managed"))
    own, consumers = gpumem.Stream("host"), gpumem.Stream.from_handle("host", default)
    buffer = arena.allocate(BLOCK, own)
    address = buffer.ptr
    producer = gpumem.from_dlpack(buffer) if what == "tensor" else buffer
    taken = dlpack.consume(producer.__dlpack__(max_version=(1, 0), stream=default))
    del producer
    buffer.close()
    with HostDriver().block(consumers):
        taken.delete()
        assert next_address(arena, own) is None
    consumers.synchronize()
    assert next_address(arena, own) == address
    pin.close()


def test_block_given_to_a_consumers_other_stream_waits_for_it_if_it_is_recorded(make_arena, host):
    arena, pin = single_block_arena(lambda config: make_arena(config, "host/managed"))
    own, consumers = gpumem.Stream("host"), gpumem.Stream("host")
    for recorded in (False, True):
        tensor = gpumem.from_dlpack(arena.allocate(BLOCK, own))
        address = tensor.ptr
        taken = dlpack.consume(tensor.__dlpack__(max_version=(1, 0), stream=consumers.ptr))
        if recorded:
            tensor.buffer.record_stream(consumers)
        del tensor
        assert next_address(arena, own) is None, "the consumer's view keeps it"
        with HostDriver().block(consumers):
            taken.delete()
            assert next_address(arena, own) == (None if recorded else address)
        consumers.synchronize()
        assert next_address(arena, own) == address
    pin.close()


def test_export_to_the_own_stream_or_in_no_order_records_nothing(make_arena, host):
    arena = make_arena({}, "host/managed")
    for own, consumers in ((None, 1), (gpumem.Stream("host"), -1)):
        tensor = gpumem.from_dlpack(arena.allocate(BLOCK, own))
        taken = dlpack.consume(tensor.__dlpack__(max_version=(1, 0), stream=consumers))
        del tensor
        calls = host.call_count()
        taken.delete()
        arena.allocate(BLOCK, own).close()
        assert host.call_count() == calls


def test_empty_tensor_is_exported_with_a_null_address():
    tensor = gpumem.zeros((3, 4), "f4", memory="host")[:0]
    capsule = tensor.__dlpack__()
    assert dlpack.tensor_of(capsule).data is None
    assert np.from_dlpack(tensor).shape == (0, 4)


@pytest.mark.parametrize(
    ("dtype", "code", "bits", "minor"),
    [("?", 6, 8, 0), ("i2", 0, 16, 0), ("u8", 1, 64, 0), ("f2", 2, 16, 0), ("c16", 5, 128, 0),
     ("bfloat16", 4, 16, 0), ("float8_e4m3fn", 10, 8, 1), ("float8_e5m2", 12, 8, 1)],
)  # fmt: skip
def test_dtype_is_exported_with_its_code_and_oldest_version(dtype, code, bits, minor):
    capsule = gpumem.zeros(3, dtype, memory="host").__dlpack__(max_version=(1, 0))
    managed = dlpack.managed_of(capsule)
    assert (managed.tensor.code, managed.tensor.bits, managed.tensor.lanes) == (code, bits, 1)
    assert (managed.major, managed.minor) == (1, minor)


def test_read_only_export_is_flagged_or_refused():
    tensor = gpumem.zeros(3, "f4", memory="host").as_read_only()
    capsule = tensor.__dlpack__(max_version=(1, 0))
    assert dlpack.managed_of(capsule).flags == 1
    with pytest.raises(BufferError, match="read-only"):
        tensor.__dlpack__()
    if dlpack.NUMPY_KNOWS_VERSIONS:
        assert not np.from_dlpack(tensor).flags.writeable
    else:
        with pytest.raises(BufferError, match="read-only"):
            np.from_dlpack(tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_copy_export_is_contiguous_and_flagged(arena, kind):
    tensor = gpumem.full((3, 4), 5, "i4", resource=arena)[::-1, ::2]
    with pytest.raises(BufferError, match="negative"):
        export(tensor, kind)
    capsule = export(tensor, kind, copy=True)
    seen = dlpack.tensor_of(capsule)
    assert seen.data % 256 == 0
    assert tuple(seen.strides[:2]) == (2, 1)
    assert ctypes.string_at(seen.data, 24) == np.full(6, 5, "i4").tobytes()
    if kind is dlpack.VERSIONED:
        assert dlpack.managed_of(capsule).flags == 2
    del capsule, tensor
    assert arena.stats().in_use == 0


@pytest.mark.parametrize("dtype", [">f4", "g", "S3", "M8[s]", [("a", "i4")]], ids=str)
def test_dtype_without_a_dlpack_code_is_refused(arena, dtype):
    with pytest.raises(BufferError, match="no type"):
        gpumem.zeros(3, dtype, resource=arena).__dlpack__()
    gc.collect()
    assert arena.stats().in_use == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"dl_device": (2, 0)}, BufferError),
        ({"dl_device": (3, 0)}, BufferError),
        ({"dl_device": (1, 1)}, BufferError),
        ({"dl_device": (2, 0), "copy": True}, BufferError),
        ({"dl_device": 1}, ValueError),
        ({"dl_device": ("1", 0)}, ValueError),
        ({"stream": 1}, BufferError),
        ({"stream": 0}, BufferError),
        ({"max_version": 1}, ValueError),
    ],
)
def test_invalid_export_is_refused_without_a_leak(arena, arguments, error):
    tensor = gpumem.zeros(3, "f4", resource=arena)
    with pytest.raises(error):
        tensor.__dlpack__(**arguments)
    del tensor
    assert arena.stats().in_use == 0


@pytest.mark.parametrize("stream", [0, -2, 2**64, True, 1.5, "1"])
def test_managed_tensor_accepts_stream_arguments(stream):
    tensor = gpumem.zeros(3, "f4", memory="host/managed")
    with pytest.raises(ValueError, match="stream"):
        tensor.__dlpack__(stream=stream)
    own = gpumem.Stream("host")
    for allowed in (None, -1, 1, 2, own.ptr):
        assert dlpack.tensor_of(tensor.__dlpack__(stream=allowed)).device_type == 13


@pytest.mark.parametrize(
    ("memory", "named", "device"),
    [
        ("host", "cpu", (1, 0)),
        ("host/managed", "cpu", (1, 0)),
        ("host/managed", "cuda_managed", (13, 0)),
        ("host/host_accessible", "cuda_host", (3, 0)),
        ("host/host_accessible", 3, (3, 0)),
        ("host/host_accessible", (3, 0), (3, 0)),
    ],
)
def test_export_as_names_another_device_that_reaches_the_memory(memory, named, device):
    tensor = gpumem.zeros(3, "f4", memory=memory).export_as(named)
    assert tensor.__dlpack_device__() == device
    assert dlpack.tensor_of(tensor.__dlpack__()).device_type == device[0]
    assert tensor[1:].__dlpack_device__() == device
    assert np.from_dlpack(tensor).shape == (3,)


@pytest.mark.parametrize("named", ["cuda", "cuda_host", 13, (1, 1)])
def test_export_as_refuses_an_unreachable_device(named):
    with pytest.raises(BufferError, match="cannot be shared"):
        gpumem.zeros(3, "f4", memory="host").export_as(named)


@pytest.mark.parametrize("named", ["", "gpu", "cuda:", "cuda:x", None, True, (1,), "cpu:-1"])
def test_export_as_refuses_an_invalid_device(named):
    with pytest.raises(ValueError, match="DLPack device"):
        gpumem.zeros(3, "f4", memory="host").export_as(named)


# ---- in ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_producers_memory_is_shared_and_released_once(kind):
    producer = dlpack.Producer(kind=kind, shape=(2, 3), strides=(4, 1))
    tensor = gpumem.from_dlpack(producer)
    assert tensor.ptr == ctypes.addressof(producer.memory)
    assert (tensor.shape, tensor.strides) == ((2, 3), (4, 1))
    assert producer.asked == [{"max_version": (1, 3)}]
    view = np.from_dlpack(tensor[1:])
    producer.memory[4:7] = b"\7\7\7"
    assert view.tobytes() == b"\7\7\7"
    del tensor
    gc.collect()
    assert producer.deleted == 0
    del view
    assert producer.deleted == 1


def test_null_deleter_and_null_strides_are_accepted():
    producer = dlpack.Producer(shape=(2, 3), deleter=None)
    assert gpumem.from_dlpack(producer).strides == (3, 1)


@pytest.mark.parametrize(
    "odd",
    [
        {"ndim": -1},
        {"ndim": 65},
        {"ndim": 2**31 - 1},
        {"shape": None},
        {"shape": (-1,)},
        {"shape": (2**62, 2**62)},
        {"shape": (0, LIMIT, LIMIT)},
        {"shape": (2, 2), "strides": (LIMIT, LIMIT)},
        {"shape": (LIMIT,), "strides": (2**62,)},
        {"shape": (4,), "strides": (-LIMIT - 1,)},
        {"data": None},
        {"data": 2**64 - 2},
        {"byte_offset": 2**64 - 1},
        {"lanes": 4},
        {"lanes": 0},
        {"bits": 4},
        {"bits": 0},
        {"bits": 255},
        {"code": 3},
        {"code": 200},
        {"code": 2, "bits": 128},
        {"device_type": 7},
        {"device_type": 0},
        {"device_type": 2, "device_id": -1},
        {"major": 2},
        {"major": 0},
    ],
    ids=str,
)
def test_invalid_producer_is_refused_and_keeps_its_memory(odd):
    """The capsule keeps its name, so that its own destructor would delete."""
    producer = dlpack.Producer(**odd)
    capsule = producer.capsule()
    producer.capsule = lambda: capsule
    with pytest.raises(BufferError):
        gpumem.from_dlpack(producer)
    assert dlpack.kind_of(capsule) is dlpack.VERSIONED
    assert producer.deleted == 0


def test_strides_of_one_element_may_be_anything():
    producer = dlpack.Producer(shape=(1, 4), strides=(LIMIT, 1))
    assert gpumem.from_dlpack(producer).shape == (1, 4)


def test_byte_offset_and_negative_strides_are_applied():
    producer = dlpack.Producer(shape=(4,), strides=(-1,), byte_offset=3)
    producer.memory[0:4] = b"abcd"
    assert gpumem.from_dlpack(producer).numpy().tobytes() == b"dcba"


def test_capsule_is_consumed_once():
    producer = dlpack.Producer()
    capsule = producer.capsule()
    producer.capsule = lambda: capsule
    tensor = gpumem.from_dlpack(producer)
    with pytest.raises(BufferError, match="already consumed"):
        gpumem.from_dlpack(producer)
    del tensor
    assert producer.deleted == 1


def test_object_without_dlpack_is_refused():
    with pytest.raises(TypeError, match="not a DLPack producer"):
        gpumem.from_dlpack([1])
    producer = dlpack.Producer()
    producer.capsule = lambda: "nonsense"
    with pytest.raises(BufferError, match="not a DLPack capsule"):
        gpumem.from_dlpack(producer)


def test_older_producer_is_retried_without_max_version():
    array = np.arange(3)

    class Older:
        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, stream=None):
            return array.__dlpack__()

    class Wrong(Older):
        def __dlpack__(self, **_):
            raise TypeError("a mistake of its own")

    assert gpumem.from_dlpack(Older()).numpy().tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="of its own"):
        gpumem.from_dlpack(Wrong())


def test_from_dlpack_of_a_gpumem_tensor_is_a_view_or_a_copy(arena):
    tensor = gpumem.zeros(4, "f4", resource=arena)
    assert gpumem.from_dlpack(tensor).buffer is tensor.buffer
    assert gpumem.from_dlpack(tensor.buffer).shape == (16,)
    array = np.arange(4)
    assert gpumem.from_dlpack(array, copy=False, device="host").ptr == array.ctypes.data
    assert gpumem.from_dlpack(array, copy=True).ptr != array.ctypes.data


# ---- the C exchange API --------------------------------------------------------------------------


def test_exchange_table_is_version_1_3_and_complete():
    table = dlpack.exchange_table(gpumem.Tensor)
    assert (table.major, table.minor, table.prev_api) == (1, 3, None)
    for name in ("allocate", "export", "wrap", "borrow", "stream"):
        assert getattr(table, name)


def test_exchange_table_exports_and_imports_a_tensor(arena):
    table = dlpack.exchange_table(gpumem.Tensor)
    tensor = gpumem.full((2, 3), 7, "i2", resource=arena)
    address, back = ctypes.c_void_p(), ctypes.py_object()
    assert table.export(tensor, address) == 0
    assert table.wrap(address, back) == 0
    again = back.value
    assert (again.ptr, again.shape, again.dtype) == (tensor.ptr, (2, 3), np.int16)
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(again))  # the reference that the call gave
    del tensor, back
    gc.collect()
    assert arena.stats().in_use > 0
    del again
    assert arena.stats().in_use == 0


def test_exchange_table_borrows_a_tensor():
    table = dlpack.exchange_table(gpumem.Tensor)
    tensor = gpumem.zeros((2, 3), "f8", memory="host")[:, ::2]
    seen = dlpack.Tensor()
    assert table.borrow(tensor, seen) == 0
    assert (seen.data, seen.strides[0], seen.strides[1]) == (tensor.ptr, 3, 2)


def test_exchange_table_sets_an_exception_on_failure():
    table = dlpack.exchange_table(gpumem.Tensor)
    for wrong, error in ((gpumem.zeros(3, "f4")[::-1], BufferError), ([1], TypeError)):
        with pytest.raises(error):
            table.export(wrong, ctypes.c_void_p())


def test_exchange_table_allocates_from_the_default_resource(arena):
    table = dlpack.exchange_table(gpumem.Tensor)
    prototype = dlpack.Producer(shape=(2, 3)).managed.tensor
    told = []
    report = dlpack.SET_ERROR(lambda _, kind, message: told.append((kind, message)))
    address = ctypes.c_void_p()
    with gpumem.using_resource(arena):
        assert table.allocate(prototype, address, None, report) == 0
    assert arena.stats().requested_in_use == 6
    managed = dlpack.managed_at(address.value)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)(address.value)
    assert arena.stats().in_use == 0
    prototype.device_type = 7
    assert table.allocate(prototype, address, None, report) == -1
    assert told[0][0] == b"BufferError"


@pytest.mark.parametrize(
    ("shape", "fields", "says"),
    [
        ((-2, 3), {}, b"-2 elements in dimension 0"),
        ((-2, -3), {}, b"-2 elements in dimension 0"),
        ((0, -5), {}, b"-5 elements in dimension 1"),
        ((1,) * 65, {}, b"65 dimensions; at most 64"),
        ((1,) * 1000, {}, b"1000 dimensions; at most 64"),
        ((1,), {"ndim": -1}, b"-1 dimensions; at most 64"),
        (None, {"ndim": 2}, b"2 dimensions but no shape"),
        ((1 << 62, 4), {}, b"more than 2**63 - 1 bytes"),
    ],
)
def test_exchange_table_refuses_to_allocate_an_impossible_shape(arena, shape, fields, says):
    table = dlpack.exchange_table(gpumem.Tensor)
    prototype = dlpack.Producer(shape=shape, **fields).managed.tensor
    told = []
    report = dlpack.SET_ERROR(lambda _, kind, message: told.append((kind, message)))
    with gpumem.using_resource(arena):
        assert table.allocate(prototype, ctypes.c_void_p(), None, report) == -1
    assert told[0][0] == b"BufferError"
    assert says in told[0][1]
    assert arena.stats().num_allocs == 0


def test_exchange_table_has_no_work_stream_for_the_cpu():
    stream = ctypes.c_void_p(5)
    assert dlpack.exchange_table(gpumem.Tensor).stream(1, 0, stream) == 0
    assert stream.value is None


# ---- lifetime ------------------------------------------------------------------------------------


def test_views_survive_interpreter_exit():
    child.run_quietly("""
import numpy, gpumem
kept = [gpumem.zeros(1000, "f4", memory="host") for _ in range(3)]
kept += [np for t in kept[:3] for np in (t.numpy(), numpy.from_dlpack(t), memoryview(t))]
kept.append(gpumem.from_dlpack(numpy.arange(5)).numpy())
kept.append(gpumem.asarray(numpy.arange(5)))
kept.append(kept)
""")


def test_numpy_keeps_the_memory_without_gpumem_objects(make_arena, rng):
    for _ in range(10):
        arena = make_arena()
        tensor = gpumem.full((4, 4), 9, "i4", resource=arena)
        views = [tensor.numpy(), np.from_dlpack(tensor), np.asarray(tensor), memoryview(tensor),
                 tensor[1:], tensor.buffer]  # fmt: skip
        del tensor
        rng.shuffle(views)
        while views:
            gc.collect()
            assert arena.stats().in_use == 256
            views.pop()
        assert arena.stats().in_use == 0
