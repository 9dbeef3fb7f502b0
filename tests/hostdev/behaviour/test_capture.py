"""Capture: what becomes a node, what is refused, and what a launch does."""

import ctypes

import pytest
from drivers import in_thread

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
LEGACY = 1


class Capture:
    """Ends what a test began, whatever became of it."""

    def __init__(self, driver, mode=RELAXED, flags=1):
        self.driver = driver
        self.stream = driver.stream(flags)
        driver.cuStreamBeginCapture(self.stream, driver.api.CUstreamCaptureMode(mode))

    def end(self):
        return self.driver.cuStreamEndCapture(self.stream)

    def end_error(self):
        return self.driver.error("cuStreamEndCapture", self.stream)

    def status(self):
        return int(self.driver.cuStreamIsCapturing(self.stream))


def launch(driver, graph, stream):
    executable = driver.cuGraphInstantiate(graph, 0)
    driver.cuGraphLaunch(executable, stream)
    driver.cuStreamSynchronize(stream)
    driver.cuGraphExecDestroy(executable)
    driver.cuGraphDestroy(graph)


def test_captured_work_runs_at_launch_and_not_before(driver):
    pointer, target = driver.memory(64), driver.memory(64)
    driver.write(pointer, bytes(64))
    driver.write(target, bytes(64))
    capture = Capture(driver)
    driver.cuMemsetD8Async(pointer, 5, 64, capture.stream)
    driver.cuMemcpyDtoDAsync(target, pointer, 64, capture.stream)
    graph = capture.end()
    assert driver.read(target, 64) == bytes(64)
    launch(driver, graph, capture.stream)
    assert driver.read(target, 64) == b"\x05" * 64


def test_graph_may_be_launched_again_and_again(driver):
    pointer, source = driver.memory(8), driver.pinned(8)
    capture = Capture(driver)
    driver.cuMemcpyHtoDAsync(pointer, source, 8, capture.stream)
    graph = capture.end()
    executable = driver.cuGraphInstantiate(graph, 0)
    driver.cuGraphDestroy(graph)
    for value in range(3):
        ctypes.memset(source, value, 8)
        driver.cuGraphLaunch(executable, capture.stream)
        driver.cuStreamSynchronize(capture.stream)
        assert driver.read(pointer, 8) == bytes([value]) * 8
    driver.cuGraphExecDestroy(executable)


def test_capture_status_follows_the_capture(driver):
    stream = driver.stream()
    assert int(driver.cuStreamIsCapturing(stream)) == 0
    capture = Capture(driver)
    assert capture.status() == 1
    driver.cuGraphDestroy(capture.end())
    assert capture.status() == 0


def test_graph_nodes_are_the_captured_calls(driver):
    pointer = driver.memory(64)
    capture = Capture(driver)
    for value in range(3):
        driver.cuMemsetD8Async(pointer, value, 64, capture.stream)
    graph = capture.end()
    _, count = driver.cuGraphGetNodes(graph)
    assert count == 3
    driver.cuGraphDestroy(graph)


@pytest.mark.parametrize("call", ["cuStreamQuery", "cuStreamSynchronize"])
def test_querying_a_capturing_stream_invalidates_the_capture(driver, call):
    capture = Capture(driver)
    assert driver.error(call, capture.stream) == "STREAM_CAPTURE_UNSUPPORTED"
    assert capture.status() == 2
    assert capture.end_error() == "STREAM_CAPTURE_INVALIDATED"
    assert capture.status() == 0


def test_allocating_under_a_global_capture_is_refused_and_invalidates_it(driver):
    capture = Capture(driver, GLOBAL)
    assert driver.error("cuMemAlloc", 64) == "STREAM_CAPTURE_UNSUPPORTED"
    assert capture.end_error() == "STREAM_CAPTURE_INVALIDATED"


def test_allocating_under_a_relaxed_capture_is_allowed(driver):
    capture = Capture(driver, RELAXED)
    driver.memory(64)
    driver.cuGraphDestroy(capture.end())


