"""A memory plan in use: tensors at the planned offsets, and one run of the graph over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gpumem._buffer.resource import MemoryResource
from gpumem._support.arguments import refuse, require
from gpumem._tensor import Tensor, copy, empty
from gpumem.device import MemoryInfo
from gpumem.errors import ConfigError, ModelGraphError
from gpumem.planning.assignment.copies import HOST, PlannedCopy
from gpumem.planning.graph import Node, Value
from gpumem.planning.memory.lifetimes import Tenant

if TYPE_CHECKING:
    from gpumem.planning.memory.memory_plan import MemoryPlan

Kernel = Callable[[Node, list[Any], list[Any]], None]


class PlannedTensors:
    """Tensors of a plan's values in blocks allocated for them; made by `MemoryPlan.tensors`.

    Each tensor keeps its block alive. Tensors of values that share bytes share them, too.
    """

    def __init__(self, plan: MemoryPlan, memory: Any, stream: Any = None) -> None:
        self._plan = plan
        self._blocks = {
            needed: _block_of(plan, needed, _source_for(needed, memory), stream)
            for needed, block in plan.blocks.items()
            if block.peak_bytes
        }

    def tensor(self, value: Value | str, memory: MemoryInfo | None = None) -> Tensor:
        """Return the tensor of a value, in its home memory or in the memory of its copy.

        Raises
        ------
        KeyError
            The plan has no place for it there.
        """
        found = self._plan.placement.graph.values[value] if isinstance(value, str) else value
        tenant = Tenant(found, memory or self._plan.copies.homes[found])
        place = self._plan.places[tenant]
        if not place.nbytes:
            return empty(found.shape, found.dtype, memory=HOST)  # type: ignore[arg-type]
        piece = self._blocks[tenant.memory][place.offset : place.offset + place.nbytes]
        return piece.view(found.dtype).reshape(found.shape)  # type: ignore[arg-type]

    def __getitem__(self, value: Value | str) -> Tensor:
        return self.tensor(value)


def _source_for(needed: MemoryInfo, memory: Any) -> Any:
    """Return the source of the block of one memory."""
    source = memory
    if isinstance(memory, Mapping):
        known = {MemoryInfo.parse(name): given for name, given in memory.items()}
        wanted = (needed.device, needed.kind)
        found = [known[name] for name in known if (name.device, name.kind) == wanted]
        if not found:
            raise ConfigError(f"no memory is given for {needed}, where the plan places values")
        source = found[0]
    if not isinstance(source, MemoryResource) and not hasattr(source, "tensor"):
        accepted = "a MemoryResource, an ExternalMemory, or a Mapping of them by memory"
        refuse("memory", source, accepted)
    if not source.memory.shares_memory_with(needed):
        raise ConfigError(f"the plan needs memory of {needed}, and is given {source.memory}")
    return source


def _block_of(plan: MemoryPlan, memory: MemoryInfo, source: Any, stream: Any) -> Tensor:
    """Allocate one block at an address that is a multiple of the alignment."""
    nbytes = plan.blocks[memory].peak_bytes
    if isinstance(source, MemoryResource):
        whole = empty(nbytes + plan.alignment - 1, "uint8", resource=source, stream=stream)
        skipped = -whole.ptr % plan.alignment
        return whole[skipped : skipped + nbytes]
    skipped = -source.ptr % plan.alignment
    block: Tensor = source.tensor(nbytes, "uint8", offset=skipped, stream=stream)
    return block


def run_plan(
    plan: MemoryPlan,
    kernel: Kernel,
    inputs: Mapping[str, Any],
    memory: Any,
    weights: Mapping[str, Any],
    stream: Any,
) -> dict[str, Any]:
    """Run a plan; see `MemoryPlan.run`."""
    _check_given(plan, inputs, weights)
    run = _Run(plan, PlannedTensors(plan, memory, stream), weights, stream)
    for value in plan.placement.graph.inputs:
        _fill(run.tensors[value], value.name, inputs, stream)
    for tenant in plan.places:
        if tenant.value.is_initializer:  # views of it lie there
            _fill(run.tensors.tensor(*tenant), tenant.value.name, weights, stream)
    steps = plan.placement.steps
    for number, step in enumerate(steps):
        run.copies(number)
        for node in step.nodes:
            run.node(node, step.device, kernel)
    run.copies(len(steps))
    return {
        value.name: run.find(value, plan.copies.memory_for(value, HOST))
        for value in plan.placement.graph.outputs
    }


def _check_given(plan: MemoryPlan, inputs: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    graph = plan.placement.graph
    if plan.unplanned:
        raise ModelGraphError(f"values of unknown size have no place: {', '.join(plan.unplanned)}")
    for what, values, given in (
        ("inputs", graph.inputs, inputs),
        ("weights", graph.initializers, weights),
    ):
        require(what, given, Mapping, "a Mapping of names to arrays")
        missing = [value.name for value in values if value.name not in given]
        if missing:
            raise ModelGraphError(f"nothing is given for {', '.join(missing)}")


def _fill(tensor: Tensor, name: str, given: Mapping[str, Any], stream: Any) -> None:
    try:
        copy(tensor, given[name], stream)
    except (TypeError, ValueError) as error:
        error.add_note(f"It is copied from the array that is given for {name!r}.")
        raise


class _Run:
    def __init__(
        self, plan: MemoryPlan, tensors: PlannedTensors, weights: Mapping[str, Any], stream: Any
    ) -> None:
        self._plan = plan
        self.tensors = tensors
        self._weights = weights
        self._stream = stream
        self._by_step: dict[int, list[PlannedCopy]] = {}
        for planned in plan.copies.copies:
            self._by_step.setdefault(planned.step, []).append(planned)

    def copies(self, step: int) -> None:
        """Make the copies that come before a step."""
        for planned in self._by_step.get(step, ()):
            target = self.tensors.tensor(planned.value, planned.destination)
            copy(target, self.tensors.tensor(planned.value, planned.source), self._stream)

    def node(self, node: Node, device: Any, kernel: Kernel) -> None:
        """Run a node, unless its result is a view."""
        homes = self._plan.copies.homes
        made = [v and Tenant(v, homes[v]) for v in node.outputs]
        reuses = [self._plan.reuses.get(tenant) for tenant in made if tenant is not None]
        if any(reuse is not None and reuse.kind == "view" for reuse in reuses):
            return
        memory_for = self._plan.copies.memory_for
        reads = [v and self.find(v, memory_for(v, device)) for v in node.inputs]
        writes: list[Any] = [v and self.tensors[v] for v in node.outputs]
        if node in self._plan.scratch and not node.body_graphs:
            writes.append(self.tensors.tensor(self._plan.scratch[node], MemoryInfo(device)))
        kernel(node, reads, writes)

    def find(self, value: Value, memory: MemoryInfo) -> Any:
        """Return the tensor of a value; the given array of a weight without a place."""
        if value.is_initializer and Tenant(value, memory) not in self._plan.places:
            return self._weights[value.name]
        return self.tensors.tensor(value, memory)
