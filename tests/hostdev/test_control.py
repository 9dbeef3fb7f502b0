"""What only the host device has: size, time, counters, fork, end. One child per test."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.child import python

CAPACITY = "GPUMEM_HOST_CAPACITY"


def test_capacity_is_enforced_and_given_back(child):
    child("""
        from drivers import BLOCK
        assert host.set_capacity(0, 8 * BLOCK) == 0
        assert driver.cuMemGetInfo() == (8 * BLOCK, 8 * BLOCK)
        pointers = [driver.cuMemAlloc(2 * BLOCK) for _ in range(4)]
        assert driver.error("cuMemAlloc", 1) == "OUT_OF_MEMORY"
        assert driver.error("cuMemCreate", BLOCK, driver.prop(), 0) == "OUT_OF_MEMORY"
        stream = driver.stream()
        assert driver.error("cuMemAllocAsync", 1, stream) == "OUT_OF_MEMORY"
        driver.cuMemFree(pointers.pop())
        driver.cuMemAlloc(2 * BLOCK)
    """)


def test_free_bytes_count_what_other_processes_use():
    script = """
import gpumem
with open("/proc/meminfo") as file:
    kib = {line.split(":")[0]: int(line.split()[1]) for line in file}
free, total = gpumem.Device("host").free_bytes, gpumem.Device("host").total_bytes
used = (kib["MemTotal"] - kib["MemAvailable"]) << 10
assert total - free > used // 2, (total, free, used)
gpumem.replay.replay("multistream_train", "host")       # on a larger device, until it has ended
free, again = gpumem.Device("host").free_bytes, gpumem.Device("host").total_bytes
assert again == total and total - free > used // 2, (total, free, used)
"""
    python("-c", script, env={CAPACITY: None})


FIRST = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
SECOND = ("", "memory.max", "memory.current", "")


def write_group(folder, limit, used, cached, version=SECOND):
    _, limit_name, used_name, prefix = version
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / used_name).write_text(f"{used}\n")
    # Of the first version these lines count the group alone, and those with a prefix what is below.
    stat = f"inactive_file {cached // 2}\n{prefix}inactive_file {cached // 2}\nanon 12345\n"
    (folder / "memory.stat").write_text(stat + f"{prefix}active_file {cached - cached // 2}\n")


FREE_OF_GROUPS = """
import sys, gpumem
from gpumem._testing import host_device
host_device.use_control_groups(sys.argv[1])
device = gpumem.Device("host")
print(device.total_bytes, device.free_bytes)
"""


def free_of_groups(folder):
    """Return the bytes in all and the free bytes, as a fresh process sees them."""
    done = python("-c", FREE_OF_GROUPS, folder, env={CAPACITY: None})
    return tuple(map(int, done.stdout.split()))


@pytest.mark.parametrize("version", [FIRST, SECOND], ids=["first", "second"])
def test_free_bytes_count_what_others_of_the_control_group_use(tmp_path, version):
    mib = 1 << 20
    write_group(tmp_path / version[0], 100 * mib, 70 * mib, 10 * mib, version)
    assert free_of_groups(tmp_path) == (100 * mib, 40 * mib)
    write_group(tmp_path / version[0], 100 * mib, 120 * mib, 10 * mib, version)
    assert free_of_groups(tmp_path) == (100 * mib, 1)


def test_free_bytes_count_the_groups_above_the_process_own(tmp_path):
    own = next(
        (
            line.strip().split(":", 2)[2].strip("/")
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if ":memory:" in line or line.startswith("0::")
        ),
        "",
    )
    version = FIRST if ":memory:" in Path("/proc/self/cgroup").read_text() else SECOND
    top = tmp_path / version[0]
    write_group(top, 90 << 20, 80 << 20, 0, version)
    write_group(top / own, 100 << 20, 10 << 20, 0, version)
    expected = 10 << 20 if own else 90 << 20
    assert free_of_groups(tmp_path) == ((90 if own else 100) << 20, expected)


def test_control_groups_without_a_limit_leave_the_machines_memory(tmp_path):
    without, _ = free_of_groups(tmp_path)
    write_group(tmp_path, "max", 70 << 20, 0)
    write_group(tmp_path / "memory", (1 << 63) - 4096, 70 << 20, 0, FIRST)
    total, free = free_of_groups(tmp_path)
    assert total == without
    assert free > 70 << 20


def test_capacity_comes_from_the_environment(child):
    child("assert driver.cuDeviceTotalMem(0) == 123456789", GPUMEM_HOST_CAPACITY="123456789")


@pytest.mark.parametrize("device", ["Device('host')", "devices()[-1]"])
def test_capacity_in_the_environment_takes_a_unit_before_any_first_call(device):
    script = f"import gpumem; print(gpumem.{device}.total_bytes)"
    done = python("-c", script, env={CAPACITY: "1.5GiB"})
    assert (done.stdout, done.stderr) == (f"{3 << 29}\n", "")


@pytest.mark.parametrize(
    "value", ["-5", "+5", " 5", "5 ", "5k", "0", "x", "²", "9" * 30, "9" * 5000]
)
def test_invalid_capacity_in_the_environment_is_ignored_with_a_warning(value):
    script = """
