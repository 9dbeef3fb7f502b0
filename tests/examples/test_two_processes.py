"""examples/two_processes.py runs as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gpumem

ROOT = Path(__file__).resolve().parents[2]


def test_example_two_processes_share_one_tensor():
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / "two_processes.py"],
        capture_output=True, text=True, timeout=180, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(gpumem.__file__).parents[1])},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "every element is 2046, expected 2046" in done.stdout
