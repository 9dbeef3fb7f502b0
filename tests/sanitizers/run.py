"""Builds gpumem and the host device with sanitizers and runs them under stress.

    python tests/sanitizers/run.py                       what continuous integration runs
    python tests/sanitizers/run.py address thread --long
    python tests/sanitizers/run.py --seed 7 --seconds 60
    python tests/sanitizers/run.py --pairs --seconds 600

The package is built with each sanitizer named, `address` (addresses and undefined behaviour) by
default; the host device's C program runs under both in any case. `--seed` repeats a run's
decisions, not the timing of its threads.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
ROOT = TESTS.parent
sys.path.insert(0, str(TESTS / "hostdev"))

import build  # noqa: E402

SWITCHES = {"address": "1", "thread": "thread"}  # values of GPUMEM_SANITIZE
RUNTIMES = {"address": "libasan.so", "thread": "libtsan.so"}
OPTIONS = {
    "PYTHONMALLOC": "malloc",
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:exitcode=66",
}
# Each must be caught, else a clean run means nothing.
PLANTED = {
    "address": """
libc.malloc.restype = ctypes.c_void_p
libc.memset(ctypes.c_void_p(libc.malloc(100)), 0, 101)
""",
    "thread": """
both = threading.Barrier(2)
memory = ctypes.create_string_buffer(1 << 20)
def write():
    both.wait()
    for _ in range(100):
        libc.memset(memory, 1, len(memory))