import warnings, gpumem
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    total = gpumem.Device("host").total_bytes
assert [one.category for one in caught] == [gpumem.errors.ConfigWarning], caught
assert "invalid GPUMEM_HOST_CAPACITY = " in str(caught[0].message)
assert 1 << 20 < total < 1 << 60, total
"""
    python("-c", script, env={CAPACITY: value})


def test_untouched_memory_costs_nothing(child):
    child("""
        from pathlib import Path
        driver.cuMemAlloc(8 << 30) if host.capacity(0) > 9 << 30 else None
        driver.cuMemHostAlloc(8 << 30, 0)
        # Not getrusage: it counts what the process had before exec, which is the parent's memory.
        status = Path("/proc/self/status").read_text()
        most = int(status.split("VmHWM:")[1].split()[0])
        assert most < 1 << 20, f"{most} KiB"
    """)


def test_several_devices_have_their_own_memory(child):
    child(
        """
        assert host.set_device_count(3) == 0
        driver.start()
        assert driver.cuDeviceGetCount() == 3
        free = driver.cuMemGetInfo()[0]
        second = driver.cuDevicePrimaryCtxRetain(1)
        driver.cuCtxPushCurrent(second)
        pointer = driver.cuMemAlloc(1 << 22)
        # Not the ordinal: cuda-bindings 13.3 reads it as 0 of any memory.
        name = driver.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT
        assert int(driver.cuPointerGetAttribute(name, pointer)) == int(second)
        driver.cuCtxPopCurrent()
        assert driver.cuMemGetInfo()[0] == free
        assert driver.cuDeviceCanAccessPeer(0, 1) == 1
        driver.cuCtxEnablePeerAccess(second, 0)
        assert driver.error("cuCtxEnablePeerAccess", second, 0) == "PEER_ACCESS_ALREADY_ENABLED"
        driver.cuCtxDisablePeerAccess(second)
        assert driver.error("cuCtxDisablePeerAccess", second) == "PEER_ACCESS_NOT_ENABLED"
        mine = driver.memory(16)
        driver.write(mine, b"p" * 16)
        driver.cuMemcpyPeer(pointer, second, mine, driver.context, 16)
        driver.cuCtxSynchronize()
        assert driver.read(int(pointer), 16) == b"p" * 16
        assert host.set_device_count(2) != 0
        """,
        start=False,
    )


def test_calls_before_init_are_refused(child):
    child(
        """
        assert driver.error("cuDeviceGetCount") == "NOT_INITIALIZED"
        assert driver.error("cuMemAlloc", 1) == "NOT_INITIALIZED"
        driver.start()
        driver.cuMemAlloc(1)
        """,
        start=False,
    )


def test_released_context_destroys_its_objects(child):
    child("""
        stream, event = driver.cuStreamCreate(1), driver.cuEventCreate(0)
        pointer = driver.cuMemAlloc(1 << 22)
        driver.cuMemAlloc(100)
        gate = driver.gate(stream)
        driver.cuMemsetD8Async(pointer, 1, 1 << 22, stream)
        driver.cuDevicePrimaryCtxRelease(0)
        assert host.used(0) == 0
        assert driver.error("cuMemAlloc", 1) == "CONTEXT_IS_DESTROYED"
        driver.start()
        assert driver.error("cuStreamQuery", stream) == "INVALID_HANDLE"
        assert driver.error("cuEventQuery", event) == "INVALID_HANDLE"
        live = host.alive()
        assert (live.streams, live.events, live.allocations) == (0, 0, 0)
    """)


def test_calls_are_counted_by_name(child):
    child("""
        host.reset_counts()
        driver.error("cuMemAlloc", 0)
        driver.cuMemGetInfo()
        driver.cuMemGetInfo()
        assert (host.count("cuMemAlloc"), host.count("cuMemGetInfo")) == (1, 2)
        assert host.total_calls() == 3
        assert host.count("cuNothing") == 2**64 - 1
    """)


def test_ten_thousand_streams_leave_nothing_behind(child):
    child("""
        import os, threading
        pointer = driver.memory(1)
        for _ in range(10_000):
            stream = driver.cuStreamCreate(1)
            driver.cuMemsetD8Async(pointer, 1, 1, stream)
            driver.cuStreamDestroy(stream)
        driver.cuCtxSynchronize()
        while host.alive().workers:
            pass
        assert host.alive().streams == 0
        while len(os.listdir("/proc/self/task")) > threading.active_count():
            pass        # a worker counts itself out a moment before its thread is gone
    """)


def test_host_function_may_not_call_the_driver(child):
    child("""
        import ctypes
        seen = []
        call = lambda _: seen.append(driver.error("cuMemAlloc", 1))
        thunk = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(call)
        function = driver.api.CUhostFn(ctypes.cast(thunk, ctypes.c_void_p).value)
        stream = driver.stream()
        driver.cuLaunchHostFunc(stream, function, 0)
        driver.cuStreamSynchronize(stream)
        assert seen == ["NOT_PERMITTED"], seen
    """)


# ---- time ----


def test_lag_delays_the_end_of_work(child):
    child("""
        host.set_lag(20_000_000)
        stream, start, end = driver.stream(), driver.event(0), driver.event(0)
        pointer = driver.memory(16)
        enqueued = host.now()
        driver.cuMemsetD8Async(pointer, 1, 16, stream)
        event = driver.event()
        driver.cuEventRecord(event, stream)
        late = driver.error("cuEventQuery", event) == "NOT_READY"
        assert late or host.now() > enqueued + 20_000_000
        driver.cuStreamSynchronize(stream)
        assert host.now() >= enqueued + 20_000_000
    """)


def test_virtual_clock_decides_when_an_idle_streams_event_completes(child):
    child("""
        host.use_virtual_clock(1)
        host.set_lag(1000)
        stream, event = driver.stream(), driver.event()
        for _ in range(100):
            driver.cuEventRecord(event, stream)
            assert driver.error("cuEventQuery", event) == "NOT_READY"
            host.advance_clock(999)
            assert driver.error("cuEventQuery", event) == "NOT_READY"
            assert driver.error("cuStreamQuery", stream) == "NOT_READY"
            host.advance_clock(1)
            assert driver.error("cuEventQuery", event) == "SUCCESS"
            assert driver.error("cuStreamQuery", stream) == "SUCCESS"
        assert host.alive().workers == 0
    """)


def test_virtual_clock_decides_when_queued_work_is_done(child):
    child("""
        host.use_virtual_clock(1)
        host.set_lag(1000)
        stream, pinned = driver.stream(), driver.pinned(1)
        byte = __import__("ctypes").c_uint8.from_address(pinned)
        for value in range(1, 100):
            driver.cuMemsetD8Async(pinned, value, 1, stream)
            host.advance_clock(999)
            assert driver.error("cuStreamQuery", stream) == "NOT_READY"
            assert byte.value == value - 1
            host.advance_clock(1)
            assert driver.error("cuStreamQuery", stream) == "SUCCESS"
            assert byte.value == value
    """)


def test_waiting_advances_the_virtual_clock_to_the_end_of_the_work(child):
    child("""
        host.use_virtual_clock(1)
        host.set_lag(1000)
        first, second, event = driver.stream(), driver.stream(), driver.event()
        pointer = driver.memory(16)
        begin = host.now()
        driver.cuMemsetD8Async(pointer, 1, 16, first)
        driver.cuEventRecord(event, first)
        host.advance_clock(10)
        driver.cuStreamWaitEvent(second, event, 0)
        driver.cuMemsetD8Async(pointer, 2, 16, second)
        driver.cuStreamSynchronize(second)
        assert host.now() == begin + 1010, host.now() - begin
        assert driver.error("cuStreamQuery", first) == "SUCCESS"
    """)


def test_one_query_resolves_a_chain_of_streams_on_the_virtual_clock(child):
    child("""
        host.use_virtual_clock(1)
        host.set_lag(1000)
        pointer = driver.memory(16)
        streams = [driver.stream() for _ in range(6)]
        for _ in range(30):
            event = None
            for stream in streams:
                if event is not None:
                    driver.cuStreamWaitEvent(stream, event, 0)
                driver.cuMemsetD8Async(pointer, 1, 16, stream)
                event = driver.event()
                driver.cuEventRecord(event, stream)
            assert driver.error("cuStreamQuery", streams[-1]) == "NOT_READY"
            host.advance_clock(1000)
            assert driver.error("cuStreamQuery", streams[-1]) == "SUCCESS"
    """)


def test_event_times_use_the_virtual_clock(child):
    child("""
        host.use_virtual_clock(1)
        stream, start, end = driver.stream(), driver.event(0), driver.event(0)
        driver.cuEventRecord(start, stream)
        host.advance_clock(5_000_000)
        driver.cuEventRecord(end, stream)
        assert driver.cuEventElapsedTime(start, end) == 5.0
    """)


# ---- the end ----


def test_calls_after_shutdown_are_refused(child):
    child("""
        stream = driver.stream()
        host.shutdown()
        assert driver.error("cuStreamSynchronize", stream) == "DEINITIALIZED"
        assert driver.error("cuMemAlloc", 1) == "DEINITIALIZED"
        assert driver.error("cuInit", 0) == "DEINITIALIZED"
    """)


def test_shutdown_ends_workers_that_are_blocked_or_have_work_queued(child):
    child("""
        pointer, other = driver.memory(1 << 30), driver.memory(16)
        blocked, follower, busy = driver.stream(), driver.stream(), driver.stream()
        event = driver.event()
        driver.gate(blocked)
        driver.cuEventRecord(event, blocked)
        driver.cuStreamWaitEvent(follower, event, 0)
        driver.cuMemsetD8Async(other, 1, 16, follower)
        driver.cuMemsetD8Async(pointer, 1, 1 << 30, busy)
        assert host.alive().workers == 3
        host.shutdown()
        assert host.alive().workers == 0
    """)


def test_shutdown_wakes_synchronizing_threads(child):
    child("""
        import threading
        stream, results = driver.stream(), []
        driver.gate(stream)
        def wait():
            driver.cuCtxSetCurrent(driver.context)
            results.append(driver.error("cuStreamSynchronize", stream))
        thread = threading.Thread(target=wait)
        thread.start()
        while host.count("cuStreamSynchronize") == 0:
            pass
        host.shutdown()
        thread.join()
        assert results == ["DEINITIALIZED"]
    """)


def test_process_exits_with_queued_work(child):
    child("""
        stream = driver.cuStreamCreate(1)
        gate = driver.gate(stream)
        for _ in range(100):
            driver.cuMemsetD8Async(gate.address, 0, 8, stream)
    """)


# ---- fork ----

FORK = """
import os
def in_child(check):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            check()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
"""


def test_forked_child_starts_with_an_empty_device(child):
    child(
        FORK
        + """
