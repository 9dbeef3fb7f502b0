"""The cases of tests/several_devices on two and on four GPUs; libraries on the second GPU."""

import textwrap
from importlib.util import find_spec

import pytest
from helpers import child
from several_devices.cases import ALONE, CASES
from several_devices.running import ON_GPUS, run_alone

import gpumem

GPUS = [str(device) for device in gpumem.devices() if device.type == "cuda"]
pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_gpus(name, count):
    if len(GPUS) < count:
        pytest.skip(f"needs {count} CUDA devices: {len(GPUS)} found")
    if name in ALONE:
        run_alone(name, GPUS[:count])
    else:
        CASES[name](GPUS[:count])


# ---- libraries, in a process of their own --------------------------------------------------------

START = """
import warnings
warnings.simplefilter("ignore")
import gpumem
from helpers.driver import HostDriver
arena = gpumem.Arena("cuda:1")
NBYTES = 1 << 20
"""
# Each takes a block on the second GPU, while the first is the process's usual one.
LIBRARIES = {
    "cupy": """
        import cupy
        from gpumem.integrations import cupy as integration
        integration.enable(arena)
        with cupy.cuda.Device(1):
            held = cupy.full(NBYTES, 7, "u1")
            cupy.cuda.Device(1).synchronize()
        address = held.data.ptr
    """,
    "numba": """
        from numba import cuda
        from gpumem.integrations import numba as integration
        integration.enable(arena)
        with cuda.gpus[1]:
            held = cuda.device_array(NBYTES, "u1")
        address = held.__cuda_array_interface__["data"][0]
    """,
    "rmm": """
        import rmm
        from gpumem.integrations import rmm as integration
        integration.enable(arena)
        with HostDriver("cuda:1").current():
            held = rmm.DeviceBuffer(size=NBYTES)
        address = held.ptr
    """,
    "cuda.core": """
        from cuda.core import Device
        from gpumem.integrations import cuda_core as integration
        integration.enable(arena)
        device = Device(1)
        device.set_current()
        held = device.allocate(NBYTES, stream=device.default_stream)
        address = int(held.handle)
        Device(0).set_current()
    """,
}
FOUND = """
assert address in {block.address for block in arena.blocks() if block.used}
assert arena.stats().requested_in_use >= NBYTES
class Shown:
    __cuda_array_interface__ = {
        "shape": (NBYTES,), "typestr": "|u1", "data": (address, False), "version": 3, "stream": None
    }
assert str(gpumem.asarray(Shown()).memory) == "cuda:1"
assert not gpumem.get_default_resource("cuda:0").stats().num_allocs
"""


def run(library, script):
    if len(GPUS) < 2:
        pytest.skip(f"needs 2 CUDA devices: {len(GPUS)} found")
    if find_spec(library.partition(".")[0]) is None or find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    done = child.run(START + textwrap.dedent(script), env=ON_GPUS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("library", LIBRARIES)
def test_library_takes_memory_of_the_second_gpu_from_its_arena(library):
    run(library, textwrap.dedent(LIBRARIES[library]) + FOUND)


def test_resource_over_rmm_takes_memory_of_the_gpu_that_it_names():
    script = """
    import rmm
    from gpumem.integrations import rmm as integration
    resource = integration.resource(rmm.mr.CudaMemoryResource(), memory="cuda:1")
    held = gpumem.full(NBYTES, 7, "u1", resource=resource)
    class Shown:
        __cuda_array_interface__ = held.__cuda_array_interface__
    assert str(gpumem.asarray(Shown()).memory) == "cuda:1"
    assert set(held.to("host").numpy().tolist()) == {7}
    """
    run("rmm", script)
