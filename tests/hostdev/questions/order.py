"""Who waits for whom."""

from __future__ import annotations

import ctypes
import mmap

from drivers import BLOCK

from questions.common import LEGACY, PER_THREAD, question, waits


@question
def streams_that_a_question_covers(driver):
    answers = {}
    pairs = {
        "blocking": lambda: driver.stream(0),
        "non-blocking": lambda: driver.stream(1),
        "legacy": lambda: LEGACY,
        "per-thread": lambda: PER_THREAD,
    }
    for held, make in pairs.items():
        for asked, make_other in pairs.items():
            if held == asked:
                continue
            gate, other = driver.gate(make()), make_other()
            answers[f"{held} held, {asked} asked"] = driver.error("cuStreamQuery", other)
            gate.open()
            driver.cuCtxSynchronize()
    gate = driver.gate(driver.stream(0))
    wait = waits(driver, gate, lambda: driver.error("cuStreamSynchronize", LEGACY))
    answers["blocking held, legacy synchronized"] = wait
    return answers


@question
def order_through_the_legacy_stream(driver):
    answers = {}
    pointer = driver.memory(16)

    def state(name, stream):
        answers[name] = driver.error("cuStreamQuery", stream)

    first, second = driver.stream(0), driver.stream(0)
    gate = driver.gate(first)
    driver.cuMemsetD8Async(pointer, 1, 16, LEGACY)
    state("a blocking stream idle while legacy work waits for another", second)
    driver.cuMemsetD8Async(pointer, 1, 16, second)
    state("its work queued after that legacy work", second)
    gate.open()
    driver.cuCtxSynchronize()

    for name, held, recorded in (
        ("legacy event, blocking held", driver.stream(0), LEGACY),
        ("blocking event, legacy held", LEGACY, driver.stream(0)),
        ("non-blocking event, legacy held", LEGACY, driver.stream(1)),
    ):
        event, gate = driver.event(), driver.gate(held)
        driver.cuEventRecord(event, recorded)
        answers[name] = driver.error("cuEventQuery", event)
        gate.open()
        driver.cuCtxSynchronize()

    stream, other, event = driver.stream(0), driver.stream(1), driver.event()
    gate = driver.gate(stream)
    driver.cuEventRecord(event, LEGACY)
    driver.cuStreamWaitEvent(other, event, 0)
    state("non-blocking stream behind an event of the empty legacy stream", other)
    gate.open()
    driver.cuCtxSynchronize()

    first, second = driver.stream(0), driver.stream(0)
    gate = driver.gate(other)
    driver.cuEventRecord(event, other)
    driver.cuStreamWaitEvent(LEGACY, event, 0)
    driver.cuMemsetD8Async(pointer, 1, 16, first)
    state("blocking work after the legacy stream was told to wait", first)
    gate.open()
    driver.cuCtxSynchronize()
    return answers


@question
def calls_that_wait_for_queued_work(driver):
    answers = {}
    area = mmap.mmap(-1, 64 * 4096)
    pages = ctypes.addressof(ctypes.c_char.from_buffer(area))
    reserved, handle = driver.reserve(4 * BLOCK), driver.physical()
    driver.cuMemMap(reserved, BLOCK, 0, handle, 0)
    driver.cuMemSetAccess(reserved, BLOCK, [driver.access()], 1)
    driver.cuMemHostRegister(pages, 8 * 4096, 0)
    pinned, device = int(driver.cuMemHostAlloc(4096, 0)), int(driver.cuMemAlloc(4096))
    large, managed = int(driver.cuMemAlloc(32 * BLOCK)), int(driver.cuMemAllocManaged(4096, 1))
    idle, busy = driver.cuStreamCreate(1), driver.stream()
    pooled, event = int(driver.cuMemAllocAsync(4096, idle)), driver.cuEventCreate(2)
    driver.cuStreamSynchronize(idle)
    pool = driver.cuDeviceGetDefaultMemPool(0)
    calls = {
        "cuMemFree, small": ("cuMemFree", device),
        "cuMemFree, large": ("cuMemFree", large),
        "cuMemFree, managed": ("cuMemFree", managed),
        "cuMemFree, pool": ("cuMemFree", pooled),
        "cuMemFreeHost": ("cuMemFreeHost", pinned),
        "cuMemHostUnregister": ("cuMemHostUnregister", pages),
        "cuMemAlloc": ("cuMemAlloc", 64 * BLOCK),
        "cuMemHostAlloc": ("cuMemHostAlloc", 1 << 16, 0),
        "cuMemHostRegister": ("cuMemHostRegister", pages + 16 * 4096, 4096, 0),
        "cuMemUnmap": ("cuMemUnmap", reserved, BLOCK),
        "cuMemRelease": ("cuMemRelease", handle),
        "cuMemPoolTrimTo": ("cuMemPoolTrimTo", pool, 0),
        "cuStreamCreate": ("cuStreamCreate", 1),
        "cuStreamDestroy, idle": ("cuStreamDestroy", idle),
        "cuEventDestroy": ("cuEventDestroy", event),
        "cuCtxSynchronize": ("cuCtxSynchronize",),
    }
    for name, call in calls.items():
        gate = driver.gate(busy)
        answers[name] = waits(driver, gate, lambda call=call: driver.error(*call))
        driver.cuCtxSynchronize()
    for name, action in (("cuStreamDestroy, held", "cuStreamDestroy"),):
        stream = driver.cuStreamCreate(1)
        gate = driver.gate(stream)
        answers[name] = waits(driver, gate, lambda s=stream, a=action: driver.error(a, s))
        driver.cuCtxSynchronize()
    return answers


@question
def copies_that_wait(driver):
    answers = {}
    size = 1 << 20
    device, other = driver.memory(size), driver.memory(size)
    pinned, pinned_too = driver.pinned(size), driver.pinned(size)
    plain = ctypes.create_string_buffer(size)
    pageable = ctypes.addressof(plain)
    managed = int(driver.cuMemAllocManaged(size, 1))
    ends = {"device": device, "pinned": pinned, "pageable": pageable}
    targets = {"device": other, "pinned": pinned_too, "pageable": pageable}

    def ask(name, stream, *call):
        gate = driver.gate(stream)
        answers[name] = waits(driver, gate, lambda: driver.error(*call))
        driver.cuCtxSynchronize()

    for source, at in ends.items():
        for target, to in targets.items():
            if at == to:
                continue
            what = f"{source} to {target}"
            stream = driver.stream()
            ask(f"async {what}", stream, "cuMemcpyAsync", to, at, size, stream)
            ask(f"sync {what}", LEGACY, "cuMemcpy", to, at, size)
    stream = driver.stream()
    ask("async pageable to device, 1 KiB", stream, "cuMemcpyAsync", device, pageable, 1024, stream)
    ask("sync pageable to device, 1 KiB", LEGACY, "cuMemcpyHtoD", device, pageable, 1024)
    ask("sync fill of device", LEGACY, "cuMemsetD8", device, 1, size)
    ask("sync fill of pinned", LEGACY, "cuMemsetD8", pinned, 1, size)
    ask("sync fill of managed", LEGACY, "cuMemsetD8", managed, 1, size)
    stream = driver.stream(0)
    ask("sync device to device, blocking held", stream, "cuMemcpyDtoD", other, device, size)
    ask("sync fill of device, blocking held", stream, "cuMemsetD8", device, 1, size)
    stream = driver.stream(1)
    ask(
        "sync pageable to device, non-blocking held", stream, "cuMemcpyHtoD", device, pageable, size
    )
    return answers