stream, event = driver.cuStreamCreate(1), driver.cuEventCreate(2)
pointer = driver.cuMemAlloc(1 << 24)
gate = driver.gate(stream)
driver.cuEventRecord(event, stream)
used = host.used(0)
def check():
    assert driver.error("cuMemAlloc", 1) == "INVALID_CONTEXT"
    assert driver.error("cuCtxSetCurrent", driver.context) == "INVALID_CONTEXT"
    driver.start()
    assert host.used(0) == 0 and host.alive().workers == 0
    assert driver.error("cuStreamQuery", stream) == "INVALID_HANDLE"
    assert driver.error("cuStreamDestroy", stream) == "INVALID_HANDLE"
    assert driver.error("cuEventQuery", event) == "INVALID_HANDLE"
    assert driver.error("cuMemFree", pointer) == "INVALID_VALUE"
    mine, fresh = driver.cuStreamCreate(1), int(driver.cuMemAlloc(1 << 20))
    driver.cuMemsetD8Async(fresh, 3, 1 << 20, mine)
    driver.cuStreamSynchronize(mine)
    assert driver.read(fresh, 4) == b"\\x03" * 4
in_child(check)
assert driver.error("cuStreamQuery", stream) == "NOT_READY"
assert host.used(0) == used
gate.open()
driver.cuStreamSynchronize(stream)
"""
    )


def test_forked_child_uses_the_parents_memory_without_changing_it(child):
    child(
        FORK
        + """
