from contextlib import AbstractContextManager
from typing import final

from gpumem._buffer.resource import MemoryResource
from gpumem.planning.iteration.recorded import IterationPlan, IterationReport

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
    def iteration(self) -> AbstractContextManager[PlannedResource]: ...
    @property
    def report(self) -> IterationReport: ...
    @property
    def ptr(self) -> int: ...
    def check_invariants(self) -> None: ...
