"""Graphs: what a well-formed one is, by hand and from ONNX models."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from planning.models import DATA, MODELS, shipped

from gpumem.errors import ConfigError, ModelGraphError
from gpumem.planning import GraphBuilder, ModelGraph, Node, Value, partition, plan_memory
from gpumem.planning.graph.onnx_models import _without_weights

F32 = TensorProto.FLOAT


def info(name, shape, kind=F32):
    return helper.make_tensor_value_info(name, kind, shape)


def weight(name, shape, dtype=np.float32):
    return numpy_helper.from_array(np.zeros(shape, dtype), name)


def model(nodes, inputs, outputs, weights=(), **more):
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(weights), **more)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def mlp(batch=4):
    return model(
        [
            helper.make_node("MatMul", ["x", "w1"], ["a"], "first"),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("MatMul", ["b", "w2"], ["y"], "second"),
        ],
        [info("x", [batch, 16])],
        [info("y", [batch, 8])],
        [weight("w1", (16, 32)), weight("w2", (32, 8))],
    )


def test_model_becomes_a_graph_with_inferred_sizes(tmp_path):
    onnx.save(mlp(), tmp_path / "m.onnx")
    graph = ModelGraph.from_onnx(tmp_path / "m.onnx")
    assert [node.op_type for node in graph] == ["MatMul", "Relu", "MatMul"]
    assert [value.name for value in graph.inputs + graph.outputs] == ["x", "y"]
    assert {name: value.nbytes for name, value in graph.values.items()} == {
        "x": 256,
        "w1": 2048,
        "a": 512,
        "b": 512,
        "w2": 1024,
        "y": 128,
    }
    assert {value.name for value in graph.initializers} == {"w1", "w2"}
    first, relu, _ = graph.nodes
    assert graph.producer(graph.values["a"]) is first
    assert graph.consumers(graph.values["a"]) == (relu,)


def test_named_lengths_are_unknown_until_they_are_bound():
    assert ModelGraph.from_onnx(mlp("batch")).values["a"].nbytes is None
    proto = mlp("batch")
    before = proto.SerializeToString()
    bound = ModelGraph.from_onnx(proto, dims={"batch": np.int64(3)})
    assert bound.values["a"].nbytes == 3 * 32 * 4
    assert bound.values["y"].nbytes == 3 * 8 * 4
    assert proto.SerializeToString() == before
    with pytest.raises(ModelGraphError, match="dimension 'beam': the model takes batch"):
        ModelGraph.from_onnx(mlp("batch"), dims={"beam": 3})
    for bad in (-1, 1.5, "4"):
        with pytest.raises(ModelGraphError, match="batch"):
            ModelGraph.from_onnx(mlp("batch"), dims={"batch": bad})
    with pytest.raises(TypeError, match="dims = 'batch=3'"):
        ModelGraph.from_onnx(mlp("batch"), dims="batch=3")


def test_external_weight_files_are_not_needed(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(mlp(), path, save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "weights").unlink()
    assert ModelGraph.from_onnx(path).values["w1"].nbytes == 2048


def test_layers_of_nodes_are_their_metadata():
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Relu", ["y"], ["z"])]
    nodes[1].metadata_props.add(key="layer_ann", value="decoder/1")
    graph = ModelGraph.from_onnx(model(nodes, [info("x", (2,))], [info("z", (2,))]))
    assert [node.layer_ann for node in graph] == ["", "decoder/1"]


@pytest.mark.parametrize(
    ("text", "workspace"), [("4096", 4096), ("0", 0), ("-1", None), ("", None)]
)
def test_workspace_of_a_node_is_its_metadata(text, workspace):
    node = helper.make_node("Relu", ["x"], ["y"])
    node.metadata_props.add(key="gpumem.workspace", value=text)
    proto = model([node], [info("x", (2,))], [info("y", (2,))])
    if workspace is None:
        with pytest.raises(ModelGraphError, match=r"gpumem\.workspace = '.*': expected its bytes"):
            ModelGraph.from_onnx(proto)
    else:
        assert ModelGraph.from_onnx(proto).nodes[0].workspace == workspace
    for bad in (-1, 1 << 63, "4KiB", 1.5, True):
        with pytest.raises(ModelGraphError, match=r"invalid workspace .* of a Relu: expected"):
            Node("Relu", [], [], workspace=bad)


def test_constants_are_weights():
    graph = ModelGraph.from_onnx(
        model(
            [
                helper.make_node("Constant", [], ["c"], value=weight("", (4,))),
                helper.make_node("Constant", [], ["k"], value_floats=[1.0, 2.0]),
                helper.make_node("Add", ["x", "c"], ["y"]),
                helper.make_node("Concat", ["y", "k"], ["z"], axis=0),
            ],
            [info("x", [4])],
            [info("z", [6])],
        )
    )
    assert [node.op_type for node in graph] == ["Add", "Concat"]
    assert {value.name: value.nbytes for value in graph.initializers} == {"c": 16, "k": 8}


def test_omitted_inputs_stay_omitted():
    graph = ModelGraph.from_onnx(
        model(
            [helper.make_node("Clip", ["x", "", "high"], ["y"])],
            [info("x", [4])],
            [info("y", [4])],
            [weight("high", ())],
        )
    )
    (clip,) = graph.nodes
    assert [value and value.name for value in clip.inputs] == ["x", None, "high"]
    assert [value.name for value in clip.reads] == ["x", "high"]


def branches():
    then = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["t"])], "then", [], [info("t", [4])]
    )
    other = helper.make_graph(
        [helper.make_node("Mul", ["x", "s"], ["e"])],
        "else",
        [],
        [info("e", [4])],
        [weight("s", ())],
    )
    return model(
        [helper.make_node("If", ["cond"], ["y"], then_branch=then, else_branch=other)],
        [info("cond", [], TensorProto.BOOL), info("x", [4])],
        [info("y", [4])],
        [weight("w", (4,))],
    )


def test_node_reads_the_outer_values_of_its_bodies():
    graph = ModelGraph.from_onnx(branches())
    (node,) = graph.nodes
    assert [value.name for value in node.reads] == ["cond", "x", "w"]
    assert set(node.body_graphs) == {"then_branch", "else_branch"}
    then = node.body_graphs["then_branch"]
    assert [value.name for value in then.captures] == ["x", "w"]
    assert graph.consumers(graph.values["w"]) == (node,)
    assert {value.name for value in graph.initializers} == {"w"}


def test_functions_of_a_model_are_inlined():
    body = helper.make_function(
        "mine",
        "Twice",
        ["a"],
        ["b"],
        [helper.make_node("Add", ["a", "a"], ["b"])],
        [helper.make_opsetid("", 17)],
    )
    graph = helper.make_graph(
        [helper.make_node("Twice", ["x"], ["y"], domain="mine")],
        "g",
        [info("x", [4])],
        [info("y", [4])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    proto = helper.make_model(graph, functions=[body], opset_imports=opsets, ir_version=8)
    assert [node.op_type for node in ModelGraph.from_onnx(proto)] == ["Add"]


# ---- models that are small and grow, or are nested deeply ----------------------------------------


NODE_LIMIT = "session.function_expansion_node_limit"
BYTE_LIMIT = "session.function_expansion_byte_limit"


def calling(*calls):
    """Make a model of functions f0, f1, ...; each consists of calls in a chain."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    functions = []
    for number, called in enumerate(calls):
        values = ["x", *(f"v{n}" for n in range(len(called) - 1)), "y"]
        body = [
            helper.make_node(name, [a], [b], domain="mine" if name[0] == "f" else "")
            for name, a, b in zip(called, values, values[1:], strict=False)
        ]
        functions.append(helper.make_function("mine", f"f{number}", ["x"], ["y"], body, opsets))
    node = helper.make_node("f0", ["a"], ["b"], domain="mine")
    graph = helper.make_graph([node], "g", [info("a", [4])], [info("b", [4])])
    return helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=10)


