"""Adaptors: around any resource, in any nesting; blocks, frees, views, threads."""

from __future__ import annotations

import gc
import io
import itertools
import logging
import sys
import threading

import numpy as np
import pytest
from helpers import child
from helpers.dlpack import consume
from helpers.driver import HostDriver
from helpers.resources import Plain
from helpers.single_block import BLOCK, next_address, single_block_arena
from helpers.threads import in_threads

import gpumem
from gpumem.traces.rmm_log import read_rmm_log

MIB = 1 << 20


def quiet(*_):
    return False


def annotated(resource):
    pytest.importorskip("nvtx", reason="nvtx is not installed")
    return gpumem.adaptors.annotate(resource)


AROUND = {
    "annotate": annotated,
    "limit": lambda resource: gpumem.adaptors.limit(resource, 64 * MIB),
    "log": lambda resource: gpumem.adaptors.log(resource, lambda event: None),
    "on_failure": lambda resource: gpumem.adaptors.on_failure(resource, quiet),
    "fallback": lambda resource: gpumem.adaptors.fallback(
        resource, gpumem.Arena("host/host_accessible")
    ),
    "track": lambda resource: gpumem.adaptors.track(resource, stacks=True),
}
UPSTREAMS = {
    "arena": lambda: gpumem.Arena("host"),
    "pool": lambda: gpumem.DriverPool("host"),
    "python": Plain,
}


@pytest.fixture(params=list(itertools.product(UPSTREAMS, AROUND)), ids="-".join)
def adapted(request):
    upstream, around = request.param
    resource = UPSTREAMS[upstream]()
    yield AROUND[around](resource), resource
    gc.collect()
    if not resource.closed:
        assert resource.stats().requested_in_use == 0
    resource.close()


def live(resource):
    return resource.stats().requested_in_use


# ---- what holds for every adaptor around every resource ------------------------------------------


def test_buffer_names_its_adaptor_and_is_freed_through_it(adapted):
    adaptor, upstream = adapted
    with adaptor.allocate(1000) as buffer:
        assert buffer.resource is adaptor
        assert buffer.nbytes == 1000
        assert live(upstream) == 1000
        np.frombuffer(buffer, np.uint8)[:] = 7
    assert live(upstream) == 0
    adaptor.close()


def test_views_keep_the_block_alive_without_buffer_and_adaptor(adapted):
    adaptor, upstream = adapted
    buffer = adaptor.allocate(1000)
    view = np.from_dlpack(buffer)
    view[:] = 9
    buffer.close()
    del buffer, adaptor
    gc.collect()
    assert live(upstream) == 1000
    assert (view == 9).all()
    del view
    assert live(upstream) == 0


def test_view_dropped_without_the_gil_frees_the_block_later(adapted, stream):
    adaptor, upstream = adapted
    taken = consume(adaptor.allocate(1000).__dlpack__())
    taken.delete_on(HostDriver(), stream)
    stream.synchronize()
    assert live(upstream) == 0
    adaptor.close()


def test_close_with_live_buffers_is_refused_for_adaptor_and_upstream(adapted):
    adaptor, upstream = adapted
    view = memoryview(adaptor.allocate(1000))
    for resource in (adaptor, upstream):
        with pytest.raises(gpumem.errors.InUseError):
            resource.close()
    view.release()
    adaptor.close()
    adaptor.close()
    assert adaptor.closed
    assert not upstream.closed
    with pytest.raises(gpumem.errors.ClosedError):
        adaptor.allocate(8)


def test_closed_upstream_raises_through_the_adaptor(adapted):
    adaptor, upstream = adapted
    upstream.close()
    if not isinstance(adaptor, gpumem.adaptors.FallbackAdaptor):
        with pytest.raises(gpumem.errors.ClosedError):
            adaptor.allocate(8)
    adaptor.close()


