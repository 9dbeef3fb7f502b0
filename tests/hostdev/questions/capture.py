"""What a capture allows and what it collects."""

from __future__ import annotations

import ctypes
import functools
import mmap

import drivers
from drivers import BLOCK, GEQ

from questions.common import GLOBAL, LEGACY, QUESTIONS, RELAXED, THREAD_LOCAL, question


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
            ("cuMemHostUnregister",),
        ),
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
        "cuStreamWriteValue64, other stream": (
            None,
            ("cuStreamWriteValue64", stream, pinned, 1, 0),
        ),
        "cuMemcpyHtoD": (None, ("cuMemcpyHtoD", pointer, b"x" * 64, 64)),
        "cuMemcpyDtoH": (None, ("cuMemcpyDtoH", bytearray(64), pointer, 64)),
        "cuMemcpyDtoD": (None, ("cuMemcpyDtoD", pointer, other, 64)),
        "cuMemcpy, host to host": (None, ("cuMemcpy", pinned, pageable, 64)),
        "cuMemsetD8": (None, ("cuMemsetD8", pointer, 1, 64)),
        "cuMemsetD8Async, legacy": (None, ("cuMemsetD8Async", pointer, 1, 64, LEGACY)),
        "cuMemsetD8Async, other stream": (None, ("cuMemsetD8Async", pointer, 1, 64, stream)),
        "cuMemcpyAsync pageable, other stream": (
            None,
            ("cuMemcpyAsync", pointer, pageable, 64, stream),
        ),
        "cuMemAllocAsync, other stream": (None, ("cuMemAllocAsync", 4096, stream)),
        "cuMemFreeAsync, other stream": (
            lambda: driver.cuMemAllocAsync(4096, stream),
            ("cuMemFreeAsync", None, stream),
        ),
        "cuMemPoolTrimTo": (None, ("cuMemPoolTrimTo", pool, 0)),
        "cuMemCreate": (None, ("cuMemCreate", BLOCK, driver.prop(), 0)),
        "cuMemRelease": (made("cuMemCreate", BLOCK, driver.prop(), 0), ("cuMemRelease",)),
        "cuMemMap": (None, ("cuMemMap", base + 8 * BLOCK, BLOCK, 0, handle, 0)),
        "cuMemSetAccess": (None, ("cuMemSetAccess", base, BLOCK, [driver.access()], 1)),
        "cuMemUnmap": (None, ("cuMemUnmap", base, BLOCK)),
        "cuMemAddressReserve": (None, ("cuMemAddressReserve", BLOCK, 0, 0, 0)),
        "cuMemAddressFree": (
            made("cuMemAddressReserve", BLOCK, 0, 0, 0),
            ("cuMemAddressFree", None, BLOCK),
        ),
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
        _, status = driver.api.cuStreamIsCapturing(origin)
        state = {1: "", 2: ", invalidated"}.get(int(status), f", status {int(status)}")
        answers[name] = answer + state
        driver.api.cuStreamEndCapture(origin)
        if name.startswith("cuStreamBeginCapture"):
            driver.api.cuStreamEndCapture(arguments[0])
        driver.error("cuCtxSynchronize")
    return answers


for during, mode, flags, elsewhere in [
    ("a_global_capture", GLOBAL, 1, False),
    ("a_global_capture_of_another_thread", GLOBAL, 1, True),
    ("a_thread_local_capture", THREAD_LOCAL, 1, False),
    ("a_relaxed_capture", RELAXED, 1, False),
    ("a_relaxed_capture_of_a_blocking_stream", RELAXED, 0, False),
]:
    QUESTIONS[f"calls_during_{during}"] = functools.partial(
        _capturing, mode=mode, flags=flags, elsewhere=elsewhere
    )


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
        ("cuEventRecord", event, stream),
        ("cuMemAllocAsync", 4096, stream),
        ("cuMemFreeAsync", allocated, stream),
        ("cuGraphLaunch", executable, stream),
        ("cuStreamGetFlags", stream),
        ("cuStreamGetPriority", stream),
        ("cuStreamGetCtx", stream),
        ("cuStreamGetId", stream),
        ("cuStreamGetCaptureInfo", stream),
        ("cuMemcpyAsync", pinned, pointer, 16, stream),
        ("cuMemcpyAsync", pointer, pinned, 16, stream),
        ("cuMemsetD8Async", pointer, 1, 0, stream),
        ("cuStreamWaitEvent", stream, recorded, 0),
        ("cuMemPrefetchAsync", managed, 4096, rights.location, 0, stream),
        ("cuStreamQuery", stream),
        ("cuStreamSynchronize", stream),
        ("cuStreamDestroy", stream),
    ]
    for number, (name, *arguments) in enumerate(calls):
        driver.cuStreamBeginCapture(stream, modes(RELAXED))
        answer = driver.error(name, *arguments)
        code, status = (
            driver.api.cuStreamIsCapturing(stream) if name != "cuStreamDestroy" else (0, 0)
        )
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
        "cuStreamWaitEvent", LEGACY, event, 0
    )
    driver.error("cuStreamEndCapture", stream)
    driver.cuStreamBeginCapture(stream, modes(RELAXED))
    driver.cuEventRecord(event, stream)
    answers["event of a capture, synchronized"] = driver.error("cuEventSynchronize", event)
    driver.error("cuStreamEndCapture", stream)
    answers["event of an ended capture, queried"] = driver.error("cuEventQuery", event)
    answers["event of an ended capture, waited for"] = driver.error(
        "cuStreamWaitEvent", other, event, 0
    )
    return answers
