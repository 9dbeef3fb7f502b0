"""Host timelines and a GPU's streams: they wait for the page and write it, and wake the CPU."""

import numpy as np
import pytest
from helpers import child
from helpers.threads import running
from helpers.waiting import wait_for_waiters

import gpumem
from gpumem.errors import InUseError, NonMonotonicError
from gpumem.interop import HostTimeline, SemaphoreType
from gpumem.interop.timelines.semaphores import semaphore_capability

MIB = 1 << 20


@pytest.fixture
def timeline():
    with HostTimeline.create() as timeline:
        yield timeline


@pytest.fixture
def streams():
    return gpumem.Stream("cuda:0"), gpumem.Stream("cuda:0")


@pytest.fixture
def let_the_device_work(arena, driver):
    """Return when the device has done work on a stream that nothing holds back."""
    stream = gpumem.Stream("cuda:0")
    buffer = arena.allocate(MIB, stream)  # now: later it might wait for streams that are held

    def work():
        for value in range(100):
            driver.call(driver.cuMemsetD8Async, buffer.ptr, value, MIB, stream.ptr)
        stream.synchronize()

    yield work
    buffer.close()


def test_gpu_supports_host_timelines():
    assert semaphore_capability("cuda:0", SemaphoreType.HOST_TIMELINE)
    assert semaphore_capability("cuda:0", SemaphoreType.TIMELINE_OPAQUE_FD)
    assert not semaphore_capability("cuda:0", SemaphoreType.D3D12_FENCE)


def test_cpu_signal_releases_a_stream(let_the_device_work, timeline, streams):
    stream, _ = streams
    timeline.enqueue_wait(stream, 1 << 40)
    let_the_device_work()
    assert not stream.query()
    timeline.signal((1 << 40) - 1)
    let_the_device_work()
    assert not stream.query()
    timeline.signal(1 << 40)
    stream.synchronize()
    timeline.close()


def test_stream_signal_wakes_the_cpu(let_the_device_work, timeline, streams):
    stream, _ = streams
    woken = []
    with running(lambda: woken.append(timeline.wait(2, timeout=60))):
        wait_for_waiters(timeline)  # in a page that no device has written yet
        timeline.enqueue_wait(stream, 1)
        timeline.enqueue_signal(stream, 2)
        let_the_device_work()
        assert not woken
        with timeline.export() as handle, HostTimeline.from_fd(handle) as there:
            assert (there.pending, there.value()) == (2, 0)
            with pytest.raises(NonMonotonicError):
                there.signal(2)
            with pytest.raises(InUseError):
                timeline.close()
            let_go(timeline, 1)
            there.wait(2, timeout=60)
    stream.synchronize()


def let_go(timeline, value):
    """Reach a value below one that is queued already."""
    import mmap

    with timeline.export() as handle, mmap.mmap(handle.fileno(), 4096) as page:
        page[:8] = value.to_bytes(8, "little")


def test_two_streams_hand_a_buffer_back_and_forth(arena, driver, timeline, streams):
    one, two = streams
    rounds = 200
    with arena.allocate(MIB, one) as buffer, gpumem.Arena("cuda:0/host_accessible") as pinned:
        seen = pinned.allocate(rounds * 4096)
        for turn in range(rounds):
            value = turn % 251 + 1
            driver.call(driver.cuMemsetD8Async, buffer.ptr, value, MIB, one.ptr)
            timeline.enqueue_signal(one, 2 * turn + 1)
            timeline.enqueue_wait(two, 2 * turn + 1)
            driver.call(
                driver.cuMemcpyDtoHAsync,
                seen.ptr + 4096 * turn,
                buffer.ptr + MIB - 4096,
                4096,
                two.ptr,
            )
            timeline.enqueue_signal(two, 2 * turn + 2)
            timeline.enqueue_wait(one, 2 * turn + 2)
        timeline.wait(2 * rounds, timeout=60)
        pages = np.frombuffer(seen, np.uint8).reshape(rounds, 4096)
        expected = (np.arange(rounds) % 251 + 1).astype(np.uint8)
        assert (pages == expected[:, None]).all()
        del pages
        one.synchronize()
        two.synchronize()
        seen.close()


def test_cpu_and_stream_take_turns(timeline, streams):
    stream, _ = streams
    for turn in range(500):
        timeline.enqueue_signal(stream, 2 * turn + 1)
        timeline.wait(2 * turn + 1, timeout=60)
        timeline.signal(2 * turn + 2)
        timeline.enqueue_wait(stream, 2 * turn + 2)
    stream.synchronize()
    assert timeline.value() == 1000


