"""The compiled modules: what they export, and what they are linked against."""

import shutil
import subprocess
from pathlib import Path

import pytest

import gpumem

EXTENSIONS = sorted(Path(gpumem.__file__).parent.rglob("*.so"))
# The toolchain's own, in every shared object of some linkers.
TOOLCHAIN = {"_init", "_fini", "_edata", "_end", "__bss_start"}
# PyTorch's hooks are C++: named exports for whoever loads them by path, and the standard library.
HOOKS = "gpumem_torch_"
SYSTEM = ("libc.so", "libm.so", "libpthread.so", "libdl.so", "librt.so", "libgcc_s.so", "ld-linux")


def read(tool: str, *arguments: str) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool} here")
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def test_there_are_compiled_modules():
    assert {path.name.split(".")[0] for path in EXTENSIONS} >= {"_core", "_host", "_replay"}


@pytest.mark.parametrize("path", EXTENSIONS, ids=lambda path: path.name.split(".")[0])
def test_a_compiled_module_exports_its_init_function_alone(path):
    lines = read("nm", "-D", "--defined-only", path).splitlines()
    # Weak ones are the C++ library's templates, the same in every shared object.
    symbols = {line.split()[-1] for line in lines if line.split()[-2] not in "Wu"}
    if path.parent.name == "torch":
        symbols = {symbol for symbol in symbols if not symbol.startswith(HOOKS)}
    assert symbols - TOOLCHAIN == {f"PyInit_{path.name.split('.')[0]}"}


@pytest.mark.parametrize("path", EXTENSIONS, ids=lambda path: path.name.split(".")[0])
def test_a_compiled_module_is_linked_against_the_c_library_alone(path):
    lines = read("readelf", "-d", path).splitlines()
    needed = [line.split("[")[1].rstrip("]") for line in lines if "(NEEDED)" in line]
    allowed = (*SYSTEM, "libstdc++.so") if path.parent.name == "torch" else SYSTEM
    assert all(name.startswith(allowed) for name in needed), needed
