"""The C stress program; tests/sanitizers/run.py runs it under the sanitizers too."""

from pathlib import Path

import pytest
from helpers.child import program

import build

PROGRAM = Path(__file__).with_name("stress_hostdev.c")


@pytest.mark.parametrize(("seed", "mode"), [("1", ""), ("2", "misuse")])
def test_seeded_program_of_many_threads_finds_no_error(seed, mode, tmp_path, library):
    """Also while the device looks for misuse, of which it must find none."""
    program(build.compile_program(tmp_path, PROGRAM, "plain"), seed, "200", mode)
