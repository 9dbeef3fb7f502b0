"""Streams that wait for a timeline and signal it: order, refusals, nothing blocks the CPU."""

import threading

import numpy as np
import pytest
from helpers.driver import HostDriver
from helpers.graph import Graph
from helpers.threads import in_threads

import gpumem
from gpumem.errors import (
    ClosedError,
    DeviceMismatchError,
    DriverError,
    InUseError,
    NonMonotonicError,
    TimelineTimeout,
)
from gpumem.interop import HostTimeline

pytestmark = pytest.mark.usefixtures("way")
FAILED = 719  # CUDA_ERROR_LAUNCH_FAILED


@pytest.fixture
def other():
    return gpumem.Stream("host")


def test_stream_and_cpu_wait_for_each_other(timeline, stream):
    timeline.enqueue_wait(stream, 1)
    assert not stream.query()
    timeline.signal(1)
    stream.synchronize()
    timeline.enqueue_signal(stream, 1 << 40)
    timeline.wait(1 << 40, timeout=60)
    assert timeline.value() == 1 << 40


def test_two_streams_hand_a_buffer_back_and_forth(timeline, stream, other, driver, arena):
    with arena.allocate(1 << 16) as buffer:
        view = np.frombuffer(buffer, np.uint8)
        copies = [arena.allocate(1 << 16) for _ in range(50)]
        for step, copy in enumerate(copies):
            driver.fill(buffer, step, stream)
            timeline.enqueue_signal(stream, 2 * step + 1)
            timeline.enqueue_wait(other, 2 * step + 1)
            driver.call("cuMemcpyAsync", copy.ptr, buffer.ptr, copy.nbytes, other.ptr)
            timeline.enqueue_signal(other, 2 * step + 2)
            timeline.enqueue_wait(stream, 2 * step + 2)
        timeline.wait(100, timeout=60)
        assert [set(memoryview(copy)) for copy in copies] == [{step} for step in range(50)]
        del view


def test_queued_operations_do_not_block_the_cpu(timeline, stream, other):
    timeline.enqueue_wait(stream, 10)
    timeline.enqueue_signal(stream, 11)
    timeline.enqueue_wait(other, 11)
    assert (timeline.pending, timeline.value()) == (11, 0)
    with pytest.raises(NonMonotonicError):
        timeline.enqueue_signal(other, 11)
    with timeline.export() as handle, HostTimeline.from_fd(handle) as there:
        assert there.pending == 11  # another process would know as well
    _release(timeline, 10)
    other.synchronize()
    assert timeline.value() == 11


def test_signals_take_effect_in_submission_order(timeline, stream, other, driver):
    with driver.block(stream):
        timeline.enqueue_signal(stream, 5)
        timeline.enqueue_signal(other, 7)
    stream.synchronize()
    other.synchronize()
    assert timeline.value() == 7


def test_late_stream_signal_does_not_lower_the_value(timeline, stream, driver):
    gate = driver.block(stream)
    timeline.enqueue_signal(stream, 5)
    threading.Timer(0.05, gate.open).start()
    timeline.signal(6)
    stream.synchronize()
    assert timeline.value() == 6


def test_waiting_for_a_reached_value_makes_no_driver_call(host, timeline, stream):
    timeline.signal(3)
    host.reset_counts()
    timeline.enqueue_wait(stream, 3)
    stream_point = timeline.point(2)
    stream.wait(stream_point)
    timeline.wait(3)
    assert host.call_count() == 0


def test_stream_wait_accepts_points_and_events_only(timeline, stream, other):
    stream.wait(timeline.point(1))
    other.wait(stream.record())
    assert not other.query()
    timeline.point(1).enqueue_wait(other)
    timeline.signal(1)
    other.synchronize()
    for nothing in (None, 1, timeline):
        with pytest.raises(TypeError):
            stream.wait(nothing)


def test_timeline_rejects_a_stream_of_another_device():
    with HostTimeline.create(device="host") as timeline:
        stream = gpumem.Stream("host")
        foreign = gpumem.Stream.__new__(gpumem.Stream)
        with pytest.raises(DeviceMismatchError):
            timeline.enqueue_wait(foreign, 1)
        timeline.enqueue_signal(stream.ptr, 1)  # a handle is of the timeline's device
        timeline.enqueue_signal(None, 2)
        timeline.wait(2, timeout=60)
        stream.synchronize()


def test_raw_stream_handle_needs_a_timeline_with_a_device(timeline, stream):
    for handle in (stream.ptr, None):
        with pytest.raises(TypeError, match="the device of stream"):
            timeline.enqueue_wait(handle, 1)


def test_operation_on_a_capturing_stream_is_refused_and_the_capture_continues(timeline, stream):
    with Graph(HostDriver(), stream) as graph:
        for queue in (timeline.enqueue_wait, timeline.enqueue_signal):
            with pytest.raises(DriverError, match="CAPTURE"):
                queue(stream, 1)
    graph.destroy()
    assert timeline.pending == 0


