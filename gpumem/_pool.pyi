from collections.abc import Mapping
from typing import Self, SupportsIndex, final

from gpumem._buffer import Buffer, MemoryResource
from gpumem._stream import _StreamLike
from gpumem.config import PoolConfig
from gpumem.device import Device, MemoryInfo
from gpumem.stats import ShrinkReport, Stats

@final
class DriverPool(MemoryResource):
    config: PoolConfig
    def __new__(
        cls,
        device: MemoryInfo | Device | str,
        config: PoolConfig | Mapping[str, object] | None = None,
        *,
        handle: int | None = None,
        name: str | None = None,
    ) -> Self: ...
    def __init__(
        self,
        device: MemoryInfo | Device | str,
        config: PoolConfig | Mapping[str, object] | None = None,
        *,
        handle: int | None = None,
        name: str | None = None,
    ) -> None: ...
    @property
    def handle(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def allocate(  # type: ignore[override]
        self, nbytes: SupportsIndex, stream: _StreamLike = None
    ) -> Buffer: ...
    def shrink(self) -> ShrinkReport: ...
    def stats(self) -> Stats: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        *exception: object,
    ) -> None: ...
