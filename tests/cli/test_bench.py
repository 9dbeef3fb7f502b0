"""``gpumem bench``: what it measures, and what it tells of what it cannot."""

import importlib
import json
import sys
import types

import pytest

import gpumem
from gpumem.cli import main
from gpumem.device import Device

# By its full name: in its package, "bench" is the command.
bench_module = importlib.import_module("gpumem.cli.bench")


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    monkeypatch.setattr(bench_module, "RUN_SECONDS", 1e-5)
    monkeypatch.setattr(bench_module, "ROUNDS", 3)


def bench(capsys, *arguments):
    code = main(["bench", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def measured(capsys, *arguments):
    code, out, err = bench(capsys, "--json", *arguments)
    assert (code, err) == (0, "")
    return json.loads(out)


def test_bench_measures_every_device_with_every_size(capsys):
    facts = measured(capsys)
    assert [each["device"] for each in facts["devices"]] == list(map(str, gpumem.devices()))
    for each in facts["devices"]:
        arena = [cost for cost in each["costs"] if cost["name"] == "gpumem.Arena"]
        assert [cost["nbytes"] for cost in arena] == list(bench_module.SIZES)
        assert all(cost["ns"] > 0 and cost["ratio"] == 1 for cost in arena)


def test_bench_measures_the_host_beside_numpy_a_pool_and_the_driver(capsys):
    (host,) = measured(capsys, "--device", "host")["devices"]
    names = {cost["name"] for cost in host["costs"]}
    assert {"gpumem.Arena", "gpumem.DriverPool", "calls of the host device", "numpy.empty"} <= names
    without = {cost["name"] for cost in host["costs"] if cost["ratio"] is None}
    assert without - {"torch.empty"} == {"calls of the host device"}


def test_bench_names_a_failing_library_with_its_reason(capsys, monkeypatch):
    """Such as a PyTorch that was built for another GPU: the others are measured all the same."""
    broken = types.ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", broken)
    monkeypatch.setattr(bench_module, "find_spec", lambda name: name == "torch" or None)
    (host,) = measured(capsys, "--device", "host")["devices"]
    costs = [cost for cost in host["costs"] if cost["name"] == "torch.empty"]
    assert all((cost["ns"], cost["ratio"]) == (None, None) for cost in costs)
    assert all(cost["error"].startswith("AttributeError") for cost in costs)
    assert len(costs) == len(bench_module.SIZES)


def test_bench_times_and_ratios_are_medians_of_rounds(monkeypatch):
    rounds = iter([1.0, 8.0, 10.0, 30.0, 4.0, 12.0])
    contenders = [("gpumem.Arena", lambda: int), ("other", lambda: int)]
    monkeypatch.setattr(bench_module, "_contenders", lambda device, nbytes: contenders)
    monkeypatch.setattr(bench_module, "_pairs_in_a_run", lambda pair: 1)
    monkeypatch.setattr(bench_module, "_run", lambda pair, count: next(rounds))
    arena, other = bench_module._costs(Device("host"), 4096)
    assert (arena["ns"], arena["ratio"]) == (4.0, 1.0)
    assert (other["ns"], other["ratio"]) == (12.0, 3.0)


def test_bench_prints_a_table_per_device(capsys):
    code, out, err = bench(capsys, "--device", "host")
    assert (code, err) == (0, "")
    assert "host:0" in out
    assert "4.0 KiB" in out


@pytest.mark.parametrize("arguments", [("--device", "tpu:0"), ("--device", "host:9"), ("x",)])
def test_bench_bad_input_is_one_line_and_exit_code_2(capsys, arguments):
    code, out, err = bench(capsys, "--json", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("gpumem: ")
    assert err.count("\n") == 1
