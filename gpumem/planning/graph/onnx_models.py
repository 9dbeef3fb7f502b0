"""ONNX models, read for `ModelGraph.from_onnx`."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeAlias

from gpumem._support.arguments import require, unknown, whole_number
from gpumem._support.brackets import depth_of
from gpumem._support.files import open_regular
from gpumem.errors import ModelGraphError
from gpumem.planning.graph.expansion import bodies_of, require_bounded
from gpumem.planning.graph.graph import GraphBuilder, ModelGraph
from gpumem.planning.graph.loops import completed

# A tensor's name, dtype and shape; None if the model lacks them.
Described: TypeAlias = tuple[str, Any, Any]


_MAX_BRACKETS = 200  # open at once in a text; protobuf reads 100 nested messages
_MAX_ELEMENTS = 1024  # of a tensor that inference may read, such as a shape
_MAX_PROPAGATED = 1 << 24  # elements: some 100 MiB and seconds
# Messages that hold tensors.
_HOLDERS = ("ModelProto", "GraphProto", "FunctionProto", "NodeProto", "AttributeProto")


def read_model(
    model: Any, dims: Mapping[str, int], settings: Mapping[str, object]
) -> tuple[ModelGraph, str]:
    """Read a model as `ModelGraph.from_onnx` does, with the same errors.

    Returns
    -------
    ModelGraph, str
        The graph, and the reason for which a strict reader refuses the model; empty if none.
    """
    proto = _load(model, settings)
    if not proto.HasField("graph"):
        raise ModelGraphError(f"{_named(model)} is not an ONNX model: it holds no graph")
    _bind(proto.graph, dims)
    _import_domains(proto)
    proto = _inlined(proto)
    _tidy(proto.graph)
    data_prop = _vectors_of(proto) <= _MAX_PROPAGATED
    infer = functools.partial(_inferred, data_prop=data_prop)
    _correct(proto, infer)
    nodes = (node for graph in _graphs_of(proto.graph) for node in graph.node)
    has_loops = any(node.op_type == "Loop" for node in nodes)
    inferred = completed(proto, infer) if has_loops else infer(proto)
    return _graph(inferred, None), _trouble(proto, data_prop)


def _load(model: Any, settings: Mapping[str, object]) -> Any:
    try:
        import onnx
        from onnx import serialization
    except ImportError as error:
        if isinstance(model, str | os.PathLike):
            with open_regular(model):  # a missing file is reported before a missing package
                pass
        raise ImportError("reading ONNX models needs the package onnx: pip install onnx") from error
    if isinstance(model, onnx.ModelProto):
        require_bounded(model, settings)
        return _without_weights(model)
    require("model", model, (str, os.PathLike, bytes), "a path, bytes or an onnx.ModelProto")
    kind = None
    try:
        if isinstance(model, bytes):
            data = model
        else:
            with open_regular(model) as file:
                data = file.read()
            kind = serialization.registry.get_format_from_file_extension(os.path.splitext(model)[1])
        depth = 0 if kind in (None, "protobuf") else depth_of(data.decode("utf-8", "replace"))
        if depth > _MAX_BRACKETS:
            raise ModelGraphError(f"it is nested {depth} deep, expected at most {_MAX_BRACKETS}")
        proto = onnx.load_model_from_string(data, kind or "protobuf")
    except OSError:
        raise
    except Exception as error:  # the readers of binary, text and JSON raise errors of several bases
        raise ModelGraphError(f"{_named(model)} is not an ONNX model: {error}") from error
    require_bounded(proto, settings)
    try:
        return _without_weights(proto)
    except UnicodeDecodeError as error:
        raise ModelGraphError(f"the model is malformed: {error}") from None


def _without_weights(message: Any) -> Any:
    """Copy a model, or a part, without the elements of large tensors.

    Inference does not read them, and a message above 2 GiB cannot be passed to it.
    """
    import onnx

    copied = type(message)()
    if isinstance(message, onnx.TensorProto) and math.prod(message.dims) > _MAX_ELEMENTS:
        copied.name, copied.data_type = message.name, message.data_type
        copied.dims.extend(message.dims)
        copied.data_location = onnx.TensorProto.EXTERNAL
        return copied
    if type(message).__name__ not in _HOLDERS:
        copied.CopyFrom(message)
        return copied
    for field, value in message.ListFields():
        if field.message_type is None:
            scalar = isinstance(value, (int, float, str, bytes))
            part = type(message)(**{field.name: value if scalar else list(value)})
        elif hasattr(value, "ListFields"):
            part = type(message)(**{field.name: _without_weights(value)})
        else:
            part = type(message)(**{field.name: [_without_weights(each) for each in value]})
        copied.MergeFrom(part)
    return copied


def _named(model: object) -> str:
    return repr(os.fspath(model)) if isinstance(model, str | os.PathLike) else "the model"


def _import_domains(proto: Any) -> None:
    """Write ONNX's domain in one way, and import the domains of nodes that the model lacks."""
    import onnx

    latest = {"": onnx.defs.onnx_opset_version(), "ai.onnx.ml": onnx.defs.onnx_ml_opset_version()}
    for part in (proto, *proto.functions):
        nodes = [node for graph in _graphs_of(getattr(part, "graph", part)) for node in graph.node]
        for named in (*nodes, *part.opset_import):
            if named.domain == "ai.onnx":
                named.domain = ""
        lacking = {node.domain for node in nodes} - {one.domain for one in part.opset_import}
        for domain in sorted(lacking):
            part.opset_import.add(domain=domain, version=latest.get(domain, 1))


