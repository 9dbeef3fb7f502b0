"""Predictions of functions: a child process receives the function and its arguments."""

from __future__ import annotations

import functools
import inspect
import io
import marshal
import os
import pickle
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpumem.errors import ConfigError, MissingFrameworkError
from gpumem.prediction.runs import ALLOCATORS, Prediction, predict_task, task_of


def predict(
    fn: Callable[..., object],
    *args: Any,
    gpu: str = "h100",
    memory: int | None = None,
    steps: int | None = None,
    until: str = "",
    allocators: Sequence[str] = ALLOCATORS,
    seconds: float = 600,
    ranks: int = 1,
    output: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Prediction:
    """Predict the memory that a function would need on a GPU; needs none, and no driver.

    A child process receives the function and its arguments, and calls it as
    `gpumem.prediction.predict_script` runs a script, which describes the other parameters. The
    function may be of a notebook. PyTorch may be imported here; it computes nothing in the child.

    Parameters
    ----------
    fn : callable
        It makes its tensors on the GPU itself; it and its arguments refer to none.
    *args, **kwargs
        Its arguments. Bind those that have a name of this function's own parameters with
        `functools.partial`.

    Raises
    ------
    ConfigError
        The function or an argument refers to a tensor on a GPU, cannot be sent to another process,
        or another argument is invalid.
    MissingFrameworkError
        PyTorch or cloudpickle is not installed.
    IntegrationError
        This is not Linux, or PyTorch was built without CUDA or is too old.

    Examples
    --------
    >>> import gpumem
    >>> def train(batch):
    ...     ...
    >>> print(gpumem.predict(train, 32, gpu="a100"))     # doctest: +SKIP
    """
    program = (file_of(fn),), pickled(fn, args, kwargs)
    task = task_of(program, gpu, memory, steps, until, allocators, seconds, ranks)
    return predict_task(task, output)


def pickled(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a function, its arguments and keywords."""
    if not callable(fn):
        raise ConfigError(f"invalid fn = {fn!r}: expected a function")
    try:
        import cloudpickle
    except ImportError as error:
        raise MissingFrameworkError(
            f"predicting a function needs the package cloudpickle (pip install cloudpickle): "
            f"{error}",
            name="cloudpickle",
        ) from error

    buffer = io.BytesIO()
    pickler = cloudpickle.Pickler(buffer)
    pickler.reducer_override = functools.partial(reduced, pickler.reducer_override)
    try:
        pickler.dump((fn, args, kwargs))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{fn!r} and its arguments cannot be sent to another process: {error}"
        ) from error
    return buffer.getvalue()


def reduced(otherwise: Callable[[Any], Any], obj: Any) -> Any:
    """Reduce an object: code keeps its file, for the lines that are named; CUDA tensors raise."""
    if isinstance(obj, types.CodeType):
        return marshal.loads, (marshal.dumps(obj),)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor) and obj.is_cuda:
        raise ConfigError(
            f"invalid tensor of shape {tuple(obj.shape)} on {obj.device}, to which the function or "
            "its arguments refer: expected tensors on the CPU; the function makes those on the GPU"
        )
    return otherwise(obj)


def file_of(fn: Any) -> str:
    """Return the file that a function was written in; of a notebook's cell, the name it has."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    code = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    return code.co_filename if code else ""
