"""Calls that change what other threads may be using: sleep, close, release; and uses under way."""

from __future__ import annotations

import contextlib
import os
import threading

import numpy as np
import pytest
from helpers.interrupting import interrupted, more_calls
from helpers.threads import running
from helpers.waiting import wait_until, without_waiting

import gpumem
from gpumem.errors import AsleepError, ClosedError, InUseError
from gpumem.interop import Importer, MemoryDescriptor, MemoryHandleType

NBYTES = 5 << 20  # more than a copy needs to be staged, which waits for its stream


def refuses(arena, tag="default"):
    try:
        with arena.tag(tag):
            arena.allocate(256).close()
    except (AsleepError, ClosedError):
        return True
    return False


@contextlib.contextmanager
def waiting(gate, until, call, *arguments):
    """A call on another thread that waits for a gate, once it is `until`."""
    with without_waiting(gate), running(call, *arguments):
        try:
            wait_until(until)
            yield
        finally:
            gate.open()


def close_once_unused(owner):
    """Close an arena or a graph pool; another thread may allocate or capture in it until then."""
    while True:
        with contextlib.suppress(InUseError):
            return owner.close()


def going_to_sleep(arena, driver, *tags):
    """An arena that is put to sleep by another thread, which waits for the device meanwhile."""
    gate = driver.block(gpumem.Stream("host"))
    return waiting(gate, lambda: refuses(arena), arena.sleep, *tags)


def copied_into(target, driver, host):
    """A copy into a tensor on another thread, which waits for its stream meanwhile."""
    stream = gpumem.Stream("host")
    gate = driver.block(stream)
    array = np.full(target.shape, 9, "uint8")
    waits = more_calls(host, "cuStreamSynchronize", 1)
    return waiting(gate, waits, gpumem.copy, target, array, stream)


@pytest.fixture
def tensor(arena):
    tensor = gpumem.full(NBYTES, 7, "uint8", resource=arena)
    yield tensor
    tensor.buffer.close()


