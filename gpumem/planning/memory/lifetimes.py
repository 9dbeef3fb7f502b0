"""How long values live, and which of them may share bytes.

Time counts steps of the placement. A value lives from the step that makes it to the last step that
reads it, both included. Inputs live from the first step; outputs live until after the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gpumem.device import MemoryInfo
from gpumem.planning.assignment.copies import HOST, CopyPlan
from gpumem.planning.assignment.placement import Step
from gpumem.planning.graph import ModelGraph, Node, Value
from gpumem.planning.memory.offsets import BlockLifetime, assign_offsets, rounded

# ONNX operators that return the bytes of the first input under another shape.
VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})

# ONNX operators that compute each element of the result from the elements at the same index of the
# inputs of that shape, so that the result may overwrite the first input.
# fmt: off
ELEMENTWISE = frozenset((
    "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BitwiseAnd",
    "BitwiseNot", "BitwiseOr", "BitwiseXor", "Ceil", "Celu", "Clip", "Cos", "Cosh", "Div",
    "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Log", "Max",
    "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow", "Reciprocal",
    "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt",
    "Sub", "Sum", "Tan", "Tanh", "ThresholdedRelu", "Where", "Xor",
))
# fmt: on

# Those of two inputs that may also overwrite the second one, as ONNX Runtime's kernels declare.
OVER_EITHER = frozenset({"Add", "Div", "Mul", "Sub"})

RUN_ONE_BODY = frozenset({"If"})  # operators that run only one of their bodies


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
    """Bytes of one value, or of several that share them, one after another or as views."""

    memory: MemoryInfo
    nbytes: int
    first: int
    last: int
    is_given: bool  # an input of the caller, or a weight: must not be overwritten
    tenants: list[Tenant] = field(default_factory=list)


class Lifetimes:
    """The storages of a run, with their tenants.

    Attributes
    ----------
    storages : list of Storage
    reuses : dict of Tenant to Reuse
    unplanned : list of str
        Values of a size that is only known when the graph runs.
    scratch : dict of Node to Value
        For nodes that hold graphs, such as an If: the memory of those graphs while the node runs.
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
            if (scratch := _scratch_of(node, alignment)) is not None
        }
        for tenant, (first, last) in self._spans().items():
            self._assign_storage(tenant, first, last)

    # ---- lifetimes -------------------------------------------------------------------------------

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

    # ---- storages --------------------------------------------------------------------------------

    def _assign_storage(self, tenant: Tenant, first: int, last: int) -> None:
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
        """Find an input of a step's node that the first output may overwrite."""
        if not self._in_place or not 0 <= number < self._end:
            return None
        step = self._placement.steps[number]
        # Nodes of a group may write before they have read: their values must not share bytes.
        if len(step.nodes) > 1 or tenant.memory != self._copies.homes.get(tenant.value):
            return None
        (node,) = step.nodes
        is_first = bool(node.makes) and node.makes[0] is tenant.value
        if not is_first or node.domain not in ("", "ai.onnx"):
            return None
        if node.op_type in VIEWS:
            return self._view(tenant, node, step)
        return self._over(tenant, node, step, number)

    def _view(self, tenant: Tenant, node: Node, step: Step) -> Reuse | None:
        if not node.inputs or node.inputs[0] is None:
            return None
        source = Tenant(node.inputs[0], self._copies.memory_for(node.inputs[0], step.device))
        storage = self._of.get(source)
        if storage is None or storage.memory != tenant.memory:
            return None
        # An output of the graph must not be a view of an input that the caller owns.
        is_exposed = storage.is_given and tenant.value in self._placement.graph.outputs
        if is_exposed or source.value.nbytes != tenant.value.nbytes:
            return None
        return Reuse("view", source)

    def _over(self, tenant: Tenant, node: Node, step: Step, number: int) -> Reuse | None:
        reads = [Tenant(v, self._copies.memory_for(v, step.device)) for v in node.reads]
        for source in reads:
            storage = self._of.get(source)
            if storage is None or storage.memory != tenant.memory or storage.is_given:
                continue
            old, new = source.value, tenant.value
            same_layout = (old.dtype, old.shape) == (new.dtype, new.shape)
            # A second input in the same bytes, under another shape, would change while it is read.
            alone = not any(self._of.get(o) is storage for o in reads if o != source)
            allowed = may_overwrite(node, source.value)
            if allowed and same_layout and alone and storage.last == number:
                return Reuse("in_place", source)
        return None


def may_overwrite(node: Node, value: Value) -> bool:
    """Return whether the first output of a node may lie over an input, for every kernel.

    A kernel that folds input after input into the result may overwrite the first one alone.
    """
    if node.domain not in ("", "ai.onnx") or node.op_type not in ELEMENTWISE or node.body_graphs:
        return False
    either = node.op_type in OVER_EITHER and len(node.inputs) == 2
    return value not in node.inputs[2 if either else 1 :]


# ---- memory inside a node that holds graphs ------------------------------------------------------


def _scratch_of(node: Node, alignment: int) -> Value | None:
    """Return a value for the memory inside a node while it runs; None for a node without bodies.

    It holds the values of known size of the bodies, for one iteration.
    """
    if not node.body_graphs:
        return None
    bodies = (list(_blocks_of(body, alignment)) for body in node.body_graphs.values())
    sizes = [assign_offsets(blocks).peak for blocks in bodies]
    nbytes = max(sizes) if node.op_type in RUN_ONE_BODY else sum(sizes)
    return Value(f"{node.makes[0].name if node.makes else node.name}/bodies", "uint8", (nbytes,))


def _blocks_of(graph: ModelGraph, alignment: int) -> Iterator[BlockLifetime]:
    number = {node: step for step, node in enumerate(graph)}
    captured = set(graph.captures)
    for value in graph.values.values():
        if value.is_initializer or value in captured or value.nbytes is None:
            continue
        maker = graph.producer(value)
        first = 0 if maker is None else number[maker]
        last = max((number[node] for node in graph.consumers(value)), default=first)
        if value in graph.outputs:
            last = len(graph)
        yield BlockLifetime(rounded(value.nbytes, alignment), first, last)
    for node, step in number.items():
        inside = _scratch_of(node, alignment)
        if inside is not None:
            yield BlockLifetime(rounded(inside.nbytes or 0, alignment), step, step)
