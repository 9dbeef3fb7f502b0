"""Rules of budgets: limits that change, reservations, and callbacks that make room."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition

import gpumem
from gpumem.errors import BudgetExceededError, ReservationError

from .books import Budget
from .diary import note, rule
from .memory import MemoryRules
from .world import picks

MIB = 1 << 20
limits = st.sampled_from([None, 24 * MIB, 12 * MIB, 5 * MIB, 100_000])
limits_at_first = st.sampled_from([24 * MIB, None, 12 * MIB])


class BudgetRules(MemoryRules):
    """Budgets."""

    def make_the_tree(self, parents, most):
        self.budgets.append(Budget(gpumem.Budget(most[0], name="root")))
        for number, parent in enumerate(parents, 1):
            above = self.some(self.budgets, parent)
            real = gpumem.Budget(most[number], parent=above.real, name=f"level{number}")
            self.budgets.append(Budget(real, above))
            note(f"    # {real} under {above}")

    @precondition(lambda self: self.budgets)
    @rule(budget=picks, limit=limits)
    def change_a_limit(self, budget, limit):
        budget = self.some(self.budgets, budget)
        note(f"    # of {budget}")
        budget.check_limit()
        budget.real.limit = limit
        assert budget.real.limit == limit

    # ---- reservations ----------------------------------------------------------------------------

    @precondition(lambda self: self.budgets)
    @rule(budget=picks, nbytes=st.sampled_from([0, 1000, MIB, 4 * MIB, 100 * MIB]))
    def reserve(self, budget, nbytes):
        budget = self.some(self.budgets, budget)
        note(f"    # in {budget}")
        try:
            made = budget.real.reserve(nbytes)
        except BudgetExceededError as refusal:
            error = refusal
        else:
            budget.reservations.append(made)
            return
        free = budget.real.free
        assert free is not None, f"{budget} has no limit: {error}"
        assert nbytes > free, f"{budget}: {free} bytes are free: {error}"
        assert error.missing > 0

    @precondition(lambda self: any(budget.reservations for budget in self.budgets))
    @rule(budget=picks, which=picks, step=st.sampled_from(["commit", "cancel", "release", "drop"]))
    def end_a_reservation(self, budget, which, step):
        budget = self.some([each for each in self.budgets if each.reservations], budget)
        reservation = self.some(budget.reservations, which)
        note(f"    # {reservation} in {budget}")
        before = reservation.state
        if step == "drop":
            if before != "committed":  # that stays charged for as long as the budget lives
                budget.reservations.remove(reservation)
            return
        right = {"commit": "pending", "cancel": "pending", "release": "committed"}[step]
        if before != right:
            with self.refused(ReservationError):
                getattr(reservation, step)()
            assert reservation.state == before
            return
        getattr(reservation, step)()

    # ---- pressure --------------------------------------------------------------------------------

    @precondition(lambda self: self.budgets)
    @rule(budget=picks, on=st.booleans())
    def free_blocks_under_pressure(self, budget, on):
        """A callback frees the oldest block of the arenas below, one at each call."""
        budget = self.some(self.budgets, budget)
        note(f"    # of {budget}")
        budget.real.on_pressure = (lambda real, nbytes: self.relieve(budget)) if on else None

    def relieve(self, budget: Budget) -> None:
        for arena in self.arenas:
            arena.was_refused |= arena.may_be_padded
        if any(queue.stream.capturing for queue in self.queues):
            return  # a free is ordered by events, which would be captured
        for block in self.blocks:
            arena = block.arena
            below = arena.budget is not None and budget in arena.budget.path()
            if not below or arena.passes or block.refs != {"user"} or block.closed:
                continue
            if (block.persistent or block.shareable) and not self.calm:
                continue  # the next try would wait for the device to release it
            note(f"    # under pressure: {block} goes")
            self.give_back(block, "close", block.own)
            return
