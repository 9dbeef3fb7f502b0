"""The null CUDA in a child process: loaded here, gpumem would take it for a driver."""

import json
import os
import textwrap
from pathlib import Path

from helpers.child import path_with, run

from gpumem.prediction.child import null
from gpumem.prediction.gpus import gpu
from gpumem.prediction.runs import device_of, library

STARTUP = Path(__file__).with_name("startup")

BEGIN = """
import ctypes, json, sys
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from gpumem.prediction.child import null
cuda = null.load(sys.argv[1], json.loads(sys.argv[2]))
cuda.null_functions.restype = ctypes.POINTER(c_char_p)
heard = []
@null.Listener
def listen(kind, name, nbytes, frames, count):
    heard.append((kind, name.decode(), nbytes))
cuda.null_listen(listen)
def used():
    return null.memory_of(cuda, 0)
def names(refused):
    listed = cuda.null_functions(refused)
    found = []
    while listed[len(found)]:
        found.append(listed[len(found)])
    return [name.decode() for name in found]
MIB = 1 << 20
"""


def over_null_cuda(script: str, memory: int = 4 << 30, cuda: str = "13.0", count: int = 1) -> str:
    """Run a script that has the null CUDA as `cuda`; returns what it printed."""
    device = device_of(gpu("h100", memory), cuda, count)
    done = run(BEGIN + textwrap.dedent(script), str(library()), json.dumps(device))
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment(
    folder: Path, *paths: Path, name: str = "h200", cuda: str = "13.0"
) -> dict[str, str]:
    """Return variables for processes that load the null CUDA as Python starts.

    Libraries that look for the driver by its name find it in `folder`; `paths` are importable.
    """
    for each in ("libcuda.so.1", "libnvidia-ml.so.1"):
        if not (folder / each).exists():
            (folder / each).symlink_to(library())
    order = {
        "module": null.__file__,
        "library": str(library()),
        "device": device_of(gpu(name), cuda),
    }
    found = filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")])
    return {
        "GPUMEM_TEST_NULL_CUDA": json.dumps(order),
        "LD_LIBRARY_PATH": os.pathsep.join(found),
        "PYTHONPATH": path_with(STARTUP, *paths),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TRITON_LIBCUDA_PATH": str(folder),
    }
