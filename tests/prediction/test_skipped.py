"""Work that a prediction skips: checkpoints, weight files, initial values of parameters."""

import textwrap

import pytest
from prediction.test_scripts import MIB

pytestmark = pytest.mark.usefixtures("needs_pytorch", "folder")

WRITTEN = "checkpoints are not written"
MAPPED = "files of weights are mapped, and not read"
NOT_FILLED = "large parameters on the CPU are not filled"
OTHERS = "random numbers after those of large parameters are others"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Run scripts in the folder in which they lie."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
def test_checkpoints_are_not_written_and_their_files_stay(predicted, tmp_path, zipped):
    kept = tmp_path / "model.pt"
    kept.write_bytes(b"of another run")
    run = predicted(f"""
        weights = torch.ones(1 << 20, device="cuda")
        state = {{"weights": weights, "few": torch.arange(3), "step": 7}}
        for file in ("model.pt", "new.pt"):
            torch.save(state, file, _use_new_zipfile_serialization={zipped})
        for file in ("model.pt", "new.pt"):
            loaded = torch.load(file, map_location="cpu")
            assert loaded["weights"].shape == (1 << 20,) and loaded["step"] == 7
            assert loaded["few"].tolist() == [0, 1, 2]
        """)
    assert run.end == "script", run.output
    assert WRITTEN in run.assumed
    assert not run.reads or not zipped
    assert kept.read_bytes() == b"of another run"
    assert not (tmp_path / "new.pt").exists()


def test_checkpoint_in_memory_can_be_loaded_again(predicted):
    run = predicted("""
        import io
        buffer = io.BytesIO()
        weights = torch.ones(1 << 20, device="cuda")
        torch.save({"weights": weights, "step": 7}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer)
        assert loaded["weights"].is_cuda and loaded["step"] == 7
        """)
    assert run.end == "script", run.output
    assert run.live == 8 * MIB


def test_files_of_safetensors_are_not_written(predicted, tmp_path):
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    run = predicted("""
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file
        weights = torch.ones(3, 1 << 20, dtype=torch.bfloat16, device="cuda")
        save_file({"a": weights, "b": torch.ones(2)}, "model.safetensors", {"format": "pt"})
        loaded = load_file("model.safetensors", device="cuda")
        assert loaded["a"].shape == (3, 1 << 20) and loaded["a"].dtype == torch.bfloat16
        with safe_open("model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert file.get_tensor("b").shape == (2,)
        """)
    assert run.end == "script", run.output
    assert {WRITTEN, MAPPED} <= set(run.assumed)
    assert not run.reads
    assert not (tmp_path / "model.safetensors").exists()
    assert run.live >= 12 * MIB


def test_weights_on_disk_are_not_read_and_whole_numbers_are(predicted, tmp_path):
    import torch

    with torch.serialization.skip_data():
        torch.save({"weight": torch.empty(1 << 14, 1 << 15)}, tmp_path / "weights.pt")
    torch.save(torch.arange(1 << 20), tmp_path / "data.pt")
    run = predicted("""
        assert torch.load("data.pt")[-1] == (1 << 20) - 1
        state = torch.load("weights.pt")
        model = torch.nn.Linear(1 << 15, 1 << 14, bias=False)
        model.load_state_dict(state)
        model.to(torch.bfloat16).cuda()
        """)
    assert run.end == "script", run.output
    assert {MAPPED, NOT_FILLED} <= set(run.assumed)
    assert run.live == 1024 * MIB
    assert run.process < 1200 * MIB


def test_large_parameters_on_the_cpu_take_neither_time_nor_memory(predicted):
    run = predicted("""
        from copy import deepcopy
        model = torch.nn.Sequential(*(torch.nn.Linear(1 << 14, 1 << 14) for _ in range(8)))
        torch.nn.init.trunc_normal_(model[0].weight)
        torch.nn.init.zeros_(model[1].weight)
        model[2].weight.data.normal_(0, 0.02)
        other = deepcopy(model)
        model.half().cuda()
        small = torch.nn.Linear(8, 8)
        assert small.weight.abs().sum() > 0
        lazy = torch.nn.LazyLinear(8)
        """)
    assert run.end == "script", run.output
    assert run.assumed == [NOT_FILLED, OTHERS]
    assert 4096 * MIB <= run.live < 4100 * MIB
    assert run.process < 1200 * MIB


def test_other_large_tensors_on_the_cpu_have_their_values(predicted):
    run = predicted("""
        drawn = torch.randn(1 << 20)
        assert 0.9 < drawn.std() < 1.1 and drawn.clone().equal(drawn)
        assert torch.ones(1 << 20).sum() == 1 << 20 and torch.zeros(1 << 20).sum() == 0
        parameter = torch.nn.Parameter(drawn * 0 + 2)
        assert parameter.sum() == 2 << 20
        assert torch.empty(1 << 20).copy_(torch.tensor(3.0)).sum() == 3 << 20
        assert (drawn == float("inf")).sum() == 0
        kept = torch.ones(int((drawn > 0).sum()), device="cuda")
        """)
    assert run.end == "script", run.output
    assert not run.assumed
    assert run.live > MIB


def test_random_numbers_after_skipped_values_are_those_of_a_run(predicted):
    drawn = """
        torch.manual_seed(3)
        layer = torch.nn.Linear(1001, 1003)
        torch.nn.init.normal_(layer.weight)
        layer.double().weight.data.normal_()
        order = torch.randperm(1000)
        """
    import torch

    names = {"torch": torch}
    exec(textwrap.dedent(drawn), names)
    run = predicted(f"""
        {drawn}
        assert order.tolist() == {names["order"].tolist()}
        torch.empty(1, device="cuda")
        """)
    assert run.end == "script", run.output
    assert run.assumed == [NOT_FILLED]