def _inlined(proto: Any) -> Any:
    """Return the model with its functions inlined."""
    import onnx.inliner

    if not proto.functions:
        return proto
    try:
        return onnx.inliner.inline_local_functions(proto)
    except Exception as error:  # its C++ raises errors of several bases
        raise ModelGraphError(f"the model is malformed: {error}") from error


def _tidy(graph: Any) -> set[str]:
    """Bring a graph, and those in its nodes, into the form of the specification.

    ONNX Runtime accepts nodes in any order, lengths of -1, which are not known, and bodies that
    list their weights among their inputs. Nodes are sorted into its order.

    Returns
    -------
    set of str
        The names that are read and belong to outer graphs.
    """
    for info in (*graph.input, *graph.output, *graph.value_info):
        for dim in _dims_of(info):
            if dim.dim_value < 0:
                dim.Clear()
    makers = {name: number for number, node in enumerate(graph.node) for name in node.output}
    needs: dict[int, list[int]] = {}
    outer: set[str] = set()
    for number, node in enumerate(graph.node):
        reads = {name for name in node.input if name}
        for _, body in bodies_of(node):
            weights = {tensor.name for tensor in body.initializer}
            inputs = [info for info in body.input if info.name not in weights]
            if len(inputs) < len(body.input):
                del body.input[:]
                body.input.extend(inputs)
            reads |= _tidy(body)
        needs[number] = sorted({makers[name] for name in reads if name in makers})
        outer.update(name for name in reads if name not in makers)
    try:
        order = _order_of_runtime(needs)
    except CycleError as error:
        names = ", ".join(repr(graph.node[n].name or graph.node[n].op_type) for n in error.args[1])
        raise ModelGraphError(f"nodes read each other's outputs: {names}") from None
    places = {name: at for at, number in enumerate(order) for name in graph.node[number].output}
    graph.node.sort(key=lambda node: places.get(next(filter(None, node.output), ""), 0))
    known = {info.name for info in graph.input} | {tensor.name for tensor in graph.initializer}
    return outer - known


def _order_of_runtime(needs: Mapping[int, Sequence[int]]) -> list[int]:
    """Return nodes in the order in which ONNX Runtime runs them, by the nodes that each needs.

    It walks depth first to the makers of inputs, from the last node without readers.

    Raises
    ------
    CycleError
        Nodes that need each other.
    """
    read = set(itertools.chain.from_iterable(needs.values()))
    left = [(number, False) for number in needs if number not in read]
    entered: set[int] = set()
    order: list[int] = []
    while left:
        number, is_ready = left.pop()
        if is_ready:
            order.append(number)
        elif number not in entered:
            entered.add(number)
            left += [(number, True), *((before, False) for before in needs[number])]
    at = {number: place for place, number in enumerate(order)}
    if len(at) < len(needs) or any(at[n] >= at[number] for number in order for n in needs[number]):
        TopologicalSorter(needs).prepare()  # it names the nodes of a cycle
    return order


def _correct(proto: Any, infer: Callable[[Any], Any]) -> None:
    """Replace shapes of nodes' outputs that contradict the operators, as ONNX Runtime does."""
    bare = type(proto)()
    bare.CopyFrom(proto)
    for graph in _graphs_of(bare.graph):
        for info in (*graph.output, *graph.value_info):
            if info.type.HasField("tensor_type"):
                info.type.tensor_type.ClearField("shape")
    pairs = zip(_graphs_of(proto.graph), _graphs_of(infer(bare)), strict=True)
    for graph, inferred in pairs:
        found = {info.name: info for info in (*inferred.output, *inferred.value_info)}
        for info in (*graph.output, *graph.value_info):
            other = found.get(info.name, info)
            if _contradict(_value_of(info)[2], _value_of(other)[2]):
                info.type.tensor_type.shape.CopyFrom(other.type.tensor_type.shape)


