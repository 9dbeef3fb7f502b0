"""Build the compiled modules; pyproject.toml has all that is declarative.

Each module is cythonized, compiled and linked in one task, and tasks run on every core. A module is
built again if a file changed that it is made from: its .pyx, the .pxd files that it cimports, the
headers that these and its C files include, and this file.

Switches, each an environment variable set to 1:

GPUMEM_DEBUG     every invariant is checked after every operation; bounds checks on; -O1 -g
GPUMEM_SANITIZE  address and undefined-behaviour sanitizer ("thread" for the thread sanitizer)
GPUMEM_COVERAGE  line tracing for coverage.py, nogil code included
GPUMEM_ANNOTATE  write the annotated HTML beside each module's C
GPUMEM_QUICK     -O0, for a build that is used once: half the time
"""

import functools
import gc
import multiprocessing
import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

DEBUG = os.environ.get("GPUMEM_DEBUG", "0") not in ("", "0")
SANITIZE = os.environ.get("GPUMEM_SANITIZE", "0")
SANITIZED = SANITIZE not in ("", "0")
COVERAGE = os.environ.get("GPUMEM_COVERAGE", "0") not in ("", "0")
ANNOTATE = os.environ.get("GPUMEM_ANNOTATE", "0") not in ("", "0")
QUICK = os.environ.get("GPUMEM_QUICK", "0") not in ("", "0")

COMPILE = ["-O2", "-g0", "-fvisibility=hidden"]
# Small functions are inlined into those that a call runs through.
COMPILE += ["-finline-functions", "--param=max-inline-insns-auto=60"]
# Every allocation and free runs through these. Two fields that are changed one by one must not be
# read as one vector soon after: the processor then waits until both stores have reached the cache.
HOT = ("_native.bfc.table", "_native.arena.fast_path", "_native.arena.thread_cache")
FAST = ["-O3", "-fno-tree-slp-vectorize"]
# Allocations, views, copies and misses run through these. In all other modules a program waits for
# the driver or the interpreter, not for their code, and -O1 takes 60 % of the time of -O2.
WARM = (
    "_native.arena.*",
    "_native.backing.*",
    "_native.bfc.*",
    "_native.budget.*",
    "_native.driver.table",
    "_native.pages.*",
    "_support.*",
    "_buffer.*",
    "_arena.arena",
    "_copy.*",
    "_tensor.[!v]*",
    "integrations.*",
)
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
    # Races show only at speed; a wrong address shows at any, and -O0 compiles in a quarter of the
    # time.
    COMPILE += ["-O1" if SANITIZE == "thread" else "-O0", "-g1"]
    COMPILE += ["-fno-omit-frame-pointer", f"-fsanitize={kinds}"]
    LINK.append(f"-fsanitize={kinds}")
if QUICK:
    COMPILE.append("-O0")
if COVERAGE:
    MACROS += [("CYTHON_TRACE_NOGIL", "1"), ("CYTHON_USE_SYS_MONITORING", "0")]

# A switch leaves no time stamp: everything is built anew, except the generated C, which sanitizers
# and a quick build do not change.
OTHER_C = DEBUG or COVERAGE or ANNOTATE
SWITCHED = OTHER_C or SANITIZED or QUICK

PACKAGE = Path("gpumem")
GENERATED = Path("build/cython")  # generated C does not lie among the sources
# Its date is the beginning of the last build in place that ended well; tests/conftest.py reads it.
STAMP = GENERATED / "in_place"

# C files that belong to a module besides its own .pyx, by patterns.
COMPANIONS = {
    "_native.driver.host": "_native/driver/hostdev/**/*.c",
    "_copy.staged": "_copy/workers.c",
}
# The module with Cython's own functions, compiled once for all modules.
UTILITIES = "gpumem._support._utilities"
# The CUDA that computes nothing: a library in C that Python loads by path. Once it is loaded, other
# libraries find it by the name of CUDA's driver.
NULL_CUDA = "gpumem.prediction.null_cuda"

HEADERS = {path.name: path for path in PACKAGE.rglob("*.h")}
DECLARATIONS = set(PACKAGE.rglob("*.pxd"))
INCLUDE = re.compile(r'^\s*(?:#\s*include|cdef extern from)\s+"([\w./]+)"', re.MULTILINE)
CIMPORT = re.compile(
    rf"^[ \t]*(?:from[ \t]+({PACKAGE}[\w.]*)[ \t]+)?cimport[ \t]+(\([^)]*\)|[^\n(]+)", re.MULTILINE
)

