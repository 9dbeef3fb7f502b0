"""What a memory plan consists of: where each value lies, and which values share bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpumem.device import MemoryInfo
from gpumem.planning.assignment.copies import CopyPlan
from gpumem.planning.graph.graph import Node
from gpumem.planning.graph.values import Value
from gpumem.planning.memory.bodies import rounded
from gpumem.planning.memory.lifetimes import Lifetimes, Reuse, Storage, Tenant
from gpumem.planning.memory.offsets import BlockLifetime, assign_offsets, lower_bound

__all__ = ["MemoryBlock", "Place", "Places"]


@dataclass(frozen=True)
class Place:
    """Where a value lies.

    Attributes
    ----------
    memory : MemoryInfo
    offset : int
        Bytes from the beginning of the memory's block.
    nbytes : int
        Of the value.
    first, last : int
        Steps between which its bytes are taken, both included, by it or by what shares them.

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
    """What a plan needs of one memory.

    Attributes
    ----------
    peak_bytes : int
        Size of the block.
    lower_bound_bytes : int
        The most bytes that live at one step, each value rounded up to the alignment.
    strategy : str
        What found the offsets.

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
    strategy: str


class Places:
    """Where the values of a run lie; what a `MemoryPlan` is made of."""

    def __init__(
        self, copies: CopyPlan, lifetimes: Lifetimes, strategy: str, alignment: int
    ) -> None:
        self.copies = copies
        self.placement = copies.placement
        self.alignment = alignment
        self.unplanned = tuple(lifetimes.unplanned)
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
        self.blocks[memory] = MemoryBlock(layout.peak, lower_bound(blocks), layout.strategy)
        for storage, offset in zip(storages, layout.offsets, strict=True):
            for tenant in storage.tenants:
                nbytes = tenant.value.nbytes or 0
                self.places[tenant] = Place(memory, offset, nbytes, storage.first, storage.last)
