"""Unordered access and leaks. One child per test; nothing here depends on what runs when."""

import pytest

HEAD = """
import ctypes
host.find_misuse(1)
UNORDERED, LEAK = 2, 3
first, second = driver.stream(), driver.stream()
pointer, other = driver.memory(4096), driver.memory(4096)
event = driver.event()
def fill(stream, at=pointer, size=4096):
    driver.cuMemsetD8Async(at, 1, size, stream)
def found():
    return host.misuse_count(UNORDERED)
"""


@pytest.fixture
def run(child):
    """Run code after `HEAD`."""
    return lambda code: child(HEAD + code)


def test_unordered_writes_are_found_and_both_streams_named(run):
    run("""
fill(first)
fill(second, pointer + 100, 10)
assert found() == 1
report = host.misuse_report().decode()
one, two = (f"stream {driver.cuStreamGetId(stream)} (operation" for stream in (first, second))
assert one in report and two in report, report
assert f"writes 10 bytes at {hex(pointer + 100)}" in report and "wrote" in report, report
    """)


def test_unordered_write_after_a_completed_one_is_found(run):
    run("""
fill(first)
while ctypes.string_at(pointer + 4095, 1) != b"\\x01":
    pass
fill(second)
assert found() == 1
    """)


def test_unordered_read_and_write_is_found_in_both_orders(run):
    run("""
fill(first)
driver.cuMemcpyDtoDAsync(other, pointer, 64, second)
assert found() == 1 and "reads" in host.misuse_report().decode()
driver.cuCtxSynchronize()
driver.cuMemcpyDtoDAsync(other, pointer, 64, second)
fill(first)
assert found() == 2 and "that" in host.misuse_report().decode()
assert host.misuse_report().endswith(b"read; nothing orders them")
    """)


def test_unordered_reads_are_allowed(run):
    run("""
driver.cuMemcpyDtoDAsync(other, pointer, 64, first)
driver.cuMemcpyDtoDAsync(other + 64, pointer, 64, second)
assert found() == 0
    """)


def test_unordered_writes_to_neighbouring_bytes_are_allowed(run):
    run("""
fill(first, pointer, 100)
fill(second, pointer + 100, 100)
driver.cuMemsetD2D8Async(pointer + 1024, 64, 1, 32, 8, first)
driver.cuMemsetD2D8Async(pointer + 1024 + 32, 64, 1, 32, 8, second)
assert found() == 0
fill(second, pointer + 99, 1)
assert found() == 1
    """)


@pytest.mark.parametrize(
    "order",
    [
        "driver.cuEventRecord(event, first); driver.cuStreamWaitEvent(second, event, 0)",
        "driver.cuEventRecord(event, first); driver.cuEventSynchronize(event)",
        "driver.cuStreamSynchronize(first)",
        "driver.cuCtxSynchronize()",
        "driver.cuMemFree(driver.cuMemAlloc(16))",
        "driver.cuMemcpyDtoHAsync(bytearray(16), other, 16, first)",
        'exec(\'while driver.error("cuStreamQuery", first) == "NOT_READY": pass\')',
    ],
)
def test_event_and_stream_waits_order_accesses(run, order):
    run(f"fill(first)\n{order}\nfill(second)\nassert found() == 0, host.misuse_report()\n")


@pytest.mark.parametrize(
    "order",
    [
        "driver.cuEventRecord(event, second); driver.cuStreamWaitEvent(first, event, 0)",
        "driver.cuEventRecord(event, first)",
        "driver.cuStreamSynchronize(second)",
        "fill(1, other)",
    ],
)
def test_insufficient_waits_do_not_order_accesses(run, order):
    run(f"fill(first)\n{order}\nfill(second)\nassert found() == 1\n")


def test_event_orders_only_earlier_work(run):
    run("""
fill(first)
driver.cuEventRecord(event, first)
fill(first, other)
driver.cuStreamWaitEvent(second, event, 0)
fill(second)
assert found() == 0, host.misuse_report()
fill(second, other)
assert found() == 1
    """)


def test_order_is_transitive(run):
    run("""
third, again = driver.stream(), driver.event()
fill(first)
driver.cuEventRecord(event, first)
driver.cuStreamWaitEvent(third, event, 0)
driver.cuEventRecord(again, third)
driver.cuStreamWaitEvent(second, again, 0)
fill(second)
assert found() == 0, host.misuse_report()
    """)


def test_default_streams_order_blocking_streams(run):
    run("""
blocking = driver.stream(0), driver.stream(0)
fill(blocking[0])
fill(1)
fill(blocking[1])
driver.cuMemsetD8(pointer, 1, 16)
driver.read(pointer, 16)
assert found() == 0, host.misuse_report()
fill(first)
assert found() == 0  # the host has read since
fill(1)
assert found() == 1
    """)


def test_host_copies_are_checked(run):
    run("""
fill(first)
driver.read(pointer, 16)
assert found() == 1 and "the host reads 16 bytes" in host.misuse_report().decode()
driver.cuStreamSynchronize(first)
driver.write(pointer, b"x" * 16)
fill(second)
assert found() == 1
    """)


