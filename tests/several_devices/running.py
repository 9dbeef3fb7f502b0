"""Runs a case in a process of its own."""

from collections.abc import Sequence

from helpers import child

ON_GPUS = {  # multicast over NVLink stays off
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def run_alone(name: str, devices: Sequence[str]) -> None:
    """Run a case where nothing has used a device before."""
    child.run_quietly(
        f"""
        import gpumem
        if {devices[0]!r}.startswith("host"):
            gpumem.device.set_host_device_count({len(devices)})
        from several_devices.cases import CASES
        CASES[{name!r}]({list(devices)!r})
        """,
        env=ON_GPUS,
    )
