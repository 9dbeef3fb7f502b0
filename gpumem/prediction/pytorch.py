"""The installed PyTorch, read from its files: it is not imported."""

from __future__ import annotations

import importlib.util
import re
import struct
import sys
from pathlib import Path
from typing import NamedTuple

import numpy

from gpumem.errors import IntegrationError, MissingFrameworkError

_OLDEST = (2, 10)
_LIBRARIES = ("libtorch_cuda.so", "libc10_cuda.so", "libtorch_python.so")
# Libraries of which the null CUDA has every function, but for those of NVIDIA that need no GPU.
_COVERED = ("cuda", "__cuda", "cublas", "cudnn", "nccl")
_KEPT = (
    *("Version", "String", "Property", "LastError"),
    *("Descriptor", "RNNDescriptor_v8", "RNNWeightSpaceSize", "RNNWeightParams"),
)

DYNAMIC_SYMBOLS = 11  # the type of a section


class Installed(NamedTuple):
    """A PyTorch for CUDA: its version, the version of CUDA, and its folder."""

    version: str
    cuda: str
    folder: Path


def require() -> Installed:
    """Return the installed PyTorch.

    Raises
    ------
    MissingFrameworkError
        There is none.
    IntegrationError
        It was built without CUDA or is too old, or this is not Linux.
    """
    if sys.platform != "linux":
        raise IntegrationError(
            f"predicting needs Linux, and this is {sys.platform}: use a container or, on Windows, "
            "WSL; neither a GPU nor a driver is needed there"
        )
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise MissingFrameworkError(
            "PyTorch is not installed; `pip install torch` installs the build for CUDA, which "
            "predicting needs",
            name="torch",
        )
    folder = Path(spec.submodule_search_locations[0])
    text = (folder / "version.py").read_text()
    version, cuda = (_assigned(name, text) for name in ("__version__", "cuda"))
    if not cuda:
        raise IntegrationError(
            f"PyTorch {version} was built without CUDA, and predicting needs a build for CUDA, "
            "which needs no GPU: `pip install --force-reinstall torch --index-url "
            "https://pypi.org/simple` installs one"
        )
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST:
        raise IntegrationError(
            f"PyTorch {version} is installed, and predicting needs 2.10 or later"
        )
    return Installed(version, cuda, folder)


def _assigned(name: str, text: str) -> str:
    """Return the text that a module assigns to a name; "" if it is not a text."""
    match = re.search(rf"^{name}\b.*= '([^']+)'", text, re.MULTILINE)
    return match[1] if match else ""


def unknown_functions(folder: Path, null: Path) -> list[str]:
    """Return the functions of CUDA that PyTorch imports and the null CUDA does not have."""
    imported: set[str] = set()
    for name in _LIBRARIES:
        imported |= symbols(folder / "lib" / name, imported=True)
    wanted = {name for name in imported if name.startswith(_COVERED) and not name.endswith(_KEPT)}
    return sorted(wanted - symbols(null, imported=False))


def symbols(path: Path, *, imported: bool) -> set[str]:
    """Return the dynamic symbols that a 64-bit ELF file imports, or those that it defines."""
    with path.open("rb") as file:
        offset, size, count = struct.unpack_from("<Q10xHH", file.read(64), 40)
        file.seek(offset)
        sections = list(struct.iter_unpack("<IIQQQQIIQQ", file.read(size * count)))
        (table,) = (section for section in sections if section[1] == DYNAMIC_SYMBOLS)
        strings = sections[table[6]]
        file.seek(table[4])
        row = [("name", "<u4"), ("kind", "<u2"), ("section", "<u2"), ("value", "<u8", 2)]
        listed = numpy.frombuffer(file.read(table[5]), row)
        file.seek(strings[4])
        names = file.read(strings[5])
    begins = listed["name"][(listed["section"] == 0) == imported].tolist()
    return {names[begin : names.index(b"\0", begin)].decode() for begin in begins}
