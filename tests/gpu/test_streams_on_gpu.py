"""Graphs, recorded streams and frees elsewhere on a GPU: no wrong byte, no broken capture."""

import numpy as np
import pytest
from helpers.dlpack import consume
from helpers.resources import Over, close_when_unused
from helpers.single_block import BLOCK, next_address, single_block_arena

import gpumem

MIB = 1 << 20
MODES = [0, 1, 2]  # global, thread local, relaxed


def fill(driver, buffer, value, stream):
    driver.call(driver.cuMemsetD8Async, buffer.ptr, value, buffer.nbytes, stream.ptr)


def read(driver, buffer, stream):
    array = np.empty(buffer.nbytes, np.uint8)
    driver.call(driver.cuMemcpyDtoHAsync, array.ctypes.data, buffer.ptr, array.nbytes, stream.ptr)
    driver.call(driver.cuStreamSynchronize, stream.ptr)
    return array


def begin(driver, stream, mode):
    mode = driver.CUstreamCaptureMode(mode)
    driver.call(driver.cuStreamBeginCapture, stream.ptr, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["completed", "wait"])
@pytest.mark.parametrize("declared", [True, False])
def test_graph_launched_among_eager_work_reads_its_own_bytes(driver, mode, policy, declared):
    arena = gpumem.Arena("cuda:0", {"stream_reuse": policy})
    stream, other = gpumem.Stream("cuda:0"), gpumem.Stream("cuda:0")
    warm = arena.allocate(64 * MIB, other)
    context = arena.capture(stream) if declared else None
    pool = context.__enter__() if declared else None
    begin(driver, stream, mode)
    scratch = arena.allocate(200 * MIB, stream)  # more than the arena has: a miss
    out = arena.allocate(7 * MIB, stream)
    fill(driver, scratch, 3, stream)
    driver.call(driver.cuMemcpyDtoDAsync, out.ptr, scratch.ptr, out.nbytes, stream.ptr)
    scratch.close()
    warm.close()
    for nbytes in (MIB, 80 * MIB):  # grows, records and asks beside the capture
        arena.allocate(nbytes, other).close()
    arena.shrink()
    graph = driver.call(driver.cuStreamEndCapture, stream.ptr)
    if declared:
        context.__exit__(None, None, None)
        pool.retain_with(graph)
        assert pool.num_graphs == 1
    instance = driver.call(driver.cuGraphInstantiate, graph, 0)
    driver.call(driver.cuGraphDestroy, graph)
    for step in range(30):
        driver.call(driver.cuGraphLaunch, instance, stream.ptr)
        live = [arena.allocate((i + 1) * 3 * MIB, s) for i in range(5) for s in (stream, other)]
        for buffer in live:
            fill(driver, buffer, 100 + step, buffer.stream)
        assert (read(driver, out, stream) == 3).all()
        for buffer in live:
            assert (read(driver, buffer, buffer.stream) == 100 + step).all()
        live.clear()
        del buffer
    out.close()
    with pytest.raises(gpumem.errors.InUseError):
        arena.close()
    driver.call(driver.cuGraphExecDestroy, instance)
    driver.call(driver.cuCtxSynchronize)
    del pool, context
    arena.check_invariants()
    close_when_unused(arena)