def doubling(count):
    """Make a model of functions that each call the next one twice."""
    return calling(*([f"f{n + 1}"] * 2 for n in range(count - 1)), ["Abs", "Abs"])


def test_expansion_of_functions_has_onnx_runtimes_bounds():
    with pytest.raises(ModelGraphError, match=f"2097150 nodes: .*{NODE_LIMIT} = 1000000"):
        ModelGraph.from_onnx(doubling(20))
    with pytest.raises(ModelGraphError, match=f"510 nodes: .*{NODE_LIMIT} = 509"):
        ModelGraph.from_onnx(doubling(8), settings={NODE_LIMIT: "509"})
    assert len(ModelGraph.from_onnx(doubling(8), settings={NODE_LIMIT: 510})) == 256


def test_expansion_counts_the_bytes_of_attributes_and_names_wherever_they_are_copied():
    proto = calling(["f1"] * 8, ["Abs"] * 8)
    least = proto.ByteSize()
    proto.graph.node[0].input[0] = proto.graph.input[0].name = "a" * 10_000
    with pytest.raises(ModelGraphError, match=rf"\d{{7}} bytes: .*{BYTE_LIMIT} = 100000"):
        ModelGraph.from_onnx(proto, settings={BYTE_LIMIT: 100_000})
    proto = calling(["f1"] * 8, ["Abs"] * 8)
    for function in proto.functions:
        function.attribute.append("text")
        for node in function.node:
            node.attribute.add(name="text", ref_attr_name="text", type=onnx.AttributeProto.STRING)
    proto.graph.node[0].attribute.append(helper.make_attribute("text", "a" * 10_000))
    assert proto.ByteSize() < least + 11_000
    with pytest.raises(ModelGraphError, match=r"\d{7} bytes"):
        ModelGraph.from_onnx(proto, settings={BYTE_LIMIT: 100_000})


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({NODE_LIMIT: 0}, ConfigError, f"invalid {NODE_LIMIT} = 0: expected an integer from 1"),
        ({BYTE_LIMIT: "1GiB"}, ConfigError, "expected an integer from 1"),
        ({"session.node_limit": 5}, ConfigError, f"unknown key .* takes {NODE_LIMIT}"),
        (5, TypeError, "settings"),
    ],
)
def test_invalid_bounds_of_expansion_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        ModelGraph.from_onnx(mlp(), settings=settings)


