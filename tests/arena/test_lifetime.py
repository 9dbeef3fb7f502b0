"""Closing, dropping and keeping: whose memory lives how long."""

import copy
import gc
import itertools
import pickle
import weakref

import numpy as np
import pytest

import gpumem
from gpumem._testing.arenas import release_retired

MIB = 1 << 20


def test_closing_a_buffer_twice_frees_it_once(arena):
    buffer = arena.allocate(1000)
    buffer.close()
    again = arena.allocate(1000)
    buffer.close()
    buffer.close(gpumem.Stream("host"))
    assert arena.stats().num_frees == 1
    assert arena.stats().in_use == again.allocated_nbytes


def test_with_block_frees_the_buffer_also_after_an_error(arena):
    with pytest.raises(KeyError), arena.allocate(1000) as buffer:
        raise KeyError
    assert buffer.closed
    assert arena.stats().in_use == 0


def test_dropping_the_last_reference_frees_the_buffer(arena):
    buffer = arena.allocate(1000)
    alias = buffer
    del buffer
    assert arena.stats().in_use == 1024
    del alias
    assert arena.stats().in_use == 0


def test_close_of_an_arena_in_use_says_what_ends_the_use(make_arena):
    arena = make_arena(backing="virtual")
    view = np.frombuffer(arena.allocate(1000), np.uint8)
    with pytest.raises(gpumem.errors.InUseError, match="1 block; close the buffers and drop their"):
        arena.close()
    rows = arena.virtual((4,), "uint8")
    with pytest.raises(gpumem.errors.InUseError, match="views, close the virtual tensors first"):
        arena.close()
    rows.close()
    del view
    arena.close()


@pytest.mark.parametrize(
    "use",
    [
        memoryview,
        np.frombuffer,
        lambda buffer: buffer.__dlpack__(),
        lambda buffer: buffer.__dlpack__(max_version=(1, 0)),
    ],
)
def test_closed_buffer_refuses_views(arena, use):
    buffer = arena.allocate(1000)
    buffer.close()
    with pytest.raises(gpumem.errors.ClosedError, match="closed"):
        use(buffer)
    assert arena.stats().in_use == 0


def test_closed_buffer_keeps_its_attributes(arena):
    buffer = arena.allocate(1000)
    assert "closed" not in repr(buffer)
    buffer.close()
    assert "closed" in repr(buffer)
    assert (buffer.nbytes, buffer.allocated_nbytes) == (1000, 1024)
    assert (buffer.resource, buffer.memory) == (arena, arena.memory)


def test_closing_a_stale_buffer_does_not_free_its_successors_block(arena):
    """A second free must not reach a block that was handed out anew from the same slot."""
    stale = arena.allocate(1000)
    address = stale.ptr

    class ClosesIt:
        def __cuda_stream__(self):
            stale.close()
            self.successor = arena.allocate(1000)
            return 0, 0

    stream = ClosesIt()
    stale.close(stream)
    assert stream.successor.ptr == address
    assert arena.stats().in_use == stream.successor.allocated_nbytes
    assert arena.stats().num_frees == 1
    stream.successor.close()


def test_buffer_closed_while_its_stream_is_read_keeps_its_views(arena):
    buffer = arena.allocate(1000)
    view = memoryview(buffer)

    class ClosesIt:
        def __cuda_stream__(self):
            buffer.close()
            return 0, 0

    buffer.close(ClosesIt())
    assert arena.stats().in_use == 1024
    view.release()
    assert arena.stats().in_use == 0


def test_close_on_an_invalid_stream_leaves_the_buffer_open(arena):
    buffer = arena.allocate(1000)
    for refused, error in [("no stream", TypeError), (-1, ValueError), (1 << 64, ValueError)]:
        with pytest.raises(error):
            buffer.close(refused)
    assert not buffer.closed
    assert arena.stats().in_use == buffer.allocated_nbytes


# ---- arenas --------------------------------------------------------------------------------------


def test_close_with_a_live_buffer_is_refused_without_a_change(arena):
    buffers = [arena.allocate(1000), arena.allocate_persistent(1000)]
    before = arena.stats(), arena.blocks()
    with pytest.raises(
        gpumem.errors.InUseError, match=r"in use: 2\.0 KiB in 2 blocks; close"
    ) as caught:
        arena.close()
    assert isinstance(caught.value, BufferError)
    assert not arena.closed
    assert (arena.stats(), arena.blocks()) == before
    assert arena.allocate(10).nbytes == 10
    del buffers


def test_close_with_a_view_of_a_closed_buffer_is_refused(arena):
    buffer = arena.allocate(1000)
    view = memoryview(buffer)
    buffer.close()
    with pytest.raises(gpumem.errors.InUseError):
        arena.close()
    view.release()


def test_empty_buffer_does_not_prevent_close():
    arena = gpumem.Arena("host")
    empty = arena.allocate(0)
    arena.close()
    assert arena.closed
    assert empty.nbytes == 0


