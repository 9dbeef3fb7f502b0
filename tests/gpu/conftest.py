"""Everything here needs a CUDA device; without one the whole folder is skipped, with the reason."""

import pytest

import gpumem

STATUS = gpumem.driver_status()


def pytest_collection_modifyitems(items):
    if STATUS.available:
        return
    skip = pytest.mark.skip(reason=f"needs a CUDA device: {STATUS.reason}")
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(skip)


@pytest.fixture
def arena():
    with gpumem.Arena("cuda:0") as arena:
        yield arena
        arena.validate()


@pytest.fixture
def driver():
    """cuda-python's driver module with the device's primary context current."""
    from cuda.bindings import driver

    def call(function, *arguments):
        status, *results = function(*arguments)
        assert status == driver.CUresult.CUDA_SUCCESS, (function.__name__, status)
        return results[0] if len(results) == 1 else tuple(results)

    driver.call = call
    call(driver.cuInit, 0)
    call(driver.cuCtxSetCurrent, call(driver.cuDevicePrimaryCtxRetain, 0))
    yield driver
    call(driver.cuCtxSynchronize)
