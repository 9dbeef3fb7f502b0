"""Copies and fills of host memory on a stream: queued as others are, and made by the CPU."""

import contextlib
import ctypes
import gc
import weakref

import numpy as np
import pytest
from helpers.arrays import put
from helpers.graph import RELAXED, Graph
from helpers.waiting import wait_until

import gpumem
from gpumem.interop import HostTimeline

PINNED = "host/host_accessible"
N = 5000


def pinned(value, shape=N):
    return put(np.full(shape, value, np.uint8), PINNED)


def test_copy_between_pinned_memories_returns_before_its_stream_has_come_to_it(stream):
    timeline = HostTimeline.create()
    stream.wait(timeline.point(1))
    dst, src = pinned(0), pinned(7)
    gpumem.copy(dst, src, stream)
    assert (dst.numpy(sync=False) == 0).all()
    timeline.signal(1)  # by the thread that queued the copy
    stream.synchronize()
    assert (dst.numpy(sync=False) == 7).all()


@pytest.mark.parametrize("to_pinned", [True, False])
@pytest.mark.parametrize(
    ("settings", "shareable"), [({}, True), ({"numa_node": 0}, False), ({"numa_node": 0}, True)]
)
def test_copy_with_a_host_devices_mapped_memory_is_queued(
    settings, shareable, to_pinned, stream, driver
):
    with gpumem.Arena("host", settings) as arena:
        ends = [arena.allocate(N, shareable=shareable), pinned(0).buffer]
        src, dst = ends if to_pinned else ends[::-1]
        memoryview(src)[:] = bytes([7]) * N
        with driver.block(stream):
            gpumem.copy(dst, src, stream)
            held = (ctypes.c_ubyte * N).from_address(dst.ptr)
            assert not any(held)
        assert bytes(memoryview(dst)) == bytes([7]) * N
        del ends, src, dst


def test_copy_from_a_pageable_source_takes_its_bytes_and_returns(stream, driver):
    dst, array = pinned(0, (40, 50)), np.full((50, 40), 7, np.uint8)
    with driver.block(stream):
        gpumem.copy(dst[::-1], array.T, stream)
        array[:] = 9
    assert (dst.numpy() == 7).all()


@pytest.mark.parametrize("memory", [PINNED, "host/managed", "host"])
def test_layout_of_thousands_of_calls_is_queued_as_one_copy(memory, stream, driver, host):
    data = np.arange(300 * 300, dtype=np.int32).reshape(300, 300)
    dst, src = put(np.zeros_like(data), memory), put(data, memory)
    turned = np.transpose(src.numpy())
    with driver.block(stream):
        host.reset_counts()
        gpumem.copy(dst, turned, stream)
        assert host.call_count("cuLaunchHostFunc") == 2  # the copy, and the end of its lease
        assert (dst.numpy(sync=False) == 0).all()
    assert (dst.numpy() == data.T).all()


def test_large_queued_copy_is_made_by_several_threads(stream, driver, staged):
    data = np.arange(20_000_000, dtype=np.uint32).view(np.uint8)
    dst, src = put(np.zeros_like(data), PINNED), put(data, PINNED)
    with driver.block(stream):
        gpumem.copy(dst, src, stream)
    assert (dst.numpy() == data).all()


def test_queued_copies_keep_the_order_of_their_stream(stream, driver):
    dst, first, second = pinned(0), pinned(1), pinned(2)
    with driver.block(stream):
        gpumem.copy(dst, first, stream)
        driver.fill(first.buffer, 5, stream)
        gpumem.copy(dst, second, stream)
        gpumem.copy(second, first, stream)
    stream.synchronize()
    assert (dst.numpy(sync=False) == 2).all()
    assert (second.numpy(sync=False) == 5).all()


def test_other_streams_wait_for_a_queued_copy_by_events(stream, driver):
    other = gpumem.Stream("host")
    first, second, third = pinned(1), pinned(2), pinned(3)
    with driver.block(stream):
        gpumem.copy(second, first, stream)
        other.wait(stream.record())
        gpumem.copy(third, second, other)
        assert not other.query()
    other.synchronize()
    assert (third.numpy(sync=False) == 1).all()


def test_small_copy_waits_for_its_buffers_own_stream(stream, driver):
    # The copy's own stream is idle, and the CPU has waited for both buffers before.
    own = gpumem.Stream("host")
    dst = gpumem.full(N, 0, "uint8", memory=PINNED, stream=own)
    src = pinned(7)
    dst.numpy()
    with driver.block(own):
        driver.fill(dst.buffer, 5, own)
        gpumem.copy(dst, src, stream)
        assert (dst.numpy(sync=False) == 0).all()
    assert (dst.numpy() == 7).all()


