"""The null CUDA in a child process: loaded here, gpumem would take it for a driver.

    python -m prediction.null_cuda -m pytest tests/gpu/test_torch_on_gpu.py

runs Python over it, with all processes that it starts; tests/ must be importable.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from helpers.child import path_with, run

from gpumem.integrations.torch import _build
from gpumem.prediction.child import null
from gpumem.prediction.gpus import gpu
from gpumem.prediction.pytorch import require
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
def listen(kind, name, to, nbytes, frames, count):
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

# Without Python's finalization: a thread of PyTorch's autograd may still release Python's objects
# of its last pass then, and before 3.14 Python ends such a thread, which C++ answers with abort().
END = """
import os
sys.stdout.flush()
os._exit(0)
"""


def over_null_cuda(script: str, memory: int = 4 << 30, cuda: str = "13.0", count: int = 1) -> str:
    """Run a script that has the null CUDA as `cuda`; returns what it printed."""
    device = device_of(gpu("h100", memory), cuda, count)
    done = run(BEGIN + textwrap.dedent(script) + END, str(library()), json.dumps(device))
    assert done.returncode == 0, done.stderr
    return done.stdout


def require_cuda_build() -> None:
    """Skip the module unless PyTorch is built for CUDA, and gpumem's allocator can be compiled."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.version.cuda:
        pytest.skip("PyTorch was built without CUDA", allow_module_level=True)
    if reason := _build.why_not_compiled(torch):
        pytest.skip(reason, allow_module_level=True)


def require_gpumem_beneath_pytorch() -> None:
    """Skip the test where gpumem's allocator cannot be PyTorch's."""
    if require().version.startswith("2.10."):
        pytest.skip("gpumem needs PyTorch 2.11 or later")
    if shutil.which("g++") is None:
        pytest.skip("gpumem's allocator needs a C++ compiler, and g++ was not found")


def environment(folder: Path, count: int = 1) -> dict[str, str]:
    """Return variables for processes that load the null CUDA, H200s, as Python starts.

    Libraries that look for the driver by its name find it in `folder`.
    """
    for each in ("libcuda.so.1", "libnvidia-ml.so.1"):
        if not (folder / each).exists():
            (folder / each).symlink_to(library())
    order = {
        "module": null.__file__,
        "library": str(library()),
        "device": device_of(gpu("h200"), require().cuda, count),
    }
    found = filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")])
    return {
        "GPUMEM_TEST_NULL_CUDA": json.dumps(order),
        "LD_LIBRARY_PATH": os.pathsep.join(found),
        "PYTHONPATH": path_with(STARTUP),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TRITON_LIBCUDA_PATH": str(folder),
    }


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        own = environment(Path(folder))
        command = [sys.executable, *sys.argv[1:]]
        return subprocess.run(command, env=os.environ | own, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
