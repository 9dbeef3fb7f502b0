"""Stream-ordered pools: what may be reused when, and what is kept."""

import os

import pytest
from drivers import BLOCK


class Pool:
    def __init__(self, driver, **settings):
        props = driver.api.CUmemPoolProps()
        props.allocType = driver.api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        props.location.type = driver.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        props.location.id = 0
        self.driver = driver
        self.handle = driver.cuMemPoolCreate(props)
        driver.later("cuMemPoolDestroy", self.handle)
        for name, value in settings.items():
            self.set(name, value)

    def _name(self, name):
        return getattr(self.driver.api.CUmemPool_attribute, f"CU_MEMPOOL_ATTR_{name.upper()}")

    def set(self, name, value):
        wide = name == "release_threshold" or name.endswith("high")
        value = self.driver.api.cuuint64_t(value) if wide else value
        self.driver.cuMemPoolSetAttribute(self.handle, self._name(name), value)

    def get(self, name):
        return int(self.driver.cuMemPoolGetAttribute(self.handle, self._name(name)))

    def take(self, size, stream):
        return int(self.driver.cuMemAllocFromPoolAsync(size, self.handle, stream))

    def give(self, pointer, stream):
        self.driver.cuMemFreeAsync(pointer, stream)


KEEP = 2**63


@pytest.fixture
def pool(driver):
    return Pool(driver, release_threshold=KEEP) if hasattr(driver, "api") else None


def test_pool_memory_holds_bytes(driver, pool):
    stream = driver.stream()
    pointer = pool.take(3 * BLOCK, stream)
    driver.cuMemsetD8Async(pointer, 5, 3 * BLOCK, stream)
    driver.cuStreamSynchronize(stream)
    assert driver.read(pointer, 3 * BLOCK) == b"\x05" * (3 * BLOCK)
    pool.give(pointer, stream)


def test_memory_freed_on_a_stream_is_reused_there_at_once(driver, pool):
    stream = driver.stream()
    gate = driver.gate(stream)
    first = pool.take(BLOCK, stream)
    pool.give(first, stream)
    second = pool.take(BLOCK, stream)
    pool.give(second, stream)
    gate.open()
    assert first == second


