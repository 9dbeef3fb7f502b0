"""Copies that are queued: what they come after, what comes after them, who lives until then."""

import concurrent.futures
import gc
import itertools
import weakref

import numpy as np
import pytest
from helpers.arrays import elements, put
from helpers.threads import running
from helpers.waiting import opened_soon, wait_until

import gpumem

KNOWN = ["host", "host/host_accessible", "host/managed"]
N = 5000


def filled(value, memory="host"):
    return put(np.full(N, value, np.uint8), memory)


@pytest.mark.parametrize(("to", "origin"), list(itertools.product(KNOWN, KNOWN)))
def test_copy_between_driver_memories_is_asynchronous(to, origin, stream, driver):
    dst, src = filled(0, to), filled(7, origin)
    with driver.block(stream):
        gpumem.copy(dst, src, stream)
        assert not stream.query()
    assert (dst.numpy() == 7).all()


def test_copy_runs_after_earlier_work_of_its_stream(stream, driver):
    dst, src = filled(0), filled(1)
    with driver.block(stream):
        driver.fill(src.buffer, 9, stream)
        gpumem.copy(dst, src, stream)
    assert (dst.numpy() == 9).all()


def test_copies_on_different_streams_are_ordered_by_their_buffers(host, stream):
    host.set_lag(3_000_000)
    streams = [stream, gpumem.Stream("host"), gpumem.Stream("host")]
    chain = [filled(value) for value in range(40)]
    chain[0].numpy()[:] = 200
    for i in range(1, len(chain)):
        gpumem.copy(chain[i], chain[i - 1], streams[i % 3])
    assert (chain[-1].numpy() == 200).all()


@pytest.fixture
def default():
    return gpumem.Stream.from_handle("host", 1)


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("stuck", ["the source's", "the copy's"])
def test_copy_does_not_hold_up_the_default_stream_of_its_destination(
    stream, driver, default, kind, stuck
):
    other = gpumem.Stream("host")
    dst, unrelated = filled(0, kind), filled(1, kind)
    with gpumem.Arena(kind) as arena:
        src = gpumem.full(N, 7, "u1", resource=arena, stream=other)
        assert dst.numpy()[0] == 0
        with driver.block(other if stuck == "the source's" else stream):
            gpumem.copy(dst, src, stream)
            unrelated.fill(3)
            wait_until(default.query)
            assert (unrelated.numpy() == 3).all()
            assert not stream.query()
        assert (dst.numpy() == 7).all()
        del src


def test_fill_on_a_stream_does_not_hold_up_the_default_stream(stream, driver, default):
    dst, unrelated = filled(0, "host/managed"), filled(1, "host/managed")
    with driver.block(stream):
        dst.fill(7, stream=stream)
        gpumem.copy(unrelated, np.full(N, 3, np.uint8))
        wait_until(default.query)
    assert (dst.numpy() == 7).all()


@pytest.mark.parametrize("use", ["copy", "fill", "copy elsewhere"])
def test_later_use_of_a_destination_comes_after_the_copy_into_it(stream, driver, default, use):
    third = gpumem.Stream("host")
    dst, src, result = (filled(value, "host/managed") for value in (0, 7, 0))
    on = third if use == "copy elsewhere" else default
    with driver.block(stream):
        gpumem.copy(dst, src, stream)
        if use == "fill":
            dst.fill(9, stream=default)
        else:
            gpumem.copy(result, dst, on)
        assert not on.query()
    assert (dst.numpy() == (9 if use == "fill" else 7)).all()
    assert use == "fill" or (result.numpy() == 7).all()


def test_fill_is_noted_although_another_thread_sees_the_end_of_the_one_before(driver):
    class Watched(gpumem.Stream):
        def record(self, event=None):
            if event is not None:  # of the note, whose fill is done
                other.numpy()
            return super().record(event)

    stream, made, other = Watched("host"), filled(0), filled(0)
    other.fill(7, gpumem.Stream("host"))
    made.fill(7, stream)
    stream.synchronize()
    with driver.block(stream) as gate:
        made.fill(8, stream)
        with opened_soon(gate):
            assert (made.numpy() == 8).all()


