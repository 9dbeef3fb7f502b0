"""A GPU's processes, as NVML reports them if the package ``nvidia-ml-py`` is installed."""

from __future__ import annotations

import os
from types import ModuleType
from uuid import UUID

_pynvml: ModuleType | None = None  # None: not loaded, or not installed


def load() -> None:
    """Import the package, if it is installed; while an error is made nothing can be imported."""
    global _pynvml
    try:
        import pynvml
    except ImportError:
        return
    _pynvml = pynvml


def processes_on(uuid: str) -> tuple[tuple[int, int], ...]:
    """Return (process id, bytes) of the other processes on a GPU, the largest first.

    Empty if NVML is not loaded, or refuses.

    Parameters
    ----------
    uuid : str
        The device's, as `Device.uuid` has it.
    """
    if _pynvml is None:
        return ()
    try:
        _pynvml.nvmlInit()
        device = _pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{UUID(uuid)}")
        running = _pynvml.nvmlDeviceGetComputeRunningProcesses(device)
    except _pynvml.NVMLError:
        return ()
    found = [(int(one.pid), int(one.usedGpuMemory or 0)) for one in running]
    return tuple(sorted((one for one in found if one[0] != os.getpid()), key=lambda one: -one[1]))
