"""How PyTorch's allocator over gpumem is compiled for the installed PyTorch.

`allocator.cpp` is a subclass of a C++ class. Its virtual methods change with every release, so it
is compiled against the headers that PyTorch ships: at the first use, which takes half a minute, or
before by ``python -m gpumem.integrations.torch build``.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import ModuleType

from gpumem.integrations._common import compiled
from gpumem.integrations._common.compiled import Recipe, cuda_folders

FOLDER = Path(__file__).parent
SOURCE = "allocator.cpp"


def load(torch: ModuleType) -> ctypes.CDLL:
    """Return the library with the allocator, compiled at the first use.

    Raises
    ------
    RuntimeError, OSError
        It cannot be compiled or loaded; the message says why.
    """
    return compiled.load(recipe(torch))


def build(torch: ModuleType) -> Path:
    """Compile the library anew, and return its file.

    Raises
    ------
    RuntimeError, OSError
        As of `load`.
    """
    return compiled.build(recipe(torch))


def recipe(torch: ModuleType) -> Recipe:
    """Return the recipe of the allocator for a PyTorch."""
    version = str(torch.__version__)
    root = Path(str(torch.__file__)).parent
    folders = cuda_folders(root.parent)
    # Without any the compiler looks itself, and names the header that is missing.
    found = [folder for folder in folders if (folder / "cuda_runtime_api.h").exists()]
    return Recipe(
        f"torch-{version}",
        f'#include "{SOURCE}"\n',
        (
            "-fvisibility=hidden",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
            f"-DTORCH_GIT_VERSION={torch.version.git_version}",
        ),
        (FOLDER / SOURCE, *sorted(FOLDER.glob("*.h"))),
        (
            f"-I{FOLDER}",
            f"-isystem{root / 'include'}",
            *(f"-I{folder}" for folder in found[:1]),
            # CUDA's headers include two of another package, which PyTorch does not install.
            f"-idirafter{FOLDER / 'cuda'}",
            # They are found by name among the libraries that PyTorch has loaded.
            f"-L{root / 'lib'}",
            "-ltorch_cpu",
            "-lc10_cuda",
            "-lc10",
        ),
    )


def why_not_compiled(torch: ModuleType) -> str | None:
    """Return why gpumem's allocator cannot be compiled for PyTorch; None if it is compiled."""
    try:
        load(torch)
    except (OSError, RuntimeError) as error:
        return (
            f"gpumem's allocator cannot be compiled for PyTorch: {error}. Install a C++ compiler "
            "and CUDA's headers (pip install nvidia-cuda-runtime), then run `python -m "
            "gpumem.integrations.torch build`"
        )
    return None