def test_thread_in_relaxed_mode_may_allocate(driver):
    capture = Capture(driver, GLOBAL)
    modes = driver.api.CUstreamCaptureMode
    before = driver.cuThreadExchangeStreamCaptureMode(modes(RELAXED))
    driver.memory(64)
    driver.cuThreadExchangeStreamCaptureMode(before)
    driver.cuGraphDestroy(capture.end())


@pytest.mark.parametrize("relaxed", [False, True])
def test_free_in_stream_order_is_unsafe_under_a_global_capture(driver, relaxed):
    """Of another stream; a thread in relaxed mode may."""
    stream, pointer = driver.stream(), int(driver.cuMemAlloc(64))
    capture = Capture(driver, GLOBAL)
    modes = driver.api.CUstreamCaptureMode
    if relaxed:
        before = driver.cuThreadExchangeStreamCaptureMode(modes(RELAXED))
        driver.cuMemFreeAsync(pointer, stream)
        driver.cuStreamSynchronize(stream)
        driver.cuThreadExchangeStreamCaptureMode(before)
        driver.cuGraphDestroy(capture.end())
        return
    refused = driver.error("cuMemFreeAsync", pointer, stream)
    assert refused == "STREAM_CAPTURE_UNSUPPORTED"
    assert capture.end_error() == "STREAM_CAPTURE_INVALIDATED"
    driver.cuMemFree(pointer)


def test_thread_local_capture_does_not_affect_other_threads(driver):
    capture = Capture(driver, THREAD_LOCAL)

    def other():
        driver.cuCtxSetCurrent(driver.context)
        pointer = driver.cuMemAlloc(64)
        return pointer

    pointer = in_thread(other)
    driver.cuGraphDestroy(capture.end())
    driver.cuMemFree(pointer)


def test_legacy_stream_cannot_be_captured(driver):
    mode = driver.api.CUstreamCaptureMode(RELAXED)
    assert driver.error("cuStreamBeginCapture", LEGACY, mode) == "STREAM_CAPTURE_UNSUPPORTED"


def test_legacy_stream_is_unusable_while_a_blocking_stream_captures(driver):
    pointer = driver.memory(64)
    capture = Capture(driver, RELAXED, flags=0)
    assert driver.error("cuMemsetD8Async", pointer, 1, 64, LEGACY) == "STREAM_CAPTURE_IMPLICIT"
    assert capture.end_error() == "STREAM_CAPTURE_INVALIDATED"


def test_beginning_a_capture_twice_is_refused(driver):
    capture = Capture(driver)
    mode = driver.api.CUstreamCaptureMode(RELAXED)
    assert driver.error("cuStreamBeginCapture", capture.stream, mode) == "ILLEGAL_STATE"
    driver.error("cuStreamEndCapture", capture.stream)


def test_ending_without_a_capture_is_refused(driver):
    assert driver.error("cuStreamEndCapture", driver.stream()) == "ILLEGAL_STATE"


def test_streams_fork_and_join_through_events(driver):
    pointer, other, fork, join = driver.memory(2), driver.stream(), driver.event(), driver.event()
    driver.write(pointer, bytes(2))
    capture = Capture(driver)
    driver.cuEventRecord(fork, capture.stream)
    driver.cuStreamWaitEvent(other, fork, 0)
    assert int(driver.cuStreamIsCapturing(other)) == 1
    driver.cuMemsetD8Async(pointer, 1, 1, capture.stream)
    driver.cuMemsetD8Async(pointer + 1, 2, 1, other)
    driver.cuEventRecord(join, other)
    driver.cuStreamWaitEvent(capture.stream, join, 0)
    graph = capture.end()
    assert int(driver.cuStreamIsCapturing(other)) == 0
    launch(driver, graph, capture.stream)
    assert driver.read(pointer, 2) == b"\x01\x02"


