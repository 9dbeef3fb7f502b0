"""Accountants: pending costs of a pass, committed costs, and the limit.

A pass prices nodes in order; the costs of accepted nodes are *pending*. A commit moves one node's
cost to *consumed*. The bytes of a node itself are computed once and kept for later passes. A weight
is counted once: for good with the first commit of a node that uses it, before that in the cost of
the first pending node that does. So the sum depends on which nodes there are, not on their order,
but for the margin of a weight that nodes with and without a declared workspace share.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from gpumem._support.arguments import is_integer
from gpumem._support.sizes import format_size
from gpumem.accounting.counts import ResourceCount, as_count, fitting
from gpumem.accounting.nodes import (
    CostedNode,
    CostedValue,
    NodeOrGroup,
    declared_workspace,
    key_of,
    nodes_of,
    values_made,
    values_read,
)
from gpumem.errors import ConfigError


class Price(NamedTuple):
    """Cost of a node, and its parts."""

    nbytes: int
    own: int  # bytes of the node itself, without weights and workspace
    workspace: int  # as declared or guessed, without a margin on weights
    declares: bool  # its workspace, so that its weights have no margin
    used: tuple[CostedValue, ...] = ()  # weights
    counted: tuple[CostedValue, ...] = ()  # those of them that are in the cost


NOTHING = Price(0, 0, 0, False)


class Accountant(abc.ABC):
    """Keeps the account of one device's memory; subclasses define the cost of a node.

    Every method that takes a node also takes a fused group, as an iterable of nodes. Each of its
    nodes is priced; the group is accepted or refused as a whole.

    Parameters
    ----------
    threshold : ResourceCount, int or str, optional
        The limit in bytes. None, or a count of none: costs are kept and nothing is refused.

    Notes
    -----
    Not safe to use from several threads: one partition uses it at a time.

    Examples
    --------
    >>> from gpumem.accounting import Accountant
    >>> from gpumem.planning import GraphBuilder
    >>> class PerNode(Accountant):
    ...     def _own_bytes(self, node):
    ...         return 100
    >>> builder = GraphBuilder()
    >>> x = builder.input("x", "float32", (4,))
    >>> first, second = builder.node("Relu", [x], ["a"]), builder.node("Relu", ["a"], ["b"])
    >>> accountant = PerNode(threshold=150)
    >>> accountant.account(first), accountant.account(second), accountant.stop_requested
    (ResourceCount.from_bytes(100), None, True)
    """

    def __init__(self, threshold: ResourceCount | int | str | None = None) -> None:
        self._threshold = None if threshold is None else as_count(threshold)
        self._consumed = 0
        self._pending: dict[Hashable, Price] = {}
        self._pending_bytes = 0
        self._committed: set[Hashable] = set()
        self._committed_weights: set[CostedValue] = set()
        self._users: dict[CostedValue, dict[Hashable, None]] = {}  # pending nodes, in their order
        self._first: dict[Hashable, Price] = {}  # of the first pass that accepted the node
        self._stop_requested = False

    # ---- counts ----------------------------------------------------------------------------------

    @property
    def threshold(self) -> ResourceCount | None:
        """The limit, or None."""
        return self._threshold

    @property
    def consumed(self) -> ResourceCount:
        """The sum of the committed nodes' costs; only `commit` changes it."""
        return ResourceCount.from_bytes(self._consumed)

    @property
    def pending(self) -> ResourceCount:
        """The sum of the costs that this pass accepted and did not commit yet."""
        return ResourceCount.from_bytes(self._pending_bytes)

    @property
    def stop_requested(self) -> bool:
        """Whether a node did not fit in this pass."""
        return self._stop_requested

    def cost(self, node: NodeOrGroup) -> ResourceCount:
        """Return the cost of a node now: 0 once it is committed. Nothing is changed.

        Raises
        ------
        OverflowError
            More than 2**64 - 1 bytes.
        """
        return ResourceCount.from_bytes(_sum_of(self._prices(nodes_of(node)).values()))

    def fits(self, node: NodeOrGroup) -> bool:
        """Return whether `account` would accept a node now; nothing is changed.

        Raises
        ------
        OverflowError
            More than 2**64 - 1 bytes.
        """
        return self._allows(self._prices(nodes_of(node)))

    def workspace(self, node: NodeOrGroup) -> int:
        """Return the bytes in the cost of a node that are for workspaces, declared or guessed.

        Raises
        ------
        OverflowError
            More than 2**64 - 1 bytes.
        """
        return sum(
            price.nbytes - price.own - sum(weight.nbytes or 0 for weight in price.counted)
            for price in self._prices(nodes_of(node)).values()
        )

    # ---- a pass ----------------------------------------------------------------------------------

    def account(self, node: NodeOrGroup) -> ResourceCount | None:
        """Accept a node if the limit allows it.

        Returns
        -------
        ResourceCount or None
            The cost, which is pending now. None: consumed, pending and cost together exceed the
            threshold; `stop_requested` is set and nothing else has changed. A sum of exactly the
            threshold fits.

        Raises
        ------
        OverflowError
            More than 2**64 - 1 bytes; nothing has changed.

        Examples
        --------
        >>> from gpumem.accounting import AdHocAccountant
        >>> from gpumem.planning import GraphBuilder
        >>> builder = GraphBuilder()
        >>> x = builder.input("x", "uint8", (100,))
        >>> node = builder.node("Relu", [x], [builder.value("y", "uint8", (100,))])
        >>> accountant = AdHocAccountant(percent=100)
        >>> accountant.account(node), accountant.pending, accountant.consumed
        (ResourceCount.from_bytes(100), ResourceCount.from_bytes(100), ResourceCount.from_bytes(0))
        """
        prices = self._prices(nodes_of(node))
        cost = ResourceCount.from_bytes(_sum_of(prices.values()))
        if not self._allows(prices):
            self._stop_requested = True
            return None
        for key, price in prices.items():
            self._hold(key, price)
        return cost

    def withdraw(self, node: NodeOrGroup) -> None:
        """Undo `account`; a node that is not pending is skipped."""
        for one in nodes_of(node):
            self._release(key_of(one))

    def commit(self, node: NodeOrGroup) -> ResourceCount:
        """Move the cost of a node to `consumed`; a second time adds nothing.

        A node that is not pending, because a new pass began, is priced as by `cost`. A weight that
        was counted for another node, which is not committed, is counted for this one instead.

        Returns
        -------
        ResourceCount
            The added bytes.

        Raises
        ------
        OverflowError
            More than 2**64 - 1 bytes consumed; nothing has changed.
        """
        prices = self._prices(nodes_of(node), for_good=True)
        added = _sum_of(prices.values())
        self._consumed = fitting(self._consumed + added)
        for key, price in prices.items():
            self._release(key)
            self._committed.add(key)
            self._first.setdefault(key, price)
            for weight in price.counted:
                self._pending_bytes -= self._pending_cost_of(weight)
                self._committed_weights.add(weight)
        return ResourceCount.from_bytes(added)

    def reset_for_new_pass(self) -> None:
        """Clear the stop flag and pending costs; committed costs and nodes' own bytes stay."""
        self._stop_requested = False
        for key in list(self._pending):
            self._release(key)

    def _hold(self, key: Hashable, price: Price) -> None:
        if key in self._pending or key in self._committed:
            return
        self._pending[key] = price
        self._pending_bytes += price.own + price.workspace
        self._first.setdefault(key, price)
        for weight in price.used:
            self._pending_bytes -= self._pending_cost_of(weight)
            self._users.setdefault(weight, {})[key] = None
            self._pending_bytes += self._pending_cost_of(weight)

    def _release(self, key: Hashable) -> None:
        price = self._pending.get(key, NOTHING)
        self._pending_bytes -= price.own + price.workspace
        for weight in price.used:
            self._pending_bytes -= self._pending_cost_of(weight)
            del self._users[weight][key]
            self._pending_bytes += self._pending_cost_of(weight)
        self._pending.pop(key, None)

    def _pending_cost_of(self, weight: CostedValue) -> int:
        """Return the cost of a weight in the pending bytes, which its first user decides."""
        first = next(iter(self._users.get(weight, ())), None)
        if first is None or weight in self._committed_weights:
            return 0
        return self._cost_of(weight, self._pending[first].declares)

    # ---- prices ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def _own_bytes(self, node: CostedNode) -> int:
        """Return the bytes of a node itself, without its workspace."""

    def _workspace_of(self, node: CostedNode, own: int) -> int:
        """Return the bytes of its workspace; `own` are those of the node itself."""
        return declared_workspace(node) or 0

    def _weights_of(self, node: CostedNode) -> Iterable[CostedValue]:
        """Return the weights of a node, if they are counted apart from its own bytes."""
        return ()

    def _cost_of(self, weight: CostedValue, declares: bool) -> int:
        """Return the cost of a weight for a node, which may declare its workspace."""
        return weight.nbytes or 0

    def _prices(self, nodes: list[CostedNode], *, for_good: bool = False) -> dict[Hashable, Price]:
        """Price nodes in order; a weight in the price of one is not in that of a later one.

        `for_good`: for a commit, which takes weights from nodes that are only pending.
        """
        prices: dict[Hashable, Price] = {}
        counted: set[CostedValue] = set()
        for node in nodes:
            key = key_of(node)
            if key not in prices:
                prices[key] = self._price(key, node, counted, for_good)
                counted.update(prices[key].counted)
        return prices

    def _price(
        self, key: Hashable, node: CostedNode, counted: set[CostedValue], for_good: bool
    ) -> Price:
        if key in self._committed:
            return NOTHING
        if (first := self._first.get(key)) is not None:
            _, own, workspace, declares, *_ = first
        else:
            own = fitting(self._own_bytes(node))
            workspace = fitting(self._workspace_of(node, own))
            declares = declared_workspace(node) is not None
        held = self._pending.get(key)
        used = tuple(dict.fromkeys(self._weights_of(node))) if held is None else held.used
        new = tuple(
            weight
            for weight in used
            if weight not in self._committed_weights
            and weight not in counted
            and (for_good or next(iter(self._users.get(weight, ())), key) == key)
        )
        nbytes = own + workspace + sum(self._cost_of(weight, declares) for weight in new)
        return Price(fitting(nbytes), own, workspace, declares, used, new)

    def _allows(self, prices: dict[Hashable, Price]) -> bool:
        new = _sum_of(price for key, price in prices.items() if key not in self._pending)
        total = ResourceCount.from_bytes(self._consumed + self._pending_bytes + new)
        return self._threshold is None or not total.exceeds(self._threshold)

    def __repr__(self) -> str:
        limit = "without a limit" if self._threshold is None else f"of {self._threshold}"
        return f"<gpumem.{type(self).__name__}: {format_size(self._consumed)} consumed {limit}>"


