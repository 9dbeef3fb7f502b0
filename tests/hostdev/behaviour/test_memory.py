"""Memory of every kind, and what a pointer says about itself."""

import ctypes
import itertools
import mmap

import pytest
from drivers import BLOCK, in_thread, waits_for


def attribute(driver, name, pointer):
    which = getattr(driver.api.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
    return driver.cuPointerGetAttribute(which, pointer)


@pytest.mark.parametrize("size", [1, 511, 512, 4096, 1 << 20, (1 << 20) + 1, 3 * BLOCK + 5])
def test_device_memory_is_aligned_and_has_its_range(driver, size):
    pointer = driver.memory(size)
    base, length = driver.cuMemGetAddressRange(pointer + size - 1)
    assert pointer % 512 == 0
    assert (int(base), length) == (pointer, size)


def test_allocations_do_not_overlap(driver):
    sizes = [1, 700, 4096, 100_000, BLOCK, 5 * BLOCK]
    ranges = sorted((driver.memory(size), size) for size in sizes * 20)
    for (first, size), (second, _) in itertools.pairwise(ranges):
        assert first + size <= second


def test_large_allocations_are_rounded_and_released(driver):
    before, _ = driver.cuMemGetInfo()
    pointer = driver.cuMemAlloc(64 * BLOCK)
    during, _ = driver.cuMemGetInfo()
    driver.cuMemFree(pointer)
    after, _ = driver.cuMemGetInfo()
    assert before - during == 64 * BLOCK
    assert after == before


def test_small_allocations_share_a_block(driver):
    driver.memory(512)
    before, _ = driver.cuMemGetInfo()
    for _ in range(100):
        driver.memory(512)
    after, _ = driver.cuMemGetInfo()
    assert before - after <= BLOCK


def test_allocation_beyond_capacity_fails_without_a_change(driver):
    before, total = driver.cuMemGetInfo()
    assert driver.error("cuMemAlloc", total + BLOCK) == "OUT_OF_MEMORY"
    # A GPU's driver may keep a block for itself, or give one back, when it has to search.
    assert abs(driver.cuMemGetInfo()[0] - before) <= BLOCK


def test_zero_bytes_are_refused(driver):
    assert driver.error("cuMemAlloc", 0) == "INVALID_VALUE"


def test_freeing_an_unknown_address_is_refused(driver):
    pointer = driver.memory(4096)
    assert driver.error("cuMemFree", pointer + 512) == "INVALID_VALUE"
    assert driver.error("cuMemFree", 0) == "SUCCESS"


def test_freeing_twice_is_refused(driver):
    pointer = driver.cuMemAlloc(4 * BLOCK)
    driver.cuMemFree(pointer)
    assert driver.error("cuMemFree", pointer) == "INVALID_VALUE"


def test_free_waits_for_queued_work(driver):
    stream = driver.stream()
    pointer, target = driver.cuMemAlloc(8 * BLOCK), driver.memory(8 * BLOCK)
    driver.cuMemsetD8Async(pointer, 3, 8 * BLOCK, stream)
    driver.cuMemcpyDtoDAsync(target, pointer, 8 * BLOCK, stream)
    driver.cuMemFree(pointer)
    assert driver.error("cuStreamQuery", stream) == "SUCCESS"
    assert driver.read(target + 8 * BLOCK - 1, 1) == b"\x03"


def test_address_range_of_an_outside_address_is_not_found(driver):
    assert driver.error("cuMemGetAddressRange", 4096) in ("NOT_FOUND", "INVALID_VALUE")


def test_pinned_memory_is_accessible_to_host_and_device(driver):
    pointer, stream = driver.pinned(100), driver.stream()
    driver.cuMemsetD8Async(pointer, 9, 100, stream)
    driver.cuStreamSynchronize(stream)
    assert ctypes.string_at(pointer, 100) == b"\x09" * 100
    assert int(driver.cuMemHostGetDevicePointer(pointer, 0)) == pointer


def test_pinned_memory_does_not_use_device_capacity(driver):
    before, _ = driver.cuMemGetInfo()
    driver.pinned(8 * BLOCK)
    assert driver.cuMemGetInfo()[0] == before


def test_pointer_attributes_of_pinned_memory(driver):
    pointer = driver.pinned(4096, 1)
    assert int(attribute(driver, "MEMORY_TYPE", pointer + 5)) == 1
    assert int(attribute(driver, "HOST_POINTER", pointer + 5)) == pointer + 5
    assert driver.cuMemHostGetFlags(pointer) == 2  # mapped, as all is; portable goes unsaid


def test_pointer_attributes_of_device_memory(driver):
    pointer = driver.memory(4096)
    assert int(attribute(driver, "MEMORY_TYPE", pointer)) == 2
    assert int(attribute(driver, "DEVICE_ORDINAL", pointer)) == 0
    assert int(attribute(driver, "DEVICE_POINTER", pointer + 9)) == pointer + 9
    assert int(attribute(driver, "RANGE_START_ADDR", pointer + 9)) == pointer
    assert int(attribute(driver, "RANGE_SIZE", pointer)) == 4096
    assert not attribute(driver, "IS_MANAGED", pointer)


def test_device_memory_has_no_host_pointer(driver):
    pointer = driver.memory(16)
    name = driver.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_HOST_POINTER
    code, value = driver.api.cuPointerGetAttribute(name, pointer)
    assert int(code) != 0 or int(value) == 0


def test_managed_memory_is_accessible_to_host_and_device(driver):
    pointer = int(driver.cuMemAllocManaged(BLOCK, 1))
    driver.later("cuMemFree", pointer)
    assert attribute(driver, "IS_MANAGED", pointer)
    assert int(attribute(driver, "MEMORY_TYPE", pointer)) == 2
    driver.cuMemsetD8(pointer, 4, BLOCK)
    driver.cuCtxSynchronize()
    assert ctypes.string_at(pointer, 4) == b"\x04" * 4


def test_managed_memory_needs_an_attach_flag(driver):
    assert driver.error("cuMemAllocManaged", 4096, 0) == "INVALID_VALUE"


def test_unknown_pointer_is_refused_singly_and_zero_in_a_list(driver):
    names = driver.api.CUpointer_attribute
    plain = ctypes.create_string_buffer(16)
    address = ctypes.addressof(plain)
    kind = names.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    assert driver.error("cuPointerGetAttribute", kind, address) == "INVALID_VALUE"
    wanted = [names.CU_POINTER_ATTRIBUTE_MAPPED, names.CU_POINTER_ATTRIBUTE_RANGE_SIZE]
    assert [int(value) for value in driver.cuPointerGetAttributes(2, wanted, address)] == [0, 0]


def test_buffer_ids_differ_also_at_the_same_address(driver):
    first = driver.cuMemAlloc(4 * BLOCK)
    before = attribute(driver, "BUFFER_ID", first)
    driver.cuMemFree(first)
    second = driver.memory(4 * BLOCK)
    assert attribute(driver, "BUFFER_ID", second) != before


# ---- the caller's own memory ----


@pytest.fixture
def pages():
    with mmap.mmap(-1, 16 * 4096) as area:
        yield ctypes.addressof(ctypes.c_char.from_buffer(area))


def test_registered_memory_becomes_reachable_until_unregistered(driver, pages):
    driver.cuMemHostRegister(pages, 8192, 0)
    stream = driver.stream()
    driver.cuMemsetD8Async(pages, 6, 8192, stream)
    driver.cuStreamSynchronize(stream)
    assert ctypes.string_at(pages, 8192) == b"\x06" * 8192
    assert int(attribute(driver, "MEMORY_TYPE", pages)) == 1
    driver.cuMemHostUnregister(pages)
    kind = driver.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    assert driver.error("cuPointerGetAttribute", kind, pages) == "INVALID_VALUE"


def test_registering_twice_is_refused(driver, pages):
    driver.cuMemHostRegister(pages, 8192, 0)
    driver.later("cuMemHostUnregister", pages)
    again = driver.error("cuMemHostRegister", pages, 8192, 0)
    overlapping = driver.error("cuMemHostRegister", pages + 4096, 8192, 0)
    assert again == overlapping == "HOST_MEMORY_ALREADY_REGISTERED"


def test_unregistering_unregistered_memory_is_refused(driver, pages):
    assert driver.error("cuMemHostUnregister", pages) == "HOST_MEMORY_NOT_REGISTERED"


def test_registering_nothing_is_refused(driver, pages):
    assert driver.error("cuMemHostRegister", pages, 0, 0) == "INVALID_VALUE"


def test_pinned_and_device_memory_are_freed_by_their_own_function_only(driver):
    pointer = driver.memory(4096)
    assert driver.error("cuMemFreeHost", pointer) == "INVALID_VALUE"


def test_unregistering_waits_for_queued_work(driver, pages):
    driver.cuMemHostRegister(pages, 8192, 0)
    gate = driver.gate(driver.stream())
    assert waits_for(driver, gate, lambda: driver.cuMemHostUnregister(pages))


@pytest.mark.parametrize(
    ("allocate", "free"),
    [
        (("cuMemAlloc", 4096), "cuMemFree"),
        (("cuMemAlloc", 8 * BLOCK), "cuMemFree"),
        (("cuMemAllocManaged", 4096, 1), "cuMemFree"),
        (("cuMemHostAlloc", 4096, 0), "cuMemFreeHost"),
    ],
)
def test_freeing_waits_for_queued_work_of_any_stream(driver, allocate, free):
    pointer = int(getattr(driver, allocate[0])(*allocate[1:]))
    gate = driver.gate(driver.stream())
    assert waits_for(driver, gate, lambda: getattr(driver, free)(pointer))


def test_allocating_does_not_wait(driver):
    stream = driver.stream()
    gate = driver.gate(stream)
    pointers = driver.cuMemAlloc(4096), driver.cuMemAlloc(64 * BLOCK)
    assert driver.error("cuStreamQuery", stream) == "NOT_READY"
    gate.open()
    for pointer in pointers:
        driver.cuMemFree(pointer)


def test_memory_can_be_freed_without_a_current_context(driver):
    device, pinned = driver.cuMemAlloc(4096), int(driver.cuMemHostAlloc(4096, 0))
    in_thread(lambda: (driver.cuMemFree(device), driver.cuMemFreeHost(pinned)))
    assert driver.error("cuMemFree", device) == "INVALID_VALUE"


def test_zero_pinned_bytes_give_null_without_an_error(driver):
    assert int(driver.cuMemHostAlloc(0, 0)) == 0
