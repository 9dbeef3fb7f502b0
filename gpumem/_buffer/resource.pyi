from collections.abc import Mapping
from typing import Literal, Self, SupportsIndex

from typing_extensions import disjoint_base

from gpumem._arena.arena import Arena
from gpumem._budget import Budget, _Count
from gpumem._buffer.buffer import Buffer
from gpumem._buffer.stream import Stream, _StreamLike
from gpumem._resource.pool import DriverPool
from gpumem._snapshots.snapshot import Snapshot
from gpumem.config import ArenaConfig
from gpumem.device import Device, MemoryInfo
from gpumem.stats import ShrinkReport, Stats

@disjoint_base
class MemoryResource:
    memory: MemoryInfo
    name: str
    @property
    def budget(self) -> Budget | None: ...
    def __init__(
        self,
        memory: MemoryInfo | Device | str,
        *,
        name: str | None = None,
        budget: Budget | None = None,
        count: _Count = "reserved",
    ) -> None: ...
    @classmethod
    def from_config(
        cls,
        memory: MemoryInfo | Device | str,
        config: ArenaConfig | Mapping[str, object] | None = None,
        *,
        budget: Budget | None = None,
        count: _Count = "reserved",
        default_stream: _StreamLike = None,
        name: str | None = None,
    ) -> Arena | DriverPool: ...
    def allocate_raw(self, nbytes: int, stream: Stream) -> int: ...
    def deallocate_raw(self, ptr: int, nbytes: int, stream: Stream) -> None: ...
    def allocate(
        self,
        nbytes: SupportsIndex | str,
        stream: _StreamLike = None,
        *,
        alignment: int | None = None,
        shareable: bool = False,
        transport: Literal["ipc"] | None = None,
    ) -> Buffer: ...
    def allocate_persistent(self, nbytes: SupportsIndex | str) -> Buffer: ...
    def shrink(self) -> ShrinkReport: ...
    def snapshot(self) -> Snapshot: ...
    def reset_stream(self, stream: _StreamLike) -> None: ...
    def stats(self) -> Stats: ...
    @property
    def is_arena(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def _close_if_idle(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...
