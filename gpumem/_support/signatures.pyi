from collections.abc import Callable
from inspect import Signature
from typing import Any, Self, final

def published(module: dict[str, Any]) -> Callable[[], list[str]]: ...

@final
class ClassSignature:
    def __new__(cls, settings: type | None = None) -> Self: ...
    def __get__(self, instance: object, owner: type | None = None, /) -> Signature: ...
