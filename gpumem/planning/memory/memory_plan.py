"""Memory plans: an offset for every value, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpumem._support.arguments import require
from gpumem.errors import ConfigError
from gpumem.planning.assignment.copies import CopyPlan, plan_copies
from gpumem.planning.assignment.placement import Placement
from gpumem.planning.graph.graph import Node
from gpumem.planning.memory.lifetimes import Lifetimes
from gpumem.planning.memory.places import Places
from gpumem.planning.memory.running import PlannedTensors, run_plan
from gpumem.planning.memory.verification import verify_plan

__all__ = ["MemoryPlan", "plan_memory"]

MOST_ALIGNMENT = 1 << 30


class MemoryPlan(Places):
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

        Every step writes the names of what it makes over its bytes, and must find the names of what
        it reads whole; nothing leaves its block or its alignment. Lifetimes are not believed.

        Returns
        -------
        bool
            True.

        Raises
        ------
        ModelGraphError
            A value is overwritten while it is needed, or lies where it may not; it says which.
        """
        return verify_plan(self)

    def tensors(self, memory: Any, stream: Any = None) -> PlannedTensors:
        """Take one block per memory and give tensors at the planned offsets.

        Parameters
        ----------
        memory : MemoryResource, ExternalMemory or Mapping
            An allocator, such as an `Arena`, or imported memory; by memory if there are several.
        stream : Stream, optional
            For which the blocks are allocated.

        Raises
        ------
        ConfigError
            No source for a memory of the plan, or one of another memory.
        OutOfMemoryError
            The allocator has no room.
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
            Called for each node in the planned order with the node, what it reads and the Tensors
            that it has to write; None where an optional one is left out. It is not called for nodes
            whose result is a view.
        inputs : Mapping
            Arrays or Tensors by name; they are copied to their places.
        memory
            As of `tensors`.
        weights : Mapping, optional
            What the kernel gets for weights, by name, handed on as it is.
        stream : Stream, optional
            On which copies are made.

        Returns
        -------
        dict
            The outputs as Tensors in the planned memory, by name; they keep the block.

        Raises
        ------
        ModelGraphError
            The plan has values without a place, or an input or a weight is missing.
        """
        return run_plan(self, kernel, inputs, memory, weights or {}, stream)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, for JSON."""
        return {
            "alignment": self.alignment,
            "peak_bytes": self.peak_bytes,
            "lower_bound_bytes": self.lower_bound_bytes,
            "memories": {
                str(memory): {
                    "peak_bytes": block.peak_bytes,
                    "lower_bound_bytes": block.lower_bound_bytes,
                    "strategy": block.strategy,
                }
                for memory, block in self.blocks.items()
            },
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
        }

    def __repr__(self) -> str:
        return (
            f"<gpumem.planning.MemoryPlan of {len(self.places)} values: "
            f"peak {self.peak_bytes} bytes, lower bound {self.lower_bound_bytes}>"
        )


def plan_memory(
    placement: Placement | CopyPlan,
    *,
    strategy: str = "auto",
    alignment: int = 256,
    in_place: bool = True,
    weights: bool = False,
) -> MemoryPlan:
    """Decide where every value of a run lies.

    Parameters
    ----------
    placement : Placement or CopyPlan
        What `partition` or `plan_copies` gave.
    strategy : str
        How offsets are found: ``"greedy_by_size"``, ``"greedy_by_lifetime"``,
        ``"best_fit_by_time"``, ``"hill_climbing"``, or ``"exact"``, for 16 values in a memory or
        fewer. ``"auto"`` tries several and stops at the first that reaches the lower bound.
    alignment : int
        Bytes; a power of two up to 2**30. Offsets and sizes are rounded up to it.
    in_place : bool
        Whether a value may begin in the bytes of one that its node reads: elementwise operators
        over an input that is needed no more, and views.
    weights : bool
        Whether weights have places too, for the whole run. Without, they live elsewhere.

    Returns
    -------
    MemoryPlan

    Raises
    ------
    TypeError
        `placement` is neither.
    ConfigError
        A strategy or an alignment that is not accepted.

    Examples
    --------
    >>> from gpumem.planning import GraphBuilder, partition
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
    accepted = "a Placement, which partition gives, or a CopyPlan"
    require("placement", placement, (Placement, CopyPlan), accepted)
    is_power = isinstance(alignment, int) and alignment > 0 and not alignment & (alignment - 1)
    if isinstance(alignment, bool) or not is_power or alignment > MOST_ALIGNMENT:
        raise ConfigError(f"alignment {alignment!r} is not a power of two from 1 to 2**30")
    copies = placement if isinstance(placement, CopyPlan) else plan_copies(placement)
    lifetimes = Lifetimes(copies, alignment=alignment, in_place=in_place, weights=weights)
    return MemoryPlan(copies, lifetimes, strategy, alignment)