threads = [threading.Thread(target=write) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
""",
}
# Every way in and out of arenas, buffers and tensors, without child processes.
TESTED = (
    *("arena/test_lifetime.py", "arena/test_threads.py", "buffer/test_dlpack.py"),
    *("copy/test_random_copies.py", "tensor/test_tensor.py", "tensor/test_tensor_dlpack.py"),
)
CONFIG = ROOT / "pyproject.toml"
REPORTS = {"address": "heap-buffer-overflow", "thread": "data race"}


class Failed(Exception):
    """A run that was not clean."""


def step(name: str) -> None:
    print(f"---- {name}", flush=True)


def require(holds: bool, what: str, done: subprocess.CompletedProcess) -> None:
    if not holds:
        raise Failed(f"{what}: exit {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-8000:]}")


# ---- the package ---------------------------------------------------------------------------------


def build_package(sanitizer: str, folder: Path) -> Path:
    """Build it outside of the tree; returns the folder to import it from."""
    library = folder / "package"
    folders = [f"--build-lib={library}", f"--build-temp={folder / 'objects'}"]
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build", *folders],
        cwd=ROOT,
        env={**os.environ, "GPUMEM_SANITIZE": SWITCHES[sanitizer]},
        capture_output=True,
        text=True,
        check=False,
    )
    require(done.returncode == 0, "the build failed", done)
    return library


def runtime_of(sanitizer: str) -> str:
    """Find the library that must be loaded before everything else."""
    command = ["gcc", f"-print-file-name={RUNTIMES[sanitizer]}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(found):
        raise Failed(f"this gcc has no {RUNTIMES[sanitizer]}")
    return found


def run_python(sanitizer: str, library: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run Python over the sanitized package; the tree comes behind it on the path."""
    path = os.pathsep.join(map(str, (library, ROOT, TESTS)))
    preload = {"LD_PRELOAD": runtime_of(sanitizer), "PYTHONPATH": path}
    return subprocess.run(
        [*fixed_addresses(sanitizer), sys.executable, *arguments],
        env={**os.environ, **OPTIONS, **preload},
        cwd=library,
        capture_output=True,
        text=True,
        check=False,
    )


def fixed_addresses(sanitizer: str) -> list[str]:
    """Wrap a command: the thread sanitizer's map of memory needs addresses that are not random."""
    if sanitizer == "thread" and shutil.which("setarch"):
        return ["setarch", platform.machine(), "--addr-no-randomize"]
    return []


def check_package(sanitizer: str, seconds: float, seeds: list[int], pairs: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        step(f"gpumem under {sanitizer}: build")
        library = build_package(sanitizer, Path(folder))
        step(f"gpumem under {sanitizer}: a planted fault is caught")
        check_planted(sanitizer, library)
        if not pairs:
            check_tests(sanitizer, library)
        for seed in seeds:
            step(f"gpumem under {sanitizer}: a search for wrong bytes, seed {seed}")
            stress = ["-m", "tests.stress", "--seconds", str(seconds), "--seed", str(seed)]
            done = run_python(sanitizer, library, *stress, *["--pairs"] * pairs)
            end = "0 wrong bytes, 0 wrong errors\n" if pairs else "0 wrong bytes, 0 leaks\n"
            clean = done.returncode == 0 and done.stdout.endswith(end)
            require(clean and "runtime error" not in done.stderr, "tests.stress", done)
            print("".join(done.stdout.splitlines(keepends=True)[-2:]), end="")


def check_tests(sanitizer: str, library: Path) -> None:
    step(f"gpumem under {sanitizer}: tests of {', '.join(TESTED)}")
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    tests = [str(TESTS / name) for name in TESTED]
    done = run_python(sanitizer, library, *options, f"--config-file={CONFIG}", *tests)
    require(done.returncode == 0 and "runtime error" not in done.stderr, "the tests", done)


def check_planted(sanitizer: str, library: Path) -> None:
    head = f"""
import ctypes, threading, gpumem
assert gpumem.__file__.startswith({str(library)!r}), gpumem.__file__
libc = ctypes.CDLL(None)
"""
    done = run_python(sanitizer, library, "-c", head + PLANTED[sanitizer])
    require(done.returncode != 0 and REPORTS[sanitizer] in done.stderr, "a fault was missed", done)


# ---- the host device -----------------------------------------------------------------------------


def check_host_device(sanitizer: str, rounds: int, seeds: list[int]) -> None:
    """Run the C program: as it is, and while the device looks for misuse and must find none."""
    step(f"host device, {sanitizer}: build")
    with tempfile.TemporaryDirectory() as folder:
        source = TESTS / "hostdev" / "stress_hostdev.c"
        program = build.compile_program(Path(folder), source, sanitizer)
        for seed in seeds:
            for mode in ("", "misuse"):
                step(f"host device, {sanitizer}: seed {seed} {mode}".rstrip())
                done = subprocess.run(
                    [*fixed_addresses(sanitizer), str(program), str(seed), str(rounds), mode],
                    env={**os.environ, **OPTIONS},
                    capture_output=True,
                    text=True,
                    check=False,
                )
                require(done.returncode == 0, "stress_hostdev", done)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sanitizers", nargs="*", metavar="address|thread", default=["address"])
    parser.add_argument("--seconds", type=float, default=6, help="of each search for wrong bytes")
    parser.add_argument("--seed", type=int, help="repeats the decisions of a run")
    parser.add_argument("--long", action="store_true", help="three seeds, 300 seconds each search")
    parser.add_argument("--pairs", action="store_true", help="only the stress over pairs of calls")
    chosen = parser.parse_args()
    if unknown := set(chosen.sanitizers) - set(SWITCHES):
        parser.error(f"no such sanitizer: {', '.join(sorted(unknown))}")
    first = random.SystemRandom().randrange(1 << 30) if chosen.seed is None else chosen.seed
    seeds = [first, first + 1, first + 2] if chosen.long else [first]
    try:
        for sanitizer in () if chosen.pairs else SWITCHES:
            rounds = 50 if sanitizer == "thread" else 120  # some five seconds
            check_host_device(sanitizer, rounds * (10 if chosen.long else 1), seeds)
        for sanitizer in chosen.sanitizers:
            seconds = 300 if chosen.long else chosen.seconds
            check_package(sanitizer, seconds, seeds, chosen.pairs)
    except Failed as failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        return 1
    print("all clean")
    return 0


if __name__ == "__main__":
    sys.exit(main())
