"""Order within and between streams, the default streams, host functions, values."""

import ctypes
import threading

import pytest
from drivers import AND, BLOCK, EQ, GEQ, NOR, in_thread, waits_for

LEGACY, PER_THREAD = 1, 2
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def launch(driver, stream, function):
    """Queue a host function; the returned object must live until it ran."""
    thunk = HOST_FUNCTION(lambda _: function())
    address = ctypes.cast(thunk, ctypes.c_void_p).value
    driver.cuLaunchHostFunc(stream, driver.api.CUhostFn(address), 0)
    return thunk


def test_idle_stream_is_ready(driver):
    assert driver.error("cuStreamQuery", driver.stream()) == "SUCCESS"


def test_work_behind_a_gate_is_not_ready_and_then_done(driver):
    stream, pointer = driver.stream(), driver.memory(16)
    driver.write(pointer, b"a" * 16)
    gate = driver.gate(stream)
    driver.cuMemsetD8Async(pointer, ord("b"), 16, stream)
    assert driver.error("cuStreamQuery", stream) == "NOT_READY"
    gate.open()
    driver.cuStreamSynchronize(stream)
    assert driver.error("cuStreamQuery", stream) == "SUCCESS"
    assert driver.read(pointer, 16) == b"b" * 16


def test_one_stream_keeps_its_order(driver):
    stream, pointer = driver.stream(), driver.memory(BLOCK)
    for value in range(50):
        driver.cuMemsetD8Async(pointer, value, BLOCK, stream)
    driver.cuStreamSynchronize(stream)
    assert driver.read(pointer, BLOCK) == bytes([49]) * BLOCK


@pytest.mark.parametrize(
    ("held", "free"), [("created", "created"), ("legacy", "created"), ("created", "legacy")]
)
def test_non_blocking_streams_and_others_do_not_wait_for_each_other(driver, held, free):
    held, free = (LEGACY if kind == "legacy" else driver.stream() for kind in (held, free))
    pointer, gate = driver.memory(16), driver.gate(held)
    driver.cuMemsetD8Async(pointer, 1, 16, free)
    driver.cuStreamSynchronize(free)
    assert driver.error("cuStreamQuery", held) == "NOT_READY"
    gate.open()


@pytest.mark.parametrize("kind", ["created", "per thread"])
def test_legacy_stream_waits_for_blocking_streams(driver, kind):
    stream = driver.stream(0) if kind == "created" else PER_THREAD
    pointer, event = driver.memory(16), driver.event()
    gate = driver.gate(stream)
    driver.cuMemsetD8Async(pointer, 1, 16, LEGACY)
    driver.cuEventRecord(event, LEGACY)
    assert driver.error("cuEventQuery", event) == "NOT_READY"
    gate.open()
    driver.cuEventSynchronize(event)
    assert driver.error("cuStreamQuery", stream) == "SUCCESS"


def test_blocking_streams_wait_for_the_legacy_stream(driver):
    stream, pointer = driver.stream(0), driver.memory(16)
    gate = driver.gate(0)
    driver.cuMemsetD8Async(pointer, 1, 16, stream)
    assert driver.error("cuStreamQuery", stream) == "NOT_READY"
    gate.open()
    driver.cuStreamSynchronize(stream)


def test_each_thread_has_its_own_per_thread_stream(driver):
    pointer = driver.memory(16)
    gate = driver.gate(PER_THREAD)

    def other():
        driver.cuCtxSetCurrent(driver.context)
        driver.cuMemsetD8Async(pointer, 1, 16, PER_THREAD)
        driver.cuStreamSynchronize(PER_THREAD)

    in_thread(other)
    assert driver.error("cuStreamQuery", PER_THREAD) == "NOT_READY"
    gate.open()
    driver.cuStreamSynchronize(PER_THREAD)


def test_context_waits_for_all_its_streams(driver):
    streams = [driver.stream() for _ in range(5)]
    pointer = driver.memory(5)
    gates = [driver.gate(stream) for stream in streams]
    for index, stream in enumerate(streams):
        driver.cuMemsetD8Async(pointer + index, index + 1, 1, stream)
    for gate in gates:
        gate.open()
    driver.cuCtxSynchronize()
    assert driver.read(pointer, 5) == bytes([1, 2, 3, 4, 5])


