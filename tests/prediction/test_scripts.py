"""Predictions of scripts by PyTorch's CUDA build, which is enough: no GPU and no driver."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.child import python
from helpers.waiting import wait_until
from prediction.null_cuda import require_gpumem_beneath_pytorch

from gpumem.prediction.pytorch import require, symbols, unknown_functions
from gpumem.prediction.runs import library
from gpumem.report import write_report
from gpumem.traces import load_trace

pytestmark = pytest.mark.usefixtures("needs_pytorch")
MIB = 1 << 20


TRAINING = """
model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(100):
    loss = model(torch.ones(64, 1024, device="cuda")).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_peaks_are_those_of_the_allocator(predicted):
    run = predicted("""
        kept = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
        gone = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
        del gone
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        """)
    assert (run.end, run.steps, run.live, run.reserved) == ("script", 0, 130 * MIB, 130 * MIB)
    assert not run.reads
    assert not run.refused


def test_training_is_stopped_after_the_steps_with_each_allocator(predicted):
    found = predicted(TRAINING, steps=4, allocators=("default", "expandable"))
    for run in found.runs.values():
        assert (run.end, run.steps) == ("steps", 4), run
        # weights, gradients and two moments, and cuBLAS's workspace
        assert 16 * MIB + 32 * MIB <= run.live < run.reserved < 110 * MIB
    assert found.runs["default"].live == found.runs["expandable"].live
    assert found.fits("default") is True
    reserved = found.runs["default"].reserved
    assert found.room("default") == found.gpu.memory - found.gpu.context - reserved


def test_gpumem_beneath_pytorch_reserves_its_own_pages(predicted):
    require_gpumem_beneath_pytorch()
    found = predicted(TRAINING, allocators=("default", "gpumem"))
    ours = found.runs["gpumem"]
    assert (ours.end, ours.live) == ("steps", found.runs["default"].live), ours.output
    assert ours.live <= ours.reserved < 1.1 * ours.live


@pytest.fixture(params=["compiler", "no compiler"])
def compiler(request, tmp_path, monkeypatch):
    """Let gpumem's allocator be compiled, or let there be no compiler and nothing compiled."""
    if request.param == "compiler":
        require_gpumem_beneath_pytorch()
        return True
    if require().version.startswith("2.10."):
        pytest.skip("gpumem needs PyTorch 2.11 or later")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return False


def test_peak_has_phase_categories_and_lines_and_its_recording_can_be_read(
    predicted, tmp_path, compiler
):
    output = tmp_path / "recording"
    found = predicted(TRAINING, allocators=("default", "gpumem"), output=output)
    run = found.runs["gpumem"]
    assert run.mode == ("full" if compiler else "pool"), run.output
    assert compiler or "no C++ compiler" in run.assumed[0]
    assert found.peak.live_bytes == run.live == found.runs["default"].live
    assert found.peak.phase.lower().startswith("optimizer")
    nbytes = {each.name: each.nbytes for each in found.peak.groups["category"]}
    weights = 4 * (1024 * 1024 + 1024)
    assert nbytes["parameters"] == nbytes["gradients"] == weights
    assert nbytes["optimizer state"] == 2 * weights
    assert any("train.py:2" in each.name for each in found.peak.groups["stack"])
    assert load_trace(output).peak_requested == run.live
    report = write_report(output, tmp_path / "page.html")
    assert report.peak_live_bytes == run.live
    assert {"recorded", "replayed"} <= {each["how"] for each in report.policies}


def test_run_without_gpumem_is_recorded_by_pytorch(predicted):
    found = predicted(TRAINING, allocators=("expandable", "default"))
    assert found.peak.live_bytes == found.runs["expandable"].live
    assert found.peak.phase.lower().startswith("optimizer")


def test_script_that_does_not_fit_says_where_and_how_much_it_lacks(predicted):
    found = predicted(
        """
        kept = torch.empty(600 << 20, dtype=torch.uint8, device="cuda")
        more = torch.empty(500 << 20, dtype=torch.uint8, device="cuda")
        """,
        memory=1600 * MIB,
        allocators=["default"],
    )
    run = found.runs["default"]
    assert (run.end, run.line) == ("memory", "train.py:3")
    assert run.reserved == 1100 * MIB
    assert found.room("default") == -100 * MIB
    assert found.fits("default") is False


def test_script_that_does_not_fit_says_in_which_phase(predicted):
    found = predicted(TRAINING, memory=660 * MIB, allocators=["default"])
    assert found.runs["default"].end == "memory"
    assert found.peak.phase.lower().startswith("optimizer")
    assert found.peak.live_bytes == found.runs["default"].live


