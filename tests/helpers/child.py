"""Run a script in a Python process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTS = str(Path(__file__).resolve().parents[1])
PYTHON_CHECKS = ("-X", "faulthandler", "-W", "error")


def path_with(*folders: object) -> str:
    """Return a PYTHONPATH that has these folders before those of this process."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))


def program(
    *command: object,
    env: Mapping[str, str | None] | None = None,
    status: int | None = 0,
    timeout: int = 600,
    **more: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; returns what it printed and its exit status.

    `env` is added to the environment of this process; None removes a variable. The program must
    end with `status`, unless that is None, within `timeout` seconds.
    """
    variables = os.environ | (env or {})
    done = subprocess.run(
        list(map(str, command)),
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **more,
    )
    ended = f"exit {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    assert status is None or done.returncode == status, ended
    return done


def python(*arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, as `program` does."""
    return program(sys.executable, *arguments, **more)


def run(script: str, *arguments: str, env: dict[str, str] | None = None):
    """Run a script to its end, with whatever exit status.

    It imports the helpers as tests do, and everything else as this process does.
    """
    script = textwrap.dedent(script)
    env = {"PYTHONPATH": path_with(TESTS), **(env or {})}
    return python(*PYTHON_CHECKS, "-c", script, *arguments, env=env, status=None, timeout=180)


def run_quietly(script: str, *arguments: str, env: dict[str, str] | None = None) -> None:
    """Run a script that must end with code 0 and print nothing at all."""
    done = run(script, *arguments, env=env)
    ended = (done.returncode, done.stdout, done.stderr)
    assert ended == (0, "", ""), f"exit {done.returncode}\n{done.stdout}{done.stderr}"