import ctypes
from drivers import BLOCK
pinned, device = driver.pinned(4096), driver.memory(4096)
ctypes.memset(pinned, 1, 4096)
driver.write(device, b"d" * 4096)
mapped = driver.reserve(BLOCK)
driver.map(mapped, driver.physical())
driver.write(mapped, b"m" * 4096)
def check():
    assert ctypes.string_at(device, 4) == b"dddd" and ctypes.string_at(mapped, 4) == b"mmmm"
    for copied in (pinned, device, mapped):
        ctypes.memset(copied, 2, 4096)
        assert ctypes.string_at(copied, 4096) == b"\\x02" * 4096
    driver.start()
    again = driver.reserve(BLOCK)
    driver.map(again, driver.physical())
    driver.write(again, b"n" * 4096)
in_child(check)
assert ctypes.string_at(pinned, 4) == b"\\x01" * 4
assert driver.read(device, 4096) == b"d" * 4096
assert driver.read(mapped, 4096) == b"m" * 4096
"""
    )


def test_forking_while_threads_use_the_device_is_safe(child):
    child(
        FORK
        + """
import threading
stop = threading.Event()
def churn():
    driver.cuCtxSetCurrent(driver.context)
    stream = driver.cuStreamCreate(1)
    while not stop.is_set():
        pointer = driver.cuMemAlloc(4096)
        driver.cuMemsetD8Async(pointer, 1, 4096, stream)
        driver.cuMemFree(pointer)
