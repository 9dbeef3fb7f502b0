"""Memory plans: an offset for every value, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpumem._support.arguments import power_of_two, require, require_settings
from gpumem._support.sizes import format_size
from gpumem.device import MemoryInfo
from gpumem.errors import ConfigError
from gpumem.planning.assignment.copies import CopyPlan, plan_copies
from gpumem.planning.assignment.layers import is_on
from gpumem.planning.assignment.placement import Placement
from gpumem.planning.graph import Node, Value
from gpumem.planning.graph.graph import naming_the_largest
from gpumem.planning.memory.lifetimes import InPlace, Lifetimes, Reuse, Storage, Tenant
from gpumem.planning.memory.offsets import BlockLifetime, assign_offsets, busiest, rounded
from gpumem.planning.memory.running import PlannedTensors, run_plan
from gpumem.planning.memory.verification import verify_plan

MAX_ALIGNMENT = 1 << 30  # bytes
PREALLOCATION = "session.enable_static_workspace_preallocation"


@dataclass(frozen=True)
class Place:
    """Memory, offset and lifetime of a value.

    Attributes
    ----------
    memory : MemoryInfo
    offset : int
        Bytes from the beginning of the memory's block.
    nbytes : int
        Size of the value.
    first, last : int
        First and last step at which its bytes are used, by it or by values that share them.

    Examples
    --------
    >>> from gpumem.planning import GraphBuilder, partition, plan_memory
    >>> builder = GraphBuilder()
    >>> x = builder.input("x", "int8", (1000,))
    >>> node = builder.node("Softmax", [x], [builder.value("y", "int8", (1000,))])
    >>> plan = plan_memory(partition(builder.build(["y"]), ["host"]), in_place=False)
    >>> sorted(place.offset for place in plan.places.values())       # both live at one step
    [0, 1024]
    """

    memory: MemoryInfo
    offset: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class MemoryBlock:
    """The block that a plan needs in one memory.

    Attributes
    ----------
    peak_bytes : int
        Size of the block.
    lower_bound_bytes : int
        Peak of the bytes that live at one step, each value rounded up to the alignment.
    busiest_step : int
        The first step with that peak.
    strategy : str
        Strategy that found the offsets.

    Examples
    --------
    >>> from gpumem.planning import GraphBuilder, partition, plan_memory
    >>> builder = GraphBuilder()
    >>> x = builder.input("x", "int8", (1000,))
    >>> node = builder.node("Softmax", [x], [builder.value("y", "int8", (1000,))])
    >>> plan = plan_memory(partition(builder.build(["y"]), ["host"]), in_place=False)
    >>> [(str(memory), block.peak_bytes) for memory, block in plan.blocks.items()]
    [('host:0', 2048)]
    """

    peak_bytes: int
    lower_bound_bytes: int
    busiest_step: int
    strategy: str


class MemoryPlan:
    """Offsets of a run's values, made by `plan_memory`.

    Attributes
    ----------
    copies : CopyPlan
        Which memory each value lives in.
    alignment : int
        Every offset is a multiple of it.
    blocks : Mapping[MemoryInfo, MemoryBlock]
        By memory: one block each holds all values that live there.
    places : Mapping[Tenant, Place]
        By value and memory; a copied value has a place in each.
    reuses : Mapping[Tenant, Reuse]
        Values that begin in the bytes of another one: in place, or as a view.
    unplanned : tuple of str
        Values without a place, because their size is only known when the graph runs.
    uncounted : tuple of str
        The same in the bodies of nodes, as "node/value": they count as 0 B in the need of the node.

    Examples
    --------
    >>> import gpumem, numpy as np
    >>> from gpumem.planning import GraphBuilder, partition, plan_memory
    >>> builder = GraphBuilder()
    >>> x = builder.input("x", "float32", (3,))
    >>> node = builder.node("Neg", [x], [builder.value("y", "float32", (3,))])
    >>> plan = plan_memory(partition(builder.build(["y"]), ["host"]))
    >>> def kernel(node, reads, writes):
    ...     np.negative(reads[0].numpy(), out=writes[0].numpy())
    >>> plan.run(kernel, {"x": np.ones(3, "float32")}, gpumem.Arena("host"))["y"].numpy()
    array([-1., -1., -1.], dtype=float32)
    """

    def __init__(
        self, copies: CopyPlan, lifetimes: Lifetimes, strategy: str, alignment: int
    ) -> None:
        require("copies", copies, CopyPlan, "a CopyPlan")
        require("lifetimes", lifetimes, Lifetimes, "the Lifetimes of its values")
        self.copies = copies
        self.placement = copies.placement
        self.alignment = alignment
        self.unplanned = tuple(lifetimes.unplanned)
        self.uncounted = tuple(dict.fromkeys(lifetimes.uncounted))
        self.reuses: Mapping[Tenant, Reuse] = dict(lifetimes.reuses)
        self.scratch: Mapping[Node, Value] = dict(lifetimes.scratch)
        self.blocks: dict[MemoryInfo, MemoryBlock] = {}
        self.places: dict[Tenant, Place] = {}
        for memory in dict.fromkeys(storage.memory for storage in lifetimes.storages):
            self._lay_out(memory, lifetimes.storages, strategy)

    def _lay_out(self, memory: MemoryInfo, all_storages: list[Storage], strategy: str) -> None:
        storages = [storage for storage in all_storages if storage.memory == memory]
        blocks = [
            BlockLifetime(rounded(s.nbytes, self.alignment), s.first, s.last) for s in storages
        ]
        layout = assign_offsets(blocks, strategy)
        self.blocks[memory] = MemoryBlock(layout.peak, *busiest(blocks), layout.strategy)
        for storage, offset in zip(storages, layout.offsets, strict=True):
            for tenant in storage.tenants:
                nbytes = tenant.value.nbytes or 0
                self.places[tenant] = Place(memory, offset, nbytes, storage.first, storage.last)

    @property
    def offsets(self) -> dict[str, int]:
        """Bytes from the beginning of its memory's block, by name; of a copied value, at home."""
        homes = self.copies.homes
        return {
            tenant.value.name: place.offset
            for tenant, place in self.places.items()
            if homes.get(tenant.value, tenant.memory) == tenant.memory
        }

    @property
    def peak_bytes(self) -> int:
        """Bytes of all blocks together."""
        return sum(block.peak_bytes for block in self.blocks.values())

    @property
    def lower_bound_bytes(self) -> int:
        """Bytes below which no plan for these lifetimes can go, all memories together."""
        return sum(block.lower_bound_bytes for block in self.blocks.values())

    def verify(self) -> bool:
        """Replay the plan and prove that it holds.

        The replay marks the bytes of each output with the value's name, and requires that the bytes
        of each input still carry its name. It also checks bounds and alignment. It does not use the
        lifetimes that the planner computed.

        Returns
        -------
        bool
            True.

        Raises
        ------
        ModelGraphError
            A value is overwritten before its last use, lies over an input where its operator does
            not allow it, out of bounds or misaligned. The message names it.
        """
        return verify_plan(self)

    def tensors(self, memory: Any, stream: Any = None) -> PlannedTensors:
        """Allocate one block per memory and return tensors at the planned offsets.

        Parameters
        ----------
        memory : MemoryResource, ExternalMemory or Mapping
            An allocator, such as an `Arena`, or imported memory; by memory if there are several.
        stream : Stream, optional
            Stream for which the blocks are allocated, or that tensors in imported memory belong to.

        Raises
        ------
        ConfigError
            A memory of the plan has no source, or its source is of another memory.
        OutOfMemoryError
            The allocator is out of memory.
        OutOfBoundsError
            The imported memory is too small.
        """
        return PlannedTensors(self, memory, stream)

    def run(
        self,
        kernel: Callable[[Node, list[Any], list[Any]], None],
        inputs: Mapping[str, Any],
        memory: Any,
        *,
        weights: Mapping[str, Any] | None = None,
        stream: Any = None,
    ) -> dict[str, Any]:
        """Run the graph once, with every value at its planned offset.

        Parameters
        ----------
        kernel : callable
            Called for each node in the planned order with the node, its inputs, and the Tensors
            for its outputs; None where an optional one is left out. Of a node that declares a
            workspace and holds no graphs, a Tensor of its bytes follows. Not called for nodes that
            return a view. The result of an elementwise operator of ONNX may lie over its first
            input, and that of Add, Sub, Mul and Div over either: the kernel reads the elements at
            an index of both before it writes the result there. Sum, Max, Min and Mean may be
            computed input after input, since no other input is overwritten. ``in_place=False`` of
            `plan_memory` excludes all of this.
        inputs : Mapping
            Arrays or Tensors by name; they are copied to their places.
        memory
            As of `tensors`.
        weights : Mapping, optional
            Weights by name. Those that have places are copied there, as inputs are; the kernel gets
            the others as they are.
        stream : Stream, optional
            Stream of the copies.

        Returns
        -------
        dict
            The outputs as Tensors in the planned memory, by name; they keep the block.

        Raises
        ------
        ModelGraphError
            The plan has values without a place, or an input or a weight is missing.
        """
        return run_plan(self, kernel, inputs, memory, {} if weights is None else weights, stream)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, for JSON."""
        return {
            "alignment": self.alignment,
            "peak_bytes": self.peak_bytes,
            "lower_bound_bytes": self.lower_bound_bytes,
            "memories": {str(memory): vars(block) for memory, block in self.blocks.items()},
            "values": [
                {
                    "name": tenant.value.name,
                    "memory": str(tenant.memory),
                    "offset": place.offset,
                    "nbytes": place.nbytes,
                    "first": place.first,
                    "last": place.last,
                    "reuse": self.reuses[tenant].kind if tenant in self.reuses else None,
                }
                for tenant, place in self.places.items()
            ],
            "unplanned": list(self.unplanned),
            "uncounted": list(self.uncounted),
        }

    def __repr__(self) -> str:
        return (
            f"<gpumem.planning.MemoryPlan of {len(self.places)} values: "
            f"peak {format_size(self.peak_bytes)}, "
            f"lower bound {format_size(self.lower_bound_bytes)}>"
        )


def plan_memory(
    placement: Placement | CopyPlan,
    *,
    strategy: str = "auto",
    alignment: int = 256,
    in_place: InPlace = True,
    weights: bool = False,
    settings: Mapping[str, str] | None = None,
) -> MemoryPlan:
    """Assign an offset to every value of a run.

    Parameters
    ----------
    placement : Placement or CopyPlan
        Result of `partition` or `plan_copies`.
    strategy : str
        How offsets are found: ``"greedy_by_size"``, ``"greedy_by_lifetime"``,
        ``"best_fit_by_time"``, ``"hill_climbing"``, or ``"exact"``, for 16 values in a memory or
        fewer. ``"auto"`` tries several and stops at the first that reaches the lower bound.
    alignment : int
        Bytes; a power of two up to 2**30. Offsets and sizes are rounded up to it.
    in_place : bool, frozenset of str or "onnxruntime"
        Whether a value may use the bytes of an input of its node: elementwise operators over an
        input at its last use, and views. A set names the elementwise operators that do so.
        ``"onnxruntime"``: those that do so in ONNX Runtime, which also keeps inputs for the run.
    weights : bool
        Whether weights have places, too, for the whole run.
    settings : Mapping, optional
        ``session.enable_static_workspace_preallocation``, as proposed for ONNX Runtime, and not in
        its release 1.32: ``"1"``, which is the default here, gives each declared `Node.workspace` a
        place while its node runs; with ``"0"`` the plan has none, and kernels allocate theirs.

    Returns
    -------
    MemoryPlan

    Raises
    ------
    TypeError
        `placement` is neither.
    ConfigError
        An invalid strategy, alignment or `in_place`, or another key or value in `settings`.
    ModelSizeError
        The values have more than 2**62 - 1 bytes together.

    Examples
    --------
    >>> from gpumem.planning import GraphBuilder, partition, plan_memory
    >>> builder = GraphBuilder()
    >>> last = builder.input("x", "float32", (1024,))
    >>> for name in "abcd":
    ...     node = builder.node("Softmax", [last], [builder.value(name, "float32", (1024,))])
    ...     last = name
    >>> plan = plan_memory(partition(builder.build(["d"]), ["host"]))
    >>> plan.peak_bytes, plan.lower_bound_bytes, plan.verify()
    (8192, 8192, True)
    >>> plan.offsets
    {'x': 0, 'a': 4096, 'b': 0, 'c': 4096, 'd': 0}
    """
    accepted = "a Placement, which partition returns, or a CopyPlan"
    require("placement", placement, (Placement, CopyPlan), accepted)
    try:
        alignment = power_of_two("alignment", alignment, MAX_ALIGNMENT, "2**30")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(in_place, bool | frozenset) and in_place != "onnxruntime":
        accepted = 'a bool, a frozenset of operators, or "onnxruntime"'
        raise ConfigError(f"invalid in_place = {in_place!r:.80}: expected {accepted}")
    settings = settings or {}
    require_settings(settings, [PREALLOCATION], "a memory plan")
    workspaces = is_on(settings, PREALLOCATION, default="1")
    copies = placement if isinstance(placement, CopyPlan) else plan_copies(placement)
    with naming_the_largest(copies.placement.graph):
        lifetimes = Lifetimes(
            copies,
            alignment=alignment,
            in_place=in_place,
            weights=weights,
            workspaces=workspaces,
        )
        return MemoryPlan(copies, lifetimes, strategy, alignment)
