"""Build the compiled modules; everything declarative is in pyproject.toml.

Each module is cythonized, compiled and linked in one go, beside others on every core. Only what
changed is built: a module is made from its .pyx, the .pxd files that it cimports, the headers that
these and its C files include, and this file.

Switches, each an environment variable set to 1:

GPUMEM_DEBUG     every invariant is checked after every operation; bounds checks on; -O1 -g
GPUMEM_SANITIZE  address and undefined-behaviour sanitizer ("thread" for the thread sanitizer)
GPUMEM_COVERAGE  line tracing for coverage.py, nogil code included
GPUMEM_ANNOTATE  write the annotated HTML beside each .pyx
GPUMEM_QUICK     -O0, for a build that is tried once: half the time
"""

import functools
import gc
import gzip
import importlib.util
import multiprocessing
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from Cython.Build import cythonize
from Cython.Build.Dependencies import create_dependency_tree
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist
from setuptools.errors import CompileError

DEBUG = os.environ.get("GPUMEM_DEBUG", "0") not in ("", "0")
SANITIZE = os.environ.get("GPUMEM_SANITIZE", "0")
SANITIZED = SANITIZE not in ("", "0")
COVERAGE = os.environ.get("GPUMEM_COVERAGE", "0") not in ("", "0")
ANNOTATE = os.environ.get("GPUMEM_ANNOTATE", "0") not in ("", "0")
QUICK = os.environ.get("GPUMEM_QUICK", "0") not in ("", "0")

COMPILE = ["-O2", "-g0", "-fvisibility=hidden"]
# Small functions belong inside those that a call runs through.
COMPILE += ["-finline-functions", "--param=max-inline-insns-auto=60"]
# What every allocation and free runs through. Two fields that are changed one by one must not be
# read as one vector soon after: the processor then waits until both have left for the cache.
HOT = ("_native.bfc.table", "_native.arena.fast_path", "_native.arena.thread_cache")
FAST = ["-O3", "-fno-tree-slp-vectorize"]
# Modules of settings and of reports: nobody waits for them, and -O1 takes 60 % of the time of -O2.
# `_arena.arena` is not one of them.
COLD = ("_budget", "_live", "_arena.[!a]*", "_testing.*", "_events.*", "_snapshots.*")
if platform.machine() == "x86_64":
    # Thread-local storage by descriptors: as cheap as static, without its limits.
    COMPILE.append("-mtls-dialect=gnu2")
LINK: list[str] = []
MACROS: list[tuple[str, str | None]] = [("_GNU_SOURCE", None)]

if DEBUG:
    COMPILE += ["-O1", "-g"]
    MACROS.append(("GPUMEM_DEBUG", "1"))
if SANITIZED:
    kinds = "thread" if SANITIZE == "thread" else "address,undefined"
    # Races want speed to show; a wrong address shows at any, and compiles in a quarter of the time.
    COMPILE += ["-O1" if SANITIZE == "thread" else "-O0", "-g1"]
    COMPILE += ["-fno-omit-frame-pointer", f"-fsanitize={kinds}"]
    LINK.append(f"-fsanitize={kinds}")
if QUICK:
    COMPILE.append("-O0")
if COVERAGE:
    MACROS += [("CYTHON_TRACE_NOGIL", "1"), ("CYTHON_USE_SYS_MONITORING", "0")]

# A switch changes what no time stamp shows: build everything anew, but for the C that sanitizers
# and a quick build leave as it is.
OTHER_C = DEBUG or COVERAGE or ANNOTATE
SWITCHED = OTHER_C or SANITIZED or QUICK

PACKAGE = Path("gpumem")

# C files that belong to a module besides its own .pyx, by patterns.
COMPANIONS = {
    "_native.driver.host": "_native/driver/hostdev/**/*.c",
    "_copy.staged": "_copy/workers.c",
}
HEADERS = {path.name: path for path in PACKAGE.rglob("*.h")}
INCLUDE = re.compile(r'^\s*(?:#\s*include|cdef extern from)\s+"([\w./]+)"', re.MULTILINE)

# Where Cython's own functions are compiled, once for all modules.
UTILITIES = "gpumem._support._utilities"