def test_zero_byte_allocation_makes_an_empty_buffer(adapted):
    adaptor, upstream = adapted
    with adaptor.allocate(0) as buffer:
        assert (buffer.ptr, buffer.nbytes, buffer.resource) == (0, 0, adaptor)
    assert live(upstream) == 0
    adaptor.close()


def test_stream_alignment_and_persistent_reach_the_upstream(host, adapted):
    adaptor, upstream = adapted
    mine, other = gpumem.Stream("host"), gpumem.Stream("host")
    with adaptor.allocate(1000, mine, alignment=256) as buffer:
        assert buffer.stream == mine
        assert buffer.ptr % 256 == 0
        buffer.close(other)
    adaptor.allocate_persistent(100).close()
    adaptor.allocate_persistent(100).close()
    assert upstream.stats().num_allocs == 3
    adaptor.reset_stream(mine)
    adaptor.reset_stream(other)
    assert adaptor.shrink().released_bytes >= 0


@pytest.mark.parametrize("outer", AROUND)
@pytest.mark.parametrize("inner", [None, "track"])
def test_adapted_buffer_keeps_its_arena_awake_only_while_a_view_lives(outer, inner, arena):
    resource = AROUND[outer](arena if inner is None else AROUND[inner](arena))
    buffer = resource.allocate(MIB)
    first, second = np.frombuffer(buffer, np.uint8), memoryview(buffer)
    first[:] = 7
    for view in ("first", "second"):
        with pytest.raises(gpumem.errors.InUseError, match=rf"read {2 - (view == 'second')} view"):
            arena.sleep()
        del first
        first = second
    del first, second
    arena.sleep()
    arena.wake()
    assert (np.frombuffer(buffer, np.uint8) == 7).all()
    late = memoryview(buffer)
    buffer.close()
    with pytest.raises(gpumem.errors.InUseError, match="view"):
        arena.sleep()
    late.release()
    assert (arena.stats().in_use, resource.stats().in_use) == (0, 0)
    arena.sleep()
    arena.wake()


def test_views_of_an_upstreams_buffer_and_of_the_adaptors_both_keep_the_arena_awake(make_arena):
    arena, taken = make_arena(), []

    class Maker(gpumem.adaptors.TrackAdaptor):
        def _serve(self, *arguments):
            taken.append(super()._serve(*arguments))
            return taken[-1]

    buffer = Maker(arena).allocate(MIB)
    below, above = memoryview(taken.pop()), memoryview(buffer)
    for view in (above, below):
        with pytest.raises(gpumem.errors.InUseError, match="view"):
            arena.sleep()
        view.release()
    arena.sleep()
    arena.wake()
    buffer.close()
    assert arena.stats().in_use == 0


def test_registrations_of_an_adapted_block_that_stays_leave_the_arena_free_to_sleep(arena):
    buffer = gpumem.adaptors.track(arena).allocate(MIB, transport="ipc")
    held = [buffer.register(), buffer.register()]
    other = arena.allocate(MIB)
    arena.sleep()
    arena.wake()
    for each in held:
        each.release()
    view = memoryview(other)
    with pytest.raises(gpumem.errors.InUseError, match="1 view"):
        arena.sleep()
    view.release()


@pytest.mark.parametrize("nbytes", [-1, 1.5, "8", True])
def test_invalid_sizes_are_refused_without_a_change(adapted, nbytes):
    adaptor, upstream = adapted
    with pytest.raises((TypeError, ValueError), match="nbytes"):
        adaptor.allocate(nbytes)
    assert upstream.stats().num_allocs == 0
    adaptor.close()


@pytest.mark.parametrize("order", list(itertools.permutations(AROUND, 3)), ids="-".join)
def test_adaptors_nest_in_any_order(order):
    upstream = gpumem.Arena("host")
    resource = upstream
    for name in order:
        resource = AROUND[name](resource)
    buffers = [resource.allocate(100 + i) for i in range(5)]
    view = np.from_dlpack(buffers[0])
    assert all(buffer.resource is resource for buffer in buffers)
    assert live(upstream) == sum(range(100, 105))
    with pytest.raises(gpumem.errors.InUseError):
        resource.close()
    del buffers
    assert live(upstream) == 100
    del view
    assert live(upstream) == 0
    while resource is not upstream:
        resource.close()
        resource = resource.upstream
    upstream.check_invariants()
    upstream.close()


