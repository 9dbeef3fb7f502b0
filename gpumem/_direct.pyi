from typing import Self, SupportsIndex

from typing_extensions import disjoint_base

from gpumem._buffer import Buffer, MemoryResource
from gpumem._stream import _StreamLike

@disjoint_base
class DirectResource(MemoryResource):
    @property
    def closed(self) -> bool: ...
    def allocate(
        self,
        nbytes: SupportsIndex,
        stream: _StreamLike = None,
        *,
        alignment: int | None = None,
        shareable: bool = False,
    ) -> Buffer: ...
    def allocate_persistent(self, nbytes: SupportsIndex) -> Buffer: ...
    def reserve(self, nbytes: SupportsIndex) -> Buffer: ...
    def reset_stream(self, stream: _StreamLike) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        *exception: object,
    ) -> None: ...

def reap() -> None: ...
