import struct
from collections.abc import Mapping
from typing import Any, Protocol, final

from gpumem._budget import Budget, _Count
from gpumem._buffer.buffer import Buffer
from gpumem._buffer.resource import MemoryResource
from gpumem._buffer.stream import _StreamLike
from gpumem._resource.handle import Handle
from gpumem.config import PoolConfig
from gpumem.device import Device, MemoryInfo
from gpumem.stats import PoolStats, ShrinkReport

NOTE: struct.Struct
NOTE_MAGIC: bytes

class _HasFileno(Protocol):
    def fileno(self) -> int: ...

@final
class DriverPool(MemoryResource):
    config: PoolConfig
    def __init__(
        self,
        device: MemoryInfo | Device | str,
        config: PoolConfig | Mapping[str, object] | None = None,
        *,
        handle: int | None = None,
        budget: Budget | None = None,
        count: _Count = "reserved",
        default_stream: _StreamLike = None,
        name: str | None = None,
    ) -> None: ...
    @classmethod
    def default(
        cls,
        device: MemoryInfo | Device | str,
        *,
        default_stream: _StreamLike = None,
        name: str | None = None,
    ) -> DriverPool: ...
    @classmethod
    def current(
        cls,
        device: MemoryInfo | Device | str,
        *,
        default_stream: _StreamLike = None,
        name: str | None = None,
    ) -> DriverPool: ...
    @classmethod
    def import_handle(
        cls,
        device: MemoryInfo | Device | str,
        fd: int | _HasFileno,
        *,
        default_stream: _StreamLike = None,
        name: str | None = None,
    ) -> DriverPool: ...
    @property
    def handle(self) -> int: ...
    @property
    def imported(self) -> bool: ...
    def shrink(self) -> ShrinkReport: ...
    def stats(self) -> PoolStats: ...
    def export_handle(self) -> Handle: ...
    def export_buffer(self, buffer: Buffer) -> bytes: ...
    def import_buffer(self, data: Any, stream: _StreamLike = None) -> Buffer: ...

def require_pools(memory: MemoryInfo) -> MemoryInfo: ...
def pool_number(handle: Any) -> int: ...
def pool_of_device(device: MemoryInfo | Device | str, current: bool) -> int: ...
