"""PyTorch's out-of-memory error: its exception, compiled for the installed PyTorch, and its text.

A pluggable allocator's C++ exception becomes RuntimeError in Python unless it is
``c10::OutOfMemoryError``, whose layout belongs to one build of PyTorch. The function that throws it
is therefore compiled here, once and in seconds, against the headers that PyTorch ships, if there is
a C++ compiler.

Programs search the text to retry with less: Accelerate and Lightning look for "CUDA out of memory."
before they take a smaller batch, others read the size from "Tried to allocate".
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import ModuleType

from gpumem._support.out_of_memory import OutOfMemoryReport
from gpumem.integrations import _compiled

__all__ = ["SOURCE", "load", "out_of_memory", "recipe"]

SOURCE = """\
#include <c10/util/Exception.h>

extern "C" void gpumem_throw_out_of_memory(const char *text) {
    throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
}
"""
_ABSURD = 1152921504606846976  # bytes; above it PyTorch's message has no size


def load(torch: ModuleType) -> int:
    """Return the address of the function, compiled at the first use.

    Raises
    ------
    RuntimeError
        There is no compiler or no header, or the compiler failed; the message has its output.
    """
    function = _compiled.load(recipe(torch)).gpumem_throw_out_of_memory
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def recipe(torch: ModuleType) -> _compiled.Recipe:
    """Return what makes the library for a PyTorch.

    Raises
    ------
    RuntimeError
        It has no header.
    """
    root = Path(str(torch.__file__)).parent
    if not (root / "include" / "c10" / "util" / "Exception.h").exists():
        raise RuntimeError(f"PyTorch {torch.__version__} has no header c10/util/Exception.h")
    options = (
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{root / 'include'}",
        f"-L{root / 'lib'}",
        f"-Wl,-rpath,{root / 'lib'}",
        "-lc10",
    )
    return _compiled.Recipe(f"torch-{torch.__version__}", SOURCE, options)


# ---- the text ------------------------------------------------------------------------------------


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
