"""``gpumem plan``: what it prints, what it writes, and with which exit code it refuses."""

import functools
import json
import os
import sys

import pytest
from onnx import TensorProto, helper, save
from planning.models import DATA

from gpumem.accounting import AdHocAccountant, StatsRecorder
from gpumem.planning import ModelGraph, partition, plan_memory


@pytest.fixture
def command(gpumem_command):
    """Run ``gpumem plan``; returns (exit code, stdout, stderr)."""
    return functools.partial(gpumem_command, "plan")


@pytest.fixture
def model():
    return DATA / "resnet.onnx"


@pytest.fixture
def named(tmp_path):
    """A model whose batch has a name."""
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 4]) for n in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", infos[:1], infos[1:])
    path = tmp_path / "named.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def half_of(model):
    return AdHocAccountant().cost(ModelGraph.from_onnx(model).nodes).total_bytes // 2


def test_plan_json_equals_the_librarys_plan(command, model):
    budget = half_of(model)
    code, out, err = command(model, "--budget", budget, "--json")
    told = json.loads(out)
    assert (code, err) == (0, "")
    accountants = {
        name: AdHocAccountant(limit) for name, limit in (("cuda", budget), ("host", None))
    }
    placement = partition(ModelGraph.from_onnx(model), ["cuda:0", "host"], accountants)
    gpu, cpu = told["devices"]
    assert (gpu["device"], gpu["budget_bytes"], cpu["budget_bytes"]) == ("cuda:0", budget, None)
    assert 0 < gpu["nodes"] < len(placement.assignments), "a part of it"
    assert gpu["nodes"] + cpu["nodes"] == len(placement.assignments)
    assert gpu["committed_bytes"] == int(accountants["cuda"].consumed) <= budget
    assert [row["device"] for row in told["nodes"]] == [
        str(one.device) for one in placement.assignments
    ]
    assert (
        sum(row["cost_bytes"] for row in told["nodes"] if row["device"] == "cuda:0")
        == (gpu["committed_bytes"])
    )
    made = plan_memory(placement, in_place="onnxruntime")
    assert told["memory"] == made.as_dict()
    assert told["copied_bytes"] == made.copies.copied_bytes


def test_plan_file_equals_the_printed_json(command, model, tmp_path):
    path = tmp_path / "plan.json"
    code, out, err = command(model, "--budget", "10KiB", "-o", path)
    assert (code, err) == (0, "")
    assert json.loads(path.read_text()) == json.loads(
        command(model, "--budget", "10KiB", "--json")[1]
    )
    for word in ("cuda:0", "host:0", "committed", "10.0 KiB", "peak", "lower bound", " are left"):
        assert word in out


def test_plan_tables_show_copies_and_unknown_sizes(command, named, model):
    out = command(named)[1]
    assert "size only known in a run" in out
    assert "nothing is copied" in out
    out = command(model, "--device", "cuda:0", "--device", "cuda:1", "--budget", half_of(model))[1]
    assert "are copied in a run" in out


def test_plan_for_a_device_that_is_absent_says_so(command, named):
    code, out, _ = command(named, "--device", "host:63", "--device", "host")
    assert (code, "host:63 is not present here: the plan is for a machine" in out) == (0, True)
    code, out, _ = command(named, "--device", "host")
    assert (code, "not present" in out) == (0, False)
    told = json.loads(command(named, "--device", "host:63", "--device", "host", "--json")[1])
    assert told["absent"] == ["host:63"]


def test_plan_names_the_dimension_that_was_meant(command, named):
    code, _, err = command(named, "--dim", "batsch=8")
    assert (code, err) == (
        2,
        f"gpumem: {named}: unknown dimension 'batsch': did you mean 'batch'? "
        "the model takes batch\n",
    )


def test_plan_begins_with_the_options_that_open_lengths_need(command, named):
    code, out, _ = command(named)
    assert (code, out.splitlines()[0]) == (
        0,
        "some lengths are open, and what depends on them counts as 0 B: give --dim batch=...",
    )
    assert json.loads(command(named, "--json")[1])["open_dims"] == ["batch"]
    _, bound, _ = command(named, "--dim", "batch=8")
    assert "--dim batch" not in bound
    _, _, refused = command(named, "--dim", "depth=3")
    assert "unknown dimension 'depth': the model takes batch" in refused
    assert "gpumem plan --help explains the words" in bound
    explained = command("--help")[1]
    for word in ("committed: ", "budget: ", "peak: ", "lower bound: "):
        assert word in explained
        assert word not in bound


