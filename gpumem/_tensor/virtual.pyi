from collections.abc import Callable, Sequence
from typing import Any, Self, SupportsIndex, TypeAlias, final

import numpy as np
import numpy.typing as npt

from gpumem._arena.arena import Arena
from gpumem._buffer.buffer import _Exporter
from gpumem._buffer.stream import _StreamLike
from gpumem._tensor.tensor import Tensor
from gpumem.device import Device, MemoryInfo

_OnPressure: TypeAlias = Callable[[VirtualTensor, int], object] | None

@final
class VirtualTensor(_Exporter):
    arena: Arena
    full: Tensor
    shape: tuple[int, ...]
    row_nbytes: int
    page_nbytes: int
    ahead: int
    name: str
    on_pressure: _OnPressure
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def ptr(self) -> int: ...
    @property
    def memory(self) -> MemoryInfo: ...
    @property
    def device(self) -> Device: ...
    @property
    def rows(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def committed(self) -> int: ...
    @property
    def held_nbytes(self) -> int: ...
    @property
    def used_nbytes(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def commit(self, first: SupportsIndex, last: SupportsIndex | None = None) -> None: ...
    def release(self, first: SupportsIndex, last: SupportsIndex) -> None: ...
    def resize(self, rows: SupportsIndex) -> None: ...
    def tensor(self, first: SupportsIndex = 0, last: SupportsIndex | None = None) -> Tensor: ...
    def numpy(self) -> npt.NDArray[Any]: ...
    def record_stream(
        self, stream: _StreamLike, first: SupportsIndex = 0, last: SupportsIndex | None = None
    ) -> None: ...
    def close(self) -> None: ...
    def __len__(self) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...

def make_virtual(
    arena: Arena,
    shape: SupportsIndex | Sequence[SupportsIndex],
    dtype: npt.DTypeLike,
    *,
    committed: SupportsIndex,
    step: SupportsIndex | None,
    ahead: SupportsIndex,
    stream: _StreamLike,
    on_pressure: _OnPressure,
    name: str | None,
) -> VirtualTensor: ...
