"""Placement: what fits where, in one pass or two, alone or as a group, and why."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem import Device
from gpumem.accounting import AdHocAccountant, NodeStats, StatsAccountant, unique_node_name
from gpumem.errors import ConfigError, ConfigWarning, ModelGraphError
from gpumem.planning import GraphBuilder, ModelGraph, Node, Target, Value, partition


def chain(*lengths):
    """Make nodes in a row; each makes so many bytes and has a weight of a tenth of them."""
    builder = GraphBuilder()
    last = builder.input("x", "uint8", (1,))
    for number, length in enumerate(lengths):
        weight = builder.initializer(f"w{number}", "uint8", (length // 10,))
        made = builder.value(f"v{number}", "uint8", (length,))
        builder.node("Op", [last, weight], [made], name=f"n{number}")
        last = made
    return builder.build(outputs=[last])


def budget(threshold=None):
    return AdHocAccountant(threshold, percent=100)


def names_on(placement, device):
    return [node.name for node in placement.nodes_on(device)]


def test_without_a_budget_the_first_device_takes_all_it_supports():
    placement = partition(chain(100, 100, 100), ["cuda:0", "host"])
    assert names_on(placement, "cuda:0") == ["n0", "n1", "n2"]
    some = Target("cuda:0", supports=lambda node: node.name != "n1")
    placement = partition(chain(100, 100, 100), [some, "host"])
    assert names_on(placement, "cuda:0") == ["n0", "n2"]
    (refusal,) = placement.assignments[1].refusals
    assert refusal.why == "it does not support Op"


@pytest.mark.parametrize(
    ("threshold", "on_gpu"), [(330, 3), (329, 2), (220, 2), (219, 1), (110, 1), (109, 0), (0, 0)]
)
def test_budget_places_a_part_and_commits_its_exact_cost(threshold, on_gpu):
    accountant = budget(threshold)
    placement = partition(chain(100, 100, 100), ["cuda:0", "host"], {"cuda:0": accountant})
    assert names_on(placement, "cuda:0") == [f"n{i}" for i in range(on_gpu)]
    assert names_on(placement, "host") == [f"n{i}" for i in range(on_gpu, 3)]
    assert accountant.consumed == 110 * on_gpu
    assert placement.consumed == {Device("cuda:0"): accountant.consumed}
    assert accountant.stop_requested is (on_gpu < 3)


@pytest.mark.parametrize("name", ["cuda", "gpu:0", "CudaPluginExecutionProvider"])
def test_budget_applies_to_every_name_of_its_device(name):
    placement = partition(chain(100, 100), ["cuda:0", "host"], {name: budget(110)})
    assert names_on(placement, "cuda:0") == ["n0"]


def test_greedy_order_stops_at_the_first_node_that_does_not_fit():
    placement = partition(chain(100, 500, 100), ["cuda:0", "host"], {"cuda:0": budget(220)})
    assert names_on(placement, "cuda:0") == ["n0"]
    whys = [one.refusals[0].why for one in placement.assignments[1:]]
    assert whys == ["needs 550 B, and 110 B of 220 B are left", "the device was full before"]


def test_best_order_skips_nodes_that_do_not_fit_and_reports_the_gain():
    accountant = budget(220)
    placement = partition(
        chain(100, 500, 100), ["cuda:0", "host"], {"cuda:0": accountant}, strategy="best"
    )
    assert names_on(placement, "cuda:0") == ["n0", "n2"]
    assert accountant.consumed == 220
    assert "110 B and 1 nodes more than the greedy order" in placement.gains[Device("cuda:0")]
    assert "needs 550 B, and" in placement.assignments[1].refusals[0].why


def test_best_order_exchanges_nodes_that_fill_less():
    accountant = budget(550)
    placement = partition(
        chain(100, 400, 100, 500), ["cuda:0", "host"], {"cuda:0": accountant}, strategy="best"
    )
    assert accountant.consumed == 550
    assert placement.consumed[Device("cuda:0")] == 550


def test_group_is_placed_whole_or_not_at_all():
    def fuse(nodes):
        return [nodes[1:3]]

    for threshold, on_gpu in ((330, ["n0", "n1", "n2"]), (329, ["n0"])):
        accountant = budget(threshold)
        placement = partition(
            chain(100, 100, 100), [Target("cuda:0", fuse=fuse), "host"], {"cuda:0": accountant}
        )
        assert names_on(placement, "cuda:0") == on_gpu
        assert accountant.consumed == 110 * len(on_gpu)
        assert [len(step.nodes) for step in placement.steps] == (
            [1, 2] if len(on_gpu) == 3 else [1] * 3
        )


def test_group_that_needs_its_own_results_is_refused_and_nothing_is_committed():
    accountant = budget()
    target = Target("cuda:0", fuse=lambda nodes: [(nodes[0], nodes[2])])
    with pytest.raises(ModelGraphError, match="cannot run as one"):
        partition(chain(100, 100, 100), [target], {"cuda:0": accountant})
    assert accountant.consumed == accountant.pending == 0


def test_group_runs_after_what_it_reads():
    builder = GraphBuilder()
    x = builder.input("x", "uint8", (1,))
    for name, reads in (("a", ["x"]), ("b", ["x"]), ("c", ["a", "b"])):
        builder.node("Op", reads, [builder.value(name, "uint8", (1,))], name=name)
    target = Target("cuda:0", fuse=lambda nodes: [(nodes[0], nodes[2])])
    placement = partition(builder.build(["c"]), [target])
    assert [[node.name for node in step.nodes] for step in placement.steps] == [["b"], ["a", "c"]]
    assert x in placement.graph.inputs


@pytest.mark.parametrize(
    "fuse",
    [
        lambda nodes: [nodes[:2], nodes[1:]],
        lambda nodes: [(nodes[0], nodes[0])],
        lambda nodes: [(Node("Op", [], [Value("other")]),)],
    ],
)
def test_fuse_may_group_only_offered_nodes(fuse):
    with pytest.raises(ModelGraphError, match="not offered"):
        partition(chain(100, 100, 100), [Target("cuda:0", fuse=fuse)])


def with_transposes(graph, nodes, cost):
    """Put a node before each of these, that makes so many bytes."""
    chosen = set(nodes)
    changed = []
    for node in graph:
        if node in chosen:
            first, *rest = node.inputs
            moved = Value(f"moved_{node.name}", "uint8", (cost,))
            changed.append(Node("Transpose", [first], [moved], name=f"t_{node.name}"))
            node = Node(node.op_type, [moved, *rest], node.outputs, name=node.name)
        changed.append(node)
    return ModelGraph(changed, inputs=graph.inputs, outputs=graph.outputs)


@pytest.mark.parametrize(
    ("threshold", "transposes", "consumed"), [(240, 2, 240), (239, 1, 230), (225, 0, 220)]
)
def test_layout_change_keeps_old_prices_and_charges_new_nodes(threshold, transposes, consumed):
    accountant = budget(threshold)
    target = Target("cuda:0", relayout=lambda graph, nodes: with_transposes(graph, nodes, 10))
    placement = partition(chain(100, 100, 100), [target, "host"], {"cuda:0": accountant})
    on_gpu = names_on(placement, "cuda:0")
    assert [name for name in on_gpu if name.startswith("n")] == ["n0", "n1"]
    assert sum(name.startswith("t_") for name in on_gpu) == transposes
    assert accountant.consumed == consumed
    assert placement.graph.nodes[0].op_type == "Transpose"


def larger_workspace(graph, nodes):
    first, *rest = graph.nodes
    changed = Node("Op", first.inputs, first.outputs, name="n0", workspace=56)
    return ModelGraph([changed, *rest], inputs=graph.inputs, outputs=graph.outputs)


def test_workspace_larger_than_reserved_after_a_layout_change_is_named():
    def placed(percent, strict):
        accountants = {"cuda:0": AdHocAccountant(1000, percent=percent)}
        settings = {"session.strict_workspace_verification": strict}
        target = Target("cuda:0", relayout=larger_workspace)
        partition(chain(100, 100), [target], accountants, settings=settings)
        return accountants["cuda:0"].consumed

    text = r"'n0' -> v0\) declares a workspace of 56 B after the layout change of cuda:0: 55 B are"
    with pytest.raises(ModelGraphError, match=text):
        placed(150, "1")
    with pytest.warns(ConfigWarning, match=text):
        assert placed(150, "0") == 330
    assert placed(151, "1") == 332


def test_nodes_removed_by_a_layout_change_are_not_committed():
    def relayout(graph, nodes):
        first, _, last = graph.nodes
        kept = Node("Op", [first.outputs[0], last.inputs[1]], last.outputs, name="n2")
        return ModelGraph([first, kept], inputs=graph.inputs, outputs=graph.outputs)

    accountant = budget(1000)
    partition(chain(100, 100, 100), [Target("cuda:0", relayout=relayout)], {"cuda:0": accountant})
    assert accountant.consumed == 220


def test_layout_change_may_not_change_inputs_and_outputs():
    def relayout(graph, nodes):
        return ModelGraph(graph.nodes[:1], inputs=graph.inputs, outputs=graph.nodes[0].outputs)

    for bad in (relayout, lambda graph, nodes: None):
        accountant = budget()
        with pytest.raises(ModelGraphError, match="layout change of cuda:0"):
            partition(chain(10, 10), [Target("cuda:0", relayout=bad)], {"cuda:0": accountant})
        assert accountant.consumed == accountant.pending == 0


def test_unplaceable_node_is_an_error_with_reasons_and_commits_nothing():
    accountants = {"cuda:0": budget(110), "host": budget(50)}
    with pytest.raises(ModelGraphError, match=r"n1.*cuda:0: needs 110 .*host:0: needs 110"):
        partition(chain(100, 100), ["cuda:0", "host"], accountants)
    assert all(one.consumed == one.pending == 0 for one in accountants.values())


def test_earlier_commits_count_towards_the_budget():
    accountant = budget(330)
    partition(chain(100, 100), ["cuda:0"], {"cuda:0": accountant})
    placement = partition(chain(100, 100), ["cuda:0", "host"], {"cuda:0": accountant})
    assert len(placement.nodes_on("cuda:0")) == 1
    assert accountant.consumed == 330


def test_stats_accountants_place_nodes():
    graph = chain(100, 100)
    stats = {unique_node_name(node): NodeStats(1, 2, 3, 4) for node in graph}
    placement = partition(graph, ["cuda:0", "host"], {"cuda:0": StatsAccountant(stats, 19)})
    assert names_on(placement, "cuda:0") == ["n0"]


def test_arguments_that_contradict_each_other_are_refused():
    graph, accountant = chain(100), budget()
    for devices in ([], ["cuda:0", "cuda"]):
        with pytest.raises(ConfigError, match="each once"):
            partition(graph, devices)
    with pytest.raises(ConfigError, match="cuda:1"):
        partition(graph, ["cuda:0"], {"cuda:1": accountant})
    with pytest.raises(ConfigError, match="two devices"):
        partition(graph, ["cuda:0", "host"], {"cuda:0": accountant, "host": accountant})
    with pytest.raises(ConfigError, match="greedy, best"):
        partition(graph, ["cuda:0"], strategy="lucky")
    with pytest.raises(ValueError, match="tpu"):
        partition(graph, ["tpu"])


def graph_of(rows, step):
    """Make a graph of (bytes made, weight) for each node; four weights of 0, `step`, ... bytes."""
    builder = GraphBuilder()
    x = builder.input("x", "uint8", (1,))
    weights = [builder.initializer(f"w{n}", "uint8", (step * n,)) for n in range(4)]
    for number, (nbytes, weight) in enumerate(rows):
        made = builder.value(f"v{number}", "uint8", (nbytes,))
        builder.node("Op", [x, weights[weight]], [made], name=f"n{number}")
    return builder.build([f"v{number}" for number in range(len(rows))])


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), min_size=1, max_size=8),
    st.integers(0, 250),
)
def test_best_order_equals_brute_force_for_few_nodes(rows, threshold):
    """Weights are shared, so that what a node costs depends on the others."""
    graph = graph_of(rows, 10)
    fillings = []
    for chosen in itertools.product([False, True], repeat=len(rows)):
        nodes = [node for node, is_in in zip(graph, chosen, strict=True) if is_in]
        filled = int(budget().cost(nodes))
        if filled <= threshold:
            fillings.append((filled, len(nodes)))
    accountant = budget(threshold)
    placement = partition(graph, ["cuda:0", "host"], {"cuda:0": accountant}, strategy="best")
    assert (accountant.consumed, len(placement.nodes_on("cuda:0"))) == max(fillings)


@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 3)), min_size=17, max_size=24),
    st.integers(0, 400),
)
def test_best_order_of_many_nodes_keeps_to_the_budget_with_shared_weights(rows, threshold):
    graph = graph_of(rows, 50)
    accountant = budget(threshold)
    placement = partition(graph, ["cuda:0", "host"], {"cuda:0": accountant}, strategy="best")
    assert accountant.consumed == budget().cost(placement.nodes_on("cuda:0"))
    assert accountant.consumed.total_bytes <= threshold


LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=14)


@given(LENGTHS, st.integers(0, 2000), st.sampled_from(["greedy", "best"]), st.booleans())
def test_no_budget_is_exceeded_and_commits_add_up(lengths, threshold, strategy, fused):
    graph = chain(*lengths)
    accountant = budget(threshold)
    target = Target("cuda:0", fuse=lambda nodes: [nodes[:2], nodes[2:4]] if fused else [])
    placement = partition(graph, [target, "host"], {"cuda:0": accountant}, strategy)
    costs = [one.cost.total_bytes for one in placement.assignments if one.device.type == "cuda"]
    expected = sum(
        node.outputs[0].nbytes + node.inputs[1].nbytes for node in placement.nodes_on("cuda:0")
    )
    assert accountant.consumed == sum(costs) == expected
    assert expected <= threshold
    assert accountant.pending == 0
    assert len(placement.assignments) == len(graph)


@given(LENGTHS, st.integers(0, 2000))
def test_best_order_fills_at_least_as_much_as_greedy(lengths, threshold):
    filled = []
    for strategy in ("greedy", "best"):
        accountant = budget(threshold)
        partition(chain(*lengths), ["cuda:0", "host"], {"cuda:0": accountant}, strategy)
        filled.append(accountant.consumed.total_bytes)
    assert filled[0] <= filled[1]


# ---- layers that settings assign -----------------------------------------------------------------

BY_NAME, BY_ANNOTATION = "session.name_based_layer_assignment", "session.layer_assignment_settings"


def layers(*annotations):
    builder = GraphBuilder()
    last = builder.input("x", "uint8", (1,))
    for number, annotation in enumerate(annotations):
        name = f"/model/layers.{number}/Op"
        node = builder.node("Op", [last], [f"v{number}"], name=name, layer_ann=annotation)
        last = node.outputs[0]
    return builder.build(outputs=[last])


def devices_of(key, setting, *, devices=("cuda:0", "host"), annotations=("",) * 11):
    placement = partition(layers(*annotations), devices, settings={key: setting})
    return [str(placement[node].device).removesuffix(":0") for node in placement.graph]


def test_a_pattern_of_names_is_found_anywhere_and_the_longest_one_decides():
    setting = " CPU( layers.1 , ) ; gpu(layers.10/);"
    assert devices_of(BY_NAME, setting)[:2] == ["cuda", "host"]
    assert devices_of(BY_NAME, setting)[10] == "cuda"
    with pytest.warns(ConfigWarning, match="decides for no node"):  # equally long: the first
        assert devices_of(BY_NAME, "cpu(layers.1);gpu(layers.);cpu(model/l)")[1:3] == [
            "host",
            "cuda",
        ]


def test_beginnings_of_annotations_decide_before_whole_ones_and_the_first_before_later_ones():
    annotations = ("head", "head2", "body", "bow", "")
    found = devices_of(BY_ANNOTATION, "cpu(=head, bod); gpu(bo, head2)", annotations=annotations)
    assert found == ["host", "cuda", "host", "cuda", "cuda"]
    with pytest.warns(ConfigWarning, match="decides for no node"):
        found = devices_of(BY_ANNOTATION, "cpu(=head); gpu(he)", annotations=("head",))
    assert found == ["cuda"]


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("cuda:1", "cuda:1"), ("gpu:1", "cuda:1"), ("GPU", "cuda"), ("gpu:nvidia", "cuda"),
        ("accelerator", "cuda"), ("CUDAExecutionProvider", "cuda"), ("cpu", "host"),
    ],
)  # fmt: skip
def test_devices_have_the_names_of_onnx_runtime(name, device):
    devices = ("host", "cuda:0", "cuda:1") if device != "host" else ("cuda:0", "cuda:1", "host")
    assert devices_of(BY_NAME, f"{name}(layers.3)", devices=devices)[3] == device


def test_a_node_that_its_device_does_not_take_goes_to_a_later_one():
    tight = Target("cuda:0", supports=lambda node: False)
    devices = ("cuda:1", tight, "host")
    placement = partition(layers("a", "b"), devices, settings={BY_ANNOTATION: "cuda:0(b)"})
    first, second = placement.graph
    assert [str(placement[node].device) for node in (first, second)] == ["cuda:1", "host:0"]
    assert [one.why for one in placement[second].refusals] == [
        "a setting assigns it to cuda:0", "it does not support Op",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("cpu(layers.99)", r"cpu\(layers.99\) decides for no node"),
        ("npu(layers.1)", r"npu\(layers.1\) has no effect: it names none of the devices"),
        ("gpu:7(layers.1)", "names none of the devices"),
    ],
)
def test_a_rule_without_effect_is_warned_of(setting, text):
    with pytest.warns(ConfigWarning, match=text):
        assert devices_of(BY_NAME, setting) == ["cuda"] * 11


@pytest.mark.parametrize(
    "settings",
    [
        {BY_NAME: "cpu"}, {BY_NAME: "cpu(a"}, {BY_NAME: "cpu)a("}, {BY_NAME: "(a)"},
        {BY_NAME: "cpu(a) gpu(b)"}, {BY_NAME: "cpu(=a)"}, {BY_NAME: "cpu(a);gpu(a)"},
        {BY_ANNOTATION: "cpu(=a, = a)"}, {BY_NAME: "cpu(a)", BY_ANNOTATION: "cpu(a)"},
        {"session.layer_assignment": "cpu(a)"}, {"session.strict_workspace_verification": "yes"},
    ],
)  # fmt: skip
def test_settings_of_layers_that_onnx_runtime_refuses_are_refused(settings):
    accountant = budget(1000)
    with pytest.raises(ConfigError, match=r"expected|unknown key"):
        partition(layers("a"), ["host"], {"host": accountant}, settings=settings)
    assert accountant.pending == accountant.consumed
