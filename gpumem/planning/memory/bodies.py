"""Memory inside a node that holds graphs: the branches of an If, the body of a Loop."""

from __future__ import annotations

from collections.abc import Iterator

from gpumem.planning.graph.graph import ModelGraph, Node
from gpumem.planning.graph.values import Value
from gpumem.planning.memory.offsets import BlockLifetime, assign_offsets

__all__ = ["rounded", "scratch_of"]

ONE_OF = frozenset({"If"})  # operators that run one of their bodies only


def scratch_of(node: Node, alignment: int) -> Value | None:
    """Return a value for what lives inside a node while it runs; None for a node without bodies.

    It holds what the bodies make and are given, of known size, for one iteration.
    """
    if not node.body_graphs:
        return None
    sizes = [_peak_of(body, alignment) for body in node.body_graphs.values()]
    nbytes = max(sizes) if node.op_type in ONE_OF else sum(sizes)
    return Value(f"{node.makes[0].name if node.makes else node.name}/bodies", "uint8", (nbytes,))


def _peak_of(graph: ModelGraph, alignment: int) -> int:
    return assign_offsets(list(_blocks_of(graph, alignment))).peak


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
        inside = scratch_of(node, alignment)
        if inside is not None:
            yield BlockLifetime(rounded(inside.nbytes or 0, alignment), step, step)


def rounded(nbytes: int, alignment: int) -> int:
    """Return the next multiple of an alignment."""
    return -(-nbytes // alignment) * alignment
