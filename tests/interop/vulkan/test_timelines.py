"""Vulkan's timelines: values, waits, order, and what is refused before Vulkan sees it."""

import threading

import numpy as np
import pytest
from helpers import child

import gpumem
from gpumem.errors import (
    ClosedError,
    DriverError,
    InUseError,
    NonMonotonicError,
    TimelineLostError,
    TimelineTimeout,
    UnsupportedHandleTypeError,
)
from gpumem.interop import HostTimeline
from gpumem.interop.vulkan import Bridge, timelines


@pytest.fixture
def done(device):
    with device.timeline() as done:
        yield done


def test_vulkan_work_waits_for_a_value_and_signals_another(device, importer, gate, done):
    with device.allocate(64) as buffer:
        memory = importer.import_memory(buffer.descriptor(), consume=True)
        device.fill(buffer, 7, wait=(gate, 1), signal=(done, 3))
        assert (done.value(), done.pending) == (0, 3)
        with pytest.raises(TimelineTimeout, match=r"did not reach 3 in 0\.02 s"):
            done.wait(3, 0.02)
        words = memory.tensor(16, "uint32").numpy()
        assert not words.any()
        gate.signal(1)
        done.wait(3, 60)
        assert (words == 7).all()
        assert done.value() == 3


def test_submission_with_several_points(device, gate, done):
    with device.timeline() as other:
        device.run(wait=[(gate, 1), (other, 2)], signal=[(done, 1), (other, 5)])
        gate.signal(1)
        with pytest.raises(TimelineTimeout):
            done.wait(1, 0.02)
        other.signal(2)
        done.wait(1, 60)
        other.wait(5, 60)


def test_wait_releases_the_gil(device, gate):
    waiter = threading.Thread(target=gate.wait, args=(1, 60))
    waiter.start()
    assert gate.value() == 0
    gate.signal(1)
    waiter.join(60)
    assert not waiter.is_alive()


@pytest.mark.parametrize("value", [4, 3, 1])
def test_non_increasing_value_is_refused_and_the_device_survives(device, done, value):
    done.signal(4)
    with pytest.raises(NonMonotonicError, match=f"{value} is not above 4, the value now") as raised:
        done.signal(value)
    assert (raised.value.value, raised.value.known) == (value, 4)
    with pytest.raises(NonMonotonicError):
        device.run(signal=(done, value))
    assert done.pending == 4
    device.run(signal=(done, 5))
    done.wait(5, 60)


@pytest.mark.parametrize("value", [5, 6])
def test_cpu_signal_at_or_above_queued_values_is_refused(device, gate, value):
    """A queued 5 that waits for 4 may come after a 4 of the CPU's, and never after a 5."""
    with device.timeline() as both:
        device.run(wait=(both, 4), signal=(both, 5))
        device.run(wait=(gate, 1), signal=(both, 9))
        with pytest.raises(NonMonotonicError, match="not below 5, which is queued") as raised:
            both.signal(value)
        assert (raised.value.value, raised.value.known) == (value, 5)
        both.signal(4)
        both.wait(5, 60)
        both.signal(8)
        assert both.pending == 9
        gate.signal(1)
        both.wait(9, 60)


def test_submission_with_an_invalid_signal_changes_nothing(device, done):
    with device.timeline(9) as ahead:
        with pytest.raises(NonMonotonicError):
            device.run(signal=[(done, 1), (ahead, 9)])
        assert (done.pending, ahead.pending) == (0, 9)


@pytest.mark.parametrize("value", [0, -1, 1 << 63, (1 << 64) - 1])
def test_values_out_of_range_are_refused(device, done, value):
    for use in (
        lambda: done.signal(value),
        lambda: done.wait(value, 0),
        lambda: device.run(signal=(done, value)),
        lambda: device.run(wait=(done, value)),
    ):
        with pytest.raises(NonMonotonicError, match=r"1 to 2\*\*63 - 1"):
            use()


@pytest.mark.parametrize("value", [True, 1.0, "1", None])
def test_non_integer_values_are_refused(done, value):
    with pytest.raises(TypeError, match="integer"):
        done.signal(value)


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_invalid_timeouts_are_refused(done, timeout):
    with pytest.raises(ValueError, match="timeout"):
        done.wait(1, timeout)


@pytest.mark.parametrize("points", [1, [1], [(1, 2)], [("a", "b", "c")]])
def test_invalid_points_are_refused(device, points):
    with pytest.raises(TypeError):
        device.run(wait=points)


def test_reached_points_are_released(device, done):
    for value in range(1, 500):
        device.run(signal=(done, value))
        device.synchronize()
    assert len(done._queued) <= 64


def test_timeline_starts_at_its_initial_value(device):
    with device.timeline(1 << 40) as timeline:
        assert timeline.value() == timeline.pending == 1 << 40
        timeline.wait(1 << 40, 0)


def test_export_of_a_lavapipe_timeline_is_refused_with_the_reason(device, done):
    assert not done.exportable
    assert "llvmpipe" in device.can_export_timelines.reason
    for use in (done.descriptor, lambda: device.export_semaphore(done.handle)):
        with pytest.raises(UnsupportedHandleTypeError, match=r"llvmpipe.*no timeline"):
            use()


