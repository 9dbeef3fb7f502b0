"""Sessions: work on one device with bound inputs and outputs, and shared allocators."""

from gpumem.device import CopyDecision
from gpumem.session.bindings import RunContext
from gpumem.session.environment import Environment
from gpumem.session.options import SessionOptions, SessionSettings
from gpumem.session.session import Session

__all__ = [
    "CopyDecision",
    "Environment",
    "RunContext",
    "Session",
    "SessionOptions",
    "SessionSettings",
]
__dir__ = __all__.copy