def _graphs_of(graph: Any) -> Iterator[Any]:
    """Yield a graph, and those in its nodes."""
    yield graph
    for node in graph.node:
        for _, body in bodies_of(node):
            yield from _graphs_of(body)


def _contradict(declared: list[Any] | None, found: list[Any] | None) -> bool:
    if declared is None or found is None:
        return False
    lengths = zip(declared, found, strict=False)
    return len(declared) != len(found) or any(
        isinstance(a, int) and isinstance(b, int) and a != b for a, b in lengths
    )


def _vectors_of(proto: Any) -> int:
    """Return the elements of all vectors, of which onnx would propagate each by itself."""
    graphs = _graphs_of(_inferred(proto, data_prop=False))
    infos = (info for each in graphs for info in (*each.input, *each.output, *each.value_info))
    vectors = (dims[0] for info in infos if len(dims := _dims_of(info)) == 1)
    return sum(dim.dim_value for dim in vectors)


def _inferred(proto: Any, *, data_prop: bool) -> Any:
    """Return the graph with the shapes that can be inferred."""
    import onnx

    try:
        return onnx.shape_inference.infer_shapes(proto, data_prop=data_prop).graph
    except Exception as error:
        raise ModelGraphError(f"the model is malformed: {error}") from error


# ---- checks of a strict reader -------------------------------------------------------------------


def _trouble(proto: Any, data_prop: bool) -> str:
    """Return the first error in nodes, shapes or types; empty without one."""
    import onnx

    versions = {one.domain: one.version for one in proto.opset_import}
    try:
        _check_nodes(proto.graph, versions)
        onnx.shape_inference.infer_shapes(
            proto, check_type=True, strict_mode=True, data_prop=data_prop
        )
    except Exception as error:
        # onnx's definition of MeanVarianceNormalization without axes has a Constant without value.
        lines = [line for line in str(error).splitlines() if "for a Constant node" not in line]
        return f"the model is malformed: {error}" if any(map(str.strip, lines)) else ""
    return ""


def _check_nodes(graph: Any, versions: Mapping[str, int]) -> None:
    """Check operators, attributes and numbers of inputs and outputs, in the bodies of nodes too.

    Unlike ONNX's checker it accepts models without shapes of outputs, and without the files of
    weights.
    """
    import onnx

    for node in graph.node:
        try:
            schema = onnx.defs.get_schema(node.op_type, versions.get(node.domain, 1), node.domain)
        except onnx.defs.SchemaError:
            if node.domain in ("", "ai.onnx.ml"):
                raise
            continue  # an operator of another domain has no schema
        given = {attribute.name for attribute in node.attribute}
        lacking = {name for name, found in schema.attributes.items() if found.required} - given
        problem = f"without {', '.join(sorted(lacking))}" if lacking else ""
        for what, count, least, most in (
            ("inputs", len(node.input), schema.min_input, schema.max_input),
            ("outputs", len(node.output), schema.min_output, schema.max_output),
        ):
            if not least <= count <= most:
                problem = f"of {count} {what}, where {least} to {most} are accepted"
        if problem:
            raise ModelGraphError(f"node {node.name!r} is a {node.op_type} {problem}")
        for _, body in bodies_of(node):
            _check_nodes(body, versions)


def _bind(graph: Any, dims: Mapping[str, int]) -> None:
    """Set the lengths of named dimensions, in inputs, outputs and inferred values."""
    require("dims", dims, Mapping, "a Mapping of names to lengths")
    for name, length in dims.items():
        number = whole_number(length)
        if number is None or not 0 <= number < 1 << 63:
            raise ModelGraphError(
                f"length {length!r} of {name!r} is not an integer from 0 to 2**63 - 1"
            )
    named = dict.fromkeys(dim.dim_param for info in graph.input for dim in _dims_of(info))
    named.pop("", None)
    for name in sorted(dims.keys() - named):
        if named:
            raise ModelGraphError(unknown("dimension", name, "the model", map(str, named)))
        raise ModelGraphError(f"unknown dimension {name!r}: no input of the model has a named one")
    for info in (*graph.input, *graph.output, *graph.value_info):
        for dim in _dims_of(info):
            if dim.dim_param in dims:
                dim.dim_value = dims[dim.dim_param]


def _dims_of(info: Any) -> Sequence[Any]:
    return info.type.tensor_type.shape.dim if info.type.HasField("tensor_type") else ()


# ---- graphs, values, nodes -----------------------------------------------------------------------


