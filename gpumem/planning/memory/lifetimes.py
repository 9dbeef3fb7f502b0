"""How long values live, and which of them may share bytes.

Time counts steps of the placement. A value lives from the step that makes it to the last that reads
it, both included; inputs from the first step, what the caller gets to behind the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gpumem.device import MemoryInfo
from gpumem.planning.assignment.copies import HOST, CopyPlan
from gpumem.planning.assignment.placement import Step
from gpumem.planning.graph.graph import Node
from gpumem.planning.graph.operators import ELEMENTWISE, VIEWS
from gpumem.planning.graph.values import Value
from gpumem.planning.memory.bodies import scratch_of

__all__ = ["Lifetimes", "Reuse", "Storage", "Tenant"]


class Tenant(NamedTuple):
    """A value in one memory: at home, or as a copy."""

    value: Value
    memory: MemoryInfo


class Reuse(NamedTuple):
    """A value that begins in the bytes of another: ``"view"`` of it, or ``"in_place"`` over it."""

    kind: str
    source: Tenant


@dataclass(eq=False)
class Storage:
    """Bytes that one value has, or several that share them, one after another or as views."""

    memory: MemoryInfo
    nbytes: int
    first: int
    last: int
    is_given: bool  # the caller's input, or a weight: nothing else may be written there
    tenants: list[Tenant] = field(default_factory=list)


class Lifetimes:
    """The storages of a run, with their tenants.

    Attributes
    ----------
    storages : list of Storage
    reuses : dict of Tenant to Reuse
    unplanned : list of str
        Values whose size is only known when the graph runs.
    scratch : dict of Node to Value
        Of nodes that hold graphs, such as an If: what lives inside while the node runs.
    """

    def __init__(self, copies: CopyPlan, *, alignment: int, in_place: bool, weights: bool) -> None:
        self._copies = copies
        self._placement = copies.placement
        self._end = len(self._placement.steps)
        self._in_place = in_place
        self._weights = weights
        self._of: dict[Tenant, Storage] = {}
        self.storages: list[Storage] = []
        self.reuses: dict[Tenant, Reuse] = {}
        self.unplanned: list[str] = []
        self.scratch = {
            node: scratch
            for node in self._placement.graph
            if (scratch := scratch_of(node, alignment)) is not None
        }
        spans = self._spans()
        for tenant, (first, last) in spans.items():
            self._settle(tenant, first, last)

    # ---- when ------------------------------------------------------------------------------------

    def _spans(self) -> dict[Tenant, tuple[int, int]]:
        """Return first and last step of each tenant, in the order of first steps."""
        spans: dict[Tenant, tuple[int, int]] = {}
        for tenant, step in self._touches():
            first, last = spans.get(tenant, (step, step))
            spans[tenant] = min(first, step), max(last, step)
        return dict(sorted(spans.items(), key=lambda item: item[1][0]))

    def _touches(self) -> Iterator[tuple[Tenant, int]]:
        graph, homes = self._placement.graph, self._copies.homes
        for value in graph.inputs:
            yield Tenant(value, homes[value]), 0
        for copy in self._copies.copies:
            for memory in (copy.source, copy.destination):
                yield Tenant(copy.value, memory), max(copy.step, 0)
        for number, step in enumerate(self._placement.steps):
            for node in step.nodes:
                for value in node.reads:
                    yield Tenant(value, self._copies.memory_for(value, step.device)), number
                for value in node.makes:
                    yield Tenant(value, homes[value]), number
                if node in self.scratch:
                    yield Tenant(self.scratch[node], MemoryInfo(step.device)), number
        for value in graph.outputs:
            yield Tenant(value, self._copies.memory_for(value, HOST)), self._end

    # ---- where -----------------------------------------------------------------------------------

    def _settle(self, tenant: Tenant, first: int, last: int) -> None:
        value = tenant.value
        if value.is_initializer and not self._weights:
            return
        if value.nbytes is None:
            if value.name not in self.unplanned:
                self.unplanned.append(value.name)
            return
        reuse = None if value.is_initializer else self._reuse_of(tenant, first)
        if reuse is not None:
            storage = self._of[reuse.source]
            self.reuses[tenant] = reuse
            storage.last = max(storage.last, last)
            storage.nbytes = max(storage.nbytes, value.nbytes)
        else:
            storage = self._new(tenant, first, last)
        storage.tenants.append(tenant)
        self._of[tenant] = storage

    def _new(self, tenant: Tenant, first: int, last: int) -> Storage:
        value = tenant.value
        if value.is_initializer:
            first, last = 0, self._end
        is_given = value.is_initializer or value in self._placement.graph.inputs
        storage = Storage(tenant.memory, value.nbytes or 0, first, last, is_given)
        self.storages.append(storage)
        return storage

    def _reuse_of(self, tenant: Tenant, number: int) -> Reuse | None:
        """Find bytes for what the node of a step makes, among what it reads."""
        if not self._in_place or not 0 <= number < self._end:
            return None
        step = self._placement.steps[number]
        # Nodes that run as one may write before they have read: nothing is shared inside a group.
        if len(step.nodes) > 1 or tenant.memory != self._copies.homes.get(tenant.value):
            return None
        (node,) = step.nodes
        if (
            not node.makes
            or node.makes[0] is not tenant.value
            or node.domain not in ("", "ai.onnx")
        ):
            return None
        if node.op_type in VIEWS:
            return self._view(tenant, node, step)
        if node.op_type in ELEMENTWISE and not node.body_graphs:
            return self._over(tenant, node, step, number)
        return None

    def _sources(self, node: Node, step: Step) -> list[Tenant]:
        return [Tenant(v, self._copies.memory_for(v, step.device)) for v in node.reads]

    def _view(self, tenant: Tenant, node: Node, step: Step) -> Reuse | None:
        if not node.inputs or node.inputs[0] is None:
            return None
        source = Tenant(node.inputs[0], self._copies.memory_for(node.inputs[0], step.device))
        storage = self._of.get(source)
        if storage is None or storage.memory != tenant.memory:
            return None
        if source.value.nbytes != tenant.value.nbytes:
            return None
        # What the caller gave and what it gets stay apart.
        if storage.is_given and tenant.value in self._placement.graph.outputs:
            return None
        return Reuse("view", source)

    def _over(self, tenant: Tenant, node: Node, step: Step, number: int) -> Reuse | None:
        sources = self._sources(node, step)
        for source in sources:
            storage = self._of.get(source)
            if storage is None or storage.memory != tenant.memory or storage.is_given:
                continue
            alike = (source.value.dtype, source.value.shape) == (
                tenant.value.dtype,
                tenant.value.shape,
            )
            # A second input in the same bytes, under another shape, would change while it is read.
            alone = not any(self._of.get(o) is storage for o in sources if o != source)
            if alike and alone and storage.last == number:
                return Reuse("in_place", source)
        return None