def test_page_mapped_at_two_addresses_is_checked_as_one(run):
    run("""
from drivers import BLOCK
base, handle = driver.reserve(2 * BLOCK), driver.physical()
driver.map(base, handle)
driver.map(base + BLOCK, handle)
fill(first, base + 64, 64)
fill(second, base + BLOCK + 128, 64)
assert found() == 0
fill(second, base + BLOCK + 100, 16)
assert found() == 1 and hex(base + BLOCK + 100) in host.misuse_report().decode()
    """)


def test_freed_memory_is_forgotten(run):
    run("""
for stream in (first, second) * 5:
    pinned = int(driver.cuMemHostAlloc(4096, 0))
    fill(stream, pinned)
    driver.cuMemFreeHost(pinned)
assert found() == 0, host.misuse_report()
    """)


def test_pool_memory_used_on_an_unordered_stream_is_found(run):
    run("""
block = int(driver.cuMemAllocAsync(4096, first))
fill(second, block)
assert found() == 1
driver.cuCtxSynchronize()
fill(second, block)
driver.cuMemFreeAsync(block, first)
assert found() == 2
driver.cuCtxSynchronize()
for stream in (first, second, first):
    block = int(driver.cuMemAllocAsync(4096, stream))
    fill(stream, block)
    driver.cuMemFreeAsync(block, stream)
assert found() == 2, host.misuse_report()
    """)


def test_plain_free_of_pool_memory_still_in_use_is_found(run):
    run("""
block = int(driver.cuMemAllocAsync(4096, first))
fill(first, block)
driver.cuMemFree(block)
assert found() == 1 and "the host writes" in host.misuse_report().decode()
    """)


def test_graph_launch_accesses_what_its_nodes_access(run):
    run("""
driver.cuStreamBeginCapture(first, driver.api.CUstreamCaptureMode(2))
fill(first)
graph = driver.cuStreamEndCapture(first)
executable = driver.cuGraphInstantiate(graph, 0)
fill(second)
assert found() == 0
driver.cuGraphLaunch(executable, first)
assert found() == 1
    """)


def test_memory_value_waits_order_accesses(run):
    run("""
word = driver.pinned(8)
driver.cuStreamWaitValue64(second, word, 1, 0)
fill(second)
fill(first)
driver.cuStreamWriteValue64(first, word, 1, 0)
third = driver.stream()
driver.cuEventRecord(event, second)
driver.cuStreamWaitEvent(third, event, 0)
fill(third)
driver.cuStreamSynchronize(third)
fill(first)
assert found() == 0, host.misuse_report()
fill(second)
driver.cuStreamSynchronize(second)
fill(first)
fill(second)
assert found() >= 1  # the host has synchronized: it is looked at again
    """)


def test_host_function_orders_the_host(run):
    run("""
import threading
done = threading.Event()
thunk = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: done.set())
fill(first)
driver.cuLaunchHostFunc(first, driver.api.CUhostFn(ctypes.cast(thunk, ctypes.c_void_p).value), 0)
done.wait()
fill(second)
assert found() == 0, host.misuse_report()
    """)


def test_misuse_is_not_checked_by_default(run):
    run("host.find_misuse(0)\nfill(first)\nfill(second)\nassert found() == 0\n")


def test_forked_child_checks_for_itself(run):
    run("""
import os
fill(first)
pid = os.fork()
if pid == 0:
    driver.start()
    one, two, fresh = driver.cuStreamCreate(1), driver.cuStreamCreate(1), int(driver.cuMemAlloc(64))
    before = found()
    fill(one, fresh, 64)
    fill(two, fresh, 64)
    os._exit(0 if found() == before + 1 else 1)
assert os.waitpid(pid, 0)[1] == 0
    """)


# ---- what is left at the end ----


def test_leaks_at_shutdown_are_counted_and_reported(child):
    child("""
        import os, tempfile
        host.find_misuse(1)
        driver.cuStreamCreate(1), driver.cuEventCreate(2), driver.cuEventCreate(2)
        driver.cuMemAlloc(64), driver.cuMemCreate(2 << 20, driver.prop(), 0)
        driver.cuDeviceGetDefaultMemPool(0)
        with tempfile.TemporaryFile() as file:
            before = os.dup(2)
            os.dup2(file.fileno(), 2)
            host.shutdown()
            os.dup2(before, 2)
            file.seek(0)
            told = file.read().decode()
        expected = "left at the end: streams: 1, events: 2, allocations: 1, physical handles: 1"
        assert told == f"gpumem host device: {expected}\\n", told
        assert host.misuse_report().decode() == expected
        assert host.misuse_count(3) == 5
    """)


def test_shutdown_without_leaks_reports_nothing(child):
    child("""
        host.find_misuse(1)
        stream, pointer = driver.cuStreamCreate(1), driver.cuMemAlloc(64)
        driver.cuMemsetD8Async(pointer, 1, 64, stream)
        driver.cuMemFree(pointer)
        driver.cuStreamDestroy(stream)
        host.shutdown()
        assert host.misuse_count(3) == 0
    """)
