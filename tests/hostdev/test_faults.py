"""Faults on demand, costs, and the search for misuse. One child per test."""


def test_fault_affects_only_the_named_call(child):
    child("""
        assert host.fail(b"cuMemAlloc", 2, 1, 2) == 0
        driver.cuMemAlloc(16)
        used = host.used(0)
        assert driver.error("cuMemAlloc", 1 << 24) == "OUT_OF_MEMORY"
        assert host.used(0) == used
        driver.cuMemAlloc(16)
    """)


def test_fault_may_be_permanent(child):
    child("""
        host.fail(b"cuMemUnmap", 1, 0, 206)
        pointer = driver.reserve(2 << 20)
        driver.map(pointer, driver.physical())
        for _ in range(5):
            assert driver.error("cuMemUnmap", pointer, 2 << 20) == "UNMAP_FAILED"
        host.clear_faults()
        driver.cuMemUnmap(pointer, 2 << 20)
    """)


def test_any_call_can_be_made_to_fail_by_its_number(child):
    child("""
        host.fail(None, 3, 2, 999)
        results = [driver.error("cuMemGetInfo") for _ in range(6)]
        assert results == ["SUCCESS"] * 2 + ["UNKNOWN"] * 2 + ["SUCCESS"] * 2, results
    """)


def test_fault_for_an_unknown_function_is_refused(child):
    child("assert host.fail(b'cuNothing', 1, 1, 2) != 0")


def test_delayed_event_does_not_delay_its_stream(child):
    child("""
        host.use_virtual_clock(1)
        host.delay_record(2, 1000)
        stream = driver.stream()
        first, second, third = driver.event(), driver.event(), driver.event()
        for event in (first, second, third):
            driver.cuEventRecord(event, stream)
        assert driver.error("cuEventQuery", first) == "SUCCESS"
        assert driver.error("cuEventQuery", second) == "NOT_READY"
        assert driver.error("cuEventQuery", third) == "SUCCESS"
        assert driver.error("cuStreamQuery", stream) == "SUCCESS"
        host.advance_clock(1000)
        assert driver.error("cuEventQuery", second) == "SUCCESS"
    """)


def test_lost_device_answers_its_error_until_its_context_is_gone(child):
    child("""
        stream, pointer = driver.stream(), driver.memory(16)
        assert host.lose_device(0, 719) == 0
        assert driver.error("cuStreamSynchronize", stream) == "LAUNCH_FAILED"
        assert driver.error("cuMemAlloc", 1) == "LAUNCH_FAILED"
        assert driver.error("cuMemFree", pointer) == "LAUNCH_FAILED"
        driver.cuDevicePrimaryCtxRelease(0)
        driver.start()
        driver.cuMemAlloc(1)
    """)


def test_lost_device_ends_what_its_streams_wait_for(child):
    child("""
        import threading
        pointer, streams = driver.pinned(16), [driver.stream() for _ in range(2)]
        event = driver.event()
        driver.cuStreamWaitValue64(streams[0], pointer, 1, 0)
        driver.cuEventRecord(event, streams[0])
        driver.cuStreamWaitEvent(streams[1], event, 0)
        results = []
        threads = [
            threading.Thread(target=lambda it=it: results.append(driver.error(*it)))
            for it in (*(("cuStreamSynchronize", stream) for stream in streams),
                       ("cuEventSynchronize", event))
        ]
        for thread in threads:
            thread.start()
        assert host.lose_device(0, 700) == 0
        for thread in threads:
            thread.join()
        assert results == ["ILLEGAL_ADDRESS"] * 3
    """)


def test_call_costs_advance_the_virtual_clock(child):
    child("""
        from drivers import BLOCK
        host.use_virtual_clock(1)
        pointer = driver.reserve(4 * BLOCK)
        handles = [driver.physical() for _ in range(4)]
        for index, handle in enumerate(handles):
            driver.map(pointer + index * BLOCK, handle)
        host.use_h200_costs(1)
        before = host.now()
        driver.cuMemUnmap(pointer, 4 * BLOCK)
        assert host.now() - before == 4 * 15000
    """)


def test_use_of_freed_memory_is_found(child):
    child("""
        host.find_misuse(1)
        seen = set()
        for _ in range(50):
            pointer = int(driver.cuMemAlloc(100))
            assert pointer not in seen
            seen.add(pointer)
            driver.cuMemFree(pointer)
        assert host.used(0) == 0
        assert host.misuse_count(0) == 0
        assert driver.error("cuMemsetD8", pointer, 1, 100) == "INVALID_VALUE"
        assert host.misuse_count(0) == 1
        assert b"use after free: 100 bytes" in host.misuse_report()
    """)


def test_host_access_to_freed_memory_faults(child):
    child(
        """
        import ctypes
        host.find_misuse(1)
        pointer = int(driver.cuMemAlloc(100))
        driver.cuMemFree(pointer)
        ctypes.string_at(pointer, 1)
        """,
        expect=-11,
    )


def test_use_of_a_freed_pool_block_is_found(child):
    child("""
        host.find_misuse(1)
        stream = driver.stream()
        pointer = driver.cuMemAllocAsync(4096, stream)
        driver.cuMemsetD8Async(pointer, 1, 4096, stream)
        driver.cuMemFreeAsync(pointer, stream)
        assert host.misuse_count(0) == 0
        assert driver.error("cuMemsetD8Async", pointer, 1, 4096, stream) == "INVALID_VALUE"
        assert host.misuse_count(0) == 1
    """)


def test_stream_used_under_another_device_is_found(child):
    child(
        """
        host.set_device_count(2)
        driver.start()
        host.find_misuse(1)
        stream = driver.stream()
        driver.cuStreamQuery(stream)
        assert host.misuse_count(1) == 0
        driver.cuCtxPushCurrent(driver.cuDevicePrimaryCtxRetain(1))
        driver.cuStreamQuery(stream)
        assert host.misuse_count(1) == 1
        driver.cuCtxPopCurrent()
        """,
        start=False,
    )


def test_last_fault_is_the_function_that_failed(child):
    child("""
        assert host.last_fault() == b""
        host.fail(None, 2, 1, 999)
        driver.cuMemGetInfo()
        assert host.last_fault() == b""
        driver.error("cuCtxSynchronize")
        assert host.last_fault() == b"cuCtxSynchronize"
        host.clear_faults()
        assert host.last_fault() == b""
    """)
