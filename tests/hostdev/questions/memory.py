"""Virtual memory, unreachable memory, and what a pointer says."""

from __future__ import annotations

import ctypes
import mmap
import os

from drivers import BLOCK

from questions.common import QUESTIONS, asking, question


@question
def mapping(driver):
    answers, ask = asking(driver)
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
    answers, ask = asking(driver)
    base = driver.reserve(64 * BLOCK)

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
    answers, ask = asking(driver)
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
    answers, ask = asking(driver)
    api = driver.api
    kind = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    ask(
        "export of one that was not made for it",
        "cuMemExportToShareableHandle",
        driver.physical(),
        kind,
        0,
    )
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
    ask(
        "granularity of no device",
        "cuMemGetAllocationGranularity",
        prop,
        api.CUmemAllocationGranularity_flags(0),
    )
    ask("create with flags", "cuMemCreate", BLOCK, driver.prop(), 1)
    _, total = driver.cuMemGetInfo()
    huge = (2 * total) // BLOCK * BLOCK
    ask("create of more than there is", "cuMemCreate", huge, driver.prop(), 0)
    return answers


@question
def access(driver):
    answers, ask = asking(driver)
    base = driver.reserve(8 * BLOCK)
    rights = driver.access()
    location = rights.location
    for place in (0, 1, 3):
        driver.cuMemMap(base + place * BLOCK, BLOCK, 0, driver.physical(), 0)
    ask("get before set", "cuMemGetAccess", location, base)
    ask("get where nothing is mapped", "cuMemGetAccess", location, base + 2 * BLOCK)
    ask("set over a gap", "cuMemSetAccess", base, 4 * BLOCK, [driver.access()], 1)
    ask(
        "set where nothing is mapped",
        "cuMemSetAccess",
        base + 2 * BLOCK,
        BLOCK,
        [driver.access()],
        1,
    )
    ask("set over a gap at the end", "cuMemSetAccess", base, 3 * BLOCK, [driver.access()], 1)
    ask(
        "set over a gap at the start",
        "cuMemSetAccess",
        base + 2 * BLOCK,
        2 * BLOCK,
        [driver.access()],
        1,
    )
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
    answers["then query an event"] = (
        driver.error("cuEventQuery", driver.cuEventCreate(2))
        if (driver.error("cuEventCreate", 2) == "SUCCESS")
        else "no event"
    )
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

    return {
        "mapped without access": no_access,
        "reserved": reserved,
        "unmapped": unmapped,
        "freed": freed,
        "over the end of a mapping": straddling,
        "over the end of an allocation": behind,
    }


for _name in (
    "mapped without access",
    "reserved",
    "unmapped",
    "freed",
    "over the end of a mapping",
    "over the end of an allocation",
):
    QUESTIONS[f"copying to memory {_name}"] = lambda driver, name=_name: _unreachable(
        driver, _places(driver)[name]
    )
    QUESTIONS[f"filling memory {_name}"] = lambda driver, name=_name: _unreachable_async(
        driver, _places(driver)[name]
    )


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
        "device": driver.memory(5000),
        "pinned": driver.pinned(5000),
        "registered": pages,
        "managed": int(driver.cuMemAllocManaged(5000, 1)),
        "pool": int(driver.cuMemAllocAsync(5000, stream)),
        "mapped": base,
        "mapped without access": base + 4 * BLOCK,
        "reserved": base + 6 * BLOCK,
        "pageable": ctypes.addressof(plain),
    }
    names = driver.api.CUpointer_attribute
    for place, at in places.items():
        for name in (
            "CONTEXT",
            "MEMORY_TYPE",
            "DEVICE_POINTER",
            "HOST_POINTER",
            "SYNC_MEMOPS",
            "IS_MANAGED",
            "DEVICE_ORDINAL",
            "RANGE_START_ADDR",
            "RANGE_SIZE",
            "MAPPED",
            "MEMPOOL_HANDLE",
            "ACCESS_FLAGS",
        ):
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
        answers[f"{place}: range"] = (
            f"base + {int(low) - at}, {size}"
            if int(code) == 0
            else code.name.removeprefix("CUDA_ERROR_")
        )
    return answers
