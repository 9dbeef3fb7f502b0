"""Keyword arguments of layers that `torch.utils.checkpoint` recomputes without reentry.

PyTorch saves a layer's positional tensors, and holds keyword arguments in a closure, which no hook
sees. Within a context they are passed by position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from threading import local
from types import ModuleType
from typing import Any

_GENERATOR = "_checkpoint_without_reentrant_generator"
_SETTINGS = 5  # arguments of it between the function and the layer's, up to PyTorch 2.13
_active = local()


@contextmanager
def saved_keywords(torch: ModuleType) -> Iterator[None]:
    """Let checkpoints of this thread save keyword arguments, too."""
    _install(torch, import_module("torch.utils.checkpoint"))
    before = getattr(_active, "depth", 0)
    _active.depth = before + 1
    try:
        yield
    finally:
        _active.depth = before


def _install(torch: ModuleType, checkpoints: Any) -> None:
    """Wrap the function that `checkpoint` calls before a layer, once."""
    name = next(
        (each for each in (_GENERATOR + "_impl", _GENERATOR) if each in vars(checkpoints)), ""
    )
    generator = getattr(checkpoints, name, None)
    if generator is None or hasattr(generator, "gpumem"):
        return

    def of_parts(function: Any, args: Any, kwargs: Any, **settings: Any) -> Any:
        if getattr(_active, "depth", 0):
            function, args, kwargs = _by_position(torch, function, args, kwargs)
        return generator(function, args, kwargs, **settings)

    def of_all(function: Any, *args: Any, **kwargs: Any) -> Any:
        settings, args = args[:_SETTINGS], args[_SETTINGS:]
        if getattr(_active, "depth", 0):
            function, args, kwargs = _by_position(torch, function, args, kwargs)
        return generator(function, *settings, *args, **kwargs)

    wrapper: Any = of_all if name == _GENERATOR else of_parts
    wrapper.gpumem = True
    setattr(checkpoints, name, wrapper)


def _by_position(
    torch: ModuleType,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return a call with its activations by keyword after its positional arguments."""
    # Only activations: others may be changed by the layer, or have attributes.
    names = [
        name
        for name, each in kwargs.items()
        if isinstance(each, torch.Tensor) and each.requires_grad and not each.is_leaf
    ]
    count = len(args)

    def call(*given: Any, **others: Any) -> Any:  # holds no tensor
        tensors = dict(zip(names, given[count:], strict=True))
        return function(*given[:count], **others | tensors)

    others = {name: None if name in names else each for name, each in kwargs.items()}
    return call, (*args, *map(kwargs.__getitem__, names)), others