@pytest.mark.parametrize(("until", "live"), [("train.py:6", 4), ("Adam.step", 8), ("fit", 8)])
def test_script_is_stopped_at_a_line_or_a_function(predicted, until, live):
    run = predicted(
        """
        class Adam:
            def step(self):
                raise ValueError("it went on")
        kept = torch.ones(1 << 20, device="cuda")
        later = torch.ones(1 << 20, device="cuda")
        def fit():
            Adam().step()
        fit()
        """,
        until=until,
    )
    assert (run.end, run.live) == ("until", live * MIB), run.output


def test_steps_do_not_stop_a_script_before_its_line_that_is_not_reached(predicted):
    run = predicted(TRAINING.replace("100", "5"), until="train.py:400")
    assert (run.end, run.steps) == ("script", 5)
    assert "train.py:400 was not reached" in run.assumed


@pytest.mark.usefixtures("c_compiler")
def test_compiled_functions_are_compiled_on_the_way_to_a_line(predicted):
    run = predicted(
        """
        function = torch.compile(lambda x: (x.sin() + x.cos()).sum(-1))
        function(torch.ones(1024, 1024, device="cuda"))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        print("done")
        """,
        until="train.py:5",
    )
    assert (run.end, run.live < 5 * MIB) == ("until", True), run.output


def test_constants_of_libraries_are_named_apart_with_their_source(predicted):
    found = predicted(TRAINING, allocators=["default"])
    constants = {each.name: each for each in found.constants()}
    assert not constants["CUDA"].inside
    assert constants["CUDA"].nbytes == found.gpu.context
    assert constants["cuBLAS"].inside
    # Of two threads; PyTorch 2.11 has one of 1 MiB besides.
    assert constants["cuBLAS"].nbytes in (64 * MIB, 65 * MIB)
    assert all(each.source for each in constants.values())


def test_script_that_frees_its_cache_when_memory_is_out_fits(predicted):
    run = predicted(
        """
        for size in (600, 700, 800):
            torch.empty(size << 20, dtype=torch.uint8, device="cuda")
        """,
        memory=1600 * MIB,
    )
    assert (run.end, run.live) == ("script", 800 * MIB)


def test_value_that_is_read_is_named_and_zeros_stand_in(predicted):
    run = predicted(
        """
        values = torch.ones(3, device="cuda")
        for i in range(2):
            assert values.sum().item() == 0
        assert values.cpu().tolist() == [0, 0, 0]
        """
    )
    assert run.end == "script", run.output
    assert sorted(map(tuple, run.reads)) == [
        ("train.py:4", "_local_scalar_dense", 4, 2),
        ("train.py:5", "copy_", 12, 1),
    ]


@pytest.mark.parametrize(
    ("expression", "operator"),
    [
        ("values[values > 0]", "nonzero"),
        ("values.nonzero()", "nonzero"),
        ("torch.where(values > 0)", "nonzero"),
        ("values.masked_select(values > 0)", "nonzero|masked_select"),
        ("values.unique()", "_unique2"),
        ("torch.bincount(values)", "bincount"),
        ("values.repeat_interleave(values)", "repeat_interleave_Tensor"),
    ],
)
def test_read_that_makes_a_size_stops_the_script(predicted, expression, operator):
    run = predicted(f"""
        values = torch.rand(1 << 20, device="cuda").long()
        try:
            {expression}
        except BaseException:
            pass
        print("went on")
        """)
    assert (run.end, run.line) == ("stopped", "train.py:4")
    assert run.reason.split()[0] in operator.split("|")
    assert run.live >= 8 * MIB
    assert "went on" not in run.output


@pytest.mark.parametrize(
    ("expression", "function"),
    [
        ("torch.nn.RNN(4, 4, device='cuda')(values)", "cudnnGetRNNTempSpaceSizes"),
        ("torch.linalg.qr(values)", "cusolverDnCreate"),
        ("torch.fft.rfft(values)", "cufftCreate"),
        ("torch.sparse.mm(torch.eye(4).to_sparse().cuda(), values)", "cusparseCreate"),
    ],
)
def test_function_without_a_result_stops_the_script_by_name(predicted, expression, function):
    run = predicted(f"""
        values = torch.ones(4, 4, device="cuda")
        {expression}
        """)
    assert (run.end, run.line) == ("stopped", "train.py:3"), run.output
    assert function in run.reason


def test_error_of_the_script_is_named_with_its_line_and_output(predicted):
    run = predicted("print('begun')\nraise KeyError('weights')")
    assert (run.end, run.line, run.reason) == ("failed", "train.py:3", "KeyError: 'weights'")
    assert "begun" in run.output


def test_script_that_uses_no_gpu_is_not_said_to_fit(predicted):
    run = predicted("""
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters())
        for step in range(5):
            optimizer.step()
        """)
    assert (run.end, run.steps) == ("stopped", 3)
    assert "no memory of the GPU" in run.reason


