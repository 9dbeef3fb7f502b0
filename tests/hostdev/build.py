"""Builds the host device for tests: as libcuda.so.1, or into a C program."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gpumem"
FOLDER = PACKAGE / "_native" / "driver" / "hostdev"
SOURCES = sorted(map(str, FOLDER.rglob("*.c")))
LIBRARY = sorted(map(str, Path(__file__).with_name("libcuda").glob("*.c")))
HEADERS = sorted({header.parent for header in PACKAGE.rglob("*.h")})
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC"]
FLAGS += ["-fvisibility=hidden", *(f"-I{folder}" for folder in HEADERS)]
SANITIZERS = {
    "plain": ["-O2"],
    "address": [
        "-O1",
        "-fsanitize=address,undefined",
        "-fno-omit-frame-pointer",
        "-fno-sanitize-recover=undefined",
    ],
    "thread": ["-O1", "-fsanitize=thread"],
}


def compile_library(folder: Path) -> Path:
    """libcuda.so.1 in `folder`, with that SONAME."""
    path = folder / "libcuda.so.1"
    command = ["gcc", *FLAGS, "-O2", "-DHOSTDEV_SHARED_LIBRARY", "-shared", *SOURCES, *LIBRARY]
    command += ["-Wl,-soname,libcuda.so.1", "-Wl,-z,defs", "-lpthread", "-o", str(path)]
    subprocess.run(command, check=True)
    return path


def compile_program(folder: Path, program: Path, sanitizer: str) -> Path:
    path = folder / f"{program.stem}_{sanitizer}"
    command = ["gcc", *FLAGS, *SANITIZERS[sanitizer], *SOURCES, str(program), "-lpthread"]
    subprocess.run([*command, "-o", str(path)], check=True)
    return path
