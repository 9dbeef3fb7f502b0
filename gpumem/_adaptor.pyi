from typing import Any

from typing_extensions import disjoint_base

from gpumem._budget import Budget
from gpumem._buffer import Buffer, MemoryResource
from gpumem._stream import _StreamLike

@disjoint_base
class Adaptor(MemoryResource):
    upstreams: tuple[MemoryResource, ...]
    def __init__(
        self,
        upstreams: tuple[MemoryResource, ...],
        *,
        name: str | None = None,
        limit: int | None = None,
        tells: bool = False,
        budget: Budget | None = None,
    ) -> None: ...
    @property
    def upstream(self) -> MemoryResource: ...
    def allocate(
        self,
        nbytes: Any,
        stream: _StreamLike = None,
        *,
        alignment: int | None = None,
        **options: Any,
    ) -> Buffer: ...
    def _serve(
        self, nbytes: int, stream: Any, options: dict[str, Any], persistent: bool
    ) -> Buffer: ...
    def _note(self, buffer: Buffer, persistent: bool) -> Any: ...
    def _note_of(self, buffer: Buffer) -> Any: ...
    def _taken_back(
        self, address: int, nbytes: int, stream: int, time: int, thread: int
    ) -> None: ...
    def _counts(self) -> tuple[int, int, int, int, int, int]: ...
    def _reset_peaks(self) -> None: ...
    def _live(self) -> list[tuple[int, int, Any]]: ...
    def __getattr__(self, name: str, /) -> Any: ...

def serve_from(
    upstream: MemoryResource, nbytes: int, stream: Any, options: dict[str, Any], persistent: bool
) -> Buffer: ...
def handle_or_zero(resource: MemoryResource, stream: Any) -> int: ...
def report(error: BaseException, where: object) -> None: ...
