"""Budgets over a GPU's memory: what is charged is what the driver has given, and no more."""

from __future__ import annotations

import pytest

import gpumem
from gpumem import Budget

MIB = 1 << 20
CONFIGS = {
    "pages": ("cuda:0", {"backing": "virtual"}),
    "regions": ("cuda:0", {"backing": "regions"}),
    "pinned": ("cuda:0/host_accessible", {}),
    "managed": ("cuda:0/managed", {}),
    "passed through": ("cuda:0", {"enable": False}),
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("count", ["reserved", "in_use"])
def test_arena_stays_within_its_budget(kind, count):
    memory, config = CONFIGS[kind]
    root = Budget(600 * MIB, name="root")
    tenant = Budget(512 * MIB, parent=root, name="tenant")
    with gpumem.Arena(memory, config, budget=tenant, count=count) as arena:
        live, refused = [], 0
        for size in (1, 64, 100, 200, 300, 50):
            try:
                live.append(arena.allocate(size * MIB))
            except gpumem.errors.BudgetExceededError:
                refused += 1
            stats = arena.stats()
            held = stats.reserved if count == "reserved" else stats.in_use
            assert tenant.used == root.used == held <= 512 * MIB
        assert refused
        live.clear()
    assert root.used == 0
    assert root.peak <= 512 * MIB


def test_charge_equals_the_loss_of_free_device_memory():
    device = gpumem.Device("cuda:0")
    budget = Budget.of_device(device)
    with gpumem.Arena("cuda:0", {"backing": "virtual"}, budget=budget) as arena:
        before = device.free_bytes
        buffer = arena.allocate(256 * MIB)
        # The driver may take some for itself with the first mapping.
        assert 0 <= before - device.free_bytes - budget.used <= 32 * MIB
        arena.sleep()
        assert budget.used == 0
        arena.wake()
        assert budget.used == arena.stats().reserved
        buffer.close()
    assert budget.used == 0


def test_callback_shrinks_another_arena():
    budget = Budget(256 * MIB)
    idle = gpumem.Arena("cuda:0", {"backing": "virtual"}, budget=budget)
    busy = gpumem.Arena("cuda:0", {"backing": "regions"}, budget=budget)
    idle.allocate(200 * MIB).close()
    budget.on_pressure = lambda budget, nbytes: idle.shrink()
    with busy.allocate(200 * MIB):
        assert idle.stats().reserved == 0
        assert budget.used == busy.stats().reserved
    idle.close()
    busy.close()


def test_pool_blocks_are_charged():
    budget = Budget(64 * MIB)
    with gpumem.DriverPool("cuda:0", budget=budget) as pool:
        buffer = pool.allocate(40 * MIB)
        with pytest.raises(gpumem.errors.BudgetExceededError):
            pool.allocate(40 * MIB)
        buffer.close()
        assert budget.used == 0


@pytest.mark.parametrize("count", ["reserved", "in_use"])
def test_graph_pool_charges_its_arenas_budget(count):
    budget = Budget(64 * MIB)
    stream = gpumem.Stream("cuda:0")
    arena = gpumem.Arena("cuda:0", budget=budget, count=count)
    with arena.capture(stream) as pool:
        buffer = arena.allocate(4 * MIB, stream)
        assert budget.used == (pool.stats().reserved if count == "reserved" else 4 * MIB)
        buffer.close()
    pool.close()
    arena.close()
    assert budget.used == 0
