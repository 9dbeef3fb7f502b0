"""Predictions of functions by PyTorch's CUDA build, which is enough: no GPU and no driver."""

import functools
import importlib
import sys
import textwrap

import pytest
from helpers.child import python
from prediction.null_cuda import over_null_cuda

import gpumem
from gpumem.errors import ConfigError, MissingFrameworkError

MIB = 1 << 20


@pytest.fixture
def predicted(needs_pytorch):
    """Predict a function with PyTorch's allocator alone, which is enough for what is sent."""
    pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")

    def predict(*call, **options):
        return gpumem.predict(*call, allocators=["default"], **options)

    return predict


def test_closure_is_called_with_its_arguments_and_lines_are_those_of_its_file(predicted):
    size = 30 * MIB

    def fill(count, more=0):
        import torch

        kept = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(count + more)]
        return kept[0].cpu()

    found = predicted(fill, 2, more=1)
    run = found.runs["default"]
    assert (run.end, run.live) == ("script", 90 * MIB), run.output
    line = fill.__code__.co_firstlineno + 4
    assert [(each[0], each[2]) for each in run.reads] == [(f"test_functions.py:{line}", size)]
    assert "90.0 MiB live" in str(found)
    assert f"test_functions.py:{line}: a stand-in for" in repr(found)
    small = predicted(functools.partial(fill, more=100), 1, memory=1600 * MIB)
    assert small.fits("default") is False
    assert small.runs["default"].line == f"test_functions.py:{line - 1}"


def test_function_of_a_module_is_imported_and_its_training_is_stopped(
    predicted, tmp_path, monkeypatch
):
    (tmp_path / "of_a_module.py").write_text(
        textwrap.dedent("""
        def train(batch):
            import torch

            model = torch.nn.Linear(1024, 1024, device="cuda")
            optimizer = torch.optim.AdamW(model.parameters())
            while True:
                model(torch.ones(batch, 1024, device="cuda")).mean().backward()
                optimizer.step()
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "of_a_module", raising=False)
    train = importlib.import_module("of_a_module").train
    run = predicted(train, 64, steps=2).runs["default"]
    assert (run.end, run.steps) == ("steps", 2), run.output
    assert run.live >= 16 * MIB


def test_function_of_a_program_that_has_imported_pytorch_gets_its_tensors(predicted, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent("""
        import torch, gpumem
        weights = torch.ones(1 << 20)
        def move(by):
            return (weights * by).cuda().cpu()
        found = gpumem.predict(lambda: move(2), allocators=["default"])
        run = found.runs["default"]
        print(run.end, run.reads[0][0], run.live)
        """)
    )
    assert python(path).stdout.split() == ["script", "program.py:5", str(4 * MIB)]


def test_error_of_a_function_names_its_line(predicted):
    def fail():
        raise LookupError("no such thing")

    run = predicted(fail).runs["default"]
    line = fail.__code__.co_firstlineno + 1
    assert (run.end, run.line) == ("failed", f"test_functions.py:{line}")
    assert run.reason == "LookupError: no such thing"


def test_tensor_on_the_gpu_is_refused(predicted):
    over_null_cuda("""
        import gpumem, torch
        for each in (torch.ones(3, 4, device="cuda"), torch.nn.Linear(3, 4, device="cuda")):
            try:
                gpumem.predict(lambda x: each, 1)
            except gpumem.ConfigError as error:
                assert "on cuda:0" in str(error), error
            else:
                raise AssertionError(each)
        """)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (3, "invalid fn = 3: expected a function"),
        (sys.stdout.write, "cannot be sent to another process"),
    ],
)
def test_other_things_than_functions_are_refused(fn, message):
    pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")
    with pytest.raises(ConfigError, match=message):
        gpumem.predict(fn)


def test_missing_cloudpickle_is_refused_with_a_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(MissingFrameworkError, match="pip install cloudpickle"):
        gpumem.predict(print)
