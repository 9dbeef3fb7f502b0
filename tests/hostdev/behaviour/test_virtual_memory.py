"""Virtual memory: what a GPU allows with reserved addresses and physical handles."""

import os

import pytest
from drivers import BLOCK


def test_granularity_is_two_megabytes(driver):
    for option in driver.api.CUmemAllocationGranularity_flags:
        assert driver.cuMemGetAllocationGranularity(driver.prop(), option) == BLOCK


def test_mapped_memory_holds_bytes(driver):
    pointer = driver.reserve(4 * BLOCK)
    driver.map(pointer + BLOCK, driver.physical())
    driver.write(pointer + BLOCK, b"x" * BLOCK)
    assert driver.read(pointer + BLOCK, BLOCK) == b"x" * BLOCK


def test_one_handle_mapped_at_two_addresses_is_coherent_in_stream_order(driver):
    pointer, handle, stream = driver.reserve(2 * BLOCK), driver.physical(), driver.stream()
    target = driver.memory(BLOCK)
    driver.map(pointer, handle)
    gate = driver.gate(stream)
    driver.cuMemsetD8Async(pointer, 5, BLOCK, stream)
    driver.map(pointer + BLOCK, handle)
    driver.cuMemcpyDtoDAsync(target, pointer + BLOCK, BLOCK, stream)
    gate.open()
    driver.cuStreamSynchronize(stream)
    assert driver.read(target, BLOCK) == b"\x05" * BLOCK


