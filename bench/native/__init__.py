"""What is measured below Python: allocators, and a consumer of the C exchange API.

Compiled at the first use, into ``build/bench``, against the .pxd files of the gpumem that is
imported: its core is called, not copied.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gpumem

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "bench"
SOURCES = {
    # gpumem's core, the baselines written for this, the mallocs present
    "_native": ("_native.pyx", "harness.cpp", "baselines.cpp"),
    "_exchange": ("_exchange.pyx",),
    "_budgets": ("_budgets.pyx",),
    "_stub": ("_stub.pyx",),
    "_bare": ("_bare.pyx",),
}


def load(name: str = "_native") -> Any:
    """Compile what is out of date, and return the module."""
    path = _compiled(name)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compiled(name: str) -> Path:
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    package = Path(gpumem.__file__).resolve().parent
    package_headers = [path for path in package.rglob("*.h") if "hostdev" not in path.parts]
    includes = sorted({path.parent for path in package_headers})
    headers = [*package.rglob("*.pxd"), HERE / "subject.h"]
    headers += package_headers
    extension = Extension(
        name,
        [str(HERE / source) for source in SOURCES[name]],
        include_dirs=[str(path) for path in (HERE, *includes)],
        define_macros=[("_GNU_SOURCE", None)],
        extra_compile_args=["-std=c++17", "-O2", "-g0"],
        extra_link_args=["-pthread"],
        language="c++",
        depends=[str(path) for path in headers],
    )
    modules = cythonize(
        [extension],
        include_path=[str(package.parent)],
        build_dir=str(BUILD),
        compiler_directives={
            "language_level": 3,
            "boundscheck": False,
            "wraparound": False,
            "cdivision": True,
        },
        quiet=True,
    )
    command = build_ext(Distribution({"ext_modules": modules}))
    command.build_lib = command.build_temp = str(BUILD)
    command.ensure_finalized()
    command.run()
    return Path(command.get_ext_fullpath(name))
