"""What a timeline counts: which values it takes, what they release, what they refuse."""

import threading

import pytest
from helpers.threads import in_threads, running
from helpers.waiting import wait_for_waiters

from gpumem.errors import (
    ClosedError,
    InUseError,
    NonMonotonicError,
    TimelineLostError,
    TimelineTimeout,
)
from gpumem.interop import HostTimeline, SemaphoreType, Timeline, TimelinePoint

LARGEST = (1 << 63) - 1


def test_wait_ends_at_the_value_and_above(timeline):
    timeline.signal(5)
    timeline.wait(5, timeout=0)
    timeline.wait(4, timeout=0)
    with pytest.raises(TimelineTimeout):
        timeline.wait(6, timeout=0)


@pytest.mark.parametrize("value", [(1 << 32) + 1, 1 << 40, LARGEST])
def test_values_above_32_bits(timeline, value):
    timeline.signal(value - 1)
    with pytest.raises(TimelineTimeout):
        timeline.wait(value, timeout=0.01)
    timeline.signal(value)
    timeline.wait(value, timeout=0)
    assert timeline.value() == timeline.pending == value


@pytest.mark.parametrize("value", [1, 3, 5])
def test_non_increasing_value_is_refused_without_a_change(timeline, value):
    timeline.signal(5)
    with pytest.raises(NonMonotonicError, match=f"{value} is not above 5") as caught:
        timeline.signal(value)
    assert (caught.value.value, caught.value.known) == (value, 5)
    assert timeline.value() == 5
    timeline.signal(6)


@pytest.mark.parametrize("value", [0, -1, 1 << 63, (1 << 64) - 1, 1 << 64])
@pytest.mark.parametrize("method", ["signal", "wait", "enqueue_signal", "enqueue_wait", "point"])
def test_value_out_of_range_is_refused_without_a_driver_call(host, timeline, stream, method, value):
    arguments = (stream, value) if method.startswith("enqueue") else (value,)
    host.reset_counts()
    with pytest.raises(NonMonotonicError, match="1 to 2"):
        getattr(timeline, method)(*arguments)
    assert host.call_count() == 0
    assert timeline.value() == timeline.pending == 0


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None])
@pytest.mark.parametrize("method", ["signal", "wait", "point"])
def test_non_integer_value_is_refused(timeline, method, value):
    with pytest.raises(TypeError):
        getattr(timeline, method)(value)


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_negative_timeout_is_refused(timeline, timeout):
    with pytest.raises(ValueError, match="timeout"):
        timeline.wait(1, timeout)


def test_timeline_starts_at_its_initial_value():
    with HostTimeline.create(7) as timeline:
        assert timeline.value() == timeline.pending == 7
        with pytest.raises(NonMonotonicError):
            timeline.signal(7)
    for initial in (-1, 1 << 63):
        with pytest.raises(NonMonotonicError):
            HostTimeline.create(initial)


def test_signal_wakes_all_waiting_threads(timeline):
    reached = []

    def wait():
        timeline.wait(3, timeout=60)
        reached.append(timeline.value())

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    timeline.signal(2)
    wait_for_waiters(timeline, 8)
    assert not reached
    timeline.signal(3)
    for thread in threads:
        thread.join()
    assert reached == [3] * 8


def test_concurrent_signals_take_each_value_once(timeline):
    """Threads that race for the same values: each is taken once, and they only rise."""
    taken: list[int] = []
    start = threading.Barrier(4)

    def race():
        start.wait()
        for value in range(1, 2001):
            try:
                timeline.signal(value)
            except NonMonotonicError:
                continue
            taken.append(value)

    in_threads(race, 4)
    assert len(taken) == len(set(taken))
    assert timeline.value() == timeline.pending == 2000


def test_poison_ends_waits_for_unreached_values(timeline, stream):
    timeline.signal(1)
    errors = []

    def wait():
        try:
            timeline.wait(2, timeout=60)
        except TimelineLostError as error:
            errors.append(error)

    with running(wait):
        wait_for_waiters(timeline)
        timeline.poison()
    assert len(errors) == 1
    assert timeline.poisoned
    timeline.wait(1)
    with pytest.raises(TimelineLostError, match="poisoned"):
        timeline.wait(2)
    with pytest.raises(TimelineLostError, match="poisoned"):
        timeline.enqueue_wait(stream, 2)
    timeline.signal(2)  # streams that wait can be let go
    timeline.wait(2)


def test_fence_of_a_removed_device_is_lost(timeline, stream):
    import mmap

    with timeline.export() as handle, mmap.mmap(handle.fileno(), 4096) as page:
        page[:8] = b"\xff" * 8
    for call in (timeline.value, lambda: timeline.wait(1)):
        with pytest.raises(TimelineLostError, match="removed"):
            call()
    with pytest.raises(TimelineLostError, match="removed"):
        timeline.enqueue_wait(stream, 1)


def test_closed_timeline_refuses_every_call(timeline, stream):
    point = timeline.point(1)
    timeline.close()
    timeline.close()
    assert timeline.closed
    for call in (
        timeline.value,
        timeline.export,
        lambda: timeline.pending,
        lambda: timeline.wait(1),
        lambda: timeline.signal(1),
        lambda: timeline.enqueue_wait(stream, 1),
        lambda: timeline.enqueue_signal(stream, 1),
        lambda: stream.wait(point),
        point.wait,
    ):
        with pytest.raises(ClosedError):
            call()


def test_close_while_a_thread_waits_is_refused(timeline):
    with running(timeline.wait, 1, 60):
        wait_for_waiters(timeline)
        with pytest.raises(InUseError, match="another thread"):
            timeline.close()
        timeline.signal(1)
    timeline.close()


def test_timeline_cannot_be_constructed_directly():
    with pytest.raises(TypeError, match="is made by"):
        Timeline()
    with pytest.raises(TypeError, match="is made by"):
        HostTimeline()
    assert HostTimeline.__new__(HostTimeline).closed


def test_timeline_points_are_values(timeline):
    assert timeline.point(3) == TimelinePoint(timeline, 3)
    assert timeline.point(3) != timeline.point(4)
    assert len({timeline.point(3), timeline.point(3)}) == 1
    assert (timeline.point(3).timeline, timeline.point(3).value) == (timeline, 3)


def test_exported_handle_has_the_kind_host_timeline(timeline):
    with timeline.export() as handle:
        assert handle.kind is SemaphoreType.HOST_TIMELINE
        with HostTimeline.from_fd(handle) as there:
            timeline.signal(1 << 33)
            assert there.value() == there.pending == 1 << 33
            with pytest.raises(NonMonotonicError):
                there.signal(1 << 33)
