"""Devices and contexts."""

from drivers import in_thread


def test_thread_without_a_context_is_refused(driver):
    assert in_thread(lambda: driver.error("cuMemAlloc", 16)) == "INVALID_CONTEXT"
    assert in_thread(lambda: driver.error("cuStreamCreate", 0)) == "INVALID_CONTEXT"
    assert in_thread(lambda: driver.error("cuMemGetInfo")) == "INVALID_CONTEXT"


def test_thread_starts_with_an_empty_stack(driver):
    assert int(in_thread(driver.cuCtxGetCurrent)) == 0
    assert in_thread(lambda: driver.error("cuCtxPopCurrent")) == "INVALID_CONTEXT"


def test_push_and_pop_restore_what_was_current(driver):
    def run():
        driver.cuCtxPushCurrent(driver.context)
        current = int(driver.cuCtxGetCurrent())
        popped = int(driver.cuCtxPopCurrent())
        return current, popped, int(driver.cuCtxGetCurrent())

    mine = int(driver.context)
    assert in_thread(run) == (mine, mine, 0)


def test_setting_no_context_clears_the_current_one(driver):
    def run():
        driver.cuCtxSetCurrent(driver.context)
        driver.cuCtxSetCurrent(0)
        return int(driver.cuCtxGetCurrent())

    assert in_thread(run) == 0


def test_retaining_again_gives_the_same_primary_context(driver):
    again = driver.cuDevicePrimaryCtxRetain(driver.device)
    assert int(again) == int(driver.context)
    driver.cuDevicePrimaryCtxRelease(driver.device)
    assert driver.cuDevicePrimaryCtxGetState(driver.device)[1] == 1
    assert int(driver.cuCtxGetCurrent()) == int(driver.context)


def test_device_that_does_not_exist_is_refused(driver):
    count = driver.cuDeviceGetCount()
    assert driver.error("cuDeviceGet", count) == "INVALID_DEVICE"
    assert driver.error("cuDeviceGet", -1) == "INVALID_DEVICE"


def test_free_and_total_memory_agree_with_the_device(driver):
    free, total = driver.cuMemGetInfo()
    assert 0 < free <= total <= driver.cuDeviceTotalMem(driver.device)


def test_driver_errors_have_names(driver):
    error = driver.api.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    assert driver.cuGetErrorName(error) == b"CUDA_ERROR_OUT_OF_MEMORY"
    assert driver.cuGetErrorString(error) == b"out of memory"


def test_priorities_run_from_least_to_greatest(driver):
    least, greatest = driver.cuCtxGetStreamPriorityRange()
    assert least == 0
    assert greatest < 0


def test_required_capabilities_are_present(driver):
    attributes = driver.api.CUdevice_attribute
    for name in (
        "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
        "UNIFIED_ADDRESSING",
        "MEMORY_POOLS_SUPPORTED",
        "CAN_USE_64_BIT_STREAM_MEM_OPS",
        "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
    ):
        attribute = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}")
        assert driver.cuDeviceGetAttribute(attribute, driver.device) == 1, name
