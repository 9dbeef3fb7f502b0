"""What a device can do for a graph, as far as its placement asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gpumem._support.arguments import refuse, require
from gpumem.accounting.settings import device_named
from gpumem.device import Device, MemoryInfo, MemoryKind
from gpumem.planning.graph.graph import ModelGraph, Node

__all__ = ["Target"]

Supports: TypeAlias = Callable[[Node], bool]
Fuse: TypeAlias = Callable[[Sequence[Node]], Iterable[Sequence[Node]]]
Relayout: TypeAlias = Callable[[ModelGraph, Sequence[Node]], ModelGraph]


@dataclass(frozen=True)
class Target:
    """A device that nodes may be placed on.

    Attributes
    ----------
    device : Device
        Also given as its name.
    supports : callable, optional
        Takes a node, tells whether the device can run it. None: it runs everything.
    fuse : callable, optional
        Takes the nodes that the device may get, in order, and gives groups of them that it would
        run as one. A group is placed whole or not at all.
    relayout : callable, optional
        Takes the graph and the nodes that the device got in a first pass; returns the graph with
        layouts changed for them. A node of it that makes the same values is the same node. Costs of
        the first pass hold; what is new is priced in a second pass.
    host_accessible : bool, optional
        Whether the device has memory that the CPU reaches too. None: a CUDA device has.

    Examples
    --------
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
        """What the device and the CPU both reach; None where there is no such memory."""
        if self.device.type == "host":
            return self.memory
        if self.host_accessible is False:
            return None
        return MemoryInfo(self.device, MemoryKind.HOST_ACCESSIBLE)
