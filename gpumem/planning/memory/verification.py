"""The proof of a memory plan: its run is replayed over ranges that remember which value wrote them.

The replay uses only the places and the declared reuses of a plan, and no lifetimes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gpumem._support.sizes import exact_size
from gpumem.device import MemoryInfo
from gpumem.errors import ModelGraphError
from gpumem.planning.assignment.copies import HOST, PlannedCopy
from gpumem.planning.assignment.placement import Step
from gpumem.planning.memory.lifetimes import Reuse, Tenant, may_overwrite, returns_view

if TYPE_CHECKING:
    from gpumem.planning.memory.memory_plan import MemoryPlan


def verify_plan(plan: MemoryPlan) -> bool:
    """Verify a plan; see `MemoryPlan.verify`."""
    for tenant in plan.places:
        _check_bounds(plan, tenant)
    replay = _Replay(plan)
    replay.begin()
    steps = plan.placement.steps
    for number, step in enumerate(steps):
        replay.copy(copy for copy in plan.copies.copies if copy.step == number)
        replay.step(step)
    replay.copy(copy for copy in plan.copies.copies if copy.step == len(steps))
    replay.end()
    return True


def _check_bounds(plan: MemoryPlan, tenant: Tenant) -> None:
    place, block = plan.places[tenant], plan.blocks[tenant.memory]
    if place.offset < 0 or place.offset + place.nbytes > block.peak_bytes:
        raise ModelGraphError(
            f"{tenant.value!r} lies outside of its block of {exact_size(block.peak_bytes)}"
        )
    if place.offset % plan.alignment:
        raise ModelGraphError(
            f"{tenant.value!r} lies at {place.offset}, not aligned to {plan.alignment}"
        )


class _Replay:
    """Which values are whole in memory at the current step."""

    def __init__(self, plan: MemoryPlan) -> None:
        self._plan = plan
        self._whole: dict[MemoryInfo, dict[Tenant, tuple[int, int]]] = {}

    def begin(self) -> None:
        """Write the inputs, and the weights that have places."""
        plan, graph = self._plan, self._plan.placement.graph
        given = [
            tenant
            for tenant in plan.places
            if tenant.value.is_initializer
            or (tenant.value in graph.inputs and plan.copies.homes[tenant.value] == tenant.memory)
        ]
        for tenant in given:
            self._write(tenant)
        self._read(given)

    def copy(self, copies: Iterable[PlannedCopy]) -> None:
        for copy in copies:
            source = Tenant(copy.value, copy.source)
            self._read([source])
            self._write(Tenant(copy.value, copy.destination))
            self._read([source])

    def step(self, step: Step) -> None:
        """Check that inputs and outputs of a step are whole together, except overwritten inputs."""
        plan = self._plan
        made = {value for node in step.nodes for value in node.makes}
        reads = [
            Tenant(value, plan.copies.memory_for(value, step.device))
            for node in step.nodes
            for value in node.reads
            if value not in made
        ]
        self._read(reads)
        writes = [
            Tenant(value, plan.copies.homes[value]) for node in step.nodes for value in node.makes
        ]
        own = MemoryInfo(step.device)
        writes += [Tenant(plan.scratch[n], own) for n in step.nodes if n in plan.scratch]
        overwritten = set()
        for tenant in writes:
            reuse = plan.reuses.get(tenant)
            if reuse is not None:
                self._require_allowed(tenant, reuse, step)
                if reuse.kind == "in_place":
                    overwritten.add(self._origin(reuse.source))
            self._write(tenant)
        self._read(t for t in (*reads, *writes) if self._origin(t) not in overwritten)

    def _require_allowed(self, tenant: Tenant, reuse: Reuse, step: Step) -> None:
        """Raise ModelGraphError for a reuse that the operator does not allow."""
        node, places = self._plan.placement.graph.producer(tenant.value), self._plan.places
        allows = returns_view if reuse.kind == "view" else may_overwrite
        mine, its = (places[one] for one in (tenant, reuse.source))
        is_same = (mine.offset, mine.nbytes) == (its.offset, its.nbytes) and len(step.nodes) == 1
        if node is None or not is_same or not allows(node, reuse.source.value):
            raise ModelGraphError(
                f"{tenant.value!r} lies over {reuse.source.value!r}, which {node!r} does not allow "
                "for every kernel"
            )

    def end(self) -> None:
        """Read the outputs, and the weights, which must be unchanged."""
        plan, graph = self._plan, self._plan.placement.graph
        self._read(Tenant(v, plan.copies.memory_for(v, HOST)) for v in graph.outputs)
        self._read(t for t in plan.places if t.value.is_initializer)

    def _write(self, tenant: Tenant) -> None:
        """Write a value over the values in its range. A view does not overwrite its origin."""
        place = self._plan.places.get(tenant)
        if place is None:
            return
        whole = self._whole.setdefault(tenant.memory, {})
        start, end = place.offset, place.offset + place.nbytes
        origin = self._origin(tenant)
        for other, (other_start, other_end) in list(whole.items()):
            overlaps = other_start < end and start < other_end
            if overlaps and self._origin(other) != origin:
                del whole[other]
        whole[tenant] = (start, end)

    def _origin(self, tenant: Tenant) -> Tenant:
        reuse = self._plan.reuses.get(tenant)
        while reuse is not None and reuse.kind == "view":
            tenant = reuse.source
            reuse = self._plan.reuses.get(tenant)
        return tenant

    def _read(self, tenants: Iterable[Tenant]) -> None:
        for tenant in tenants:
            if tenant in self._plan.places and tenant not in self._whole.get(tenant.memory, {}):
                raise ModelGraphError(
                    f"{tenant.value!r} is not complete in {tenant.memory} when it is read"
                )