def test_destroyed_stream_still_does_its_work(driver):
    stream, pointer = driver.cuStreamCreate(1), driver.memory(16)
    driver.write(pointer, bytes(16))
    gate = driver.gate(stream)
    driver.cuMemsetD8Async(pointer, 7, 16, stream)
    driver.cuStreamDestroy(stream)
    gate.open()
    driver.cuCtxSynchronize()
    assert driver.read(pointer, 16) == bytes([7]) * 16


def test_stream_has_the_requested_flags_priority_and_context(driver):
    stream = driver.cuStreamCreateWithPriority(1, -1)
    assert driver.cuStreamGetFlags(stream) == 1
    assert driver.cuStreamGetPriority(stream) == -1
    driver.cuStreamDestroy(stream)


def test_priorities_are_clamped(driver):
    least, greatest = driver.cuCtxGetStreamPriorityRange()
    low, high = driver.cuStreamCreateWithPriority(1, 99), driver.cuStreamCreateWithPriority(1, -99)
    assert (driver.cuStreamGetPriority(low), driver.cuStreamGetPriority(high)) == (least, greatest)
    driver.cuStreamDestroy(low)
    driver.cuStreamDestroy(high)


def test_stream_ids_differ(driver):
    first, second = driver.stream(), driver.stream()
    assert driver.cuStreamGetId(first) != driver.cuStreamGetId(second)


def test_unknown_stream_flags_are_refused(driver):
    assert driver.error("cuStreamCreate", 8) == "INVALID_VALUE"


def test_host_function_runs_in_stream_order(driver):
    stream, pinned = driver.stream(), driver.pinned(8)
    word = ctypes.c_uint64.from_address(pinned)
    word.value = 0
    seen = []
    driver.cuMemsetD8Async(pinned, 0x11, 8, stream)
    thunk = launch(driver, stream, lambda: seen.append(word.value))
    driver.cuMemsetD8Async(pinned, 0x22, 8, stream)
    driver.cuStreamSynchronize(stream)
    assert seen == [0x1111111111111111]
    assert word.value == 0x2222222222222222
    del thunk


def test_host_function_runs_on_another_thread(driver):
    stream, seen = driver.stream(), []
    thunk = launch(driver, stream, lambda: seen.append(threading.get_native_id()))
    driver.cuStreamSynchronize(stream)
    assert seen
    assert seen[0] != threading.get_native_id()
    del thunk


@pytest.mark.parametrize(
    ("compare", "want", "before", "after"),
    [
        (GEQ, 5, 4, 5),
        (GEQ, 5, 4, 900),
        (GEQ, 1, 2**64 - 5, 3),
        (EQ, 5, 6, 5),
        (AND, 0b110, 0b001, 0b010),
        (NOR, 0b1, 2**64 - 2, 2**64 - 4),
    ],
)
def test_stream_waits_for_a_64_bit_value(driver, compare, want, before, after):
    stream, address = driver.stream(), driver.pinned(8)
    word = ctypes.c_uint64.from_address(address)
    word.value = before
    driver.cuStreamWaitValue64(stream, address, want, compare)
    assert driver.error("cuStreamQuery", stream) == "NOT_READY"
    word.value = after
    driver.cuStreamSynchronize(stream)


def test_greater_or_equal_wait_is_cyclic(driver):
    """Half the circle ahead counts as reached: 2**63 - 1 beyond, but not 2**63."""
    stream, address = driver.stream(), driver.pinned(8)
    word = ctypes.c_uint64.from_address(address)
    word.value = 10 + 2**63 - 1
    driver.cuStreamWaitValue64(stream, address, 10, GEQ)
    driver.cuStreamSynchronize(stream)
    word.value = 10 + 2**63
    driver.cuStreamWaitValue64(stream, address, 10, GEQ)
    assert driver.error("cuStreamQuery", stream) == "NOT_READY"
    word.value = 10
    driver.cuStreamSynchronize(stream)


def test_stream_waits_for_a_32_bit_value(driver):
    stream, address = driver.stream(), driver.pinned(4)
    word = ctypes.c_uint32.from_address(address)
    word.value = 2**32 - 1
    driver.cuStreamWaitValue32(stream, address, 1, GEQ)
    assert driver.error("cuStreamQuery", stream) == "NOT_READY"
    word.value = 1
    driver.cuStreamSynchronize(stream)


