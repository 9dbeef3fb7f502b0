"""What counts as a stream, whose it is, and what Stream and Event objects do."""

import numpy as np
import pytest
from helpers import child
from helpers.driver import Gate, HostDriver
from helpers.threads import in_a_thread

import gpumem

LEGACY, PER_THREAD = 1, 2


class Protocol:
    """A stream of another library, by the protocol."""

    def __init__(self, handle):
        self.handle_of_mine = handle

    def __cuda_stream__(self):
        return 0, self.handle_of_mine


class Broken:
    """What claims to be a stream and does not keep to the protocol."""

    def __init__(self, answer):
        self.answer = answer

    def __cuda_stream__(self):
        return self.answer


class ProtocolAttribute:
    def __init__(self, handle):
        self.__cuda_stream__ = (0, handle)


class TorchLike:
    def __init__(self, handle):
        self.cuda_stream = handle


class CupyLike:
    def __init__(self, handle):
        self.ptr = handle


class NumbaLike:
    class Handle:
        def __init__(self, value):
            self.value = value

    def __init__(self, handle):
        self.handle = self.Handle(handle)


class Indexable:
    def __init__(self, handle):
        self.handle_of_mine = handle

    def __index__(self):
        return self.handle_of_mine


class ArrayLike:
    """Memory, of which a pointer says nothing about streams."""

    def __init__(self, ptr):
        self.ptr = ptr
        self.nbytes = 8


FOREIGN = [int, np.uint64, Indexable, Protocol, ProtocolAttribute, TorchLike, CupyLike, NumbaLike]


@pytest.mark.parametrize("wrap", FOREIGN)
def test_stream_objects_of_any_library_are_accepted(arena, wrap, stream):
    foreign = wrap(stream.ptr)
    with arena.allocate(1000, foreign) as first:
        address = first.ptr
        assert first.stream == stream
    assert arena.allocate(1000, stream).ptr == address
    assert {block.stream for block in arena.blocks()} <= {0, stream.ptr}


@pytest.mark.parametrize("wrap", FOREIGN)
@pytest.mark.parametrize("legacy", [0, 1])
def test_none_zero_and_one_are_the_legacy_default_stream(arena, wrap, legacy):
    with arena.allocate(1000) as first:
        address = first.ptr
    again = arena.allocate(1000, wrap(legacy))
    assert again.ptr == address
    assert again.stream.ptr == LEGACY


def test_foreign_stream_object_lives_as_long_as_its_memory(arena):
    import weakref

    stream = gpumem.Stream("host")
    foreign = Protocol(stream.ptr)
    alive = weakref.ref(foreign)
    buffer = arena.allocate(1000, foreign)
    del foreign
    assert alive() is not None
    buffer.close()
    stream.synchronize()
    arena.reset_stream(stream.ptr)
    assert alive() is None


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (-1, ValueError),
        (1 << 64, ValueError),
        (True, TypeError),
        (1.5, TypeError),
        ("1", TypeError),
        (object(), TypeError),
        (Protocol(-5), ValueError),
        (Broken(()), TypeError),
        (Broken((0,)), TypeError),
        (Broken((0, 1, 2)), TypeError),
        (Broken([]), TypeError),
        (Broken(7), TypeError),
    ],
)
def test_invalid_stream_is_refused_without_a_change(arena, stream, error):
    calls = [lambda: arena.allocate(10, stream), lambda: arena.reset_stream(stream)]
    calls.append(lambda: gpumem.Arena("host", default_stream=stream))
    for call in calls:
        with pytest.raises(error):
            call()
    assert arena.stats().num_allocs == 0


def test_memory_and_events_are_not_streams_although_they_have_a_pointer(arena):
    buffer = arena.allocate(8)
    before = arena.stats()
    for thing in (buffer, ArrayLike(1), gpumem.Event("host"), np.zeros(4), arena):
        for call in (arena.reset_stream, buffer.close, lambda x: arena.allocate(8, x)):
            with pytest.raises(TypeError, match="is not a stream"):
                call(thing)
    assert arena.stats() == before
    assert not buffer.closed


def test_error_of_a_foreign_stream_object_reaches_the_caller(arena):
    class Raises:
        def __cuda_stream__(self):
            raise LookupError("its own reason")

    with pytest.raises(LookupError, match="its own reason"):
        arena.allocate(10, Raises())
    assert arena.stats().num_allocs == 0


def test_default_stream_of_the_arena_is_used_where_none_is_given(make_arena, stream):
    arena = make_arena(default_stream=stream)
    assert arena.allocate(10).stream == stream
    assert arena.allocate(10, None).stream == stream
    assert arena.allocate(0).stream == stream
    assert arena.allocate_persistent(10).stream == stream
    assert arena.allocate(10, 0).stream.ptr == LEGACY


# ---- Stream and Event ----------------------------------------------------------------------------


