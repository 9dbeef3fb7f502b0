"""A GPU's processes, as NVML reports them if the package ``nvidia-ml-py`` is installed."""

from __future__ import annotations

import os


def processes_on(uuid: str) -> tuple[tuple[int, int], ...]:
    """Return (process id, bytes) of the other processes on a GPU, the largest first.

    Empty if NVML is not available, or refuses.

    Parameters
    ----------
    uuid : str
        The device's, as `Device.uuid` has it.
    """
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        device = pynvml.nvmlDeviceGetHandleByUUID(name)
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
    except pynvml.NVMLError:
        return ()
    found = [(int(one.pid), int(one.usedGpuMemory or 0)) for one in running]
    return tuple(sorted((one for one in found if one[0] != os.getpid()), key=lambda one: -one[1]))