threads = [threading.Thread(target=churn) for _ in range(3)]
for thread in threads:
    thread.start()
def check():
    driver.start()
    stream, pointer = driver.cuStreamCreate(1), driver.cuMemAlloc(4096)
    driver.cuMemsetD8Async(pointer, 1, 4096, stream)
    driver.cuStreamSynchronize(stream)
for _ in range(20):
    in_child(check)
stop.set()
for thread in threads:
    thread.join()
"""
    )


# ---- memory that is no longer there ----


def test_queued_work_on_unmapped_memory_fails_typed_and_sticks(child):
    child("""
        from drivers import BLOCK
        pointer, handle, stream = driver.reserve(BLOCK), driver.physical(), driver.stream()
        driver.cuMemMap(pointer, BLOCK, 0, handle, 0)
        driver.cuMemSetAccess(pointer, BLOCK, [driver.access()], 1)
        gate = driver.gate(stream)
        driver.cuMemsetD8Async(pointer, 1, BLOCK, stream)
        driver.cuMemUnmap(pointer, BLOCK)
        gate.open()
        assert driver.error("cuStreamSynchronize", stream) == "ILLEGAL_ADDRESS"
        assert driver.error("cuMemAlloc", 1) == "ILLEGAL_ADDRESS"
    """)


def test_unmapped_hole_is_inaccessible(child):
    child(
        """
        import ctypes
        from drivers import BLOCK
        pointer = driver.reserve(2 * BLOCK)
        driver.cuMemMap(pointer, BLOCK, 0, driver.physical(), 0)
        driver.cuMemSetAccess(pointer, BLOCK, [driver.access()], 1)
        ctypes.memset(pointer, 1, BLOCK)
        driver.cuMemUnmap(pointer, BLOCK)
        ctypes.string_at(pointer, 1)
        """,
        expect=-11,
    )


# ---- pools between processes ----


def test_another_process_maps_a_pools_pointer_and_cannot_allocate_there(child):
    child(
        FORK
        + """
