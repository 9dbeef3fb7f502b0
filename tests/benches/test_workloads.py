"""Workloads at their tiny size on the CPU."""

import functools
import json
import sys
from pathlib import Path

import pytest
from helpers.child import program

from bench import workloads
from bench.children import Child, Ranks, ask_all

torch = pytest.importorskip("torch", reason="torch is not installed")

from bench.workloads.allocators import is_exhaustion  # noqa: E402
from bench.workloads.limits import largest_scale, largest_that_fits  # noqa: E402
from bench.workloads.workload import Run, be_deterministic  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def deterministic():
    """PyTorch's settings go back to what they were."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    be_deterministic()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.backends.cudnn.deterministic = False
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)


def steps(name, seed, count):
    """Return the shapes, times and values of a tiny run."""
    run = Run()
    run.begin(name, "tiny", CPU, seed)
    seconds, values = zip(*(run.step() for _ in range(count)), strict=True)
    shapes = run.workload.shapes
    run.end()
    return shapes, seconds, values


@functools.cache
def steps_of_seed_4(name):
    """Return the shapes and values of six steps, for the tests that need a run of another seed."""
    shapes, _, values = steps(name, 4, 6)
    return shapes, values


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_same_seed_gives_the_same_shapes_and_bits(name):
    (shapes, seconds, values), (shapes_again, _, values_again) = (steps(name, 3, 5) for _ in "12")
    assert shapes == shapes_again
    assert values == values_again
    assert min(seconds) > 0
    assert len(set(values)) == 5, "steps do not differ"
    assert steps_of_seed_4(name)[1][:5] != values


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_weights_and_data_come_from_the_seed(name):
    first, again, other = (workloads.make(name, "tiny", CPU, seed) for seed in (1, 1, 2))
    weights, same, different = (
        torch.cat([p.detach().flatten() for p in workload.model.parameters()])
        for workload in (first, again, other)
    )
    assert torch.equal(weights, same)
    assert not torch.equal(weights, different)
    data, same, different = (workload.tokens(61, 50) for workload in (first, again, other))
    assert torch.equal(data, same)
    assert not torch.equal(data, different)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.compile imports
def test_compiled_training_gives_the_same_bits_again():
    first, again = (steps("llama_compiled_train", 3, 3)[2] for _ in "12")
    assert first == again
    assert len(set(first)) == 3, "steps do not differ"


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_shapes_change_from_step_to_step(name):
    assert len(set(steps_of_seed_4(name)[0])) > 2


def test_training_lowers_the_loss():
    """One batch over and over: the loss falls, so gradients reach the weights."""
    for name in ("gpt2_train", "mixtral_train", "llama_train"):
        workload = workloads.make(name, "tiny", CPU, 0)
        tokens = workload.tokens(61, 2, 9)
        workload.tokens = lambda *_, fixed=tokens: fixed
        workload.optimizer.param_groups[0]["lr"] = 0.01
        losses = [float(workload.step()) for _ in range(30)]
        assert losses[-1] < 0.7 * losses[0], (name, losses)


@pytest.mark.parametrize("kind", ["gpt2_generate", "llama_serve"])
def test_kv_cache_gives_the_logits_of_the_whole_sequence(kind):
    from bench.workloads.transformer import Cache

    model = workloads.make(kind, "tiny", CPU, 0).model
    tokens = torch.randint(61, (2, 7), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        cache = Cache(model.of.layers)
        model(tokens[:, :4], cache)
        for at in range(4, 7):
            last = model(tokens[:, at : at + 1], cache)
        assert cache.length == 7
        torch.testing.assert_close(last[:, 0], model(tokens)[:, -1])


def test_experts_are_those_each_token_selects():
    from bench.workloads.mixtral import TINY
    from bench.workloads.transformer import Experts

    torch.manual_seed(0)
    experts = Experts(TINY)
    x = torch.randn(2, 5, TINY.width)
    shares, chosen = experts.router(x).softmax(-1).topk(TINY.used)
    expected = torch.stack(
        [
            sum(
                shares[b, t, k] * experts.experts[int(chosen[b, t, k])](x[b, t])
                for k in range(TINY.used)
            )
            for b in range(2)
            for t in range(5)
        ]
    ).view_as(x)
    torch.testing.assert_close(experts(x), expected)


@pytest.mark.parametrize("most", [1, 3, 99, 100, 1000, 12_345])
def test_limit_search_ends_within_its_resolution(most):
    asked = []

    def fits(scale):
        asked.append(scale)
        return scale <= most

    found = largest_that_fits(fits, 16, 0.01)
    assert found <= most
    assert most - found <= max(1, 0.01 * most)
    assert len(asked) == len(set(asked))


def test_limit_search_returns_zero_when_nothing_fits():
    assert largest_that_fits(lambda scale: False, 64) == 0


def test_limit_search_stops_on_out_of_memory_only(monkeypatch):
    from bench.workloads import limits

    in_flight = []

    class Fails:
        def begin(self, name, size, device, seed, scale):
            self.scale = scale

        def step(self):
            if self.scale > 40:
                raise torch.OutOfMemoryError("no more")

        def end(self):
            in_flight.append(sys.exception())

    monkeypatch.setattr(limits, "Run", Fails)
    assert largest_scale("w", "tiny", CPU, seed=0, steps=1, first=8) == 40
    # An error holds the frames of the step that failed, and they its tensors.
    assert len(in_flight) > 3
    assert not any(in_flight)

    def breaks(self):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(Fails, "step", breaks)
    with pytest.raises(RuntimeError, match="shapes"):
        largest_scale("w", "tiny", CPU, seed=0, steps=1, first=8)


def test_out_of_memory_is_distinguished_from_other_failures():
    assert is_exhaustion(torch.OutOfMemoryError("x"))
    assert is_exhaustion(MemoryError())
    assert is_exhaustion(RuntimeError("CUDA out of memory: ..."))
    assert not is_exhaustion(RuntimeError("shapes do not match"))


def test_child_process_answers_and_reports_errors():
    request = {"do": "begin", "workload": "gpt2_train", "size": "tiny", "seed": 3}
    with Child("native", "cpu") as child:
        assert child.ask(request) == {}
        values = [child.ask({"do": "step"})["value"] for _ in range(2)]
        shapes = child.ask({"do": "end"})["shapes"]
        expected = steps("gpt2_train", 3, 2)
        assert (tuple(values), [tuple(shape) for shape in shapes]) == (expected[2], expected[0])
        assert "AssertionError" in child.ask({"do": "step"})["error"]  # nothing has begun
        assert "KeyError" in child.ask(request | {"workload": "no such"})["error"]
        assert child.ask({"do": "empty", "count": 10})["nanoseconds"] > 0
        child._process.kill()
        answers = ask_all([child], request)
        assert "ended with -9" in answers["native"]["error"]
        assert "ended with -9" in child.ask(request)["error"]


def test_unresponsive_child_process_is_killed():
    with Child("native", "cpu") as child:
        assert child.receive(timeout=0.01) == {"error": "no answer in time"}
        assert child._process.wait(10) == -9


def test_one_command_writes_the_table(tmp_path):
    command = [sys.executable, "-m", "bench.torch_steps", "--size", "tiny", "--device", "cpu"]
    options = "--rounds 2 --steps 2 --warmup 1 --workloads gpt2_train --configurations native full"
    command += [*options.split(), "--out", tmp_path]
    done = program(*command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert (tmp_path / "torch_steps.md").read_text() == done.stdout
    values = json.loads((tmp_path / "torch_steps.json").read_text())
    assert [row["same"] for row in values["rows"]] == [True, True]
    assert [row["rounds"] for row in values["rows"]] == [2, 2]


@pytest.fixture(scope="module")
def ranks():
    """Return two processes, which run one workload after another."""
    with Ranks("native", ["cpu", "cpu"]) as ranks:
        yield ranks


@pytest.mark.parametrize("name", workloads.PARALLEL)
def test_ranks_of_one_seed_draw_the_same_shapes_and_repeat_their_bits(ranks, name):
    begin = {"do": "begin", "workload": name, "size": "tiny", "seed": 5}
    runs = []
    for _ in "12":
        assert ranks.ask(begin) == [{}, {}]
        steps = [ranks.ask({"do": "step"}) for _ in range(3)]
        values = [[answer["value"] for answer in step] for step in steps]
        shapes = [answer["shapes"] for answer in ranks.ask({"do": "end"})]
        assert shapes[0] == shapes[1]
        runs.append((values, shapes))
    assert runs[0] == runs[1]
    assert len({value for step in runs[0][0] for value in step}) > 1
