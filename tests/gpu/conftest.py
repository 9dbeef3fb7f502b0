"""Everything here needs a CUDA device; without one the whole folder is skipped, with the reason.

Over the null CUDA (see `.ci/null`) the tests of PyTorch run but for those that need computed values
or other processes; `NOT_OVER_THE_NULL_CUDA` names them.
"""

import os
import threading

import numpy as np
import pytest

import gpumem

STATUS = gpumem.driver_status()
NOT_OVER_THE_NULL_CUDA = {
    "processes.shared": "memory is not shared with other processes",
    "tensors_for_the_other_allocator": "memory is not shared with other processes",
    "with_ddp": "parameters' shapes are compared by values on the GPU, with those of other ranks",
    "max_autotune": "its result is compared on the GPU",
    "pinned_memory_alone_is_right": "its results are compared on the GPU",
}
"""Parts of tests' names, with the reasons."""


def pytest_collection_modifyitems(items):
    if "GPUMEM_TEST_NULL_CUDA" in os.environ:
        for item in items:
            for part, reason in NOT_OVER_THE_NULL_CUDA.items():
                if part in item.name:
                    item.add_marker(pytest.mark.skip(reason=f"over the null CUDA: {reason}"))
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
        arena.check_invariants()


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


class Gate:
    """Holds streams back until it is opened.

    It opens by itself after a minute, so that a library that waits for a held stream, where it
    should not, fails a test and does not hang the run.
    """

    def __init__(self, driver):
        self._driver = driver
        # Where another stream is held by now, no dropped pinned memory may go back.
        self._memory = gpumem.Arena("cuda:0/host_accessible", {"oom_wait_ms": 0}).allocate(8)
        self._word = np.frombuffer(self._memory, np.uint64)
        self._word[0] = 0
        self._timers = []
        self.open_after(60)

    def hold(self, stream):
        """Let nothing that is queued on the stream from now on run before the gate is opened."""
        handle = stream if isinstance(stream, int) else stream.ptr
        self._driver.call(self._driver.cuStreamWaitValue64, handle, self._memory.ptr, 1, 0)

    @property
    def is_open(self):
        return bool(self._word[0])

    def open(self):
        self._word[0] = 1

    def open_after(self, seconds):
        """Open it from another thread, for calls that must wait until then."""
        self._timers.append(threading.Timer(seconds, self.open))
        self._timers[-1].start()

    def close(self):
        self.open()
        for timer in self._timers:
            timer.cancel()
            timer.join()
        self._driver.call(self._driver.cuCtxSynchronize)


@pytest.fixture
def gate(driver):
    gate = Gate(driver)
    yield gate
    gate.close()
