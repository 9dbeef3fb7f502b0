"""Two processes that play ping-pong in C over a timeline: for tests and measurements."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import gpumem
from gpumem.interop import HostTimeline

SOURCE = Path(__file__).with_name("pingpong.c")


def compile_players(folder: Path, *options: str) -> Path:
    """Build the program against the headers of the gpumem that is imported."""
    program = folder / "pingpong"
    [header] = Path(gpumem.__file__).parent.rglob("timeline_page.h")
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror"]
    flags += [f"-I{header.parent}"]
    subprocess.run(["gcc", *flags, *options, str(SOURCE), "-o", str(program)], check=True)
    return program


def play(program: Path, mode: str, rounds: int, timeout: float = 300) -> tuple[int, int]:
    """Let both sides play; return the median and the mean time of a round in ns."""
    notes = os.memfd_create("notes")
    os.truncate(notes, 4096)
    try:
        with HostTimeline.create() as timeline, timeline.export() as handle:
            fds = (handle.fileno(), notes)
            sides = [
                subprocess.Popen(
                    [str(program), mode, str(side), str(rounds), *map(str, fds)],
                    pass_fds=fds, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
                for side in (0, 1)
            ]  # fmt: skip
            try:
                said = [side.communicate(timeout=timeout) for side in sides]
            finally:
                for side in sides:
                    side.kill()
            assert [side.returncode for side in sides] == [0, 0], said
            if mode != "futex":
                assert timeline.value() == timeline.pending == 2 * rounds
            median, mean = said[0][0].split()
            return int(median), int(mean)
    finally:
        os.close(notes)
