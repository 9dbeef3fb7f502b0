"""Phases of PyTorch programs in recordings."""

from __future__ import annotations

import threading

import pytest

from gpumem import observe
from gpumem._events import recorder
from gpumem.integrations import torch as gpumem_torch
from gpumem.integrations.torch import _phases

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture(autouse=True)
def followed():
    gpumem_torch.record_phases()


def phases_of(program) -> list[str]:
    """Run a program while something records; return its phases, behind those around them."""
    with observe.record() as recording:
        program()
    paths, inside = [], []
    for event in recording.events():
        if event.action == "phase_begin":
            inside.append(event.tag)
            paths.append(" / ".join(inside))
        elif event.action == "phase_end":
            assert event.tag == inside.pop()
    assert not inside
    return paths


@pytest.fixture
def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def test_step_of_training_has_its_three_passes(model):
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert phases_of(step) == ["forward", "backward", "optimizer"]


def test_gradients_of_a_function_are_a_backward_pass(model):
    def program():
        x = torch.ones(4, 8, requires_grad=True)
        torch.autograd.grad(model(x).sum(), x)

    assert phases_of(program) == ["forward", "backward"]


def test_parts_that_are_computed_again_are_forward_passes_of_the_backward_pass(model):
    checkpoint = torch.utils.checkpoint.checkpoint

    def program():
        checkpoint(
            model, torch.ones(4, 8, requires_grad=True), use_reentrant=False
        ).sum().backward()

    assert phases_of(program) == ["forward", "backward", "backward / forward"]


def test_ranges_of_record_function_are_phases_but_for_those_of_optimizers(model):
    optimizer = torch.optim.SGD(model.parameters())

    @torch.profiler.record_function("epoch")
    def epoch(depth):
        with torch.profiler.record_function("load#1"):
            optimizer.step()
        if depth:
            epoch(depth - 1)

    one = ["epoch", "epoch / load", "epoch / load / optimizer"]
    assert phases_of(lambda: epoch(1)) == [*one, *(f"epoch / {path}" for path in one)]


def test_phases_end_with_exceptions(model):
    optimizer = torch.optim.SGD(model.parameters())
    broken = torch.nn.Linear(3, 3)

    def closure():
        raise KeyError

    def program():
        with pytest.raises(RuntimeError):
            model(torch.ones(4, 3))
        with pytest.raises(RuntimeError):
            torch.ones(3).sum().backward()
        with pytest.raises(KeyError):
            optimizer.step(closure)
        broken(torch.ones(3))
        optimizer.step()

    assert phases_of(program)[:2] == ["forward", "backward"]


def test_threads_have_forward_passes_of_their_own(model):
    def program():
        with torch.profiler.record_function("all"):
            thread = threading.Thread(target=model, args=[torch.ones(4, 8)])
            thread.start()
            thread.join()

    assert phases_of(program) == ["all", "all / forward"]


def test_without_a_recording_nothing_is_written(model):
    model(torch.ones(4, 8)).sum().backward()
    with observe.record() as recording:
        pass
    assert len(recording.events()) == 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:FutureWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")
def test_torchscript_compiles_functions_with_ranges():
    @torch.jit.script
    def scripted(x):
        with torch.profiler.record_function("range"):
            return x + 1

    assert scripted(torch.ones(2)).tolist() == [2, 2]


def test_compiled_module_is_one_graph_and_one_forward_pass(model):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    hooked = model[0].register_forward_hook(lambda *_: None)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert phases_of(lambda: compiled(torch.ones(4, 8))) == ["forward"]
    assert len(graphs) == 1
    hooked.remove()


def test_traced_modules_are_recorded_as_parts(model):
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(model))
    assert [node.op for node in traced.graph.nodes].count("call_module") == 3


def test_parameters_are_written_with_the_classes_of_their_modules(model, monkeypatch):
    written = []
    monkeypatch.setattr(_phases, "set_category", lambda *told: written.append(told[1:]))
    monkeypatch.setattr(_phases, "_addresses", len)
    net = torch.nn.ModuleDict({"part": model, "norm": torch.nn.BatchNorm1d(2)})
    _phases._write_parameters(net, torch.nn.Module.forward)
    texts, _ = recorder.labels_and_stacks()
    assert {(texts[module], count) for count, module in written if count} == {
        ("Sequential / Linear", 2),
        ("_BatchNorm", 5),  # the class that has `forward`
    }