def test_signals_take_effect_in_submission_order(let_the_device_work, timeline, streams):
    one, two = streams
    gate = HostTimeline.create()
    gate.enqueue_wait(one, 1)
    timeline.enqueue_signal(one, 5)
    timeline.enqueue_signal(two, 7)
    let_the_device_work()
    assert timeline.value() == 0
    gate.signal(1)
    timeline.wait(7, timeout=60)
    one.synchronize()
    two.synchronize()
    assert timeline.value() == 7
    gate.close()


def test_host_device_and_gpu_share_a_timeline(timeline, streams):
    stream, _ = streams
    host = gpumem.Stream("host")
    timeline.enqueue_signal(host, 1)
    timeline.enqueue_wait(stream, 1)
    timeline.enqueue_signal(stream, 2)
    timeline.enqueue_wait(host, 2)
    host.synchronize()
    stream.synchronize()
    assert timeline.value() == 2


def test_dropped_timeline_waits_for_its_own_streams_only(timeline, streams):
    import gc

    one, two = streams
    timeline.enqueue_wait(one, 1)
    for value in range(1, 51):
        other = HostTimeline.create()
        other.enqueue_signal(two, value)
        del other
    gc.collect()
    two.synchronize()
    short = HostTimeline.create()
    short.enqueue_signal(two, 1)
    short.wait(1, timeout=60)
    short.close(timeout=60)  # its page stays registered while the first stream waits
    assert not one.query()
    timeline.signal(1)
    one.synchronize()


def test_operation_on_a_capturing_stream_is_refused(driver, timeline, streams):
    stream, _ = streams
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    driver.call(driver.cuStreamBeginCapture, stream.ptr, mode)
    with pytest.raises(gpumem.errors.DriverError, match="CAPTURE"):
        timeline.enqueue_signal(stream, 1)
    driver.call(driver.cuGraphDestroy, driver.call(driver.cuStreamEndCapture, stream.ptr))
    assert timeline.pending == 0


# A kernel that writes to address 16 loses the device to its process, which is a test's own.
LOSE_THE_DEVICE = """
import faulthandler
faulthandler.dump_traceback_later(120, exit=True)
import os
os.environ["CUDA_MODULE_LOADING"] = "EAGER"  # a later one would wait for the stream that waits
import gpumem
from cuda.bindings import driver as cu
from gpumem.errors import DriverError, TimelineLostError
from gpumem.interop import HostTimeline

PTX = b'''
.version 6.4
.target sm_75
.address_size 64
.visible .entry lose()
{
    .reg .b64 %address;
    .reg .b32 %value;
    mov.u64 %address, 16;
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}
'''

def done(result):
    assert result[0] == 0, result
    return result[1] if len(result) == 2 else None

timeline, waiting, lost = HostTimeline.create(), gpumem.Stream("cuda:0"), gpumem.Stream("cuda:0")
done(cu.cuCtxSetCurrent(done(cu.cuDevicePrimaryCtxRetain(done(cu.cuDeviceGet(0))))))
module = done(cu.cuModuleLoadData(PTX + bytes(1)))
kernel = done(cu.cuModuleGetFunction(module, b"lose"))
timeline.enqueue_wait(waiting, 1)
timeline.enqueue_signal(waiting, 2)
done(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, lost.ptr, 0, 0))

def refused(call, *errors):
    try:
        call()
    except errors:
        return
    raise SystemExit(f"{call} did not fail")

refused(lost.synchronize, DriverError)
"""


@pytest.mark.parametrize("first", ["wait(2)", "wait(5)", "signal(5)"])
def test_timeline_of_a_lost_gpu_is_poisoned(first):
    child.run_quietly(
        LOSE_THE_DEVICE
        + f"""
refused(lambda: timeline.{first}, TimelineLostError)
assert timeline.poisoned
refused(lambda: timeline.wait(2), TimelineLostError)
refused(lambda: timeline.enqueue_wait(waiting, 9), DriverError, TimelineLostError)
refused(lambda: timeline.enqueue_signal(waiting, 9), DriverError, TimelineLostError)
refused(waiting.synchronize, DriverError)
timeline.signal(11)
timeline.wait(11)
timeline.close()
"""
    )