def test_free_is_ordered_on_its_stream(make_arena, host):
    driver, arena = HostDriver(), make_arena()
    adaptor = gpumem.adaptors.track(gpumem.adaptors.limit(arena, MIB))
    first, second = gpumem.Stream("host"), gpumem.Stream("host")
    busy = adaptor.allocate(4096, first)
    address = busy.ptr
    with driver.block(first):
        driver.fill(busy, 1, first)
        busy.close()
        with adaptor.allocate(4096, second) as other:
            assert other.ptr != address, "handed over while its stream was blocked"
    first.synchronize()
    second.synchronize()


def test_recorded_stream_delays_reuse_of_the_block(make_arena, host):
    driver, arena = HostDriver(), make_arena()
    adaptor = gpumem.adaptors.track(gpumem.adaptors.limit(arena, MIB))
    side = gpumem.Stream("host")
    for share in (False, True):
        buffer = adaptor.allocate(4096)
        address = buffer.ptr
        view = memoryview(buffer) if share else None
        with driver.block(side):
            driver.fill(buffer, 1, side)
            buffer.record_stream(side)
            buffer.close()
            if view is not None:
                view.release()
            with adaptor.allocate(4096) as other:
                assert other.ptr != address
        side.synchronize()


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("share", [False, True])
def test_every_adaptor_frees_behind_recorded_streams_and_on_the_stream_of_the_free(
    make_arena, host, around, share
):
    arena, pin = single_block_arena(make_arena, "never")
    adaptor = AROUND[around](arena)
    own, other, side = (gpumem.Stream("host") for _ in range(3))
    buffer = adaptor.allocate(BLOCK, own)
    address = buffer.ptr
    view = memoryview(buffer) if share else None
    with HostDriver().block(side):
        buffer.record_stream(side)
        buffer.close(other)
        del view
        assert next_address(arena, other) is None
    side.synchronize()
    assert next_address(arena, own) is None
    assert next_address(arena, other) == address
    pin.close()


class Made(gpumem.MemoryResource):
    """Hands out an arena's blocks, which `prepare` sees first."""

    def __init__(self, arena, prepare):
        super().__init__(arena.memory)
        self.arena = arena
        self.prepare = prepare

    def allocate(self, nbytes, stream=None):
        buffer = self.arena.allocate(nbytes, stream)
        self.prepare(buffer)
        return buffer


AROUND_MAKERS = {
    "one": gpumem.adaptors.track,
    "two": lambda maker: gpumem.adaptors.limit(gpumem.adaptors.track(maker), 8 * MIB),
}


@pytest.mark.parametrize("around", AROUND_MAKERS)
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_stream_that_the_buffers_maker_records_delays_reuse(make_arena, host, around, share, when):
    arena, pin = single_block_arena(make_arena)
    own, side, makers = gpumem.Stream("host"), gpumem.Stream("host"), []
    prepare = (lambda buffer: buffer.record_stream(side)) if when == "before" else makers.append
    adaptor = AROUND_MAKERS[around](Made(arena, prepare))
    buffer = adaptor.allocate(BLOCK, own)
    address = buffer.ptr
    while makers:
        makers.pop().record_stream(side)
    view = memoryview(buffer) if share else None
    buffer.record_stream(own)
    with HostDriver().block(side):
        buffer.close()
        del view
        assert next_address(arena, own) is None
    side.synchronize()
    assert next_address(arena, own) == address
    pin.close()