def test_value_written_by_one_stream_releases_another(driver):
    waiter, writer, address = driver.stream(), driver.stream(), driver.pinned(8)
    ctypes.c_uint64.from_address(address).value = 0
    driver.cuStreamWaitValue64(waiter, address, 7, GEQ)
    driver.cuStreamWriteValue64(writer, address, 9, 0)
    driver.cuStreamSynchronize(waiter)
    assert ctypes.c_uint64.from_address(address).value == 9


def test_values_can_be_in_device_memory(driver):
    stream, pointer = driver.stream(), driver.memory(8)
    driver.write(pointer, bytes(8))
    driver.cuCtxSynchronize()  # the write is on the default stream, and may return before its end
    driver.cuStreamWriteValue64(stream, pointer, 3, 0)
    driver.cuStreamWaitValue64(stream, pointer, 3, EQ)
    driver.cuStreamSynchronize(stream)
    assert int.from_bytes(driver.read(pointer, 8), "little") == 3


def test_misaligned_value_is_refused(driver):
    stream, address = driver.stream(), driver.pinned(16)
    assert driver.error("cuStreamWaitValue64", stream, address + 1, 1, GEQ) == "INVALID_VALUE"
    assert driver.error("cuStreamWriteValue32", stream, address + 2, 1, 0) == "INVALID_VALUE"


@pytest.mark.parametrize("call", ["cuStreamSynchronize", "cuStreamQuery"])
def test_querying_the_legacy_stream_covers_all_blocking_streams(driver, call):
    streams = [driver.stream(0), driver.stream(0)]
    gates = [driver.gate(stream) for stream in streams]
    assert driver.error("cuStreamQuery", LEGACY) == "NOT_READY"
    gates[0].open()
    if call == "cuStreamQuery":
        assert driver.error(call, LEGACY) == "NOT_READY"
        gates[1].open()
    else:
        assert waits_for(driver, gates[1], lambda: driver.cuStreamSynchronize(LEGACY))
    driver.cuStreamSynchronize(LEGACY)
    assert [driver.error("cuStreamQuery", stream) for stream in streams] == ["SUCCESS"] * 2


def test_event_on_the_empty_legacy_stream_waits_for_blocking_streams(driver):
    stream, event = driver.stream(0), driver.event()
    gate = driver.gate(stream)
    driver.cuEventRecord(event, LEGACY)
    assert driver.error("cuEventQuery", event) == "NOT_READY"
    gate.open()
    driver.cuEventSynchronize(event)


def test_legacy_stream_orders_two_blocking_streams(driver):
    first, second, pointer = driver.stream(0), driver.stream(0), driver.memory(16)
    gate = driver.gate(first)
    driver.cuMemsetD8Async(pointer, 1, 16, LEGACY)
    assert driver.error("cuStreamQuery", second) == "SUCCESS"
    driver.cuMemsetD8Async(pointer, 2, 16, second)
    assert driver.error("cuStreamQuery", second) == "NOT_READY"
    gate.open()
    driver.cuStreamSynchronize(second)
    assert driver.read(pointer, 16) == b"\x02" * 16


def test_stream_and_event_calls_need_no_current_context(driver):
    stream, event, pointer = driver.cuStreamCreate(1), driver.cuEventCreate(2), driver.memory(16)

    def run():
        driver.cuMemsetD8Async(pointer, 3, 16, stream)
        driver.cuEventRecord(event, stream)
        driver.cuStreamWaitEvent(stream, event, 0)
        driver.cuEventSynchronize(event)
        driver.cuStreamSynchronize(stream)
        driver.cuEventDestroy(event)
        driver.cuStreamDestroy(stream)
        return driver.error("cuStreamQuery", LEGACY), driver.error("cuMemsetD8", pointer, 1, 16)

    assert in_thread(run) == ("INVALID_CONTEXT", "INVALID_CONTEXT")
    assert driver.read(pointer, 16) == b"\x03" * 16


@pytest.mark.parametrize("stream", [0, LEGACY, PER_THREAD])
def test_default_streams_cannot_be_destroyed(driver, stream):
    assert driver.error("cuStreamDestroy", stream) == "INVALID_HANDLE"
