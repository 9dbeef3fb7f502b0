"""Graphs of a model: values, and the nodes that make and read them.

A graph is checked when it is made and does not change. `ModelGraph.from_onnx` reads a model,
`GraphBuilder` makes a graph by hand.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import numpy as np

from gpumem._support.arguments import is_integer, require, require_each
from gpumem._support.texts import shown
from gpumem._tensor.layout import dtype_from
from gpumem.accounting.nodes import values_made
from gpumem.errors import ModelGraphError, ModelSizeError

if TYPE_CHECKING:
    import numpy.typing as npt


# ---- values --------------------------------------------------------------------------------------


Shape: TypeAlias = tuple[int | str | None, ...]


class _Immutable:
    """Has attributes that are set once, in `__init__`."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, name):
            raise AttributeError(f"{name} of {self!r} cannot be changed")
        object.__setattr__(self, name, value)


@final
class Value(_Immutable):
    """A tensor in a graph. Compared by identity: equal names in two bodies are two values.

    Parameters
    ----------
    name : str
        Not empty.
    dtype : dtype, optional
        Type of the elements, as `gpumem.empty` takes it; None if it is unknown or the value is not
        a tensor. 2- and 4-bit elements occupy a byte each, as in NumPy.
    shape : sequence of int, str or None, optional
        Lengths; a name or None for a length that is only known when the graph runs. None: the
        number of dimensions is unknown.
    is_initializer : bool
        Whether it is a weight, which exists before the graph runs.

    Raises
    ------
    ModelGraphError
        An empty name, a shape that is not a sequence, a negative length, or a weight of
        unknown size.
    TypeError
        `dtype` is not one.

    Examples
    --------
    >>> from gpumem.planning import Value
    >>> Value("x", "float32", (2, 3)).nbytes, Value("y", "float32", ("batch", 3)).nbytes
    (24, None)
    """

    __slots__ = ("dtype", "is_initializer", "name", "shape")

    def __init__(
        self,
        name: str,
        dtype: npt.DTypeLike | None = None,
        shape: Sequence[int | str | None] | None = None,
        *,
        is_initializer: bool = False,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ModelGraphError(f"invalid name of a value {name!r}: expected a string, not empty")
        self.name: Final = name
        self.dtype: Final[np.dtype[Any] | None] = None if dtype is None else dtype_from(dtype)
        if shape is not None and (isinstance(shape, str) or not isinstance(shape, Iterable)):
            raise ModelGraphError(
                f"shape {shape!r:.80} of {name!r} is not a sequence of lengths, or None"
            )
        lengths = None if shape is None else tuple(_length(name, one) for one in shape)
        self.shape: Final[Shape | None] = lengths
        self.is_initializer: Final = is_initializer
        if is_initializer and self.nbytes is None and self.dtype != np.dtype(object):
            raise ModelGraphError(f"weight {name!r} has no known size: {self!r}")

    @property
    def nbytes(self) -> int | None:
        """Bytes; None where they are only known when the graph runs, and for strings."""
        if self.dtype is None or self.dtype.hasobject or self.shape is None:
            return None
        lengths = [length for length in self.shape if isinstance(length, int)]
        if len(lengths) < len(self.shape):
            return None
        return math.prod(lengths) * self.dtype.itemsize

    def __repr__(self) -> str:
        shape = (
            "?"
            if self.shape is None
            else "x".join(str("?" if n is None else n) for n in self.shape)
        )
        kind = "weight " if self.is_initializer else ""
        return f"Value({kind}{self.name}: {self.dtype or '?'}[{shape}])"


def _length(name: str, length: object) -> int | str | None:
    if length is None or isinstance(length, str):
        return length or None
    if isinstance(length, bool) or not hasattr(type(length), "__index__"):
        raise ModelGraphError(f"length {length!r} of {name!r} is not an integer, a name or None")
    number = operator.index(length)  # type: ignore[arg-type]
    if number < 0:
        raise ModelGraphError(f"length {number} of {name!r} is negative")
    return number


# ---- nodes and graphs ----------------------------------------------------------------------------


@final
class Node(_Immutable):
    """One operation. Compared by identity.

    Parameters
    ----------
    op_type : str
        The operator.
    inputs, outputs : sequence of Value or None
        None for an optional one that is left out.
    name : str
        May be empty.
    domain : str
        Domain of the operator; empty for ONNX's own operators.
    bodies : Mapping[str, ModelGraph], optional
        Graphs in the node, by attribute, such as the branches of an If.
    layer_ann : str
        Its layer, to which settings of `partition` refer; of ONNX nodes the metadata of this name.
    workspace : int, optional
        Bytes that it needs besides its inputs and outputs while it runs; None if it declares none.
        Of ONNX nodes the metadata ``gpumem.workspace``.

    Attributes
    ----------
    reads : tuple of Value
        Its inputs, and the outer values that its bodies read; each once.
    makes : tuple of Value
        Its outputs, without those left out.
    bodies : tuple of tuple of Node
        The nodes of each graph in the node.

    Examples
    --------
    >>> from gpumem.planning import Node, Value
    >>> x, y = Value("x", "float32", (4,)), Value("y", "float32", (4,))
    >>> node = Node("Clip", [x, None, None], [y], name="clip")       # its bounds are left out
    >>> node.inputs[1:], [value.name for value in node.reads]
    ((None, None), ['x'])
    """

    __slots__ = (
        "_body_graphs", "bodies", "domain", "inputs", "layer_ann", "makes", "name", "op_type",
        "outputs", "reads", "workspace",
    )  # fmt: skip

    def __init__(
        self,
        op_type: str,
        inputs: Sequence[Value | None],
        outputs: Sequence[Value | None],
        *,
        name: str = "",
        domain: str = "",
        bodies: Mapping[str, ModelGraph] | None = None,
        layer_ann: str = "",
        workspace: int | None = None,
    ) -> None:
        if not isinstance(op_type, str) or not op_type:
            raise ModelGraphError(
                f"invalid operator of a node {op_type!r}: expected a string, not empty"
            )
        self.op_type: Final = op_type
        kinds = (Value, type(None))
        self.inputs: Final = require_each("inputs", inputs, kinds, "a Value or None")
        self.outputs: Final = require_each("outputs", outputs, kinds, "a Value or None")
        require("bodies", bodies, (Mapping, type(None)), "a Mapping or None")
        require_each("bodies", (bodies or {}).values(), ModelGraph, "a ModelGraph")
        self.name: Final = name
        self.domain: Final = domain
        self.layer_ann: Final = layer_ann
        if workspace is not None and not is_integer(workspace, 0, (1 << 63) - 1):
            raise ModelGraphError(
                f"invalid workspace {workspace!r:.80} of a {op_type}: expected bytes from 0 to "
                "2**63 - 1, or None"
            )
        self.workspace: Final = workspace
        self._body_graphs = dict(bodies or {})
        self.bodies: Final = tuple(graph.nodes for graph in self._body_graphs.values())
        outer = (value for graph in self._body_graphs.values() for value in graph.captures)
        self.reads: Final = tuple(dict.fromkeys([*filter(None, self.inputs), *outer]))
        self.makes: Final = tuple(filter(None, self.outputs))

    @property
    def body_graphs(self) -> Mapping[str, ModelGraph]:
        """Graphs in the node, by attribute."""
        return dict(self._body_graphs)

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"Node({self.op_type}{name} -> {', '.join(v.name for v in self.makes)})"


@final
class ModelGraph(_Immutable):
    """Nodes in the order in which they run, and the values between them.

    Parameters
    ----------
    nodes : iterable of Node
    inputs : iterable of Value
        Inputs of a run, without weights.
    outputs : iterable of Value
        Results of a run.
    name : str
    captures : iterable of Value
        For the body of a node: the values of outer graphs that it reads.

    Raises
    ------
    ModelGraphError
        A value is made twice, or read before it is made, or an output is never made; two values
        have one name.

    Examples
    --------
    >>> from gpumem.planning import ModelGraph, Node, Value
    >>> x, y = Value("x", "float32", (4,)), Value("y", "float32", (4,))
    >>> graph = ModelGraph([Node("Relu", [x], [y])], inputs=[x], outputs=[y])
    >>> graph, graph.producer(y), graph.consumers(x)
    (<gpumem.planning.ModelGraph of 1 node, 2 values>, Node(Relu -> y), (Node(Relu -> y),))
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        *,
        inputs: Iterable[Value],
        outputs: Iterable[Value],
        name: str = "",
        captures: Iterable[Value] = (),
    ) -> None:
        self.name: Final = name
        self.nodes: Final = require_each("nodes", nodes, Node, "a Node")
        self.inputs: Final = require_each("inputs", inputs, Value, "a Value")
        self.outputs: Final = require_each("outputs", outputs, Value, "a Value")
        self.captures: Final = require_each("captures", captures, Value, "a Value")
        self._values: dict[str, Value] = {}
        self._producers: dict[Value, Node] = {}
        self._consumers: dict[Value, list[Node]] = {}
        self._check()

    def _check(self) -> None:
        for value in (*self.captures, *self.inputs):
            self._enter(value, "another input of the graph")
        for node in self.nodes:
            for value in node.reads:
                self._read(value, node)
                self._consumers.setdefault(value, []).append(node)
            for value in node.makes:
                self._enter(value, node)
                self._producers[value] = node
        for value in self.outputs:
            self._read(value, "an output of the graph is")

    def _enter(self, value: Value, source: Node | str) -> None:
        if value.name in self._values:
            raise ModelGraphError(f"value {value.name!r} is already defined; {source} redefines it")
        self._values[value.name] = value

    def _read(self, value: Value, use: Node | str) -> None:
        known = self._values.get(value.name)
        if known is value:
            return
        if known is not None:
            raise ModelGraphError(f"two values are named {value.name!r}: {known!r}, {value!r}")
        if not value.is_initializer:
            text = use if isinstance(use, str) else f"{use!r} reads"
            raise ModelGraphError(f"{text} value {value.name!r}, which nothing before makes")
        self._values[value.name] = value

    @property
    def initializers(self) -> tuple[Value, ...]:
        """The weights that nodes read."""
        return tuple(value for value in self._values.values() if value.is_initializer)

    @property
    def values(self) -> Mapping[str, Value]:
        """All values by name, without those inside bodies."""
        return dict(self._values)

    def producer(self, value: Value) -> Node | None:
        """Return the node that makes a value; None for inputs and weights."""
        return self._producers.get(value)

    def consumers(self, value: Value) -> tuple[Node, ...]:
        """Return the nodes that read a value, themselves or in their bodies."""
        return tuple(self._consumers.get(value, ()))

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def __repr__(self) -> str:
        nodes, values = len(self.nodes), len(self._values)
        plural = "" if nodes == 1 else "s"
        return f"<gpumem.planning.ModelGraph of {nodes} node{plural}, {values} values>"

    @classmethod
    def from_onnx(
        cls,
        model: str | os.PathLike[str] | Any,
        *,
        dims: Mapping[str, int] | None = None,
        strict: bool = True,
        settings: Mapping[str, object] | None = None,
    ) -> ModelGraph:
        """Read an ONNX model.

        Shapes are inferred; weights in files next to the model are not loaded. ``Constant`` nodes
        become weights, functions of the model are inlined, bodies of If, Loop and Scan are read.
        As in ONNX Runtime, nodes can be in any order, a negative length is unknown, a domain that
        is not imported has its latest version, and a shape that contradicts the operators is
        replaced by theirs. Nodes are in its order. Elements of
        large weights are not copied, so a ModelProto may be larger than 2 GiB. Needs the package
        ``onnx`` (``pip install onnx``).

        Parameters
        ----------
        model : path, bytes or onnx.ModelProto
            The model; a ModelProto is not changed.
        dims : Mapping, optional
            Lengths for dimensions that the model names, such as ``{"batch": 8}``.
        strict : bool, optional
            Refuse unknown operators of ONNX's own domains, nodes without a required attribute or
            with too many inputs or with inputs of incompatible shapes, and types that contradict
            the inferred ones. False: outputs of such nodes are as the model declares them, or
            unknown, and only models without a valid graph are refused.
        settings : Mapping, optional
            ONNX Runtime's bounds of inlining, from 1, as numbers or texts:
            ``session.function_expansion_node_limit``, of the nodes that functions expand to, by
            default 1,000,000, and ``session.function_expansion_byte_limit``, of their bytes, by
            default 2**30. Both are ONNX Runtime's defaults. The bytes are an estimate.

        Raises
        ------
        ModelGraphError
            Not an ONNX model, or a malformed one; `dims` has a name that the model's inputs lack;
            functions expand beyond `settings`, call themselves, or are nested with graphs in nodes
            more than 100 deep.
        ConfigError
            `settings` has another key, or a value out of range.
        OSError
            The file cannot be read.
        ImportError
            The package ``onnx`` is not installed.
        """
        from gpumem.planning.graph.onnx_models import read_model

        graph, trouble = read_model(model, {} if dims is None else dims, settings or {})
        if strict and trouble:
            raise ModelGraphError(trouble)
        return graph


@contextmanager
def naming_the_largest(graph: ModelGraph) -> Iterator[None]:
    """Turn the OverflowError of a sum of bytes into an error that names the largest value."""
    try:
        yield
    except OverflowError as error:
        values = {*graph.values.values(), *(value for node in graph for value in values_made(node))}
        largest = max(values, key=lambda value: value.nbytes or 0)
        raise ModelSizeError(f"{error}; the largest value is {shown(largest.name)}") from error


class GraphBuilder:
    """Builds a graph by hand, node after node.

    Parameters
    ----------
    name : str
        Name of the graph.
    outer : GraphBuilder, optional
        For the body of a node: the graph of the node; the body can read its values.

    Examples
    --------
    >>> from gpumem.planning import GraphBuilder
    >>> builder = GraphBuilder()
    >>> x = builder.input("x", "float32", (8, 16))
    >>> w = builder.initializer("w", "float32", (16, 4))
    >>> product = builder.node("MatMul", [x, w], [builder.value("product", "float32", (8, 4))])
    >>> result = builder.node("Relu", ["product"], [builder.value("y", "float32", (8, 4))])
    >>> builder.build(outputs=["y"])
    <gpumem.planning.ModelGraph of 2 nodes, 4 values>
    """

    def __init__(self, name: str = "", *, outer: GraphBuilder | None = None) -> None:
        require("outer", outer, (GraphBuilder, type(None)), "a GraphBuilder or None")
        self._name = name
        self._outer = outer
        self._inputs: list[Value] = []
        self._nodes: list[Node] = []
        self._values: dict[str, Value] = {}
        self._described: dict[str, Value] = {}  # of outputs of later nodes
        self._captures: dict[str, Value] = {}

    def input(
        self, name: str, dtype: npt.DTypeLike | None, shape: Sequence[int | str | None] | None
    ) -> Value:
        """Add an input of a run."""
        value = self._enter(Value(name, dtype, shape))
        self._inputs.append(value)
        return value

    def initializer(self, name: str, dtype: npt.DTypeLike, shape: Sequence[int]) -> Value:
        """Add a weight."""
        return self._enter(Value(name, dtype, shape, is_initializer=True))

    def value(
        self,
        name: str,
        dtype: npt.DTypeLike | None = None,
        shape: Sequence[int | str | None] | None = None,
    ) -> Value:
        """Describe an output of a later node."""
        if name in self._described:
            raise ModelGraphError(f"value {name!r} is already described")
        value = self._described[name] = Value(name, dtype, shape)
        return value

    def node(
        self,
        op_type: str,
        inputs: Sequence[Value | str | None],
        outputs: Sequence[Value | str | None],
        *,
        name: str = "",
        domain: str = "",
        bodies: Mapping[str, ModelGraph] | None = None,
        layer_ann: str = "",
        workspace: int | None = None,
    ) -> Node:
        """Append a node.

        Parameters
        ----------
        op_type : str
            The operator.
        inputs : sequence of Value, str or None
            Values, or their names; None for an optional one that is left out.
        outputs : sequence of Value, str or None
            Values, or their names. A name that `value` did not describe has an unknown size.
        name, domain, bodies, layer_ann, workspace
            As of `Node`.

        Raises
        ------
        ModelGraphError
            An input that no node has made, or an output that is already defined.
        """
        use = f"node {name or op_type!r} reads"
        named = (Value, str, type(None))
        inputs = require_each("inputs", inputs, named, "a Value, a name or None")
        outputs = require_each("outputs", outputs, named, "a Value, a name or None")
        require("bodies", bodies, (Mapping, type(None)), "a Mapping or None")
        reads = [self._known(given, use) for given in inputs]
        for body in require_each("bodies", (bodies or {}).values(), ModelGraph, "a ModelGraph"):
            for value in body.captures:
                self._known(value.name, use)
        makes = [self._made(given) for given in outputs]
        node = Node(
            op_type,
            reads,
            makes,
            name=name,
            domain=domain,
            bodies=bodies,
            layer_ann=layer_ann,
            workspace=workspace,
        )
        for value in node.makes:
            self._enter(value)
        self._nodes.append(node)
        return node

    def build(self, outputs: Sequence[Value | str]) -> ModelGraph:
        """Return the graph; raises ModelGraphError as `ModelGraph` does."""
        outputs = require_each("outputs", outputs, (Value, str), "a Value or a name")
        results = [self._known(given, "an output of the graph is") for given in outputs]
        return ModelGraph(
            self._nodes,
            inputs=self._inputs,
            outputs=filter(None, results),
            name=self._name,
            captures=self._captures.values(),
        )

    def _enter(self, value: Value) -> Value:
        if value.name in self._values:
            raise ModelGraphError(f"value {value.name!r} is already defined")
        self._values[value.name] = value
        return value

    def _known(self, given: Value | str | None, use: str) -> Value | None:
        if given is None:
            return None
        name = given if isinstance(given, str) else given.name
        known = self._values.get(name) or self._captured(name)
        if known is None or (known is not given and not isinstance(given, str)):
            raise ModelGraphError(f"{use} value {name!r}, which nothing before makes")
        return known

    def _captured(self, name: str) -> Value | None:
        """Find a value in the graphs around this one; each of them up to it captures it too."""
        if self._outer is None:
            return None
        found = self._outer._values.get(name) or self._outer._captured(name)
        if found is not None:
            self._captures[name] = found
        return found

    def _made(self, given: Value | str | None) -> Value | None:
        if not isinstance(given, str):
            return given
        return self._described.get(given) or Value(given)
