"""Two devices: whose copies reach mapped memory, and who is given access to it."""

import pytest
from drivers import BLOCK


def second(driver):
    """Return the primary context of the second device."""
    count = driver.cuDeviceGetCount()
    if count < 2:
        pytest.skip(f"needs two devices: {count} found")
    if not driver.cuDeviceCanAccessPeer(0, 1) or not driver.cuDeviceCanAccessPeer(1, 0):
        pytest.skip("needs two devices that reach each other's memory")
    context = driver.cuDevicePrimaryCtxRetain(driver.cuDeviceGet(1))
    driver.later("cuDevicePrimaryCtxRelease", 1)
    return context


def pages(driver, device, access):
    """Map a page of a device, with access for these devices."""
    handle = driver.cuMemCreate(BLOCK, driver.prop(device=device), 0)
    driver.later("cuMemRelease", handle)
    pointer = driver.reserve(BLOCK)
    driver.map(pointer, handle, access=False)
    driver.cuMemSetAccess(pointer, BLOCK, [driver.access(device=d) for d in access], len(access))
    return pointer


def write(driver, pointer, data):
    """Write, and wait: the copy of small data returns before the device has it."""
    driver.write(pointer, data)
    driver.cuCtxSynchronize()


class Current:
    """A context made current for a block of code."""

    def __init__(self, driver, context):
        self.driver, self.context = driver, context

    def __enter__(self):
        self.driver.cuCtxPushCurrent(self.context)

    def __exit__(self, *exception):
        self.driver.cuCtxSynchronize()
        self.driver.cuCtxPopCurrent()


def access_of(driver, pointer, device):
    return driver.cuMemGetAccess(driver.access(device=device).location, pointer)


def test_device_is_not_its_own_peer(driver):
    assert driver.cuDeviceCanAccessPeer(0, 0) == 0


def test_copy_between_peers_needs_access_of_the_owners_alone(driver):
    other = second(driver)
    src, dst = pages(driver, 0, [0]), pages(driver, 1, [1])
    write(driver, src, b"peer" * 1000)
    stream = driver.stream()
    driver.cuMemcpyPeerAsync(dst, other, src, driver.context, 4000, stream)
    driver.cuStreamSynchronize(stream)
    with Current(driver, other):
        assert driver.read(dst, 4000) == b"peer" * 1000


def test_other_copies_need_access_of_the_device_that_copies(driver):
    other = second(driver)
    src, dst = pages(driver, 0, [0]), pages(driver, 1, [1])
    for name in ("cuMemcpyDtoDAsync", "cuMemcpyAsync"):
        for context in (driver.context, other):
            with Current(driver, context):
                assert driver.error(name, dst, src, 4096, 0) == "INVALID_VALUE"


def test_device_with_access_copies_from_and_to_its_peers_memory(driver):
    other = second(driver)
    shared, own = pages(driver, 0, [0, 1]), pages(driver, 1, [1])
    write(driver, shared, b"a" * 4096)
    with Current(driver, other):
        driver.cuMemcpyDtoDAsync(own, shared, 4096, 0)
        driver.cuCtxSynchronize()
        assert driver.read(own, 4096) == b"a" * 4096
        driver.cuMemsetD8Async(own, ord("b"), 4096, 0)
        driver.cuMemcpyAsync(shared, own, 4096, 0)
    assert driver.read(shared, 4096) == b"b" * 4096
    # The owner has no access to its peer's page.
    assert driver.error("cuMemcpyDtoDAsync", own, shared, 4096, 0) == "INVALID_VALUE"


def test_device_with_access_fills_its_peers_memory(driver):
    other = second(driver)
    shared = pages(driver, 0, [0, 1])
    with Current(driver, other):
        driver.cuMemsetD8Async(shared, ord("c"), BLOCK, 0)
    assert driver.read(shared, BLOCK) == b"c" * BLOCK


def test_one_call_gives_several_devices_access(driver):
    second(driver)
    pointer = pages(driver, 0, [0, 1])
    assert [access_of(driver, pointer, device) for device in (0, 1)] == [3, 3]


def test_access_of_one_device_is_kept_while_anothers_changes(driver):
    second(driver)
    pointer = pages(driver, 0, [0])
    assert [access_of(driver, pointer, device) for device in (0, 1)] == [3, 0]
    driver.cuMemSetAccess(pointer, BLOCK, [driver.access(device=1)], 1)
    assert [access_of(driver, pointer, device) for device in (0, 1)] == [3, 3]
    driver.cuMemSetAccess(pointer, BLOCK, [driver.access("NONE", device=1)], 1)
    assert [access_of(driver, pointer, device) for device in (0, 1)] == [3, 0]


def test_one_call_gives_a_peer_access_to_neighbouring_mappings(driver):
    other = second(driver)
    pointer = driver.reserve(3 * BLOCK)
    for index in range(3):
        driver.map(pointer + index * BLOCK, driver.physical())
    driver.cuMemSetAccess(pointer, 3 * BLOCK, [driver.access(device=1)], 1)
    with Current(driver, other):
        driver.cuMemsetD8Async(pointer, ord("d"), 3 * BLOCK, 0)
    assert driver.read(pointer, 3 * BLOCK) == b"d" * 3 * BLOCK


def test_mapping_of_a_moved_handle_has_no_peers_before_they_are_given_access_again(driver):
    second(driver)
    pointer, handle = driver.reserve(2 * BLOCK), driver.physical()
    driver.cuMemMap(pointer, BLOCK, 0, handle, 0)
    access = [driver.access(device=device) for device in (0, 1)]
    driver.cuMemSetAccess(pointer, BLOCK, access, 2)
    driver.map(pointer + BLOCK, handle)
    driver.cuMemUnmap(pointer, BLOCK)
    assert [access_of(driver, pointer + BLOCK, device) for device in (0, 1)] == [3, 0]
