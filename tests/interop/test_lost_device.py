"""A device that is lost: every call ends, and the process too."""

import pytest
from helpers import child

START = "from interop import lost_device\n"


@pytest.mark.parametrize("memory_operations", [False, True])
@pytest.mark.parametrize("busy", [False, True])
def test_no_call_hangs_after_the_device_is_lost(busy, memory_operations):
    child.run_quietly(START + f"lost_device.main({busy}, {memory_operations})")


@pytest.mark.parametrize("memory_operations", [False, True])
def test_every_wait_ends_when_the_device_is_lost(memory_operations):
    child.run_quietly(START + f"lost_device.lose_while_threads_wait({memory_operations})")


LOST = """
import sys
import gpumem
from gpumem._testing import host_device, timelines
from gpumem.errors import DriverError, TimelineLostError
from gpumem.interop import HostTimeline
timelines.rehearse_memory_operations("memory operations" in sys.argv)
timeline, stream = HostTimeline.create(), gpumem.Stream("host")
timeline.enqueue_wait(stream, 1)
timeline.enqueue_signal(stream, 2)
"""


@pytest.mark.parametrize("way", [(), ("memory operations",)])
def test_timeline_of_a_lost_device_is_poisoned_for_every_process_and_then_takes_signals(way):
    child.run_quietly(
        LOST
        + """
there = HostTimeline.from_fd(timeline.export())     # as another process has it
host_device.lose_device(0, 700)
for each in (timeline, there):
    try:
        each.wait(2)
    except TimelineLostError as error:
        if each is timeline:
            assert error.__cause__.name == "CUDA_ERROR_ILLEGAL_ADDRESS"
    else:
        raise SystemExit("nothing can signal it")
assert timeline.poisoned and there.poisoned
timeline.signal(3)      # for streams of other devices
there.wait(3)
""",
        *way,
    )


def test_signal_behind_a_store_of_a_lost_device_raises_once():
    child.run_quietly(
        LOST
        + """
host_device.lose_device(0, 700)
try:
    timeline.signal(3)
except TimelineLostError as error:
    assert isinstance(error.__cause__, DriverError)
else:
    raise SystemExit("2 was never stored, and who waits for it was let go")
assert (timeline.value(), timeline.pending, timeline.poisoned) == (0, 2, True)
timeline.signal(3)
assert timeline.value() == 3
""",
        "memory operations",
    )


def test_end_of_the_driver_does_not_poison_a_timeline_that_others_use():
    """A daemon thread may wait while its process ends."""
    child.run_quietly(
        LOST
        + """
from gpumem.errors import TimelineTimeout
host_device.fail("cuEventQuery", 1, 4, times=0)     # CUDA_ERROR_DEINITIALIZED
try:
    timeline.wait(2, timeout=0.001)
except TimelineTimeout:
    assert not timeline.poisoned
"""
    )
