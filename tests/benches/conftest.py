"""Benches are run from the tree; behind everything else, so that gpumem is the installed one."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