@pytest.mark.parametrize("calls", [[["f0"]], [["f1"], ["f2"], ["f1", "f1"]]], ids=["one", "two"])
def test_function_that_calls_itself_is_refused(calls):
    with pytest.raises(ModelGraphError, match=r"function 'f[01]' .* calls itself"):
        ModelGraph.from_onnx(calling(*calls))


def in_branches(depth):
    """Make a model of graphs in nodes."""
    proto = model([], [info("c", [], TensorProto.BOOL), info("x", [4])], [info("y", [4])])
    graph = proto.graph
    for _ in range(depth):
        node = graph.node.add(op_type="If", input=["c"], output=["y"])
        branch = node.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH)
        graph = branch.g
        graph.output.append(info("y", [4]))
    graph.node.add(op_type="Abs", input=["x"], output=["y"])
    return proto


@pytest.mark.parametrize("depth", [101, 9000])
def test_deep_models_are_refused_by_their_depth(depth):
    chain = calling(*([f"f{n + 1}"] for n in range(depth - 1)), ["Abs"])
    for proto in (chain, in_branches(depth)):
        with pytest.raises(ModelGraphError, match="nested 101 deep: expected at most 100"):
            ModelGraph.from_onnx(proto)


def test_models_up_to_the_depth_are_read():
    assert len(ModelGraph.from_onnx(calling(*([f"f{n + 1}"] for n in range(99)), ["Abs"]))) == 1
    assert len(ModelGraph.from_onnx(in_branches(30), strict=False)) == 1


@pytest.mark.parametrize(
    ("suffix", "opening", "closing"),
    [
        ("json", '{"graph":{"node":[{"attribute":[{"g":', "}]}]}}"),
        ("textproto", "graph { node { attribute { g {", "}}}}"),
        ("onnxtxt", "seq(", ")"),
    ],
)
def test_deep_text_of_a_model_is_refused_by_its_depth(tmp_path, suffix, opening, closing):
    path = tmp_path / f"deep.{suffix}"
    # No parser reads beyond the quote in the comment.
    begin = '# "\n<ir_version: 10, opset_import: ["" : 17]> g (' if suffix == "onnxtxt" else ""
    path.write_text(begin + opening * 300_000 + closing * 300_000)
    with pytest.raises(ModelGraphError, match=r"nested \d{6,7} deep, expected at most 200"):
        ModelGraph.from_onnx(path)


# ---- models that ONNX Runtime runs, although they are not as specified ---------------------------


