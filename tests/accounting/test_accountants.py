"""Accountants: prices, passes, commits, limits."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem.accounting import (
    AdHocAccountant,
    NodeStats,
    ResourceCount,
    StatsAccountant,
    unique_node_name,
)
from gpumem.accounting.nodes import values_made
from gpumem.errors import ConfigError
from gpumem.planning import GraphBuilder, ModelGraph, Node, Value


def chain(*lengths, shared=100):
    """Make nodes in a row: each has an output of so many bytes, and all use one weight."""
    builder = GraphBuilder()
    last = builder.input("x", "uint8", (1,))
    weight = builder.initializer("shared", "uint8", (shared,))
    for number, length in enumerate(lengths):
        made = builder.value(f"v{number}", "uint8", (length,))
        builder.node("Op", [last, weight], [made], name=f"n{number}")
        last = made
    return builder.build(outputs=[last]).nodes


def exact(threshold=None):
    return AdHocAccountant(threshold, percent=100)


def test_cost_is_weights_and_outputs_times_one_and_a_half():
    (node,) = chain(20)
    assert AdHocAccountant().cost(node) == 180
    assert AdHocAccountant(percent=100).cost(node) == 120
    assert AdHocAccountant(percent=133).cost(node) == 159


def declaring(*workspaces):
    """Make nodes of outputs of 20 bytes, with workspaces, that use one weight of 100 bytes."""
    builder = GraphBuilder()
    weight = builder.initializer("shared", "uint8", (100,))
    for number, workspace in enumerate(workspaces):
        made = builder.value(f"v{number}", "uint8", (20,))
        builder.node("Op", [weight], [made], workspace=workspace)
    return builder.build(outputs=["v0"]).nodes


def test_declared_workspace_counts_in_place_of_the_guess():
    guessed, none, some = (declaring(workspace)[0] for workspace in (None, 0, 7))
    accountant = AdHocAccountant()
    assert [accountant.cost(node) for node in (guessed, none, some)] == [180, 120, 127]
    assert [accountant.workspace(node) for node in (guessed, none, some)] == [60, 0, 7]
    measured = {unique_node_name(some): NodeStats(1, 2, 3, 5)}
    assert StatsAccountant(measured).cost(some) == 13
    assert StatsAccountant({unique_node_name(some): NodeStats(1, 2, 3, 9)}).cost(some) == 15
    assert StatsAccountant({}).cost(some) == 7


def test_shared_weight_has_the_margin_of_its_first_pending_user():
    accountant = AdHocAccountant()
    guessed, some = declaring(None, 7)
    assert (accountant.account(guessed), accountant.account(some)) == (180, 27)
    accountant.withdraw(guessed)
    assert accountant.pending == 127
    assert (accountant.account(guessed), accountant.pending) == (30, 157)
    accountant.commit(guessed)
    assert (accountant.consumed, accountant.pending) == (180, 27)
    accountant.commit(some)
    assert (accountant.consumed, accountant.pending) == (207, 0)


def test_pricing_a_node_changes_nothing():
    accountant = exact()
    a, b = chain(20, 30)
    assert accountant.cost(a) == accountant.cost(a) == 120
    assert accountant.cost(b) == 130
    assert accountant.pending == accountant.consumed == 0


def test_shared_weight_is_charged_to_its_first_user_only():
    accountant = exact()
    a, b = chain(20, 30)
    assert accountant.account(a) == 120
    assert accountant.cost(b) == 30
    accountant.commit(a)
    assert accountant.account(b) == 30
    accountant.commit(b)
    assert accountant.consumed == 150


def test_node_without_outputs_is_not_taken_for_a_dropped_one():
    accountant = exact()
    for number in range(1, 20):
        weight = Value(f"w{number}", "uint8", (10,), is_initializer=True)
        node = Node("Sink", [weight], [])
        assert accountant.commit(node) == 10
        assert accountant.commit(node) == 0
        del node  # a later node may have its address
    assert accountant.consumed == 190


def test_weight_of_a_withdrawn_node_is_charged_to_the_next_user():
    accountant = exact()
    a, b = chain(20, 30)
    accountant.account(a)
    accountant.withdraw(a)
    assert accountant.pending == 0
    assert accountant.account(b) == 130


def test_withdrawn_node_leaves_its_weight_to_the_pending_user():
    accountant = exact(150)
    a, b = chain(20, 30)
    accountant.account(a)
    accountant.account(b)
    accountant.withdraw(a)
    assert accountant.pending == accountant.cost(b) == 130
    assert accountant.account(a) == 20
    assert accountant.commit(b) == 130


def test_committed_node_takes_its_weight_from_a_pending_one():
    accountant = exact(150)
    a, b = chain(20, 30)
    accountant.account(a)
    accountant.account(b)
    assert accountant.commit(b) == 130
    assert accountant.pending == accountant.cost(a) == 20
    accountant.reset_for_new_pass()
    assert (accountant.consumed, accountant.cost(a)) == (130, 20)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sets(st.integers(0, 2))), min_size=1, max_size=6),
    st.lists(
        st.tuples(st.sampled_from(["account", "withdraw", "commit", "new pass"]), st.integers(0, 5))
    ),
    st.sampled_from([100, 133]),
)
def test_sum_is_what_pending_and_committed_nodes_cost_anew(nodes, steps, percent):
    builder = GraphBuilder()
    x = builder.input("x", "uint8", (1,))
    weights = [builder.initializer(f"w{n}", "uint8", (7 + n,)) for n in range(3)]
    made = [
        builder.node(
            "Op", [x, *(weights[w] for w in used)], [builder.value(f"v{n}", "uint8", (k,))]
        )
        for n, (k, used) in enumerate(nodes)
    ]
    accountant = AdHocAccountant(percent=percent)
    pending, committed = set(), set()
    for step, number in steps:
        node = made[number % len(made)]
        if step == "account":
            accountant.account(node)
            pending |= {node} - committed
        elif step == "withdraw":
            accountant.withdraw(node)
            pending.discard(node)
        elif step == "commit":
            accountant.commit(node)
            committed.add(node)
            pending.discard(node)
        else:
            accountant.reset_for_new_pass()
            pending.clear()
        anew = AdHocAccountant(percent=percent)
        assert accountant.consumed == anew.cost(committed)
        assert accountant.consumed + accountant.pending == anew.cost(committed | pending)


def test_group_costs_the_sum_of_its_nodes():
    nodes = chain(20, 30, 40)
    together, apart = exact(), exact()
    assert together.cost(nodes) == 190
    assert together.account(nodes).total_bytes == sum(
        apart.account(node).total_bytes for node in nodes
    )
    together.commit(nodes)
    for node in nodes:
        apart.commit(node)
    assert together.consumed == apart.consumed == 190


def test_group_over_the_limit_is_refused_as_a_whole():
    nodes = chain(20, 30)
    accountant = exact(149)
    assert accountant.account(nodes) is None
    assert accountant.pending == 0
    assert accountant.stop_requested
    assert exact(150).account(nodes) == 150


def test_limit_is_exact_to_the_byte():
    a, b = chain(20, 30)
    for limit, fits in ((150, True), (149, False)):
        accountant = exact(limit)
        accountant.account(a)
        assert accountant.fits(b) is fits
        assert (accountant.account(b) is not None) is fits
        assert accountant.stop_requested is not fits


def test_only_a_commit_changes_what_is_consumed():
    accountant = exact(200)
    a, b = chain(20, 30)
    accountant.account(a)
    assert (accountant.consumed, accountant.pending) == (0, 120)
    accountant.commit(a)
    assert (accountant.consumed, accountant.pending) == (120, 0)
    accountant.commit(a)
    assert accountant.consumed == 120
    assert accountant.account(a) == 0
    assert accountant.commit([a, b]) == 30


def test_costs_are_counted_without_a_limit():
    for threshold in (None, ResourceCount.none()):
        accountant = exact(threshold)
        nodes = chain(20, 30)
        assert accountant.account(nodes) == 150
        accountant.commit(nodes)
        assert accountant.consumed == 150
        assert not accountant.stop_requested


def test_new_pass_drops_stop_flag_and_pending_costs_but_keeps_commits():
    accountant = exact(150)
    a, b, c = chain(20, 30, 40)
    accountant.account(a)
    accountant.commit(a)
    accountant.account(b)
    assert accountant.account(c) is None
    accountant.reset_for_new_pass()
    assert not accountant.stop_requested
    assert (accountant.consumed, accountant.pending) == (120, 0)
    assert accountant.account(b) == 30


def test_surviving_nodes_commit_at_the_price_of_the_first_pass():
    accountant = exact()
    x = Value("x", "uint8", (1,))
    small = Value("y", "uint8", (10,))
    node = Node("Op", [x], [small])
    accountant.account(node)
    accountant.reset_for_new_pass()
    stretched = Value("x_moved", "uint8", (7,))
    rewired = Node("Op", [stretched], [small])
    assert accountant.commit(rewired) == 10
    assert accountant.commit(node) == 0, "it makes what the rewired one makes: the same node"


def test_weight_stays_counted_after_its_paying_node_is_removed():
    accountant = exact()
    a, b = chain(20, 30)
    accountant.account(a)
    accountant.account(b)
    accountant.reset_for_new_pass()
    accountant.commit(b)
    assert accountant.consumed == 130


def test_values_of_unknown_size_cost_nothing():
    x = Value("x", "float32", ("n",))
    y = Value("y", "float32", ("n", 4))
    z = Value("z", "float32", (4,))
    assert exact().cost(Node("Op", [x], [y, None, z])) == 16


def test_node_with_a_body_costs_the_body_and_its_outer_weights():
    outer = Value("w", "uint8", (100,), is_initializer=True)
    inner = Value("inner", "uint8", (10,), is_initializer=True)
    mid, end = Value("mid", "uint8", (3,)), Value("end", "uint8", (5,))
    body = ModelGraph(
        [Node("Op", [outer, inner], [mid])], inputs=[], outputs=[mid], captures=[outer]
    )
    node = Node("If", [], [end], bodies={"then_branch": body, "else_branch": body})
    accountant = exact()
    assert accountant.account(node) == 100 + 10 + 3 + 3 + 5
    assert accountant.cost(Node("Op", [outer], [Value("q", "uint8", (1,))])) == 1


def test_bodies_of_any_depth_are_counted_in_order():
    node = SimpleNamespace(inputs=[], outputs=[Value("v0", "uint8", (1,))], bodies=[])
    for number in range(1, 5000):
        outputs = [Value(f"v{number}", "uint8", (1,))]
        node = SimpleNamespace(inputs=[], outputs=outputs, bodies=[[node], []])
    assert AdHocAccountant(percent=100).cost(node) == 5000
    assert next(values_made(node)).name == "v4999"


def test_weights_of_equal_name_in_two_bodies_are_distinct():
    nodes = [
        Node("Op", [Value("w", "uint8", (n,), is_initializer=True)], [Value("y", "uint8", (1,))])
        for n in (10, 20)
    ]
    assert exact().cost(nodes) == 32


def test_overflowing_sum_is_an_error_and_changes_nothing():
    huge = Value("y", "uint8", (2**64 - 10,))
    (small,) = chain(20)
    accountant = exact()
    accountant.account(small)
    with pytest.raises(OverflowError):
        accountant.account(Node("Op", [], [huge]))
    assert accountant.pending == 120
    with pytest.raises(OverflowError):
        AdHocAccountant().cost(Node("Op", [], [huge]))


@pytest.mark.parametrize("percent", [99, 10_001, 1.5, True, "150"])
def test_percentage_out_of_range_is_refused(percent):
    with pytest.raises(ConfigError, match="100 to 10000"):
        AdHocAccountant(percent=percent)


@pytest.mark.parametrize("threshold", [-1, 1.5, "10"])
def test_invalid_threshold_is_refused(threshold):
    with pytest.raises((ValueError, TypeError)):
        AdHocAccountant(threshold)


def test_stats_accountant_prices_by_recorded_sums_and_unknown_nodes_at_zero():
    a, b = chain(20, 30)
    accountant = StatsAccountant({unique_node_name(a): NodeStats(1, 2, 3, 4)}, threshold=10)
    assert accountant.cost(a) == 10
    assert accountant.account([a, b]) == 10
    assert accountant.commit(b) == 0


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=12),
    st.integers(0, 5000),
    st.lists(st.tuples(st.sampled_from(["account", "commit", "new pass"]), st.integers(0, 11))),
)
def test_consumed_and_pending_never_exceed_the_limit(lengths, limit, steps):
    nodes = chain(*lengths)
    accountant = exact(limit)
    accepted = set()
    for step, number in steps:
        node = nodes[number % len(nodes)]
        if step == "account" and accountant.account(node) is not None:
            accepted.add(node)
        elif step == "commit" and node in accepted:
            accountant.commit(node)
        elif step == "new pass":
            accountant.reset_for_new_pass()
            accepted.clear()
        assert (accountant.consumed + accountant.pending).total_bytes <= limit
