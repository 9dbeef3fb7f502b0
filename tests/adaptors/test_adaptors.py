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

import gpumem
from gpumem import replay

MIB = 1 << 20


def quiet(*_):
    return False


def annotated(resource):
    pytest.importorskip("nvtx", reason="nvtx is not installed")
    return gpumem.annotate(resource)


AROUND = {
    "annotate": annotated,
    "limit": lambda resource: gpumem.limit(resource, 64 * MIB),
    "log": lambda resource: gpumem.log(resource, lambda event: None),
    "on_failure": lambda resource: gpumem.on_failure(resource, quiet),
    "fallback": lambda resource: gpumem.fallback(resource, gpumem.Arena("host/host_accessible")),
    "track": lambda resource: gpumem.track(resource, stacks=True),
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


def test_a_buffer_knows_its_adaptor_and_goes_back_through_it(adapted):
    adaptor, upstream = adapted
    with adaptor.allocate(1000) as buffer:
        assert buffer.resource is adaptor
        assert buffer.nbytes == 1000
        assert live(upstream) == 1000
        np.frombuffer(buffer, np.uint8)[:] = 7
    assert live(upstream) == 0
    adaptor.close()


def test_views_keep_the_block_when_everything_else_is_gone(adapted):
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


def test_a_view_dropped_without_the_interpreter_lock(adapted):
    adaptor, upstream = adapted
    stream = gpumem.Stream("host")
    taken = consume(adaptor.allocate(1000).__dlpack__())
    taken.delete_on(HostDriver(), stream)
    stream.synchronize()
    assert live(upstream) == 0
    adaptor.close()


def test_an_adaptor_with_live_buffers_is_not_closed_and_its_upstream_neither(adapted):
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


def test_a_closed_upstream_is_told_by_the_adaptor(adapted):
    adaptor, upstream = adapted
    upstream.close()
    if not isinstance(adaptor, gpumem.adaptors.FallbackAdaptor):
        with pytest.raises(gpumem.errors.ClosedError):
            adaptor.allocate(8)
    adaptor.close()


def test_empty_buffers_are_empty_here_too(adapted):
    adaptor, upstream = adapted
    with adaptor.allocate(0) as buffer:
        assert (buffer.ptr, buffer.nbytes, buffer.resource) == (0, 0, adaptor)
    assert live(upstream) == 0
    adaptor.close()


def test_streams_alignment_and_persistent_blocks_reach_the_upstream(host, adapted):
    adaptor, upstream = adapted
    mine, other = gpumem.Stream("host"), gpumem.Stream("host")
    with adaptor.allocate(1000, mine, alignment=256) as buffer:
        assert buffer.stream == mine
        assert buffer.ptr % 256 == 0
        buffer.close(other)
    adaptor.allocate_persistent(100).close()
    adaptor.reserve(100).close()
    assert upstream.stats().num_allocs == 3
    adaptor.reset_stream(mine)
    adaptor.reset_stream(other)
    assert adaptor.shrink().released_bytes >= 0


@pytest.mark.parametrize("nbytes", [-1, 1.5, "8", True])
def test_bad_sizes_are_refused_with_nothing_changed(adapted, nbytes):
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
    upstream.validate()
    upstream.close()


def test_a_free_goes_back_in_the_order_of_its_stream(make_arena, host):
    driver, arena = HostDriver(), make_arena()
    adaptor = gpumem.track(gpumem.limit(arena, MIB))
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


def test_a_recorded_stream_holds_the_block_back(make_arena, host):
    driver, arena = HostDriver(), make_arena()
    adaptor = gpumem.track(gpumem.limit(arena, MIB))
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


def test_an_upstreams_exception_passes_as_it_is_and_changes_nothing():
    error = KeyError("mine")

    class Refuses(Plain):
        def allocate_raw(self, nbytes, stream):
            raise error

    tracked = gpumem.track(gpumem.limit(Refuses(), 1000))
    for _ in range(3):
        with pytest.raises(KeyError) as raised:
            tracked.allocate(600)
        assert raised.value is error
    assert tracked.upstream.used == 0
    assert tracked.counts() == gpumem.TrackCounts(0, 0, 0, 0, 0, 0)
    tracked.close()


def test_an_upstream_that_returns_no_buffer_is_told(make_arena):
    arena = make_arena()

    class Wrong(gpumem.MemoryResource):
        answer = None

        def allocate(self, nbytes, stream=None):
            return self.answer

    wrong = Wrong("host")
    limited = gpumem.limit(wrong, 1000)
    closed = arena.allocate(100)
    closed.close()
    for wrong.answer in (None, b"12345678", arena.allocate(4), closed):
        with pytest.raises(TypeError, match=r"Buffer"):
            limited.allocate(8)
    assert limited.used == 0
    wrong.answer = None


def test_what_an_adaptor_lacks_its_upstream_answers(make_arena):
    arena = make_arena()
    adaptor = gpumem.track(gpumem.limit(arena, MIB))
    adaptor.validate()
    assert adaptor.config is arena.config
    assert adaptor.stats() == arena.stats()
    assert adaptor.is_arena
    assert not gpumem.limit(Plain(), 8).is_arena
    with pytest.raises(AttributeError):
        adaptor.nothing  # noqa: B018


@pytest.mark.parametrize("make", [*AROUND.values(), lambda x: gpumem.fallback(Plain(), x)])
@pytest.mark.parametrize("resource", [None, "host", gpumem.Device("host")])
def test_what_is_no_resource_is_refused(make, resource):
    with pytest.raises(TypeError, match="MemoryResource"):
        make(resource)


def test_a_forks_child_may_drop_but_not_use_them():
    child.run_quietly(
        """
        import os, gpumem
        arena = gpumem.Arena("host")
        events = []
        adaptor = gpumem.log(gpumem.track(gpumem.limit(arena, 1 << 20)), events.append)
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
        """
    )


def test_at_the_interpreters_end_live_blocks_are_left_alone():
    child.run_quietly(
        """
        import gpumem
        adaptor = gpumem.log(gpumem.track(gpumem.Arena("host")), lambda event: None)
        kept = adaptor.allocate(8), memoryview(adaptor.allocate(8))
        """
    )


# ---- limit ---------------------------------------------------------------------------------------


def test_a_limit_is_reached_and_not_passed(make_arena):
    limited = gpumem.limit(make_arena(), 1000)
    first = limited.allocate(600)
    assert (limited.limit, limited.used, limited.free) == (1000, 600, 400)
    with pytest.raises(gpumem.OutOfMemoryError, match="limit 1000") as raised:
        limited.allocate(401)
    assert (raised.value.asked, raised.value.in_use, raised.value.limit) == (401, 600, 1000)
    assert raised.value.largest_free == 400
    second = limited.allocate(400)
    first.close()
    assert limited.used == 400
    second.close()
    with pytest.raises(gpumem.OutOfMemoryError):
        limited.allocate_persistent(1001)
    limited.allocate_persistent(1000).close()


def test_a_limit_of_nothing_gives_empty_buffers_only(make_arena):
    limited = gpumem.limit(make_arena(), 0)
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
def test_a_bad_limit_is_refused(make_arena, nbytes, error):
    with pytest.raises(error, match="nbytes"):
        gpumem.limit(make_arena(), nbytes)


def test_threads_never_pass_a_limit_and_are_not_refused_for_nothing():
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
    limited = gpumem.limit(upstream, 1000)
    served, refused = [], []

    def work():
        for _ in range(40):
            try:
                with limited.allocate(300):
                    served.append(1)
            except gpumem.OutOfMemoryError as error:
                refused.append(error.in_use)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert upstream.most <= 1000
    assert len(served) + len(refused) == 240
    assert all(in_use <= 1000 for in_use in refused)
    assert limited.used == 0
    assert upstream.out == 0


# ---- log -----------------------------------------------------------------------------------------


def test_a_callable_gets_every_event(make_arena):
    events = []
    logged = gpumem.log(gpumem.limit(make_arena(), 5000), events.append)
    stream = gpumem.Stream("host")
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


def test_a_free_on_another_stream_is_logged_there(make_arena):
    events = []
    logged = gpumem.log(make_arena(), events.append)
    other = gpumem.Stream("host")
    buffer = logged.allocate(8)
    view = memoryview(buffer)
    buffer.close(other)
    view.release()
    assert events[-1].stream == other.ptr


def test_a_file_gets_lines_that_replay_reads(make_arena):
    text = io.StringIO()
    logged = gpumem.log(gpumem.limit(make_arena(), MIB), text)
    kept = [logged.allocate(1000 + i) for i in range(10)]
    with pytest.raises(gpumem.OutOfMemoryError):
        logged.allocate(MIB)
    kept.clear()
    file = io.BytesIO(text.getvalue().encode())
    trace = replay.rmm_log.read_rmm_log(file, "mine")
    assert (trace.events, trace.allocs) == (20, 10)


def test_a_logger_gets_a_record_with_the_event(make_arena, caplog):
    logged = gpumem.log(gpumem.limit(make_arena(), 100), logging.getLogger("memory"))
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
def test_what_is_no_sink_is_refused(make_arena, sink):
    with pytest.raises(TypeError, match="sink"):
        gpumem.log(make_arena(), sink)


def test_a_failing_sink_is_reported_and_changes_nothing(make_arena, monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: reported.append(told.exc_value))

    def fails(event):
        raise KeyError(event.action)

    logged = gpumem.log(make_arena(), fails)
    logged.allocate(8).close()
    assert [error.args for error in reported] == [("allocate",), ("free",)]


def test_a_sink_that_allocates_or_frees_is_told_after(make_arena):
    events, kept = [], []
    logged = None

    def sink(event):
        events.append((event.action, event.nbytes))
        if len(events) == 1:
            kept.append(logged.allocate(2))
            kept.pop().close()
            assert len(events) == 1

    logged = gpumem.log(make_arena(), sink)
    logged.allocate(1).close()
    assert events == [("allocate", 1), ("allocate", 2), ("free", 2), ("free", 1)]


def test_a_view_dropped_without_python_is_logged_with_its_thread(make_arena):
    events = []
    logged = gpumem.log(make_arena(), events.append)
    stream = gpumem.Stream("host")
    taken = consume(logged.allocate(64).__dlpack__())
    taken.delete_on(HostDriver(), stream)
    stream.synchronize()
    logged.allocate(1).close()
    assert [event.action for event in events][:2] == ["allocate", "free"]
    assert events[1].thread != threading.get_ident()


# ---- on_failure ----------------------------------------------------------------------------------


def test_a_callback_frees_room_and_the_request_is_served(make_arena):
    limited = gpumem.limit(make_arena(), 1000)
    cache = [limited.allocate(400), limited.allocate(400)]
    asked = []

    def spill(nbytes, attempt):
        asked.append((nbytes, attempt))
        return bool(cache and [cache.pop()])

    resource = gpumem.on_failure(limited, spill)
    with resource.allocate(900) as buffer:
        assert buffer.nbytes == 900
    assert asked == [(900, 1), (900, 2)]


def test_giving_up_raises_the_upstreams_error(make_arena):
    limited = gpumem.limit(make_arena(), 1000)
    resource = gpumem.on_failure(limited, lambda nbytes, attempt: attempt < 3)
    with pytest.raises(gpumem.OutOfMemoryError, match="limit 1000"):
        resource.allocate(1001)
    assert limited.used == 0


def test_only_a_lack_of_memory_asks_the_callback(make_arena):
    asked = []
    resource = gpumem.on_failure(make_arena(), lambda *a: asked.append(a) or False)
    with pytest.raises(ValueError, match="alignment"):
        resource.allocate(8, alignment=3)
    assert not asked


@pytest.mark.parametrize("answer", [None, 1, "yes"])
def test_a_callback_that_answers_neither_yes_nor_no_is_told(make_arena, answer):
    resource = gpumem.on_failure(gpumem.limit(make_arena(), 8), lambda *_: answer)
    with pytest.raises(TypeError, match="True to try"):
        resource.allocate(9)


def test_what_the_callback_raises_passes(make_arena):
    def fail(nbytes, attempt):
        raise KeyError(nbytes)

    with pytest.raises(KeyError):
        gpumem.on_failure(gpumem.limit(make_arena(), 8), fail).allocate(9)
    with pytest.raises(TypeError, match="callable"):
        gpumem.on_failure(make_arena(), None)


# ---- fallback ------------------------------------------------------------------------------------


def test_the_next_resource_serves_what_the_first_cannot(make_arena):
    first = gpumem.limit(make_arena(), 1000)
    pinned = make_arena(memory="host/host_accessible")
    managed = make_arena(memory="host/managed")
    both = gpumem.fallback(first, gpumem.limit(pinned, 2000), managed)
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
    assert both.shrink().kept == ()


def test_an_adaptor_around_a_fallback_keeps_what_the_buffer_is(make_arena):
    streams = gpumem.Stream("host"), gpumem.Stream("host")
    first = gpumem.limit(make_arena(), 100)
    second = make_arena(memory="host/managed")
    second.allocate(8, streams[1]).close()  # its numbers of streams differ from the first's
    outer = gpumem.track(gpumem.fallback(first, second))
    for share in (False, True):
        buffer = outer.allocate(200, streams[0])
        assert (str(buffer.memory), buffer.stream) == ("host:0/managed", streams[0])
        view = memoryview(buffer) if share else None
        buffer.close(streams[1])
        if view is not None:
            view.release()
    assert second.stats().in_use == 0


def test_only_a_lack_of_memory_falls_back(make_arena):
    class Broken(Plain):
        def allocate_raw(self, nbytes, stream):
            raise KeyError("mine")

    second = make_arena()
    with pytest.raises(KeyError):
        gpumem.fallback(Broken(), second).allocate(8)
    assert second.stats().num_allocs == 0


def test_when_none_has_the_memory_every_reason_is_told(make_arena):
    both = gpumem.fallback(gpumem.limit(make_arena(), 10), gpumem.limit(make_arena(), 20))
    with pytest.raises(gpumem.OutOfMemoryError, match="limit 20,") as raised:
        both.allocate(30)
    assert "limit 10," in raised.value.__notes__[0]
    assert both.served == (0, 0)


def test_a_fallback_takes_two_or_more_resources_of_one_device(make_arena):
    arena = make_arena()
    with pytest.raises(TypeError):
        gpumem.fallback(arena)
    with pytest.raises(ValueError, match="twice"):
        gpumem.fallback(arena, make_arena(), arena)
    child.run_quietly(
        """
        import gpumem
        gpumem.set_host_device_count(2)
        try:
            gpumem.fallback(gpumem.Arena("host:0"), gpumem.Arena("host:1"))
        except ValueError as error:
            assert "one device" in str(error)
        else:
            raise AssertionError
        """
    )


# ---- track ---------------------------------------------------------------------------------------


def test_counts_peaks_and_what_is_outstanding(make_arena):
    tracked = gpumem.track(make_arena())
    one, two = tracked.allocate(100), tracked.allocate(50)
    one.close()
    three = tracked.allocate(10)
    assert tracked.counts() == gpumem.TrackCounts(60, 2, 150, 2, 160, 3)
    assert [(block.ptr, block.nbytes) for block in tracked.outstanding()] == [
        (two.ptr, 50),
        (three.ptr, 10),
    ]
    tracked.reset_peaks()
    assert tracked.counts() == gpumem.TrackCounts(60, 2, 60, 2, 160, 3)
    two.close()
    three.close()
    assert tracked.outstanding() == []
    assert tracked.report() == ""


def test_stacks_say_who_asked(make_arena):
    tracked = gpumem.track(make_arena(), stacks=True)

    def careless():
        return tracked.allocate(100)

    kept = careless()
    (block,) = tracked.outstanding()
    assert block.stack[-1].name == "careless"
    assert block.stack[-1].filename == __file__
    assert "return tracked.allocate(100)" in tracked.report()
    kept.close()


def test_counts_are_exact_under_threads(make_arena):
    tracked = gpumem.track(gpumem.track(make_arena()))

    def work():
        kept = []
        for i in range(200):
            kept.append(tracked.allocate(100))
            if i % 3 == 0:
                kept.pop().close()
            if i % 5 == 0:
                np.from_dlpack(kept.pop()) if kept else None

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = tracked.counts()
    assert (counts.current_bytes, counts.current_blocks) == (0, 0)
    assert (counts.total_bytes, counts.total_blocks) == (80000, 800)
    assert tracked.upstream.counts().total_blocks == 800
    assert tracked.outstanding() == []
