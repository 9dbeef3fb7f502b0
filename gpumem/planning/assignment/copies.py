"""The memory of each value, and the copies for devices that cannot access it.

A value has one home memory. Every device that can access the home uses the value there. A copy is
made only for a device that cannot access it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpumem._support.arguments import require
from gpumem._support.sizes import format_size
from gpumem.device import Device, MemoryInfo, decide_copy
from gpumem.planning.assignment.placement import Placement
from gpumem.planning.graph import Value

HOST = Device("host")


@dataclass(frozen=True)
class PlannedCopy:
    """One copy.

    Attributes
    ----------
    value : Value
    source, destination : MemoryInfo
    step : int
        The step of the placement before which it is made; the number of steps for copies of outputs
        after the last one; -1 for weights, which are copied once, before any run.
    why : str
        The reason.

    Examples
    --------
    >>> from gpumem.planning import GraphBuilder, Target, partition, plan_copies
    >>> builder = GraphBuilder()
    >>> w = builder.initializer("w", "int8", (100,))
    >>> for name, device in (("a", "cuda:0"), ("b", "cuda:1")):
    ...     node = builder.node("Relu", [w], [builder.value(name, "int8", (100,))])
    >>> first = Target("cuda:0", supports=lambda node: node.outputs[0].name == "a")
    >>> copies = plan_copies(partition(builder.build(["a", "b"]), [first, "cuda:1"])).copies
    >>> [(copy.value.name, str(copy.destination), copy.step, copy.nbytes) for copy in copies]
    [('w', 'cuda:1', -1, 100)]
    """

    value: Value
    source: MemoryInfo
    destination: MemoryInfo
    step: int
    why: str

    @property
    def nbytes(self) -> int | None:
        """Bytes; None where they are only known when the graph runs."""
        return self.value.nbytes


class CopyPlan:
    """Memories of values and copies between them, made by `plan_copies`.

    Attributes
    ----------
    placement : Placement
    homes : Mapping[Value, MemoryInfo]
        The memory in which each value is made; of inputs and outputs, the caller's memory.
    copies : tuple of PlannedCopy
        In the order in which they are made.

    Examples
    --------
    >>> import gpumem
    >>> from gpumem.planning import GraphBuilder, Target, partition, plan_copies
    >>> builder = GraphBuilder()
    >>> x = builder.input("x", "float32", (4,))
    >>> node = builder.node("Relu", [x], [builder.value("y", "float32", (4,))])
    >>> target = Target("cuda:0", host_accessible=False)
    >>> plan = plan_copies(partition(builder.build(["y"]), [target]))
    >>> plan, str(plan.memory_for(x, gpumem.Device("cuda:0")))
    (<gpumem.planning.CopyPlan: 2 copies, 32 B>, 'cuda:0')
    """

    def __init__(
        self,
        placement: Placement,
        homes: Mapping[Value, MemoryInfo],
        copies: tuple[PlannedCopy, ...],
    ) -> None:
        self.placement = placement
        self.homes = dict(homes)
        self.copies = copies
        self._copied = {(copy.value, copy.destination): copy for copy in copies}

    @property
    def copied_bytes(self) -> int:
        """Bytes copied in a run, as far as they are known before it."""
        return sum(copy.nbytes or 0 for copy in self.copies if copy.step >= 0)

    def memory_for(self, value: Value, device: Device) -> MemoryInfo:
        """Return the memory in which a device reads a value: its home, or that of its copy."""
        require("value", value, Value, "a Value")
        own = MemoryInfo(device)
        return own if (value, own) in self._copied else self.homes[value]

    def __repr__(self) -> str:
        size = format_size(self.copied_bytes)
        return f"<gpumem.planning.CopyPlan: {len(self.copies)} copies, {size}>"


def plan_copies(placement: Placement) -> CopyPlan:
    """Choose the memory of each value and the copies, for one run.

    A value that only one device uses lives in that device's memory. One that the CPU and a GPU use,
    inputs and outputs of the graph included, lives in the GPU's HOST_ACCESSIBLE memory if its
    target has that, where both use it without a copy. Weights live in the memory of the first
    device that reads them; other devices that cannot access them there get a copy, before the first
    run.

    Parameters
    ----------
    placement : Placement

    Returns
    -------
    CopyPlan

    Raises
    ------
    TypeError
        `placement` is not a Placement.

    Examples
    --------
    >>> from gpumem.planning import GraphBuilder, Target, partition, plan_copies
    >>> builder = GraphBuilder()
    >>> x = builder.input("x", "float32", (4,))
    >>> node = builder.node("Relu", [x], [builder.value("y", "float32", (4,))])
    >>> graph = builder.build(["y"])
    >>> plan = plan_copies(partition(graph, ["cuda:0"]))
    >>> str(plan.homes[x]), plan.copies
    ('cuda:0/host_accessible', ())
    >>> plan = plan_copies(partition(graph, [Target("cuda:0", host_accessible=False)]))
    >>> [(copy.value.name, str(copy.source), str(copy.destination)) for copy in plan.copies]
    [('x', 'host:0', 'cuda:0'), ('y', 'cuda:0', 'host:0')]
    """
    require("placement", placement, Placement, "a Placement, which partition returns")
    uses = uses_of(placement)
    homes = {value: _home(placement, value, users) for value, users in uses.items()}
    copies = [
        copy for value, users in uses.items() for copy in _copies_of(value, homes[value], users)
    ]
    return CopyPlan(placement, homes, tuple(sorted(copies, key=lambda copy: copy.step)))


@dataclass
class Uses:
    """The device that makes a value, None for weights; the first step of each that reads it."""

    maker: Device | None
    readers: dict[Device, int]


def uses_of(placement: Placement) -> dict[Value, Uses]:
    """Return the uses of each value; the CPU makes the inputs and reads the outputs."""
    graph = placement.graph
    uses = {value: Uses(HOST, {}) for value in graph.inputs}
    for number, step in enumerate(placement.steps):
        for node in step.nodes:
            for value in node.reads:
                known = uses.setdefault(value, Uses(None, {}))
                known.readers.setdefault(step.device, number)
            for value in node.makes:
                uses.setdefault(value, Uses(step.device, {})).maker = step.device
    for value in graph.outputs:
        known = uses.setdefault(value, Uses(None, {}))
        known.readers.setdefault(HOST, len(placement.steps))
    return uses


def _home(placement: Placement, value: Value, uses: Uses) -> MemoryInfo:
    makers = [] if uses.maker is None else [uses.maker]
    devices = list(dict.fromkeys([*makers, *uses.readers]))
    if not devices:
        return MemoryInfo(HOST)
    first = devices[0]
    if value.is_initializer or not any(device.type == "host" for device in devices):
        return MemoryInfo(first)
    if first.type == "host":
        first = next((device for device in devices if device.type != "host"), first)
    if first.type == "host":
        return MemoryInfo(devices[0])
    shared = placement.target_of(first).shared_memory
    return MemoryInfo(devices[0]) if shared is None else shared


def _copies_of(value: Value, home: MemoryInfo, uses: Uses) -> Iterator[PlannedCopy]:
    for device, step in uses.readers.items():
        decision = decide_copy(device, home)
        if decision.action == "copy":
            when = -1 if value.is_initializer else step
            yield PlannedCopy(value, home, MemoryInfo(device), when, decision.why)