def two_nodes(t, y, order=1):
    nodes = [helper.make_node("Relu", ["x"], ["t"]), helper.make_node("Neg", ["t"], ["y"])]
    graph = helper.make_graph(
        nodes[::order], "two", [info("x", [2, 3])], [info("y", y)], value_info=[info("t", t)]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("t", [[-1, -1], [-5, 3], [2, 4], [2], [2, 3, 1], [7, 9]])
@pytest.mark.parametrize("order", [1, -1])
def test_shapes_that_are_unknown_or_wrong_are_those_of_the_operators(t, order):
    graph = ModelGraph.from_onnx(two_nodes(t, [-1, 8], order))
    assert [node.op_type for node in graph] == ["Relu", "Neg"]
    assert {value.shape for value in graph.values.values()} == {(2, 3)}
    assert plan_memory(partition(graph, ["host"])).verify()


@pytest.mark.parametrize("imported", [[], ["ai.onnx.ml"], ["ai.onnx"], [""]])
@pytest.mark.parametrize("domain", ["", "ai.onnx"])
def test_domain_of_onnx_has_two_names_and_needs_no_import(imported, domain):
    proto = two_nodes([2, 3], [2, 3])
    proto.graph.node[0].domain = domain
    del proto.opset_import[:]
    proto.opset_import.extend(helper.make_opsetid(each, 3) for each in imported)
    assert [node.domain for node in ModelGraph.from_onnx(proto)] == ["", ""]


LARGE = """
import resource, sys
from onnx import TensorProto, helper
from gpumem.planning import ModelGraph

PART = 640 << 20
graph = helper.make_graph(
    [helper.make_node("Concat", [f"w{i}" for i in range(4)], ["y"], axis=0)], "large", [],
    [helper.make_tensor_value_info("y", TensorProto.INT8, [4 * PART])],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
for i in range(4):
    weight = model.graph.initializer.add(name=f"w{i}", data_type=TensorProto.INT8, dims=[PART])
    weight.raw_data = bytes(PART)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
value = ModelGraph.from_onnx(model).outputs[0]
assert value.nbytes == 4 * PART, value
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before)
"""


def test_model_of_2_5_gib_in_memory_is_read_in_a_tenth_of_its_size():
    kib = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    if int(kib["MemAvailable"].split()[0]) < 6 << 20:
        pytest.skip("less than 6 GiB of memory are available")
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True)
    if done.returncode == -signal.SIGKILL:
        pytest.skip("a limit of memory ended the process, such as that of a container")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 0.1 * (2560 << 20)


def test_operator_that_onnx_itself_defines_wrongly_is_read():
    node = helper.make_node("MeanVarianceNormalization", ["x"], ["y"])
    shape = [2, 3, 4, 5]
    proto = model([node], [info("x", shape)], [info("y", shape)])
    assert ModelGraph.from_onnx(proto).values["y"].shape == (2, 3, 4, 5)
    with pytest.raises(ModelGraphError, match="Incompatible dimensions"):
        ModelGraph.from_onnx(
            model(
                [node, helper.make_node("MatMul", ["x", "w"], ["z"])],
                [info("x", shape), info("w", [7, 2])],
                [info("y", shape), info("z", None)],
            )
        )


def test_inferred_length_that_is_negative_is_unknown():
    node = helper.make_node("Split", ["x"], ["a", "b", "c", "d"], num_outputs=4)  # 2, 2, 2, -1
    graph = helper.make_graph([node], "g", [info("x", [5])], [info(n, None) for n in "abcd"])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    values = ModelGraph.from_onnx(proto).values
    assert [values[name].shape for name in "abcd"] == [(2,), (2,), (2,), (None,)]


@pytest.mark.parametrize(("length", "propagates"), [(4, True), (1 << 31, False)])
def test_elements_of_long_vectors_are_not_propagated(monkeypatch, length, propagates):
    calls = []
    infer = onnx.shape_inference.infer_shapes

    def recorded(proto, **options):
        calls.append(options["data_prop"])
        return infer(proto, **options | {"data_prop": False})

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", recorded)
    nodes = [helper.make_node("Squeeze", ["x"], ["v"]), helper.make_node("Add", ["v", "v"], ["y"])]
    graph = ModelGraph.from_onnx(model(nodes, [info("x", [1, length])], [info("y", None)]))
    assert graph.values["y"].shape == (length,)
    assert any(calls) == propagates