def test_script_that_crashes_or_does_not_end_has_no_figures(predicted):
    crashed = predicted("import os; os.abort()")
    assert crashed.end == "failed"
    assert "status -6" in crashed.reason
    endless = predicted("while True: pass", seconds=5)
    assert endless.end == "time"


def test_script_ends_with_a_prediction_that_is_killed(tmp_path):
    ids = tmp_path / "ids"
    script = tmp_path / "endless.py"
    script.write_text(f"import os\nopen({str(ids)!r}, 'a').write(f'{{os.getpid()}} ')\nwhile 1: 0")
    options = ("--allocator", "default", "--allocator", "expandable")
    command = [sys.executable, "-m", "gpumem", "predict", *options, str(script)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as prediction:
        wait_until(lambda: ids.exists() and len(ids.read_text().split()) == 2)
        prediction.kill()
    for each in ids.read_text().split():
        wait_until(lambda each=each: not Path("/proc", each).exists())


def test_loop_that_waits_for_a_value_is_ended(predicted):
    run = predicted("""
        done = torch.rand(1, device="cuda") > 2
        while not done:
            pass
        """)
    assert (run.end, run.line) == ("stopped", "train.py:3")
    assert "loop" in run.reason


def test_script_has_its_arguments_and_its_folder(predicted, tmp_path):
    (tmp_path / "beside.py").write_text("import sys; NAME = sys.argv[1]")
    run = predicted(
        """
        import beside, os, sys
        assert __name__ == "__main__" and __file__ == os.path.join(sys.path[0], "train.py")
        assert beside.NAME == sys.argv[1] == "--lr=1" and len(sys.argv) == 2
        assert "gpumem" not in sys.modules
        kept = torch.ones(1, device="cuda")
        """,
        "--lr=1",
    )
    assert run.end == "script", run.output


@pytest.mark.parametrize(
    "module",
    [
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "import torch; KEPT = torch.ones(3, device='cuda')",
        "raise ValueError('no')",
    ],
    ids=["thread", "tensor", "error"],
)
def test_imports_that_cannot_be_run_ahead_of_the_runs_are_run_in_each(predicted, tmp_path, module):
    (tmp_path / "beside.py").write_text(module)
    found = predicted(
        """
        import beside, threading
        kept = torch.ones(1 << 20, device="cuda") + len(threading.enumerate())
        """,
        allocators=("default", "expandable"),
    )
    for run in found.runs.values():
        if "raise" in module:
            assert (run.end, run.line, run.reason) == ("failed", "beside.py:1", "ValueError: no")
        else:
            assert run.end == "script", run.output
            assert run.live >= 8 * MIB


def test_setting_of_the_allocator_in_the_script_holds(predicted):
    run = predicted("""
        import os
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        kept = torch.empty(21 << 20, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_snapshot()[0]["is_expandable"]
        """)
    assert run.end == "script", run.output


def test_environment_of_the_caller_does_not_reach_the_allocator(predicted, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = predicted("""
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
        kept = torch.empty(21 << 20, dtype=torch.uint8, device="cuda")
        assert not torch.cuda.memory_snapshot()[0]["is_expandable"]
        """)
    assert run.end == "script", run.output


@pytest.fixture
def c_compiler(monkeypatch):
    if shutil.which("gcc") is None:
        pytest.skip("torch.compile needs a C compiler, and gcc was not found")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)


@pytest.mark.usefixtures("c_compiler")
def test_compiled_kernels_stay_out_of_the_caches_of_real_runs(predicted, tmp_path, monkeypatch):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    run = predicted("""
        function = torch.compile(lambda x: (x.sin() + x.cos()).sum(-1))
        function(torch.ones(1024, 1024, device="cuda"))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        """)
    assert run.end == "script", run.output
    assert not (tmp_path / "cache").exists()


def test_streams_events_pinned_memory_and_graphs_work(predicted):
    run = predicted("""
        stream = torch.cuda.Stream()
        pinned = torch.ones(1 << 20).pin_memory()
        assert pinned.is_pinned()
        with torch.cuda.stream(stream):
            tensor = pinned.to("cuda", non_blocking=True)
        tensor.record_stream(torch.cuda.current_stream())
        event = torch.cuda.Event()
        event.record(stream)
        assert not event.query()
        while not event.query():
            pass
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            other = tensor * 2
        graph.replay()
        torch.cuda.synchronize()
        """)
    assert run.end == "script", run.output


@pytest.mark.parametrize("gpu", ["h100", "a100", "t4", "5090"])
def test_convolutions_have_the_workspaces_that_cudnn_states_for_the_gpu(predicted, gpu):
    run = predicted(
        """
        layer = torch.nn.Conv2d(64, 128, 3, padding=1, bias=False, device="cuda")
        with torch.no_grad():
            layer(torch.empty(32, 64, 56, 56, device="cuda"))
        """,
        gpu=gpu,
    )
    assert run.end == "script", run.output
    tensors = 4 * (64 * 128 * 9 + 32 * (64 + 128) * 56 * 56)
    assert tensors < run.live < 2 * tensors
    assert [text.split(" than ")[0] for text in run.assumed] == [
        "convolutions may take larger workspaces"
    ]
    assert not run.refused


@pytest.mark.parametrize(("layer", "gates"), [("LSTM", 4), ("GRU", 3)])
def test_recurrent_layers_have_the_sizes_of_cudnn(predicted, layer, gates):
    run = predicted(f"""
        layer = torch.nn.{layer}(256, 256, num_layers=2, dropout=0.5, device="cuda")
        result, _ = layer(torch.empty(50, 16, 256, device="cuda"))
        result.sum().backward()
        assert layer.weight_hh_l1.grad.shape == ({gates} * 256, 256)
        """)
    assert run.end == "script", run.output
    weights = 4 * 2 * gates * (2 * 256 * 256 + 2 * 256)
    assert 2 * weights < run.live < 2 * weights + 64 * MIB
    assert "workspaces of recurrent layers are taken as those of an H200" in run.assumed
    assert not run.refused


def test_attention_of_cudnn_needs_no_compiler(predicted):
    run = predicted("""
        from torch.nn.attention import SDPBackend, sdpa_kernel
        values = torch.empty(2, 8, 512, 64, device="cuda", dtype=torch.half, requires_grad=True)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            found = torch.nn.functional.scaled_dot_product_attention(values, values, values)
        found.sum().backward()
        """)
    assert run.end == "script", run.output
    assert not run.assumed
    assert not run.refused


def test_request_that_no_gpu_has_room_for_is_named(predicted):
    found = predicted("torch.ones(1 << 40, device='cuda')", allocators=("default", "expandable"))
    lacks = "does not fit: one request has 4096.00 GiB; out of memory at train.py:2"
    assert str(found).count(lacks) == 2


def test_command_prints_the_figures_and_its_status_is_the_answer(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import torch\nkept = torch.empty(500 << 20, device='cuda').sum().item()")
    command = ("-m", "gpumem", "predict", "--allocator", "default")
    fits = python(*command, "--json", path)
    facts = json.loads(fits.stdout)
    assert facts["runs"]["default"]["fits"] is True
    assert facts["constants"][0] == {
        "name": "CUDA",
        "nbytes": 600 * MIB,
        "inside": False,
        "source": "an H200 held 527 MiB for a context, and 603 MiB with kernels of cuBLAS and "
        "cuDNN",
    }
    assert facts["peak"]["live_bytes"] == facts["runs"]["default"]["live"]
    lacks = python(*command, "--memory", "1GiB", path, status=3)
    assert "does not fit: 1.5 GiB too much; out of memory at train.py:2" in lacks.stdout
    assert "train.py:2: a stand-in for 4 bytes" in lacks.stdout
    path.write_text("import torch\ntorch.rand(3, device='cuda').nonzero()")
    stops = python(*command, path, status=1)
    assert "train.py:2: nonzero" in stops.stdout


def test_null_cuda_has_every_function_that_pytorch_imports():
    folder = require().folder
    assert "cudaMalloc" in symbols(folder / "lib" / "libc10_cuda.so", imported=True)
    assert unknown_functions(folder, library()) == []


def test_function_that_the_null_cuda_lacks_is_known_before_it_is_called():
    folder = require().folder
    other = folder / "lib" / "libtorch_python.so"
    unknown = unknown_functions(folder, other)
    assert "cudaMalloc" in unknown
    assert "cublasSgemm_v2" in unknown
    assert "cudnnGetVersion" not in unknown


def test_block_that_another_stream_uses_is_held_until_the_host_waits(predicted):
    run = predicted("""
        stream = torch.cuda.Stream()
        def use():
            block = torch.empty(20 << 20, dtype=torch.uint8, device="cuda")
            stream.wait_stream(torch.cuda.current_stream())
            block.record_stream(stream)
        for _ in range(3):
            use()
        assert torch.cuda.memory_stats()["active_bytes.all.current"] == 60 << 20
        torch.cuda.synchronize()
        for _ in range(4):
            use()
            stream.synchronize()
        """)
    assert (run.end, run.live) == ("script", 60 * MIB), run.output
    assert run.assumed == ["memory that several streams use is in use until the host waits"]


def test_integers_that_are_read_are_named_in_an_error(predicted):
    run = predicted("""
        counts = torch.rand(2, device="cuda").long().tolist()
        torch.ones(8, device="cuda").split(counts)
        """)
    assert (run.end, run.line) == ("failed", "train.py:3")
    assert "zeros stood in for values that it had read at train.py:2" in run.reason
    assert list(map(tuple, run.reads)) == [("train.py:2", "copy_", 16, 1)]
