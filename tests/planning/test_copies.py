"""Copies: only where memory is incompatible."""

import pytest

from gpumem import MemoryInfo
from gpumem.planning import GraphBuilder, Target, partition, plan_copies


def placed(*devices, host_accessible=None):
    """Place nodes in a row, n0 -> n1 -> ..., on these devices."""
    builder = GraphBuilder()
    last = builder.input("x", "uint8", (16,))
    weight = builder.initializer("w", "uint8", (4,))
    wanted = {}
    for number, device in enumerate(devices):
        made = builder.value(f"v{number}", "uint8", (16,))
        builder.node("Op", [last, weight], [made], name=f"n{number}")
        wanted[f"n{number}"] = device
        last = made
    targets = [
        Target(
            device, lambda node, d=device: wanted[node.name] == d, host_accessible=host_accessible
        )
        for device in dict.fromkeys(devices)
    ]
    return plan_copies(partition(builder.build([last]), targets))


def homes(plan):
    return {value.name: str(memory) for value, memory in plan.homes.items()}


def copies(plan):
    return [
        (copy.value.name, str(copy.source), str(copy.destination), copy.step)
        for copy in plan.copies
    ]


def test_host_only_placement_copies_nothing():
    plan = placed("host", "host")
    assert set(homes(plan).values()) == {"host:0"}
    assert copies(plan) == []


def test_values_between_gpu_and_cpu_use_host_accessible_memory():
    plan = placed("cuda:0", "cuda:0", "host", "cuda:0")
    assert homes(plan) == {
        "x": "cuda:0/host_accessible",
        "v0": "cuda:0",
        "v1": "cuda:0/host_accessible",
        "v2": "cuda:0/host_accessible",
        "v3": "cuda:0/host_accessible",
        "w": "cuda:0",
    }
    assert copies(plan) == [("w", "cuda:0", "host:0", -1)], "the CPU reads no DEVICE memory"


def test_without_host_accessible_memory_values_are_copied_at_first_use():
    plan = placed("cuda:0", "cuda:0", "host", host_accessible=False)
    assert homes(plan)["v1"] == "cuda:0"
    assert copies(plan) == [
        ("w", "cuda:0", "host:0", -1),
        ("x", "host:0", "cuda:0", 0),
        ("v1", "cuda:0", "host:0", 2),
    ]


def test_values_between_two_gpus_are_copied():
    plan = placed("cuda:0", "cuda:1")
    assert ("v0", "cuda:0", "cuda:1", 1) in copies(plan)
    copy = next(copy for copy in plan.copies if copy.value.name == "v0")
    assert "do not share memory" in copy.why
    assert copy.nbytes == 16
    assert plan.copied_bytes == 16, "v0; the weight is there before a run"


def test_each_device_finds_a_value_or_its_copy():
    plan = placed("cuda:0", "cuda:1")
    v0 = plan.placement.graph.values["v0"]
    first, second = (target.device for target in plan.placement.targets)
    assert plan.memory_for(v0, first) == MemoryInfo("cuda:0")
    assert plan.memory_for(v0, second) == MemoryInfo("cuda:1")


@pytest.mark.parametrize("shared", [True, False])
def test_unread_input_that_is_an_output_stays_with_the_caller(shared):
    builder = GraphBuilder()
    x = builder.input("x", "uint8", (1,))
    builder.node("Op", [x], [builder.value("y", "uint8", (1,))])
    target = Target("cuda:0", host_accessible=shared)
    plan = plan_copies(partition(builder.build(["x", "y"]), [target]))
    assert str(plan.homes[x]) == ("cuda:0/host_accessible" if shared else "host:0")
    assert len(plan.copies) == (0 if shared else 2)
