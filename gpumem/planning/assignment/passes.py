"""One pass over the proposals of one device: which of them its accountant accepts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from gpumem._support.sizes import exact_size, format_size
from gpumem.accounting import Accountant
from gpumem.planning.graph import Node

Proposal: TypeAlias = tuple[Node, ...]

EXACT_LIMIT = 16  # proposals; of at most that many, every set is tried while branches last
BRANCHES = 20_000  # sets tried, each a price of one proposal
EXCHANGES = 2000  # attempts to improve a set of more proposals, each a price of one or two


@dataclass
class Outcome:
    """Proposals that a pass accepted, and the reasons against the others."""

    accepted: list[Proposal] = field(default_factory=list)
    refused: dict[Proposal, str] = field(default_factory=dict)
    gain: str = ""

    @property
    def node_count(self) -> int:
        """Nodes that were accepted."""
        return sum(map(len, self.accepted))


def greedy(proposals: Sequence[Proposal], accountant: Accountant) -> Outcome:
    """Accept in order, and stop at the first that does not fit."""
    outcome = Outcome()
    for proposal in proposals:
        if accountant.stop_requested:
            outcome.refused[proposal] = "the device was full before"
        elif accountant.account(proposal) is not None:
            outcome.accepted.append(proposal)
        else:
            outcome.refused[proposal] = too_large(proposal, accountant)
    return outcome


def best(proposals: Sequence[Proposal], accountant: Accountant) -> Outcome:
    """Accept the set that leaves the least memory unused, found by a bounded search.

    The search tries the graph's order without stopping, the largest first and the smallest first.
    Of few proposals it then tries every set by branch and bound; of many it exchanges accepted ones
    for refused ones as long as that fills more. Of equally good sets it takes the most nodes.
    """
    first = greedy(proposals, accountant)
    filled_first = accountant.pending.total_bytes
    if not first.refused:
        return first
    accountant.reset_for_new_pass()
    prices = {proposal: accountant.cost(proposal).total_bytes for proposal in proposals}
    dearest = sorted(proposals, key=lambda one: -prices[one])
    orders = (proposals, dearest, sorted(proposals, key=lambda one: prices[one]))
    _, chosen = max((_filled(order, accountant) for order in orders), key=lambda pair: pair[0])
    if len(proposals) <= EXACT_LIMIT:
        chosen = _Sets(dearest, prices, accountant, chosen).found
    _fill(chosen, accountant)
    if len(proposals) > EXACT_LIMIT:
        chosen = _exchanged(chosen, proposals, accountant)
    return _described(first, filled_first, chosen, proposals, accountant)


STRATEGIES: dict[str, Callable[[Sequence[Proposal], Accountant], Outcome]] = {
    "greedy": greedy,
    "best": best,
}


def _fill(order: Sequence[Proposal], accountant: Accountant) -> list[Proposal]:
    """Begin a pass and accept each proposal that fits, in this order."""
    accountant.reset_for_new_pass()
    return [proposal for proposal in order if accountant.account(proposal) is not None]


def _filled(
    order: Sequence[Proposal], accountant: Accountant
) -> tuple[tuple[int, int], list[Proposal]]:
    """Return the bytes and nodes that fill a device in this order, and the accepted proposals."""
    accepted = _fill(order, accountant)
    return (accountant.pending.total_bytes, sum(map(len, accepted))), accepted


class _Sets:
    """Branch and bound over sets of proposals: each is in or out, the dearest is decided first."""

    def __init__(
        self,
        order: Sequence[Proposal],
        prices: Mapping[Proposal, int],
        accountant: Accountant,
        start: list[Proposal],
    ) -> None:
        self._order = order
        self._accountant = accountant
        # Upper bound of the cost of the proposals from each place on; a shared weight reduces it.
        costs = [prices[proposal] for proposal in order]
        self._left = [sum(costs[at:]) for at in range(len(order) + 1)]
        self._branches = BRANCHES
        self._worth, self.found = _filled(start, accountant)
        accountant.reset_for_new_pass()
        self._descend([])

    def _descend(self, taken: list[Proposal], at: int = 0) -> None:
        filled = self._accountant.pending.total_bytes
        worth = filled, sum(map(len, taken))
        if worth > self._worth:
            self.found, self._worth = list(taken), worth
        self._branches -= 1
        hopeless = filled + self._left[at] < self._worth[0]
        if at == len(self._order) or hopeless or self._branches < 0:
            return
        proposal = self._order[at]
        if self._accountant.fits(proposal):
            self._accountant.account(proposal)
            self._descend([*taken, proposal], at + 1)
            self._accountant.withdraw(proposal)
        self._descend(taken, at + 1)


def _exchanged(
    chosen: list[Proposal], proposals: Sequence[Proposal], accountant: Accountant
) -> list[Proposal]:
    """Exchange one accepted proposal for a refused one while that fills more."""
    held = dict.fromkeys(chosen)
    attempts = 0
    improved = True
    while improved and attempts < EXCHANGES:
        improved = False
        for incoming in [proposal for proposal in proposals if proposal not in held]:
            for outgoing in list(itertools.islice(held, EXCHANGES - attempts)):
                attempts += 1
                if _exchange(outgoing, incoming, accountant):
                    del held[outgoing]
                    held[incoming] = None
                    improved = True
                    break
    refilled = (proposal for proposal in proposals if proposal not in held)
    return [*held, *(proposal for proposal in refilled if accountant.account(proposal) is not None)]


def _exchange(outgoing: Proposal, incoming: Proposal, accountant: Accountant) -> bool:
    """Exchange two proposals if that fills more; else restore both."""
    before = accountant.pending.total_bytes
    accountant.withdraw(outgoing)
    if accountant.fits(incoming):
        accountant.account(incoming)
        if accountant.pending.total_bytes > before:
            return True
        accountant.withdraw(incoming)
    accountant.account(outgoing)
    return False


def _described(
    first: Outcome,
    filled_first: int,
    chosen: list[Proposal],
    proposals: Sequence[Proposal],
    accountant: Accountant,
) -> Outcome:
    accepted = set(chosen)
    outcome = Outcome([proposal for proposal in proposals if proposal in accepted])
    for proposal in proposals:
        if proposal not in accepted:
            outcome.refused[proposal] = too_large(proposal, accountant)
    filled = accountant.pending.total_bytes
    outcome.gain = (
        f"the search placed {format_size(filled)} in {outcome.node_count} nodes, "
        f"{format_size(filled - filled_first)} and {outcome.node_count - first.node_count} nodes "
        "more than the greedy order"
    )
    return outcome


def too_large(proposal: Proposal, accountant: Accountant) -> str:
    """Return the reason of a refusal: the cost and the bytes left."""
    held = accountant.consumed + accountant.pending
    limit = accountant.threshold
    total = limit.total_bytes if limit is not None else 0
    needed, left = accountant.cost(proposal).total_bytes, total - held.total_bytes
    return f"needs {exact_size(needed)}, and {exact_size(left)} of {exact_size(total)} are left"
