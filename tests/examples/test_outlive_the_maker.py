"""examples/outlive_the_maker.py runs as it stands."""

from __future__ import annotations

from pathlib import Path

from helpers.child import python

import gpumem

ROOT = Path(__file__).resolve().parents[2]


def test_example_uses_tensors_of_a_process_that_was_killed():
    here = {"PYTHONPATH": str(Path(gpumem.__file__).parents[1])}
    done = python("-W", "error", ROOT / "examples" / "outlive_the_maker.py", env=here)
    assert done.stderr == ""
    assert "ended with -9; 4 tensors: [1.0, 2.0, 3.0, 4.0]" in done.stdout
