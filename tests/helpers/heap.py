"""What tests of the debug heap ask: which line, which reports."""

import inspect
import time
from pathlib import Path

import pytest

import gpumem
from gpumem import observe


def line_of(mark):
    """Return "file:line" of the line that holds a comment, in the calling test's file."""
    path = inspect.stack()[1].filename
    lines = Path(path).read_text().splitlines()
    found = [number for number, line in enumerate(lines, 1) if f"# {mark}" in line]
    assert len(found) == 1, mark
    return f"{path}:{found[0]}"


def let_rest(arena, count=1):
    """Look, without a wait, until so many freed blocks rest; nothing may be found meanwhile."""
    deadline = time.monotonic() + 30
    while number_at_rest(arena) < count:
        assert arena.check_heap(wait=False) == ()
        assert time.monotonic() < deadline, "its streams are not done"


def number_at_rest(arena):
    (found,) = observe.snapshot(arena).resources
    return sum(block.state == "cached" for block in found.blocks)


def found_by(call, kind=gpumem.errors.HeapCorruptionError):
    """Return the reports of what a call raises."""
    with pytest.raises(kind) as caught:
        call()
    return caught.value.reports
