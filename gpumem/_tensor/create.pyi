from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy.typing as npt

from gpumem._buffer.buffer import Buffer
from gpumem._buffer.resource import MemoryResource
from gpumem._buffer.stream import _StreamLike
from gpumem._tensor.tensor import Tensor
from gpumem.device import Device, MemoryInfo

def empty(
    shape: SupportsIndex | Sequence[SupportsIndex],
    dtype: npt.DTypeLike,
    *,
    memory: MemoryInfo | Device | str | None = None,
    resource: MemoryResource | None = None,
    environment: Any = None,
    stream: _StreamLike = None,
    shareable: bool = False,
) -> Tensor: ...
def zeros(
    shape: SupportsIndex | Sequence[SupportsIndex],
    dtype: npt.DTypeLike,
    *,
    memory: MemoryInfo | Device | str | None = None,
    resource: MemoryResource | None = None,
    environment: Any = None,
    stream: _StreamLike = None,
    shareable: bool = False,
) -> Tensor: ...
def full(
    shape: SupportsIndex | Sequence[SupportsIndex],
    fill_value: Any,
    dtype: npt.DTypeLike | None = None,
    *,
    memory: MemoryInfo | Device | str | None = None,
    resource: MemoryResource | None = None,
    environment: Any = None,
    stream: _StreamLike = None,
    shareable: bool = False,
) -> Tensor: ...
def tensor_of(
    buffer: Buffer, shape: SupportsIndex | Sequence[SupportsIndex], dtype: Any, offset: int
) -> Tensor: ...
def is_like(tensor: Tensor, shape: SupportsIndex | Sequence[SupportsIndex], dtype: Any) -> bool: ...
def _seen(array: object, name: str) -> Tensor: ...
def copy(dst: object, src: object, stream: object = None) -> None: ...
