"""Searches of the largest number that fits, by PyTorch's CUDA build: no GPU and no driver."""

import json
import textwrap

import pytest
from helpers.child import python

import gpumem
from gpumem.errors import ConfigError
from gpumem.prediction import largest
from gpumem.prediction.child.forks import values_to_try

MIB = 1 << 20


def tried(values, fits):
    """Search among values; return the values that were tried, in their order."""
    search = values_to_try([values.start, values.stop, values.step])
    found = [next(search)]
    try:
        while True:
            found.append(search.send("script" if fits(found[-1]) else "memory"))
    except StopIteration:
        return found


@pytest.mark.parametrize("values", [range(1, 257), range(8, 257, 8), range(3, 4), range(1, 3)])
def test_search_tries_the_largest_that_fits_and_the_next_one(values):
    for last in [values.start - 1, *values]:
        found = tried(values, lambda value, last=last: value <= last)
        assert len(set(found)) == len(found) <= 2 + len(values).bit_length()
        next_one = values[values.index(last) + 1] if last in values[:-1] else None
        if last in values:
            assert last in found
            assert next_one is None or next_one in found
        else:
            assert found == [values.start]


def test_run_that_ends_for_another_reason_ends_the_search():
    search = values_to_try([1, 100, 1])
    assert next(search) == 1
    with pytest.raises(StopIteration):
        search.send("failed")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("a b", range(3), "invalid name = 'a b': expected letters"),
        ("batch", range(0), r"invalid values = range\(0, 0\): expected a range that rises"),
        ("batch", range(9, 0, -1), "expected a range that rises"),
    ],
)
def test_invalid_searches_are_refused(name, values, message):
    with pytest.raises(ConfigError, match=message):
        largest([__file__], name, values)


def test_number_is_its_default_in_ordinary_runs_or_that_of_the_variable(monkeypatch):
    assert gpumem.vary("batch", 8) == 8
    monkeypatch.setenv("GPUMEM_VARY", "batch=64")
    assert gpumem.vary("batch", 8) == 64
    assert gpumem.vary("other", 8) == 8
    monkeypatch.setenv("GPUMEM_VARY", "batch=many")
    with pytest.raises(ConfigError, match=r"batch=many.*whole number, such as batch=8"):
        gpumem.vary("batch", 8)


@pytest.fixture
def script(tmp_path, needs_pytorch):
    """Write a script that allocates as many MiB as an expression says."""

    def write(count, before=""):
        path = tmp_path / "train.py"
        path.write_text(
            textwrap.dedent(f"""
            import os, sys, gpumem, torch
            {before}
            count = {count}
            kept = torch.empty(count * {MIB}, dtype=torch.uint8, device="cuda")
            """)
        )
        return str(path)

    return write


@pytest.mark.parametrize(
    ("count", "arguments"),
    [
        ("gpumem.vary('mib', 1)", []),
        ("int(os.environ['mib'])", []),
        ("int(sys.argv[1].partition('=')[2])", ["--mib={mib}"]),
    ],
)
def test_largest_number_is_found_with_real_errors(script, count, arguments):
    command = [script(count), *arguments]
    found = largest(command, "mib", range(100, 2001, 50), memory=1640 * MIB, allocators=["default"])
    assert found.largest("default") == 1000
    refused = found.refused("default")
    assert (refused.value, refused.line) == (1050, "train.py:5")
    assert found.prediction.runs["default"].live == 1000 * MIB
    assert found.has_effect()


def test_number_that_an_imported_module_reads_is_varied(script, tmp_path):
    (tmp_path / "settings_of_test.py").write_text("import os\nmib = int(os.environ.get('mib', 3))")
    path = script("settings_of_test.mib")
    text = (tmp_path / "train.py").read_text()
    (tmp_path / "train.py").write_text("import settings_of_test\n" + text)
    found = largest([path], "mib", range(1, 9), memory=1600 * MIB, allocators=["default"])
    assert found.prediction.runs["default"].live == 8 * MIB
    assert found.largest("default") == 8


def test_function_gets_the_number_as_a_keyword(script):
    pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")
    script("0")

    def train(mib):
        import torch

        return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

    options = {"memory": 1640 * MIB, "allocators": ["expandable", "default"]}
    found = largest(train, "mib", range(900, 1200, 100), **options)
    assert [found.largest(each) for each in ("default", "expandable")] == [1000, 1000]
    assert [run.value for run in found.tried] == [900, 1000, 1100] * 2


def test_command_prints_the_largest_and_its_status_is_the_answer(script):
    options = ["--memory", "1640MiB", "--allocator", "default", "--vary"]
    command = ["-m", "gpumem", "predict", *options]
    found = python(*command, "mib=100..1100:100", script("gpumem.vary('mib', 1)"), status=0)
    assert "1000" in found.stdout
    assert "1100 is out of memory at train.py:5" in found.stdout
    none = python(*command, "mib=2000..3000", "--json", script("gpumem.vary('mib', 1)"), status=3)
    assert json.loads(none.stdout)["largest"] == {"default": None}
    ignored = python(*command, "other=1..9", script("7"), status=0)
    assert "memory is the same with each other: the script does not read it" in ignored.stdout
    fails = python(*command, "mib=1..9", script("6 % (gpumem.vary('mib', 1) - 9) + 8"), status=1)
    said = " ".join(fails.stdout.split())
    assert "train.py:4: ZeroDivisionError: integer modulo by zero with mib = 9" in said


@pytest.mark.parametrize("text", ["batch", "batch=1", "batch=9..1", "1x=1..2", "b=1..9:0"])
def test_command_refuses_other_ranges(text):
    refused = python("-m", "gpumem", "predict", "--vary", text, __file__, status=2)
    assert "such as batch=1..256" in " ".join(refused.stderr.split())
