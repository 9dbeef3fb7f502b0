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
    COMPILE += ["-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={kinds}"]
    LINK.append(f"-fsanitize={kinds}")
if COVERAGE:
    MACROS += [("CYTHON_TRACE_NOGIL", "1"), ("CYTHON_USE_SYS_MONITORING", "0")]


HOST_DEVICE = sorted(
    str(p) for p in Path("gpumem/hostdev").glob("*.c") if not p.name.startswith("libcuda")
)

# C and C++ files that belong to a module besides its own .pyx.
COMPANIONS = {
    "_host": HOST_DEVICE,
    "_copy_crew": ["gpumem/crew.c"],
    "integrations.torch._hooks": ["gpumem/integrations/torch/hooks.cpp"],
}

SWITCHED = DEBUG or COVERAGE or ANNOTATE or SANITIZE not in ("", "0")
JOBS = len(os.sched_getaffinity(0))


def extension(source: Path) -> Extension:
    """Make the extension of one module, from its .pyx and what belongs to it."""
    name = ".".join(source.relative_to("gpumem").with_suffix("").parts)
    companions = COMPANIONS.get(name, [])
    is_cpp = any(each.endswith(".cpp") for each in companions)
    return Extension(
        f"gpumem.{name}",
        [str(source), *companions],
        include_dirs=["gpumem/include", "gpumem/hostdev", str(source.parent)],
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
            force=SWITCHED,
            # Generated C goes to the build folder, so that the tree holds only what people write.
            build_dir="build/cython",
        ),
    )
HOST_DEVICE = sorted(
    str(p) for p in Path("gpumem/hostdev").glob("*.c") if not p.name.startswith("libcuda")
)

SWITCHED = DEBUG or COVERAGE or ANNOTATE or SANITIZE not in ("", "0")

setup(
    # A switch changes what no time stamp shows: build everything anew.
    options={"build_ext": {"force": SWITCHED}},
    ext_modules=cythonize(
        [
            extension("_bfc"),
            extension("_bfc_check"),
            extension("_bfc_parked"),
            extension("_bfc_places"),
            extension("_driver"),
            extension("_handle"),
            extension("_cuda"),
            extension("_host", *HOST_DEVICE),
            extension("_page_driver"),
            extension("_bfc_holes"),
            extension("_budget_core"),
            extension("_budget"),
            extension("_page_space"),
            extension("_page_budget"),
            extension("_page_check"),
            extension("_page_sites"),
            extension("_page_plan"),
            extension("_page_moves"),
            extension("_page_suspend"),
            extension("_backing"),
            extension("_backing_managed"),
            extension("_backing_physical"),
            extension("_backing_pages"),
            extension("_backing_file"),
            extension("_backing_pinned"),
            extension("_arena_cache"),
            extension("_arena_books"),
            extension("_arena_parked"),
            extension("_arena_streams"),
            extension("_arena_slots"),
            extension("_arena_pages"),
            extension("_arena_wait"),
            extension("_arena_places"),
            extension("_arena_growth"),
            extension("_arena_suspend"),
            extension("_arena_budget"),
            extension("_arena"),
            extension("_arena_capture"),
            extension("_outlets"),
            extension("_stream"),
            extension("_graph"),
            extension("_dlpack"),
            extension("_lease"),
            extension("_deferred"),
            extension("_raw"),
            extension("_buffer"),
            extension("_adaptor"),
            extension("_direct"),
            extension("_pool_imports"),
            extension("_pool_core"),
            extension("_pool"),
            extension("_core_settings"),
            extension("_core_budget"),
            extension("_core_reports"),
            extension("_core_capture"),
            extension("_core_source"),
            extension("_core_backing"),
            extension("_external"),
            extension("_core"),
            extension("_element"),
            extension("_layout"),
            extension("_indexing"),
            extension("_order"),
            extension("_foreign"),
            extension("_hold"),
            extension("_exports"),
            extension("_defaults"),
            extension("_copy_plan"),
            extension("_copy_crew", "gpumem/crew.c"),
            extension("_copy_driver"),
            extension("_copy_staged"),
            extension("_copy_ring"),
            extension("_copy_hold"),
            extension("_copy"),
            extension("_fill"),
            extension("_transfer"),
            extension("_tensor"),
            extension("_create"),
            extension("_imports"),
            extension("_exchange"),
            extension("integrations._cupy"),
            extension("interop._mapping"),
            extension("interop._memory"),
            extension("interop._maps"),
            extension("interop._export"),
            extension("interop._page_file"),
            extension("interop._timeline_core"),
            extension("interop._timeline_queue"),
            extension("interop._timeline"),
            extension("interop._host_timeline"),
            extension("interop._driver_timeline"),
            extension("integrations.torch._hooks", "gpumem/integrations/torch/hooks.cpp"),
            extension("planning._planned"),
            extension("replay._replay"),
        ],
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
        annotate=ANNOTATE,
        force=SWITCHED,
        # Generated C goes to the build folder, so that the tree holds only what people write.
        build_dir="build/cython",
    ),
)
