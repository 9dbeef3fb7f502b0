"""Watches the process that tries inputs: crashes, hangs, counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from . import targets
from .child import Page, name_of

ROOT = Path(__file__).resolve().parents[2]
IDLE_SECONDS = 90  # without an end and without using the processor: it waits for ever
_LOOK_EVERY = 0.1
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Result:
    """What a search did and found."""

    name: str
    seconds: float = 0.0
    inputs: int = 0
    kept: int = 0
    findings: dict[str, str] = field(default_factory=dict)  # file of the input: what happened

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.seconds:.0f} s, {self.inputs:,} inputs, "
            f"{self.inputs / max(self.seconds, 0.1):,.0f} per second, {self.kept:,} kept, "
            f"{len(self.findings)} findings"
        )


class Search:
    """One target's search, in a folder of its own."""

    def __init__(self, name: str, seed: int, folder: Path, busy_seconds: float) -> None:
        self._name = name
        self._busy_seconds = busy_seconds  # of the processor's time for one input: it hangs
        self._seed = seed
        self._folder = folder
        for part in ("kept", "findings"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / "crashed").touch()
        self._page = Page(folder / "page")
        self._starts = 0

    def run(self, seconds: float) -> Result:
        """Replay the corpus, then try mutations for so long."""
        begun = time.monotonic()
        first = self._page.read()[0]
        while self._run_child(begun + seconds):
            pass
        findings = sorted((self._folder / "findings").glob("*.txt"))
        return Result(
            self._name,
            time.monotonic() - begun,
            self._page.read()[0] - first,
            len(list((self._folder / "kept").iterdir())),
            {str(path.with_suffix("")): path.read_text("utf-8") for path in findings},
        )

    def _run_child(self, end: float) -> bool:
        """Let one process try inputs; False: the time is over and the corpus was replayed."""
        self._starts += 1
        seed = self._seed + self._starts
        stderr = self._folder / "stderr"
        with stderr.open("wb") as file:
            child = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.fuzz.child",
                    self._name,
                    str(self._folder),
                    str(seed),
                ],
                cwd=ROOT,
                env={**os.environ, **targets.ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                start_new_session=True,
            )
        try:
            ended = self._watch(child, end)
        finally:
            child.kill()
            child.wait()
        if ended is None:
            return False
        begun, _, data = self._page.read()
        told = stderr.read_text("utf-8", "replace")
        if not begun:
            raise RuntimeError(f"the search of {self._name} cannot begin:\n{told}")
        self._record(ended, data, told)
        return True

    def _watch(self, child: subprocess.Popen[bytes], end: float) -> str | None:
        """Wait until the time is over, or an input ends the process or does not end."""
        seen, since, used = -1, 0.0, 0.0
        while child.poll() is None:
            begun, is_replayed, _ = self._page.read()
            now = time.monotonic()
            if is_replayed and now >= end:
                return None
            if begun != seen:
                seen, since, used = begun, now, _processor_seconds(child.pid)
            elif begun and _processor_seconds(child.pid) - used > self._busy_seconds:
                return self._abort(child, "hang-busy")
            elif now - since > IDLE_SECONDS:
                return self._abort(child, "hang-idle")
            time.sleep(_LOOK_EVERY)
        return f"crash{child.returncode}"

    def _abort(self, child: subprocess.Popen[bytes], why: str) -> str:
        child.send_signal(signal.SIGABRT)  # faulthandler writes where it is
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
        return why

    def _record(self, kind: str, data: bytes, told: str) -> None:
        with (self._folder / "crashed").open("a") as file:
            print(name_of(data), file=file)
        path = self._folder / "findings" / f"{kind}-{name_of(data)}"
        path.write_bytes(data)
        path.with_name(f"{path.name}.txt").write_text(f"{kind}\n{told[-6000:]}\n", "utf-8")


def _processor_seconds(process: int) -> float:
    try:
        fields = Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS
