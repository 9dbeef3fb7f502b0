"""Signatures of compiled classes, for `inspect.signature`, help and documentation tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inspect import Signature


class ClassSignature:
    """The ``__signature__`` of a compiled class and of its subclasses: that of ``__init__``.

    Python finds the signature of a compiled method, but not that of a compiled class. As a
    descriptor it reads the subclass's own ``__init__``, compiled or not.
    """

    def __get__(self, instance: object, owner: type) -> Signature:
        import inspect

        if instance is not None:
            raise AttributeError("__signature__ belongs to the class, not to its objects")
        made = inspect.signature(vars(owner).get("__init__") or owner.__init__)  # type: ignore[misc]
        return made.replace(parameters=list(made.parameters.values())[1:])