def test_plan_names_the_largest_tensors_at_the_peak_and_the_reason_of_pinned_memory(
    command, named, model
):
    told = json.loads(command(named, "--dim", "batch=8", "--device", "host", "--json")[1])
    assert told["at_peak"]["host:0"] == [
        {"value": "x", "node": "", "nbytes": 128},
        {"value": "y", "node": "Relu", "nbytes": 128},
    ]
    told = json.loads(command(model, "--json")[1])
    for memory, values in told["at_peak"].items():
        bound = told["memory"]["memories"][memory]["lower_bound_bytes"]
        alignment = told["memory"]["alignment"]
        assert sum(-(-one["nbytes"] // alignment) * alignment for one in values) == bound
    out = command(model)[1]
    assert "cuda:0/host_accessible is pinned host memory" in out
    assert "largest at the peak" in out


def test_plan_keeps_the_greedy_order_where_the_search_alternates_for_few_nodes(command):
    budget = AdHocAccountant().cost(ModelGraph.from_onnx(DATA / "resnet.onnx").nodes).total_bytes
    options = [DATA / "resnet.onnx", "--budget", budget * 3 // 10, "--json"]
    greedy, best = (
        json.loads(command(*options, "--strategy", strategy)[1]) for strategy in ("greedy", "best")
    )
    assert greedy["nodes"] != best["nodes"], "one change of device more, for more nodes"
    options[2] = budget // 2
    greedy, best = (
        json.loads(command(*options, "--strategy", strategy)[1]) for strategy in ("greedy", "best")
    )
    assert greedy["nodes"] == best["nodes"]
    assert "greedy is kept" in best["devices"][0]["gain"]


def test_plan_searches_in_a_model_of_20_000_nodes(command, tmp_path):
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [64]) for n in ("v0", "v20000"))
    kinds = ("Softmax", "Relu", "Neg", "Exp")
    nodes = [helper.make_node(kinds[i % 4], [f"v{i}"], [f"v{i + 1}"]) for i in range(20_000)]
    graph = helper.make_graph(nodes, "chain", [x], [y])
    path = tmp_path / "long.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    code, out, _ = command(path, "--budget", "2MiB", "--strategy", "best", "--json")
    told = json.loads(out)
    assert (code, [one["nodes"] for one in told["devices"]]) == (0, [5461, 14539])
    assert told["memory"]["peak_bytes"] == told["memory"]["lower_bound_bytes"]


def test_plan_takes_onnx_runtimes_settings_and_warns_of_patterns_without_effect(command, model):
    given = "session.name_based_layer_assignment=cpu(conv_2); gpu(absent)"
    code, out, err = command(model, "--setting", given, "--json")
    devices = {one["name"]: one["device"] for one in json.loads(out)["nodes"]}
    assert (code, devices["conv_2"], devices["conv_0"]) == (0, "host:0", "cuda:0")
    assert err == (
        "gpumem: warning: session.name_based_layer_assignment: gpu(absent) decides for no node of "
        "the graph\n"
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("gpu_mem_limit=1", "unknown key 'gpu_mem_limit': did you mean '--budget'?"),
        ("session.enable_static_workspace_preallocation=2", "expected '0' or '1'"),
        ("session.function_expansion_node_limit=0", "expected an integer from 1"),
        ("session.strict_workspace_verification", "expected KEY=VALUE, each key once"),
    ],
)
def test_plan_refuses_other_settings_in_one_line(command, model, setting, message):
    code, out, err = command(model, "--setting", setting)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_plan_binds_named_lengths(command, named):
    told = json.loads(command(named, "--dim", "batch=8", "--json")[1])
    assert told["memory"]["unplanned"] == []
    assert told["memory"]["peak_bytes"] == 2 * 256


def test_plan_names_the_values_in_a_branch_that_have_no_known_size(command, tmp_path):
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in "xy")
    condition = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    nodes = [helper.make_node("NonZero", ["x"], ["n"]), helper.make_node("Neg", ["x"], ["y"])]
    branch = helper.make_graph(nodes, "branch", [], [y])
    node = helper.make_node("If", ["c"], ["y"], name="if", then_branch=branch, else_branch=branch)
    path = tmp_path / "branches.onnx"
    save(helper.make_model(helper.make_graph([node], "g", [x, condition], [y]), ir_version=8), path)
    code, out, _ = command(path)
    assert (code, "size only known in a run  if/n" in out) == (0, True)
    assert json.loads(command(path, "--json")[1])["memory"]["uncounted"] == ["if/n"]


def test_plan_places_weights_on_request(command, model):
    without, plan = (
        json.loads(command(model, *more, "--json")[1]) for more in ((), ("--weights",))
    )
    assert plan["memory"]["peak_bytes"] > without["memory"]["peak_bytes"]


