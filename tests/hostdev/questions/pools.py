"""Pools, between processes too, and dma-buf."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

from drivers import BLOCK

from questions.common import question, waits


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
        used, reserved = (
            _pool_get(driver, pool, f"{name}_MEM_CURRENT") for name in ("USED", "RESERVED")
        )
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
        driver, driver.cuDeviceGetDefaultMemPool(0), "RELEASE_THRESHOLD"
    )
    return answers


@question
def pool_calls(driver):
    answers, stream, pool = {}, driver.stream(), _pool(driver)

    def ask(name, *call):
        answers[name] = driver.error(*call)

    ask("nothing", "cuMemAllocFromPoolAsync", 0, pool, stream)
    ask("free of null", "cuMemFreeAsync", 0, stream)
    ask(
        "free of device memory in stream order",
        "cuMemFreeAsync",
        int(driver.cuMemAlloc(4096)),
        stream,
    )
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


NOTE_BYTES = 64  # of an exported pool pointer
CHILD = """
import json, sys, drivers
driver = drivers.load()
driver.start()
from questions.pools import in_the_importing_process
print(json.dumps(in_the_importing_process(driver, int(sys.argv[1]), sys.argv[2])))
"""


def in_the_importing_process(driver, descriptor, note):
    answers, api = {}, driver.api
    kind = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    answers["import the pool"] = driver.error(
        "cuMemPoolImportFromShareableHandle", descriptor, kind, 0
    )
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
        "cuMemPoolExportPointer", early
    )
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
            "cuMemPoolImportPointer", mine, note
        )
    raw = ctypes.string_at(note.getPtr(), NOTE_BYTES)
    os.set_inheritable(descriptor, True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(descriptor), raw.hex()],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        pass_fds=[descriptor],
    )
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
    for name, at, size in (
        ("cuMemAlloc", driver.memory(BLOCK * 2), BLOCK * 2),
        ("mapped", base, BLOCK),
        ("a part of a page", base, 100),
        ("reserved", base + BLOCK, BLOCK),
        ("pinned", driver.pinned(1 << 16), 1 << 16),
    ):
        answers[name] = driver.error("cuMemGetHandleForAddressRange", at, size, kind, 0)
    return answers
