"""The null CUDA in a child process: loaded here, gpumem would take it for a driver."""

import textwrap

from helpers.child import run

from gpumem.prediction.gpus import gpu
from gpumem.prediction.runs import device_of, library

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
    import json

    device = device_of(gpu("h100", memory), cuda, count)
    done = run(BEGIN + textwrap.dedent(script), str(library()), json.dumps(device))
    assert done.returncode == 0, done.stderr
    return done.stdout
