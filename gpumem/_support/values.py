"""`dataclasses`, imported when the first object of a class is made.

The module and the methods that it compiles for each class would take a third of the time of
``import gpumem``, and a program uses few of the classes. Until its first object a class derived
from `LazyDataclass` has its fields as annotations and its defaults as attributes; from then on it
is the dataclass that `dataclasses.dataclass` makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpumem._support.forks import ForkLock

__all__ = ["LazyDataclass", "dataclass", "field", "replace"]

_lock = ForkLock()  # held while a class is completed


class LazyDataclass:
    """Base of such classes; its methods serve until the class is completed.

    No such class derives from another: a completed base would make the objects of both.
    """

    if not TYPE_CHECKING:

        def __init__(self, *args: object, **kwargs: object) -> None:
            _complete(type(self)).__init__(self, *args, **kwargs)

        def __setstate__(self, state: dict[str, object]) -> None:
            _complete(type(self))  # an unpickled object is made without __init__
            vars(self).update(state)


class _Field:
    """The arguments of a later call of `dataclasses.field`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


class _Fields:
    """Stands for ``__dataclass_fields__``, by which `dataclasses` knows its classes."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def __get__(self, instance: object, owner: type) -> Any:
        return _complete(owner).__dataclass_fields__


def _complete(cls: type) -> Any:
    """Make the dataclass, unless that is done, of the class or its nearest base that is one."""
    import dataclasses

    found: Any = next(base for base in cls.__mro__ if "__dataclass_fields__" in vars(base))
    with _lock:
        stand_in = vars(found)["__dataclass_fields__"]
        if isinstance(stand_in, _Fields):
            for name, described in list(vars(found).items()):
                if isinstance(described, _Field):
                    setattr(found, name, dataclasses.field(**described.arguments))
            dataclasses.dataclass(**stand_in.options)(found)
    return found


def dataclass(**options: Any) -> Callable[[type], type]:
    """Do what `dataclasses.dataclass` does, at the first object or look at the fields."""

    def prepare(cls: Any) -> type:
        assert not hasattr(cls, "__dataclass_fields__"), f"{cls} derives from another one"
        cls.__dataclass_fields__ = _Fields(options)
        return cls  # type: ignore[no-any-return]

    return prepare


def field(**arguments: Any) -> Any:
    """Describe a field as `dataclasses.field` does."""
    return _Field(arguments)


def replace(instance: Any, **changes: Any) -> Any:
    """Return a copy with other values in some fields; see `dataclasses.replace`."""
    import dataclasses

    return dataclasses.replace(instance, **changes)
