from dataclasses import dataclass
from typing import SupportsIndex, final

from gpumem._buffer.buffer import Buffer, MemoryResource
from gpumem._buffer.stream import _StreamLike
from gpumem.planning.iteration.recorded import IterationPlan
from gpumem.stats import ShrinkReport, Stats

@dataclass(frozen=True)
class IterationReport:
    planned: int
    displaced: int
    online: int
    mismatch: str | None

@final
class PlannedResource(MemoryResource):
    plan: IterationPlan
    upstream: MemoryResource
    def __init__(
        self,
        plan: IterationPlan,
        upstream: MemoryResource,
        *,
        stream_reuse: str | None = None,
        name: str | None = None,
    ) -> None: ...
    def allocate(
        self,
        nbytes: SupportsIndex,
        stream: _StreamLike = None,
        *,
        alignment: int | None = None,
        shareable: bool = False,
    ) -> Buffer: ...
    def allocate_persistent(self, nbytes: SupportsIndex) -> Buffer: ...
    def iteration(self) -> Iteration: ...
    @property
    def report(self) -> IterationReport: ...
    @property
    def ptr(self) -> int: ...
    def shrink(self) -> ShrinkReport: ...
    def reset_stream(self, stream: _StreamLike) -> None: ...
    def stats(self) -> Stats: ...
    def check_invariants(self) -> None: ...
    @property
    def is_arena(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...

class Iteration:
    def __init__(self, resource: PlannedResource) -> None: ...
    def __enter__(self) -> PlannedResource: ...
    def __exit__(self, *exception: object) -> None: ...
