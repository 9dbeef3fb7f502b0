"""``gpumem peak``, and ``gpumem report --diff``."""

import json

import numpy as np
import pytest
from helpers.torch_snapshots import entry, snapshot_file

import gpumem
from gpumem import observe

MIB = 1 << 20


def trace_file(path, *sizes):
    count = len(sizes)
    np.savez(
        path,
        action=np.zeros(count, np.int8),
        block=np.arange(count, dtype=np.int32),
        size=np.array(sizes),
        stream=np.zeros(count, np.int16),
        time_us=np.arange(count),
    )
    return path


@pytest.fixture
def run(tmp_path):
    return trace_file(tmp_path / "run.npz", 60 * MIB, 40 * MIB)


def test_peak_is_printed_in_few_lines(gpumem_command, run):
    code, out, err = gpumem_command("peak", run)
    assert (code, err) == (0, "")
    assert out.startswith("peak")
    assert "100.0 MiB live" in out
    assert len(out.splitlines()) <= 10


def test_peak_as_json(gpumem_command, run):
    code, out, _ = gpumem_command("peak", run, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["live_bytes"], found["reserved_bytes"]) == (100 * MIB, None)


@pytest.mark.parametrize(("limit", "expected"), [("100MiB", 0), (100 * MIB - 1, 3)])
def test_peak_above_max_exits_with_3(gpumem_command, run, limit, expected):
    code, out, err = gpumem_command("peak", run, "--max", limit)
    assert code == expected
    assert out.startswith("peak")
    assert ("above" in err) == bool(expected)


@pytest.mark.parametrize(
    ("tolerance", "expected"), [("0%", 3), ("24%", 3), ("25%", 0), ("20MiB", 0), ("19MiB", 3)]
)
def test_peak_above_a_baseline_exits_with_3(gpumem_command, run, tmp_path, tolerance, expected):
    before = trace_file(tmp_path / "before.npz", 80 * MIB)
    code, _, _ = gpumem_command("peak", run, "--baseline", before, "--tolerance", tolerance)
    assert code == expected


@pytest.mark.parametrize("tolerance", ["x", "-1%", "nan%", "inf%", "2"])
def test_invalid_tolerance_is_refused(gpumem_command, run, tolerance):
    code, out, err = gpumem_command("peak", run, "--baseline", run, "--tolerance", tolerance)
    assert (code, out) == (2, "") if tolerance != "2" else code == 0
    assert tolerance == "2" or tolerance in err


def test_report_prints_the_growth_of_two_files(gpumem_command, run, tmp_path):
    other = trace_file(tmp_path / "other.npz", 30 * MIB)
    page = tmp_path / "page.html"
    code, out, _ = gpumem_command("report", other, run, "--diff", "-o", page)
    assert code == 0
    assert page.exists()
    assert "+70.0 MiB" in out
    code, out, err = gpumem_command("report", run, "--diff", "-o", page)
    assert (code, out) == (2, "")
    assert "2 files" in err


def recorded(path, kept):
    arena = gpumem.Arena("host")
    with observe.record(path=path, stacks=True):
        blocks = [arena.allocate(MIB) for _ in range(kept)]
    del blocks
    return path


def snapshot(path, *devices):
    """Write a snapshot of PyTorch with a block of each of these sizes, on devices of their own."""
    frames = [{"filename": "/job/train.py", "line": 3, "name": "load"}]
    traces = [[entry("alloc", 4096, size, frames=frames)] for size in devices]
    path.parent.mkdir()
    return snapshot_file(path, *traces)


def test_growth_is_that_of_the_busiest_memories_under_the_names_of_both(gpumem_command, tmp_path):
    before = snapshot(tmp_path / "a" / "run.pickle", 3 * MIB, MIB)
    after = snapshot(tmp_path / "b" / "run.pickle", 5 * MIB, 2 * MIB)
    page = tmp_path / "page.html"
    code, out, _ = gpumem_command("report", before, after, "--diff", "-o", page)
    rows = [line.split() for line in out.splitlines() if line.strip()]
    assert code == 0
    assert rows[0][3:] == ["a/run,", "device", "0", "b/run,", "device", "0", "grown"]
    assert rows[2] == ["all", "3.0", "MiB", "5.0", "MiB", "+2.0", "MiB"]
    assert rows[3] == ["load", "(train.py:3)", *rows[2][1:]]
    _, out, _ = gpumem_command("report", after, after, "--diff", "-o", page)
    assert out.split()[-2:] == ["0", "B"]


def test_peak_above_a_baseline_says_what_grew(gpumem_command, tmp_path):
    before = recorded(tmp_path / "before.events", 3)
    after = recorded(tmp_path / "after.events", 5)
    code, out, _ = gpumem_command("peak", after, "--baseline", before)
    (grown,) = (line for line in out.splitlines() if line.startswith("grown"))
    assert code == 3
    assert "+2.0 MiB of " in grown
    _, out, _ = gpumem_command("peak", after, "--baseline", before, "--json")
    assert [change["grown"] for change in json.loads(out)["changes"]] == [2 * MIB]


def test_diff_of_files_without_stacks_says_so(gpumem_command, run, tmp_path):
    other = trace_file(tmp_path / "other.npz", 30 * MIB)
    _, _, err = gpumem_command("report", other, run, "--diff", "-o", tmp_path / "page.html")
    assert "neither stacks nor owners" in err


def test_files_of_one_name_are_told_apart(gpumem_command, tmp_path):
    paths = []
    for folder in ("a", "b"):
        (tmp_path / folder / "same").mkdir(parents=True)
        paths.append(trace_file(tmp_path / folder / "same" / "run.npz", MIB))
    page = tmp_path / "page.html"
    assert gpumem_command("report", *paths, "-o", page)[0] == 0
    text = page.read_text()
    assert '"a/same/run"' in text
    assert '"b/same/run"' in text
