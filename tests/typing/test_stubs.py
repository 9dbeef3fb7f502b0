"""The stubs say what the compiled modules have, and users' code passes a strict checker."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpumem

pytest.importorskip("mypy", reason="mypy is not installed")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def run_mypy(cache: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "MYPY_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_stubs_agree_with_the_runtime(tmp_path):
    run_mypy(
        tmp_path,
        "mypy.stubtest",
        "gpumem",
        "--ignore-unused-allowlist",
        "--ignore-missing-stub",  # modules and functions that only Cython uses have none
        f"--mypy-config-file={ROOT / 'pyproject.toml'}",
        f"--allowlist={HERE / 'stubtest_allowlist.txt'}",
    )


def test_typed_examples_pass_strict_mypy(tmp_path):
    examples = str(HERE / "examples.py")
    run_mypy(tmp_path, "mypy", "--strict", "--warn-unused-ignores", examples)


def test_every_name_of_the_package_is_known_to_the_checker(tmp_path):
    uses = tmp_path / "uses.py"
    names = [name for name in dir(gpumem) if not name.startswith("_")]
    assert {"planning", "traces", "Arena", "Session"} <= set(names)
    lines = ["import gpumem", *(f"print(gpumem.{name})" for name in names)]
    uses.write_text("\n".join([*lines, "print(gpumem.planning.plan_memory)", ""]))
    run_mypy(tmp_path / "cache", "mypy", "--strict", str(uses))
