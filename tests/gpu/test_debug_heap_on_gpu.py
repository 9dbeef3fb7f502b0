"""The debug heap over a GPU's memory: what writes of the device it finds, and no others."""

import numpy as np
import pytest
from helpers.heap import found_by, let_rest

import gpumem

MEMORIES = ["cuda:0", "cuda:0/host_accessible", "cuda:0/managed"]
MIB = 1 << 20


@pytest.fixture(params=MEMORIES)
def debugged(request):
    with gpumem.Arena(request.param, debug_heap=True) as arena:
        yield arena
        arena.check_invariants()


@pytest.fixture
def write(driver):
    """Queue a write of some bytes on a stream."""

    def write(address, nbytes, stream, value=7):
        driver.call(driver.cuMemsetD8Async, address, value, nbytes, stream.ptr)

    return write


@pytest.fixture
def streams():
    return [gpumem.Stream("cuda:0") for _ in range(2)]


@pytest.mark.parametrize("nbytes", [1, 255, 4096, 33 * MIB + 1])
def test_one_byte_overrun_and_underrun_are_found(debugged, write, streams, nbytes):
    for offset, kind in ((nbytes, "overrun"), (-1, "underrun")):
        buffer = debugged.allocate(nbytes, streams[0])
        write(buffer.ptr + offset, 1, streams[0])
        buffer.close()
        (report,) = found_by(debugged.check_heap)
        assert (report.kind, report.offset, report.found[0]) == (kind, offset, 7)
        assert report.allocated.where.startswith(__file__)


def test_write_after_free_is_found(debugged, write, streams):
    buffer = debugged.allocate(2 * MIB, streams[0])
    address = buffer.ptr
    buffer.close()
    debugged.check_heap()
    write(address + MIB, 3, streams[1])
    (report,) = found_by(debugged.check_heap)
    assert (report.kind, report.offset, report.wrong_bytes) == ("use_after_free", MIB, 3)


def test_late_write_of_the_blocks_own_stream_is_found(debugged, write, streams, gate):
    own, other = streams
    buffer = debugged.allocate(MIB, own)
    gate.hold(own)
    write(buffer.ptr, 5, own)
    buffer.close(other)
    let_rest(debugged)  # for `other` is done
    gate.open()
    (report,) = found_by(debugged.check_heap)
    assert (report.kind, report.wrong_bytes) == ("wrong_stream", 5)


def test_correct_programs_give_no_report(debugged, write, streams):
    rng = np.random.default_rng(20)
    own, other = streams
    live = []
    for _ in range(300):
        if rng.random() < 0.5:
            live.append(debugged.allocate(int(rng.integers(1, 3 * MIB)), own))
            write(live[-1].ptr, live[-1].nbytes, own)
        elif live:
            buffer = live.pop(int(rng.integers(len(live))))
            if rng.random() < 0.5:
                other.wait(own.record())
                write(buffer.ptr, buffer.nbytes, other)
                buffer.record_stream(other)
            buffer.close()
    del live
    assert debugged.check_heap() == ()


def test_allocation_checks_while_another_stream_captures(debugged, write, streams, driver):
    stream, other = streams
    buffer = debugged.allocate(MIB, other)
    driver.call(
        driver.cuStreamBeginCapture,
        stream.ptr,
        driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL,
    )
    buffer.close()
    debugged.allocate(MIB, other).close()
    graph = driver.call(driver.cuStreamEndCapture, stream.ptr)
    driver.call(driver.cuGraphDestroy, graph)
    assert debugged.check_heap() == ()


def test_fresh_device_memory_is_nan(streams):
    with gpumem.Arena("cuda:0", debug_heap=True) as arena:
        tensor = gpumem.empty(1000, "float32", resource=arena, stream=streams[0])
        assert np.isnan(tensor.to("host").numpy()).all()
        del tensor
