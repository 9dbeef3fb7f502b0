"""set_ready: whoever takes a tensor waits for the producer's point of a timeline."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import child
from helpers.dlpack import consume
from helpers.waiting import wait_until

import gpumem
from gpumem.errors import ClosedError, DeviceMismatchError

pytestmark = pytest.mark.usefixtures("nothing_left")


class Point:
    """A point of a timeline that notes who waits for it."""

    def __init__(self, timeline, value):
        self.timeline, self.value = timeline, value

    def wait(self, timeout=None):
        self.timeline.waits.append(("cpu", self.value, timeout))
        if self.timeline.lost:
            raise TimeoutError

    def enqueue_wait(self, stream):
        self.timeline.waits.append(("stream", self.value, stream.ptr))


class Timeline:
    def __init__(self):
        self.waits = []
        self.lost = False

    def point(self, value):
        return Point(self, value)


@pytest.fixture
def managed():
    with gpumem.Arena("host/managed") as arena:
        yield arena


@pytest.fixture
def timeline():
    return Timeline()


def test_cpu_view_waits_for_readiness(memory, timeline):
    memory.set_ready(timeline, 5)
    tensor = memory.tensor(4, "u1")
    assert timeline.waits == []
    tensor.numpy()
    assert timeline.waits == [("cpu", 5, None)]
    tensor.numpy()  # once is enough
    assert len(timeline.waits) == 1
    other = memory.tensor(4, "u1")
    np.from_dlpack(other)
    memoryview(memory.tensor(4, "u1"))
    memoryview(memory.tensor(4, "u1").buffer)
    np.asarray(memory.tensor(4, "u1"))
    assert timeline.waits == [("cpu", 5, None)] * 5


def test_view_without_sync_does_not_wait(memory, timeline):
    memory.set_ready(timeline, 5)
    memory.tensor(4, "u1").numpy(sync=False)
    assert timeline.waits == []


def test_copy_on_a_stream_waits_on_the_device(memory, timeline, stream):
    memory.set_ready(timeline, 6)
    with gpumem.Arena("host/managed") as arena:
        target = gpumem.empty(4, "u1", resource=arena)
        gpumem.copy(target, memory.tensor(4, "u1"), stream)
        assert timeline.waits == [("stream", 6, stream.ptr)]
        stream.synchronize()
        del target


def test_copy_between_two_memories_of_one_stream_waits_for_both_producers(memory, timeline, stream):
    memory.set_ready(timeline, 6)
    source = memory.tensor(4, "u1", stream=stream)
    memory.set_ready(timeline, 7)
    target = memory.tensor(4, "u1", offset=256, stream=stream)
    gpumem.copy(target, source, stream)
    assert timeline.waits == [("stream", 6, stream.ptr), ("stream", 7, stream.ptr)]
    stream.synchronize()


def test_export_for_a_stream_waits_on_that_stream(memory, timeline):
    memory.set_ready(timeline, 7)
    tensor = memory.tensor(4, "u1")
    consume(tensor.__dlpack__(max_version=(1, 0))).delete()
    assert timeline.waits == [("cpu", 7, None)]  # host memory goes out as the CPU's


def test_tensor_keeps_the_timeline_point_of_its_creation(memory, timeline):
    memory.set_ready(timeline, 1)
    before = memory.tensor(4, "u1")
    memory.set_ready(timeline, 2)
    after = memory.tensor(4, "u1")
    memory.set_ready(None)
    free = memory.tensor(4, "u1")
    for tensor in (free, after, before, before[1:]):
        tensor.numpy()
    assert [value for _, value, _ in timeline.waits] == [2, 1]
    assert memory.ready is None


def test_cpu_wait_is_bounded_by_the_timeout(memory, timeline):
    memory.set_ready(timeline, 3, timeout=0.5)
    timeline.lost = True
    tensor = memory.tensor(4, "u1")
    with pytest.raises(TimeoutError):
        tensor.numpy()
    assert timeline.waits == [("cpu", 3, 0.5)]
    timeline.lost = False
    tensor.numpy()  # it is asked again
    assert len(timeline.waits) == 2
    with pytest.raises(ValueError, match="timeout"):
        memory.set_ready(timeline, 3, timeout=-1)


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"timeout": "1"}, TypeError),
        ({"timeout": True}, TypeError),
        ({"timeout": [1]}, TypeError),
        ({"timeout": float("nan")}, ValueError),
        ({"timeout": -0.5}, ValueError),
    ],
)
def test_invalid_timeout_is_refused_and_changes_nothing(memory, timeline, more, error):
    memory.set_ready(timeline, 3)
    before = memory.ready
    with pytest.raises(error, match="timeout"):
        memory.set_ready(timeline, 4, **more)
    assert memory.ready is before
    with pytest.raises(error, match="timeout"):
        memory.close(**more)
    assert not memory.closed


@pytest.mark.parametrize("more", [{"value": 3}, {"timeout": 1}, {"value": 3, "timeout": 1}])
def test_value_or_timeout_without_a_timeline_is_refused(memory, timeline, more):
    memory.set_ready(timeline, 3)
    before = memory.ready
    with pytest.raises(ValueError, match="without a timeline"):
        memory.set_ready(None, **more)
    assert memory.ready is before


def test_set_ready_accepts_a_timeline_point(memory, timeline):
    memory.set_ready(timeline.point(9))
    assert memory.ready.value == 9
    for given in (timeline, 5, "timeline"):
        with pytest.raises(TypeError, match="not a point of a timeline"):
            memory.set_ready(given)


def test_set_ready_rejects_a_timeline_of_another_device(memory, timeline):
    timeline.device = gpumem.Device("host:5")
    with pytest.raises(DeviceMismatchError, match="host:5"):
        memory.set_ready(timeline, 1)
    for wrong in (timeline.point(1), object()):
        with pytest.raises(TypeError, match="not a timeline"):
            memory.set_ready(wrong, 2)
    assert memory.ready is None


def test_set_ready_on_closed_memory_is_refused(memory, timeline):
    memory.close()
    with pytest.raises(ClosedError):
        memory.set_ready(timeline, 1)


def test_last_view_of_unready_memory_may_be_dropped_on_any_thread(memory, timeline):
    memory.set_ready(timeline, 4)
    consumed = consume(memory.tensor(4, "u1").__dlpack__(max_version=(1, 0)))
    memory.set_ready(None)
    assert memory.exports == 1
    consumed.delete()
    assert memory.exports == 0


@pytest.mark.parametrize("named", [True, False])
def test_copy_of_memory_to_come_holds_up_no_stream_that_was_not_named(memory, named):
    own, reader = gpumem.Stream("host"), gpumem.Stream("host")
    with gpumem.interop.HostTimeline.create() as timeline, gpumem.Arena("host/managed") as arena:
        target = gpumem.empty(4, "u1", resource=arena, stream=reader)
        memory.set_ready(timeline, 1)
        frame = memory.tensor(4, "u1", stream=own if named else None)
        gpumem.copy(target, frame, reader)
        idle = {
            "reader": reader.query(),
            "own": own.query(),
            "default": gpumem.Stream.from_handle("host", 1).query(),
        }
        timeline.signal(1)
        reader.synchronize()
        assert target.numpy().tolist() == frame.numpy().tolist()
        del frame, target
    assert idle == {"reader": False, "own": not named, "default": True}


@pytest.mark.parametrize("kind", ["host", "host/host_accessible", "host/managed"])
@pytest.mark.parametrize("into", [False, True])
def test_copy_with_memory_to_come_does_not_hold_up_the_default_stream_of_the_other(
    memory, stream, kind, into
):
    with gpumem.interop.HostTimeline.create() as timeline, gpumem.Arena(kind) as arena:
        memory.set_ready(timeline, 1)
        frame = memory.tensor(4, "u1")
        block, unrelated = (gpumem.full(4, 7, "u1", resource=arena) for _ in range(2))
        block.numpy()
        gpumem.copy(*((frame, block) if into else (block, frame)), stream)
        default = gpumem.Stream.from_handle("host", 1)
        unrelated.fill(3)
        wait_until(default.query)
        idle = stream.query(), unrelated.numpy().tolist()
        frame.numpy(sync=False)[:] = 5
        timeline.signal(1)
        assert idle == (False, [3] * 4)
        assert block.numpy().tolist() == frame.numpy().tolist() == [7 if into else 5] * 4
        del frame, block, unrelated


@pytest.mark.parametrize("kind", ["host", "host/host_accessible", "host/managed"])
def test_thread_works_on_the_default_stream_while_its_read_of_a_later_frame_waits(memory, kind):
    reader = gpumem.Stream("host")
    with gpumem.interop.HostTimeline.create() as timeline, gpumem.Arena(kind) as arena:
        frame, other = memory.tensor(4, "u1"), memory.tensor(4, "u1", offset=4)
        target = gpumem.empty(4, "u1", resource=arena, stream=reader)
        reader.wait(timeline.point(1))
        gpumem.copy(target, frame, reader)
        unrelated = gpumem.zeros(4, "u1", resource=arena)
        gpumem.copy(unrelated, other)
        unrelated.numpy()  # waits for the default stream
        frame.numpy(sync=False)[:] = 5
        timeline.signal(1)
        assert target.numpy().tolist() == [5] * 4
        del frame, other, target, unrelated


def test_use_of_bytes_comes_after_a_copy_of_them_on_another_stream(memory, managed):
    first, second = gpumem.Stream("host"), gpumem.Stream("host")
    source = gpumem.full(4, 7, "u1", resource=managed, stream=first)
    result, apart = (gpumem.zeros(4, "u1", resource=managed, stream=second) for _ in range(2))
    for each in (source, result, apart):
        each.numpy()
    with gpumem.interop.HostTimeline.create() as timeline:
        tensor, same = memory.tensor(4, "u1"), memory.tensor(2, "u1", offset=2)
        beside = memory.tensor(4, "u1", offset=4)
        first.wait(timeline.point(1))
        gpumem.copy(tensor, source, first)
        gpumem.copy(apart, beside, second)  # other bytes: it waits for nothing
        second.synchronize()
        gpumem.copy(result[:2], same, second)  # by another tensor over the same bytes
        waits = not second.query()
        timeline.signal(1)
        assert waits
        assert result.numpy().tolist() == [7, 7, 0, 0]
        assert tensor.numpy().tolist() == [7] * 4
        del tensor, same, beside


def test_cpu_reads_imported_memory_after_the_copy_into_it(memory, managed, host, stream):
    source, tensor = gpumem.full(4, 7, "u1", resource=managed), memory.tensor(4, "u1")
    host.set_lag(5_000_000)
    gpumem.copy(tensor, source, stream)
    assert tensor.numpy().tolist() == [7] * 4
    del tensor
    stream.synchronize()
    memory.close(timeout=60)


def test_memory_that_is_closed_under_a_queued_copy_stays_until_it_is_done(memory, managed, stream):
    target = gpumem.zeros(4, "u1", resource=managed, stream=stream)
    with gpumem.interop.HostTimeline.create() as timeline:
        stream.wait(timeline.point(1))
        tensor = memory.tensor(4, "u1")
        tensor.numpy()[:] = 6
        gpumem.copy(target, tensor, stream)
        del tensor
        memory.close()
        timeline.signal(1)
        assert target.numpy().tolist() == [6] * 4
        del target


def test_frame_to_come_holds_up_the_reading_stream_of_another_device_only():
    child.run_quietly("""
        import os, gpumem
        from gpumem.interop import HostTimeline, Importer, MemoryDescriptor, MemoryHandleType
        gpumem.device.set_host_device_count(2)
        fd = os.memfd_create("frame")
        os.truncate(fd, 4096)
        memory = Importer.for_device("host:0").import_memory(
            MemoryDescriptor(fd, MemoryHandleType.MEMFD, 4096), consume=True)
        timeline, reader = HostTimeline.create(), gpumem.Stream("host:1")
        memory.set_ready(timeline, 1)
        target = gpumem.empty(4, "u1", memory="host:1/host_accessible", stream=reader)
        gpumem.copy(target, memory.tensor(4, "u1"), reader)
        idle = [gpumem.Stream.from_handle(device, 1).query() for device in ("host:0", "host:1")]
        assert not reader.query()
        memory.tensor(4, "u1").numpy(sync=False)[:] = 5
        timeline.signal(1)
        assert target.numpy().tolist() == [5] * 4
        assert idle == [True, True]
    """)