USES = {
    "numpy": lambda tensor, arena: tensor.numpy(),
    "memoryview": lambda tensor, arena: memoryview(tensor),
    "memoryview of the buffer": lambda tensor, arena: memoryview(tensor.buffer),
    "item": lambda tensor, arena: tensor[-1].item(),
    "tolist": lambda tensor, arena: tensor[:8].tolist(),
    "fill": lambda tensor, arena: tensor.fill(3),
    "assignment of a number": lambda tensor, arena: tensor.__setitem__(..., 3),
    "assignment": lambda tensor, arena: tensor.__setitem__(..., np.full(NBYTES, 3, "uint8")),
    "copy from": lambda tensor, arena: tensor.to("host", copy=True),
    "copy to": lambda tensor, arena: gpumem.copy(tensor, np.full(NBYTES, 3, "uint8")),
    "DLPack": lambda tensor, arena: tensor.__dlpack__(),
    "DLPack of the buffer": lambda tensor, arena: tensor.buffer.__dlpack__(),
    "register": lambda tensor, arena: tensor.buffer.register(),
    "full": lambda tensor, arena: gpumem.full(NBYTES, 3, "uint8", resource=arena),
    "allocate": lambda tensor, arena: arena.allocate(NBYTES),
    "prepare": lambda tensor, arena: arena.prepare(NBYTES),
    "virtual rows": lambda tensor, arena: arena.virtual((4, NBYTES), "uint8", committed=1),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_arena_that_goes_to_sleep_refuses_every_use_and_keeps_the_bytes(arena, driver, tensor, use):
    with going_to_sleep(arena, driver), pytest.raises(AsleepError, match="'host:0"):
        use(tensor, arena)
    assert arena.asleep == ("default",)
    arena.wake()
    assert (tensor.numpy() == 7).all()


def test_sleep_of_one_tag_leaves_others_usable_meanwhile(arena, driver):
    with arena.tag("awake"):
        tensor = gpumem.full(NBYTES, 7, "uint8", resource=arena)
    with going_to_sleep(arena, driver, "default"):
        tensor.fill(8)
    assert arena.asleep == ("default",)
    assert (tensor.numpy() == 8).all()
    arena.wake()


def test_second_sleep_and_close_name_the_thread_that_puts_the_arena_to_sleep(arena, driver):
    with arena.tag("another"):
        arena.allocate(256).close()
    with going_to_sleep(arena, driver):
        for change in (arena.sleep, arena.close):
            with pytest.raises(InUseError, match="is closing it or putting it to sleep"):
                change()
    arena.wake()


def test_view_made_before_the_count_keeps_the_arena_awake_and_usable(arena, tensor):
    view = tensor.numpy()
    with pytest.raises(InUseError, match="1 view"):
        arena.sleep()
    tensor.fill(8)
    assert (view == 8).all()


def test_interrupted_sleep_leaves_the_arena_usable(arena, tensor):
    with pytest.raises(FileExistsError):
        arena.sleep(to=__file__)
    tensor.fill(8)
    assert not arena.asleep


def test_interrupted_sleep_leaves_a_tag_alone_that_another_thread_puts_to_sleep(
    arena, driver, host, tmp_path
):
    """The tag stays awake at first, because it is registered between the two looks at it."""
    with arena.tag("sent"):
        buffer = arena.allocate(NBYTES)
    other = threading.Thread(target=arena.sleep, args=("sent",))
    registrations = []

    class Place:
        def __fspath__(self):
            registrations.append(buffer.register())
            return f"{tmp_path}/sleep"

    def other_sleeps():
        if not waits():
            return False
        registrations.pop().release()
        other.start()
        wait_until(lambda: refuses(arena, "sent"))
        return True

    waits = more_calls(host, "cuEventQuery", 20)
    with driver.block(gpumem.Stream("host")) as gate:
        with interrupted(other_sleeps, gate):
            arena.sleep(to=Place(), registered="stay")
        assert (refuses(arena), refuses(arena, "sent")) == (False, True)
        gate.open()
        other.join()
    assert arena.asleep == ("sent",)
    buffer.close()


def test_copy_under_way_refuses_a_sleep(arena, driver, host, tensor):
    with copied_into(tensor, driver, host):
        with pytest.raises(InUseError, match=r"\(1 operation under way"):
            arena.sleep()
        assert not arena.asleep
    assert (tensor.numpy() == 9).all()


def test_copy_under_way_keeps_the_block_that_another_thread_closes(arena, driver, host, tensor):
    with copied_into(tensor, driver, host):
        tensor.buffer.close()
        assert arena.stats().in_use >= NBYTES
        other = gpumem.full(NBYTES, 5, "uint8", resource=arena)
        with pytest.raises(InUseError):
            arena.close()
    assert (other.numpy() == 5).all()
    del other
    assert arena.stats().in_use == 0


def test_copy_under_way_keeps_rows_from_a_release_and_a_resize(arena, driver, host):
    cache = arena.virtual((2, NBYTES), "uint8", committed=2, step=1)
    rows = cache.tensor(0, 1)[0]
    with copied_into(rows, driver, host):
        rows.buffer.close()
        for change in (lambda: cache.release(0, 1), lambda: cache.resize(0), cache.close):
            with pytest.raises(InUseError, match="virtual tensor"):
                change()
    cache.resize(0)
    cache.close()


def test_copy_under_way_keeps_imported_memory_open(driver, host):
    file = os.memfd_create("import", os.MFD_CLOEXEC)
    os.truncate(file, NBYTES)
    described = MemoryDescriptor(file, MemoryHandleType.MEMFD, NBYTES)
    memory = Importer.for_device("host").import_memory(described, consume=True)
    tensor = memory.tensor(NBYTES, "uint8")
    with copied_into(tensor, driver, host):
        tensor.buffer.close()
        with pytest.raises(InUseError, match="ExternalMemory"):
            memory.close()
    memory.close()


def test_arena_closes_with_all_of_its_tags_or_with_none(arena, driver):
    """While the first tag's close waits for its stream, nothing is allocated in the second."""
    stream = gpumem.Stream("host")
    with arena.tag("first"):
        arena.allocate(NBYTES, stream).close()
    with arena.tag("second"):
        arena.allocate(NBYTES).close()
    gate = driver.block(stream)
    with arena.tag("first"):
        arena.allocate(NBYTES, stream).close()
    refused = []

    def allocate():
        try:
            with arena.tag("second"):
                return [arena.allocate(NBYTES)]
        except ClosedError as error:
            refused.append(str(error))
            return []

    with waiting(gate, lambda: refuses(arena), close_once_unused, arena):
        held = allocate()
    assert refused == ["arena 'host:0, tag second' was being closed by another thread"]
    assert arena.closed
    assert not held


def test_graph_pool_that_another_thread_closes_serves_no_capture(arena, driver):
    stream = gpumem.Stream("host")
    gate = driver.block(stream)
    with arena.capture(stream) as pool:
        arena.allocate(NBYTES, stream).close()
    refused = []

    def enter():
        try:
            with arena.capture(gpumem.Stream("host"), pool=pool):
                pass
        except ClosedError as error:
            refused.append(str(error))
        return bool(refused)

    with waiting(gate, enter, close_once_unused, pool):
        pass
    assert refused == ["arena 'host:0, graph pool' was being closed by another thread"]
    assert pool.closed
    assert not pool.capturing


def test_closed_arena_opens_no_tag(arena):
    with arena.tag("before"):
        arena.allocate(256).close()
    arena.close()
    for name in ("before", "after"):
        with pytest.raises(ClosedError, match="'host:0' is closed"):
            arena.tag(name)


def test_run_of_a_session_that_is_being_queued_refuses_a_sleep(arena):
    refused = []

    def work(run):
        try:
            arena.sleep()
        except InUseError as error:
            refused.append(str(error))
        gpumem.copy(run.output("y", 4, "uint8"), run.inputs["x"])

    tensor = gpumem.full(4, 7, "uint8", resource=arena)
    with gpumem.Session("host") as session:
        session.bind_input("x", tensor)
        session.bind_output("y")
        session.run(work)
        assert (session.outputs()["y"].numpy() == 7).all()
    assert len(refused) == 1
    assert "under way" in refused[0]
