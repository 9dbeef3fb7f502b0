"""The cases on two and on four host devices, each in a process of its own."""

import pytest
from several_devices.cases import CASES
from several_devices.running import run_alone


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_host_devices(name, count):
    run_alone(name, [f"host:{number}" for number in range(count)])
