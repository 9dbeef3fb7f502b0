"""Runs driver tests in child processes: a process can hold one libcuda.so.1 only.

Tests under ``behaviour/`` know nothing of that. Without ``GPUMEM_TEST_DRIVER`` the whole
folder runs once in a child over the host device, and each test here reports what became
of it there. With it (``GPUMEM_TEST_DRIVER=cuda`` on a machine with a GPU) they run here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.child import path_with, python

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import drivers  # noqa: E402

import build  # noqa: E402

IN_CHILD = "GPUMEM_TEST_DRIVER" in os.environ


@contextlib.contextmanager
def one_at_a_time(tmp_path_factory, name: str) -> Iterator[Path]:
    """Give a folder that all processes of this run share, to one of them at a time."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler: gcc not found")
    with one_at_a_time(tmp_path_factory, "libcuda") as folder:
        path = folder / "libcuda.so.1"
        return path if path.exists() else build.compile_library(folder)


def child_environment(library: Path, **more: str) -> dict:
    return {"PYTHONPATH": path_with(HERE), "GPUMEM_TEST_DRIVER": str(library), **more}


@pytest.fixture
def child(library):
    """Run code in a child with `driver` started and `host`, the control functions."""

    def run(code: str, *, start: bool = True, expect: int = 0, **environment: str) -> str:
        head = "import control, drivers\ndriver = drivers.load()\nhost = control.Control(driver)\n"
        head += "driver.start()\n" if start else ""
        env = child_environment(library, **environment)
        return python("-c", head + textwrap.dedent(code), env=env, status=expect).stdout

    return run


# ---- behaviour/: one child for the folder ----


@pytest.fixture(scope="session")
def behaviour_results(library, tmp_path_factory) -> dict:
    with one_at_a_time(tmp_path_factory, "behaviour") as folder:
        report, end = folder / "results.jsonl", folder / "end"
        if not end.exists():
            end.write_text(run_behaviour(library, report))
        lines = report.read_text().splitlines() if report.exists() else []
        results = {entry["test"]: entry for entry in map(json.loads, lines)}
        results[""] = {"outcome": "died", "text": end.read_text()}
        return results


def run_behaviour(library: Path, report: Path) -> str:
    """Run the folder in a child, which writes what became of each test; returns how it ended."""
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / "behaviour")
    env = child_environment(library, GPUMEM_TEST_REPORT=str(report))
    done = python(*command, env=env, cwd=build.ROOT, status=None)
    return f"exit {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"


@pytest.fixture(scope="session")
def session_driver():
    driver = drivers.load()
    if driver.library:
        driver.library.hostdev_set_device_count(2)
    driver.start()
    return driver


@pytest.fixture
def driver(request):
    if not IN_CHILD:
        yield request.getfixturevalue("behaviour_results")
        return
    driver = request.getfixturevalue("session_driver")
    yield driver
    driver.finish()


def _is_behaviour(item) -> bool:
    return item.path.parent == HERE / "behaviour"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if IN_CHILD or not _is_behaviour(pyfuncitem):
        return None
    results = pyfuncitem.funcargs["driver"]
    result = results.get(pyfuncitem.nodeid.split("/")[-1], results[""])
    if result["outcome"] == "skipped":
        pytest.skip(result["text"])
    if result["outcome"] != "passed":
        pytest.fail(f"in the child: {result['outcome']}\n{result['text']}", pytrace=False)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    path = os.environ.get("GPUMEM_TEST_REPORT")
    if path and (report.when == "call" or report.outcome != "passed"):
        text = report.longrepr[2] if report.skipped else report.longreprtext
        entry = {"test": item.nodeid.split("/")[-1], "outcome": report.outcome, "text": text}
        with open(path, "a") as file:
            file.write(json.dumps(entry) + "\n")
    return report
