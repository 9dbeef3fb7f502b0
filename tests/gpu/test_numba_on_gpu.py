"""Numba's arrays in gpumem's memory, on a GPU; each in a process, since Numba switches once."""

import pytest
from helpers import child

import gpumem

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
if gpumem.driver_status().available:
    # Its functions for NumPy's are made from NumPy's own, of which newer versions have fewer.
    tried = child.run(
        "import warnings; warnings.simplefilter('ignore'); from numba.cuda import cudaimpl"
    )
    if tried.returncode:
        why = tried.stderr.strip().splitlines()[-1]
        pytest.skip(f"numba-cuda does not work here: {why}", allow_module_level=True)

SETUP = """
import warnings
warnings.simplefilter("ignore")
import gc
import numpy as np
import gpumem
import gpumem.integrations.numba as integration
arena = gpumem.Arena("cuda:0", {config})
integration.enable(arena{options})
from numba import cuda

@cuda.jit
def add(array, value):
    i = cuda.grid(1)
    if i < array.size:
        array[i] += value
"""


def script(body, config="{'max_mem': 1 << 30}", options=""):
    done = child.run(SETUP.format(config=config, options=options) + body)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout + done.stderr


def test_numba_kernels_run_in_the_arena():
    script("""
array = cuda.to_device(np.zeros(1 << 20, np.float32))
add[4096, 256](array, 3)
add[4096, 256](array, 4)
assert array.copy_to_host().min() == 7
assert arena.stats().requested_in_use == 4 << 20
pinned = cuda.pinned_array(1000, np.float32)
mapped = cuda.mapped_array(1000, np.float32)
mapped[:] = 1
add[4, 256](mapped, 2)
cuda.synchronize()
assert mapped.min() == 3
del array, pinned, mapped
gc.collect()
assert arena.stats().in_use == 0
arena.check_invariants()
print("ok")
""")


def test_block_waits_for_non_blocking_streams():
    script("""
from cuda.bindings import driver
word = np.frombuffer(gpumem.Arena("cuda:0/host_accessible").allocate(8), np.uint64)
word[0] = 0
held = gpumem.Stream("cuda:0")        # non-blocking
side = cuda.external_stream(held.ptr)
array = cuda.device_array(64 << 20, np.uint8)
keeper = cuda.device_array(1000, np.uint8)
add[1024, 256, side](keeper, 1)         # loaded now: the driver waits for the device to load it
cuda.synchronize()
address = array.__cuda_array_interface__["data"][0]
assert driver.cuStreamWaitValue64(held.ptr, word.ctypes.data, 1, 0)[0] == 0
add[1024, 256, side](array, 7)
del array                               # its kernel has not begun
gc.collect()
other = cuda.device_array(64 << 20, np.uint8)
assert other.__cuda_array_interface__["data"][0] != address
word[0] = 1
held.synchronize()
print("ok")
""")


def test_memory_is_reused_and_out_of_memory_is_numbas_error():
    script(
        """
for _ in range(200):
    array = cuda.device_array(30 << 20, np.uint8)
    add[1024, 256](array, 1)
    del array
assert arena.stats().reserved <= 64 << 20
from numba.cuda.cudadrv.driver import CudaAPIError
try:
    cuda.device_array(65 << 20, np.uint8)
except CudaAPIError as error:
    assert isinstance(error, gpumem.OutOfMemoryError) and error.requested_nbytes == 65 << 20
    info = cuda.current_context().get_memory_info()
    assert info.total == 64 << 20 and 0 < info.free <= info.total
    print("ok")
""",
        config="{'max_mem': 64 << 20}",
    )


def test_disable_after_numbas_context_is_refused():
    script("""
cuda.device_array(10)
for call in (integration.disable, integration.using(gpumem.Arena("cuda:0")).__enter__):
    try:
        call()
    except gpumem.errors.IntegrationError as error:
        assert "context on device 0" in str(error)
    else:
        raise AssertionError("switched")
integration.enable(arena)
print("ok")
""")


def test_ipc_handles_refer_to_regions():
    script(
        """
array = cuda.to_device(np.arange(1000, dtype=np.float32))
handle = array.get_ipc_handle()
assert handle is not None
print("ok")
""",
        config="{'backing': 'regions'}",
    )
    script("""
array = cuda.to_device(np.arange(1000, dtype=np.float32))
try:
    array.get_ipc_handle()
except gpumem.errors.IntegrationError as error:
    assert "interop.export" in str(error)
    print("ok")
""")


def test_managed_arrays_are_allocated_by_the_driver():
    script("""
array = cuda.managed_array(1000, np.float32)
array[:] = 1
add[4, 256](array, 1)
cuda.synchronize()
assert array.min() == 2 and arena.stats().in_use == 0
print("ok")
""")


def test_reset_and_exit_are_quiet():
    script("""
array = cuda.to_device(np.zeros(1000))
manager = cuda.current_context().memory_manager
manager.reset()
assert arena.stats().in_use == 0
print("ok")
""")


def test_environment_variable_selects_the_module():
    done = child.run(
        """
        import warnings
        warnings.simplefilter("ignore")
        import gpumem
        from numba import cuda
        array = cuda.device_array(1000)
        assert gpumem.get_default_resource("cuda:0").stats().requested_in_use == 8000
        print("ok")
        """,
        env={"NUMBA_CUDA_MEMORY_MANAGER": "gpumem.integrations.numba"},
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