CYTHON = {
    "compiler_directives": {
        "language_level": 3,
        "boundscheck": DEBUG,
        "wraparound": False,
        "cdivision": True,
        "initializedcheck": DEBUG,
        # Methods are descriptors, which check the type of self; plain functions would not. Their
        # signatures lie where the interpreter looks for them, and docstrings are clean.
        "binding": False,
        "embedsignature": True,
        "embedsignature.format": "clinic",
        "auto_pickle": False,
        "linetrace": COVERAGE,
    },
    "annotate": ANNOTATE,
    # Generated C goes to the build folder, so that the tree holds only what people write.
    "build_dir": "build/cython",
    "shared_utility_qualified_name": UTILITIES,
    "shared_utility_features_disabled": ["MemoryView"],  # no module has one
    "quiet": True,
}


# ---- what is built from what ---------------------------------------------------------------------


def extensions() -> list[Extension]:
    """Describe every module: one for each .pyx of the package, and Cython's own functions."""
    shared = Extension(
        UTILITIES, [], extra_compile_args=["-std=c11", *COMPILE], extra_link_args=LINK
    )
    return [shared, *(extension(path) for path in sorted(PACKAGE.rglob("*.pyx")))]


def extension(source: Path) -> Extension:
    """Describe one module, from its .pyx and what belongs to it."""
    name = ".".join(source.relative_to(PACKAGE).with_suffix("").parts)
    companions = companions_of(name)
    cython = create_dependency_tree(quiet=True).all_dependencies(str(source))
    headers, folders = headers_of([*map(Path, cython), *companions])
    options = COMPILE if SWITCHED else [*COMPILE, *speed_of(name)]
    return Extension(
        f"{PACKAGE}.{name}",
        [str(path) for path in (source, *companions)],
        include_dirs=sorted(folders),
        define_macros=MACROS,
        extra_compile_args=["-std=c11", *options],
        extra_link_args=LINK,
        depends=sorted(headers),
    )


def speed_of(name: str) -> list[str]:
    """Return the options of a module that is not compiled as most are."""
    if any(fnmatch(name, pattern) for pattern in COLD):
        return ["-O1"]
    return FAST if name in HOT else []


def companions_of(name: str) -> list[Path]:
    """Return the C files of a module besides its own."""
    return sorted(PACKAGE.glob(COMPANIONS[name])) if name in COMPANIONS else []


def headers_of(files: Iterable[Path]) -> tuple[set[str], set[str]]:
    """Return the package's headers that files include, or these include; and their -I folders."""
    found: set[Path] = set()
    folders: set[str] = set()
    waiting = list(files)
    while waiting:
        for text in included_by(waiting.pop()):
            header = HEADERS.get(Path(text).name)
            if header is None:
                continue
            if not text.startswith(".."):
                folders.add(str(header).removesuffix(f"/{text}"))
            if header not in found:
                found.add(header)
                waiting.append(header)
    return set(map(str, found)), folders


@functools.cache
def included_by(file: Path) -> list[str]:
    """Return what a C or Cython file includes, as it is written there."""
    return INCLUDE.findall(file.read_text())


# ---- building ------------------------------------------------------------------------------------


class SourceArchive(sdist):
    """The source distribution: one set of files gives one sequence of bytes.

    Files are dated by SOURCE_DATE_EPOCH, in seconds since 1970, or 1980-01-01, the first day that
    a zip file knows, too.
    """

    def make_archive(
        self,
        base_name: str,
        format: str,
        root_dir: str | None = None,
        base_dir: str | None = None,
        owner: str | None = None,
        group: str | None = None,
    ) -> str:
        """Pack a folder as tar.gz: names in order, nobody's files, one date, two modes."""
        if format != "gztar" or base_dir is None:
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)
        date = int(os.environ.get("SOURCE_DATE_EPOCH", 315532800))

        def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = date
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            return member

        target = Path(f"{base_name}.tar.gz")
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            target.open("wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=date) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive,
        ):
            for path in sorted([Path(base_dir), *Path(base_dir).rglob("*")]):
                archive.add(path, recursive=False, filter=plain)
        return str(target)


class Wheel(bdist_wheel):
    """A wheel whose name says on which Linux it runs: by auditwheel, where that is installed.

    auditwheel reads which symbols of the C library the modules use, and writes the oldest version
    that has them into the name, as manylinux_2_34. Without it the name says "linux", which package
    indexes refuse and pip installs.
    """

    def run(self) -> None:
        """Make the wheel, and put the one that auditwheel makes of it in its place."""
        super().run()
        if SANITIZED or not (importlib.util.find_spec("auditwheel") and shutil.which("patchelf")):
            return
        name_its_linux(Path(self.distribution.dist_files[-1][2]))


