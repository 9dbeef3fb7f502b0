"""PyTorch's pinned memory alone from gpumem, over the null CUDA: its GPU memory stays PyTorch's."""

import sys

import pytest
from helpers.child import program
from prediction.null_cuda import environment, over_null_cuda, require_cuda_build

require_cuda_build()

SCRIPT = """
import gpumem
import torch
from gpumem.integrations import torch as integration
def pinned(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, pin_memory=True)
def held():
    return torch.cuda.host_memory_stats()["allocated_bytes.current"] / MIB
"""


def test_pinned_memory_alone_is_exact_and_the_gpus_stays_pytorchs():
    said = over_null_cuda(
        SCRIPT
        + """
before = pinned(3)
integration.enable_pinned()
kept = [pinned(65) for _ in range(8)]
print(held(), kept[0].is_pinned(), torch.cuda.get_allocator_backend())
there = torch.ones(4, device="cuda")
before.to("cuda", non_blocking=True)
del before
kept[0].to("cuda", non_blocking=True)
status = integration.status()
print(status.enabled, status.pinned is gpumem.get_default_resource("cuda:0/pinned"))
"""
    )
    assert said.splitlines() == ["520.0 True native", "False True"]


def test_driver_is_loaded_with_cuda_and_not_by_the_first_pinned_block():
    said = over_null_cuda(
        SCRIPT
        + """
from gpumem._native.driver import table
loads, load = [], table.load
table.load = lambda: loads.append(1) or load()
integration.enable_pinned()
print(len(loads))
torch.cuda.init()
print(len(loads))
"""
    )
    assert said.split() == ["0", "1"]


def test_limit_is_refused_with_the_hosts_figures_or_served_unpinned():
    said = over_null_cuda(
        SCRIPT
        + """
integration.enable_pinned(limit="64MiB")
kept = pinned(40)
try:
    pinned(30)
except torch.OutOfMemoryError as error:
    print(*str(error).splitlines(), sep="\\n")
integration.enable_pinned(beyond="unpinned")
served = pinned(30)
print(served.is_pinned(), len(served) // MIB, kept.is_pinned(), held())
"""
    )
    refused, owners, host, unpinned = said.splitlines()
    assert "asked for 30.0 MiB" in refused
    assert "limit 64.0 MiB" in refused
    assert owners == "in use by torch 40.0 MiB"
    assert host.startswith("the host: ")
    assert "40.0 MiB held by gpumem in this process" in host
    assert unpinned == "False 30 True 40.0"


def test_batches_of_a_loader_reuse_their_blocks():
    said = over_null_cuda(
        SCRIPT
        + """
from torch.utils.data import DataLoader, TensorDataset
integration.enable_pinned()
rows = TensorDataset(torch.zeros(8 * 40, 3, 128, 128), torch.zeros(8 * 40))
peak = 0
side = torch.cuda.Stream()
for images, labels in DataLoader(rows, batch_size=8, pin_memory=True):
    with torch.cuda.stream(side):
        images.to("cuda", non_blocking=True)
    side.synchronize()
    assert images.is_pinned() and labels.is_pinned()
stats = integration.status().pinned.stats()
print(stats.max_reserved <= 1.05 * stats.max_in_use, stats.num_extensions < 16)
"""
    )
    assert said == "True True\n"


def test_captured_copy_keeps_its_pinned_block():
    said = over_null_cuda(
        SCRIPT
        + """
integration.enable_pinned()
there = torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    source = pinned(2)
    there.copy_(source, non_blocking=True)
    address = source.data_ptr()
    del source
print(pinned(2).data_ptr() != address)
"""
    )
    assert said == "True\n"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ('limit="0"', "limit"),
        ("limit=-1", "invalid limit = -1: expected at least 1 byte"),
        ('beyond="swap"', "invalid beyond = 'swap'"),
        ('gpumem.Arena("cuda:0")', "invalid pinned = "),
    ],
)
def test_invalid_arguments_change_nothing(arguments, problem):
    said = over_null_cuda(
        SCRIPT
        + f"""
try:
    integration.enable_pinned({arguments})
except (TypeError, gpumem.ConfigError) as error:
    print(error)
print(integration.status().pinned, integration._pinned.installed)
"""
    )
    assert problem in said
    assert said.splitlines()[-1] == "None False"


@pytest.mark.parametrize(("option", "limit"), [("--pinned", None), ("--pinned=48MiB", 48 << 20)])
def test_run_replaces_pinned_memory_alone(tmp_path, option, limit):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from gpumem.integrations import torch as integration\n"
        "kept = torch.empty(33 << 20, dtype=torch.uint8, pin_memory=True)\n"
        "stats = integration.status().pinned.stats()\n"
        "print(torch.cuda.get_allocator_backend(), stats.reserved, stats.limit)\n"
    )
    command = ("-m", "gpumem", "run", option, script)
    done = program(sys.executable, *command, env=environment(tmp_path))
    assert done.stdout == f"native {33 << 20} {limit}\n"
