"""Saved tensors that move to the host and back on a GPU, over both allocators of PyTorch.

All cases of an allocator run in one process; each is a test here. `gpu.torch_programs.offloaded`
has them.
"""

import json
import os
import subprocess

import pytest
from gpu.test_torch_features_on_gpu import SETTINGS, command
from helpers.child import python

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from gpu.torch_programs.offloaded import CASES, OTHERS  # noqa: E402

NAMES = [*CASES, *(each.__name__ for each in OTHERS)]


@pytest.fixture(scope="module")
def running(request):
    """Start the processes of the allocators, beside each other; returns what they say."""
    chosen = [each.callspec.params for each in request.session.items if each.path == request.path]
    processes, said = {}, {}
    for allocator in {each["allocator"] for each in chosen}:
        names = (each["name"] for each in chosen if each["allocator"] == allocator)
        processes[allocator] = subprocess.Popen(
            command(allocator, "offloaded.all_cases"),
            env=os.environ | SETTINGS | {"GPUMEM_TEST_CASES": ",".join(names)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def outcome(allocator, name):
        if allocator not in said:
            out, problems = processes[allocator].communicate(timeout=600)
            lines = out.splitlines()
            said[allocator] = json.loads(lines[-1]) if lines else {}
            said[allocator][""] = f"exit {processes[allocator].returncode}\n{problems[-3000:]}"
        return said[allocator].get(name, said[allocator][""])

    yield outcome
    for each in processes.values():
        each.kill()
        each.wait()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("allocator", ["native", "full"])
def test_offloaded_program_has_the_same_bits(running, allocator, name):
    found = running(allocator, name)
    assert not found, found


SCRIPT = """
import torch
layers = [torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU()) for _ in range(16)]
torch.manual_seed(0)
net = torch.nn.DataParallel(torch.nn.Sequential(*layers).cuda())
x = torch.linspace(-1, 1, 16384 * 1024).view(16384, 1024).cuda()
for _ in range(3):
    net.zero_grad()
    net(x).square().mean().backward()
print([each.grad.double().abs().sum().item().hex() for each in net.parameters()])
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: PyTorch finds fewer")
def test_run_of_a_script_moves_what_the_threads_of_data_parallel_save(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = "-m", "gpumem", "run"
    expected = python(*run, script)
    found = python(*run, "--max-mem", "500MiB", "--offload", script)
    said = sorted(each for each in found.stderr.splitlines() if "moved" in each)
    begins = [f"gpumem: offload on cuda:{i}: " for i in range(2)]
    assert [each[: len(begins[0])] for each in said] == begins
    assert found.stdout == expected.stdout
    # Without `--offload` the limit is too low.
    assert python(*run, "--max-mem", "500MiB", script, status=1).stdout == ""