@pytest.mark.parametrize("around", AROUND_MAKERS)
def test_recorded_stream_and_stream_of_the_free_reach_a_block_its_maker_shares(
    make_arena, host, around
):
    arena, pin = single_block_arena(make_arena, "never")
    views, (own, other, side) = [], (gpumem.Stream("host") for _ in range(3))
    adaptor = AROUND_MAKERS[around](Made(arena, lambda buffer: views.append(memoryview(buffer))))
    buffer = adaptor.allocate(BLOCK, own)
    address = buffer.ptr
    buffer.record_stream(side)
    views.clear()
    with HostDriver().block(side):
        buffer.close(other)
        assert next_address(arena, other) is None
    side.synchronize()
    assert next_address(arena, own) is None
    assert next_address(arena, other) == address
    pin.close()


def test_record_stream_on_a_block_that_its_maker_closed_is_an_error(make_arena):
    makers = []
    adaptor = gpumem.adaptors.track(Made(make_arena(), makers.append))
    buffer = adaptor.allocate(4096)
    makers.pop().close()
    with pytest.raises(gpumem.errors.ClosedError):
        buffer.record_stream(gpumem.Stream("host"))


def test_upstream_exception_passes_unchanged():
    error = KeyError("mine")

    class Refuses(Plain):
        def allocate_raw(self, nbytes, stream):
            raise error

    tracked = gpumem.adaptors.track(gpumem.adaptors.limit(Refuses(), 1000))
    for _ in range(3):
        with pytest.raises(KeyError) as raised:
            tracked.allocate(600)
        assert raised.value is error
    assert tracked.upstream.used == 0
    assert tracked.counts() == gpumem.adaptors.TrackCounts(0, 0, 0, 0, 0, 0)
    tracked.close()


def test_upstream_returning_no_buffer_is_an_error(arena):

    class Wrong(gpumem.MemoryResource):
        answer = None

        def allocate(self, nbytes, stream=None):
            return self.answer

    wrong = Wrong("host")
    limited = gpumem.adaptors.limit(wrong, 1000)
    closed = arena.allocate(100)
    closed.close()
    for wrong.answer in (None, b"12345678", arena.allocate(4), closed):
        with pytest.raises(TypeError, match=r"Buffer"):
            limited.allocate(8)
    assert limited.used == 0
    wrong.answer = None


def test_missing_attributes_come_from_the_upstream(arena):
    adaptor = gpumem.adaptors.track(gpumem.adaptors.limit(arena, MIB))
    adaptor.check_invariants()
    assert adaptor.config is arena.config
    assert adaptor.stats() == arena.stats()
    assert adaptor.is_arena
    assert not gpumem.adaptors.limit(Plain(), 8).is_arena
    with pytest.raises(AttributeError):
        adaptor.nothing  # noqa: B018


@pytest.mark.parametrize("make", [*AROUND.values(), lambda x: gpumem.adaptors.fallback(Plain(), x)])
@pytest.mark.parametrize("resource", [None, "host", gpumem.Device("host")])
def test_adaptor_rejects_an_upstream_that_is_no_resource(make, resource):
    with pytest.raises(TypeError, match="MemoryResource"):
        make(resource)


def test_forked_child_may_drop_but_not_use_adaptors():
    child.run_quietly("""
        import os, gpumem
        arena = gpumem.Arena("host")
        events = []
        limited = gpumem.adaptors.limit(arena, 1 << 20)
        adaptor = gpumem.adaptors.log(gpumem.adaptors.track(limited), events.append)
        buffer, view = adaptor.allocate(8), memoryview(adaptor.allocate(8))
        if os.fork() == 0:
            buffer.close()
            view.release()
            assert len(events) == 2, events
            try:
                adaptor.allocate(8)
            except gpumem.errors.ClosedError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        buffer.close()
        view.release()
        adaptor.close()
        arena.close()
    """)


def test_interpreter_exit_leaves_live_blocks_alone():
    child.run_quietly("""
        import gpumem
        tracked = gpumem.adaptors.track(gpumem.Arena("host"))
        adaptor = gpumem.adaptors.log(tracked, lambda event: None)
        kept = adaptor.allocate(8), memoryview(adaptor.allocate(8))
    """)


