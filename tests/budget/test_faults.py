"""Every driver call of a scenario fails once: a budget has charged what is held, and no more."""

from __future__ import annotations

import pytest
from helpers.threads import in_a_thread

import gpumem
from gpumem import Budget
from gpumem._testing.arenas import release_retired

MIB = 1 << 20
OUT_OF_MEMORY, INVALID_VALUE = 2, 1
LIMIT = 24 * MIB
PARTS = 4
CONFIGS = {
    "virtual": {"backing": "virtual", "page_move_threshold": 0},
    "regions": {"backing": "regions", "split_rule": "tight"},
    "passed through": {"enable": False},
}


class Scenario:
    """An arena's life, near its budget; after each step the budget has what the arena holds."""

    def __init__(self, config, count) -> None:
        self.root = Budget(LIMIT, name="root")
        self.budget = Budget(None, parent=self.root, name="tenant")
        self.arena = gpumem.Arena("host", config, budget=self.budget, count=count)
        self.count = count
        self.live: list = []
        self.errors = 0

    def attempt(self, call, *arguments, **named):
        try:
            return call(*arguments, **named)
        except (
            gpumem.OutOfMemoryError,
            gpumem.errors.DriverError,
            gpumem.errors.AsleepError,
            gpumem.ConfigError,  # the device was asked what it can, and did not tell
        ):
            self.errors += 1
        finally:
            self.check()

    def check(self):
        stats = self.arena.stats()
        held = stats.reserved if self.count == "reserved" else stats.in_use
        if not self.arena.asleep or self.count == "in_use":
            assert self.budget.used == held
        assert self.budget.used == self.root.used
        assert self.root.peak <= LIMIT

    def take(self, *sizes, **named):
        for size in sizes:
            buffer = self.attempt(self.arena.allocate, size, **named)
            if buffer is not None:
                self.live.append(buffer)

    def drop(self, *numbers):
        for number in sorted(numbers, reverse=True):
            if number < len(self.live):
                self.live.pop(number).close()
                self.check()

    def run(self):
        self.take(4 * MIB, 3000, 6 * MIB, 300, 2 * MIB)
        kept = self.attempt(self.arena.allocate_persistent, MIB)
        shared = self.attempt(self.arena.allocate, 100, shareable=True)
        self.drop(0, 2)
        self.take(9 * MIB)
        if self.arena.backing == "virtual":
            self.attempt(self.arena.sleep)
            self.drop(1)
            self.attempt(self.arena.wake)
            if self.arena.asleep:
                self.attempt(self.arena.wake)
        self.take(7 * MIB, LIMIT)  # the second is refused
        del kept, shared
        self.attempt(self.arena.shrink)
        self.drop(*range(len(self.live)))
        self.attempt(self.arena.shrink)
        self.arena.close()
        del self.arena
        release_retired()
        assert (self.budget.used, self.root.used) == (0, 0)


@pytest.mark.parametrize("count", ["reserved", "in_use"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("part", range(PARTS))
def test_charge_equals_held_memory_when_any_driver_call_fails(host, rng, part, config, count):
    calls = host.call_count()
    scenario = Scenario(CONFIGS[config], count)
    in_a_thread(scenario.run)
    expected = scenario.errors
    total = host.call_count() - calls
    failed = 0
    for number in range(part + 1, total + 1, PARTS):
        scenario = Scenario(CONFIGS[config], count)
        error = rng.choice((OUT_OF_MEMORY, INVALID_VALUE))
        host.fail(None, number, error)
        print(f"driver call {number} of {total} fails with {error}")
        try:
            in_a_thread(scenario.run)
        finally:
            host.clear_faults()
        failed += scenario.errors > expected
    assert failed, "no call mattered"


@pytest.mark.parametrize("config", ["virtual", "regions"])
def test_failed_device_allocation_is_not_charged(leave_room, config):
    leave_room(8 * MIB)
    budget = Budget(1 << 40)
    arena = gpumem.Arena("host", CONFIGS[config], budget=budget)
    with pytest.raises(gpumem.OutOfMemoryError) as raised:
        arena.allocate(16 * MIB)
    assert not isinstance(raised.value, gpumem.errors.BudgetExceededError)
    assert budget.used == arena.stats().reserved
    arena.close()
    assert budget.used == 0
