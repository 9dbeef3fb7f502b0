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
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType

from gpumem._support.out_of_memory import OutOfMemoryReport

__all__ = ["SOURCE", "compiled", "load", "out_of_memory"]

SOURCE = """\
#include <c10/util/Exception.h>

extern "C" void gpumem_throw_out_of_memory(const char *text) {
    throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
}
"""
_ABSURD = 1152921504606846976  # bytes; above it PyTorch's message has no size
# Libraries are never unloaded: PyTorch may throw at any time.
_loaded: dict[Path, ctypes.CDLL] = {}


def load(torch: ModuleType) -> int:
    """Return the address of the function, compiling it at the first use.

    Raises
    ------
    RuntimeError
        There is no compiler or no header, or the compiler failed; the message has its output.
    """
    path = compiled(torch)
    if path not in _loaded:
        _loaded[path] = ctypes.CDLL(str(path))
    function = _loaded[path].gpumem_throw_out_of_memory
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def compiled(torch: ModuleType) -> Path:
    """Return the library for a PyTorch; compile it if the cache does not have it."""
    command = [*_compiler(), *_options(torch)]
    name = hashlib.sha256("\0".join([SOURCE, torch.__version__, *command]).encode()).hexdigest()
    path = _cache() / f"torch-{torch.__version__}-{name[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / "thrower.so"
            _compile(command, built)
            built.replace(path)  # at once: another process may be doing the same
    return path


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gpumem"


def _compile(command: list[str], built: Path) -> None:
    source = built.with_suffix(".cpp")
    source.write_text(SOURCE)
    # Libraries come after what needs them.
    whole = [command[0], str(source), "-o", str(built), *command[1:]]
    done = subprocess.run(whole, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} exited with {done.returncode}: {done.stderr.strip()}")


def _compiler() -> list[str]:
    named = os.environ.get("CXX", "").split()
    if named:
        return named
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise RuntimeError("there is no C++ compiler: none of CXX, c++, g++ and clang++ is found")


def _options(torch: ModuleType) -> list[str]:
    root = Path(str(torch.__file__)).parent
    if not (root / "include" / "c10" / "util" / "Exception.h").exists():
        raise RuntimeError(f"PyTorch {torch.__version__} has no header c10/util/Exception.h")
    return [
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{root / 'include'}",
        f"-L{root / 'lib'}",
        f"-Wl,-rpath,{root / 'lib'}",
        "-lc10",
    ]


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