def test_view_of_a_source_waits_for_the_copy_that_reads_it(host, stream):
    dst, src = filled(0, "host/managed"), filled(7, "host/managed")
    dst.numpy(), src.numpy()
    host.set_lag(20_000_000)
    gpumem.copy(dst, src, stream)
    src.numpy()[:] = 1
    assert (dst.numpy() == 7).all()


def test_block_is_not_allocated_again_before_a_copy_into_it_on_another_stream(stream, driver):
    with gpumem.Arena("host/managed", {"max_mem": 1 << 20}) as arena:
        dst, src = (gpumem.full(1 << 18, 7, "u1", resource=arena) for _ in range(2))
        dst.numpy(), src.numpy()
        address = dst.ptr
        with driver.block(stream):
            gpumem.copy(dst, src, stream)
            del dst
            again = gpumem.empty(1 << 18, "u1", resource=arena)
            assert again.ptr != address
        stream.synchronize()
        del again, src


def test_copy_waits_for_readers_of_its_destination(host, stream):
    host.set_lag(20_000_000)
    middle, last = filled(5), filled(0)
    gpumem.copy(last, middle, stream)
    gpumem.copy(middle, np.full(N, 6, np.uint8))  # by the CPU: it must wait for that read
    assert (last.numpy() == 5).all()
    assert (middle.numpy() == 6).all()


def test_view_that_waited_for_a_write_has_not_waited_for_a_later_read(host, driver):
    own, reader = gpumem.Stream("host"), gpumem.Stream("host")
    middle, last = gpumem.empty(N, "u1", memory="host", stream=own), filled(0)
    with driver.block(own) as write, driver.block(reader) as read:
        middle.fill(5, own)
        waits = host.call_count("cuStreamSynchronize")
        with running(middle.numpy):
            wait_until(lambda: host.call_count("cuStreamSynchronize") > waits)
            gpumem.copy(last, middle, reader)
            write.open()
        with opened_soon(read):
            gpumem.copy(middle, np.full(N, 6, np.uint8))  # by the CPU: it must wait for that read
    assert (last.numpy() == 5).all()
    assert (middle.numpy() == 6).all()


def test_numpy_waits_for_the_copy_unless_sync_is_false(stream, driver):
    dst = filled(0)
    gate = driver.block(stream)
    gpumem.copy(dst, filled(3), stream)
    early = dst.numpy(sync=False).copy()
    gate.open()
    assert (early == 0).all()
    assert (dst.numpy() == 3).all()


def test_dropped_buffers_are_not_reused_before_the_copy_is_done(stream, driver):
    arena = gpumem.Arena("host", {"initial_chunk_size_bytes": 1 << 16})
    gate = driver.block(stream)
    dst = filled(0)
    src = gpumem.full(N, 4, "uint8", resource=arena)
    gpumem.copy(dst, src, stream)
    del src
    taken = gpumem.empty(N, "uint8", resource=arena)
    gate.open()
    taken.numpy()[:] = 99
    assert (dst.numpy() == 4).all()


@pytest.mark.parametrize("where", ["arena", "pool"])
def test_copy_into_a_buffer_of_another_threads_default_stream_delays_its_reuse(
    where, stream, driver
):
    """Handle 2 names another stream in the thread that copies."""
    resource = {
        "arena": lambda: gpumem.Arena("host", max_mem="1MiB", oom_wait_ms=0),
        "pool": lambda: gpumem.DriverPool("host", release_threshold="64MiB"),
    }[where]()
    src, side = filled(7), gpumem.Stream("host")
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        dst = thread.submit(gpumem.empty, (1 << 20,), "uint8", resource=resource, stream=2).result()
    assert dst.buffer.stream.ptr == 1  # which waits for it
    address = dst.buffer.ptr
    with driver.block(stream):
        gpumem.copy(dst[:N], src, stream)
        del dst
        try:
            taken = resource.allocate(1 << 20, side).ptr
        except gpumem.OutOfMemoryError:
            taken = None
        assert taken != address
    stream.synchronize()
    gpumem.Device("host").synchronize()