class AdHocAccountant(Accountant):
    """Prices a node by its model: weights and outputs of known size, and its workspace.

    A weight counts once, for the first node that uses it, also if the weight belongs to an outer
    graph. Outputs of a size that is only known when the graph runs count nothing. For a node that
    holds graphs, such as an If, the nodes in them count too.

    Parameters
    ----------
    threshold : ResourceCount, int or str, optional
        The limit in bytes. None, or a count of none: costs are kept and nothing is refused.
    percent : int
        Cost of a node without a declared workspace, in per cent of those bytes, rounded down for a
        node and for each weight: 150 leaves half of them again for scratch memory of kernels, as
        ONNX Runtime does. 100 counts the bytes alone. For a node with an attribute `workspace` that
        is not None, those bytes count in place of this guess, also as in ONNX Runtime.

    Raises
    ------
    ConfigError
        `percent` is not an integer from 100 to 10 000.

    Examples
    --------
    >>> from gpumem.accounting import AdHocAccountant
    >>> from gpumem.planning import GraphBuilder
    >>> builder = GraphBuilder()
    >>> x = builder.input("x", "float32", (8, 16))
    >>> w = builder.initializer("w", "float32", (16, 4))
    >>> builder.node("MatMul", [x, w], [builder.value("y", "float32", (8, 4))])
    Node(MatMul -> y)
    >>> node = builder.build(outputs=["y"]).nodes[0]
    >>> accountant = AdHocAccountant(threshold=600)
    >>> accountant.cost(node), accountant.account(node), accountant.commit(node)
    (ResourceCount.from_bytes(576), ResourceCount.from_bytes(576), ResourceCount.from_bytes(576))
    >>> accountant.consumed, accountant.cost(node)
    (ResourceCount.from_bytes(576), ResourceCount.from_bytes(0))
    """

    def __init__(
        self, threshold: ResourceCount | int | str | None = None, *, percent: int = 150
    ) -> None:
        super().__init__(threshold)
        if not is_integer(percent, 100, 10_000):
            raise ConfigError(f"invalid percent = {percent!r}: expected an integer, 100 to 10000")
        self._percent = percent

    def _own_bytes(self, node: CostedNode) -> int:
        return sum(value.nbytes or 0 for value in values_made(node))

    def _weights_of(self, node: CostedNode) -> Iterable[CostedValue]:
        return (value for value in values_read(node) if value.is_initializer)

    def _workspace_of(self, node: CostedNode, own: int) -> int:
        declared = declared_workspace(node)
        return own * self._percent // 100 - own if declared is None else declared

    def _cost_of(self, weight: CostedValue, declares: bool) -> int:
        return (weight.nbytes or 0) * (100 if declares else self._percent) // 100


def _sum_of(prices: Iterable[Price]) -> int:
    return fitting(sum(price.nbytes for price in prices))
