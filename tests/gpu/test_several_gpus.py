"""The cases of tests/several_devices on two and on four GPUs."""

import pytest
from several_devices.cases import ALONE, CASES
from several_devices.running import run_alone

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
