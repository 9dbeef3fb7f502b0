"""Memory of the graphs in If, Loop and Scan, where the model's file leaves their shapes open.

The expected bytes are those that ONNX Runtime takes without an arena.
"""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from gpumem.planning import ModelGraph, partition, plan_memory

N = 1024  # elements of a row, of 4 bytes each
ROW = 4 * N


def info(name, shape=None, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def weight(name, value):
    return numpy_helper.from_array(np.asarray(value), name)


def op(kind, reads, makes, **attributes):
    return helper.make_node(kind, reads.split(), makes.split(), **attributes)


def loop_body(nodes, outputs="c2", weights=(), again="k"):
    """Return a body that carries c without a shape."""
    nodes = [*nodes, op("Identity", again, "k2")]
    inputs = [info("i", [], TensorProto.INT64), info("k", [], TensorProto.BOOL), info("c")]
    results = [info("k2", [], TensorProto.BOOL), *map(info, outputs.split())]
    return helper.make_graph(nodes, "body", inputs, results, list(weights))


def plan_of(nodes, inputs=(("x", [1, N]),), outputs="y", weights=()):
    graph = helper.make_graph(
        nodes, "g", [info(*one) for one in inputs], list(map(info, outputs.split())), list(weights)
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    plan = plan_memory(partition(ModelGraph.from_onnx(model), ["host"]))
    assert plan.verify()
    return plan


def loop(body, makes="y", reads=("n", "", "x")):
    return helper.make_node("Loop", list(reads), makes.split(), body=body)


def tiled(number, rows, reads="c"):
    """Repeat a row and take the mean of the rows."""
    nodes = [
        op("Tile", f"{reads} r{number}", f"t{number}"),
        op("ReduceMean", f"t{number}", f"m{number}", axes=[0]),
    ]
    return nodes, weight(f"r{number}", [rows, 1])


def branches():
    graphs = []
    for number, rows in enumerate((16, 64)):
        nodes, repeats = tiled(number, rows)
        graphs.append(helper.make_graph(nodes, "branch", [], [info(f"m{number}")], [repeats]))
    return {"then_branch": graphs[0], "else_branch": graphs[1]}


def test_loop_counts_the_values_of_one_iteration():
    nodes, repeats = tiled("", 65536)
    plan = plan_of([loop(loop_body(nodes, "m", [repeats]))], weights=[weight("n", 2)])
    assert (plan.unplanned, plan.uncounted) == ((), ())
    assert 65538 * ROW <= plan.peak_bytes <= 65540 * ROW
    assert plan.placement.graph.values["y"].shape == (1, N)


def test_larger_branch_of_an_if_counts_in_the_loop_around_it():
    body = loop_body([op("Cast", "i", "odd", to=TensorProto.BOOL), op("If", "odd", "c2")])
    body.node[1].attribute.extend(helper.make_attribute(*one) for one in branches().items())
    plan = plan_of([loop(body)], weights=[weight("n", 2)])
    assert 66 * ROW <= plan.peak_bytes <= 68 * ROW


@pytest.mark.parametrize("count", ["weight", "constant", "number"])
def test_loop_keeps_a_slice_of_each_iteration_and_stacks_them_at_the_end(count):
    body = loop_body([op("Softmax", "c", "c2"), op("Exp", "c2", "o")], "c2 o")
    nodes = {
        "weight": [],
        "constant": [op("Constant", "", "n", value=weight("", [16]))],
        "number": [op("Constant", "", "m", value_int=16), op("Cast", "m", "n", to=7)],
    }[count]
    weights = [] if nodes else [weight("n", 16)]
    plan = plan_of([*nodes, loop(body, "y ys")], outputs="y ys", weights=weights)
    assert plan.placement.graph.values["ys"].shape == (16, 1, N)
    # The input, the carried value, old and new, its copy for the output; the slices; their stack.
    assert 36 * ROW <= plan.lower_bound_bytes <= 37 * ROW


def test_stack_of_a_loop_that_a_condition_ends_is_named():
    nodes = [op("Exp", "c", "c2"), op("Exp", "c", "o"), op("Less", "i n", "more")]
    plan = plan_of(
        [loop(loop_body(nodes, "c2 o", again="more"), "y ys")],
        outputs="y ys",
        weights=[weight("n", 16)],
    )
    assert plan.unplanned == ("ys",)
    assert plan.placement.graph.values["y"].shape == (1, N)


def test_carried_value_that_grows_is_named_and_so_is_what_follows_from_it():
    grows = loop_body([op("Concat", "c c", "c2", axis=0)])
    keeps = loop_body([op("Exp", "c", "c2")])
    nodes = [loop(keeps, "a"), loop(grows, "b", ["n", "", "a"]), loop(keeps, "y", ["n", "", "b"])]
    plan = plan_of(nodes, weights=[weight("n", 3)])
    assert plan.placement.graph.values["a"].shape == (1, N)
    assert plan.unplanned == ("b", "y")
    assert plan.uncounted == ("Loop/c", "Loop/c2")


def test_scan_computes_its_slices_in_its_outputs():
    nodes = [op("Add", "s e", "s2"), op("Softmax", "s2", "p"), op("Mul", "p e", "o")]
    results = [info("s2"), info("o"), info("d")]
    body = helper.make_graph(
        [*nodes, op("Sub", "s2 e", "d")], "body", [info("s"), info("e")], results
    )
    scan = op("Scan", "s0 x", "y a b", body=body, num_scan_inputs=1)
    plan = plan_of([scan], [("s0", [N]), ("x", [16, N])], "y a b")
    # Input and outputs; two of the state, one before the first iteration; the softmax.
    assert plan.lower_bound_bytes == (16 * 3 + 2 + 2 + 1) * ROW


def test_sequences_of_a_loop_are_named():
    body = loop_body([op("Exp", "c", "c2"), op("SequenceInsert", "s c2", "s2")])
    for infos, name in ((body.input, "s"), (body.output, "s2")):
        infos.append(helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, None))
    nodes = [op("SequenceEmpty", "", "s0"), loop(body, "y ss", ["n", "", "x", "s0"])]
    plan = plan_of(nodes, weights=[weight("n", 3)])
    assert plan.unplanned == ("s0", "ss")
    assert plan.uncounted == ("Loop/s", "Loop/s2")


def test_outer_value_that_a_body_reads_lives_while_its_node_runs():
    nodes = [op("Exp", "x", "e"), loop(loop_body([op("Mul", "c e", "c2")])), op("Exp", "y", "z")]
    plan = plan_of(nodes, outputs="z", weights=[weight("n", 3)])
    (place,) = (place for tenant, place in plan.places.items() if tenant.value.name == "e")
    assert (place.first, place.last) == (0, 1)


def test_outer_value_of_unknown_size_is_named_outside_alone():
    grows = loop_body([op("Concat", "c c", "c2", axis=0)])
    reads = loop_body([op("ReduceMax", "b", "m", keepdims=0), op("Mul", "c m", "c2")])
    nodes = [loop(grows, "b"), loop(reads, "y")]
    plan = plan_of(nodes, weights=[weight("n", 3)])
    assert "b" in plan.unplanned
    assert "Loop/b" not in plan.uncounted


def test_stack_of_a_loop_that_may_not_begin_is_named():
    body = loop_body([op("Exp", "c", "c2"), op("Exp", "c", "o")], "c2 o")
    graph = helper.make_graph(
        [loop(body, "y ys", ["n", "go", "x"])],
        "g",
        [info("x", [1, N]), info("go", [], TensorProto.BOOL)],
        [info("y"), info("ys")],
        [weight("n", 16)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert plan_memory(partition(ModelGraph.from_onnx(model), ["host"])).unplanned == ("ys",)


def test_loop_in_a_loop_is_counted():
    inner = loop_body([op("Identity", "c", "c2"), op("Softmax", "c", "o")], "c2 o")
    inner.name = "inner"
    outer = loop_body([loop(inner, "d ds"), op("ReduceMax", "ds", "c2", axes=[0], keepdims=0)])
    outer.node[0].input[2] = "c"
    plan = plan_of([loop(outer)], weights=[weight("n", 16)])
    assert (plan.unplanned, plan.uncounted) == ((), ())
    # The slices and their stack, beside the carried values of both loops.
    assert 32 * ROW <= plan.peak_bytes <= 40 * ROW
