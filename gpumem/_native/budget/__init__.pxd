"""Limits in a tree."""

from gpumem._native.budget.tree cimport (
    await_refund, budget_add, budget_admit, budget_ceiling, budget_charged, BUDGET_DEPTH,
    budget_drop, budget_has_crossed, budget_has_node, budget_holdings, budget_left, budget_load,
    budget_make, budget_move, budget_next_crossed, budget_refusing, budget_rename, budget_retain,
    budget_room, budget_tightest, budget_uncharge, BUDGET_UNLIMITED, BudgetCore, budgets_visit,
    Holding, holdings_free, lease_for, release_idle_below, tell_crossed,
)
