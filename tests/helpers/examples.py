"""Modules of examples/, which tests import under their own names."""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "examples"


def add_example(name: str) -> None:
    """Let the modules of a folder of examples/ be imported."""
    path = str(FOLDER / name)
    if path not in sys.path:
        sys.path.append(path)