# ---- limit ---------------------------------------------------------------------------------------


def test_limit_adaptor_serves_up_to_its_limit_and_not_beyond(make_arena):
    limited = gpumem.adaptors.limit(make_arena(), 1000)
    first = limited.allocate(600)
    assert (limited.limit, limited.used, limited.free) == (1000, 600, 400)
    with pytest.raises(gpumem.OutOfMemoryError, match="limit 1000") as raised:
        limited.allocate(401)
    assert (raised.value.requested_nbytes, raised.value.in_use, raised.value.limit) == (
        401,
        600,
        1000,
    )
    assert raised.value.largest_free == 400
    second = limited.allocate(400)
    first.close()
    assert limited.used == 400
    second.close()
    with pytest.raises(gpumem.OutOfMemoryError):
        limited.allocate_persistent(1001)
    limited.allocate_persistent(1000).close()


def test_limit_adaptor_with_limit_zero_serves_only_empty_buffers(make_arena):
    limited = gpumem.adaptors.limit(make_arena(), 0)
    assert limited.allocate(0).nbytes == 0
    with pytest.raises(gpumem.OutOfMemoryError):
        limited.allocate(1)


@pytest.mark.parametrize(
    ("nbytes", "error"),
    [
        (-1, ValueError),
        (1 << 63, ValueError),
        (1.5, TypeError),
        ("1", TypeError),
        (True, TypeError),
    ],
)
def test_limit_adaptor_rejects_invalid_limits(make_arena, nbytes, error):
    with pytest.raises(error, match="nbytes"):
        gpumem.adaptors.limit(make_arena(), nbytes)


def test_limit_adaptor_is_exact_under_threads():
    class Watches(Plain):
        """Counts what is out between taking and giving; lets other threads in meanwhile."""

        out = most = 0
        lock = threading.Lock()

        def allocate_raw(self, nbytes, stream):
            with self.lock:
                self.out += nbytes
                self.most = max(self.most, self.out)
            threading.Event().wait(0.0001)
            return super().allocate_raw(nbytes, stream)

        def deallocate_raw(self, ptr, nbytes, stream):
            super().deallocate_raw(ptr, nbytes, stream)
            with self.lock:
                self.out -= nbytes

    upstream = Watches()
    limited = gpumem.adaptors.limit(upstream, 1000)
    served, refused = [], []

    def work():
        for _ in range(40):
            try:
                with limited.allocate(300):
                    served.append(1)
            except gpumem.OutOfMemoryError as error:
                refused.append(error.in_use)

    in_threads(work, 6)
    assert upstream.most <= 1000
    assert len(served) + len(refused) == 240
    assert all(in_use <= 1000 for in_use in refused)
    assert limited.used == 0
    assert upstream.out == 0


# ---- log -----------------------------------------------------------------------------------------


def test_log_adaptor_calls_a_callable_sink_for_each_event(make_arena, stream):
    events = []
    logged = gpumem.adaptors.log(gpumem.adaptors.limit(make_arena(), 5000), events.append)
    buffer = logged.allocate(1000, stream)
    ptr = buffer.ptr
    buffer.close()
    logged.allocate_persistent(10).close()
    with pytest.raises(gpumem.OutOfMemoryError):
        logged.allocate(5001, stream)
    assert [(event.action, event.nbytes, event.stream) for event in events] == [
        ("allocate", 1000, stream.ptr),
        ("free", 1000, stream.ptr),
        ("allocate", 10, 1),
        ("free", 10, 1),
        ("failure", 5001, stream.ptr),
    ]
    assert {event.ptr for event in events[:2]} == {ptr}
    assert [event.persistent for event in events] == [False, False, True, False, False]
    assert "OutOfMemoryError" in events[-1].error
    assert {event.thread for event in events} == {threading.get_ident()}
    times = [event.time for event in events]
    assert times == sorted(times)