def name_its_linux(made: Path) -> None:
    """Replace a wheel by the one that auditwheel makes of it, or leave it if auditwheel refuses.

    It refuses where the C library is newer than those it knows; the wheel runs on this machine.
    """
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        command = [sys.executable, "-m", "auditwheel", "repair", "-w", folder, str(made)]
        if subprocess.run(command, check=False).returncode:
            print(f"{made.name} is for this machine: auditwheel refuses it", file=sys.stderr)
            return
        (repaired,) = Path(folder).glob("*.whl")
        made.unlink()
        repaired.rename(made.with_name(repaired.name))


class BuildModules(build_ext):
    """Builds each module in one go, on every core, the largest first."""

    def build_extensions(self) -> None:
        """Build what is out of date."""
        self.check_extensions_list(self.extensions)
        waiting = sorted(self.extensions, key=source_bytes, reverse=True)
        jobs = min(self.parallel or len(os.sched_getaffinity(0)), len(waiting))
        if not run_all([functools.partial(self.build_one, module) for module in waiting], jobs):
            raise CompileError("a module could not be built; see above")

    def build_one(self, module: Extension) -> None:
        """Cythonize, compile and link one module, if it is out of date."""
        anew = (self.force and (OTHER_C or not SWITCHED)) or is_outdated(module)
        (generated,) = cythonize([module], force=anew, **CYTHON)
        module.sources = generated.sources
        self.build_extension(module)


def is_outdated(module: Extension) -> bool:
    """Return whether a module's C was made before this file changed: by other directives."""
    generated = Path(str(CYTHON["build_dir"]), *module.name.split(".")).with_suffix(".c")
    return generated.exists() and generated.stat().st_mtime < os.path.getmtime(__file__)


def source_bytes(module: Extension) -> int:
    """Return the bytes of a module's sources: what there is to compile."""
    return sum(os.path.getsize(path) for path in module.sources)


def run_all(tasks: Sequence[Callable[[], None]], jobs: int) -> bool:
    """Run tasks in order in several processes; returns whether all succeeded.

    A process is forked, so that tasks need not be pickled: what runs this file (pip, for one) has a
    __main__ of its own. The first failure ends the handing out of tasks.
    """
    fork = multiprocessing.get_context("fork")
    upcoming = fork.Value("i", 0)

    def take() -> int:
        with upcoming:
            number = upcoming.value
            upcoming.value += 1
        return number

    def work() -> None:
        gc.set_threshold(20_000)  # a third of Cython's time at 700: its trees are large and stay
        while (number := take()) < len(tasks):
            try:
                tasks[number]()
            except BaseException:
                upcoming.value = len(tasks)
                traceback.print_exc(chain=False)
                sys.exit(1)

    workers = [fork.Process(target=work) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return not any(worker.exitcode for worker in workers)


def require_tools() -> None:
    """Say in one line what a build lacks, before it begins."""
    for language, variable in (("C", "CC"), ("C++", "CXX")):
        command = shlex.split(os.environ.get(variable) or sysconfig.get_config_var(variable) or "")
        if not command or shutil.which(command[0]) is None:
            raise SystemExit(
                f"error: building gpumem needs a {language} compiler, and "
                f"{command[0] if command else variable!r} is not there: install one (on Debian: "
                f"apt install build-essential), or name it in {variable}"
            )
    folder = sysconfig.get_path("include")
    if not Path(folder, "Python.h").exists():
        raise SystemExit(
            f"error: building gpumem needs Python's headers, and {folder} has no Python.h: install "
            f"them (on Debian: apt install python{sysconfig.get_python_version()}-dev)"
        )


if __name__ == "__main__":
    if {"build", "build_ext", "bdist_wheel", "editable_wheel", "install"} & set(sys.argv):
        require_tools()
    setup(
        options={"build_ext": {"force": SWITCHED}},
        cmdclass={"bdist_wheel": Wheel, "build_ext": BuildModules, "sdist": SourceArchive},
        ext_modules=extensions(),
    )