def test_nodes_are_in_the_order_in_which_onnx_runtime_runs_them():
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Neg", ["x"], ["b"]),
        helper.make_node("Abs", ["b"], ["c"]),
        helper.make_node("Add", ["a", "c"], ["y"]),
        helper.make_node("Exp", ["a"], ["z"]),
    ]
    graph = ModelGraph.from_onnx(model(nodes, [info("x", [2])], [info("y", [2]), info("z", [2])]))
    assert [node.op_type for node in graph] == ["Relu", "Exp", "Neg", "Abs", "Add"]


def test_body_reads_a_value_of_a_later_node():
    taken = helper.make_graph([helper.make_node("Neg", ["late"], ["r"])], "a", [], [info("r", [2])])
    other = helper.make_graph([helper.make_node("Abs", ["x"], ["r"])], "b", [], [info("r", [2])])
    nodes = [
        helper.make_node("If", ["c"], ["y"], then_branch=taken, else_branch=other),
        helper.make_node("Exp", ["x"], ["late"]),
    ]
    inputs = [info("x", [2]), info("c", [], TensorProto.BOOL)]
    graph = ModelGraph.from_onnx(model(nodes, inputs, [info("y", [2])]))
    assert [node.op_type for node in graph] == ["Exp", "If"]


def test_weights_that_a_body_lists_as_inputs_are_weights():
    weight = numpy_helper.from_array(np.ones(2, "float32"), "w")
    body = helper.make_graph(
        [helper.make_node("Add", ["a", "w"], ["b"]), helper.make_node("Identity", ["c"], ["d"])],
        "body",
        [
            info("i", [], TensorProto.INT64),
            info("c", [], TensorProto.BOOL),
            info("a", [2]),
            info("w", [2]),
        ],
        [info("d", [], TensorProto.BOOL), info("b", [2])],
        [weight],
    )
    count = numpy_helper.from_array(np.array(4), "n")
    node = helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)
    graph = ModelGraph.from_onnx(model([node], [info("x", [2])], [info("y", [2])], [count]))
    (read,) = graph.nodes[0].body_graphs.values()
    assert [value.name for value in read.inputs] == ["i", "c", "a"]
    assert graph.values["y"].shape == (2,)


@pytest.mark.parametrize("kind", ["INT2", "UINT2", "INT4", "UINT4", "FLOAT4E2M1"])
def test_elements_of_two_and_four_bits_are_read(kind):
    nodes = [
        helper.make_node("Cast", ["x"], ["t"], to=getattr(TensorProto, kind)),
        helper.make_node("Cast", ["t"], ["y"], to=F32),
    ]
    graph = helper.make_graph(nodes, "low", [info("x", [5])], [info("y", [5])])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=13)
    assert ModelGraph.from_onnx(proto).values["t"].nbytes == 5


def test_large_weights_are_not_copied():
    """Not those of the graph, of a body, of a constant, or of a function."""
    big = numpy_helper.from_array(np.zeros(100_000, "float32"), "w")
    add = [helper.make_node("Add", ["x", "w"], ["r"])]
    branch = helper.make_graph(add, "branch", [], [info("r", [100_000])], [big])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    constant = helper.make_node("Constant", [], ["w"], value=big)
    function = helper.make_function("own", "F", ["x"], ["r"], [constant, *add], opsets)
    nodes = [
        helper.make_node("If", ["c"], ["t"], then_branch=branch, else_branch=branch),
        helper.make_node("F", ["t"], ["u"], domain="own"),
        helper.make_node("Constant", [], ["k"], value=big),
        helper.make_node("Reshape", ["u", "shape"], ["v"]),
        helper.make_node("Sum", ["t", "k", "w"], ["y"]),
    ]
    shape = numpy_helper.from_array(np.array([100, -1]), "shape")
    inputs = [info("x", [100_000]), info("c", [], TensorProto.BOOL)]
    outputs = [info("y", None), info("v", None)]
    graph = helper.make_graph(nodes, "large", inputs, outputs, [big, shape])
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=[function])
    before = proto.SerializeToString()
    assert len(before) > 2_000_000
    assert _without_weights(proto).ByteSize() < 2_000
    read = ModelGraph.from_onnx(proto)
    assert read.values["v"].shape == (100, 1000), "small tensors are read"
    assert read.values["w"].nbytes == 400_000
    assert proto.SerializeToString() == before


# ---- malformed models ----------------------------------------------------------------------------


