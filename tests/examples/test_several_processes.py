"""Examples that start processes of their own run as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.child import python

import gpumem

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("example", "said"),
    [
        ("two_processes.py", "every element is 2046, expected 2046"),
        ("outlive_the_maker.py", "ended with -9; 4 tensors: [1.0, 2.0, 3.0, 4.0]"),
    ],
)
def test_example_uses_tensors_of_another_process(example, said):
    here = {"PYTHONPATH": str(Path(gpumem.__file__).parents[1])}
    done = python("-W", "error", ROOT / "examples" / example, env=here)
    assert done.stderr == ""
    assert said in done.stdout