class Owner(np.ndarray):
    """An array whose end can be seen."""


def seen_by_numpy(tensor):
    return tensor.numpy().view(Owner)


@pytest.mark.parametrize("end", ["dst", "src"])
def test_foreign_memory_lives_exactly_until_the_copy_is_done(end, stream, driver):
    ends = {"dst": filled(0), "src": filled(8)}
    array = seen_by_numpy(ends.pop(end))
    alive = weakref.ref(array)
    gate = driver.block(stream)
    gpumem.copy(
        array if end == "dst" else ends["dst"], array if end == "src" else ends["src"], stream
    )
    del array
    gc.collect()
    assert alive() is not None, "the copy's memory went while it was queued"
    gate.open()
    stream.synchronize()
    wait_until(lambda: alive() is None)


@pytest.mark.parametrize("end", ["dst", "src"])
def test_copy_to_numpy_without_a_stream_is_synchronous(end, host):
    host.set_lag(5_000_000)
    tensor, array = filled(0), filled(8).numpy()
    if end == "dst":
        gpumem.copy(array, tensor)
        assert (array == 0).all()
    else:
        gpumem.copy(tensor, array)
        array[:] = 1
        assert (tensor.numpy() == 8).all()


def test_staged_copy_is_synchronous_for_pageable_arrays(host, stream, staged):
    host.set_lag(5_000_000)
    array = np.full(1 << 20, 3, np.uint8)
    tensor = gpumem.zeros(1 << 20, "uint8", memory="host/managed")
    gpumem.copy(tensor, array, stream)
    array[:] = 4
    target = np.zeros_like(array)
    gpumem.copy(target, tensor, stream)
    assert (target == 3).all()


def test_stream_argument_is_read_before_anything_is_queued(stream):
    class Broken:
        def __cuda_stream__(self):
            raise RuntimeError("no stream today")

    dst = filled(1)
    with pytest.raises(RuntimeError, match="today"):
        gpumem.copy(dst, filled(2), Broken())
    assert (elements(dst) == 1).all()


def test_copy_accepts_streams_of_every_library(stream):
    class Foreign:
        def __init__(self, inner):
            self.inner = inner

        def __cuda_stream__(self):
            return 0, self.inner.ptr

    dst = filled(0)
    for value, given in enumerate([stream, stream.ptr, Foreign(stream), 0, 1, 2], 1):
        gpumem.copy(dst, filled(value), given)
        assert (dst.numpy() == value).all()


def test_random_copies_on_many_streams_miss_no_ordering(host, stream):
    """The host device looks for copies that nothing orders, whether or not they went well."""
    host.find_misuse(True)
    try:
        before = host.misuse_count("unordered access")
        streams = [stream, gpumem.Stream("host"), None]
        tensors = [gpumem.full(N, i, "uint8", memory="host/managed") for i in range(5)]
        for i in range(60):
            gpumem.copy(tensors[i * 7 % 5], tensors[i * 3 % 5], streams[i % 3])
        for tensor in tensors:
            tensor.numpy()
        assert host.misuse_count("unordered access") == before, host.misuse_report()
    finally:
        host.find_misuse(False)


def test_an_arena_closes_right_after_its_last_copy_whoever_still_holds_the_array(stream):
    for _ in range(50):
        arena = gpumem.Arena("host")
        source = np.from_dlpack(gpumem.zeros(1 << 16, "uint8", resource=arena))
        target = gpumem.empty(1 << 16, "uint8", memory="host")
        gpumem.copy(target, source, stream=stream)
        del source
        gpumem.Device("host").synchronize()
        arena.close()
        assert arena.closed