def test_work_queued_before_a_free_still_reaches_the_memory(driver, pool):
    stream, target = driver.stream(), driver.memory(BLOCK)
    gate = driver.gate(stream)
    first = pool.take(BLOCK, stream)
    driver.cuMemsetD8Async(first, 1, BLOCK, stream)
    driver.cuMemcpyDtoDAsync(target, first, BLOCK, stream)
    pool.give(first, stream)
    second = pool.take(BLOCK // 2, stream)
    driver.cuMemsetD8Async(second, 2, BLOCK // 2, stream)
    pool.give(second, stream)
    gate.open()
    driver.cuStreamSynchronize(stream)
    assert driver.read(target, BLOCK) == b"\x01" * BLOCK


def pool_without(driver, *rules):
    """Make a pool that keeps its memory and does not reuse it by these rules."""
    return Pool(driver, release_threshold=KEEP, **{f"reuse_{rule}": 0 for rule in rules})


def test_another_stream_reuses_memory_once_the_free_completed(driver):
    pool = pool_without(driver, "follow_event_dependencies", "allow_internal_dependencies")
    first, second = driver.stream(), driver.stream()
    pointer = pool.take(BLOCK, first)
    pool.give(pointer, first)
    driver.cuStreamSynchronize(first)
    again = pool.take(BLOCK, second)
    pool.give(again, second)
    assert again == pointer


@pytest.mark.parametrize("waits", [False, True])
def test_another_stream_reuses_freed_memory_only_if_it_waited_for_the_free(driver, waits):
    rules = ["allow_internal_dependencies", "allow_opportunistic"]
    pool = pool_without(driver, *rules, *([] if waits else ["follow_event_dependencies"]))
    first, second, event = driver.stream(), driver.stream(), driver.event()
    gate = driver.gate(first)
    pointer = pool.take(BLOCK, first)
    pool.give(pointer, first)
    if waits:
        driver.cuEventRecord(event, first)
        driver.cuStreamWaitEvent(second, event, 0)
    other = pool.take(BLOCK, second)
    assert (other == pointer) == waits
    pool.give(other, second)
    gate.open()


def test_pool_counts_used_and_reserved(driver, pool):
    stream = driver.stream()
    assert pool.get("used_mem_current") == pool.get("reserved_mem_current") == 0
    pointers = [pool.take(BLOCK, stream) for _ in range(3)]
    assert pool.get("used_mem_current") == 3 * BLOCK
    assert pool.get("reserved_mem_current") >= 3 * BLOCK
    for pointer in pointers:
        pool.give(pointer, stream)
    driver.cuStreamSynchronize(stream)
    assert pool.get("used_mem_current") == 0
    assert pool.get("used_mem_high") == 3 * BLOCK
    assert pool.get("reserved_mem_current") >= 3 * BLOCK


def test_high_water_marks_can_only_be_set_to_zero(driver, pool):
    stream = driver.stream()
    pool.give(pool.take(BLOCK, stream), stream)
    driver.cuStreamSynchronize(stream)
    pool.set("used_mem_high", 0)
    assert pool.get("used_mem_high") == 0
    name = driver.api.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_HIGH
    value = driver.api.cuuint64_t(5)
    assert driver.error("cuMemPoolSetAttribute", pool.handle, name, value) == "INVALID_VALUE"


def test_memory_above_the_release_threshold_is_released_at_synchronization(driver):
    pool, stream = Pool(driver), driver.stream()
    pool.give(pool.take(4 * BLOCK, stream), stream)
    driver.cuStreamSynchronize(stream)
    assert pool.get("reserved_mem_current") == 0


def test_trim_releases_free_memory(driver, pool):
    stream = driver.stream()
    kept = pool.take(BLOCK, stream)
    pool.give(pool.take(64 * BLOCK, stream), stream)
    driver.cuStreamSynchronize(stream)
    before = pool.get("reserved_mem_current")
    driver.cuMemPoolTrimTo(pool.handle, 0)
    assert BLOCK <= pool.get("reserved_mem_current") < before
    pool.give(kept, stream)
    driver.cuStreamSynchronize(stream)
    driver.cuMemPoolTrimTo(pool.handle, 0)
    assert pool.get("reserved_mem_current") == 0


def test_reserved_pool_memory_uses_device_capacity(driver, pool):
    stream = driver.stream()
    before, _ = driver.cuMemGetInfo()
    pointer = pool.take(64 * BLOCK, stream)
    assert before - driver.cuMemGetInfo()[0] >= 64 * BLOCK
    pool.give(pointer, stream)
    driver.cuStreamSynchronize(stream)
    driver.cuMemPoolTrimTo(pool.handle, 0)
    assert driver.cuMemGetInfo()[0] == before


def test_pool_allocation_beyond_capacity_fails(driver, pool):
    _, total = driver.cuMemGetInfo()
    taken = driver.error("cuMemAllocFromPoolAsync", 2 * total, pool.handle, driver.stream())
    assert taken == "OUT_OF_MEMORY"


def test_freeing_twice_is_refused(driver, pool):
    stream = driver.stream()
    pointer = pool.take(BLOCK, stream)
    pool.give(pointer, stream)
    assert driver.error("cuMemFreeAsync", pointer, stream) == "INVALID_VALUE"


def test_plain_free_takes_pool_memory_too(driver, pool):
    stream = driver.stream()
    pointer = pool.take(BLOCK, stream)
    driver.cuMemsetD8Async(pointer, 1, BLOCK, stream)
    driver.cuStreamSynchronize(stream)
    driver.cuMemFree(pointer)
    assert driver.error("cuMemGetAddressRange", pointer) != "SUCCESS"


def test_plain_free_of_pool_memory_does_not_wait(driver, pool):
    stream, held = driver.stream(), driver.stream()
    pointer = pool.take(BLOCK, stream)
    driver.cuStreamSynchronize(stream)
    gate = driver.gate(held)
    driver.cuMemFree(pointer)
    assert driver.error("cuStreamQuery", held) == "NOT_READY"
    gate.open()


def test_destroyed_pool_lives_until_its_last_allocation(driver):
    props_pool, stream = Pool(driver), driver.stream()
    pointer = props_pool.take(BLOCK, stream)
    driver.cuMemPoolDestroy(props_pool.handle)
    driver.write(pointer, b"alive")
    assert driver.read(pointer, 5) == b"alive"
    driver.cuMemFreeAsync(pointer, stream)
    driver.cuStreamSynchronize(stream)


def test_default_pool_serves_and_cannot_be_destroyed(driver):
    stream = driver.stream()
    pool = driver.cuDeviceGetDefaultMemPool(driver.device)
    assert int(driver.cuDeviceGetMemPool(driver.device)) == int(pool)
    pointer = int(driver.cuMemAllocAsync(BLOCK, stream))
    name = driver.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
    assert int(driver.cuPointerGetAttribute(name, pointer)) == int(pool)
    driver.cuMemFreeAsync(pointer, stream)
    assert driver.error("cuMemPoolDestroy", pool) != "SUCCESS"


def test_current_pool_of_the_device_can_be_replaced(driver, pool):
    default = driver.cuDeviceGetDefaultMemPool(driver.device)
    driver.cuDeviceSetMemPool(driver.device, pool.handle)
    stream = driver.stream()
    pointer = driver.cuMemAllocAsync(BLOCK, stream)
    assert pool.get("used_mem_current") == BLOCK
    driver.cuMemFreeAsync(pointer, stream)
    driver.cuDeviceSetMemPool(driver.device, default)


def test_device_of_a_pool_has_access(driver, pool):
    assert int(driver.cuMemPoolGetAccess(pool.handle, driver.access().location)) == 3


def test_pool_pointers_have_their_own_range(driver, pool):
    stream = driver.stream()
    first, second = pool.take(1000, stream), pool.take(5000, stream)
    base, size = driver.cuMemGetAddressRange(second + 10)
    assert (int(base), size) == (second, 5000)
    pool.give(first, stream)
    pool.give(second, stream)


# ---- between processes (here: through descriptors within one) ----


@pytest.fixture
def shared(driver):
    if not hasattr(driver, "api"):
        return None
    kinds = driver.api.CUmemAllocationHandleType
    props = driver.api.CUmemPoolProps()
    props.allocType = driver.api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.handleTypes = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    props.location.type = driver.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    pool = driver.cuMemPoolCreate(props)
    driver.later("cuMemPoolDestroy", pool)
    return pool


def test_only_exportable_pools_export(driver, pool):
    kind = driver.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    assert driver.error("cuMemPoolExportToShareableHandle", pool.handle, kind, 0) != "SUCCESS"


def test_pointer_of_an_exportable_pool_exports_once_the_pool_was(driver, shared):
    stream = driver.stream()
    pointer = driver.cuMemAllocFromPoolAsync(4096, shared, stream)
    driver.cuStreamSynchronize(stream)
    assert driver.error("cuMemPoolExportPointer", pointer) == "INVALID_VALUE"
    kind = driver.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    os.close(int(driver.cuMemPoolExportToShareableHandle(shared, kind, 0)))
    driver.cuMemPoolExportPointer(pointer)
    assert driver.error("cuMemPoolExportPointer", driver.memory(4096)) == "INVALID_VALUE"
    driver.cuMemFreeAsync(pointer, stream)


def test_pool_takes_thirty_two_megabytes_at_a_time(driver):
    stream = driver.stream()
    for size, reserved in ((1, 32), (32 << 20, 32), (33 << 20, 64)):
        pool = Pool(driver, release_threshold=KEEP)
        pointer = pool.take(size, stream)
        assert pool.get("reserved_mem_current") == reserved << 20
        assert pool.get("used_mem_current") == size
        pool.give(pointer, stream)
        driver.cuStreamSynchronize(stream)


def test_zero_pool_bytes_give_null_without_an_error(driver, pool):
    stream = driver.stream()
    assert pool.take(0, stream) == 0
    pool.give(0, stream)


def test_pool_pointer_imported_again_is_at_the_same_address_and_freed_once(driver, shared):
    kind = driver.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    stream = driver.stream()
    pointer = driver.cuMemAllocFromPoolAsync(4096, shared, stream)
    driver.cuStreamSynchronize(stream)
    descriptor = int(driver.cuMemPoolExportToShareableHandle(shared, kind, 0))
    imported = driver.cuMemPoolImportFromShareableHandle(descriptor, kind, 0)
    os.close(descriptor)
    note = driver.cuMemPoolExportPointer(pointer)
    here = int(driver.cuMemPoolImportPointer(imported, note))
    assert int(driver.cuMemPoolImportPointer(imported, note)) == here
    driver.cuMemFreeAsync(here, stream)
    driver.cuStreamSynchronize(stream)
    assert driver.error("cuMemFreeAsync", here, stream) == "INVALID_VALUE"
    driver.cuMemFreeAsync(pointer, stream)
    driver.cuStreamSynchronize(stream)
    driver.cuMemPoolDestroy(imported)


def test_device_memory_can_be_freed_in_stream_order(driver):
    stream = driver.stream()
    pointer, managed = int(driver.cuMemAlloc(8 * BLOCK)), int(driver.cuMemAllocManaged(4096, 1))
    driver.later("cuMemFree", managed)
    gate = driver.gate(stream)
    driver.cuMemFreeAsync(pointer, stream)
    assert driver.error("cuStreamQuery", stream) == "NOT_READY"
    gate.open()
    driver.cuStreamSynchronize(stream)
    assert driver.error("cuMemFree", pointer) == "INVALID_VALUE"
    assert driver.error("cuMemFreeAsync", managed, stream) == "NOT_SUPPORTED"


def test_free_of_device_memory_in_stream_order_waits_for_no_other_stream(driver):
    """As a plain free does; and after a wait for its stream the memory is everybody's."""
    held, stream = driver.stream(), driver.stream()
    pointer = int(driver.cuMemAlloc(32 * BLOCK))
    gate = driver.gate(held)
    free_before, _ = driver.cuMemGetInfo()
    driver.cuMemFreeAsync(pointer, stream)
    driver.cuStreamSynchronize(stream)
    free_after, _ = driver.cuMemGetInfo()
    assert driver.error("cuStreamQuery", held) == "NOT_READY"
    assert free_after - free_before == 32 * BLOCK
    again = driver.cuMemAlloc(32 * BLOCK)
    assert driver.error("cuStreamQuery", held) == "NOT_READY"
    gate.open()
    driver.cuMemFree(again)


def test_free_of_device_memory_in_stream_order_comes_after_what_its_stream_waits_for(driver):
    held, stream, event = driver.stream(), driver.stream(), driver.event()
    pointer = int(driver.cuMemAlloc(32 * BLOCK))
    gate = driver.gate(held)
    driver.cuMemsetD8Async(pointer, 1, 32 * BLOCK, held)
    driver.cuEventRecord(event, held)
    driver.cuStreamWaitEvent(stream, event, 0)
    free_before, _ = driver.cuMemGetInfo()
    driver.cuMemFreeAsync(pointer, stream)
    free_held, _ = driver.cuMemGetInfo()
    assert driver.error("cuStreamQuery", stream) == "NOT_READY"
    gate.open()
    driver.cuStreamSynchronize(stream)
    free_after, _ = driver.cuMemGetInfo()
    assert (free_held, free_after) == (free_before, free_before + 32 * BLOCK)
