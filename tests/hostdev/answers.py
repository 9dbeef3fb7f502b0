"""What a driver answers where documentation is silent: the same questions to any driver.

    GPUMEM_TEST_DRIVER=cuda python3 tests/hostdev/answers.py > answers.json

asks the machine's own driver. ``answers_h200.json`` holds what an H200 said; a test asks
the host device and compares. Each question runs in a process of its own, because some
answers leave the context unusable.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import json
import mmap
import os
import subprocess
import sys
import threading

import drivers
from drivers import BLOCK, GEQ

LEGACY, PER_THREAD = 1, 2
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
NOTE_BYTES = 64  # of an exported pool pointer
QUESTIONS: dict = {}


def question(function):
    QUESTIONS[function.__name__] = function
    return function


def waits(driver, gate, call) -> str:
    """Whether `call` comes back while the gate is closed. Opens it. A second is for ever."""
    result: list = []

    def run() -> None:
        driver.error("cuCtxSetCurrent", driver.context)
        result.append(call())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(1.0)
    waited = thread.is_alive()
    gate.open()
    thread.join()
    answer = result[0] if isinstance(result[0], str) else "SUCCESS"
    return ("waits" if waited else "returns") + ("" if answer == "SUCCESS" else f", {answer}")


# ---- who waits for whom ----


@question
def streams_that_a_question_covers(driver):
    answers = {}
    pairs = {"blocking": lambda: driver.stream(0), "non-blocking": lambda: driver.stream(1),
             "legacy": lambda: LEGACY, "per-thread": lambda: PER_THREAD}
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

    for name, held, recorded in (("legacy event, blocking held", driver.stream(0), LEGACY),
                                 ("blocking event, legacy held", LEGACY, driver.stream(0)),
                                 ("non-blocking event, legacy held", LEGACY, driver.stream(1))):
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
    ask("sync pageable to device, non-blocking held", stream, "cuMemcpyHtoD", device, pageable, size)
    return answers


# ---- virtual memory ----


@question
def mapping(driver):
    answers = {}

    def ask(name, *call):
        answers[name] = driver.error(*call)

    big, one = driver.reserve(16 * BLOCK), driver.physical()
    two = driver.physical(2 * BLOCK)
    ask("prefix of a handle", "cuMemMap", big, BLOCK, 0, two, 0)
    driver.error("cuMemUnmap", big, BLOCK)
    ask("more than the handle", "cuMemMap", big, 2 * BLOCK, 0, one, 0)
    driver.error("cuMemUnmap", big, 2 * BLOCK)
    ask("whole handle at an odd block", "cuMemMap", big + 3 * BLOCK, 2 * BLOCK, 0, two, 0)
    driver.error("cuMemUnmap", big + 3 * BLOCK, 2 * BLOCK)
    ask("unreserved address", "cuMemMap", big + (1 << 40), BLOCK, 0, one, 0)
    ask("size of no whole block", "cuMemMap", big, 4096, 0, one, 0)
    ask("address between blocks", "cuMemMap", big + 4096, BLOCK, 0, one, 0)
    ask("at an offset that is no block", "cuMemMap", big, BLOCK, 4096, two, 0)
    ask("flags", "cuMemMap", big, BLOCK, 0, one, 1)
    ask("past the end of a large reservation", "cuMemMap", big + 15 * BLOCK, 2 * BLOCK, 0, two, 0)
    driver.error("cuMemUnmap", big + 15 * BLOCK, 2 * BLOCK)
    driver.cuMemMap(big, BLOCK, 0, one, 0)
    ask("over a mapping", "cuMemMap", big, BLOCK, 0, driver.physical(), 0)
    ask("over the second half", "cuMemMap", big + BLOCK, 2 * BLOCK, 0, two, 0)
    ask("overlapping from below", "cuMemMap", big + 0, 2 * BLOCK, 0, two, 0)
    driver.error("cuMemUnmap", big, 3 * BLOCK)
    ask("a handle twice, first", "cuMemMap", big + 8 * BLOCK, BLOCK, 0, one, 0)
    ask("a handle twice, second", "cuMemMap", big + 9 * BLOCK, BLOCK, 0, one, 0)
    return answers


@question
def unmapping(driver):
    answers = {}
    base = driver.reserve(64 * BLOCK)

    def ask(name, *call):
        answers[name] = driver.error(*call)

    def mapped(*places):
        for place in places:
            driver.cuMemMap(base + place * BLOCK, BLOCK, 0, driver.physical(), 0)

    ask("nothing there", "cuMemUnmap", base, BLOCK)
    mapped(1, 3)
    ask("a gap between two", "cuMemUnmap", base + BLOCK, 3 * BLOCK)
    ask("first of them afterwards", "cuMemMap", base + BLOCK, BLOCK, 0, driver.physical(), 0)
    ask("second of them afterwards", "cuMemMap", base + 3 * BLOCK, BLOCK, 0, driver.physical(), 0)
    driver.error("cuMemUnmap", base, 8 * BLOCK)
    mapped(10, 11)
    ask("a gap before", "cuMemUnmap", base + 9 * BLOCK, 3 * BLOCK)
    mapped(20, 21)
    ask("a gap behind", "cuMemUnmap", base + 20 * BLOCK, 3 * BLOCK)
    driver.cuMemMap(base + 30 * BLOCK, 2 * BLOCK, 0, driver.physical(2 * BLOCK), 0)
    ask("first half", "cuMemUnmap", base + 30 * BLOCK, BLOCK)
    ask("second half", "cuMemUnmap", base + 31 * BLOCK, BLOCK)
    mapped(32)
    ask("second half and its neighbour", "cuMemUnmap", base + 31 * BLOCK, 2 * BLOCK)
    ask("whole after that", "cuMemUnmap", base + 30 * BLOCK, 2 * BLOCK)
    ask("neighbour after that", "cuMemUnmap", base + 32 * BLOCK, BLOCK)
    ask("unreserved", "cuMemUnmap", base + (1 << 40), BLOCK)
    ask("size of no whole block", "cuMemUnmap", base, 4096)
    ask("size zero", "cuMemUnmap", base, 0)
    ask("address between blocks", "cuMemUnmap", base + 4096, BLOCK)
    mapped(40, 42)
    ask("a mapping and a bit", "cuMemUnmap", base + 40 * BLOCK, BLOCK + 4096)
    ask("its address afterwards", "cuMemMap", base + 40 * BLOCK, BLOCK, 0, driver.physical(), 0)
    ask("a bit of a mapping", "cuMemUnmap", base + 42 * BLOCK, 4096)
    ask("that address afterwards", "cuMemMap", base + 42 * BLOCK, BLOCK, 0, driver.physical(), 0)
    mapped(63)
    ask("beyond the reservation", "cuMemUnmap", base + 63 * BLOCK, 1 << 36)
    return answers


@question
def reserving(driver):
    answers = {}

    def ask(name, *call):
        answers[name] = driver.error(*call)

    for size in (1, 4096, BLOCK - 1, BLOCK + 4096):
        ask(f"size {size}", "cuMemAddressReserve", size, 0, 0, 0)
    ask("size zero", "cuMemAddressReserve", 0, 0, 0, 0)
    ask("alignment 4096", "cuMemAddressReserve", BLOCK, 4096, 0, 0)
    ask("alignment 3", "cuMemAddressReserve", BLOCK, 3, 0, 0)
    ask("alignment of 1 GiB", "cuMemAddressReserve", BLOCK, 1 << 30, 0, 0)
    ask("flags", "cuMemAddressReserve", BLOCK, 0, 0, 1)
    pointer = int(driver.cuMemAddressReserve(4 * BLOCK, 0, 0, 0))
    again = int(driver.cuMemAddressReserve(4 * BLOCK, 0, pointer, 0))
    answers["a taken hint is honoured"] = again == pointer
    ask("half freed", "cuMemAddressFree", pointer, 2 * BLOCK)
    ask("second half freed", "cuMemAddressFree", pointer + 2 * BLOCK, 2 * BLOCK)
    ask("freed", "cuMemAddressFree", pointer, 4 * BLOCK)
    ask("freed twice", "cuMemAddressFree", pointer, 4 * BLOCK)
    hinted = int(driver.cuMemAddressReserve(4 * BLOCK, 0, pointer, 0))
    answers["a free hint is honoured"] = hinted == pointer
    driver.cuMemMap(hinted, BLOCK, 0, driver.physical(), 0)
    ask("freed with a mapping", "cuMemAddressFree", hinted, 4 * BLOCK)
    ask("its mapping afterwards", "cuMemUnmap", hinted, BLOCK)
    ask("freed after unmapping", "cuMemAddressFree", hinted, 4 * BLOCK)
    far = int(driver.cuMemAddressReserve(4 * BLOCK, 0, 1 << 44, 0))
    answers["a hint at 16 TiB is honoured"] = far == 1 << 44
    return answers


@question
def handles(driver):
    answers = {}
    api = driver.api

    def ask(name, *call):
        answers[name] = driver.error(*call)

    kind = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    ask("export of one that was not made for it", "cuMemExportToShareableHandle",
        driver.physical(), kind, 0)
    handle = driver.physical(exportable=True)
    descriptor = int(driver.cuMemExportToShareableHandle(handle, kind, 0))
    ask("import", "cuMemImportFromShareableHandle", descriptor, kind)
    ask("import twice", "cuMemImportFromShareableHandle", descriptor, kind)
    other = os.memfd_create("other")
    os.ftruncate(other, BLOCK)
    ask("import of a foreign descriptor", "cuMemImportFromShareableHandle", other, kind)
    ask("import of a closed descriptor", "cuMemImportFromShareableHandle", 999, kind)
    extra = driver.cuMemImportFromShareableHandle(descriptor, kind)
    ask("release of an import", "cuMemRelease", extra)
    ask("retain behind cuMemAlloc", "cuMemRetainAllocationHandle", driver.memory(BLOCK))
    prop = driver.prop(device=7)
    ask("create on no device", "cuMemCreate", BLOCK, prop, 0)
    ask("granularity of no device", "cuMemGetAllocationGranularity", prop,
        api.CUmemAllocationGranularity_flags(0))
    ask("create with flags", "cuMemCreate", BLOCK, driver.prop(), 1)
    _, total = driver.cuMemGetInfo()
    huge = (2 * total) // BLOCK * BLOCK
    ask("create of more than there is", "cuMemCreate", huge, driver.prop(), 0)
    return answers


@question
def access(driver):
    answers = {}
    base = driver.reserve(8 * BLOCK)

    def ask(name, *call):
        answers[name] = driver.error(*call)

    rights = driver.access()
    location = rights.location
    for place in (0, 1, 3):
        driver.cuMemMap(base + place * BLOCK, BLOCK, 0, driver.physical(), 0)
    ask("get before set", "cuMemGetAccess", location, base)
    ask("get where nothing is mapped", "cuMemGetAccess", location, base + 2 * BLOCK)
    ask("set over a gap", "cuMemSetAccess", base, 4 * BLOCK, [driver.access()], 1)
    ask("set where nothing is mapped", "cuMemSetAccess", base + 2 * BLOCK, BLOCK, [driver.access()], 1)
    ask("set over a gap at the end", "cuMemSetAccess", base, 3 * BLOCK, [driver.access()], 1)
    ask("set over a gap at the start", "cuMemSetAccess", base + 2 * BLOCK, 2 * BLOCK, [driver.access()], 1)
    ask("get behind a gap after that", "cuMemGetAccess", location, base + 3 * BLOCK)
    ask("set over two", "cuMemSetAccess", base, 2 * BLOCK, [driver.access()], 1)
    ask("get after set", "cuMemGetAccess", location, base)
    ask("set over a part of a block", "cuMemSetAccess", base, 4096, [driver.access()], 1)
    driver.cuMemMap(base + 4 * BLOCK, 2 * BLOCK, 0, driver.physical(2 * BLOCK), 0)
    ask("set over half of one", "cuMemSetAccess", base + 4 * BLOCK, BLOCK, [driver.access()], 1)
    ask("set of nothing", "cuMemSetAccess", base, 0, [driver.access()], 1)
    ask("set for no device", "cuMemSetAccess", base, BLOCK, [driver.access(device=5)], 1)
    ask("set to none", "cuMemSetAccess", base, BLOCK, [driver.access("NONE")], 1)
    ask("set to read", "cuMemSetAccess", base, BLOCK, [driver.access("READ")], 1)
    ask("set again", "cuMemSetAccess", base, BLOCK, [driver.access()], 1)
    return answers


def _unreachable(driver, prepare):
    """A synchronous copy up, down, a fill, each in a fresh place; then what the context says."""
    pointer, answers = prepare(), {}
    answers["copy up"] = driver.error("cuMemcpyHtoD", pointer, b"x" * 64, 64)
    answers["then synchronize"] = driver.error("cuCtxSynchronize")
    answers["copy down"] = driver.error("cuMemcpyDtoH", bytearray(64), pointer, 64)
    answers["then allocate"] = driver.error("cuMemAlloc", 64)
    return answers


def _unreachable_async(driver, prepare):
    pointer, stream, answers = prepare(), driver.stream(), {}
    answers["async fill"] = driver.error("cuMemsetD8Async", pointer, 1, 64, stream)
    answers["then synchronize"] = driver.error("cuStreamSynchronize", stream)
    answers["then allocate"] = driver.error("cuMemAlloc", 64)
    answers["then query"] = driver.error("cuStreamQuery", stream)
    answers["then query an event"] = driver.error("cuEventQuery", driver.cuEventCreate(2)) if (
        driver.error("cuEventCreate", 2) == "SUCCESS") else "no event"
    answers["then destroy the stream"] = driver.error("cuStreamDestroy", stream)
    answers["then release"] = driver.error("cuDevicePrimaryCtxRelease", 0)
    answers["then retain"] = driver.error("cuDevicePrimaryCtxRetain", 0)
    if answers["then retain"] == "SUCCESS":
        driver.error("cuCtxSetCurrent", driver.cuDevicePrimaryCtxRetain(0))
        answers["then allocate again"] = driver.error("cuMemAlloc", 64)
    return answers


def _places(driver):
    def no_access():
        pointer = driver.reserve(BLOCK)
        driver.cuMemMap(pointer, BLOCK, 0, driver.physical(), 0)
        return pointer

    def reserved():
        return driver.reserve(BLOCK)

    def unmapped():
        pointer = no_access()
        driver.cuMemSetAccess(pointer, BLOCK, [driver.access()], 1)
        driver.cuMemUnmap(pointer, BLOCK)
        return pointer

    def freed():
        pointer = int(driver.cuMemAlloc(64 * BLOCK))
        driver.cuMemFree(pointer)
        return pointer

    def straddling():
        pointer = driver.reserve(2 * BLOCK)
        driver.map(pointer, driver.physical())
        return pointer + BLOCK - 32

    def behind():
        return driver.memory(BLOCK * 2) + 2 * BLOCK - 32

    return {"mapped without access": no_access, "reserved": reserved, "unmapped": unmapped,
            "freed": freed, "over the end of a mapping": straddling,
            "over the end of an allocation": behind}


for _name in ("mapped without access", "reserved", "unmapped", "freed",
              "over the end of a mapping", "over the end of an allocation"):
    QUESTIONS[f"copying to memory {_name}"] = (
        lambda driver, name=_name: _unreachable(driver, _places(driver)[name]))
    QUESTIONS[f"filling memory {_name}"] = (
        lambda driver, name=_name: _unreachable_async(driver, _places(driver)[name]))


@question
def work_queued_before_an_unmap(driver):
    pointer, stream, answers = driver.reserve(BLOCK), driver.stream(), {}
    driver.cuMemMap(pointer, BLOCK, 0, driver.physical(), 0)
    driver.cuMemSetAccess(pointer, BLOCK, [driver.access()], 1)
    gate = driver.gate(stream)
    driver.cuMemsetD8Async(pointer, 1, BLOCK, stream)
    answers["unmap"] = driver.error("cuMemUnmap", pointer, BLOCK)
    gate.open()
    answers["synchronize"] = driver.error("cuStreamSynchronize", stream)
    answers["allocate"] = driver.error("cuMemAlloc", 64)
    return answers


@question
def read_only_access(driver):
    pointer, stream, answers = driver.reserve(BLOCK), driver.stream(), {}
    driver.cuMemMap(pointer, BLOCK, 0, driver.physical(), 0)
    answers["set"] = driver.error("cuMemSetAccess", pointer, BLOCK, [driver.access("READ")], 1)
    answers["read"] = driver.error("cuMemcpyDtoH", bytearray(64), pointer, 64)
    answers["fill"] = driver.error("cuMemsetD8Async", pointer, 1, 64, stream)
    answers["synchronize"] = driver.error("cuStreamSynchronize", stream)
    answers["allocate"] = driver.error("cuMemAlloc", 64)
    return answers


# ---- what a pointer says ----


@question
def pointer_attributes(driver):
    answers = {}
    area = mmap.mmap(-1, 16 * 4096)
    pages = ctypes.addressof(ctypes.c_char.from_buffer(area))
    driver.cuMemHostRegister(pages, 8192, 0)
    stream, base = driver.stream(), driver.reserve(8 * BLOCK)
    driver.map(base, driver.physical(2 * BLOCK), 2 * BLOCK)
    driver.cuMemMap(base + 4 * BLOCK, BLOCK, 0, driver.physical(), 0)
    plain = ctypes.create_string_buffer(64)
    places = {
        "device": driver.memory(5000), "pinned": driver.pinned(5000), "registered": pages,
        "managed": int(driver.cuMemAllocManaged(5000, 1)),
        "pool": int(driver.cuMemAllocAsync(5000, stream)), "mapped": base,
        "mapped without access": base + 4 * BLOCK, "reserved": base + 6 * BLOCK,
        "pageable": ctypes.addressof(plain),
    }
    names = driver.api.CUpointer_attribute
    for place, at in places.items():
        for name in ("CONTEXT", "MEMORY_TYPE", "DEVICE_POINTER", "HOST_POINTER", "SYNC_MEMOPS",
                     "IS_MANAGED", "DEVICE_ORDINAL", "RANGE_START_ADDR", "RANGE_SIZE", "MAPPED",
                     "MEMPOOL_HANDLE", "ACCESS_FLAGS"):
            which = getattr(names, f"CU_POINTER_ATTRIBUTE_{name}")
            try:
                code, value = driver.api.cuPointerGetAttribute(which, at + 8)
            except Exception as error:
                answers[f"{place}: {name}"] = type(error).__name__
                continue
            if int(code) != 0:
                value = code.name.removeprefix("CUDA_ERROR_")
            elif name in ("DEVICE_POINTER", "HOST_POINTER", "RANGE_START_ADDR"):
                value = f"base + {int(value) - at}" if int(value) else 0
            elif name in ("CONTEXT", "MEMPOOL_HANDLE"):
                value = "some" if int(value) else 0
            else:
                value = int(value)
            answers[f"{place}: {name}"] = value
        code, low, size = driver.api.cuMemGetAddressRange(at + 8)
        answers[f"{place}: range"] = (f"base + {int(low) - at}, {size}" if int(code) == 0
                                      else code.name.removeprefix("CUDA_ERROR_"))
    return answers


# ---- a thread without a context ----


@question
def calls_without_a_current_context(driver):
    stream, event, timed = driver.stream(), driver.event(), driver.event(0)
    pointer, other, pinned = driver.memory(4096), driver.memory(4096), driver.pinned(4096)
    area = mmap.mmap(-1, 16 * 4096)
    pages = ctypes.addressof(ctypes.c_char.from_buffer(area))
    driver.cuMemHostRegister(pages, 8192, 0)
    pooled = int(driver.cuMemAllocAsync(4096, stream))
    plain = int(driver.cuMemAlloc(4096))
    free_pinned = int(driver.cuMemHostAlloc(4096, 0))
    doomed, doomed_event = driver.cuStreamCreate(1), driver.cuEventCreate(2)
    driver.cuEventRecord(timed, stream)
    driver.cuStreamSynchronize(stream)
    pool = driver.cuDeviceGetDefaultMemPool(0)
    names = driver.api.CUpointer_attribute
    kind = names.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    graph = driver.cuGraphCreate(0)
    executable = driver.cuGraphInstantiate(graph, 0)
    rights, managed = driver.access(), int(driver.cuMemAllocManaged(1 << 16, 1))
    box = driver.api.CUDA_MEMCPY2D()
    box.srcMemoryType = box.dstMemoryType = driver.api.CUmemorytype(2)
    box.srcDevice, box.dstDevice, box.WidthInBytes, box.Height = other, pointer, 16, 1
    nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    function = driver.api.CUhostFn(ctypes.cast(nothing, ctypes.c_void_p).value)
    calls = [
        ("cuStreamQuery", stream), ("cuStreamSynchronize", stream), ("cuStreamGetFlags", stream),
        ("cuStreamGetPriority", stream), ("cuStreamGetId", stream), ("cuStreamGetCtx", stream),
        ("cuEventRecord", event, stream), ("cuEventQuery", event), ("cuEventSynchronize", event),
        ("cuStreamWaitEvent", stream, event, 0), ("cuEventElapsedTime", timed, timed),
        ("cuMemsetD8Async", pointer, 1, 16, stream), ("cuMemsetD8", pointer, 1, 16),
        ("cuMemcpyDtoDAsync", pointer, other, 16, stream),
        ("cuMemcpyAsync", pointer, pinned, 16, stream),
        ("cuMemcpyHtoD", pointer, b"x" * 16, 16), ("cuMemcpy", pointer, other, 16),
        ("cuLaunchHostFunc", stream, function, 0),
        ("cuStreamWaitValue64", stream, pinned, 0, GEQ),
        ("cuStreamWriteValue64", stream, pinned, 0, 0),
        ("cuMemAllocAsync", 4096, stream), ("cuMemAllocFromPoolAsync", 4096, pool, stream),
        ("cuMemFreeAsync", pooled, stream),
        ("cuMemGetAddressRange", pointer), ("cuPointerGetAttribute", kind, pointer),
        ("cuPointerGetAttributes", 1, [kind], pointer),
        ("cuMemHostGetFlags", pinned), ("cuMemHostGetDevicePointer", pinned, 0),
        ("cuMemHostRegister", pages + 8 * 4096, 4096, 0),
        ("cuMemPoolTrimTo", pool, 0), ("cuCtxSynchronize",), ("cuMemGetInfo",),
        ("cuStreamIsCapturing", stream), ("cuStreamGetCaptureInfo", stream),
        ("cuStreamBeginCapture", stream, driver.api.CUstreamCaptureMode(RELAXED)),
        ("cuStreamEndCapture", stream), ("cuGraphCreate", 0), ("cuGraphInstantiate", graph, 0),
        ("cuMemPrefetchAsync", managed, 1 << 16, rights.location, 0, stream),
        ("cuMemAdvise", managed, 1 << 16, driver.api.CUmem_advise(1), rights.location),
        ("cuPointerSetAttribute", 1, names.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, pointer),
        ("cuMemcpyPeerAsync", pointer, driver.context, other, driver.context, 16, stream),
        ("cuMemcpy2DAsync", box, stream), ("cuCtxEnablePeerAccess", driver.context, 0),
        ("cuGraphLaunch", executable, stream), ("cuStreamQuery", LEGACY), ("cuStreamQuery", 0),
        ("cuEventRecord", event, 0), ("cuStreamCreate", 0), ("cuEventCreate", 0),
        ("cuMemHostUnregister", pages), ("cuMemFree", plain), ("cuMemFreeHost", free_pinned),
        ("cuEventDestroy", doomed_event), ("cuStreamDestroy", doomed),
        ("cuCtxGetDevice",), ("cuCtxGetStreamPriorityRange",),
    ]
    answers = {}

    def run():
        for name, *arguments in calls:
            which = {LEGACY: " legacy", 0: " null"}.get(arguments[-1]) if name in (
                "cuStreamQuery", "cuEventRecord") and isinstance(arguments[-1], int) else ""
            answers[name + (which or "")] = driver.error(name, *arguments)

    drivers.in_thread(run)
    return answers


# ---- pools ----


def _pool(driver, exportable=False):
    api = driver.api
    props = api.CUmemPoolProps()
    props.allocType = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    if exportable:
        props.handleTypes = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    pool = driver.cuMemPoolCreate(props)
    name = api.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    driver.cuMemPoolSetAttribute(pool, name, api.cuuint64_t(2**63))
    return pool


def _pool_get(driver, pool, name):
    which = getattr(driver.api.CUmemPool_attribute, f"CU_MEMPOOL_ATTR_{name}")
    return int(driver.cuMemPoolGetAttribute(pool, which))


@question
def pool_sizes(driver):
    answers, stream = {}, driver.stream()
    for size in (1, 1000, 1 << 20, BLOCK + 1, 31 << 20, 32 << 20, 33 << 20, 65 << 20):
        pool = _pool(driver)
        pointer = driver.cuMemAllocFromPoolAsync(size, pool, stream)
        used, reserved = (_pool_get(driver, pool, f"{name}_MEM_CURRENT")
                          for name in ("USED", "RESERVED"))
        answers[f"{size}"] = f"used {used}, reserved {reserved}"
        driver.cuMemFreeAsync(pointer, stream)
        driver.cuStreamSynchronize(stream)
        driver.cuMemPoolDestroy(pool)
    pool = _pool(driver)
    for count in (1, 32, 33, 64):
        pointers = [driver.cuMemAllocFromPoolAsync(1 << 20, pool, stream) for _ in range(count)]
        answers[f"{count} of 1 MiB"] = _pool_get(driver, pool, "RESERVED_MEM_CURRENT")
        for pointer in pointers:
            driver.cuMemFreeAsync(pointer, stream)
    driver.cuStreamSynchronize(stream)
    answers["default threshold"] = _pool_get(
        driver, driver.cuDeviceGetDefaultMemPool(0), "RELEASE_THRESHOLD")
    return answers


@question
def pool_calls(driver):
    answers, stream, pool = {}, driver.stream(), _pool(driver)

    def ask(name, *call):
        answers[name] = driver.error(*call)

    ask("nothing", "cuMemAllocFromPoolAsync", 0, pool, stream)
    ask("free of null", "cuMemFreeAsync", 0, stream)
    ask("free of device memory in stream order", "cuMemFreeAsync", int(driver.cuMemAlloc(4096)), stream)
    pointer = int(driver.cuMemAllocFromPoolAsync(BLOCK, pool, stream))
    ask("free inside", "cuMemFreeAsync", pointer + 512, stream)
    ask("trim while used", "cuMemPoolTrimTo", pool, 0)
    driver.cuMemFreeAsync(pointer, stream)
    ask("plain free after a free in stream order", "cuMemFree", pointer)
    for name, value in (("REUSE_ALLOW_OPPORTUNISTIC", 0), ("REUSE_FOLLOW_EVENT_DEPENDENCIES", 5)):
        which = getattr(driver.api.CUmemPool_attribute, f"CU_MEMPOOL_ATTR_{name}")
        ask(f"set {name} {value}", "cuMemPoolSetAttribute", pool, which, value)
    return answers


@question
def what_a_pool_counts_as_used(driver):
    answers, stream, pool = {}, driver.stream(), _pool(driver)
    again = int(driver.cuMemAllocFromPoolAsync(BLOCK, pool, stream))
    driver.cuStreamSynchronize(stream)
    driver.cuMemFree(again)
    answers["used after a plain free"] = _pool_get(driver, pool, "USED_MEM_CURRENT")
    driver.cuCtxSynchronize()
    answers["and after synchronizing"] = _pool_get(driver, pool, "USED_MEM_CURRENT")
    gate = driver.gate(stream)
    again = int(driver.cuMemAllocFromPoolAsync(BLOCK, pool, stream))
    answers["used before an allocation's turn"] = _pool_get(driver, pool, "USED_MEM_CURRENT")
    driver.cuMemFreeAsync(again, stream)
    answers["used before a free's turn"] = _pool_get(driver, pool, "USED_MEM_CURRENT")
    gate.open()
    driver.cuCtxSynchronize()
    answers["used after it"] = _pool_get(driver, pool, "USED_MEM_CURRENT")
    return answers


def _free_in_stream_order(driver, pointer):
    """Freed while its stream is held; and what is left of it then."""
    stream = driver.stream()
    gate = driver.gate(stream)
    freed = waits(driver, gate, lambda: driver.error("cuMemFreeAsync", pointer, stream))
    driver.cuCtxSynchronize()
    return {"freed": freed, "again": driver.error("cuMemFreeAsync", pointer, stream)}


@question
def a_free_of_device_memory_in_stream_order(driver):
    return _free_in_stream_order(driver, int(driver.cuMemAlloc(4096)))


@question
def a_free_of_managed_memory_in_stream_order(driver):
    return _free_in_stream_order(driver, int(driver.cuMemAllocManaged(4096, 1)))


@question
def a_free_of_pinned_memory_in_stream_order(driver):
    return _free_in_stream_order(driver, int(driver.cuMemHostAlloc(4096, 0)))


CHILD = """
import sys, drivers
sys.argv[0] = "answers.py"
driver = drivers.load()
driver.start()
import answers
print(answers.json.dumps(answers.in_the_importing_process(driver, int(sys.argv[1]), sys.argv[2])))
"""


def in_the_importing_process(driver, descriptor, note):
    answers, api = {}, driver.api
    kind = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    answers["import the pool"] = driver.error(
        "cuMemPoolImportFromShareableHandle", descriptor, kind, 0)
    pool = driver.cuMemPoolImportFromShareableHandle(descriptor, kind, 0)
    stream = driver.stream()
    answers["allocate there"] = driver.error("cuMemAllocFromPoolAsync", 16, pool, stream)
    data = api.CUmemPoolPtrExportData()
    ctypes.memmove(data.getPtr(), bytes.fromhex(note), NOTE_BYTES)
    code, here = api.cuMemPoolImportPointer(pool, data)
    answers["import the pointer"] = code.name.removeprefix("CUDA_ERROR_")
    answers["read"] = driver.read(int(here), 2).hex()
    driver.write(int(here), b"ok")
    code, again = api.cuMemPoolImportPointer(pool, data)
    answers["import it again"] = code.name.removeprefix("CUDA_ERROR_")
    if int(code) == 0:
        answers["the same address"] = int(here) == int(again)
    answers["free"] = driver.error("cuMemFreeAsync", int(here), stream)
    driver.error("cuStreamSynchronize", stream)
    answers["read after the free"] = driver.error("cuMemcpyDtoH", bytearray(2), int(here), 2)
    answers["free again"] = driver.error("cuMemFreeAsync", int(here), stream)
    return answers


@question
def pools_between_processes(driver):
    answers, stream, pool = {}, driver.stream(), _pool(driver, exportable=True)
    api = driver.api
    kind = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    gate = driver.gate(stream)
    early = int(driver.cuMemAllocFromPoolAsync(5000, pool, stream))
    answers["export a pointer before the pool"] = driver.error("cuMemPoolExportPointer", early)
    driver.cuMemPoolExportToShareableHandle(pool, kind, 0)
    answers["export a pointer before its allocation's turn"] = driver.error(
        "cuMemPoolExportPointer", early)
    gate.open()
    driver.cuStreamSynchronize(stream)
    answers["export a pointer"] = driver.error("cuMemPoolExportPointer", early)
    answers["export an address inside"] = driver.error("cuMemPoolExportPointer", early + 512)
    pointer = int(driver.cuMemAllocFromPoolAsync(5000, pool, stream))
    driver.cuMemsetD8Async(pointer, 7, 5000, stream)
    driver.cuStreamSynchronize(stream)
    descriptor = int(driver.cuMemPoolExportToShareableHandle(pool, kind, 0))
    note = driver.cuMemPoolExportPointer(pointer)
    code, mine = api.cuMemPoolImportFromShareableHandle(descriptor, kind, 0)
    answers["in the exporter: import the pool"] = code.name.removeprefix("CUDA_ERROR_")
    if int(code) == 0:
        answers["in the exporter: import the pointer"] = driver.error(
            "cuMemPoolImportPointer", mine, note)
    raw = ctypes.string_at(note.getPtr(), NOTE_BYTES)
    os.set_inheritable(descriptor, True)
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(descriptor), raw.hex()], env=environment,
        capture_output=True, text=True, check=False, pass_fds=[descriptor])
    if done.returncode == 0:
        answers |= json.loads(done.stdout)
    else:
        answers["the importing process"] = done.stderr.strip().splitlines()[-1]
    answers["the exporter reads"] = driver.read(pointer, 2).hex()
    return answers


@question
def dma_buf(driver):
    answers = {}
    types = driver.api.CUmemRangeHandleType
    kind = types.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    which = driver.api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
    answers["supported"] = int(driver.cuDeviceGetAttribute(which, 0))
    base = driver.reserve(2 * BLOCK)
    driver.map(base, driver.physical())
    for name, at, size in (("cuMemAlloc", driver.memory(BLOCK * 2), BLOCK * 2), ("mapped", base, BLOCK),
                           ("a part of a page", base, 100), ("reserved", base + BLOCK, BLOCK),
                           ("pinned", driver.pinned(1 << 16), 1 << 16)):
        answers[name] = driver.error("cuMemGetHandleForAddressRange", at, size, kind, 0)
    return answers


# ---- capture ----


def _capture_calls(driver):
    """Name: (prepare, call), each called with what prepare gave."""
    stream, event, recorded = driver.stream(), driver.event(), driver.event()
    timed, second = driver.event(0), driver.event(0)
    pointer, other, pinned = driver.memory(4096), driver.memory(4096), driver.pinned(4096)
    base = driver.reserve(64 * BLOCK)
    driver.map(base, driver.physical())
    handle = driver.physical()
    area = mmap.mmap(-1, 64 * 4096)
    pages = ctypes.addressof(ctypes.c_char.from_buffer(area))
    driver.cuEventRecord(recorded, stream)
    driver.cuEventRecord(timed, stream)
    driver.cuEventRecord(second, stream)
    driver.cuCtxSynchronize()
    graph = driver.cuGraphCreate(0)
    executable = driver.cuGraphInstantiate(graph, 0)
    pool = driver.cuDeviceGetDefaultMemPool(0)
    nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    driver.kept = (nothing, area)
    function = driver.api.CUhostFn(ctypes.cast(nothing, ctypes.c_void_p).value)
    kind = driver.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    plain = ctypes.create_string_buffer(4096)
    pageable = ctypes.addressof(plain)
    driver.kept += (plain,)
    mode = driver.api.CUstreamCaptureMode(RELAXED)

    def made(name, *arguments):
        return lambda: driver.__getattr__(name)(*arguments)

    return {
        "cuMemAlloc": (None, ("cuMemAlloc", 4096)),
        "cuMemFree": (made("cuMemAlloc", 4096), ("cuMemFree",)),
        "cuMemFree, large": (made("cuMemAlloc", 8 * BLOCK), ("cuMemFree",)),
        "cuMemHostAlloc": (None, ("cuMemHostAlloc", 4096, 0)),
        "cuMemFreeHost": (made("cuMemHostAlloc", 4096, 0), ("cuMemFreeHost",)),
        "cuMemHostRegister": (None, ("cuMemHostRegister", pages, 4096, 0)),
        "cuMemHostUnregister": (
            lambda: (driver.error("cuMemHostRegister", pages + 32768, 4096, 0), pages + 32768)[1],
            ("cuMemHostUnregister",)),
        "cuMemAllocManaged": (None, ("cuMemAllocManaged", 4096, 1)),
        "cuMemGetInfo": (None, ("cuMemGetInfo",)),
        "cuCtxSynchronize": (None, ("cuCtxSynchronize",)),
        "cuEventQuery": (None, ("cuEventQuery", recorded)),
        "cuEventSynchronize": (None, ("cuEventSynchronize", recorded)),
        "cuEventElapsedTime": (None, ("cuEventElapsedTime", timed, second)),
        "cuEventCreate": (None, ("cuEventCreate", 2)),
        "cuEventDestroy": (made("cuEventCreate", 2), ("cuEventDestroy",)),
        "cuEventRecord, other stream": (None, ("cuEventRecord", event, stream)),
        "cuStreamWaitEvent, other stream": (None, ("cuStreamWaitEvent", stream, recorded, 0)),
        "cuStreamCreate": (None, ("cuStreamCreate", 1)),
        "cuStreamDestroy, other stream": (made("cuStreamCreate", 1), ("cuStreamDestroy",)),
        "cuStreamQuery, other stream": (None, ("cuStreamQuery", stream)),
        "cuStreamSynchronize, other stream": (None, ("cuStreamSynchronize", stream)),
        "cuStreamQuery, legacy": (None, ("cuStreamQuery", LEGACY)),
        "cuStreamSynchronize, legacy": (None, ("cuStreamSynchronize", LEGACY)),
        "cuStreamGetFlags, other stream": (None, ("cuStreamGetFlags", stream)),
        "cuLaunchHostFunc, other stream": (None, ("cuLaunchHostFunc", stream, function, 0)),
        "cuStreamWriteValue64, other stream": (None, ("cuStreamWriteValue64", stream, pinned, 1, 0)),
        "cuMemcpyHtoD": (None, ("cuMemcpyHtoD", pointer, b"x" * 64, 64)),
        "cuMemcpyDtoH": (None, ("cuMemcpyDtoH", bytearray(64), pointer, 64)),
        "cuMemcpyDtoD": (None, ("cuMemcpyDtoD", pointer, other, 64)),
        "cuMemcpy, host to host": (None, ("cuMemcpy", pinned, pageable, 64)),
        "cuMemsetD8": (None, ("cuMemsetD8", pointer, 1, 64)),
        "cuMemsetD8Async, legacy": (None, ("cuMemsetD8Async", pointer, 1, 64, LEGACY)),
        "cuMemsetD8Async, other stream": (None, ("cuMemsetD8Async", pointer, 1, 64, stream)),
        "cuMemcpyAsync pageable, other stream": (
            None, ("cuMemcpyAsync", pointer, pageable, 64, stream)),
        "cuMemAllocAsync, other stream": (None, ("cuMemAllocAsync", 4096, stream)),
        "cuMemFreeAsync, other stream": (
            lambda: driver.cuMemAllocAsync(4096, stream), ("cuMemFreeAsync", None, stream)),
        "cuMemPoolTrimTo": (None, ("cuMemPoolTrimTo", pool, 0)),
        "cuMemCreate": (None, ("cuMemCreate", BLOCK, driver.prop(), 0)),
        "cuMemRelease": (made("cuMemCreate", BLOCK, driver.prop(), 0), ("cuMemRelease",)),
        "cuMemMap": (None, ("cuMemMap", base + 8 * BLOCK, BLOCK, 0, handle, 0)),
        "cuMemSetAccess": (None, ("cuMemSetAccess", base, BLOCK, [driver.access()], 1)),
        "cuMemUnmap": (None, ("cuMemUnmap", base, BLOCK)),
        "cuMemAddressReserve": (None, ("cuMemAddressReserve", BLOCK, 0, 0, 0)),
        "cuMemAddressFree": (
            made("cuMemAddressReserve", BLOCK, 0, 0, 0), ("cuMemAddressFree", None, BLOCK)),
        "cuPointerGetAttribute": (None, ("cuPointerGetAttribute", kind, pointer)),
        "cuMemGetAddressRange": (None, ("cuMemGetAddressRange", pointer)),
        "cuMemHostGetDevicePointer": (None, ("cuMemHostGetDevicePointer", pinned, 0)),
        "cuGraphCreate": (None, ("cuGraphCreate", 0)),
        "cuGraphInstantiate": (None, ("cuGraphInstantiate", graph, 0)),
        "cuGraphLaunch, other stream": (None, ("cuGraphLaunch", executable, stream)),
        "cuDevicePrimaryCtxRetain": (None, ("cuDevicePrimaryCtxRetain", 0)),
        "cuCtxGetDevice": (None, ("cuCtxGetDevice",)),
        "cuStreamBeginCapture, other stream": (None, ("cuStreamBeginCapture", stream, mode)),
    }


def _capturing(driver, mode, flags, elsewhere):
    answers = {}
    modes = driver.api.CUstreamCaptureMode
    for name, (prepare, call) in _capture_calls(driver).items():
        thing = prepare() if prepare else None
        arguments = list(call[1:])
        if prepare and None in arguments:
            arguments[arguments.index(None)] = thing
        elif prepare:
            arguments.append(thing)
        origin = driver.stream(flags)
        driver.cuStreamBeginCapture(origin, modes(mode))

        def run(name=call[0], arguments=tuple(arguments)):
            driver.error("cuCtxSetCurrent", driver.context)
            return driver.error(name, *arguments)

        answer = drivers.in_thread(run) if elsewhere else driver.error(call[0], *arguments)
        code, status = driver.api.cuStreamIsCapturing(origin)
        state = {1: "", 2: ", invalidated"}.get(int(status), f", status {int(status)}")
        answers[name] = answer + state
        driver.api.cuStreamEndCapture(origin)
        if name.startswith("cuStreamBeginCapture"):
            driver.api.cuStreamEndCapture(arguments[0])
        driver.error("cuCtxSynchronize")
    return answers


@question
def calls_during_a_global_capture(driver):
    return _capturing(driver, GLOBAL, 1, False)


@question
def calls_during_a_global_capture_of_another_thread(driver):
    return _capturing(driver, GLOBAL, 1, True)


@question
def calls_during_a_thread_local_capture(driver):
    return _capturing(driver, THREAD_LOCAL, 1, False)


@question
def calls_during_a_relaxed_capture(driver):
    return _capturing(driver, RELAXED, 1, False)


@question
def calls_during_a_relaxed_capture_of_a_blocking_stream(driver):
    return _capturing(driver, RELAXED, 0, False)


@question
def captured_calls(driver):
    """What becomes a node, and how many nodes the next one would come after."""
    answers, modes = {}, driver.api.CUstreamCaptureMode
    pointer, pinned = driver.memory(4096), driver.pinned(4096)
    plain = ctypes.create_string_buffer(4096)
    stream, event, other = driver.stream(), driver.event(), driver.stream()
    allocated = driver.cuMemAllocAsync(4096, stream)
    recorded, managed = driver.event(), int(driver.cuMemAllocManaged(4096, 1))
    driver.cuEventRecord(recorded, driver.stream())
    driver.cuCtxSynchronize()
    graph = driver.cuGraphCreate(0)
    executable = driver.cuGraphInstantiate(graph, 0)
    nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    function = driver.api.CUhostFn(ctypes.cast(nothing, ctypes.c_void_p).value)
    rights = driver.access()
    calls = [
        ("cuMemsetD8Async", pointer, 1, 16, stream),
        ("cuMemcpyAsync", pointer, ctypes.addressof(plain), 16, stream),
        ("cuMemcpyAsync", ctypes.addressof(plain), pointer, 16, stream),
        ("cuLaunchHostFunc", stream, function, 0),
        ("cuStreamWaitValue64", stream, pinned, 0, GEQ),
        ("cuStreamWriteValue64", stream, pinned, 0, 0),
        ("cuEventRecord", event, stream), ("cuMemAllocAsync", 4096, stream),
        ("cuMemFreeAsync", allocated, stream), ("cuGraphLaunch", executable, stream),
        ("cuStreamGetFlags", stream), ("cuStreamGetPriority", stream), ("cuStreamGetCtx", stream),
        ("cuStreamGetId", stream), ("cuStreamGetCaptureInfo", stream),
        ("cuMemcpyAsync", pinned, pointer, 16, stream), ("cuMemcpyAsync", pointer, pinned, 16, stream),
        ("cuMemsetD8Async", pointer, 1, 0, stream), ("cuStreamWaitEvent", stream, recorded, 0),
        ("cuMemPrefetchAsync", managed, 4096, rights.location, 0, stream),
        ("cuStreamQuery", stream), ("cuStreamSynchronize", stream), ("cuStreamDestroy", stream),
    ]
    for number, (name, *arguments) in enumerate(calls):
        driver.cuStreamBeginCapture(stream, modes(RELAXED))
        answer = driver.error(name, *arguments)
        code, status = driver.api.cuStreamIsCapturing(stream) if name != "cuStreamDestroy" else (0, 0)
        code, made = driver.api.cuStreamEndCapture(stream) if name != "cuStreamDestroy" else (0, 0)
        nodes = driver.cuGraphGetNodes(made, 0)[1] if int(code) == 0 and int(made or 0) else "no"
        answers[f"{number} {name}"] = f"{answer}, status {int(status)}, {nodes} nodes"
    stream = driver.stream()
    driver.cuStreamBeginCapture(stream, modes(RELAXED))

    def after(which):
        return driver.api.cuStreamGetCaptureInfo(which)[-1]

    answers["before any"] = after(stream)
    driver.cuMemsetD8Async(pointer, 1, 16, stream)
    answers["after one"] = after(stream)
    driver.cuMemsetD8Async(pointer, 2, 16, stream)
    answers["after two"] = after(stream)
    driver.cuEventRecord(event, stream)
    driver.cuStreamWaitEvent(other, event, 0)
    answers["forked"] = after(other)
    driver.cuMemsetD8Async(pointer, 3, 16, stream)
    driver.cuMemsetD8Async(pointer + 32, 3, 16, other)
    driver.cuEventRecord(event, other)
    driver.cuStreamWaitEvent(stream, event, 0)
    answers["joined"] = after(stream)
    driver.cuMemsetD8Async(pointer, 3, 64, stream)
    answers["after the join"] = after(stream)
    driver.cuEventRecord(event, stream)
    driver.cuStreamWaitEvent(other, event, 0)
    answers["forked again"] = after(other)
    driver.cuMemsetD8Async(pointer, 3, 16, other)
    driver.cuEventRecord(event, other)
    driver.cuStreamWaitEvent(stream, event, 0)
    answers["joined by what came after it"] = after(stream)
    driver.cuStreamWaitEvent(stream, event, 0)
    answers["joined twice"] = after(stream)
    answers["end"] = driver.error("cuStreamEndCapture", stream)
    driver.cuStreamBeginCapture(stream, modes(RELAXED))
    driver.cuEventRecord(event, stream)
    answers["event of a capture, waited for by the legacy stream"] = driver.error(
        "cuStreamWaitEvent", LEGACY, event, 0)
    driver.error("cuStreamEndCapture", stream)
    driver.cuStreamBeginCapture(stream, modes(RELAXED))
    driver.cuEventRecord(event, stream)
    answers["event of a capture, synchronized"] = driver.error("cuEventSynchronize", event)
    driver.error("cuStreamEndCapture", stream)
    answers["event of an ended capture, queried"] = driver.error("cuEventQuery", event)
    answers["event of an ended capture, waited for"] = driver.error(
        "cuStreamWaitEvent", other, event, 0)
    return answers


# ---- the rest ----


@question
def odd_arguments(driver):
    answers = {}
    stream, pointer, pinned = driver.stream(), driver.memory(4096), driver.pinned(4096)
    plain = ctypes.create_string_buffer(64)
    pageable = ctypes.addressof(plain) & ~7

    def ask(name, *call):
        answers[name] = driver.error(*call)

    ask("wait for a value in pageable memory", "cuStreamWaitValue64", stream, pageable, 0, GEQ)
    ask("wait with unknown flags", "cuStreamWaitValue64", stream, pinned, 0, 64)
    ask("write with unknown flags", "cuStreamWriteValue64", stream, pinned, 0, 64)
    ask("event with unknown flags", "cuEventCreate", 64)
    ask("wait for an event with unknown flags", "cuStreamWaitEvent", stream, driver.event(), 8)
    ask("pinned memory with unknown flags", "cuMemHostAlloc", 4096, 256)
    ask("pinned memory of no size", "cuMemHostAlloc", 0, 0)
    ask("managed memory of no size", "cuMemAllocManaged", 0, 1)
    ask("free pinned memory as device memory", "cuMemFree", pinned)
    ask("free a pinned pointer inside", "cuMemFreeHost", pinned + 64)
    ask("free nothing pinned", "cuMemFreeHost", 0)
    ask("copy from null", "cuMemcpyDtoD", pointer, 0, 16)
    ask("set a current context of nothing", "cuCtxSetCurrent", 0)
    driver.cuCtxSetCurrent(driver.context)
    answers["flags of pinned memory"] = int(driver.cuMemHostGetFlags(driver.pinned(4096, 0)))
    answers["flags of portable mapped memory"] = int(driver.cuMemHostGetFlags(driver.pinned(4096, 3)))
    ask("flags of device memory", "cuMemHostGetFlags", pointer)
    ask("device pointer of pageable memory", "cuMemHostGetDevicePointer", pageable, 0)
    area = mmap.mmap(-1, 16 * 4096)
    pages = ctypes.addressof(ctypes.c_char.from_buffer(area))
    ask("register part of a page", "cuMemHostRegister", pages + 100, 200, 0)
    ask("unregister inside", "cuMemHostUnregister", pages + 50)
    ask("unregister at its start", "cuMemHostUnregister", pages + 100)
    ask("register device memory", "cuMemHostRegister", pointer, 4096, 0)
    ask("register with unknown flags", "cuMemHostRegister", pages, 4096, 256)
    ask("attribute of no kind", "cuDeviceGetAttribute", driver.api.CUdevice_attribute(1), 5)
    rights, managed = driver.access(), int(driver.cuMemAllocManaged(1 << 16, 1))
    ask("advise", "cuMemAdvise", managed, 1 << 16, driver.api.CUmem_advise(1), rights.location)
    ask("advise about device memory", "cuMemAdvise", pointer, 4096, driver.api.CUmem_advise(1),
        rights.location)
    ask("prefetch", "cuMemPrefetchAsync", managed, 1 << 16, rights.location, 0, stream)
    ask("prefetch device memory", "cuMemPrefetchAsync", pointer, 4096, rights.location, 0, stream)
    code, null = driver.api.cuMemHostAlloc(0, 0)
    answers["the address of nothing pinned"] = int(null or 0)
    return answers


@question
def destroying_what_cannot_be(driver):
    calls = {"the null event": ("cuEventDestroy", 0), "the null stream": ("cuStreamDestroy", 0),
             "the legacy stream": ("cuStreamDestroy", LEGACY),
             "the per-thread stream": ("cuStreamDestroy", PER_THREAD)}
    return {name: driver.error(*call) for name, call in calls.items()}


@question
def a_driver_call_in_a_host_function(driver):
    answers, stream, event, pointer = {}, driver.stream(), driver.event(), driver.memory(16)
    kind = driver.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    calls = [("cuMemAlloc", 16), ("cuStreamQuery", stream), ("cuCtxGetCurrent",),
             ("cuDeviceGetCount",), ("cuMemGetInfo",), ("cuEventCreate", 2),
             ("cuEventQuery", event), ("cuEventRecord", event, stream), ("cuStreamGetFlags", stream),
             ("cuEventQuery", driver.event()), ("cuStreamQuery", driver.stream()),
             ("cuPointerGetAttribute", kind, pointer), ("cuMemGetAddressRange", pointer),
             ("cuDriverGetVersion",), ("cuMemsetD8Async", pointer, 1, 16, stream)]

    def run(_):
        for number, (name, *arguments) in enumerate(calls):
            answers[f"{number} {name}"] = driver.error(name, *arguments)

    thunk = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(run)
    function = driver.api.CUhostFn(ctypes.cast(thunk, ctypes.c_void_p).value)
    driver.cuLaunchHostFunc(stream, function, 0)
    driver.cuStreamSynchronize(stream)
    return answers


@question
def a_forked_child(driver):
    stream, pointer, event = driver.stream(), driver.memory(16), driver.event()
    answers = {}
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        found = {}
        for name, *arguments in (("cuMemAlloc", 16), ("cuStreamQuery", stream), ("cuCtxGetCurrent",),
                                 ("cuMemFree", pointer), ("cuEventQuery", event), ("cuInit", 0),
                                 ("cuDeviceGetCount",), ("cuDevicePrimaryCtxRetain", 0)):
            found[name] = driver.error(name, *arguments)
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader) as file:
        text = file.read()
    answers |= json.loads(text) if text else {"the child": "died"}
    answers["the parent afterwards"] = driver.error("cuMemAlloc", 16)
    return answers


# ---- asking ----


def ask_here(name: str) -> None:
    driver = drivers.load()
    driver.start()
    print(json.dumps(QUESTIONS[name](driver)), flush=True)
    for gate in driver._gates:
        gate.open()
    os._exit(0)  # some questions leave a context that no exit handler gets through


def ask(name: str):
    command = [sys.executable, os.path.abspath(__file__), name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return "no answer"
    if done.returncode == 0:
        return json.loads(done.stdout)
    lines = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
    return f"failed: {lines[-1]}"


def ask_all(workers: int) -> dict:
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return dict(zip(QUESTIONS, pool.map(ask, QUESTIONS), strict=True))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        ask_here(sys.argv[1])
    else:
        print(json.dumps(ask_all(os.cpu_count() or 1), indent=1))