def test_forked_stream_must_be_joined(driver):
    pointer, other, fork = driver.memory(2), driver.stream(), driver.event()
    capture = Capture(driver)
    driver.cuEventRecord(fork, capture.stream)
    driver.cuStreamWaitEvent(other, fork, 0)
    driver.cuMemsetD8Async(pointer, 2, 1, other)
    assert capture.end_error() == "STREAM_CAPTURE_UNJOINED"
    assert int(driver.cuStreamIsCapturing(other)) == 0


def test_only_the_origin_ends_a_capture(driver):
    other, fork = driver.stream(), driver.event()
    capture = Capture(driver)
    driver.cuEventRecord(fork, capture.stream)
    driver.cuStreamWaitEvent(other, fork, 0)
    assert driver.error("cuStreamEndCapture", other) == "STREAM_CAPTURE_UNMATCHED"
    driver.error("cuStreamEndCapture", capture.stream)


def test_another_thread_cannot_end_a_capture(driver):
    capture = Capture(driver, THREAD_LOCAL)

    def other():
        driver.cuCtxSetCurrent(driver.context)
        return driver.error("cuStreamEndCapture", capture.stream)

    assert in_thread(other) == "STREAM_CAPTURE_WRONG_THREAD"
    driver.error("cuStreamEndCapture", capture.stream)


def test_capture_cannot_wait_for_uncaptured_work(driver):
    outside, event = driver.stream(), driver.event()
    gate = driver.gate(outside)
    driver.cuEventRecord(event, outside)
    capture = Capture(driver)
    assert driver.error("cuStreamWaitEvent", capture.stream, event, 0) == "STREAM_CAPTURE_ISOLATION"
    assert capture.end_error() == "STREAM_CAPTURE_INVALIDATED"
    gate.open()


def test_two_captures_do_not_merge(driver):
    first, second, event = Capture(driver), Capture(driver), driver.event()
    driver.cuEventRecord(event, first.stream)
    assert driver.error("cuStreamWaitEvent", second.stream, event, 0) == "STREAM_CAPTURE_MERGE"
    assert second.end_error() == "STREAM_CAPTURE_INVALIDATED"
    first.end_error()


def test_captured_event_cannot_be_queried(driver):
    event = driver.event()
    capture = Capture(driver)
    driver.cuEventRecord(event, capture.stream)
    assert driver.error("cuEventQuery", event) == "CAPTURED_EVENT"
    capture.end_error()


def test_user_object_is_destroyed_with_its_graph(driver):
    destroyed = []
    thunk = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: destroyed.append(1))
    function = driver.api.CUhostFn(ctypes.cast(thunk, ctypes.c_void_p).value)
    graph = driver.cuGraphCreate(0)
    thing = driver.cuUserObjectCreate(0, function, 1, 1)
    driver.cuGraphRetainUserObject(graph, thing, 1, 1)
    executable = driver.cuGraphInstantiate(graph, 0)
    driver.cuGraphDestroy(graph)
    assert not destroyed
    driver.cuGraphExecDestroy(executable)
    driver.cuCtxSynchronize()
    assert destroyed == [1] or driver.kind == "cuda"  # a GPU's driver may do it later


UNSAFE = [
    "cuMemAlloc",
    "cuMemHostAlloc",
    "cuMemAllocManaged",
    "cuCtxSynchronize",
    "cuCtxRecordEvent",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuMemAllocAsync",
    "cuMemPoolTrimTo",
    "cuGraphInstantiate",
]


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL])
@pytest.mark.parametrize("call", UNSAFE)
def test_synchronizing_call_is_refused_and_invalidates_the_capture(driver, call, mode):
    stream, event = driver.stream(), driver.event()
    graph, pool = driver.cuGraphCreate(0), driver.cuDeviceGetDefaultMemPool(0)
    driver.later("cuGraphDestroy", graph)
    arguments = {
        "cuMemAlloc": (64,),
        "cuMemHostAlloc": (64, 0),
        "cuMemAllocManaged": (64, 1),
        "cuCtxSynchronize": (),
        "cuCtxRecordEvent": (driver.context, event),
        "cuEventQuery": (event,),
        "cuEventSynchronize": (event,),
        "cuStreamQuery": (stream,),
        "cuStreamSynchronize": (stream,),
        "cuMemAllocAsync": (64, stream),
        "cuMemPoolTrimTo": (pool, 0),
        "cuGraphInstantiate": (graph, 0),
    }[call]
    capture = Capture(driver, mode)
    assert driver.error(call, *arguments) == "STREAM_CAPTURE_UNSUPPORTED"
    assert capture.end_error() == "STREAM_CAPTURE_INVALIDATED"


