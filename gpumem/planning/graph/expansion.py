"""Bounds of an ONNX model: how deeply graphs and calls are nested, how far functions expand.

Of functions that each call the next one twice, few are as large as any memory once they are
inlined. ONNX Runtime bounds the nodes and bytes that inlining adds, by two entries of a session's
configuration. The sums are made here before anything is inlined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from gpumem._support.arguments import require_settings
from gpumem.config import GIB, MAX_UNSIGNED, _integer
from gpumem.errors import ModelGraphError

DEFAULTS = {  # those of ONNX Runtime
    "session.function_expansion_node_limit": 1_000_000,
    "session.function_expansion_byte_limit": GIB,
}
MAX_DEPTH = 100  # as onnx bounds calls of functions

# Sums over nodes, over those in their bodies and of the functions that they call, by name: "nodes",
# "bytes", and "copies", the places where a name or an attribute of a call may be copied to. The
# number is the height: the levels of bodies and calls, with that of the nodes.
Sums: TypeAlias = tuple[Counter[str], int]


def require_bounded(model: Any, settings: Mapping[str, object]) -> None:
    """Raise ModelGraphError if graphs are nested too deeply, or functions expand too far."""
    require_settings(settings, DEFAULTS, "a model")
    functions = _Functions(model.functions)
    sums, _ = functions.sums_of(model.graph.node, 0, inlined=False)
    for (key, default), noun in zip(DEFAULTS.items(), ("nodes", "bytes"), strict=True):
        limit = _integer(1, MAX_UNSIGNED)(key, settings.get(key, default))
        if sums[noun] > limit:
            raise ModelGraphError(
                f"functions of the model expand to {sums[noun]} {noun}: "
                f"expected at most {key} = {limit}"
            )


def bodies_of(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the graphs in a node, with their names."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.name, attribute.g
        for number, graph in enumerate(attribute.graphs):
            yield f"{attribute.name}[{number}]", graph


class _Functions:
    """The functions of a model by domain, name and overload, and their sums, once complete."""

    def __init__(self, functions: Iterable[Any]) -> None:
        self._functions = {(one.domain, one.name, one.overload): one for one in functions}
        self._sums: dict[tuple[str, str, str], Sums | None] = {}
        for key in self._functions:
            self._of_function(key, 1)

    def sums_of(self, nodes: Iterable[Any], depth: int, *, inlined: bool) -> Sums:
        """Sum up nodes; those that are not inlined themselves count for their calls alone."""
        _require_depth(depth)
        total, height = Counter[str](), 1
        for node in nodes:
            total["nodes"] += inlined
            total["copies"] += len(node.input) + len(node.output) + len(node.attribute)
            parts = [self.sums_of(g.node, depth + 1, inlined=inlined) for _, g in bodies_of(node)]
            key = (node.domain, node.op_type, node.overload)
            if key in self._functions:
                parts.append(self._of_function(key, depth + 1))
                given = [len(name) for name in (*node.input, *node.output)]
                given += [attribute.ByteSize() for attribute in node.attribute]
                total["bytes"] += max(given, default=0) * parts[-1][0]["copies"]
            for sums, levels in parts:
                total.update(sums)
                height = max(height, levels + 1)
        return total, height

    def _of_function(self, key: tuple[str, str, str], depth: int) -> Sums:
        function = self._functions[key]
        if key not in self._sums:
            self._sums[key] = None
            sums, height = self.sums_of(function.node, depth, inlined=True)
            sums["bytes"] += sum(node.ByteSize() for node in function.node)
            defaults = (attribute.ByteSize() for attribute in function.attribute_proto)
            sums["bytes"] += max(defaults, default=0) * sums["copies"]
            self._sums[key] = sums, height
        found = self._sums[key]
        if found is None:
            raise ModelGraphError(f"function {function.name!r} of the model calls itself")
        _require_depth(depth - 1 + found[1])
        return found


def _require_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ModelGraphError(
            f"the graphs and functions of the model are nested {depth} deep: "
            f"expected at most {MAX_DEPTH}"
        )
