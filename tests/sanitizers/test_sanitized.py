"""The whole core built with the address and undefined-behaviour sanitizers, under a stress."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def sanitizer_library() -> str:
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler: gcc not found")
    found = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(found):
        pytest.skip("this gcc has no libasan")
    return found


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """Build the package from a copy of its sources; returns the folder to import it from."""
    pytest.importorskip("Cython", reason="Cython is not installed")
    pytest.importorskip("setuptools", reason="setuptools is not installed")
    sanitizer_library()
    if not (ROOT / "setup.py").is_file():
        pytest.skip("the sources are not here")
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    for name in ("README.md", "LICENSE"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, source)
        else:
            (source / name).write_text("")
    # What Cython made of the sources already need not be made again; its time stamps come along.
    for folder in ("gpumem", "tests/helpers", "tests/stress", "build/cython"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    built = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace", f"-j{os.cpu_count()}"],
        cwd=source,
        env={**os.environ, "GPUMEM_SANITIZE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    return source


def run_sanitized(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments],
        env={
            **os.environ,
            "LD_PRELOAD": sanitizer_library(),
            "PYTHONPATH": str(folder),
            "PYTHONMALLOC": "malloc",
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_sanitizers_are_at_work(sanitized):
    """A write behind an allocation of the C library must be caught, else nothing here counts."""
    done = run_sanitized(
        sanitized,
        "-c",
        "import ctypes, gpumem\n"
        f"assert gpumem.__file__.startswith({str(sanitized)!r}), gpumem.__file__\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype = ctypes.c_void_p\n"
        "address = libc.malloc(100)\n"
        "libc.memset(ctypes.c_void_p(address), 0, 101)\n",
    )
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


def test_a_stress_of_the_core_runs_clean(sanitized, rng):
    seed = rng.randrange(1 << 30)
    print(f"seed {seed}")
    done = run_sanitized(sanitized, str(HERE / "sanitized_stress.py"), str(seed))
    assert (done.returncode, done.stdout) == (0, "reached the end\n"), done.stderr[-6000:]
    assert "runtime error" not in done.stderr, done.stderr[-6000:]


def test_a_search_for_wrong_bytes_runs_clean(sanitized, rng):
    seed = str(rng.randrange(1 << 30))
    done = run_sanitized(sanitized, "-m", "tests.stress", "--seconds", "6", "--seed", seed)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert done.stdout.endswith("0 wrong bytes, 0 leaks\n")
    assert "runtime error" not in done.stderr, done.stderr[-6000:]
