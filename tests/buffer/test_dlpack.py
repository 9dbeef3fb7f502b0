"""Buffers through DLPack: both capsules to the letter of the layout, every refusal, no leak."""

import ctypes
import gc
import threading

import numpy as np
import pytest
from helpers import dlpack
from helpers.driver import HostDriver

import gpumem

KINDS = [dlpack.LEGACY, dlpack.VERSIONED]
CPU, MANAGED = (1, 0), (13, 0)


@pytest.fixture
def buffer(arena):
    buffer = arena.allocate(1000)
    yield buffer
    buffer.close()
    assert arena.stats().in_use == 0, "an export leaked"


def export(buffer, kind, **arguments):
    if kind is dlpack.VERSIONED:
        arguments.setdefault("max_version", (1, 0))
    return buffer.__dlpack__(**arguments)


# ---- what a capsule says -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_version", "kind"),
    [
        (None, dlpack.LEGACY),
        ((0, 0), dlpack.LEGACY),
        ((0, 8), dlpack.LEGACY),
        ((1, 0), dlpack.VERSIONED),
        ((1, 3), dlpack.VERSIONED),
        ((2, 0), dlpack.VERSIONED),
        ([1, 0], dlpack.VERSIONED),
    ],
)
def test_max_version_selects_the_capsule(buffer, max_version, kind):
    assert dlpack.kind_of(buffer.__dlpack__(max_version=max_version)) is kind


@pytest.mark.parametrize("kind", KINDS)
def test_capsule_describes_a_one_dimensional_byte_array(buffer, kind):
    capsule = export(buffer, kind)
    tensor = dlpack.tensor_of(capsule)
    assert tensor.data == buffer.ptr
    assert (tensor.device_type, tensor.device_id) == buffer.__dlpack_device__() == CPU
    assert (tensor.code, tensor.bits, tensor.lanes) == (1, 8, 1)
    assert (tensor.ndim, tensor.shape[0], tensor.strides[0], tensor.byte_offset) == (1, 1000, 1, 0)


def test_versioned_capsule_is_dlpack_1_writable_and_no_copy(buffer):
    capsule = export(buffer, dlpack.VERSIONED)
    managed = dlpack.managed_of(capsule)
    assert (managed.major, managed.minor, managed.flags) == (1, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_empty_buffer_is_exported_with_a_null_address(arena, kind):
    capsule = export(arena.allocate(0), kind)
    tensor = dlpack.tensor_of(capsule)
    assert (tensor.data, tensor.ndim, tensor.shape[0]) == (None, 1, 0)
    del capsule
    assert np.from_dlpack(arena.allocate(0)).shape == (0,)


@pytest.mark.parametrize(
    ("memory", "device"), [("host", CPU), ("host/host_accessible", CPU), ("host/managed", MANAGED)]
)
def test_pinned_memory_is_exported_as_cpu_and_managed_as_managed(make_arena, memory, device):
    buffer = make_arena(memory=memory).allocate(10)
    assert buffer.__dlpack_device__() == device
    capsule = buffer.__dlpack__()
    tensor = dlpack.tensor_of(capsule)
    assert (tensor.device_type, tensor.device_id) == device
    assert np.from_dlpack(buffer).shape == (10,)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"copy": True}, BufferError),
        ({"dl_device": (2, 0)}, BufferError),
        ({"dl_device": (3, 0)}, BufferError),
        ({"dl_device": (1, 1)}, BufferError),
        ({"stream": 1}, BufferError),
        ({"stream": 0}, BufferError),
        ({"stream": "x"}, BufferError),
        ({"max_version": 1}, ValueError),
        ({"max_version": ()}, ValueError),
        ({"max_version": ("x", 0)}, ValueError),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_invalid_export_arguments_are_refused_without_a_leak(buffer, kind, arguments, error):
    with pytest.raises(error):
        export(buffer, kind, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"copy": False}, {"copy": None}, {"dl_device": CPU}, {"stream": None}, {"stream": -1}],
)
@pytest.mark.parametrize("kind", KINDS)
def test_valid_export_arguments_are_accepted(buffer, kind, arguments):
    capsule = export(buffer, kind, **arguments)
    assert dlpack.tensor_of(capsule).data == buffer.ptr


def test_export_arguments_are_keyword_only(buffer):
    with pytest.raises(TypeError):
        buffer.__dlpack__(None)


# ---- who frees, when, and where ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_unconsumed_capsule_releases_its_reference(arena, kind):
    buffer = arena.allocate(1000)
    capsules = [export(buffer, kind) for _ in range(10)]
    buffer.close()
    assert arena.stats().in_use == 1024
    capsules.clear()
    assert arena.stats().in_use == 0


