"""The compiled modules: what they export, and what they are linked against."""

import shutil
import subprocess
from pathlib import Path

import pytest

import gpumem

EXTENSIONS = sorted(Path(gpumem.__file__).parent.rglob("*.so"))
# The toolchain's own, in every shared object of some linkers.
TOOLCHAIN = {"_init", "_fini", "_edata", "_end", "__bss_start"}
SYSTEM = ("libc.so", "libm.so", "libpthread.so", "libdl.so", "librt.so", "libgcc_s.so", "ld-linux")


def read(tool: str, *arguments: str) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool} here")
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def test_compiled_modules_exist():
    assert {path.name.split(".")[0] for path in EXTENSIONS} >= {"arena", "host", "_replay"}


def exported(path: Path) -> set[str]:
    """List a module's exported symbols, except the toolchain's."""
    lines = read("nm", "-D", "--defined-only", path).splitlines()
    return {line.split()[-1] for line in lines} - TOOLCHAIN


def needed(path: Path) -> set[str]:
    """List the libraries that a module is linked against."""
    lines = read("readelf", "-d", path).splitlines()
    return {line.split("[")[1].rstrip("]") for line in lines if "(NEEDED)" in line}


def test_compiled_modules_export_their_init_function_alone():
    found = {path: exported(path) for path in EXTENSIONS}
    wrong = {
        path.name: symbols
        for path, symbols in found.items()
        if symbols != {f"PyInit_{path.name.split('.')[0]}"}
    }
    assert not wrong


def test_compiled_modules_are_linked_against_the_c_library_alone():
    wrong = {}
    for path in EXTENSIONS:
        if others := {name for name in needed(path) if not name.startswith(SYSTEM)}:
            wrong[path.name] = others
    assert not wrong