def test_plan_takes_a_budget_per_device_and_a_strategy(command, model):
    total = 2 * half_of(model)
    options = ["--device", "cuda:0", "--device", "cuda:1", "--device", "host"]
    options += ["--budget", f"cuda:1={total // 3}", "--budget", total // 3, "--strategy", "best"]
    told = json.loads(command(model, *options, "--json")[1])
    assert [row["budget_bytes"] for row in told["devices"]] == [total // 3, total // 3, None]
    assert "than the greedy order" in told["devices"][0]["gain"]
    assert "than the greedy order" in command(model, *options)[1]


def test_plan_uses_measured_costs_from_statistics(command, model, tmp_path):
    recorder = StatsRecorder()
    for node in ModelGraph.from_onnx(model):
        recorder.record(node, temporary_bytes=1000)
    recorder.save(tmp_path / "stats.csv")
    told = json.loads(command(model, "--stats", tmp_path / "stats.csv", "--json")[1])
    assert told["devices"][0]["committed_bytes"] == sum(
        row.total_bytes for row in recorder.stats.values()
    )
    code, out, err = command(model, "--stats", tmp_path / "stats.csv", "--percent", 200)
    assert (code, out) == (2, "")
    assert "--percent cannot be combined with --stats" in err
    exact = json.loads(command(model, "--percent", 100, "--json")[1])
    assert exact["devices"][0]["committed_bytes"] == AdHocAccountant(percent=100).cost(
        ModelGraph.from_onnx(model).nodes
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "lots"], "whole bytes"),
        (["--budget", "cuda:3=1KiB"], "not among the devices"),
        (["--budget", "1KiB", "--budget", "cuda:0=2KiB"], "given twice"),
        (["--device", "tpu"], "tpu"),
        (["--device", "host", "--device", "cpu"], "each once"),
        (["--dim", "batch"], "NAME=N"),
        (["--dim", "depth=3"], "unknown dimension 'depth': no input of the model has a named one"),
        (["--stats", "none.csv"], "cannot be read"),
        (["--percent", "10"], "10"),
        (["--percent", "x"], "valid integer from 100 to 10000"),
        (["--budget", "=5"], "--budget: unknown device ''"),
        (["--strategy", "lucky"], "lucky"),
    ],
)
def test_plan_bad_input_is_one_line_and_exit_code_2(command, model, options, message):
    for more in ([], ["--json"]):
        code, out, err = command(model, *options, *more)
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1


def test_plan_of_a_missing_or_invalid_model_is_bad_input(command, tmp_path):
    text = tmp_path / "text.onnx"
    text.write_text("not a model")
    for path in (text, tmp_path / "nothing.onnx", tmp_path):
        code, out, err = command(path)
        assert (code, out) == (2, "")
        assert str(path) in err


@pytest.mark.parametrize("name", ["model.json", "model.textproto", "model.onnxtxt", "model.onnx"])
def test_plan_of_a_damaged_model_in_any_form_is_bad_input(command, tmp_path, name):
    path = tmp_path / name
    path.write_text("(")
    code, out, err = command(path)
    assert (code, out) == (2, "")
    assert "is not an ONNX model" in err
    assert err.count("\n") == 1


def test_plan_of_a_model_beyond_64_bits_is_bad_input(command, named):
    code, out, err = command(named, "--dim", f"batch={1 << 62}")
    assert (code, out) == (2, "")
    assert "bytes" in err
    assert err.count("\n") == 1


def test_plan_fails_when_nodes_fit_nowhere_or_output_is_unwritable(command, model, tmp_path):
    code, out, err = command(model, "--device", "cuda:0", "--budget", "1KiB")
    assert (code, out) == (1, "")
    assert "no device accepts" in err
    code, out, err = command(model, "-o", tmp_path / "nowhere" / "plan.json")
    assert (code, out) == (1, "")
    assert f"cannot be written: there is no folder {tmp_path / 'nowhere'}" in err


@pytest.mark.parametrize("output", ["", ".", "nowhere/plan.json", "taken"])
def test_plan_refuses_an_output_that_cannot_be_written_before_it_reads_the_model(
    command, tmp_path, monkeypatch, output
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "text.onnx").write_text("not a model")
    code, out, err = command("text.onnx", "-o", output)
    assert (code, out) == (1, "")
    assert f"{output or '.'}: cannot be written: " in err
    assert err.count("\n") == 1


def test_plan_writes_to_a_device_in_a_read_only_folder(command, model, monkeypatch):
    allowed = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: str(path) != "/dev" and allowed(path, mode)
    )
    assert command(model, "-o", "/dev/null")[0] == 0


def test_plan_that_would_replace_its_input_is_bad_input(command, named, tmp_path):
    written = named.read_bytes()
    stats = tmp_path / "stats.csv"
    StatsRecorder().save(stats)
    for output in (named, stats):
        code, out, err = command(named, "--stats", stats, "-o", output)
        assert (code, out) == (2, "")
        assert f"--output {output}: expected another file" in err
    assert named.read_bytes() == written


def test_plan_without_onnx_names_the_missing_package(command, model, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    code, out, err = command(model)
    assert (code, out) == (1, "")
    assert "pip install onnx" in err
    code, out, err = command(model.with_name("none.onnx"))
    assert (code, "No such file" in err, err.count("\n")) == (2, True, 1)