def cycle():
    nodes = [helper.make_node("Relu", ["a"], ["y"]), helper.make_node("Relu", ["y"], ["a"])]
    return model(nodes, [info("x", [4])], [info("y", [4])])


def made_twice():
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["y"])]
    return model(nodes, [info("x", [4])], [info("y", [4])])


def output_of_nothing():
    return model([helper.make_node("Relu", ["x"], ["a"])], [info("x", [4])], [info("y", [4])])


def input_of_nothing():
    return model([helper.make_node("Relu", ["z"], ["y"])], [info("x", [4])], [info("y", [4])])


def body_reads_nothing():
    proto = branches()
    proto.graph.node[0].attribute[0].g.node[0].input[0] = "nowhere"
    return proto


def negative_weight():
    proto = mlp()
    proto.graph.initializer[0].dims[0] = -3
    return proto


def unknown_element_type():
    proto = mlp()
    proto.graph.initializer[0].data_type = 999
    return proto


def no_operator():
    proto = mlp()
    proto.graph.node[0].op_type = ""
    return proto


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (cycle, "read each other's outputs: 'Relu'"),
        (made_twice, "y"),
        (output_of_nothing, "'y'"),
        (input_of_nothing, "'z'"),
        (body_reads_nothing, "nowhere"),
        (negative_weight, "w1|-3"),
        (unknown_element_type, "999|w1"),
        (no_operator, "operator|op_type|malformed"),
        (onnx.ModelProto, "no graph"),
    ],
)
def test_malformed_model_is_refused_by_name(make, names):
    with pytest.raises(ModelGraphError, match=names):
        ModelGraph.from_onnx(make())


def one_node(op_type, inputs, output, **attributes):
    """Make a model of one node, of inputs (dtype, shape) and an output of the same kind."""
    infos = [
        helper.make_tensor_value_info(f"x{n}", dtype, shape)
        for n, (dtype, shape) in enumerate(inputs)
    ]
    node = helper.make_node(op_type, [info.name for info in infos], ["y"], **attributes)
    result = helper.make_tensor_value_info("y", *output)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.example", 1)]
    graph = helper.make_graph([node], "one", infos, [result])
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


PAIR, TRIPLE = (F32, [2]), (F32, [3])


@pytest.mark.parametrize(
    ("proto", "words"),
    [
        (one_node("Add", [PAIR, TRIPLE], (F32, ["n"])), "Add.*Incompatible dimensions"),
        (one_node("Relu", [PAIR], (TensorProto.INT64, [2])), "Relu.*type"),
        (one_node("Blorp", [PAIR], PAIR), "Blorp"),
        (one_node("Concat", [PAIR, PAIR], (F32, [4])), "Concat without axis"),
        (one_node("Relu", [PAIR, PAIR], PAIR), "Relu of 2 inputs, where 1 to 1"),
    ],
    ids=["dimensions", "type", "operator", "attribute", "inputs"],
)
def test_contradictory_model_is_refused_unless_not_strict(proto, words):
    with pytest.raises(ModelGraphError, match=f"(?s){words}"):
        ModelGraph.from_onnx(proto)
    assert len(ModelGraph.from_onnx(proto, strict=False).nodes) == 1


def test_custom_operators_and_outputs_without_a_shape_are_accepted():
    ModelGraph.from_onnx(one_node("Blorp", [PAIR], (F32, None), domain="com.example"))
    ModelGraph.from_onnx(one_node("Relu", [PAIR], (F32, None)))


def test_foreign_file_is_refused(tmp_path):
    path = tmp_path / "m.onnx"
    for content in (b"not a model", b"\xff" * 100, b""):
        path.write_bytes(content)
        with pytest.raises(ModelGraphError, match=r"m\.onnx"):
            ModelGraph.from_onnx(path)
    with pytest.raises(FileNotFoundError):
        ModelGraph.from_onnx(tmp_path / "missing.onnx")
    for model in (None, 3, mlp().graph):
        with pytest.raises(TypeError, match="invalid model"):
            ModelGraph.from_onnx(model)