@pytest.mark.parametrize("viewed", [False, True])
def test_log_adaptor_names_the_memory_of_the_block_at_its_free(make_arena, viewed):
    events = []
    fast = gpumem.adaptors.limit(make_arena(), 1000)
    both = gpumem.adaptors.fallback(fast, make_arena(memory="host/host_accessible"))
    logged = gpumem.adaptors.log(both, events.append)
    buffer = logged.allocate(2000)
    view = memoryview(buffer) if viewed else None
    buffer.close()
    del view
    logged.allocate(500).close()
    assert [(event.action, event.memory) for event in events] == [
        ("allocate", "host:0/host_accessible"),
        ("free", "host:0/host_accessible"),
        ("allocate", "host:0"),
        ("free", "host:0"),
    ]


def test_log_adaptor_reports_nothing_of_a_block_without_memory(make_arena):
    events = []
    logged = gpumem.adaptors.log(make_arena(), events.append)
    logged.allocate(0).close()
    logged.allocate_persistent(0).close()
    assert events == []


def test_log_adaptor_names_the_stream_of_the_free(make_arena):
    events = []
    logged = gpumem.adaptors.log(make_arena(), events.append)
    other = gpumem.Stream("host")
    buffer = logged.allocate(8)
    view = memoryview(buffer)
    buffer.close(other)
    view.release()
    assert events[-1].stream == other.ptr


def test_log_adaptor_writes_a_file_that_replay_reads(make_arena):
    text = io.StringIO()
    logged = gpumem.adaptors.log(gpumem.adaptors.limit(make_arena(), MIB), text)
    kept = [logged.allocate(1000 + i) for i in range(10)]
    with pytest.raises(gpumem.OutOfMemoryError):
        logged.allocate(MIB)
    kept.clear()
    file = io.BytesIO(text.getvalue().encode())
    trace = read_rmm_log(file, "mine")
    assert (trace.events, trace.allocs) == (20, 10)


def test_log_adaptor_passes_events_to_a_logger(make_arena, caplog):
    logged = gpumem.adaptors.log(
        gpumem.adaptors.limit(make_arena(), 100), logging.getLogger("memory")
    )
    with caplog.at_level(logging.INFO, "memory"):
        logged.allocate(100).close()
        with pytest.raises(gpumem.OutOfMemoryError):
            logged.allocate(101)
    assert [record.memory_event.action for record in caplog.records] == [
        "allocate",
        "free",
        "failure",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "WARNING"]
    assert "allocate 100 bytes at 0x" in caplog.messages[0]


@pytest.mark.parametrize("sink", [None, 3, "file.csv"])
def test_log_adaptor_rejects_an_invalid_sink(make_arena, sink):
    with pytest.raises(TypeError, match="sink"):
        gpumem.adaptors.log(make_arena(), sink)


def test_log_adaptor_reports_a_failing_sink_and_goes_on(make_arena, monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: reported.append(told.exc_value))

    def fails(event):
        raise KeyError(event.action)

    logged = gpumem.adaptors.log(make_arena(), fails)
    logged.allocate(8).close()
    assert [error.args for error in reported] == [("allocate",), ("free",)]


def test_log_adaptor_logs_what_its_sink_allocates_afterwards(make_arena):
    events, kept = [], []
    logged = None

    def sink(event):
        events.append((event.action, event.nbytes))
        if len(events) == 1:
            kept.append(logged.allocate(2))
            kept.pop().close()
            assert len(events) == 1

    logged = gpumem.adaptors.log(make_arena(), sink)
    logged.allocate(1).close()
    assert events == [("allocate", 1), ("allocate", 2), ("free", 2), ("free", 1)]


def test_log_adaptor_logs_a_view_dropped_without_the_gil_with_its_thread(make_arena, stream):
    events = []
    logged = gpumem.adaptors.log(make_arena(), events.append)
    taken = consume(logged.allocate(64).__dlpack__())
    taken.delete_on(HostDriver(), stream)
    stream.synchronize()
    logged.allocate(1).close()
    assert [event.action for event in events][:2] == ["allocate", "free"]
    assert events[1].thread != threading.get_ident()


