"""examples/two_processes.py runs as it stands."""

from __future__ import annotations

from pathlib import Path

from helpers.child import python

import gpumem

ROOT = Path(__file__).resolve().parents[2]


def test_example_two_processes_share_one_tensor():
    here = {"PYTHONPATH": str(Path(gpumem.__file__).parents[1])}
    done = python("-W", "error", ROOT / "examples" / "two_processes.py", env=here)
    assert done.stderr == ""
    assert "every element is 2046, expected 2046" in done.stdout
