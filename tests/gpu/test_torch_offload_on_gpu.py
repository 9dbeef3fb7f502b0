"""Saved tensors that move to the host and back on a GPU, over both allocators of PyTorch.

All cases of an allocator run in one process; each is a test here. `gpu.torch_programs.offloaded`
has them.
"""

import json
import os
import subprocess

import pytest
from gpu.test_torch_features_on_gpu import SETTINGS, command

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