def test_small_copy_on_idle_streams_is_done_at_once(stream, host):
    dst, src = pinned(0), pinned(7)
    host.reset_counts()
    gpumem.copy(dst, src, stream)
    assert (dst.numpy(sync=False) == 7).all()
    assert host.call_count("cuEventRecord") == host.call_count("cuLaunchHostFunc") == 0


class Owner(np.ndarray):
    """An array whose end can be seen."""


def test_arrays_over_pinned_memory_live_until_the_queued_copy_is_done(stream, driver):
    ends = [pinned(0).numpy().view(Owner), pinned(8).numpy().view(Owner)]
    alive = [weakref.ref(each) for each in ends]
    gate = driver.block(stream)
    gpumem.copy(*ends, stream)
    seen = ends[0].base
    del ends
    gc.collect()
    assert all(each() is not None for each in alive)
    gate.open()
    stream.synchronize()
    assert (np.frombuffer(seen, np.uint8) == 8).all()
    wait_until(lambda: all(each() is None for each in alive))


@pytest.mark.parametrize("end", ["dst", "src"])
def test_block_of_an_external_allocator_is_freed_after_the_queued_copy(end, stream, driver):
    blocks = {}

    def allocate(nbytes, *_):
        memory = ctypes.create_string_buffer(nbytes + 256)
        address = -(-ctypes.addressof(memory) // 256) * 256
        blocks[address] = memory
        return address

    def free(address, *_):
        del blocks[address]

    allocator = gpumem.ExternalAllocator(allocate, free, memory=PINNED)
    ends = {"dst": pinned(0), "src": pinned(7)}
    ends[end] = gpumem.empty(N, "uint8", resource=allocator)
    ends[end].numpy()[:] = 3
    gate = driver.block(stream)
    gpumem.copy(ends["dst"], ends["src"], stream)
    del ends
    assert len(blocks) == 1
    gate.open()
    stream.synchronize()
    wait_until(lambda: allocator.stats().in_use == 0 and not blocks)
    allocator.close()


def test_refused_host_function_is_an_error_and_copies_nothing(stream, driver, host):
    dst, src = pinned(0), pinned(7)
    with driver.block(stream):
        host.fail("cuLaunchHostFunc", 1, 999)
        try:
            with pytest.raises(gpumem.errors.DriverError, match="cuLaunchHostFunc"):
                gpumem.copy(dst, src, stream)
        finally:
            host.clear_faults()
    stream.synchronize()
    assert (dst.numpy() == 0).all()


# ---- in a graph ----------------------------------------------------------------------------------


@contextlib.contextmanager
def captured(driver, stream):
    """Capture what the block queues; yields a function that runs it once."""

    def run():
        if not graph.executable:
            graph.instantiate()
        graph.launch()
        stream.synchronize()

    with Graph(driver, stream, RELAXED) as graph:
        yield run


@contextlib.contextmanager
def refused_in_a_capture(driver, stream):
    """Check that a capture refuses what the block queues, and is over with that."""
    refused = pytest.raises(gpumem.errors.DriverError)
    over = pytest.raises(gpumem.errors.DriverError)
    with over, Graph(driver, stream, RELAXED), refused as caught:
        yield
    assert caught.value.code == 900  # STREAM_CAPTURE_UNSUPPORTED


def test_captured_copy_between_pinned_memories_is_a_node(stream, driver):
    dst, src = pinned(0), pinned(7)
    with captured(driver, stream) as run:
        gpumem.copy(dst, src, stream)
    for value in (7, 8):
        src.numpy()[:] = value
        run()
        assert (dst.numpy() == value).all()


def test_captured_copy_that_the_cpu_would_have_to_make_is_refused(stream, driver):
    data = np.zeros((300, 300), np.int32)
    dst, src = put(data, PINNED), put(data, PINNED)
    turned = gpumem.asarray(np.transpose(src.numpy()))
    with refused_in_a_capture(driver, stream):
        gpumem.copy(dst, turned, stream)


@pytest.mark.parametrize("memory", [PINNED, "host", "host/managed"])
@pytest.mark.parametrize("dtype", ["i2", "f4", "f8", "c16", "V12", "V7"])
def test_captured_fill_keeps_its_value(memory, dtype, stream, driver):
    value = np.frombuffer(bytes(range(1, 17)), np.dtype(dtype), 1)[0]
    arena = gpumem.Arena(memory)
    gpumem.empty(1000, dtype, resource=arena, stream=stream)  # so the capture finds memory
    with captured(driver, stream) as run:
        tensor = gpumem.full(100, value, dtype, resource=arena, stream=stream)
    expected = np.full(100, value, dtype).tobytes()
    for _ in range(2):
        tensor.numpy(sync=False).view("u1")[:] = 0
        gc.collect()
        run()
        assert tensor.numpy(sync=False).tobytes() == expected


@pytest.mark.parametrize("memory", [PINNED, "host", "host/managed"])
def test_captured_copy_of_overlapping_arrays_without_a_graph_pool_is_refused(
    memory, stream, driver
):
    arena = gpumem.Arena(memory)
    with gpumem.using_resource(arena):
        tensor = put(np.arange(N).astype("u1"), memory)
    gpumem.empty(N - 1, "u1", resource=arena, stream=stream)  # so the capture finds memory
    with refused_in_a_capture(driver, stream):
        gpumem.copy(tensor[1:], tensor[:-1], stream)
    assert (tensor.numpy() == np.arange(N).astype("u1")).all()


def test_captured_copy_of_overlapping_arrays_goes_through_the_graph_pool(stream, driver):
    arena = gpumem.Arena("host")
    with gpumem.using_resource(arena):
        tensor = put(np.arange(N).astype("u1"), "host")
    expected = tensor.numpy().copy()
    with arena.capture(stream) as pool, captured(driver, stream) as run:
        gpumem.copy(tensor[1:], tensor[:-1], stream)
    others = [gpumem.full(N - 1, 9, "u1", resource=arena, stream=stream) for _ in range(4)]
    for _ in range(2):
        run()
        expected[1:] = expected[:-1].copy()
        assert (tensor.numpy() == expected).all()
    assert all((other.numpy() == 9).all() for other in others)
    assert pool.stats().reserved


LAYOUTS = {
    "a column": (np.s_[:, 3], (200, 8)),
    "backwards": (np.s_[::-2, ::-1], (9, 8)),
    "three dimensions": (np.s_[:5, 1:, ::3], (7, 6, 10)),
    "four dimensions": (np.s_[::2, ::2, ::2, ::2], (6, 6, 6, 6)),
}


@pytest.mark.parametrize("memory", [PINNED, "host", "host/managed"])
@pytest.mark.parametrize("dtype", ["u1", "i4", "f8", "V7"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_captured_fill_of_a_strided_tensor_keeps_its_value(memory, dtype, layout, stream, driver):
    key, shape = LAYOUTS[layout]
    value = np.frombuffer(bytes(range(1, 17)), np.dtype(dtype), 1)[0]
    tensor = gpumem.zeros(shape, dtype, memory=memory, stream=stream)
    expected = np.zeros(shape, dtype)
    expected[key] = value
    tensor.numpy()
    with captured(driver, stream) as run:
        tensor[key].fill(value, stream)
    others = [np.zeros(1, dtype) for _ in range(100)]  # where NumPy had the value
    run()
    assert tensor.numpy(sync=False).tobytes() == expected.tobytes()
    del others


def test_captured_fill_that_needs_too_many_driver_calls_is_refused(stream, driver):
    tensor = gpumem.zeros((30, 30, 30, 30), "u1", memory=PINNED, stream=stream)
    tensor.numpy()
    with refused_in_a_capture(driver, stream):
        tensor[::2, ::2, ::2, ::2].fill(1, stream)


@pytest.mark.parametrize("memory", [PINNED, "host/managed"])
def test_scalar_assigned_in_a_captured_stream_is_a_part_of_the_graph(memory, stream, driver):
    tensor = gpumem.zeros((20, 8), "i4", memory=memory, stream=stream)
    tensor.numpy()
    with captured(driver, stream) as run:
        tensor[:, 1] = 5
    run()
    assert tensor.numpy(sync=False).tolist() == [[0, 5] + [0] * 6] * 20


@pytest.mark.parametrize("memory", [PINNED, "host/managed"])
@pytest.mark.parametrize("values", [[1, 2, 3], np.arange(3, dtype="i4")], ids=["list", "array"])
def test_array_assigned_in_a_captured_stream_is_refused(memory, values, stream, driver):
    tensor = gpumem.zeros((2, 3), "i4", memory=memory, stream=stream)
    tensor.numpy()
    with refused_in_a_capture(driver, stream):
        tensor[0] = values
    assert not tensor.numpy(sync=False).any()


# ---- fills ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [PINNED, "host", "host/managed"])
@pytest.mark.parametrize("dtype", ["u1", "i2", "f4", "f8", "c16", "V12", "V7"])
def test_fill_returns_before_its_stream_has_come_to_it(memory, dtype, stream, driver):
    value = np.frombuffer(bytes(range(1, 17)), np.dtype(dtype), 1)[0]
    with driver.block(stream):
        tensor = gpumem.full(1001, value, dtype, memory=memory, stream=stream)
        assert not stream.query()
    assert tensor.numpy().tobytes() == np.full(1001, value, dtype).tobytes()
