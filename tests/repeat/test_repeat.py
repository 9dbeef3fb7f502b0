"""Some files, run twice, pass; a test that fails in some runs is named, with its first failure."""

import subprocess
import sys
from pathlib import Path

import pytest

from repeat import choice

ROOT = Path(__file__).resolve().parents[2]

FAILS_ONCE = """
from pathlib import Path

def test_passes():
    pass

def test_fails_in_the_second_run():
    runs = Path(__file__).with_name("runs")
    with runs.open("a") as file:
        file.write("x")
    print("it is told", "here")
    assert runs.stat().st_size != 2, "the second run"
"""
WAITS = """
import threading

def test_waits_for_ever():
    threading.Event().wait()
"""
CRASHES = """
import os

def test_crashes():
    os.kill(os.getpid(), 9)
"""
SKIPPED = """
import pytest

pytest.importorskip("a_library_that_is_not_there")
"""


def repeat(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tests.repeat", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "test_written.py"
        path.write_text(text)
        return path

    return write


def test_files_that_depend_on_timing_pass_twice():
    files = ("arena/test_threads.py", "budget/test_threads.py", "copy/test_order.py")
    paths = [choice.TESTS / name for name in files]
    done = repeat("--times", 2, "--workers", 2, "--load", 1, *paths)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\n2 repetitions of each file, 0 failures\n")


def test_repeat_names_a_test_that_fails_once(written):
    done = repeat("--times", 3, "--workers", 1, "--load", 1, written(FAILS_ONCE))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "\n     1  " in done.stdout
    assert "test_written.py::test_fails_in_the_second_run: the first failure" in done.stdout
    assert "the second run" in done.stdout
    assert "it is told here" in done.stdout
    assert "3 runs of files" in done.stdout
    assert "1 tests failed, 5 tests passed" in done.stdout
    assert done.stdout.endswith("\n3 repetitions of each file, 1 failures\n")


def test_repeat_ends_a_file_that_hangs_and_shows_where(written):
    done = repeat("--times", 1, "--load", 1, "--patience", 5, written(WAITS))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no end after 5 s" in done.stdout
    assert "in test_waits_for_ever" in done.stdout


def test_repeat_counts_a_crash(written):
    done = repeat("--times", 2, "--load", 1, written(CRASHES))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "signal 9" in done.stdout
    assert done.stdout.endswith("\n2 repetitions of each file, 2 failures\n")


def test_repeat_gives_up_what_runs_when_the_time_is_over(written):
    done = repeat("--minutes", 0.02, "--load", 1, "--workers", 1, written(WAITS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n1 runs given up at the end of the time\n" in done.stdout
    assert done.stdout.endswith("\n0 repetitions of each file, 0 failures\n")


def test_a_file_that_is_skipped_as_a_whole_has_not_failed(written):
    done = repeat("--times", 1, "--load", 1, written(SKIPPED))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_quarter_holds_files_of_threads_processes_signals_and_gates():
    names = {str(path.relative_to(choice.TESTS)) for path in choice.quarter()}
    assert len(names) == len(choice.candidates()) // 4
    assert names > {
        "arena/test_threads.py",
        "copy/test_interrupted_copies.py",
        "copy/test_order.py",
        "exit/test_exit.py",
        "interop/timelines/test_processes.py",
    }


DEPENDENT = """
import signal
from helpers import child
from helpers.driver import HostDriver
from helpers.waiting import wait_until

def wait_for_it():
    wait_until(bool)

@pytest.fixture
def blocked():
    return HostDriver().block(None)

def test_by_a_fixture(blocked):
    pass

def test_by_a_function():
    wait_for_it()

def test_by_a_helper():
    child.run("")

def test_by_a_library():
    signal.raise_signal(2)

def test_by_an_attribute(host):
    host.set_lag(1)

def test_of_nothing(signals):
    signals.child.wait_until()
"""


def test_choice_sees_what_a_test_uses_by_fixtures_functions_and_helpers(written):
    assert {name for name in choice.dependent_names(written(DEPENDENT)) if "test" in name} == {
        "test_by_a_fixture",
        "test_by_a_function",
        "test_by_a_helper",
        "test_by_a_library",
        "test_by_an_attribute",
    }