def test_virtual_memory_and_event_calls_are_safe_in_any_capture(driver):
    pointer, stream, event = driver.memory(64), driver.stream(), driver.event()
    reserved, handle = driver.reserve(4 << 20), driver.physical()
    capture = Capture(driver, GLOBAL)
    driver.map(reserved, handle)
    driver.cuMemUnmap(reserved, 2 << 20)
    driver.cuMemsetD8Async(pointer, 1, 64, stream)
    driver.cuEventRecord(event, stream)
    driver.cuStreamDestroy(driver.cuStreamCreate(1))
    driver.cuMemGetInfo()
    driver.cuGraphDestroy(capture.end())


@pytest.mark.parametrize("call", ["cuCtxSynchronize", "cuCtxRecordEvent"])
def test_context_cannot_be_synchronized_while_a_stream_captures(driver, call):
    event = driver.event()
    capture = Capture(driver, RELAXED)
    arguments = (driver.context, event) if call == "cuCtxRecordEvent" else ()
    assert driver.error(call, *arguments) == "STREAM_CAPTURE_UNSUPPORTED"
    assert capture.end_error() == "STREAM_CAPTURE_INVALIDATED"


def test_synchronous_copy_cannot_run_while_a_blocking_stream_captures(driver):
    pointer = driver.memory(64)
    capture = Capture(driver, RELAXED, flags=0)
    assert driver.error("cuMemcpyHtoD", pointer, b"x" * 64, 64) == "STREAM_CAPTURE_IMPLICIT"
    assert capture.end_error() == "STREAM_CAPTURE_INVALIDATED"


def test_next_node_depends_on_the_latest_of_each_branch(driver):
    pointer, other, event = driver.memory(64), driver.stream(), driver.event()
    capture = Capture(driver)

    def after(stream):
        return driver.cuStreamGetCaptureInfo(stream)[-1]

    assert after(capture.stream) == 0
    driver.cuMemsetD8Async(pointer, 1, 16, capture.stream)
    driver.cuMemsetD8Async(pointer, 1, 16, capture.stream)
    assert after(capture.stream) == 1
    driver.cuEventRecord(event, capture.stream)
    driver.cuStreamWaitEvent(other, event, 0)
    assert after(other) == 1
    driver.cuMemsetD8Async(pointer, 1, 16, capture.stream)
    driver.cuMemsetD8Async(pointer + 32, 1, 16, other)
    driver.cuEventRecord(event, other)
    driver.cuStreamWaitEvent(capture.stream, event, 0)
    assert after(capture.stream) == 2
    driver.cuMemsetD8Async(pointer, 1, 64, capture.stream)
    assert after(capture.stream) == 1
    driver.cuGraphDestroy(capture.end())


def test_event_of_an_ended_capture_is_unusable(driver):
    event = driver.event()
    capture = Capture(driver)
    driver.cuEventRecord(event, capture.stream)
    driver.cuGraphDestroy(capture.end())
    assert driver.error("cuEventQuery", event) == "INVALID_VALUE"
    assert driver.error("cuStreamWaitEvent", driver.stream(), event, 0) == "INVALID_VALUE"
    driver.cuEventRecord(event, driver.stream())
    driver.cuEventSynchronize(event)
