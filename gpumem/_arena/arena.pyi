import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, SupportsIndex, TypeAlias, Unpack, final

import numpy.typing as npt

from gpumem._arena.graph_pool import Capture, GraphPool
from gpumem._budget import Budget, _Count
from gpumem._buffer.buffer import Buffer
from gpumem._buffer.resource import MemoryResource
from gpumem._buffer.stream import _StreamLike
from gpumem._resource.handle import Handle
from gpumem._tensor.copy_out import CopyOut
from gpumem._tensor.virtual import VirtualTensor
from gpumem.config import ArenaConfig, ArenaSettings
from gpumem.debugging import DebugHeapOptions, HeapReport, OutstandingBlock
from gpumem.device import Device, MemoryInfo
from gpumem.report import Report
from gpumem.stats import BlockInfo

class _SourceObject(Protocol):
    def allocate(self, nbytes: int, /) -> int | None: ...
    def free(self, address: int, nbytes: int, /) -> object: ...

_Asleep: TypeAlias = Literal["keep", "drop", "stay"]
_Source: TypeAlias = _SourceObject | MemoryResource | tuple[int, int] | None

@final
class Arena(MemoryResource):
    config: ArenaConfig
    def __init__(
        self,
        memory: MemoryInfo | Device | str,
        config: ArenaConfig | Mapping[str, object] | None = None,
        *,
        source: _Source = None,
        budget: Budget | None = None,
        count: _Count = "reserved",
        default_stream: _StreamLike = None,
        debug_heap: bool | DebugHeapOptions | Mapping[str, object] | None = None,
        name: str | None = None,
        **settings: Unpack[ArenaSettings],
    ) -> None: ...
    def virtual(
        self,
        shape: SupportsIndex | Sequence[SupportsIndex],
        dtype: npt.DTypeLike,
        *,
        committed: SupportsIndex = 0,
        step: SupportsIndex | None = None,
        ahead: SupportsIndex = 0,
        stream: _StreamLike = None,
        on_pressure: Callable[[VirtualTensor, int], object] | None = None,
        name: str | None = None,
    ) -> VirtualTensor: ...
    @classmethod
    def staging(cls, device: Device | str) -> Arena: ...
    def prepare(self, nbytes: SupportsIndex | str) -> None: ...
    def capture(self, stream: _StreamLike = None, *, pool: GraphPool | None = None) -> Capture: ...
    def set_limit(self, limit: SupportsIndex | str) -> None: ...
    @property
    def in_use(self) -> int: ...
    @property
    def limit(self) -> int | None: ...
    @limit.setter
    def limit(self, value: SupportsIndex | str | None) -> None: ...
    def reset_peaks(self) -> None: ...
    def tag(self, name: str, *, asleep: _Asleep = "keep") -> AbstractContextManager[None]: ...
    def sleep(
        self,
        tags: str | Iterable[str] | None = None,
        to: str | Device | os.PathLike[str] = "host",
        *,
        registered: Literal["refuse", "stay"] = "refuse",
    ) -> int: ...
    def wake(self, tags: str | Iterable[str] | None = None) -> None: ...
    def copy_out(
        self,
        tags: str | Iterable[str] | Mapping[Any, Any] | None = None,
        to: str | os.PathLike[str] | Mapping[str, npt.NDArray[Any]] = "host",
        *,
        limit: SupportsIndex | str = "256MiB",
    ) -> CopyOut: ...
    @property
    def asleep(self) -> tuple[str, ...]: ...
    @property
    def peers(self) -> tuple[Device, ...]: ...
    def enable_peer(self, device: Device | str) -> None: ...
    def blocks(self) -> list[BlockInfo]: ...
    def report(self, path: str | os.PathLike[str], *, title: str | None = None) -> Report: ...
    def check_invariants(self) -> None: ...
    def check_heap(self, *, wait: bool = True) -> tuple[HeapReport, ...]: ...
    def outstanding(self) -> list[OutstandingBlock]: ...
    @property
    def debug_heap(self) -> DebugHeapOptions | None: ...
    @property
    def backing(self) -> str: ...

def release_retired_arenas(may_wait: bool = ...) -> None: ...
def export_block(buffer: Buffer, read_only: bool) -> tuple[Handle, bool, int, int]: ...
