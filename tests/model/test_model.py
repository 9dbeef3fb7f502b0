"""Some programs behave as the model says."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_model(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "tests.model", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_programs_behave_as_the_model_says():
    done = run_model("--first", "--minutes", "0", "--seed", "1", "--steps", "40")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("no difference\n")
