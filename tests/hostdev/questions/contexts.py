"""Threads without a context, host functions, forked children, odd arguments."""

from __future__ import annotations

import ctypes
import json
import mmap
import os

import drivers
from drivers import GEQ

from questions.common import LEGACY, PER_THREAD, RELAXED, asking, question


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
        ("cuStreamQuery", stream),
        ("cuStreamSynchronize", stream),
        ("cuStreamGetFlags", stream),
        ("cuStreamGetPriority", stream),
        ("cuStreamGetId", stream),
        ("cuStreamGetCtx", stream),
        ("cuEventRecord", event, stream),
        ("cuEventQuery", event),
        ("cuEventSynchronize", event),
        ("cuStreamWaitEvent", stream, event, 0),
        ("cuEventElapsedTime", timed, timed),
        ("cuMemsetD8Async", pointer, 1, 16, stream),
        ("cuMemsetD8", pointer, 1, 16),
        ("cuMemcpyDtoDAsync", pointer, other, 16, stream),
        ("cuMemcpyAsync", pointer, pinned, 16, stream),
        ("cuMemcpyHtoD", pointer, b"x" * 16, 16),
        ("cuMemcpy", pointer, other, 16),
        ("cuLaunchHostFunc", stream, function, 0),
        ("cuStreamWaitValue64", stream, pinned, 0, GEQ),
        ("cuStreamWriteValue64", stream, pinned, 0, 0),
        ("cuMemAllocAsync", 4096, stream),
        ("cuMemAllocFromPoolAsync", 4096, pool, stream),
        ("cuMemFreeAsync", pooled, stream),
        ("cuMemGetAddressRange", pointer),
        ("cuPointerGetAttribute", kind, pointer),
        ("cuPointerGetAttributes", 1, [kind], pointer),
        ("cuMemHostGetFlags", pinned),
        ("cuMemHostGetDevicePointer", pinned, 0),
        ("cuMemHostRegister", pages + 8 * 4096, 4096, 0),
        ("cuMemPoolTrimTo", pool, 0),
        ("cuCtxSynchronize",),
        ("cuMemGetInfo",),
        ("cuStreamIsCapturing", stream),
        ("cuStreamGetCaptureInfo", stream),
        ("cuStreamBeginCapture", stream, driver.api.CUstreamCaptureMode(RELAXED)),
        ("cuStreamEndCapture", stream),
        ("cuGraphCreate", 0),
        ("cuGraphInstantiate", graph, 0),
        ("cuMemPrefetchAsync", managed, 1 << 16, rights.location, 0, stream),
        ("cuMemAdvise", managed, 1 << 16, driver.api.CUmem_advise(1), rights.location),
        ("cuPointerSetAttribute", 1, names.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, pointer),
        ("cuMemcpyPeerAsync", pointer, driver.context, other, driver.context, 16, stream),
        ("cuMemcpy2DAsync", box, stream),
        ("cuCtxEnablePeerAccess", driver.context, 0),
        ("cuGraphLaunch", executable, stream),
        ("cuStreamQuery", LEGACY),
        ("cuStreamQuery", 0),
        ("cuEventRecord", event, 0),
        ("cuStreamCreate", 0),
        ("cuEventCreate", 0),
        ("cuMemHostUnregister", pages),
        ("cuMemFree", plain),
        ("cuMemFreeHost", free_pinned),
        ("cuEventDestroy", doomed_event),
        ("cuStreamDestroy", doomed),
        ("cuCtxGetDevice",),
        ("cuCtxGetStreamPriorityRange",),
    ]
    answers = {}

    def run():
        for name, *arguments in calls:
            which = (
                {LEGACY: " legacy", 0: " null"}.get(arguments[-1])
                if name in ("cuStreamQuery", "cuEventRecord") and isinstance(arguments[-1], int)
                else ""
            )
            answers[name + (which or "")] = driver.error(name, *arguments)

    drivers.in_thread(run)
    return answers


# ---- the rest ----


@question
def odd_arguments(driver):
    answers, ask = asking(driver)
    stream, pointer, pinned = driver.stream(), driver.memory(4096), driver.pinned(4096)
    plain = ctypes.create_string_buffer(64)
    pageable = ctypes.addressof(plain) & ~7
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
    answers["flags of portable mapped memory"] = int(
        driver.cuMemHostGetFlags(driver.pinned(4096, 3))
    )
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
    ask(
        "advise about device memory",
        "cuMemAdvise",
        pointer,
        4096,
        driver.api.CUmem_advise(1),
        rights.location,
    )
    ask("prefetch", "cuMemPrefetchAsync", managed, 1 << 16, rights.location, 0, stream)
    ask("prefetch device memory", "cuMemPrefetchAsync", pointer, 4096, rights.location, 0, stream)
    _, null = driver.api.cuMemHostAlloc(0, 0)
    answers["the address of nothing pinned"] = int(null or 0)
    return answers


@question
def destroying_what_cannot_be(driver):
    calls = {
        "the null event": ("cuEventDestroy", 0),
        "the null stream": ("cuStreamDestroy", 0),
        "the legacy stream": ("cuStreamDestroy", LEGACY),
        "the per-thread stream": ("cuStreamDestroy", PER_THREAD),
    }
    return {name: driver.error(*call) for name, call in calls.items()}


@question
def a_driver_call_in_a_host_function(driver):
    answers, stream, event, pointer = {}, driver.stream(), driver.event(), driver.memory(16)
    kind = driver.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    calls = [
        ("cuMemAlloc", 16),
        ("cuStreamQuery", stream),
        ("cuCtxGetCurrent",),
        ("cuDeviceGetCount",),
        ("cuMemGetInfo",),
        ("cuEventCreate", 2),
        ("cuEventQuery", event),
        ("cuEventRecord", event, stream),
        ("cuStreamGetFlags", stream),
        ("cuEventQuery", driver.event()),
        ("cuStreamQuery", driver.stream()),
        ("cuPointerGetAttribute", kind, pointer),
        ("cuMemGetAddressRange", pointer),
        ("cuDriverGetVersion",),
        ("cuMemsetD8Async", pointer, 1, 16, stream),
    ]

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
        for name, *arguments in (
            ("cuMemAlloc", 16),
            ("cuStreamQuery", stream),
            ("cuCtxGetCurrent",),
            ("cuMemFree", pointer),
            ("cuEventQuery", event),
            ("cuInit", 0),
            ("cuDeviceGetCount",),
            ("cuDevicePrimaryCtxRetain", 0),
        ):
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
