"""C++ that belongs to the installed build of another library, compiled at its first use.

The layout of another library's classes depends on its version and on its compiler's options, so
gpumem cannot ship such code compiled. A library is made once, in seconds, and kept in a folder of
the user's: ``$XDG_CACHE_HOME/gpumem``, else ``~/.cache/gpumem``. A library is loaded into the
process only if the user owns it, no other user can write it, and it holds the bytes that the
compiler wrote.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

INCLUDE = Path(__file__).parents[2] / "include"
"""The folder of gpumem.h and gpumem_resource.hpp."""

_OPTIONS = ("-std=c++20", "-O2", "-shared", "-fPIC")
_DIGEST_BYTES = hashlib.sha256().digest_size
# Libraries are never unloaded: the other library may call them at any time.
_loaded: dict[Path, ctypes.CDLL] = {}


class Recipe(NamedTuple):
    """The parts of a library. Recipes that differ in anything make different libraries.

    Parameters
    ----------
    name : str
        Name of its file, with the version of the other library: "torch-2.9.0".
    source : str
        C++.
    options : tuple of str
        Options of the compiler, in addition to those of every shared library.
    headers : tuple of Path
        Headers that may change while the name stays: gpumem's own.
    places : tuple of str
        Options that name folders of headers and libraries, and the libraries; they may differ
        between recipes of one library.
    """

    name: str
    source: str
    options: tuple[str, ...] = ()
    headers: tuple[Path, ...] = ()
    places: tuple[str, ...] = ()


def over_gpumem_h(name: str, source: str) -> Recipe:
    """Return the recipe of C++ that includes gpumem.h and nothing of another library."""
    return Recipe(name, source, (f"-I{INCLUDE}",), (INCLUDE / "gpumem.h",))


def load(recipe: Recipe) -> ctypes.CDLL:
    """Return the library, compiled at the first use.

    Raises
    ------
    RuntimeError
        There is no compiler, it failed, or the file is not safe to load; the message says which,
        and has the compiler's output.
    OSError
        It cannot be loaded, or the folder cannot be written.
    """
    path = compiled(recipe)
    if path not in _loaded:
        _loaded[path] = ctypes.CDLL(str(path))
    return _loaded[path]


def compiled(recipe: Recipe) -> Path:
    """Return the library's file; compile it unless the folder has it.

    Raises
    ------
    RuntimeError, OSError
        As `load`.
    """
    path = _path_of(recipe)
    if not path.exists():
        return build(recipe)
    _require_untouched(path)
    return path


def build(recipe: Recipe) -> Path:
    """Compile the library, whether or not the folder has it, and return its file.

    Raises
    ------
    RuntimeError, OSError
        As `load`.
    """
    options = [*_OPTIONS, *recipe.options, *recipe.places]
    path = _path_of(recipe)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / "library.so"
        _compile(_compiler(), options, recipe.source, built)
        _seal(built)
        built.replace(path)  # atomic, because another process may build the same library
    _require_untouched(path)
    return path


def cuda_folders(packages: Path) -> list[Path]:
    """Return the folders that may have the CUDA runtime's headers, the best first.

    They are those of NVIDIA's wheels in `packages`, a folder of installed packages; those of
    toolkits that CUDA_HOME, CUDA_PATH and nvcc name; and those of Conda and of the system.
    """
    wheels = packages / "nvidia"
    roots = [*sorted(wheels.glob("cu[0-9]*"), reverse=True), wheels / "cuda_runtime"]
    roots += [Path(os.environ[key]) for key in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(key)]
    compiler = shutil.which("nvcc")
    if compiler:
        roots.append(Path(compiler).resolve().parents[1])
    data = Path(sysconfig.get_path("data"))
    roots += [data / "targets" / "x86_64-linux", data, Path("/usr/local/cuda"), Path("/usr")]
    return [root / "include" for root in roots]


# ---- the folder ----------------------------------------------------------------------------------


def _path_of(recipe: Recipe) -> Path:
    # The compiler is not part of the key: without one, a library that exists is still found.
    texts = [recipe.source, *(header.read_text() for header in recipe.headers)]
    key = hashlib.sha256(
        "\0".join([*texts, *_OPTIONS, *recipe.options]).encode(errors="surrogateescape")
    )
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gpumem" / f"{recipe.name}-{key.hexdigest()[:16]}.so"


def _seal(built: Path) -> None:
    # The digest of the bytes follows them in the same file; a loader ignores it.
    written = built.read_bytes()
    built.write_bytes(written + hashlib.sha256(written).digest())
    built.chmod(0o755)  # a wide umask would leave it writable for others


def _require_untouched(path: Path) -> None:
    for each, is_kind in ((path.parent, stat.S_ISDIR), (path, stat.S_ISREG)):
        found = each.lstat()
        if not is_kind(found.st_mode):
            raise RuntimeError(f"{path} is not loaded: {each} is not a plain file in a folder")
        if found.st_uid != os.geteuid():
            raise RuntimeError(
                f"{path} is not loaded: {each} belongs to user {found.st_uid}, "
                f"and this process to user {os.geteuid()}"
            )
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise RuntimeError(
                f"{path} is not loaded: others can write {each}, with mode "
                f"{stat.S_IMODE(found.st_mode):o}; expected 755 or less"
            )
    held = path.read_bytes()
    if hashlib.sha256(held[:-_DIGEST_BYTES]).digest() != held[-_DIGEST_BYTES:]:
        raise RuntimeError(
            f"{path} is not loaded: its bytes are not those that the compiler wrote; delete it"
        )


# ---- the compiler --------------------------------------------------------------------------------


def _compiler() -> list[str]:
    named = os.environ.get("CXX", "").split()
    if named:
        return named
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise RuntimeError(
        "there is no C++ compiler: none of CXX, c++, g++ and clang++ was found; install one, "
        "or name it in CXX"
    )


def _compile(compiler: list[str], options: list[str], source: str, built: Path) -> None:
    written = built.with_suffix(".cpp")
    written.write_text(source)
    # Libraries come after the code that needs them.
    whole = [*compiler, str(written), "-o", str(built), *options]
    try:
        done = subprocess.run(whole, capture_output=True, errors="replace", check=False)
    except OSError as error:
        raise RuntimeError(f"{compiler[0]} cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        raise RuntimeError(f"{compiler[0]} exited with {done.returncode}: {done.stderr.strip()}")