# ---- on_failure ----------------------------------------------------------------------------------


def test_failure_adaptor_retries_after_its_callback_freed_memory(make_arena):
    limited = gpumem.adaptors.limit(make_arena(), 1000)
    cache = [limited.allocate(400), limited.allocate(400)]
    asked = []

    def spill(nbytes, attempt):
        asked.append((nbytes, attempt))
        return bool(cache and [cache.pop()])

    resource = gpumem.adaptors.on_failure(limited, spill)
    with resource.allocate(900) as buffer:
        assert buffer.nbytes == 900
    assert asked == [(900, 1), (900, 2)]


def test_failure_adaptor_raises_the_upstreams_error_when_it_gives_up(make_arena):
    limited = gpumem.adaptors.limit(make_arena(), 1000)
    resource = gpumem.adaptors.on_failure(limited, lambda nbytes, attempt: attempt < 3)
    with pytest.raises(gpumem.OutOfMemoryError, match="limit 1000"):
        resource.allocate(1001)
    assert limited.used == 0


def test_failure_adaptor_calls_back_for_out_of_memory_only(make_arena):
    asked = []
    resource = gpumem.adaptors.on_failure(make_arena(), lambda *a: asked.append(a) or False)
    with pytest.raises(ValueError, match="alignment"):
        resource.allocate(8, alignment=3)
    assert not asked


@pytest.mark.parametrize("answer", [None, 1, "yes"])
def test_failure_adaptor_rejects_a_callback_result_that_is_no_bool(make_arena, answer):
    resource = gpumem.adaptors.on_failure(gpumem.adaptors.limit(make_arena(), 8), lambda *_: answer)
    with pytest.raises(TypeError, match="True to try"):
        resource.allocate(9)


def test_failure_adaptor_passes_the_callbacks_exception(make_arena):
    def fail(nbytes, attempt):
        raise KeyError(nbytes)

    with pytest.raises(KeyError):
        gpumem.adaptors.on_failure(gpumem.adaptors.limit(make_arena(), 8), fail).allocate(9)
    with pytest.raises(TypeError, match="callable"):
        gpumem.adaptors.on_failure(make_arena(), None)


# ---- fallback ------------------------------------------------------------------------------------


def test_fallback_adaptor_takes_the_next_resource_when_memory_is_out(make_arena):
    first = gpumem.adaptors.limit(make_arena(), 1000)
    pinned = make_arena(memory="host/host_accessible")
    managed = make_arena(memory="host/managed")
    both = gpumem.adaptors.fallback(first, gpumem.adaptors.limit(pinned, 2000), managed)
    small, large, largest = both.allocate(1000), both.allocate(2000), both.allocate(3000)
    assert [both.served_by(buffer) for buffer in (small, large, largest)] == list(both.upstreams)
    assert both.served == (1, 1, 1)
    assert [str(buffer.memory) for buffer in (small, large, largest)] == [
        "host:0",
        "host:0/host_accessible",
        "host:0/managed",
    ]
    assert (live(pinned), live(managed)) == (2000, 3000)
    assert large.__dlpack_device__() == (1, 0)
    assert largest.__dlpack_device__() == (13, 0)
    assert both.stats().requested_in_use == 6000
    for buffer in (small, large, largest):
        assert buffer.resource is both
        buffer.close()
    with pytest.raises(gpumem.errors.ClosedError):
        both.served_by(small)
    assert both.shrink().retained == ()