OPTIONS = {
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
        "emit_code_comments": COVERAGE or ANNOTATE,  # they are a fifth of the C that gcc reads
    },
    "annotate": ANNOTATE,
    "shared_utility_qualified_name": UTILITIES,
    "shared_utility_features_disabled": ["MemoryView"],  # no module has one
    "include_path": ["."],
}


# ---- the modules and their files -----------------------------------------------------------------


def extensions() -> list[Extension]:
    """Describe every module: one for each .pyx, Cython's own functions, and the null CUDA."""
    shared = Extension(
        UTILITIES, [], extra_compile_args=["-std=c11", *COMPILE, "-O1"], extra_link_args=LINK
    )
    null = compiled(NULL_CUDA, sorted(PACKAGE.glob("prediction/null/*.c")))
    null.extra_link_args = [*LINK, "-Wl,-soname,libcuda.so.1"]
    return [shared, null, *(extension(path) for path in sorted(PACKAGE.rglob("*.pyx")))]


def extension(source: Path) -> Extension:
    """Describe one module, from its .pyx and its other files."""
    name = ".".join(source.relative_to(PACKAGE).with_suffix("").parts)
    companions = sorted(PACKAGE.glob(COMPANIONS[name])) if name in COMPANIONS else []
    return compiled(f"{PACKAGE}.{name}", [source, *companions])


def compiled(name: str, sources: Sequence[Path]) -> Extension:
    """Describe a library of some files, with the headers that they need."""
    files, folders = needed_by(sources)
    speed = speed_of(name.removeprefix(f"{PACKAGE}."))
    return Extension(
        name,
        [str(path) for path in sources],
        include_dirs=sorted(folders),
        define_macros=MACROS,
        extra_compile_args=["-std=c11", *COMPILE, *([] if SWITCHED else speed)],
        extra_link_args=LINK,
        depends=sorted(map(str, files)),
    )


def speed_of(name: str) -> list[str]:
    """Return the further options of a module, by its speed."""
    if name in HOT:
        return FAST
    return [] if any(fnmatch(name, pattern) for pattern in WARM) else ["-O1"]


def needed_by(sources: Sequence[Path]) -> tuple[set[Path], set[str]]:
    """Return the .pxd files and headers of the package that sources need, and -I folders."""
    found = set(sources)
    folders: set[str] = set()
    waiting = list(sources)
    while waiting:
        needed, named = named_in(waiting.pop())
        folders |= named
        waiting += needed - found
        found |= needed
    return found.difference(sources), folders


@functools.cache
def named_in(file: Path) -> tuple[set[Path], set[str]]:
    """Return the files of the package that a C or Cython file names, and the headers' folders."""
    text = file.read_text()
    found: set[Path] = set()
    folders = set()
    for name in INCLUDE.findall(text):
        header = HEADERS.get(Path(name).name)
        if header is not None:
            found.add(header)
            if not name.startswith(".."):
                folders.add(str(header).removesuffix(f"/{name}"))
    if file.suffix in (".pyx", ".pxd"):
        modules = {file.with_suffix("")}
        for origin, names in CIMPORT.findall(text):
            dotted = re.findall(r"[\w.]+", re.sub(r"#.*", "", names))
            paths = [origin, *(f"{origin}.{name}".lstrip(".") for name in dotted)]
            modules.update(Path(path.replace(".", "/")) for path in paths if path)
        for module in modules:
            found |= {module.with_suffix(".pxd"), module / "__init__.pxd"} & DECLARATIONS
    return found - {file}, folders


# ---- building ------------------------------------------------------------------------------------


class BuildModules(build_ext):
    """Builds each module in one task, on every core, the largest first."""

    def run(self) -> None:
        """Build, and record when a build in place began."""
        begin = time.time()
        super().run()
        if self.inplace:
            self.remove_leftovers()
            STAMP.touch()
            os.utime(STAMP, (begin, begin))

    def get_ext_filename(self, fullname: str) -> str:
        """Return a module's file; that of the null CUDA is no module for Python."""
        name: str = super().get_ext_filename(fullname)
        is_null = NULL_CUDA.endswith(fullname.rpartition(".")[2] or "-")
        return f"{name.partition('.')[0]}.so.1" if is_null else name

    def remove_leftovers(self) -> None:
        """Remove compiled modules that have no source: each would hide a .py file of its name."""
        built = {self.get_ext_fullpath(module.name) for module in self.extensions}
        for path in PACKAGE.rglob("*" + self.get_ext_filename("")):
            if str(path.resolve()) not in built:
                path.unlink()

    def build_extensions(self) -> None:
        """Build the modules that are out of date."""
        self.check_extensions_list(self.extensions)
        waiting = sorted(self.extensions, key=source_bytes, reverse=True)
        jobs = min(self.parallel or len(os.sched_getaffinity(0)), len(waiting))
        if not run_all([functools.partial(self.build_one, module) for module in waiting], jobs):
            raise CompileError("a module could not be built; see above")

    def build_one(self, module: Extension) -> None:
        """Cythonize, compile and link one module, if it is out of date."""
        if module.name == NULL_CUDA:
            self.build_extension(module)
            return
        made = generated(module)
        if (self.force and (OTHER_C or not SWITCHED)) or is_outdated(module):
            made.parent.mkdir(parents=True, exist_ok=True)
            write_c(module, made)
        module.sources[:1] = [str(made)]
        self.build_extension(module)


