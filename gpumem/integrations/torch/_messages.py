"""The text of PyTorch's out-of-memory error.

Programs search it to retry with less: Accelerate and Lightning look for "CUDA out of memory."
before they take a smaller batch, others read the size from "Tried to allocate".
"""

from __future__ import annotations

from gpumem.stats import OutOfMemoryReport

_ABSURD = 1152921504606846976  # bytes; above it PyTorch's message has no size


def out_of_memory(device: int, nbytes: int, report: OutOfMemoryReport | None) -> str:
    """Return the first line of the error that PyTorch's own allocator would raise."""
    if nbytes > _ABSURD:
        return "CUDA out of memory. Tried to allocate more than 1EB memory."
    first_line = f"CUDA out of memory. Tried to allocate {_size(nbytes)}."
    if report is None or report.device_total is None or report.device_free is None:
        return first_line
    return (
        f"{first_line} GPU {device} has a total capacity of {_size(report.device_total)} "
        f"of which {_size(report.device_free)} is free."
    )


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes > unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"
