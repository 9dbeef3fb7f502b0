"""``gpumem top`` without a process: what all of them hold together, GPU by GPU."""

import json
import os
import subprocess
import sys

import pytest

import gpumem
from gpumem import observe
from gpumem.cli import main
from gpumem.cli.top_sums import sums_of
from gpumem.observe import LivePage, LiveResource

MIB = 1 << 20
HOLDER = """
import gpumem, gpumem.observe, sys
arena = gpumem.Arena("host")
buffer = arena.allocate("3MiB")
publication = gpumem.observe.publish()
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder():
    """Start a process that holds 3 MiB, sees GPUs 5 and 2 only, and publishes."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "5, 2,GPU-8a"},
    )
    process.stdout.readline()
    yield process.pid
    process.communicate()


def page(process, *held, alive=True):
    """Make a page of a process that holds so many bytes of each memory."""
    resources = tuple(
        LiveResource(n, "arena", memory, "arena", None, {"in_use": nbytes, "reserved": 2 * nbytes})
        for n, (memory, nbytes) in enumerate(held)
    )
    return LivePage(process, alive, 0.0, 0.0, 1.0, resources, (), 0)


def test_sums_add_up_processes_memory_by_memory():
    pages = [
        page(1 << 30, ("cuda:0", 5), ("cuda:0", 7), ("host:0", 1)),
        page((1 << 30) + 1, ("cuda:0", 100), ("cuda:1", 9)),
        page((1 << 30) + 2, ("cuda:0", 1000), alive=False),
    ]
    assert [tuple(vars(each).values()) for each in sums_of(pages)] == [
        ("cuda:0", 2, 112, 224),
        ("cuda:1", 1, 9, 18),
        ("host:0", 1, 1, 2),
    ]


def test_sums_use_the_machines_numbers_of_gpus(holder):
    held = [("cuda:0", 1), ("cuda:1/managed", 2), ("cuda:2", 3), ("cuda:3", 4), ("host:0", 5)]
    found = {each.memory: each.in_use for each in sums_of([page(holder, *held)])}
    assert found == {"cuda:5": 1, "cuda:2/managed": 2, "GPU-8a": 3, "cuda:3": 4, "host:0": 5}


def test_list_ends_with_the_sums_of_all_processes(holder, capsys):
    arena = gpumem.Arena("host")
    mine = arena.allocate(2 * MIB)
    with observe.publish():
        assert main(["top", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert main(["top"]) == 0
        lines = capsys.readouterr().out.splitlines()
    (host,) = (each for each in facts["memories"] if each["memory"] == "host:0")
    own = [each for each in facts["processes"] if each["process"] in (os.getpid(), holder)]
    assert len(own) == 2
    assert host["processes"] >= 2
    assert host["in_use"] >= 5 * MIB
    assert any(line.split()[:1] == ["host:0"] for line in lines)
    del mine