def generated(module: Extension) -> Path:
    """Return the path of the C that Cython makes of a module."""
    return GENERATED.joinpath(*module.name.split(".")).with_suffix(".c")


def is_outdated(module: Extension) -> bool:
    """Return whether a module's C is missing, or older than a file that it is made of."""
    made = generated(module)
    if not made.exists():
        return True
    files = [__file__, *module.sources[:1]]
    files += [file for file in module.depends if file.endswith(".pxd")]
    return made.stat().st_mtime < max(map(os.path.getmtime, files))


def write_c(module: Extension, made: Path) -> None:
    """Let Cython make a module's C."""
    from Cython.Build.SharedModule import generate_shared_module
    from Cython.Compiler.Main import CompilationOptions, compile

    if module.name == UTILITIES:
        options = {**OPTIONS, "shared_utility_qualified_name": None}
        generate_shared_module(CompilationOptions(**options, shared_c_file_path=str(made)))
        return
    options = CompilationOptions(**OPTIONS, output_file=str(made))
    if compile(module.sources[0], options, full_module_name=module.name).num_errors:
        made.unlink(missing_ok=True)
        raise CompileError(f"Cython refuses {module.sources[0]}")
    if not DEBUG:
        made.write_text(with_one_frame(made.read_text()))


def with_one_frame(text: str) -> str:
    """Return a module's C, changed so that only the frame that raised is added to a traceback.

    A user's traceback then has one line below the user's own. Cython's code needs that one.
    """
    begin = "    if (c_line) {\n        c_line = __Pyx_CLineForTraceback(tstate, c_line);\n"
    leave = """\
    __Pyx_ErrFetchInState(tstate, &ptype, &pvalue, &ptraceback);
    c_line = ptraceback == NULL ? c_line : -1;
    __Pyx_ErrRestoreInState(tstate, ptype, pvalue, ptraceback);
    if (c_line == -1) return;
"""
    return text.replace(begin, leave + begin)


def source_bytes(module: Extension) -> int:
    """Return the bytes of a module's sources, which tell how long it compiles."""
    return sum(os.path.getsize(path) for path in module.sources)


def run_all(tasks: Sequence[Callable[[], None]], jobs: int) -> bool:
    """Run tasks in order in several processes; returns whether all succeeded.

    Processes are forked, so that tasks need not be pickled: the program that runs this file, such
    as pip, has a __main__ of its own. After the first failure no further task begins.
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
    """Exit with one line if a tool is missing, before the build begins."""
    for language, variable in (("C", "CC"), ("C++", "CXX")):
        command = shlex.split(os.environ.get(variable) or sysconfig.get_config_var(variable) or "")
        if not command or shutil.which(command[0]) is None:
            raise SystemExit(
                f"error: building gpumem needs a {language} compiler, and "
                f"{command[0] if command else variable!r} is missing: install one (on Debian: "
                f"apt install build-essential), or name it in {variable}"
            )
    folder = sysconfig.get_path("include")
    if not Path(folder, "Python.h").exists():
        raise SystemExit(
            f"error: building gpumem needs Python's headers, and {folder} has no Python.h: install "
            f"them (on Debian: apt install python{sysconfig.get_python_version()}-dev)"
        )


def description() -> str:
    """Return the README for the package index, which has none of the files that it links to."""
    text = re.sub(r"!\[[^]]*\]\([^)]*\)\n*", "", Path("README.md").read_text())
    return re.sub(r"\[([^]]*)\]\((?!https:)[^)]*\)", r"\1", text)


if __name__ == "__main__":
    if {"build", "build_ext", "bdist_wheel", "editable_wheel", "install"} & set(sys.argv):
        require_tools()
    setup(
        long_description=description(),
        long_description_content_type="text/markdown",
        options={"build_ext": {"force": SWITCHED}},
        cmdclass={"build_ext": BuildModules},
        ext_modules=extensions(),
    )
