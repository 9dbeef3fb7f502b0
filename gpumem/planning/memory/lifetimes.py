"""How long values live, and which of them may share bytes.

Time counts steps of the placement. A value lives from the step that makes it to the last step that
reads it, both included. Inputs live from the first step; outputs live until after the last one, and
so do inputs in a plan for ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from gpumem.device import MemoryInfo
from gpumem.planning.assignment.copies import HOST, CopyPlan, plan_copies
from gpumem.planning.assignment.partitioning import partition
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

# Those of which ONNX Runtime's CPU kernels overwrite the first input. Its CUDA kernels do, too, but
# for Clip.
IN_ONNX_RUNTIME = frozenset(
    (
        "Clip", "Elu", "HardSigmoid", "LeakyRelu", "Relu", "Selu", "Sigmoid", "Softplus",
        "Softsign", "Tanh", "ThresholdedRelu",
    )
)  # fmt: skip

InPlace: TypeAlias = bool | frozenset[str] | Literal["onnxruntime"]  # see `plan_memory`

RUN_ONE_BODY = frozenset({"If"})  # operators that run only one of their bodies
REPEATING = frozenset({"Loop", "Scan"})  # operators that run their body once for each iteration


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
        Memory in which a node works while it runs: that of its graphs, or its workspace.
    uncounted : list of str
        Values of those graphs of a size that is only known when they run.
    """

    def __init__(
        self,
        copies: CopyPlan,
        *,
        alignment: int,
        in_place: InPlace,
        weights: bool,
        workspaces: bool,
    ) -> None:
        self._copies = copies
        self._placement = copies.placement
        self._end = len(self._placement.steps)
        self._keeps_inputs = in_place == "onnxruntime"
        self._in_place = IN_ONNX_RUNTIME if in_place == "onnxruntime" else in_place
        self._weights = weights
        self._of: dict[Tenant, Storage] = {}
        self.storages: list[Storage] = []
        self.reuses: dict[Tenant, Reuse] = {}
        self.unplanned: list[str] = []
        self.scratch: dict[Node, Value] = {}
        self.uncounted: list[str] = []
        for node in self._placement.graph:
            workspace = (node.workspace or 0) if workspaces else 0
            if node.body_graphs:
                nbytes, unknown = _bytes_inside(node, alignment, in_place, workspaces)
                self.scratch[node] = _working(node, "bodies", nbytes + workspace)
                self.uncounted += unknown
            elif workspace:
                self.scratch[node] = _working(node, "workspace", workspace)
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
            if self._keeps_inputs:
                yield Tenant(value, homes[value]), self._end
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
        graph = self._placement.graph
        is_given = value.is_initializer or value in graph.inputs or value in graph.captures
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
        if not node.makes or node.makes[0] is not tenant.value:
            return None
        if node.inputs and node.inputs[0] is not None and returns_view(node, node.inputs[0]):
            return self._view(tenant, node.inputs[0], step)
        return self._over(tenant, node, step, number)

    def _view(self, tenant: Tenant, viewed: Value, step: Step) -> Reuse | None:
        source = Tenant(viewed, self._copies.memory_for(viewed, step.device))
        storage = self._of.get(source)
        if storage is None or storage.memory != tenant.memory:
            return None
        # An output of the graph must not be a view of an input that the caller owns.
        is_exposed = storage.is_given and tenant.value in self._placement.graph.outputs
        if is_exposed or source.value.nbytes != tenant.value.nbytes:
            return None
        return Reuse("view", source)

    def _over(self, tenant: Tenant, node: Node, step: Step, number: int) -> Reuse | None:
        if isinstance(self._in_place, frozenset) and node.op_type not in self._in_place:
            return None
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


def returns_view(node: Node, value: Value) -> bool:
    """Return whether the first output of a node is an input under another shape."""
    return node.domain in ("", "ai.onnx") and node.op_type in VIEWS and value in node.inputs[:1]


def may_overwrite(node: Node, value: Value) -> bool:
    """Return whether the first output of a node may lie over an input, for every kernel.

    A kernel that folds input after input into the result may overwrite the first one alone.
    """
    if node.domain not in ("", "ai.onnx") or node.op_type not in ELEMENTWISE or node.body_graphs:
        return False
    either = node.op_type in OVER_EITHER and len(node.inputs) == 2
    return value not in node.inputs[2 if either else 1 :]


# ---- memory inside a node that holds graphs ------------------------------------------------------


def _working(node: Node, kind: str, nbytes: int) -> Value:
    name = node.makes[0].name if node.makes else node.name
    return Value(f"{name}/{kind}", "uint8", (nbytes,))


def _bytes_inside(
    node: Node, alignment: int, in_place: InPlace, workspaces: bool
) -> tuple[int, list[str]]:
    """Return the bytes that a node's graphs need, and the names of values of unknown size.

    If and Loop make their outputs last, in memory that is counted as theirs.
    """
    needs, unknown = [], list[str]()
    outputs = _bytes_of(node.makes, alignment)
    for body in node.body_graphs.values():
        placed = plan_copies(partition(body, [HOST]))
        inner = Lifetimes(
            placed, alignment=alignment, in_place=in_place, weights=False, workspaces=workspaces
        )
        outside = {*body.captures, *_slices(node, body)}
        known = {value.name for value in outside}
        names = [*(name for name in inner.unplanned if name not in known), *inner.uncounted]
        unknown += [f"{node.name or node.op_type}/{name}" for name in names]
        # A node that repeats its body keeps the inputs of an iteration until it has the outputs.
        kept = body.inputs if node.op_type in REPEATING else ()
        blocks = [
            BlockLifetime(
                rounded(storage.nbytes, alignment),
                storage.first,
                len(body) if storage.tenants[0].value in kept else storage.last,
            )
            for storage in inner.storages
            if storage.tenants[0].value not in outside
        ]
        need = assign_offsets(blocks).peak
        if node.op_type == "Loop":
            ends = _bytes_of((*body.inputs, *body.outputs), alignment) + outputs
            need = max(need, ends) + _earlier_slices(node, body, alignment)
        needs.append(need)
    nbytes = max(needs) if node.op_type in RUN_ONE_BODY else sum(needs)
    if node.op_type in ("If", "Loop"):
        nbytes = max(0, nbytes - outputs)
    return nbytes, unknown


def _bytes_of(values: Iterable[Value], alignment: int) -> int:
    return sum(rounded(value.nbytes or 0, alignment) for value in values)


def _slices(node: Node, body: ModelGraph) -> Iterator[Value]:
    """Yield the values of a Scan's body that lie in the node's inputs and outputs."""
    pairs = zip((*node.inputs, *node.outputs), (*body.inputs, *body.outputs), strict=False)
    for whole, part in pairs if node.op_type == "Scan" else ():
        if whole is not None and len(whole.shape or ()) > len(part.shape or ()):
            yield part


def _earlier_slices(node: Node, body: ModelGraph, alignment: int) -> int:
    """Return the bytes that all iterations but the last have left for a Loop's stacked outputs."""
    carried = len(body.inputs) - 2
    stacked = zip(node.outputs[carried:], body.outputs[1 + carried :], strict=False)
    return sum(
        rounded(part.nbytes or 0, alignment) * max(0, int(whole.shape[0]) - 1)
        for whole, part in stacked
        if whole is not None and whole.shape and whole.nbytes is not None
    )
