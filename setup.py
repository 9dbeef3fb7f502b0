"""Build the compiled modules; everything declarative is in pyproject.toml.

Switches, each an environment variable set to 1:

GPUMEM_DEBUG     every invariant is checked after every operation; bounds checks on; -O1 -g
GPUMEM_SANITIZE  address and undefined-behaviour sanitizer ("thread" for the thread sanitizer)
GPUMEM_COVERAGE  line tracing for coverage.py, nogil code included
GPUMEM_ANNOTATE  write the annotated HTML beside each .pyx
"""

import os
import platform
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("GPUMEM_DEBUG", "0") not in ("", "0")
SANITIZE = os.environ.get("GPUMEM_SANITIZE", "0")
COVERAGE = os.environ.get("GPUMEM_COVERAGE", "0") not in ("", "0")
ANNOTATE = os.environ.get("GPUMEM_ANNOTATE", "0") not in ("", "0")

COMPILE = ["-O2", "-g0", "-fvisibility=hidden"]
# The chunk table's small functions belong inside those that a call runs through.
COMPILE += ["-finline-functions", "--param=max-inline-insns-auto=60"]
if platform.machine() == "x86_64":
    # Thread-local storage by descriptors: as cheap as static, without its limits.
    COMPILE.append("-mtls-dialect=gnu2")
LINK: list[str] = []
MACROS: list[tuple[str, str | None]] = [("_GNU_SOURCE", None)]

if DEBUG:
    COMPILE += ["-O1", "-g"]
    MACROS.append(("GPUMEM_DEBUG", "1"))
if SANITIZE not in ("", "0"):
    kinds = "thread" if SANITIZE == "thread" else "address,undefined"
    # Races want speed to show; a wrong address shows at any, and compiles in a quarter of the time.
    COMPILE += ["-O1" if SANITIZE == "thread" else "-O0", "-g1"]
    COMPILE += ["-fno-omit-frame-pointer", f"-fsanitize={kinds}"]
    LINK.append(f"-fsanitize={kinds}")
if COVERAGE:
    MACROS += [("CYTHON_TRACE_NOGIL", "1"), ("CYTHON_USE_SYS_MONITORING", "0")]


HOST_DEVICE = Path("gpumem/hostdev")
# libcuda/ makes a shared library of it for tests, and is never part of a module.
HOST_SOURCES = sorted(str(p) for p in HOST_DEVICE.rglob("*.c") if p.parent.name != "libcuda")

INCLUDES = ["gpumem/_support/include", "gpumem/include", str(HOST_DEVICE.parent)]

# C and C++ files that belong to a module besides its own .pyx.
COMPANIONS = {
    "_host": HOST_SOURCES,
    "_copy_crew": ["gpumem/crew.c"],
    "integrations.torch._hooks": ["gpumem/integrations/torch/hooks.cpp"],
}

OTHER_C = DEBUG or COVERAGE or ANNOTATE  # the generated C differs
SWITCHED = OTHER_C or SANITIZE not in ("", "0")
JOBS = len(os.sched_getaffinity(0))


def extension(source: Path) -> Extension:
    """Make the extension of one module, from its .pyx and what belongs to it."""
    name = ".".join(source.relative_to("gpumem").with_suffix("").parts)
    companions = COMPANIONS.get(name, [])
    is_cpp = any(each.endswith(".cpp") for each in companions)
    return Extension(
        f"gpumem.{name}",
        [str(source), *companions],
        include_dirs=[*INCLUDES, str(source.parent)],
        define_macros=MACROS,
        # One list serves the files of both languages, and compilers' own standards will do.
        extra_compile_args=COMPILE if is_cpp else ["-std=c11", *COMPILE],
        extra_link_args=LINK,
        libraries=["stdc++"] if is_cpp else [],
        depends=[
            str(p) for p in Path("gpumem").rglob("*.[hc]") if not p.name.startswith("libcuda")
        ],
    )


# cythonize works in several processes, which import this file.
if __name__ == "__main__":
    setup(
        # A switch changes what no time stamp shows: build everything anew.
        options={"build_ext": {"force": SWITCHED, "parallel": JOBS}},
        ext_modules=cythonize(
            [extension(source) for source in sorted(Path("gpumem").rglob("*.pyx"))],
            compiler_directives={
                "language_level": 3,
                "boundscheck": DEBUG,
                "wraparound": False,
                "cdivision": True,
                "initializedcheck": DEBUG,
                "embedsignature": True,
                "embedsignature.format": "python",
                "binding": True,
                "auto_pickle": False,
                "linetrace": COVERAGE,
            },
            nthreads=JOBS,
            annotate=ANNOTATE,
            force=OTHER_C,
            # Generated C goes to the build folder, so that the tree holds only what people write.
            build_dir="build/cython",
        ),
    )
