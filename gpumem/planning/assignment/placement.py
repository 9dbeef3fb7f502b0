"""Devices that nodes may run on, the device of each node of a graph, and the reasons."""

from __future__ import annotations

import graphlib
import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gpumem._support.arguments import refuse, require
from gpumem._support.sizes import exact_size
from gpumem.accounting import ResourceCount
from gpumem.accounting.nodes import key_of
from gpumem.accounting.settings import device_named
from gpumem.device import Device, MemoryInfo, MemoryKind
from gpumem.errors import ModelGraphError
from gpumem.planning.graph import ModelGraph, Node

# ---- devices -------------------------------------------------------------------------------------


Supports: TypeAlias = Callable[[Node], bool]
Fuse: TypeAlias = Callable[[Sequence[Node]], Iterable[Sequence[Node]]]
Relayout: TypeAlias = Callable[[ModelGraph, Sequence[Node]], ModelGraph]


@dataclass(frozen=True)
class Target:
    """A device that nodes may be placed on.

    Attributes
    ----------
    device : Device
        Or its name.
    supports : callable, optional
        Called with a node; returns whether the device can run it. None: it runs every node.
    fuse : callable, optional
        Called with the nodes that are offered to the device, in order; returns groups of them that
        it would run as one. A group is placed whole or not at all.
    relayout : callable, optional
        Called with the graph and the nodes placed here in a first pass; returns the graph with
        layouts changed for them. A node of it that makes the same values is the same node. Costs of
        the first pass stay; new nodes are priced in a second pass.
    host_accessible : bool, optional
        Whether the device has memory that the CPU can access, too. None: only a CUDA device has.

    Examples
    --------
    >>> from gpumem.planning import Target
    >>> Target("cuda:0", supports=lambda node: node.op_type == "MatMul").device
    Device("cuda:0")
    """

    device: Device
    supports: Supports | None = None
    fuse: Fuse | None = None
    relayout: Relayout | None = None
    host_accessible: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", device_named(self.device))
        for name in ("supports", "fuse", "relayout"):
            given = getattr(self, name)
            if given is not None and not callable(given):
                refuse(name, given, "a callable or None")
        accepted = "True, False or None"
        require("host_accessible", self.host_accessible, (bool, type(None)), accepted)

    @classmethod
    def of(cls, given: Target | Device | MemoryInfo | str) -> Target:
        """Return a target that runs everything for a device, or the target itself."""
        return given if isinstance(given, Target) else cls(device_named(given))

    @property
    def memory(self) -> MemoryInfo:
        """The device's own memory."""
        return MemoryInfo(self.device)

    @property
    def shared_memory(self) -> MemoryInfo | None:
        """Memory that the device and the CPU can access; None if there is none."""
        if self.device.type == "host":
            return self.memory
        if self.host_accessible is False:
            return None
        return MemoryInfo(self.device, MemoryKind.HOST_ACCESSIBLE)