def test_stream_runs_in_order_and_query_reports_completion(arena, virtual_clock, driver, stream):
    buffer = arena.allocate(1000, stream)
    with driver.block(stream):
        event = stream.record()
        driver.fill(buffer, 1, stream)
        driver.fill(buffer, 2, stream)
        assert not stream.query()
        assert not event.query()
    stream.synchronize()
    assert stream.query()
    assert event.query()
    assert set(memoryview(buffer)) == {2}


def test_stream_waits_for_an_event_of_another(arena, virtual_clock, driver):
    first, second = gpumem.Stream("host"), gpumem.Stream("host")
    buffer = arena.allocate(1000)
    with driver.block(first):
        driver.fill(buffer, 1, first)
        second.wait(first.record())
        driver.fill(buffer, 2, second)
        assert not second.query()
    second.synchronize()
    assert set(memoryview(buffer)) == {2}
    assert first.query()


def test_event_never_recorded_is_complete():
    event = gpumem.Event("host")
    assert event.query()
    event.synchronize()
    assert event.ptr


def test_stream_object_destroys_its_own_handle_and_not_a_wrapped_one(host):
    destroyed = host.call_count("cuStreamDestroy")
    stream = gpumem.Stream("host")
    wrapped = gpumem.Stream.from_handle("host", stream.ptr, owner=stream)
    assert wrapped == stream
    assert hash(wrapped) == hash(stream)
    assert wrapped.__cuda_stream__() == stream.__cuda_stream__() == (0, stream.ptr)
    del stream
    wrapped.synchronize()
    assert host.call_count("cuStreamDestroy") == destroyed
    del wrapped
    assert host.call_count("cuStreamDestroy") == destroyed + 1


def test_dropped_stream_object_finishes_queued_work(arena, virtual_clock):
    driver, stream = HostDriver(), gpumem.Stream("host")
    buffer = arena.allocate(1000, stream)
    arena.reset_stream(stream)
    virtual_clock.set_lag(1000)
    driver.fill(buffer, 9, stream)
    virtual_clock.set_lag(0)
    event = stream.record()
    buffer.close()
    arena.reset_stream(stream)
    del stream
    virtual_clock.advance_clock(1000)
    event.synchronize()
    assert event.query()


def test_streams_compare_by_device_and_handle():
    a, b = gpumem.Stream("host"), gpumem.Stream("host")
    assert a != b
    assert a == a
    assert a != a.ptr
    assert len({a, b, gpumem.Stream.from_handle("host", a.ptr)}) == 2


@pytest.mark.parametrize("handle", [-1, 1 << 64, True, "1", 1.0, None])
def test_handle_must_be_a_64_bit_number(handle):
    with pytest.raises(ValueError, match="is not an integer from 0"):
        gpumem.Stream.from_handle("host", handle)


def test_stream_of_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="unknown device"):
        gpumem.Stream("tpu")
    with pytest.raises(ValueError, match="unknown device"):
        gpumem.Stream("host:63")


class Unfinished(gpumem.Stream):
    def __init__(self):
        pass


def test_event_is_a_table_in_a_notebook():
    event = gpumem.Event("host")
    table = event._repr_html_()
    for text in ("host:0", f"{event.ptr:#x}"):
        assert f"<td>{text}</td>" in table, text


class UnfinishedEvent(gpumem.Event):
    def __init__(self):
        pass


def test_stream_and_event_made_by_new_alone_refuse_every_call(arena):
    stream, event = Unfinished(), UnfinishedEvent()
    uses = [stream.query, stream.synchronize, stream.record, event.query, event.synchronize]
    uses += [lambda: stream.wait(event), lambda: arena.allocate(10, stream)]
    for use in uses:
        with pytest.raises((ValueError, TypeError)):
            use()


def test_streams_and_events_are_initialised_once():
    for thing in (gpumem.Stream("host"), gpumem.Event("host")):
        with pytest.raises(TypeError, match="__init__ called twice"):
            thing.__init__("host")


def test_per_thread_default_stream_belongs_to_the_calling_thread(make_arena):
    arena = make_arena({"stream_reuse": "never"}, default_stream=2)
    mine = arena.allocate(1 << 16)
    address = mine.ptr
    mine.close()
    seen = []

    def elsewhere():
        with arena.allocate(1 << 16) as theirs:
            seen.append(theirs.ptr)

    in_a_thread(elsewhere)
    assert seen != [address], "another thread got a block of this thread's stream"
    with arena.allocate(1 << 16) as again:
        assert again.ptr == address


def test_event_that_is_recorded_again_is_reached_with_the_later_point(stream):
    event = gpumem.Event("host")
    assert stream.record(event) is event
    with Gate(HostDriver(stream.device), stream) as gate:
        assert event.query()
        stream.record(event)
        assert not event.query()
        gate.open()
        event.synchronize()


def test_only_an_event_of_its_device_is_recorded(stream):
    with pytest.raises(TypeError, match="event must be an Event or None, not int"):
        stream.record(5)
    child.run_quietly("""
        import gpumem, pytest
        gpumem.device.set_host_device_count(2)
        with pytest.raises(ValueError, match="an event of host:1 cannot be recorded on host:0"):
            gpumem.Stream("host:0").record(gpumem.Event("host:1"))
    """)