def test_neighbouring_mappings_are_one_range_to_a_copy(driver):
    pointer = driver.reserve(3 * BLOCK)
    for index in range(3):
        driver.map(pointer + index * BLOCK, driver.physical())
    data = bytes(range(256)) * (3 * BLOCK // 256)
    driver.write(pointer, data)
    assert driver.read(pointer, 3 * BLOCK) == data


def test_handle_keeps_its_bytes_when_it_moves(driver):
    pointer, handle = driver.reserve(2 * BLOCK), driver.physical()
    driver.map(pointer, handle)
    driver.write(pointer, b"m" * 100)
    driver.cuMemUnmap(pointer, BLOCK)
    driver.map(pointer + BLOCK, handle)
    assert driver.read(pointer + BLOCK, 100) == b"m" * 100


def test_offset_into_a_handle_is_not_supported(driver):
    pointer, handle = driver.reserve(2 * BLOCK), driver.physical(2 * BLOCK)
    assert driver.error("cuMemMap", pointer, BLOCK, BLOCK, handle, 0) == "NOT_SUPPORTED"


def test_part_of_a_mapping_cannot_be_unmapped(driver):
    pointer = driver.reserve(4 * BLOCK)
    driver.map(pointer, driver.physical(2 * BLOCK), 2 * BLOCK)
    assert driver.error("cuMemUnmap", pointer, BLOCK) == "INVALID_VALUE"
    assert driver.error("cuMemUnmap", pointer + BLOCK, BLOCK) == "INVALID_VALUE"


def test_several_whole_mappings_are_unmapped_in_one_call(driver):
    pointer = driver.reserve(3 * BLOCK)
    for index in range(3):
        driver.map(pointer + index * BLOCK, driver.physical())
    driver.cuMemUnmap(pointer, 3 * BLOCK)
    for index in range(3):
        driver.map(pointer + index * BLOCK, driver.physical())


def test_unmapping_skips_gaps(driver):
    pointer = driver.reserve(8 * BLOCK)
    for index in (1, 3):
        driver.cuMemMap(pointer + index * BLOCK, BLOCK, 0, driver.physical(), 0)
    driver.cuMemUnmap(pointer, 5 * BLOCK)
    driver.cuMemUnmap(pointer, 5 * BLOCK)
    driver.map(pointer + BLOCK, driver.physical(3 * BLOCK), 3 * BLOCK)


def test_unmapping_unreserved_addresses_is_refused(driver):
    pointer = driver.reserve(BLOCK)
    assert driver.error("cuMemUnmap", pointer + (1 << 40), BLOCK) == "INVALID_VALUE"
    assert driver.error("cuMemUnmap", pointer, 0) == "INVALID_VALUE"


def test_handle_is_mapped_whole(driver):
    pointer, handle = driver.reserve(4 * BLOCK), driver.physical(2 * BLOCK)
    for size in (BLOCK, 3 * BLOCK, 4096):
        assert driver.error("cuMemMap", pointer, size, 0, handle, 0) == "NOT_SUPPORTED"
    driver.map(pointer, handle, 2 * BLOCK)


def test_occupied_address_cannot_be_mapped(driver):
    pointer = driver.reserve(2 * BLOCK)
    driver.map(pointer, driver.physical())
    assert driver.error("cuMemMap", pointer, BLOCK, 0, driver.physical(), 0) == "INVALID_VALUE"


def test_only_reserved_addresses_can_be_mapped(driver):
    pointer, handle = driver.reserve(BLOCK) + (1 << 40), driver.physical()
    assert driver.error("cuMemMap", pointer, BLOCK, 0, handle, 0) == "INVALID_VALUE"


def test_range_with_mappings_cannot_be_freed(driver):
    pointer = driver.reserve(2 * BLOCK)
    driver.map(pointer, driver.physical())
    assert driver.error("cuMemAddressFree", pointer, 2 * BLOCK) == "INVALID_VALUE"


def test_memory_cannot_be_reached_before_access_is_set(driver):
    pointer = driver.reserve(BLOCK)
    driver.map(pointer, driver.physical(), access=False)
    assert driver.error("cuMemcpyHtoD", pointer, b"x" * 16, 16) != "SUCCESS"
    driver.cuMemSetAccess(pointer, BLOCK, [driver.access()], 1)
    driver.write(pointer, b"x" * 16)


def test_access_query_returns_what_was_set(driver):
    pointer = driver.reserve(BLOCK)
    driver.map(pointer, driver.physical())
    assert driver.cuMemGetAccess(driver.access().location, pointer) == 3


def test_access_needs_a_mapping(driver):
    pointer = driver.reserve(2 * BLOCK)
    driver.map(pointer, driver.physical())
    access = [driver.access()]
    assert driver.error("cuMemSetAccess", pointer, 2 * BLOCK, access, 1) == "INVALID_VALUE"


@pytest.mark.parametrize("size", [0, 1, 4096, BLOCK - 1, BLOCK + 4096])
def test_sizes_are_multiples_of_the_granularity(driver, size):
    assert driver.error("cuMemCreate", size, driver.prop(), 0) == "INVALID_VALUE"


def test_range_far_larger_than_memory_can_be_reserved(driver):
    size = 32 << 40
    pointer = driver.cuMemAddressReserve(size, 0, 0, 0)
    assert int(pointer) % BLOCK == 0
    driver.cuMemAddressFree(pointer, size)


def test_memory_stays_while_mapped_after_its_handle_is_released(driver):
    pointer, handle = driver.reserve(BLOCK), driver.cuMemCreate(BLOCK, driver.prop(), 0)
    driver.map(pointer, handle)
    driver.cuMemRelease(handle)
    driver.write(pointer, b"kept")
    assert driver.read(pointer, 4) == b"kept"


def test_releasing_twice_is_refused(driver):
    handle = driver.cuMemCreate(BLOCK, driver.prop(), 0)
    driver.cuMemRelease(handle)
    assert driver.error("cuMemRelease", handle) == "INVALID_VALUE"


def test_handles_are_charged_until_released_and_unmapped(driver):
    pointer = driver.reserve(16 * BLOCK)
    before, _ = driver.cuMemGetInfo()
    handle = driver.cuMemCreate(16 * BLOCK, driver.prop(), 0)
    driver.cuMemMap(pointer, 16 * BLOCK, 0, handle, 0)
    driver.cuMemRelease(handle)
    assert before - driver.cuMemGetInfo()[0] == 16 * BLOCK
    driver.cuMemUnmap(pointer, 16 * BLOCK)
    assert driver.cuMemGetInfo()[0] == before


def test_handle_of_a_mapped_address_can_be_retained(driver):
    pointer, handle = driver.reserve(2 * BLOCK), driver.cuMemCreate(BLOCK, driver.prop(), 0)
    driver.map(pointer, handle)
    driver.write(pointer, b"same")
    driver.cuMemRelease(handle)
    again = driver.cuMemRetainAllocationHandle(pointer)
    driver.later("cuMemRelease", again)
    driver.map(pointer + BLOCK, again)
    assert driver.read(pointer + BLOCK, 4) == b"same"


def test_handles_export_as_descriptors_and_import(driver):
    kinds = driver.api.CUmemAllocationHandleType
    kind = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    pointer, handle = driver.reserve(2 * BLOCK), driver.physical(exportable=True)
    driver.map(pointer, handle)
    driver.write(pointer, b"shared")
    descriptor = int(driver.cuMemExportToShareableHandle(handle, kind, 0))
    imported = driver.cuMemImportFromShareableHandle(descriptor, kind)
    os.close(descriptor)
    driver.later("cuMemRelease", imported)
    driver.map(pointer + BLOCK, imported)
    assert driver.read(pointer + BLOCK, 6) == b"shared"


def test_only_exportable_handles_export(driver):
    kind = driver.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    assert driver.error("cuMemExportToShareableHandle", driver.physical(), kind, 0) != "SUCCESS"


def test_handle_properties_are_those_of_creation(driver):
    prop = driver.cuMemGetAllocationPropertiesFromHandle(driver.physical())
    assert prop.location.type == driver.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    assert prop.location.id == 0


def test_virtual_memory_calls_do_not_wait_for_streams(driver):
    stream, pointer = driver.stream(), driver.reserve(BLOCK)
    gate = driver.gate(stream)
    handle = driver.cuMemCreate(BLOCK, driver.prop(), 0)
    driver.cuMemMap(pointer, BLOCK, 0, handle, 0)
    driver.cuMemSetAccess(pointer, BLOCK, [driver.access()], 1)
    driver.cuMemUnmap(pointer, BLOCK)
    driver.cuMemRelease(handle)
    assert driver.error("cuStreamQuery", stream) == "NOT_READY"
    gate.open()


@pytest.mark.parametrize("flags", ["NONE", "READ"])
def test_writing_without_access_is_refused_and_the_context_lives(driver, flags):
    pointer, stream = driver.reserve(BLOCK), driver.stream()
    driver.map(pointer, driver.physical())
    driver.cuMemSetAccess(pointer, BLOCK, [driver.access(flags)], 1)
    assert driver.error("cuMemsetD8Async", pointer, 1, 64, stream) == "INVALID_VALUE"
    assert driver.error("cuMemcpyHtoD", pointer, b"x" * 64, 64) == "INVALID_VALUE"
    driver.cuStreamSynchronize(stream)
    driver.memory(64)


def test_importing_a_handle_charges_nothing(driver):
    kind = driver.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    handle = driver.physical(16 * BLOCK, exportable=True)
    descriptor = int(driver.cuMemExportToShareableHandle(handle, kind, 0))
    before, _ = driver.cuMemGetInfo()
    imported = driver.cuMemImportFromShareableHandle(descriptor, kind)
    assert driver.cuMemGetInfo()[0] == before
    driver.cuMemRelease(imported)
    os.close(descriptor)


def test_reservation_is_freed_whole(driver):
    pointer = driver.cuMemAddressReserve(4 * BLOCK, 0, 0, 0)
    assert driver.error("cuMemAddressFree", pointer, 2 * BLOCK) == "INVALID_VALUE"
    driver.cuMemAddressFree(pointer, 4 * BLOCK)
    assert driver.error("cuMemAddressFree", pointer, 4 * BLOCK) == "INVALID_VALUE"


def test_address_range_of_a_mapping_is_its_reservation(driver):
    names = driver.api.CUpointer_attribute
    pointer = driver.reserve(4 * BLOCK)
    driver.map(pointer + BLOCK, driver.physical())
    ask = driver.cuPointerGetAttribute
    assert int(ask(names.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, pointer + BLOCK)) == pointer
    assert int(ask(names.CU_POINTER_ATTRIBUTE_RANGE_SIZE, pointer + BLOCK)) == 4 * BLOCK
    base, size = driver.cuMemGetAddressRange(pointer + BLOCK + 5)
    assert (int(base), size) == (pointer + BLOCK, BLOCK)