def test_timeline_in_use_by_queued_work_may_be_closed(device, gate, done):
    device.run(wait=(gate, 1), signal=(done, 1))
    done.close()
    device.collect()
    gate.signal(1)
    device.synchronize()


def test_closed_timeline_refuses_every_call(device):
    timeline = device.timeline()
    with pytest.raises(InUseError):
        device.close()
    timeline.close()
    for use in (
        timeline.value,
        timeline.descriptor,
        lambda: timeline.wait(1),
        lambda: timeline.signal(1),
    ):
        with pytest.raises(ClosedError, match="VulkanTimeline is closed"):
            use()
    with pytest.raises(ClosedError):
        device.run(signal=(timeline, 1))


INTERRUPTED = """
import signal
import vulkan as vk
from gpumem.interop import vulkan

class Interrupt(Exception):
    pass

def interrupt(*_):
    raise Interrupt

signal.signal(signal.SIGALRM, interrupt)
device = vulkan.VulkanDevice("host")
gate, done = device.timeline(), device.timeline()
device.run(wait=(gate, 1), signal=(done, 1))
"""


@pytest.mark.parametrize("wait", ["done.wait(1)", "device.synchronize()", "device.close()"])
def test_vulkan_wait_is_interrupted_by_a_signal_and_nothing_is_lost(wait):
    """Its thread has yet to signal; as after Ctrl-C, the program goes on and does so."""
    child.run_quietly(
        INTERRUPTED
        + f"""
semaphore = gate.handle
if {wait!r} == "device.close()":        # which only waits where all is closed
    gate.close()
    done.close()
try:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    {wait}
except Interrupt:
    pass
else:
    raise SystemExit("it did not wait")
vk.vkSignalSemaphore(device.logical_device, vk.VkSemaphoreSignalInfo(semaphore=semaphore, value=1))
{wait}
gate.close()
done.close()
device.close()
"""
    )


def test_wait_of_any_length_is_accepted(done):
    done.signal(1)
    done.wait(1, float("inf"))
    done.wait(1, 1e300)


def test_lost_device_raises_timeline_lost(done, monkeypatch):
    """Vulkan's loss of a device cannot be had without losing it for every later test."""

    def lost(*arguments):
        raise DriverError("vkGetSemaphoreCounterValue", -4, "VK_ERROR_DEVICE_LOST")

    monkeypatch.setattr(timelines, "call", lost)
    with pytest.raises(TimelineLostError, match="is lost") as raised:
        done.value()
    assert isinstance(raised.value.__cause__, DriverError)


def test_bridge_orders_numpy_and_vulkan_both_ways(device, importer):
    """Each sees what the other wrote, a hundred times over; nothing else orders them."""
    with (
        device.allocate(4096) as frame,
        device.allocate(4096) as answer,
        device.timeline() as drawn,
        device.timeline() as seen,
        HostTimeline.create() as written,
        HostTimeline.create() as read,
        Bridge(drawn, written),
        Bridge(read, seen),
    ):
        memory = importer.import_memory(frame.descriptor(), consume=True)
        kept = importer.import_memory(answer.descriptor(), consume=True)
        for number in range(1, 101):
            before = [(seen, number - 1)] if number > 1 else []
            if number > 1:
                device.copy(answer, frame, nbytes=4, destination_offset=4 * number, wait=before)
            device.fill(frame, number, wait=before, signal=(drawn, number))
            memory.set_ready(written, number, timeout=60)
            words = memory.tensor(1024, "uint32").numpy()
            assert (words == number).all()
            words[...] = 1000 + number
            read.signal(number)
        device.synchronize()
        answers = kept.tensor(1024, "uint32").numpy()[2:101]
        assert (answers == 1000 + np.arange(1, 100)).all()
        del words, answers


def test_host_stream_waits_for_vulkan(device, importer, gate):
    stream = gpumem.Stream("host")
    copied = np.zeros(1024, np.uint32)
    with (
        device.allocate(4096) as frame,
        device.timeline() as drawn,
        HostTimeline.create() as written,
        Bridge(drawn, written),
    ):
        memory = importer.import_memory(frame.descriptor(), consume=True)
        device.fill(frame, 8, wait=(gate, 1), signal=(drawn, 1))
        written.enqueue_wait(stream, 1)
        tensor = gpumem.empty(1024, "uint32", memory="host/host_accessible", stream=stream)
        gpumem.copy(tensor, memory.tensor(1024, "uint32"), stream)
        assert not stream.query()
        gate.signal(1)
        stream.synchronize()
        copied[:] = tensor.numpy()
    assert (copied == 8).all()


def test_bridge_can_be_stopped(device, done):
    with HostTimeline.create() as written:
        bridge = Bridge(done, written)
        done.signal(3)
        written.wait(3, 60)
        bridge.close()
        bridge.close()
        done.signal(4)
        assert written.value() == 3


def test_bridge_whose_target_runs_ahead_ends_with_an_error(device, done):
    with HostTimeline.create() as written:
        written.signal(7)
        bridge = Bridge(done, written)
        done.signal(5)
        with pytest.raises(TimelineLostError):
            written.wait(8, 60)
        with pytest.raises(NonMonotonicError):
            bridge.close()
