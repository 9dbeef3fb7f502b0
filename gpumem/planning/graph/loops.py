"""Shapes around Loops of an ONNX model, which onnx's inference leaves open.

A carried value keeps the shape of its first value if the body, given that shape, returns it. A
stacked output has a slice for each iteration; their number is known if the trip count is a constant
and the condition always holds.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from gpumem.planning.graph.expansion import MAX_DEPTH, bodies_of

# Operators that return the elements of their first input.
_PASSING = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"})

Scope: TypeAlias = ChainMap[str, Any]  # by name: descriptions, or makers, of a graph and around it
# Of an output of a Loop: its place in the model, the descriptions that lack its shape, the shape
# that they would have, and the one that the body returns.
Output: TypeAlias = tuple[tuple[object, ...], list[Any], list[int] | None, list[int] | None]


def completed(proto: Any, infer: Callable[[Any], Any]) -> Any:
    """Return the inferred graph of a model, with the shapes of its Loops' values.

    Shapes are assumed first, and inferred with; the search begins anew without those that a body
    does not return.
    """
    refuted: set[tuple[object, ...]] = set()
    while True:
        trial = type(proto)()
        trial.CopyFrom(proto)
        assumed: dict[tuple[object, ...], list[int]] = {}
        is_new = True
        while is_new:
            trial.graph.CopyFrom(infer(trial))
            outputs = list(_outputs(trial.graph, ChainMap(), ChainMap(), ()))
            is_new = False
            for key, infos, wanted, _ in outputs:
                if infos and wanted is not None and key not in assumed and key not in refuted:
                    assumed[key], is_new = wanted, True
                    for info in infos:
                        del info.type.tensor_type.shape.dim[:]
                        for length in wanted:
                            info.type.tensor_type.shape.dim.add().dim_value = length
        wrong = {key for key, *_, found in outputs if assumed.get(key, found) != found}
        if not wrong:
            return trial.graph
        refuted |= wrong


def _outputs(
    graph: Any, known: Scope, makers: Scope, place: tuple[object, ...]
) -> Iterator[Output]:
    """Yield the outputs of the Loops of a graph, and of those in its nodes."""
    described = (*graph.value_info, *graph.output, *graph.input, *graph.initializer)
    known = known.new_child({info.name: info for info in described})
    makers = makers.new_child(_makers_of(graph))
    for number, node in enumerate(graph.node):
        for name, body in bodies_of(node):
            here = (*place, number, name)
            carried = min(len(node.input), len(body.input)) - 2
            is_loop = node.op_type == "Loop" and carried >= 0 and len(body.output) > 0
            trips = _trips(node, body, makers) if is_loop else None
            results = zip(node.output, body.output[1:], strict=False) if is_loop else ()
            for i, (output, result) in enumerate(results):
                infos = [known[output]] if output in known else []
                returned = _shape_of(result)
                wanted = None if trips is None or returned is None else [trips, *returned]
                if i < carried:
                    wanted = _shape_of(known.get(node.input[2 + i]))
                    infos.append(body.input[2 + i])
                else:
                    returned = wanted
                tensors = (info for info in infos if info.type.HasField("tensor_type"))
                lacking = [info for info in tensors if _shape_of(info) is None]
                yield (*here, i), lacking, wanted, returned
            yield from _outputs(body, known, makers, here)


def _shape_of(info: Any) -> list[int] | None:
    """Return the shape of a described value or a weight; None unless all lengths are known."""
    if hasattr(info, "dims"):
        return list(info.dims)
    if info is None or not info.type.tensor_type.HasField("shape"):
        return None
    dims = info.type.tensor_type.shape.dim
    return [dim.dim_value for dim in dims] if all(d.HasField("dim_value") for d in dims) else None


# ---- the number of iterations --------------------------------------------------------------------


def _trips(node: Any, body: Any, makers: Scope) -> int | None:
    """Return the iterations of a Loop; None unless they are known."""
    inner = makers.new_child(_makers_of(body))
    condition = node.input[1] == "" or _origin(node.input[1], makers) == 1
    stays = _origin(body.output[0].name, inner) in (True, body.input[1].name)
    trips = _origin(node.input[0], makers)
    return max(0, trips) if condition and stays and isinstance(trips, int) else None


def _makers_of(graph: Any) -> dict[str, Any]:
    """Return the node or the weight of each name of a graph; None for inputs."""
    makers = {info.name: None for info in graph.input}
    makers |= {tensor.name: tensor for tensor in graph.initializer}
    return makers | {name: node for node in graph.node for name in node.output}


def _origin(name: str, makers: Scope) -> Any:
    """Return the element of a constant with one; for others the name where the elements began."""
    from onnx import TensorProto, numpy_helper

    maker: Any = makers.get(name)
    for _ in range(MAX_DEPTH):
        if getattr(maker, "op_type", "") not in _PASSING or not maker.input:
            break
        name = maker.input[0]
        maker = makers.get(name)
    if getattr(maker, "op_type", "") == "Constant" and len(maker.attribute) == 1:
        attribute = maker.attribute[0]
        if attribute.name == "value_int":
            return attribute.i
        maker = attribute.t
    is_scalar = isinstance(maker, TensorProto) and math.prod(maker.dims) == 1
    if not is_scalar or maker.data_location == TensorProto.EXTERNAL:
        return name
    try:
        return numpy_helper.to_array(maker).item()
    except (TypeError, ValueError):  # a malformed tensor
        return name