@pytest.mark.parametrize("again", [False, True])
def test_failed_signal_leaves_the_timeline_unchanged(same_files, host, way, stream, again):
    page = way == "page"
    calls = ["cuCtxPushCurrent", "cuStreamIsCapturing"]
    calls += ["cuSignalExternalSemaphoresAsync" if page else "cuStreamWriteValue64"]
    if not again:
        calls += ["cuEventCreate"]
        calls += ["cuImportExternalSemaphore"] if page else ["cuMemHostRegister"]
        calls += [] if page else ["cuMemHostGetDevicePointer"]
    for call in calls:
        with HostTimeline.create() as timeline:
            if again:
                timeline.enqueue_signal(stream, 1)
            before = timeline.pending
            host.fail(call, 1, FAILED)
            with pytest.raises(DriverError, match=call):
                timeline.enqueue_signal(stream, 9)
            host.clear_faults()
            assert timeline.pending == before
            timeline.enqueue_signal(stream, before + 1)
            timeline.wait(before + 1, timeout=60)
            stream.synchronize()


def test_signal_survives_a_failed_event_record(host, timeline, stream):
    gate = HostDriver().block(stream)
    host.fail("cuEventRecord", 1, FAILED)
    timeline.enqueue_signal(stream, 1)
    host.clear_faults()
    with pytest.raises(InUseError):
        timeline.close()
    gate.open()
    timeline.wait(1, timeout=60)
    timeline.close(timeout=60)


def test_close_of_a_timeline_in_use_is_refused(timeline, stream):
    timeline.enqueue_wait(stream, 4)
    with pytest.raises(InUseError, match="stream"):
        timeline.close()
    with pytest.raises(InUseError, match="stream"):
        timeline.close(timeout=0.02)
    assert not timeline.closed
    timeline.signal(4)
    timeline.close(timeout=60)
    assert timeline.closed


def test_idle_timelines_close_while_other_threads_close_theirs():
    failed = []

    def open_and_close():
        stream = gpumem.Stream("host")
        for _ in range(3000):
            timeline = HostTimeline.create()
            timeline.enqueue_signal(stream, 1)
            stream.synchronize()
            try:
                timeline.close()
            except InUseError as error:
                failed.append(error)

    # What one of them gives back depends on the streams of all timelines: it looks at the others'.
    in_threads(open_and_close, 4)
    assert not failed, f"{len(failed)}, the first: {failed[0]}"


def test_dropped_timeline_lives_until_its_streams_are_done(same_files, stream):
    timeline = HostTimeline.create()
    there = HostTimeline.from_fd(timeline.export())
    timeline.enqueue_wait(stream, 4)
    timeline.enqueue_signal(stream, 5)
    del timeline
    gpumem.Device("host").free_bytes  # noqa: B018  # would give it back
    assert not stream.query()
    _release(there, 4)
    stream.synchronize()
    assert there.value() == 5
    there.close()


def test_close_does_not_wait_for_unrelated_streams(same_files, timeline, stream, other):
    """To unregister memory waits for the device, and a stream there may wait for the caller."""
    timeline.enqueue_wait(stream, 1)
    short = HostTimeline.create()
    short.enqueue_signal(other, 1)
    short.wait(1, timeout=60)
    short.close(timeout=60)
    assert not stream.query()
    timeline.signal(1)
    stream.synchronize()
    timeline.close(timeout=60)


def test_concurrent_operations_on_many_streams(timeline):
    streams = [gpumem.Stream("host") for _ in range(4)]
    taken: list[int] = []

    def work(stream):
        for value in range(1, 301):
            try:
                timeline.enqueue_signal(stream, value)
            except NonMonotonicError:
                timeline.enqueue_wait(stream, value)
            else:
                taken.append(value)

    in_threads(work, streams)
    timeline.wait(300, timeout=60)
    for stream in streams:
        stream.synchronize()
    assert taken
    assert len(taken) == len(set(taken))
    assert timeline.value() == 300


def _release(timeline, value):
    """Let streams that wait for a value go on, below one that is already queued."""
    import mmap

    with timeline.export() as handle, mmap.mmap(handle.fileno(), 4096) as page:
        page[:8] = value.to_bytes(8, "little")


def test_cpu_wait_times_out_while_a_stream_is_blocked(timeline, stream):
    with HostDriver().block(stream):
        timeline.enqueue_signal(stream, 1)
        with pytest.raises(TimelineTimeout, match="its value is 0"):
            timeline.wait(1, timeout=0.02)
    timeline.wait(1, timeout=60)


def test_foreign_stream_names_its_device():
    """As torch's, CuPy's and cuda.core's do; a device that is not here is named."""

    class Where:
        index = 7

    class TorchLike:
        device = Where()
        cuda_stream = 1

    class CupyLike:
        device_id = 7
        ptr = 1

    with HostTimeline.create() as timeline:
        for stream in (TorchLike(), CupyLike()):
            with pytest.raises(ValueError, match="cuda:7"):
                timeline.enqueue_wait(stream, 1)
        assert timeline.pending == 0


@pytest.mark.skipif(
    sum(device.type == "cuda" for device in gpumem.devices()) == 1,
    reason="where there is one GPU, such a stream is taken to be that GPU's",
)
def test_stream_that_does_not_know_its_device_needs_a_timeline_with_a_device():
    class Unknown:
        device_id = -1
        ptr = 1

    with HostTimeline.create() as timeline:
        with pytest.raises(TypeError, match="the device of stream"):
            timeline.enqueue_wait(Unknown(), 1)
        assert timeline.pending == 0


def test_timeline_closed_while_a_stream_is_read_raises():
    class Closing:
        def __cuda_stream__(self):
            timeline.close()
            return 0, 1

    for method in ("enqueue_wait", "enqueue_signal"):
        timeline = HostTimeline.create(device="host")
        with pytest.raises(ClosedError):
            getattr(timeline, method)(Closing(), 1)
