"""Nodes on a GPU: one that its UUID names, and a limit that changes while processes hold memory."""

from __future__ import annotations

from uuid import UUID

import pytest
from helpers.child import python
from helpers.programs import page_of

import gpumem
from gpumem import Budget

MIB = 1 << 20


def test_node_of_a_uuid_has_the_free_memory_of_its_gpu():
    device = gpumem.Device("cuda:0")
    page = page_of(device.uuid)
    is_new = not page.exists()
    try:
        for head in ("cuda:0", device.uuid, f"GPU-{UUID(device.uuid)}"):
            budget = Budget(None, node=f"{head}/test")
            assert budget.node == f"{device.uuid}/test"
            before = budget.free
            assert abs(before - device.free_bytes) <= 64 * MIB
            with gpumem.DriverPool("cuda:0") as pool, pool.allocate(512 * MIB):
                assert abs(budget.free - before + 512 * MIB) <= 64 * MIB
                with pytest.raises(gpumem.errors.BudgetExceededError, match="within the device"):
                    budget.reserve(before)
        with gpumem.Arena("cuda:0", budget=budget) as arena:
            assert arena.allocate(512 * MIB).nbytes == 512 * MIB
    finally:
        if is_new:
            page.unlink()


def test_changed_limit_holds_for_processes_that_hold_memory(node, other):
    arena = gpumem.Arena("cuda:0", budget=Budget("1GiB", node=node))
    other(f"a := gpumem.Arena('cuda:0', budget=gpumem.Budget(None, node={node!r}))")
    mine = arena.allocate(200 * MIB)
    assert other("kept.append(a.allocate('200MiB'))") == "None"
    python("-m", "gpumem", "node", node, "--limit", "300MiB")
    assert "BudgetExceededError" in other("a.allocate('100MiB')")
    with pytest.raises(gpumem.errors.BudgetExceededError):
        arena.allocate(100 * MIB)
    python("-m", "gpumem", "node", node, "--limit", "2GiB")
    assert other("kept.append(a.allocate('800MiB'))") == "None"
    with arena.allocate(600 * MIB):
        assert "BudgetExceededError" in other("a.allocate('600MiB')")
    other("kept.clear()")
    # The other process's cache is released.
    arena.allocate(1600 * MIB).close()
    mine.close()
    arena.close()