def _graph(proto: Any, outer: GraphBuilder | None) -> ModelGraph:
    for text in _texts_of(proto):
        if not isinstance(text, str):  # protobuf returns bytes for a text that is not UTF-8
            raise ModelGraphError(f"the model is malformed: {text!r:.60} is not UTF-8")
    builder = GraphBuilder(proto.name, outer=outer)
    weights = {builder.initializer(*weight).name for weight in _weights_of(proto)}
    for info in proto.input:
        if info.name not in weights:
            builder.input(*_value_of(info))
    made = {name for node in proto.node for name in node.output} - weights
    infos = {info.name: info for info in (*proto.value_info, *proto.output)}
    for name, info in infos.items():
        if name in made:
            builder.value(*_value_of(info))
    for node in proto.node:
        if not _is_constant(node):
            metadata = {one.key: one.value for one in node.metadata_props}
            workspace = metadata.get("gpumem.workspace")
            if workspace is not None and not workspace.isdecimal():
                text = f"node {node.name!r} has the metadata gpumem.workspace = {workspace!r:.80}"
                raise ModelGraphError(f"{text}: expected its bytes")
            builder.node(
                node.op_type,
                [name or None for name in node.input],
                [name or None for name in node.output],
                name=node.name,
                domain=node.domain,
                bodies={key: _graph(body, builder) for key, body in bodies_of(node)},
                layer_ann=metadata.get("layer_ann", ""),
                workspace=None if workspace is None else int(workspace),
            )
    return builder.build([info.name for info in proto.output])


def _texts_of(graph: Any) -> Iterator[Any]:
    """Yield the names in a graph, without those in bodies of its nodes."""
    infos = (*graph.input, *graph.output, *graph.value_info)
    weights = (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer))
    yield from (one.name for one in (graph, *infos, *weights, *graph.node))
    yield from (dim.dim_param for info in infos for dim in _dims_of(info))
    for node in graph.node:
        yield from (node.op_type, node.domain, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)
        yield from (one.value for one in node.metadata_props)


def _value_of(info: Any) -> Described:
    tensor = info.type.tensor_type
    if not info.type.HasField("tensor_type"):
        # A sequence, map or optional: sizes are only known when it runs.
        return (info.name, None, None)
    shape = [_length_of(dim) for dim in tensor.shape.dim] if tensor.HasField("shape") else None
    return (info.name, _dtype_of(tensor.elem_type, info.name), shape)


def _length_of(dim: Any) -> int | str | None:
    if dim.HasField("dim_value"):
        return int(dim.dim_value) if dim.dim_value >= 0 else None
    return str(dim.dim_param) or None


def _dtype_of(element: int, name: str) -> Any:
    import onnx

    if element == onnx.TensorProto.UNDEFINED:
        return None
    try:
        return onnx.helper.tensor_dtype_to_np_dtype(element)
    except KeyError:
        raise ModelGraphError(
            f"value {name!r} has elements of the unknown type {element}"
        ) from None


def _weights_of(graph: Any) -> Iterator[Described]:
    """Yield the weights of a graph, constants included."""
    for tensor in graph.initializer:
        yield _weight(tensor.name, tensor)
    for tensor in graph.sparse_initializer:
        # Its dense size counts: kernels read a dense tensor.
        yield _weight(tensor.values.name, tensor.values, tensor.dims)
    for node in graph.node:
        if _is_constant(node):
            yield _constant(node)


def _weight(name: str, tensor: Any, dims: Iterable[int] | None = None) -> Described:
    shape = list(tensor.dims if dims is None else dims)
    return (name, _dtype_of(tensor.data_type, name), shape)


def _is_constant(node: Any) -> bool:
    return node.op_type == "Constant" and not node.domain


def _constant(node: Any) -> Described:
    if len(node.output) != 1 or len(node.attribute) != 1:
        raise ModelGraphError(f"constant {node.name!r} must have exactly one output and one value")
    name, attribute = node.output[0], node.attribute[0]
    plain: dict[str, tuple[Any, list[int | str | None]]] = {
        "value_float": ("float32", []),
        "value_floats": ("float32", [len(attribute.floats)]),
        "value_int": ("int64", []),
        "value_ints": ("int64", [len(attribute.ints)]),
        "value_string": (object, []),
        "value_strings": (object, [len(attribute.strings)]),
    }
    if attribute.name in plain:
        dtype, shape = plain[attribute.name]
        return (name, dtype, shape)
    if attribute.name == "value":
        return _weight(name, attribute.t)
    if attribute.name == "sparse_value":
        tensor = attribute.sparse_tensor
        return _weight(name, tensor.values, tensor.dims)
    raise ModelGraphError(f"constant {name!r} has the unknown attribute {attribute.name!r}")