CALLS = {
    "allocate": lambda arena: arena.allocate(1),
    "allocate nothing": lambda arena: arena.allocate(0),
    "allocate far too much": lambda arena: arena.allocate(1 << 60),
    "allocate_persistent": lambda arena: arena.allocate_persistent(1),
    "shrink": lambda arena: arena.shrink(),
    "reset_stream": lambda arena: arena.reset_stream(0),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_closed_arena_refuses_every_call(call):
    arena = gpumem.Arena("host", name="weights")
    arena.allocate(1000).close()
    arena.close()
    with pytest.raises(gpumem.errors.ClosedError, match="'weights' is closed"):
        call(arena)


def test_closing_an_arena_twice_is_harmless_and_keeps_its_stats():
    arena = gpumem.Arena("host")
    arena.allocate(1000).close()
    arena.close()
    arena.close()
    assert arena.closed
    assert "closed" in repr(arena)
    assert (arena.stats().reserved, arena.stats().num_allocs) == (0, 1)
    assert arena.blocks() == []
    arena.check_invariants()


def test_with_block_closes_the_arena():
    with gpumem.Arena("host") as arena:
        assert arena.is_arena
        assert not arena.closed
    assert arena.closed


def test_arena_lives_as_long_as_its_buffers():
    arena = gpumem.Arena("host")
    alive = weakref.ref(arena)
    buffer = arena.allocate(1000)
    del arena
    assert alive() is buffer.resource
    del buffer
    assert alive() is None


@pytest.mark.parametrize("order", list(itertools.permutations(["arena", "buffer", "view"])))
def test_view_keeps_its_bytes_in_any_order_of_drops(order):
    device = gpumem.Device("host")
    free = device.free_bytes
    names = {"arena": gpumem.Arena("host")}
    names["buffer"] = names["arena"].allocate(MIB)
    names["view"] = np.frombuffer(names["buffer"], np.uint8)
    names["view"][:] = 42
    for name in order:
        del names[name]
        gc.collect()
        gpumem.Arena("host").allocate(MIB).close()  # would take the address over
        if "view" in names:
            assert (names["view"] == 42).all()
    assert device.free_bytes == free


@pytest.mark.parametrize("make_view", [memoryview, np.asarray, np.from_dlpack])
def test_last_of_nested_views_frees_the_memory(arena, make_view):
    buffer = arena.allocate(1000)
    views = [make_view(buffer)[100:] for _ in range(3)]
    views += [np.asarray(view)[::2] for view in views]
    buffer.close()
    assert arena.stats().in_use == 1024
    while views:
        assert arena.stats().in_use == 1024
        views.pop(0)
    assert arena.stats().in_use == 0


def test_cycle_of_arena_and_stream_is_collected():
    class Stream:
        def __cuda_stream__(self):
            return 0, 0

    stream = Stream()
    stream.arena = gpumem.Arena("host")
    stream.arena.allocate(1000, stream).close()
    gone = weakref.ref(stream.arena)
    del stream
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("kind", ["streams", "events"])
def test_collected_cycle_destroys_its_stream(host, kind):
    stream = gpumem.Stream("host")
    stream.record().synchronize()
    gc.collect()
    before = host.live()[kind]

    def leave_a_cycle():
        # Older than the cycle that refers to it, so the collector clears it first.
        held = gpumem.Stream("host") if kind == "streams" else stream.record()
        cycle = [held]
        cycle.append(cycle)

    leave_a_cycle()
    gc.collect()
    assert host.live()[kind] == before


def test_buffers_arenas_and_streams_refuse_copy_and_pickle(arena):
    for thing in (arena, arena.allocate(1), gpumem.Stream("host"), gpumem.Event("host")):
        with pytest.raises(TypeError):
            copy.copy(thing)
        with pytest.raises(TypeError):
            pickle.dumps(thing)


def test_buffer_cannot_be_constructed_directly():
    with pytest.raises(TypeError, match=r"allocate\(\)"):
        gpumem.Buffer()


@pytest.mark.parametrize("of_pool", [False, True])
def test_arena_and_pool_close_right_after_the_copies_that_read_them(of_pool):
    """A worker thread ends what a copy kept, at some moment after the device is done."""
    target = gpumem.Arena("host")
    for _ in range(60):
        arena, stream = gpumem.Arena("host"), gpumem.Stream("host")
        result = gpumem.empty(1000, "int8", resource=target, stream=stream)
        with arena.capture(stream) as pool:
            captured = arena.allocate(1000, stream)
        views = [np.frombuffer(each, np.int8) for each in (captured, arena.allocate(1000))]
        for view in views:
            gpumem.copy(result, view, stream)
        del view, views, captured
        gpumem.Device("host").synchronize()
        if of_pool:
            pool.close()
        arena.close()
        assert arena.closed
        assert pool.closed


@pytest.mark.parametrize("dropped", [False, True])
def test_region_that_the_driver_does_not_take_back_is_tried_once_more(host, dropped):
    release_retired()
    before = host.live()["allocations"]
    arena = gpumem.Arena("host", {"backing": "regions"})
    arena.allocate(MIB).close()
    host.fail("cuMemFreeAsync", 1, 999)
    try:
        if not dropped:
            arena.close()
        del arena
        release_retired()
    finally:
        host.clear_faults()
    assert host.live()["allocations"] == before