@pytest.mark.parametrize("kind", KINDS)
def test_consumed_capsule_is_released_by_its_consumer(arena, kind):
    buffer = arena.allocate(1000)
    capsule = export(buffer, kind)
    consumed = dlpack.consume(capsule)
    del capsule, buffer
    gc.collect()
    assert arena.stats().in_use == 1024
    consumed.delete()
    assert arena.stats().in_use == 0


@pytest.mark.parametrize("kind", KINDS)
def test_capsule_refused_by_its_consumer_releases_its_reference(kind, arena):
    """Numpy takes no capsule of another name; it leaves it, unrenamed, to its destructor."""
    buffer = arena.allocate(1000)

    class Swapped:
        def __dlpack_device__(self):
            return CPU

        def __dlpack__(self, **_):
            capsule = export(buffer, kind)
            dlpack.tensor_of(capsule).device_type = 7  # Vulkan: numpy refuses it
            return capsule

    with pytest.raises((BufferError, RuntimeError, ValueError)):  # by its version
        np.from_dlpack(Swapped())
    buffer.close()
    gc.collect()
    assert arena.stats().in_use == 0


@pytest.mark.parametrize("kind", KINDS)
def test_deleter_may_run_on_any_thread(arena, kind, stream):
    """Also on one that never holds the interpreter lock: a worker of the host device."""
    buffer = arena.allocate(1000)
    consumed = dlpack.consume(export(buffer, kind))
    buffer.close()
    consumed.delete_on(HostDriver(), stream)
    stream.synchronize()
    assert arena.stats().in_use == 0


@pytest.mark.parametrize("kind", KINDS)
def test_concurrent_deleters_of_one_buffer(arena, kind):
    buffer = arena.allocate(1000)
    consumed = [dlpack.consume(export(buffer, kind)) for _ in range(400)]
    threads = [
        threading.Thread(
            target=lambda part: [each.delete() for each in part], args=(consumed[i::4],)
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    buffer.close()
    for thread in threads:
        thread.join()
    assert arena.stats().in_use == 0
    assert arena.stats().num_frees == 1


@pytest.mark.parametrize("kind", KINDS)
def test_export_outlives_buffer_and_arena(kind):
    device = gpumem.Device("host")
    free = device.free_bytes
    arena = gpumem.Arena("host")
    buffer = arena.allocate(1000)
    memoryview(buffer)[:] = b"x" * 1000
    consumed = dlpack.consume(export(buffer, kind))
    del arena, buffer
    gc.collect()
    assert ctypes.string_at(consumed.tensor.data, 1000) == b"x" * 1000
    assert device.free_bytes < free
    consumed.delete()
    assert device.free_bytes == free


# ---- NumPy as the consumer -----------------------------------------------------------------------


def test_numpy_shares_the_bytes_and_may_write_them(buffer):
    array = np.from_dlpack(buffer)
    assert (array.dtype, array.shape) == (np.uint8, (1000,))
    assert array.ctypes.data == buffer.ptr
    memoryview(buffer)[:] = bytes([3]) * 1000
    assert set(array) == {3}
    assert array.flags.writeable == dlpack.NUMPY_KNOWS_VERSIONS
    if array.flags.writeable:
        array[:] = 4
        assert set(memoryview(buffer)) == {4}


def test_numpy_keeps_the_memory_through_views_of_its_array(arena):
    buffer = arena.allocate(1000)
    view = np.from_dlpack(buffer)[::2].reshape(2, 250).T
    buffer.close()
    gc.collect()
    assert arena.stats().in_use == 1024
    del view
    assert arena.stats().in_use == 0


@pytest.mark.skipif(not dlpack.NUMPY_KNOWS_VERSIONS, reason="NumPy before 2.1 asks for no copy")
def test_numpy_copy_is_refused(buffer):
    with pytest.raises(BufferError):
        np.from_dlpack(buffer, copy=True)
    assert np.from_dlpack(buffer, copy=False).ctypes.data == buffer.ptr
    assert np.from_dlpack(buffer, device="cpu").ctypes.data == buffer.ptr


def test_torch_shares_the_bytes(arena):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    buffer = arena.allocate(1000)
    tensor = torch.from_dlpack(buffer)
    tensor.fill_(4)
    assert set(memoryview(buffer)) == {4}
    buffer.close()
    assert arena.stats().in_use == 1024
    del tensor
    assert arena.stats().in_use == 0
