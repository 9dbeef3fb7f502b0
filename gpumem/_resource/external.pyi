from collections.abc import Callable
from typing import Any, SupportsIndex, final

from gpumem._budget import Budget, _Count
from gpumem._buffer.resource import MemoryResource
from gpumem._buffer.stream import _StreamLike
from gpumem.device import Device, MemoryInfo

@final
class ExternalAllocator(MemoryResource):
    callbacks: tuple[Any, Any, Any]
    def __init__(
        self,
        alloc: Callable[[int], SupportsIndex | None] | int,
        free: Callable[[int], object] | int,
        empty_cache: Callable[[], object] | int | None = None,
        *,
        memory: MemoryInfo | Device | str,
        budget: Budget | None = None,
        count: _Count = "reserved",
        default_stream: _StreamLike = None,
        name: str | None = None,
    ) -> None: ...
