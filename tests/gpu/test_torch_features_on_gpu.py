"""What PyTorch's users do, over gpumem as over PyTorch's own allocator.

Each program of the folder torch_programs runs over both, in processes of their own, and must return
the same. The processes of all chosen tests run beside each other, `AT_ONCE` at a time.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

import gpumem
from bench.children import launch

TESTS = Path(__file__).resolve().parents[1]
COUNT = sum(device.type == "cuda" for device in gpumem.devices())
AT_ONCE = 6
TIMEOUT = 170  # seconds
SETTINGS = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH")])
    ),
}
ALLOCATORS = ("native", "full")
NEEDED = {
    "trained.with_lightning": "pytorch_lightning",
    "trained.with_accelerate": "accelerate",
    "trained.with_transformers": "transformers",
    "limits.smaller_batches_until_one_fits": "accelerate",
    "pools.pool_over_another_allocator": "cuda.bindings",
}
# What takes longest comes first.
PROGRAMS = [
    "compiled.max_autotune_without_graphs",
    "compiled.reduce_overhead_branches",
    "compiled.reduce_overhead_training",
    "compiled.reduce_overhead_inference",
    "compiled.reduce_overhead_kept_output",
    "compiled.default_mode",
    "trained.with_transformers",
    "trained.with_lightning",
    "trained.with_accelerate",
    "processes.shared_tensors",
    "processes.tensors_for_the_other_allocator",
    "processes.shared_memory_is_freed",
    "processes.shared_tensor_outlives_the_parents",
    "processes.data_loader_workers",
    "processes.pinned_tensors",
    "processes.pinned_tensors_freed_behind_copies",
    "processes.pinned_tensors_of_a_graph",
    "processes.pinned_statistics",
    "trained.with_ddp",
    "trained.with_fsdp",
    "trained.symmetric_memory",
    "trained.checkpointed",
    "trained.activations_on_the_host",
    "compiled.cudnn_benchmark",
    "graphs.shared_pool",
    "graphs.pool_of_a_first_graph",
    "graphs.graphed_callables",
    "graphs.outputs_outlive_their_graph",
    "graphs.dropped_graphs_give_their_memory_back",
    "pools.own_pool",
    "pools.pool_keeps_its_memory_to_itself",
    "pools.nested_pools",
    "pools.pool_of_a_capture",
    "pools.pool_used_when_memory_is_out",
    "pools.pool_without_splits",
    "pools.pool_over_another_allocator",
    "observed.memory_history",
    "observed.history_of_blocks_only",
    "observed.oldest_events_are_dropped",
    "observed.annotated_history",
    "observed.snapshot_for_the_readers",
    "observed.form_of_a_snapshot",
    "observed.profiled_memory",
    "observed.statistics",
    "observed.keys_of_the_statistics",
    "observed.memory_in_use_by_a_stream",
    "limits.memory_fraction",
    "limits.out_of_memory",
    "limits.observers_of_exhaustion",
    "limits.empty_cache",
    "limits.raw_allocations",
    "limits.recorded_streams",
    "limits.smaller_batches_until_one_fits",
]
OF_SEVERAL = [
    "ranks.ddp",
    "ranks.fsdp",
    "ranks.tensor_parallel",
    "ranks.copies_between_devices",
    "ranks.symmetric_memory",
]
pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


@dataclass
class Failed:
    """A program that did not end as it should."""

    why: str


def command(allocator, program):
    return [sys.executable, "-m", "gpu.torch_programs", allocator, program]


def run(program, folder):
    """Return what a program returned over each allocator, or how it failed.

    One after the other, because they share what torch.compile makes.
    """
    own = SETTINGS | {"TORCHINDUCTOR_CACHE_DIR": str(folder / program), "CUDA_VISIBLE_DEVICES": "0"}
    said = {}
    for allocator in ALLOCATORS:
        try:
            done = subprocess.run(
                command(allocator, program),
                capture_output=True,
                text=True,
                env=os.environ | own,
                timeout=TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            said[allocator] = Failed(f"no end after {TIMEOUT} s")
            continue
        if done.returncode != 0 or "gpumem:" in done.stderr:
            said[allocator] = Failed(
                f"exit {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-4000:]}"
            )
        else:
            said[allocator] = json.loads(done.stdout.strip().splitlines()[-1])
    return said


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """The outcome of each chosen program, as a future."""
    chosen = {
        item.callspec.params["program"]
        for item in request.session.items
        if getattr(item, "callspec", None) and item.path == request.path
    }
    folder = tmp_path_factory.mktemp("compiled")
    with ThreadPoolExecutor(AT_ONCE) as threads:
        yield {
            program: threads.submit(run, program, folder)
            for program in PROGRAMS
            if program in chosen and not lacks(program)
        }
        threads.shutdown(cancel_futures=True)


def lacks(program):
    """Return what a program needs and is not installed."""
    needed = NEEDED.get(program)
    if needed is None:
        return None
    try:
        return None if find_spec(needed) else needed
    except ModuleNotFoundError:  # of the package around it
        return needed


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_gives_the_same_over_gpumem_as_over_pytorchs_allocator(program, outcomes):
    if lacks(program):
        pytest.skip(f"{lacks(program)} is not installed")
    said = outcomes[program].result()
    for allocator in ALLOCATORS:
        assert not isinstance(said[allocator], Failed), said[allocator].why
    assert said["full"] == said["native"]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("program", OF_SEVERAL)
def test_program_of_several_gpus_gives_the_same_over_gpumem(program, count, monkeypatch):
    if count > COUNT:
        pytest.skip(f"needs {count} CUDA devices: {COUNT} found")
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    native, full = (
        launch(command(allocator, program), count).splitlines()[-1] for allocator in ALLOCATORS
    )
    assert full == native
