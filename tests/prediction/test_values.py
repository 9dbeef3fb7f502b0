"""Values that a script reads of the GPU: true integers, stand-ins that are named, and stops."""

import shutil

import pytest

from gpumem.prediction.pytorch import require

pytestmark = pytest.mark.usefixtures("needs_pytorch")
MIB = 1 << 20
COMPUTED = "integers are computed on the CPU"

# Each has the same result on the CPU; `D` is the GPU.
TRUE = {
    "masks": """
        keep = torch.arange(1000, device=D) % 3 == 0
        rows = torch.randn(1000, 64, device=D)[keep]
        assert rows.shape == (334, 64) and torch.where(keep)[0].shape == (334,)
        assert rows.masked_select(keep[:334, None]).numel() == 112 * 64
        rows[keep[:334]] = 0
        pair = torch.zeros(4, 4, device=D)[torch.tensor([1, 0, 1, 0], device=D).bool()]
        assert pair.shape == (2, 4)
    """,
    "lengths": """
        lengths = torch.tensor([5, 17, 9, 3])
        rows = [torch.ones(n, dtype=torch.long) for n in lengths.tolist()]
        batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(D)
        mask = batch != 0
        tokens = torch.randn(4, 17, 8, device=D)[mask]
        assert [len(part) for part in tokens.split(mask.sum(1).tolist())] == [5, 17, 9, 3]
        assert torch.repeat_interleave(torch.arange(4, device=D), mask.sum(1)).shape == (34,)
        ends = torch.nn.functional.pad(lengths.to(D).cumsum(0), (1, 0)).to(torch.int32)
        assert (ends[1:] - ends[:-1]).max().item() == 17 and int(ends[-1]) == 34
        assert torch.bincount(mask.sum(1)).shape == (18,)
        assert (mask.float().mean() * mask.numel()).round() == 34
        rnn = torch.nn.utils.rnn
        packed = rnn.pack_padded_sequence(batch.T[..., None], lengths, enforce_sorted=False)
        assert rnn.pad_packed_sequence(packed)[1].tolist() == [5, 17, 9, 3]
    """,
    "permutations": """
        places = torch.empty(3, dtype=torch.long, device=D)
        order = torch.tensor([2, 0, 1], device=D)
        places.copy_(torch.randn(3, device=D))  # unknown
        places.scatter_(0, order, torch.arange(3, device=D))
        assert places.tolist() == [1, 2, 0]
    """,
    "graphs": """
        edges = torch.tensor([[0, 1, 2, 2, 5, 5], [0, 2, 2, 1, 3, 3]]).to(D)
        degree = torch.zeros(6, dtype=torch.long, device=D)
        degree.scatter_add_(0, edges[0], torch.ones_like(edges[0]))
        assert degree.tolist() == [1, 1, 2, 0, 0, 2]
        assert edges[:, edges[0] != edges[1]].shape == (2, 4)
        nodes, places = torch.unique(edges, return_inverse=True)
        assert nodes.shape == (5,) and places.max() == 4
        assert torch.unique(edges, dim=1).shape == (2, 5)
        assert torch.unique_consecutive(edges[0]).shape == (4,)
    """,
    "writes": """
        n = torch.tensor([4], device=D)
        n += 3
        values = torch.zeros(3, dtype=torch.long, device=D)
        values[1] = n.mul_(2)[0]
        view = values[1:]
        view += 1
        assert values.tolist() == [0, 15, 1]
        values.copy_(torch.randn(3, device=D))  # unknown, until all of it is written again
        values.fill_(5)
        assert view[0].item() == 5
    """,
    "conversions": """
        labels = torch.tensor([0, 3, 3, 1]).to(D)
        assert torch.equal(labels, labels.clone()) and labels.cpu().numpy().sum() == 7
        assert torch.nn.functional.one_hot(labels).shape == (4, 4)
        assert torch.arange(labels.max(), device=D).shape == (3,)
        assert torch.zeros(labels[1], 2, device=D).shape == (3, 2)
        assert len(range(labels[1])) == 3 and f"{labels[3]}" == "1"
        on_host = torch.empty(4, dtype=torch.long)
        assert on_host.copy_(labels)[1] == 3
        times = torch.linspace(1, 50, 50).to(D)
        assert (times == times[7]).nonzero().item() == 7
        value, steps = torch.tensor(100.0, device=D), 0
        while value > 1:
            value, steps = value / 2, steps + 1
        assert steps == 7
    """,
}


@pytest.mark.parametrize("kind", TRUE)
def test_integers_that_follow_from_the_host_are_true(predicted, kind):
    script = f"kept = torch.ones({MIB}, device='cuda')\nD = 'cuda'\n"
    run = predicted(script + "\n".join(line[8:] for line in TRUE[kind].splitlines()))
    assert run.end == "script", run.output
    assert not run.reads
    assert len(run.assumed) == 1
    assert COMPUTED in run.assumed[0]