import ctypes
from drivers import BLOCK
api = driver.api
kind = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
props = api.CUmemPoolProps()
props.allocType = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
props.handleTypes = kind
props.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
pool, stream = driver.cuMemPoolCreate(props), driver.stream()
first = int(driver.cuMemAllocFromPoolAsync(1000, pool, stream))
pointer = int(driver.cuMemAllocFromPoolAsync(5000, pool, stream))
driver.cuMemsetD8Async(pointer, 7, 5000, stream)
driver.cuStreamSynchronize(stream)
descriptor = int(driver.cuMemPoolExportToShareableHandle(pool, kind, 0))
note = driver.cuMemPoolExportPointer(pointer)
def check():
    driver.start()
    imported = driver.cuMemPoolImportFromShareableHandle(descriptor, kind, 0)
    mine = driver.cuStreamCreate(1)
    assert driver.error("cuMemAllocFromPoolAsync", 16, imported, mine) == "INVALID_VALUE"
    here = int(driver.cuMemPoolImportPointer(imported, note))
    assert int(driver.cuMemPoolImportPointer(imported, note)) == here
    assert driver.read(here, 5000) == b"\\x07" * 5000
    driver.write(here, b"child")
    driver.cuMemFreeAsync(here, mine)
    driver.cuStreamSynchronize(mine)
    assert driver.error("cuMemcpyDtoH", bytearray(1), here, 1) == "INVALID_VALUE"
in_child(check)
assert driver.read(pointer, 5) == b"child"
driver.cuMemFreeAsync(pointer, stream)
driver.cuMemFreeAsync(first, stream)
driver.cuMemPoolDestroy(pool)
"""
    )


# ---- each thread's own default stream ----

PER_THREAD = {"CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM": "1"}


def test_null_stream_is_per_thread_on_request(child):
    child(
        """
        from drivers import in_thread
        pointer, other = driver.memory(4096), driver.memory(4096)
        gate = driver.gate(0)
        driver.cuMemsetD8Async(pointer, 3, 4096, 0)
        assert driver.error("cuStreamQuery", 0) == "NOT_READY"
        assert driver.error("cuStreamQuery", 2) == "NOT_READY"
        def in_another():
            driver.cuCtxSetCurrent(driver.context)
            driver.cuMemsetD8Async(other, 4, 4096, 0)
            driver.cuStreamSynchronize(0)
            return driver.read(other, 4096)
        assert in_thread(in_another) == b"\\x04" * 4096
        gate.open()
        assert driver.read(pointer, 4096) == b"\\x03" * 4096
        assert driver.error("cuStreamQuery", 0) == "SUCCESS"
        """,
        **PER_THREAD,
    )


def test_null_stream_is_the_legacy_stream_by_default(child):
    child("""
        gate = driver.gate(0)
        assert driver.error("cuStreamQuery", 1) == "NOT_READY"
        assert driver.error("cuStreamQuery", 2) == "SUCCESS"
        gate.open()
    """)
