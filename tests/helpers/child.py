"""Run a script in a Python process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

TESTS = str(Path(__file__).resolve().parents[1])
PYTHON_CHECKS = ("-X", "faulthandler", "-W", "error")


def run(script: str, *arguments: str, env: dict[str, str] | None = None):
    """Run a script to its end; returns what it printed and its exit code.

    It imports the helpers as tests do, and everything else as this process does.
    """
    path = os.pathsep.join(filter(None, [TESTS, os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *PYTHON_CHECKS, "-c", textwrap.dedent(script), *arguments],
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def run_quietly(script: str, *arguments: str, env: dict[str, str] | None = None) -> None:
    """Run a script that must end with code 0 and print nothing at all."""
    done = run(script, *arguments, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