@pytest.mark.parametrize("kind", TRUE)
def test_scripts_of_these_tests_hold_on_the_cpu(kind):
    torch = pytest.importorskip("torch")
    exec("\n".join(line[8:] for line in TRUE[kind].splitlines()), {"torch": torch, "D": "cpu"})


def test_values_that_follow_from_unknown_ones_are_named(predicted):
    run = predicted("""
        unknown = torch.rand(5, device="cuda")
        assert torch.isfinite(unknown).all()
        values = torch.arange(5, device="cuda")
        values[2:] = unknown[2:].long()
        assert values.tolist() == [0, 1, 0, 0, 0]
        graph, counter = torch.cuda.CUDAGraph(), torch.zeros(1, dtype=torch.long, device="cuda")
        with torch.cuda.graph(graph):
            counter += 1
        counter.zero_()
        graph.replay()
        assert counter.item() == 0
        empty = torch.empty(3, dtype=torch.long, device="cuda")
        empty[0] = 5
        assert empty[0].item() == 5
        empty.scatter_(0, torch.tensor([1, 2, 1], device="cuda"), torch.full_like(empty, 7))
        assert empty[1].item() == 7
        """)
    assert run.end == "script", run.output
    lines = ["train.py:3", "train.py:6", "train.py:12", "train.py:15", "train.py:17"]
    assert sorted(line for line, *_ in run.reads) == sorted(lines)
    for line in lines:
        assert any(text.startswith(f"{line}: if a size") for text in run.assumed)


def test_kernels_of_triton_make_the_tensors_unknown_that_they_are_given(predicted, monkeypatch):
    pytest.importorskip("triton")
    if shutil.which("gcc") is None:
        pytest.skip("Triton needs a C compiler, and gcc was not found")
    monkeypatch.delenv("CC", raising=False)
    run = predicted("""
        import triton, triton.language as tl
        @triton.jit
        def count(to):
            tl.store(to, 3)
        counts = torch.zeros(1, dtype=torch.int32, device="cuda")
        count[(1,)](counts)
        counts.item()
        """)
    assert [line for line, *_ in run.reads] == ["train.py:8"], run.output


def test_figures_are_those_without_computing_where_all_integers_are_zero(predicted):
    run = predicted("""
        model = torch.nn.Linear(64, 64, device="cuda")
        right = (model(torch.ones(8, 64, device="cuda")).argmax(1) == 70).sum().item()
        assert right == 0
        """)
    assert run.end == "script", run.output
    assert list(map(tuple, run.reads)) == [("train.py:3", "_local_scalar_dense", 8, 1)]
    assert not any(COMPUTED in text for text in run.assumed)


def test_comparisons_of_a_stand_in_are_named_and_it_is_a_float_otherwise(predicted):
    run = predicted("""
        import json, math, numpy
        best, losses = math.inf, []
        for i in range(2):
            losses.append(torch.rand(1, device="cuda").item())
            mean = sum(losses) / len(losses)
            if mean < best:
                best = mean
        assert isinstance(mean, float) and json.dumps([mean]) == "[0.0]" and f"{mean:.2f}" == "0.00"
        assert math.isfinite(mean) and numpy.array([mean]).dtype == float and not hash(mean)
        """)
    assert run.end == "script", run.output
    wrong = "train.py:7: compares a stand-in: if the branch is another one, the figures are wrong"
    assert run.assumed == [wrong]


def test_routing_by_a_loop_stops_with_the_figures_so_far(predicted):
    run = predicted("""
        tokens = torch.randn(8192, 256, device="cuda")
        experts = torch.nn.Linear(256, 8, device="cuda")(tokens).topk(2).indices
        for expert in range(8):
            token, place = torch.where(experts == expert)
        """)
    assert (run.end, run.line) == ("stopped", "train.py:5"), run.output
    assert run.reason.startswith("nonzero makes a size of values on the GPU")
    assert run.live >= 8 * MIB


def test_library_with_a_cuda_runtime_of_its_own_is_refused_by_name(predicted):
    run = predicted("""
        import ctypes
        kept = torch.ones(1, device="cuda")
        ctypes.CDLL(None).cuGetExportTable(None, None)
        """)
    assert (run.end, run.line) == ("stopped", "train.py:4"), run.output
    assert "has a CUDA runtime of its own" in run.reason
    assert run.reason.startswith(("libffi", "_ctypes"))


def test_generation_with_a_static_cache_ends(predicted):
    pytest.importorskip("transformers")
    assert require()
    run = predicted("""
        from transformers import LlamaConfig, LlamaForCausalLM
        config = LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=64,
                             num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
        model = LlamaForCausalLM(config).to("cuda").eval()
        prompt = torch.randint(3, 100, (4, 10)).cuda()
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8,
                             do_sample=True, cache_implementation="static", pad_token_id=0)
        assert out.shape == (4, 18)
        """)
    assert run.end == "script", run.output
