"""What programs do, step by step, for failures that a second run of the program does not show."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import stateful

_told: list[str] = []  # of the program that runs
failed: list[str] = []  # of the shortest one that failed
# How it failed. Hypothesis does not say so where a second run of the program takes another course,
# as it may with threads: it raises FlakyStrategyDefinition then.
failure = ""
programs = 0  # that have begun


def note(text: str) -> None:
    """Add a line below the step that is being done."""
    _told.append(text)
    hypothesis.note(text)


def rule(**arguments: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return hypothesis' decorator for a method that also notes its calls."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def step(machine: Any, *given: Any, **drawn: Any) -> None:
            _told.append(f"{function.__name__}{given or drawn}")
            function(machine, *given, **drawn)

        return stateful.rule(**arguments)(step)

    return decorate


def begin() -> None:
    """Begin the pages of a new program."""
    global programs
    programs += 1
    _told.clear()


def keep(error: BaseException) -> None:
    """Keep what a program has done that failed, and how."""
    global failure
    if not failed:
        print(f"program {programs} failed", flush=True)
    if not failed or len(_told) < len(failed):
        failed[:] = _told
        failure = "".join(traceback.format_exception(error))