def test_adaptor_around_a_fallback_keeps_the_buffers_memory_info(make_arena):
    streams = gpumem.Stream("host"), gpumem.Stream("host")
    first = gpumem.adaptors.limit(make_arena(), 100)
    second = make_arena(memory="host/managed")
    second.allocate(8, streams[1]).close()  # its numbers of streams differ from the first's
    outer = gpumem.adaptors.track(gpumem.adaptors.fallback(first, second))
    for share in (False, True):
        buffer = outer.allocate(200, streams[0])
        assert (str(buffer.memory), buffer.stream) == ("host:0/managed", streams[0])
        view = memoryview(buffer) if share else None
        buffer.close(streams[1])
        if view is not None:
            view.release()
    assert second.stats().in_use == 0


def test_fallback_adaptor_falls_back_for_out_of_memory_only(make_arena):
    class Broken(Plain):
        def allocate_raw(self, nbytes, stream):
            raise KeyError("mine")

    second = make_arena()
    with pytest.raises(KeyError):
        gpumem.adaptors.fallback(Broken(), second).allocate(8)
    assert second.stats().num_allocs == 0


def test_fallback_adaptor_reports_the_reason_of_each_resource(make_arena):
    both = gpumem.adaptors.fallback(
        gpumem.adaptors.limit(make_arena(), 10), gpumem.adaptors.limit(make_arena(), 20)
    )
    with pytest.raises(gpumem.OutOfMemoryError, match="limit 20 B,") as raised:
        both.allocate(30)
    assert "limit 10 B," in raised.value.__notes__[0]
    assert both.served == (0, 0)


def test_fallback_adaptor_needs_two_or_more_resources_of_one_device(make_arena):
    arena = make_arena()
    with pytest.raises(TypeError):
        gpumem.adaptors.fallback(arena)
    with pytest.raises(ValueError, match="twice"):
        gpumem.adaptors.fallback(arena, make_arena(), arena)
    child.run_quietly("""
        import gpumem
        gpumem.device.set_host_device_count(2)
        try:
            gpumem.adaptors.fallback(gpumem.Arena("host:0"), gpumem.Arena("host:1"))
        except ValueError as error:
            assert "one device" in str(error)
        else:
            raise AssertionError
    """)


# ---- track ---------------------------------------------------------------------------------------


def test_track_adaptor_counts_totals_peaks_and_outstanding_blocks(make_arena):
    tracked = gpumem.adaptors.track(make_arena())
    one, two = tracked.allocate(100), tracked.allocate(50)
    one.close()
    three = tracked.allocate(10)
    assert tracked.counts() == gpumem.adaptors.TrackCounts(60, 2, 150, 2, 160, 3)
    assert [(block.ptr, block.nbytes) for block in tracked.outstanding()] == [
        (two.ptr, 50),
        (three.ptr, 10),
    ]
    tracked.reset_peaks()
    assert tracked.counts() == gpumem.adaptors.TrackCounts(60, 2, 60, 2, 160, 3)
    two.close()
    three.close()
    assert tracked.outstanding() == []
    assert tracked.report() == ""


def test_track_adaptor_records_the_stack_of_each_allocation(make_arena):
    tracked = gpumem.adaptors.track(make_arena(), stacks=True)

    def careless():
        return tracked.allocate(100)

    kept = careless()
    (block,) = tracked.outstanding()
    assert block.stack[-1].name == "careless"
    assert block.stack[-1].filename == __file__
    assert "return tracked.allocate(100)" in tracked.report()
    kept.close()


def test_track_adaptor_is_exact_under_threads(make_arena):
    tracked = gpumem.adaptors.track(gpumem.adaptors.track(make_arena()))

    def work():
        kept = []
        for i in range(200):
            kept.append(tracked.allocate(100))
            if i % 3 == 0:
                kept.pop().close()
            if i % 5 == 0:
                np.from_dlpack(kept.pop()) if kept else None

    in_threads(work, 4)
    counts = tracked.counts()
    assert (counts.current_bytes, counts.current_blocks) == (0, 0)
    assert (counts.total_bytes, counts.total_blocks) == (80000, 800)
    assert tracked.upstream.counts().total_blocks == 800
    assert tracked.outstanding() == []
