"""Refusals of a device that stands for a GPU: other processes are named, nothing is imported."""

from helpers import child

# cuda-python and nvidia-ml-py, as far as gpumem uses them.
PACKAGES = """
import ctypes, sys, types
library = ctypes.CDLL(sys.argv[1])

def address_of(name, version, flags):
    found = ctypes.c_void_p()
    status = library.cuGetProcAddress_v2(name, ctypes.byref(found), version,
                                         ctypes.c_uint64(flags), None)
    return status, found.value

# A driver tells its version before it is initialized; this one does not.
ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint)(address_of(b"cuInit", 2000, 1)[1])(0)
driver = types.ModuleType("cuda.bindings.driver")
driver.cuGetProcAddress = address_of
bindings = types.ModuleType("cuda.bindings")
bindings.driver = driver
sys.modules.update({"cuda": types.ModuleType("cuda"), "cuda.bindings": bindings,
                    "cuda.bindings.driver": driver})
"""

NVML = """
import types, uuid

class NVMLError(Exception):
    pass

def nvmlInit():
    pass

def nvmlDeviceGetHandleByUUID(name):
    if name != f"GPU-{uuid.UUID(name[4:])}":
        raise NVMLError
    return name

def nvmlDeviceGetComputeRunningProcesses(device):
    return [types.SimpleNamespace(pid=1, usedGpuMemory=5 << 20)]
"""

REFUSAL = """
import builtins
import gpumem

arena = gpumem.Arena("cuda:0", {"max_mem": 4 << 20})

def no_import(name, *more):
    raise AssertionError(f"{name} is imported while an error is made")

builtins.__import__, imports = no_import, builtins.__import__
try:
    arena.allocate(8 << 20)
except gpumem.OutOfMemoryError as error:
    report = error.report
builtins.__import__ = imports
assert report.processes == ((1, 5 << 20),), report
assert "process 1 5.0 MiB" in report.text()
"""


def test_refusal_of_a_gpu_names_other_processes_and_imports_nothing(library, tmp_path):
    (tmp_path / "pynvml.py").write_text(NVML)
    env = {"PYTHONPATH": child.path_with(child.TESTS, tmp_path)}
    child.run_quietly(PACKAGES + REFUSAL, str(library), env=env)
