"""The largest value of a number with which a program fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpumem._support.arguments import require
from gpumem.errors import ConfigError
from gpumem.prediction.functions import file_of, pickled
from gpumem.prediction.runs import (
    ALLOCATORS,
    PredictedRun,
    Prediction,
    environment_of,
    run_task,
    script_of,
    task_of,
)


@dataclass(frozen=True)
class Search:
    """The runs of a program with values of a number, to find the largest that fits.

    A search halves: it takes for granted that a value fits if a larger one does.

    Attributes
    ----------
    name : str
        The number.
    values : range
        The values of which some were tried.
    tried : list of PredictedRun
        All runs, in the order of allocators and values. No run is without a limit.
    prediction : Prediction
        Of each allocator the run with the largest value that fits; the first value, if none does;
        or the run that ended the search, since it could not be predicted.
    """

    name: str
    values: range
    tried: list[PredictedRun]
    prediction: Prediction

    def largest(self, allocator: str) -> int | None:
        """Return the largest value that fits; None: no value does, or that is not known."""
        return self.prediction.runs[allocator].value if self.prediction.fits(allocator) else None

    def refused(self, allocator: str) -> PredictedRun | None:
        """Return the run with the smallest value that does not fit; None: the last one fits."""
        runs = (run for run in self.tried if (run.allocator, run.end) == (allocator, "memory"))
        return next(runs, None)

    def has_effect(self) -> bool:
        """Return whether the memory of some runs differs; else the program ignores the number."""
        peaks = {(run.allocator, run.live) for run in self.tried}
        return len(peaks) > len(self.prediction.runs) or len(self.values) == 1


def largest(
    program: Sequence[str] | Callable[..., object],
    name: str,
    values: range,
    *,
    gpu: str = "h100",
    memory: int | None = None,
    steps: int | None = None,
    until: str = "",
    allocators: Sequence[str] = ALLOCATORS,
    seconds: float = 600,
    ranks: int = 1,
) -> Search:
    """Search the largest value of a number with which a program fits in a GPU's memory.

    Each run has a value, and the GPU's memory as its limit. It receives the value as
    ``gpumem.vary(name, default)``, in the environment variable `name`, as ``{name}`` in the
    arguments of a script, and as the keyword `name` of a function.

    Parameters
    ----------
    program : sequence of str, or callable
        A script with its arguments, or a function; see `predict_script` and `predict`, which
        describe the other parameters, too.
    name : str
        The number, such as "batch".
    values : range
        The values, such as ``range(8, 257, 8)``.
    seconds : float
        Time after which the search is ended.

    Raises
    ------
    ConfigError
        An argument is invalid.
    MissingFrameworkError
        PyTorch is not installed, or a function is given and cloudpickle is not.
    IntegrationError
        This is not Linux, or PyTorch was built without CUDA or is too old.

    Examples
    --------
    >>> from gpumem.prediction import largest
    >>> largest(["train.py"], "batch", range(1, 257)).largest("default")     # doctest: +SKIP
    93
    """
    require("name", name, str, "a str")
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ConfigError(f"invalid name = {name!r}: expected letters, digits and underscores")
    require("values", values, range, "a range")
    if not values or values.step < 0:
        raise ConfigError(f"invalid values = {values}: expected a range that rises")
    sent: tuple[tuple[str, ...], bytes]
    if callable(program):
        sent = (file_of(program),), pickled(program, (), {})
    else:
        sent = script_of(program), b""
    task = task_of(sent, gpu, memory, steps, until, allocators, seconds, ranks)
    task = task._replace(name=name, values=values)
    environment = environment_of(task)

    def search(ahead: bool) -> Search:
        tried = run_task(task, ahead)
        runs = {
            each: _deciding([run for run in tried if run.allocator == each])
            for each in task.allocators
        }
        return Search(name, values, tried, Prediction(*environment, runs, None))

    found = search(ahead=True)
    # Modules that are imported ahead of the runs may read the number.
    return found if found.has_effect() else search(ahead=False)


def _deciding(runs: list[PredictedRun]) -> PredictedRun:
    """Return the run that answers the search of an allocator."""
    ended = [run for run in runs if not run.is_complete]
    fitting = [run for run in runs if run.end != "memory"]
    return [*runs[:1], *fitting, *ended][-1]
