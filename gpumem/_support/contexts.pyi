from contextlib import AbstractContextManager, ContextDecorator
from contextvars import ContextVar
from functools import partial
from typing import Any, final

class Opened:
    def __init__(self, value: object = None, label: int = 0) -> None: ...

@final
class Link: ...

@final
class ContextBlock(AbstractContextManager[Any], ContextDecorator):
    def __init__(
        self,
        variable: ContextVar[Link | None],
        opened: Opened,
        name: str,
        again: partial[AbstractContextManager[Any]],
    ) -> None: ...
    def __exit__(self, *exception: object) -> None: ...

tags: ContextVar[Link | None]

def opened_values(variable: ContextVar[Link | None]) -> list[Any]: ...