@pytest.mark.parametrize("name", [b"second", b"MatMul", b"w1", b"batch", b"then_branch", b"inner"])
def test_name_that_is_not_utf8_is_refused(tmp_path, name):
    proto = mlp("batch")
    body = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["t"])], "inner", [], [info("t", [2])]
    )
    node = helper.make_node("If", ["c"], ["z"], then_branch=body, else_branch=body)
    proto.graph.node.append(node)
    proto.graph.input.append(info("c", [], TensorProto.BOOL))
    data = proto.SerializeToString()
    assert name in data
    path = tmp_path / "model.onnx"
    path.write_bytes(data.replace(name, name[:-1] + b"\xff"))
    with pytest.raises(ModelGraphError, match="malformed"):
        ModelGraph.from_onnx(path, strict=False)


def test_truncated_model_is_refused_or_read(tmp_path):
    """Wherever it is cut: an error of ours, or a graph that is whole in itself."""
    whole = mlp().SerializeToString()
    path = tmp_path / "m.onnx"
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with contextlib.suppress(ModelGraphError):
            ModelGraph.from_onnx(path)


def test_builder_makes_bodies_that_read_outer_values():
    builder = GraphBuilder()
    x = builder.input("x", "float32", (4,))
    body = GraphBuilder(outer=builder)
    inner = GraphBuilder(outer=body)
    inner.node("Relu", ["x"], ["r"])
    body.node("If", [], ["q"], bodies={"then_branch": inner.build(["r"])})
    outer = builder.node("If", [], ["y"], bodies={"then_branch": body.build(["q"])})
    assert outer.reads == (x,)
    assert builder.build(["y"]).consumers(x) == (outer,)


def test_value_takes_the_dtypes_of_tensors():
    for given, name in (("f4", "float32"), ("bf16", "bfloat16"), (np.int8, "int8")):
        assert Value("x", given, (2,)).dtype.name == name


@pytest.mark.parametrize("dtype", ["float99", 7])
def test_value_of_an_unknown_dtype_is_refused_with_what_is_accepted(dtype):
    with pytest.raises(TypeError, match=f"invalid dtype {dtype!r}: expected .* 'bfloat16'"):
        Value("x", dtype, (2,))


def test_contradictory_builder_calls_are_refused():
    x, y = Value("x", "float32", (1,)), Value("y", "float32", (1,))
    node = Node("Relu", [x], [y])
    with pytest.raises(ModelGraphError, match="'x'"):
        ModelGraph([node], inputs=[], outputs=[y])
    with pytest.raises(ModelGraphError, match=r"already defined; Node\(Abs .* redefines it"):
        ModelGraph([node, Node("Abs", [x], [y])], inputs=[x], outputs=[y])
    with pytest.raises(ModelGraphError, match="two values"):
        ModelGraph([Node("Relu", [Value("x")], [y])], inputs=[x], outputs=[y])
    with pytest.raises(ModelGraphError, match="negative"):
        Value("x", "float32", (-1,))
    with pytest.raises(ModelGraphError, match="known size"):
        Value("w", "float32", ("n",), is_initializer=True)
    for name in ("", None, 5):
        with pytest.raises(ModelGraphError, match="name"):
            Value(name)
    builder = GraphBuilder()
    with pytest.raises(ModelGraphError, match="'nothing'"):
        builder.node("Relu", ["nothing"], ["y"])
    builder.input("x", "float32", (1,))
    with pytest.raises(ModelGraphError, match="already"):
        builder.initializer("x", "float32", (1,))


@pytest.mark.parametrize("name", MODELS)
def test_shipped_model_equals_its_builders_output(name):
    assert shipped(name) == MODELS[name]()


@pytest.mark.parametrize("name", MODELS)
def test_graph_is_read_from_a_path(name):
    path = DATA / f"{name}.onnx"
    graph = ModelGraph.from_onnx(path)
    assert repr(ModelGraph.from_onnx(path.read_bytes())) == repr(graph)
    names = [node.name for node in graph.nodes]
    assert sorted(names) == sorted(node.name for node in shipped(name).graph.node)


def test_graph_and_its_parts_cannot_be_changed():
    x, y = Value("x", "float32", (2,)), Value("y", "float32", (2,))
    node = Node("Relu", [x], [y])
    graph = ModelGraph([node], inputs=[x], outputs=[y])
    for part, name in ((x, "shape"), (node, "inputs"), (graph, "nodes"), (graph, "values")):
        with pytest.raises(AttributeError, match=f"{name} of .* cannot be changed"):
            setattr(part, name, ())
    assert (x.shape, node.inputs, graph.nodes) == ((2,), (x,), (node,))