# ---- where nodes run -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """A device that refused a node, and the reason.

    Examples
    --------
    >>> import gpumem
    >>> from gpumem.planning.assignment.placement import Refusal
    >>> Refusal(gpumem.Device("cuda:0"), "it has no kernel for Einsum").why
    'it has no kernel for Einsum'
    """

    device: Device
    why: str


@dataclass(frozen=True)
class Assignment:
    """The device of a node.

    Attributes
    ----------
    node : Node
    device : Device
        The device that runs it.
    cost : ResourceCount
        Its cost at the device's accountant; `ResourceCount.none` if the device has no accountant.
    group : int or None
        Nodes of one number run as one; None: it runs alone.
    refusals : tuple of Refusal
        The devices that refused it, in order of preference.

    Examples
    --------
    >>> from gpumem.planning import GraphBuilder, Target, partition
    >>> builder = GraphBuilder()
    >>> node = builder.node("Relu", [builder.input("x", "int8", (4,))], ["y"])
    >>> placement = partition(builder.build(["y"]), ["cuda:0", "host"])
    >>> placement[node].device, placement[node].refusals
    (Device("cuda:0"), ())
    """

    node: Node
    device: Device
    cost: ResourceCount
    group: int | None
    refusals: tuple[Refusal, ...]

    @property
    def why(self) -> str:
        """The reason, in words."""
        cost = "" if self.cost.is_none else f", at {exact_size(self.cost.total_bytes)}"
        because = "; ".join(f"{one.device}: {one.why}" for one in self.refusals)
        together = "" if self.group is None else f", in group {self.group}"
        return f"{self.device} accepts it{cost}{together}" + (f" ({because})" if because else "")


@dataclass(frozen=True)
class Step:
    """Nodes that run as one, on one device; mostly a single node.

    Examples
    --------
    >>> from gpumem.planning import GraphBuilder, partition
    >>> builder = GraphBuilder()
    >>> node = builder.node("Relu", [builder.input("x", "int8", (4,))], ["y"])
    >>> [(step.device, step.nodes) for step in partition(builder.build(["y"]), ["cuda:1"]).steps]
    [(Device("cuda:1"), (Node(Relu -> y),))]
    """

    nodes: tuple[Node, ...]
    device: Device


class Placement:
    """The device of every node, chosen by `partition`.

    Attributes
    ----------
    graph : ModelGraph
        The graph to run: the given one, or the result of layout changes.
    targets : tuple of Target
        The devices, in order of preference.
    assignments : tuple of Assignment
        One per node, in order.
    steps : tuple of Step
        Steps in an order in which they can run.
    consumed : Mapping[Device, ResourceCount]
        Costs that this partition committed, of devices that have an accountant.
    gains : Mapping[Device, str]
        For ``strategy="best"``: the gain of the search over the greedy order, in words.

    Examples
    --------
    >>> from gpumem.planning import GraphBuilder, partition
    >>> builder = GraphBuilder()
    >>> x = builder.input("x", "int8", (4,))
    >>> nodes = builder.node("Relu", [x], ["y"]), builder.node("Relu", ["y"], ["z"])
    >>> placement = partition(builder.build(["z"]), ["cuda:0", "host"])
    >>> placement
    <gpumem.planning.Placement of 2 nodes: 2 on cuda:0, 0 on host:0>
    >>> placement.device_of(nodes[1])
    Device("cuda:0")
    """

    def __init__(
        self,
        graph: ModelGraph,
        targets: Sequence[Target],
        assignments: Sequence[Assignment],
        consumed: Mapping[Device, ResourceCount],
        gains: Mapping[Device, str],
    ) -> None:
        self.graph = graph
        self.targets = tuple(targets)
        self.assignments = tuple(assignments)
        self.steps = in_steps(graph, self.assignments)
        self.consumed = dict(consumed)
        self.gains = dict(gains)
        self._by_node = {one.node: one for one in self.assignments}

    def __getitem__(self, node: Node) -> Assignment:
        require("node", node, Node, "a Node")
        return self._by_node[node]

    def device_of(self, node: Node) -> Device:
        """Return the device of a node; KeyError if it is not in the graph."""
        return self[node].device

    def nodes_on(self, device: Device | str) -> tuple[Node, ...]:
        """Return the nodes that run on a device, in order."""
        wanted = Target.of(device).device
        return tuple(one.node for one in self.assignments if one.device == wanted)

    def target_of(self, device: Device) -> Target:
        """Return the target of a device; ValueError if it is not one of the placement's."""
        wanted = Target.of(device).device
        for target in self.targets:
            if target.device == wanted:
                return target
        known = ", ".join(str(target.device) for target in self.targets)
        raise ValueError(f"{wanted} is not a device of the placement: expected one of {known}")

    def report(self) -> str:
        """Return the reason for the device of each node, one line per node."""
        lines = [f"{one.node!r}: {one.why}" for one in self.assignments]
        lines += [f"{device}: {gain}" for device, gain in self.gains.items()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(self.nodes_on(t.device))} on {t.device}" for t in self.targets)
        return f"<gpumem.planning.Placement of {len(self.assignments)} nodes: {counts}>"


def in_steps(graph: ModelGraph, assignments: Sequence[Assignment]) -> tuple[Step, ...]:
    """Order each step after the steps that make its values, and else as in the graph.

    Raises
    ------
    ModelGraphError
        A group reads a value that is made from its own results, so it cannot run as one.
    """
    if all(one.group is None for one in assignments):  # the graph's own order
        return tuple(Step((one.node,), one.device) for one in assignments)
    members: dict[Hashable, list[Assignment]] = {}
    unit_of: dict[Node, Hashable] = {}
    for one in assignments:
        unit = key_of(one.node) if one.group is None else one.group
        members.setdefault(unit, []).append(one)
        unit_of[one.node] = unit
    waits = {unit: _needs(graph, unit, members[unit], unit_of) for unit in members}
    return tuple(
        Step(tuple(one.node for one in members[unit]), members[unit][0].device)
        for unit in _sorted(waits)
    )


def _needs(
    graph: ModelGraph, unit: Hashable, members: list[Assignment], unit_of: Mapping[Node, Hashable]
) -> set[Hashable]:
    producers = (graph.producer(value) for one in members for value in one.node.reads)
    return {unit_of[producer] for producer in producers if producer is not None} - {unit}


def _sorted(waits: Mapping[Hashable, set[Hashable]]) -> Iterator[Hashable]:
    """Yield each unit after those that it waits for; of several that are ready the first."""
    order = {unit: number for number, unit in enumerate(waits)}
    sorter = graphlib.TopologicalSorter(waits)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        groups = sorted({unit for unit in error.args[1] if isinstance(unit, int)})
        raise ModelGraphError(
            f"groups {groups} cannot run as one: they read values made from their own results"
        ) from None
    ready: list[tuple[int, Hashable]] = []
    while sorter.is_active():
        for unit in sorter.get_ready():
            heapq.heappush(ready, (order[unit], unit))
        _, unit = heapq.heappop(ready)
        yield unit
        sorter.done(unit)
