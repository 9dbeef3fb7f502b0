from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, Unpack, final

from gpumem._budget import Budget, _Count
from gpumem._buffer.buffer import Buffer
from gpumem._buffer.resource import MemoryResource
from gpumem._buffer.stream import _StreamLike
from gpumem._resource.handle import Handle
from gpumem.config import PoolConfig, PoolSettings
from gpumem.device import Device, MemoryInfo
from gpumem.stats import PoolStats

_Memory: TypeAlias = MemoryInfo | Device | str

class _HasFileno(Protocol):
    def fileno(self) -> int: ...

@final
class DriverPool(MemoryResource):
    config: PoolConfig
    def __init__(
        self,
        device: _Memory,
        config: PoolConfig | Mapping[str, object] | None = None,
        *,
        handle: int | None = None,
        budget: Budget | None = None,
        count: _Count = "reserved",
        default_stream: _StreamLike = None,
        name: str | None = None,
        **settings: Unpack[PoolSettings],
    ) -> None: ...
    @classmethod
    def default(
        cls, device: _Memory, *, default_stream: _StreamLike = None, name: str | None = None
    ) -> DriverPool: ...
    @classmethod
    def current(
        cls, device: _Memory, *, default_stream: _StreamLike = None, name: str | None = None
    ) -> DriverPool: ...
    @classmethod
    def import_handle(
        cls,
        device: _Memory,
        fd: int | _HasFileno,
        *,
        default_stream: _StreamLike = None,
        name: str | None = None,
    ) -> DriverPool: ...
    @property
    def handle(self) -> int: ...
    @property
    def imported(self) -> bool: ...
    @property
    def peers(self) -> tuple[Device, ...]: ...
    def enable_peer(self, device: Device | str) -> None: ...
    def stats(self) -> PoolStats: ...
    def export_handle(self) -> Handle: ...
    def export_buffer(self, buffer: Buffer) -> bytes: ...
    def import_buffer(self, data: Any, stream: _StreamLike = None) -> Buffer: ...

def pool_of(buffer: Buffer) -> DriverPool | None: ...
