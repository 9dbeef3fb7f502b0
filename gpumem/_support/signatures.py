"""Signatures of compiled classes, for `inspect.signature`, help and documentation tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inspect import Signature


class ClassSignature:
    """The ``__signature__`` of a compiled class and of its subclasses: that of ``__init__``.

    Python finds the signature of a compiled method, but not that of a compiled class. As a
    descriptor it reads the subclass's own ``__init__``, compiled or not. The fields of `settings`,
    a class of settings, stand in place of ``**settings``, so that editors complete them.
    """

    def __init__(self, settings: type | None = None) -> None:
        self.settings = settings

    def __get__(self, instance: object, owner: type) -> Signature:
        import inspect

        if instance is not None:
            raise AttributeError("__signature__ belongs to the class, not to its objects")
        made = inspect.signature(vars(owner).get("__init__") or owner.__init__)  # type: ignore[misc]
        parameters = [*made.parameters.values()][1:]
        if self.settings is not None:
            parameters[-1:] = [
                each.replace(kind=each.KEYWORD_ONLY, annotation=each.empty)
                for each in inspect.signature(self.settings).parameters.values()
            ]
        return made.replace(parameters=parameters)
