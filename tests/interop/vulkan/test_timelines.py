"""Vulkan's timelines order its work and gpumem's, by a bridge where none can be exported."""

import numpy as np
import pytest

import gpumem
from gpumem.errors import NonMonotonicError, TimelineLostError, TimelineTimeout
from gpumem.interop import HostTimeline


@pytest.fixture
def done(device):
    with device.timeline() as done:
        yield done


def test_vulkan_work_waits_for_a_value_and_signals_another(device, importer, gate, done):
    with device.allocate(64) as buffer:
        memory = importer.import_memory(buffer.descriptor(), consume=True)
        device.fill(buffer, 7, wait=[(gate, 1)], signal=[(done, 3)])
        assert done.value() == 0
        with pytest.raises(TimelineTimeout, match=r"3 was not reached in 0\.02 s"):
            done.wait(3, 0.02)
        words = memory.tensor(16, "uint32").numpy()
        assert not words.any()
        gate.signal(1)
        done.wait(3, 60)
        assert (words == 7).all()
        assert done.value() == 3


def test_bridge_orders_numpy_and_vulkan_both_ways(device, importer):
    """Each sees what the other wrote, a hundred times over; nothing else orders them."""
    from shared_timeline import Bridge

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
            device.fill(frame, number, wait=before, signal=[(drawn, number)])
            memory.set_ready(written, number, timeout=60)
            words = memory.tensor(1024, "uint32").numpy()
            assert (words == number).all()
            words[...] = 1000 + number
            read.signal(number)
        device.synchronize()
        answers = kept.tensor(1024, "uint32").numpy()[2:101]
        assert (answers == 1000 + np.arange(1, 100)).all()
        del words, answers


def test_host_stream_waits_for_vulkan(device, importer, gate, stream):
    from shared_timeline import Bridge

    copied = np.zeros(1024, np.uint32)
    with (
        device.allocate(4096) as frame,
        device.timeline() as drawn,
        HostTimeline.create() as written,
        Bridge(drawn, written),
    ):
        memory = importer.import_memory(frame.descriptor(), consume=True)
        device.fill(frame, 8, wait=[(gate, 1)], signal=[(drawn, 1)])
        written.enqueue_wait(stream, 1)
        tensor = gpumem.empty(1024, "uint32", memory="host/host_accessible", stream=stream)
        gpumem.copy(tensor, memory.tensor(1024, "uint32"), stream)
        assert not stream.query()
        gate.signal(1)
        stream.synchronize()
        copied[:] = tensor.numpy()
    assert (copied == 8).all()


def test_bridge_can_be_stopped(device, done):
    from shared_timeline import Bridge

    with HostTimeline.create() as written:
        bridge = Bridge(done, written)
        done.signal(3)
        written.wait(3, 60)
        bridge.close()
        bridge.close()
        done.signal(4)
        assert written.value() == 3


def test_bridge_ends_with_an_error_if_its_target_is_ahead(device, done):
    from shared_timeline import Bridge

    with HostTimeline.create() as written:
        written.signal(7)
        bridge = Bridge(done, written)
        done.signal(5)
        with pytest.raises(TimelineLostError):
            written.wait(8, 60)
        with pytest.raises(NonMonotonicError):
            bridge.close()
