"""Events: what a record marks, and who waits for what."""

from drivers import BLOCK


def test_event_never_recorded_is_complete(driver):
    event = driver.event()
    assert driver.error("cuEventQuery", event) == "SUCCESS"
    driver.cuEventSynchronize(event)


def test_waiting_for_an_event_never_recorded_waits_for_nothing(driver):
    stream = driver.stream()
    driver.cuStreamWaitEvent(stream, driver.event(), 0)
    assert driver.error("cuStreamQuery", stream) == "SUCCESS"


def test_event_on_an_idle_stream_is_complete_at_once(driver):
    stream, event = driver.stream(), driver.event()
    driver.cuEventRecord(event, stream)
    driver.cuEventSynchronize(event)
    assert driver.error("cuEventQuery", event) == "SUCCESS"


def test_event_on_a_busy_stream_completes_with_the_work_before_it(driver):
    stream, event = driver.stream(), driver.event()
    first = driver.gate(stream)
    driver.cuEventRecord(event, stream)
    second = driver.gate(stream)
    assert driver.error("cuEventQuery", event) == "NOT_READY"
    first.open()
    driver.cuEventSynchronize(event)
    assert driver.error("cuStreamQuery", stream) == "NOT_READY"
    second.open()


def test_event_of_a_context_completes_with_what_all_streams_had(driver):
    streams, event = [driver.stream(), driver.stream(), driver.stream(flags=0)], driver.event()
    gates = [driver.gate(stream) for stream in streams]
    driver.cuCtxRecordEvent(driver.context, event)
    later = driver.gate(streams[0])
    for gate in gates:
        assert driver.error("cuEventQuery", event) == "NOT_READY"
        gate.open()
    driver.cuEventSynchronize(event)
    assert driver.error("cuStreamQuery", streams[0]) == "NOT_READY"
    later.open()


def test_event_of_an_idle_context_is_complete(driver):
    driver.cuStreamSynchronize(driver.stream())
    event = driver.event()
    driver.cuCtxRecordEvent(driver.context, event)
    driver.cuEventSynchronize(event)
    assert driver.error("cuEventQuery", event) == "SUCCESS"


def test_stream_can_wait_for_the_event_of_a_context(driver):
    busy, stream, event = driver.stream(), driver.stream(), driver.event()
    gate = driver.gate(busy)
    driver.cuCtxRecordEvent(driver.context, event)
    driver.cuStreamWaitEvent(stream, event, 0)
    assert driver.error("cuStreamQuery", stream) == "NOT_READY"
    gate.open()
    driver.cuStreamSynchronize(stream)


def test_stream_waits_for_another_streams_event(driver):
    first, second, event = driver.stream(), driver.stream(), driver.event()
    pointer, target = driver.memory(BLOCK), driver.memory(BLOCK)
    driver.write(pointer, bytes(BLOCK))
    gate = driver.gate(first)
    driver.cuMemsetD8Async(pointer, 5, BLOCK, first)
    driver.cuEventRecord(event, first)
    driver.cuStreamWaitEvent(second, event, 0)
    driver.cuMemcpyDtoDAsync(target, pointer, BLOCK, second)
    assert driver.error("cuStreamQuery", second) == "NOT_READY"
    gate.open()
    driver.cuStreamSynchronize(second)
    assert driver.read(target, BLOCK) == bytes([5]) * BLOCK


def test_wait_refers_to_the_record_at_the_call(driver):
    """Recording again after the wait was queued changes nothing for the waiter."""
    first, second, event = driver.stream(), driver.stream(), driver.event()
    gate = driver.gate(first)
    driver.cuEventRecord(event, first)
    driver.cuStreamWaitEvent(second, event, 0)
    late = driver.gate(first)
    driver.cuEventRecord(event, first)
    gate.open()
    driver.cuStreamSynchronize(second)
    assert driver.error("cuEventQuery", event) == "NOT_READY"
    late.open()


def test_recording_again_moves_the_event(driver):
    first, second, event = driver.stream(), driver.stream(), driver.event()
    gate = driver.gate(first)
    driver.cuEventRecord(event, first)
    driver.cuEventRecord(event, second)
    driver.cuEventSynchronize(event)
    assert driver.error("cuEventQuery", event) == "SUCCESS"
    gate.open()


def test_event_destroyed_while_queued_still_releases_its_waiter(driver):
    first, second = driver.stream(), driver.stream()
    event = driver.cuEventCreate(2)
    gate = driver.gate(first)
    driver.cuEventRecord(event, first)
    driver.cuStreamWaitEvent(second, event, 0)
    driver.cuEventDestroy(event)
    assert driver.error("cuStreamQuery", second) == "NOT_READY"
    gate.open()
    driver.cuStreamSynchronize(second)


def test_event_outlives_the_stream_it_was_recorded_on(driver):
    stream, event = driver.cuStreamCreate(1), driver.event()
    gate = driver.gate(stream)
    driver.cuEventRecord(event, stream)
    driver.cuStreamDestroy(stream)
    assert driver.error("cuEventQuery", event) == "NOT_READY"
    gate.open()
    driver.cuEventSynchronize(event)


def test_elapsed_time_is_measured_between_timed_events(driver):
    stream, start, end = driver.stream(), driver.event(0), driver.event(0)
    pointer = driver.memory(4 * BLOCK)
    driver.cuEventRecord(start, stream)
    for value in range(8):
        driver.cuMemsetD8Async(pointer, value, 4 * BLOCK, stream)
    driver.cuEventRecord(end, stream)
    driver.cuEventSynchronize(end)
    assert driver.cuEventElapsedTime(start, end) > 0


def test_elapsed_time_needs_complete_recorded_timed_events(driver):
    stream, timed, never = driver.stream(), driver.event(0), driver.event(0)
    untimed, late = driver.event(), driver.event(0)
    driver.cuEventRecord(timed, stream)
    driver.cuEventRecord(untimed, stream)
    gate = driver.gate(stream)
    driver.cuEventRecord(late, stream)
    assert driver.error("cuEventElapsedTime", timed, never) == "INVALID_HANDLE"
    assert driver.error("cuEventElapsedTime", timed, untimed) == "INVALID_HANDLE"
    assert driver.error("cuEventElapsedTime", timed, late) == "NOT_READY"
    gate.open()


def test_shared_event_must_not_be_timed(driver):
    assert driver.error("cuEventCreate", 4) == "INVALID_VALUE"
