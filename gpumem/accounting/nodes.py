"""The attributes of nodes and values that an accountant uses, and walks over nodes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

from gpumem._support.arguments import refuse


class CostedValue(Protocol):
    """A value: hashed by identity, so equal names in two scopes stay two values.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> from gpumem.accounting.nodes import CostedValue
    >>> @dataclass(frozen=True, eq=False)        # hashed by identity
    ... class Weight:
    ...     name: str
    ...     nbytes: int
    ...     is_initializer: bool = True
    >>> value: CostedValue = Weight("w", 4096)
    """

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def nbytes(self) -> int | None:
        """Bytes; None where shape or type is only known when the graph runs."""

    @property
    def is_initializer(self) -> bool:
        """Whether it is a weight, which exists before the graph runs."""


class CostedNode(Protocol):
    """A node; an optional input or output that is left out is None.

    It may also have an attribute `workspace`: the bytes that it needs besides while it runs. None:
    it declares none.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> from gpumem.accounting import unique_node_name
    >>> node = SimpleNamespace(name="relu", op_type="Relu", inputs=[], outputs=[], bodies=[])
    >>> unique_node_name(node)       # anything of this shape will do
    'relu_0'
    """

    @property
    def name(self) -> str:
        """Its name, which may be empty."""

    @property
    def op_type(self) -> str:
        """Its operator."""

    @property
    def inputs(self) -> Sequence[CostedValue | None]:
        """Values that the node reads."""

    @property
    def outputs(self) -> Sequence[CostedValue | None]:
        """Values that the node produces; no other node produces them."""

    @property
    def bodies(self) -> Iterable[Iterable[CostedNode]]:
        """The nodes of each graph in the node, such as the branches of an If."""


NodeOrGroup: TypeAlias = CostedNode | Iterable[CostedNode]


def nodes_of(given: NodeOrGroup) -> list[CostedNode]:
    """Return the nodes of a fused group, or the one node that was given alone."""
    nodes = list(given) if isinstance(given, Iterable) else [given]
    for node in nodes:
        if not hasattr(node, "inputs") or not hasattr(node, "outputs"):
            refuse("node", node, "a node of a graph, or an iterable of them")
    return nodes


class _Identity:
    """A node compared by identity; it keeps the node, so that no other node can have its `id`."""

    __slots__ = ("node",)

    def __init__(self, node: CostedNode) -> None:
        self.node = node

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.node is other.node

    def __hash__(self) -> int:
        return id(self.node)


def key_of(node: CostedNode) -> Hashable:
    """Return a node's identity: the values that it makes, which stay when its inputs change."""
    made = tuple(value for value in node.outputs if value is not None)
    return made or _Identity(node)


def declared_workspace(node: CostedNode) -> int | None:
    """Return the bytes of workspace that a node declares; None if it declares none."""
    return getattr(node, "workspace", None)


def values_read(node: CostedNode) -> Iterator[CostedValue]:
    """Yield the values that a node and the graphs in it read; those of outer graphs included."""
    return (value for inner in _with_inner(node) for value in inner.inputs if value is not None)


def values_made(node: CostedNode) -> Iterator[CostedValue]:
    """Yield the values that a node and the graphs in it make."""
    return (value for inner in _with_inner(node) for value in inner.outputs if value is not None)


def _with_inner(node: CostedNode) -> list[CostedNode]:
    """Return a node and the nodes of the graphs in it, at any depth."""
    found = [node]
    for one in found:
        found += [inner for body in one.bodies for inner in body]
    return found
