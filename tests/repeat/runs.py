"""Run test files again and again, some at a time, and count what fails."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
NO_TESTS = 5  # pytest's status if every test is skipped at import
LONGEST_TEXT = 6000  # characters of a failure
# Ends with its parent, however that ends: its standard input is closed then.
BUSY = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True:
    sum(range(1000))
"""


@dataclass
class Failures:
    """How often a test failed, and how for the first time."""

    count: int
    first: str


@dataclass
class Outcome:
    """What was run and what failed."""

    runs: Counter[Path] = field(default_factory=Counter)  # of each file
    tests: Counter[str] = field(default_factory=Counter)  # "passed", "skipped", "failed"
    failed: dict[str, Failures] = field(default_factory=dict)
    given_up: int = 0  # runs that the end of the time cut short


class Repetition:
    """Runs of files, each `times` times or until the time is over.

    Parameters
    ----------
    files : sequence of Path
        Test files.
    times : int
        Runs of each file.
    seconds : float
        After which nothing is begun, and what still runs is given up.
    patience_s : float
        Of one run of a file; it fails then.
    tell : callable
        Gets a line of text after each repetition and each failure.
    """

    def __init__(
        self,
        files: Sequence[Path],
        *,
        times: int,
        seconds: float,
        patience_s: float,
        seed: int,
        tell: Callable[[str], None],
    ) -> None:
        self.outcome = Outcome(Counter(dict.fromkeys(files, 0)))
        self._turns = _turns(files, times, random.Random(seed))
        self._begun = time.monotonic()
        self._end = self._begun + seconds
        self._patience_s = patience_s
        self._tell = tell
        self._lock = threading.Lock()  # over the outcome and the turns
        self._broken: BaseException | None = None

    def run(self, workers: int) -> Outcome:
        """Run so many files at a time."""
        threads = [threading.Thread(target=self._work) for _ in range(workers)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:  # what has run so far counts
            self._end = 0.0
            for thread in threads:
                thread.join()
        if self._broken is not None:
            raise self._broken
        return self.outcome

    def _work(self) -> None:
        try:
            while time.monotonic() < self._end:
                with self._lock:
                    file = next(self._turns, None)
                if file is None:
                    return
                with tempfile.TemporaryDirectory(prefix="repeat-") as folder:
                    self._run_file(file, Path(folder))
        except BaseException as error:
            self._broken, self._end = error, 0.0

    def _run_file(self, file: Path, folder: Path) -> None:
        report, output = folder / "report.xml", folder / "output"
        with output.open("wb") as stdout:
            child = subprocess.Popen(
                [sys.executable, *_pytest(file, folder / "tmp", report)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            status = self._wait(child)
        finally:
            _kill_session(child)
        if status is None:
            with self._lock:
                self.outcome.given_up += 1
            return
        counts, failures = _read(report) if report.exists() else (Counter(), {})
        if status not in (0, 1, NO_TESTS) or (status == 1) != bool(failures):
            told = output.read_text("utf-8", "replace")[-LONGEST_TEXT:]
            failures["the process"] = f"{_ended(status)}\n{told}"
        self._count(file, counts, failures)

    def _wait(self, child: subprocess.Popen[bytes]) -> int | str | None:
        """Wait for its status; None: the time is over before."""
        begun = time.monotonic()
        while True:
            try:
                return child.wait(0.5)
            except subprocess.TimeoutExpired:
                if time.monotonic() >= self._end:
                    return None
                if time.monotonic() - begun > self._patience_s:
                    return self._abort(child)

    def _abort(self, child: subprocess.Popen[bytes]) -> str:
        child.send_signal(signal.SIGABRT)  # faulthandler writes where it is
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
        return f"no end after {self._patience_s:.0f} s"

    def _count(self, file: Path, counts: Counter[str], failures: dict[str, str]) -> None:
        name = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
        with self._lock:
            before = min(self.outcome.runs.values())
            self.outcome.runs[file] += 1
            self.outcome.tests += counts
            for test, text in failures.items():
                first = self.outcome.failed.setdefault(f"{name}::{test}", Failures(0, text))
                first.count += 1
                self._tell(f"FAILED {name}::{test}, run {self.outcome.runs[file]} of this file")
            done = min(self.outcome.runs.values())
            if done > before:
                self._tell(f"repetition {done} after {time.monotonic() - self._begun:.0f} s")


def _turns(files: Sequence[Path], times: int, rng: random.Random) -> Iterator[Path]:
    for _ in range(times):
        yield from rng.sample(files, len(files))


def _pytest(file: Path, temporary: Path, report: Path) -> list[str]:
    options = ["-q", "-p", "no:cacheprovider", "-o", "junit_logging=out-err"]
    return ["-m", "pytest", *options, f"--basetemp={temporary}", f"--junitxml={report}", str(file)]


def _kill_session(child: subprocess.Popen[bytes]) -> None:
    """End what is left of it: its own children are in its session."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _ended(status: int | str) -> str:
    if isinstance(status, str):
        return status
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def _read(report: Path) -> tuple[Counter[str], dict[str, str]]:
    """Return how tests ended, and the text of each failure."""
    counts: Counter[str] = Counter()
    failures: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        faults = [*case.iter("failure"), *case.iter("error")]
        if faults:
            parts = [*faults, *case.iter("system-out"), *case.iter("system-err")]
            text = "\n".join(part.text or "" for part in parts)
            failures[case.get("name", "")] = text[-LONGEST_TEXT:]
        skipped = case.find("skipped") is not None
        counts["failed" if faults else "skipped" if skipped else "passed"] += 1
    return counts, failures


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many processors busy."""
    children = [
        subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE) for _ in range(count)
    ]
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.communicate()
