"""The cases on two and on four host devices, each in a process of its own."""

import pytest
from helpers import child
from several_devices.cases import CASES


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_host_devices(name, count):
    child.run_quietly(
        f"""
        import gpumem
        gpumem.device.set_host_device_count({count})
        from several_devices.cases import CASES
        CASES[{name!r}]([f"host:{{number}}" for number in range({count})])
        """,
        env={"PYTHONPATH": "tests"},
    )