@pytest.mark.parametrize("policy", ["completed", "wait"])
def test_recorded_stream_keeps_its_bytes_until_it_is_done(driver, policy):
    arena = gpumem.Arena("cuda:0", {"stream_reuse": policy, "max_mem": 512 * MIB})
    owner, side = gpumem.Stream("cuda:0"), gpumem.Stream("cuda:0")
    result = gpumem.Arena("cuda:0").allocate(256 * MIB)
    for step in range(60):
        buffer = arena.allocate(256 * MIB, owner)
        fill(driver, buffer, step, owner)
        side.wait(owner.record())
        for _ in range(4):
            driver.call(driver.cuMemcpyDtoDAsync, result.ptr, buffer.ptr, buffer.nbytes, side.ptr)
        buffer.record_stream(side)
        buffer.close()
        spoiler = arena.allocate(256 * MIB, owner)
        fill(driver, spoiler, 255, owner)
        spoiler.close()
        assert (read(driver, result, side)[:: MIB // 2] == step).all()
    arena.check_invariants()


def test_request_waits_for_memory_of_another_stream(driver):
    arena = gpumem.Arena("cuda:0", {"max_mem": 600 * MIB, "backing": "regions"})
    first, second = gpumem.Stream("cuda:0"), gpumem.Stream("cuda:0")
    pin = arena.allocate(256, first)
    buffer = arena.allocate(500 * MIB, first)
    for _ in range(20):
        fill(driver, buffer, 1, first)
    buffer.close()
    other = arena.allocate(500 * MIB, second)
    fill(driver, other, 2, second)
    first.synchronize()
    assert (read(driver, other, second)[:: MIB // 2] == 2).all()
    pin.close()


def record(buffer, side):
    buffer.record_stream(side)
    return buffer


def record_by_the_interface(buffer, side):
    described = buffer.__cuda_array_interface__
    assert described["data"] == (buffer.ptr, False)
    return record(buffer, side)


def export_to_the_default_stream(buffer, side):
    return consume(buffer.__dlpack__(max_version=(1, 0), stream=side.ptr))


@pytest.mark.parametrize("around", [None, gpumem.adaptors.track])
@pytest.mark.parametrize(
    ("cross", "stream"),
    [
        (record, gpumem.Stream),
        (record_by_the_interface, gpumem.Stream),
        (export_to_the_default_stream, lambda device: gpumem.Stream.from_handle(device, 1)),
        (export_to_the_default_stream, lambda device: gpumem.Stream.from_handle(device, 2)),
    ],
)
def test_block_is_not_reused_while_the_stream_it_was_given_to_uses_it(
    make_arena, driver, gate, around, cross, stream
):
    arena, pin = single_block_arena(lambda config: make_arena(config, "cuda:0"))
    own, side = gpumem.Stream("cuda:0"), stream("cuda:0")
    buffer = (around(arena) if around else arena).allocate(BLOCK, own)
    address = buffer.ptr
    given = cross(buffer, side)
    gate.hold(side)
    fill(driver, buffer, 1, side)
    buffer.close()
    if given is not buffer:
        given.delete()
    assert next_address(arena, own) is None
    gate.open()
    side.synchronize()
    assert next_address(arena, own) == address
    pin.close()


def test_stream_that_takes_a_users_block_back_waits_for_recorded_ones(make_arena, driver, gate):
    arena, pin = single_block_arena(lambda config: make_arena(config, "cuda:0"))
    own, other, side = (gpumem.Stream("cuda:0") for _ in range(3))
    buffer = Over(arena).allocate(BLOCK, own)
    address = buffer.ptr
    buffer.record_stream(side)
    gate.hold(side)
    buffer.close()
    assert next_address(arena, other) is None
    assert next_address(arena, own) == address
    assert not own.query(), "behind the recorded stream"
    gate.open()
    own.synchronize()
    assert side.query()
    assert next_address(arena, other) == address
    pin.close()


class Exporter:
    """A library that hands a block over and knows nothing of gpumem."""

    def __init__(self, buffer):
        self.__dlpack_device__ = buffer.__dlpack_device__
        self.__dlpack__ = buffer.__dlpack__


def test_consumer_of_a_buffer_waits_for_the_buffers_own_stream(driver):
    arena = gpumem.Arena("cuda:0")
    own, stream = gpumem.Stream("cuda:0"), gpumem.Stream("cuda:0")
    slow, buffer = arena.allocate(1024 * MIB, own), arena.allocate(MIB, own)
    out = arena.allocate(MIB, stream)
    fill(driver, buffer, 1, own)
    own.synchronize()
    for _ in range(20):  # milliseconds of work before the bytes change
        fill(driver, slow, 0, own)
    fill(driver, buffer, 7, own)
    imported = gpumem.from_dlpack(Exporter(buffer), stream=stream)
    gpumem.copy(out, imported.view("u1"), stream)
    assert set(read(driver, out, stream).tolist()) == {7}
    del imported
