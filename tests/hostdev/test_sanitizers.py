"""The C stress program under the address, undefined-behaviour and thread sanitizers."""

import os
import subprocess
from pathlib import Path

import pytest

import build

PROGRAM = Path(__file__).with_name("stress_hostdev.c")
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


@pytest.mark.parametrize("sanitizer", ["plain", "address", "thread"])
def test_a_seeded_program_of_many_threads_is_clean(sanitizer, tmp_path, library):
    """Once as it is, once while the device looks for misuse and must not find any."""
    program = build.compile_program(tmp_path, PROGRAM, sanitizer)
    rounds = "80" if sanitizer == "thread" else "200"  # as many as fit in some ten seconds
    for seed, mode in (("1", ""), ("2", "misuse")):
        done = subprocess.run(
            [str(program), seed, rounds, mode],
            env={**os.environ, **OPTIONS},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"seed {seed}\n{done.stdout}\n{done.stderr[-6000:]}"
