"""The statistics file: ONNX Runtime's names and columns."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem.accounting import (
    NodeStats,
    StatsAccountant,
    StatsRecorder,
    accountants_from_setting,
    read_stats,
    unique_node_name,
)
from gpumem.accounting.murmur import murmur3_x86_128
from gpumem.errors import ConfigError
from gpumem.planning import GraphBuilder

# Written by onnxruntime 1.31.1 (CPU, optimizations off) for the graph below, run with n = 2 and 5.
FROM_ONNX_RUNTIME = Path(__file__).parent / "data" / "onnxruntime_1_31.csv"


def its_graph():
    builder = GraphBuilder()
    x = builder.input("x", "float32", ("n", 16))
    for name, shape in (("w", (16, 32)), ("bias", (32,)), ("w2", (32, 8)), ("hi", ())):
        builder.initializer(name, "float32", shape)
    builder.node("MatMul", [x, "w"], ["a"], name="first")
    builder.node("Add", ["a", "bias"], ["c"])
    builder.node("Clip", ["c", None, "hi"], ["d"], name="clip")
    builder.node("MatMul", ["d", "w2"], ["e"], name="second with a longer name")
    builder.node("Softmax", ["e"], ["y"])
    return builder.build(outputs=["y"])


def test_nodes_are_found_in_a_statistics_file_of_onnx_runtime():
    stats = read_stats(FROM_ONNX_RUNTIME)
    names = [unique_node_name(node) for node in its_graph().nodes]
    assert sorted(names) == sorted(stats)
    assert "Softmax_12089296346681712305" in names


def test_statistics_file_numbers_are_the_costs():
    accountant = StatsAccountant(FROM_ONNX_RUNTIME)
    assert [accountant.cost(node).total_bytes for node in its_graph().nodes] == [
        320 + 768,
        128 + 768,
        4,
        640 + 256,
        256,
    ]


@pytest.mark.parametrize(
    ("data", "seed", "expected"),
    [
        (b"", 0, "00000000000000000000000000000000"),
        # As given with the reference implementation's own tests by several ports of it.
        (b"The quick brown fox jumps over the lazy dog", 0, "c383152f672ceeec6cf67b5d2c1de9e5"),
    ],
)
def test_murmur_hash_matches_known_values(data, seed, expected):
    assert murmur3_x86_128(data, seed).hex() == expected


ROWS = st.builds(NodeStats, *[st.integers(0, 2**64 - 1)] * 4)
NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters=",", exclude_categories=["Z", "C"]), min_size=1
).filter(lambda name: not name.startswith("#"))


@given(st.dictionaries(NAMES, ROWS))
def test_statistics_round_trip_through_a_file(tmp_path_factory, stats):
    recorder = StatsRecorder()
    recorder._stats = stats
    path = tmp_path_factory.mktemp("stats") / "stats.csv"
    recorder.save(path)
    assert read_stats(path) == stats
    assert path.read_text().startswith(
        "#name,input_sizes,initializers_sizes,total_dynamic_sizes,total_temp_allocations\n"
    )


def test_empty_lines_are_skipped_and_the_last_line_of_a_name_wins(tmp_path):
    path = tmp_path / "s.csv"
    path.write_text("#x,y\n\na,1,2,3,4\n,9,9,9,9\n  \nb,0,0,0,0\na,5,6,7,8\n")
    assert read_stats(path) == {"a": NodeStats(5, 6, 7, 8), "b": NodeStats()}


@pytest.mark.parametrize(
    "line",
    ["a", "a,1,2,3", "a,1,2,3,4,5", "a,1,2,3,x", "a,1,2,3,-4", "a,1,2,3,", f"a,1,2,3,{2**64}"],
)
def test_malformed_line_is_an_error_that_names_it(tmp_path, line):
    path = tmp_path / "s.csv"
    path.write_text(f"a,1,2,3,4\n{line}\n")
    with pytest.raises(ConfigError, match=r"s\.csv, line 2"):
        read_stats(path)


def test_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.csv"):
        StatsAccountant(tmp_path / "missing.csv")


def test_name_that_no_file_can_have_is_refused_as_unreadable():
    with pytest.raises(ConfigError, match=r"cannot be read: .*null byte"):
        read_stats("a\0b")
    with pytest.raises(ConfigError, match=r"cannot be read: .*null byte"):
        accountants_from_setting("1024,a\0b")


def test_recorder_keeps_the_maximum_over_runs():
    node = its_graph().nodes[0]
    recorder = StatsRecorder()
    for n, temporary in ((2, 500), (5, 100)):
        recorder.start_run()
        recorder.record(node, {"x": 64 * n, "a": 128 * n}, temporary_bytes=temporary)
    assert recorder.stats == {unique_node_name(node): NodeStats(320, 2048, 640, 500)}


def test_value_counts_once_in_a_run():
    _, add, clip, *_ = its_graph().nodes
    recorder = StatsRecorder()
    sizes = {"a": 10, "c": 20, "d": 30}
    recorder.record(add, sizes)
    recorder.record(clip, sizes)
    assert recorder.stats[unique_node_name(clip)] == NodeStats(0, 4, 30, 0)
    recorder.start_run()
    recorder.record(clip, sizes)
    assert recorder.stats[unique_node_name(clip)] == NodeStats(20, 4, 30, 0)


def test_unknown_size_is_an_error_and_records_nothing():
    node = its_graph().nodes[0]
    recorder = StatsRecorder()
    for sizes in ({"x": 1}, {"x": 1, "a": -1}, {"x": 1, "a": 1.5}):
        with pytest.raises(ConfigError, match="'a'"):
            recorder.record(node, sizes)
    assert recorder.stats == {}
    recorder.record(node, {"x": 1, "a": 1})
    assert recorder.stats[unique_node_name(node)].input_bytes == 1


@pytest.mark.parametrize("name", ["a,b", "a\nb", "a\u2028b", "#a", " a", "\ta"])
def test_unwritable_node_name_is_refused_and_nothing_is_written(tmp_path, name):
    builder = GraphBuilder()
    x = builder.input("x", "uint8", (1,))
    recorder = StatsRecorder()
    recorder.record(builder.node("Op", [x], [builder.value("y", "uint8", (1,))], name=name))
    with pytest.raises(ConfigError, match="expected no comma"):
        recorder.save(tmp_path / "s.csv")
    assert not (tmp_path / "s.csv").exists()
