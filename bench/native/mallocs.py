"""The mallocs that Debian packages: ``python -m bench.native.mallocs`` fetches them."""

from __future__ import annotations

import ctypes
import ctypes.util
import shutil
import subprocess
import sys
from dataclasses import dataclass

from bench.native import BUILD

FOLDER = BUILD / "mallocs"


@dataclass(frozen=True)
class Malloc:
    """A C library's two functions, by their addresses."""

    name: str
    malloc: int
    free: int


# name: Debian package, file name, the functions' names
_KNOWN = {
    "mimalloc": ("libmimalloc2.0", "libmimalloc.so.2", "mi_malloc", "mi_free"),
    "jemalloc": ("libjemalloc2", "libjemalloc.so.2", "malloc", "free"),
}


def present() -> tuple[list[Malloc], dict[str, str]]:
    """Load what is installed or was fetched; returns them, and why the others are absent."""
    found, absent = [], {}
    for name, (package, file, malloc, free) in _KNOWN.items():
        fetched = next(FOLDER.rglob(file), None)
        try:
            library = ctypes.CDLL(str(fetched or ctypes.util.find_library(name) or file))
        except OSError as error:
            absent[name] = f"{error}; python -m bench.native.mallocs fetches {package}"
            continue
        addresses = (ctypes.cast(library[f], ctypes.c_void_p).value for f in (malloc, free))
        found.append(Malloc(name, *(address or 0 for address in addresses)))
    return found, absent


def fetch() -> int:
    """Download the packages with apt and unpack them next to the build; installs nothing."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            print(f"no {tool} here: the mallocs are left out", file=sys.stderr)
            return 1
    packages = [package for package, *_ in _KNOWN.values()]
    subprocess.run(["apt-get", "-q", "download", *packages], cwd=FOLDER, check=True)
    for package in FOLDER.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package.name, "."], cwd=FOLDER, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(fetch())
