"""Budgets by themselves: limits in a tree, reservations, soft limits, pressure."""

from __future__ import annotations

import gc
import pickle
import threading

import pytest
from helpers.child import run_quietly
from helpers.threads import in_a_thread, in_threads, run_threads

import gpumem
from gpumem import Budget, Reservation
from gpumem.errors import BudgetExceededError, ReservationError


def exceeded(budget, nbytes):
    with pytest.raises(BudgetExceededError) as raised:
        budget.reserve(nbytes)
    return raised.value


def test_names_that_no_encoding_has_are_shown_with_question_marks():
    budget = Budget(1 << 20, name="tenant-\udcff")
    assert budget.name == "tenant-?"
    arena = gpumem.Arena("host", budget=budget, name="arena-\udcff")
    with pytest.raises(BudgetExceededError, match="tenant-\\?"):
        arena.allocate(4 << 20)


def test_error_of_a_budget_names_the_levels_from_the_lowest_up():
    process = Budget(1 << 30, name="process")
    tenant = Budget(1 << 20, parent=process, name="tenant")
    told = "limits: tenant 0 B of 1.0 MiB, within process 0 B of 1.0 GiB; held by"
    assert told in str(exceeded(tenant, 2 << 20))


# ---- the tree ------------------------------------------------------------------------------------


def test_charge_counts_at_its_level_and_all_above():
    process = Budget(1000, name="process")
    device = Budget(800, parent=process, name="device")
    tenants = [Budget(500, parent=device, name=f"tenant {i}") for i in range(2)]
    held = [tenants[0].reserve(300), tenants[1].reserve(400)]
    assert [budget.used for budget in (process, device, *tenants)] == [700, 700, 300, 400]
    assert [budget.free for budget in (process, device, *tenants)] == [300, 100, 100, 100]
    held[0].cancel()
    assert [budget.used for budget in (process, device, *tenants)] == [400, 400, 0, 400]


@pytest.mark.parametrize("level", range(3))
def test_refused_charge_is_rolled_back_at_every_level(level):
    limits = [1000, 1000, 1000]
    limits[level] = 100
    root = Budget(limits[0], name="0")
    middle = Budget(limits[1], parent=root, name="1")
    leaf = Budget(limits[2], parent=middle, name="2")
    error = exceeded(leaf, 101)
    assert (error.budget, error.limit, error.missing, error.requested_nbytes) == (
        str(level),
        100,
        1,
        101,
    )
    assert [one.name for one in error.path] == ["2", "1", "0"]
    assert [budget.used for budget in (root, middle, leaf)] == [0, 0, 0]
    leaf.reserve(100).commit()  # exactly equal fits
    assert exceeded(leaf, 1).largest_free == 0


def test_budget_error_lists_holders_and_survives_pickle():
    root = Budget(1 << 20, name="root")
    child = Budget(None, parent=root, name="child")
    arena = gpumem.Arena("host", {"backing": "regions"}, budget=child, name="weights")
    buffer = arena.allocate(1000)
    held = root.reserve(100) if root.free >= 100 else None
    error = pickle.loads(pickle.dumps(exceeded(child, 1 << 20)))
    assert error.holders[0] == ("child", child.used)
    assert child.holders() == (("weights", arena.stats().reserved),)
    assert error.path == (("child", child.used, None), ("root", root.used, 1 << 20))
    assert "child" in str(error)
    assert isinstance(error, gpumem.OutOfMemoryError)
    assert isinstance(error, MemoryError)
    del buffer, held


def test_budget_error_lists_reservations_among_holders():
    budget = Budget(1000)
    held = budget.reserve(10)
    assert budget.holders() == (("reservations", 10),)
    held.cancel()
    assert budget.holders() == ()


def test_budget_without_a_limit_obeys_its_parents():
    root = Budget(100)
    child = Budget(None, parent=root)
    assert child.limit is None
    assert child.free == 100
    assert Budget(None).free is None
    assert exceeded(child, 101).limit == 100


def test_budgets_text_names_its_limit_or_that_it_has_none():
    root = Budget(1000, name="root")
    held = root.reserve(300)
    assert repr(root) == "<gpumem.Budget 'root': 300 B in use, limit 1000 B>"
    assert repr(Budget(None, parent=root)) == "<gpumem.Budget 'budget': 0 B in use, no limit>"
    held.cancel()


def test_lowered_limit_takes_nothing_away():
    budget = Budget(100)
    held = budget.reserve(80)
    budget.limit = 50
    assert (budget.used, budget.free) == (80, 0)
    assert exceeded(budget, 1).missing == 31
    held.cancel()
    budget.reserve(50).cancel()
    budget.limit = None
    assert budget.free is None


def test_siblings_are_limited_by_themselves_and_together():
    root = Budget(100, name="root")
    first, second = (Budget(60, parent=root, name=name) for name in ("first", "second"))
    held = [first.reserve(60)]
    assert (exceeded(first, 1).budget, first.free, second.free) == ("first", 0, 40)
    held.append(second.reserve(40))
    error = exceeded(second, 1)
    assert (error.budget, error.limit, error.missing) == ("root", 100, 1)
    assert error.holders == (("first", 60), ("second", 40))
    assert (second.free, second.used) == (0, 40)
    held.append(Budget(1, parent=root, name="third"))
    assert exceeded(held[-1], 2).budget == "third"
    held[0].cancel()
    assert (root.used, root.free, second.free) == (40, 60, 20)
    assert root.peak == 100
    assert [budget.peak for budget in (first, second, held[-1])] == [60, 40, 0]


def test_holders_are_listed_by_what_they_hold_whichever_ended():
    root = Budget(100, name="root")
    children = {n: Budget(None, parent=root, name=f"{n}") for n in (10, 30, 20, 15, 0)}
    for size, child in children.items():
        child.reserve(size).commit()
    del child
    held = root.reserve(12)
    assert root.holders() == (("30", 30), ("20", 20), ("15", 15), ("reservations", 12), ("10", 10))
    for size, rest in ((20, 67), (0, 67), (10, 57), (15, 42)):
        del children[size]
        assert root.used == rest, "what an ended budget held is given back"
        assert sum(nbytes for _, nbytes in root.holders()) == rest
    assert root.holders() == (("30", 30), ("reservations", 12))
    del held


def test_dropped_child_budget_releases_its_committed_reservations():
    root = Budget(100)
    child = Budget(100, parent=root)
    child.reserve(60).commit()
    assert root.used == 60
    del child
    gc.collect()
    assert root.used == 0


def test_peak_is_the_highest_use_so_far():
    budget = Budget(100)
    budget.reserve(70).cancel()
    budget.reserve(20).cancel()
    assert (budget.used, budget.peak) == (0, 70)


def test_tree_depth_is_bounded():
    budget = Budget(10)
    levels = [budget]
    for _ in range(30):
        levels.append(Budget(None, parent=levels[-1]))
    with pytest.raises(ValueError, match="31"):
        Budget(None, parent=levels[-1])
    arena = gpumem.Arena("host", {"backing": "regions"}, budget=levels[-1])
    with pytest.raises(BudgetExceededError):
        arena.allocate(100)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (((-1,), {}), ValueError),
        (((1 << 63,), {}), ValueError),
        ((("1",), {}), TypeError),
        (((True,), {}), TypeError),
        (((1.5,), {}), TypeError),
        (((1,), {"soft": -1}), ValueError),
        (((1,), {"soft": 2}), ValueError),
        (((1,), {"parent": 5}), TypeError),
        (((1,), {"on_pressure": 5}), TypeError),
        (((1,), {"name": "a\0b"}), ValueError),
    ],
)
def test_invalid_arguments_are_refused_by_name(arguments, error):
    positional, named = arguments
    with pytest.raises(error, match=next(iter(named), "limit")):
        Budget(*positional, **named)


def test_holder_with_a_name_that_is_no_utf8_is_shown_with_a_replacement():
    budget = Budget(1 << 30)
    arena = gpumem.Arena("host", name="a\ud800", budget=budget)
    with arena.allocate(1000):
        assert [name for name, _ in budget.holders()] == ["a?"]


def test_budget_names_none_as_accepted_where_it_is():
    for named in ("limit", "soft"):
        with pytest.raises(TypeError, match=f"{named} must be an integer or None, or a size"):
            Budget(**({"limit": 1} | {named: 1.5}))
    with pytest.raises(TypeError, match="nbytes must be an integer or a size"):
        Budget(1).reserve(1.5)


@pytest.mark.parametrize(
    ("nbytes", "error"), [(-1, ValueError), (None, TypeError), (2.0, TypeError)]
)
def test_reserve_rejects_invalid_sizes(nbytes, error):
    budget = Budget(10)
    with pytest.raises(error, match="nbytes"):
        budget.reserve(nbytes)
    assert budget.used == 0


def test_device_budget_is_one_per_process_and_limited_to_free_memory(leave_room):
    leave_room(10 << 20)
    budget = Budget.of_device("host:0")
    assert budget.limit == gpumem.Device("host").free_bytes == 10 << 20
    assert Budget.of_device(gpumem.MemoryInfo("host")) is budget
    assert budget.name == "host:0"
    del budget
    leave_room(8 << 20)
    assert Budget.of_device("host").limit == 8 << 20


# ---- reservations --------------------------------------------------------------------------------


def test_reservation_is_pending_until_it_is_committed_or_cancelled():
    root = Budget(100)
    budget = Budget(100, parent=root)
    first, second = budget.reserve(30), budget.reserve(20)
    assert (budget.used, budget.pending, root.pending) == (50, 50, 50)
    first.commit()
    second.cancel()
    assert (budget.used, budget.pending, root.pending) == (30, 0, 0)
    first.release()
    assert (budget.used, root.used) == (0, 0)


STEPS = ("commit", "cancel", "release")
LEGAL = {"pending": ("commit", "cancel"), "committed": ("release",)}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("path", [(), ("commit",), ("cancel",), ("commit", "release")])
def test_reservation_steps_happen_once_and_in_order(path, step):
    budget = Budget(100)
    reservation = budget.reserve(40)
    for taken in path:
        getattr(reservation, taken)()
    before = reservation.state, budget.used, budget.pending
    if step in LEGAL.get(reservation.state, ()):
        getattr(reservation, step)()
        assert (reservation.state, budget.used, budget.pending) != before
    else:
        with pytest.raises(ReservationError, match=reservation.state):
            getattr(reservation, step)()
        assert (reservation.state, budget.used, budget.pending) == before


def test_with_block_cancels_an_uncommitted_reservation():
    budget = Budget(100)
    with budget.reserve(40) as reservation:
        assert budget.used == 40
    assert (reservation.state, budget.used) == ("cancelled", 0)
    with budget.reserve(40) as reservation:
        reservation.commit()
    assert (reservation.state, budget.used) == ("committed", 40)


def test_dropped_reservation_keeps_only_what_was_committed():
    budget = Budget(100)
    budget.reserve(40)
    assert budget.used == 0
    reservation = budget.reserve(40)
    reservation.commit()
    del reservation
    assert budget.used == 40


def test_reservation_keeps_its_budget_alive():
    held = Budget(100).reserve(10)
    gc.collect()
    assert held.budget.used == 10
    held.commit()


def test_reservation_cannot_be_constructed_directly():
    with pytest.raises(TypeError, match="reserve"):
        Reservation()
    with pytest.raises(ReservationError):
        Reservation.__new__(Reservation).commit()


def test_zero_bytes_always_fit():
    budget = Budget(0)
    with budget.reserve(0) as reservation:
        assert (reservation.nbytes, budget.used) == (0, 0)


def test_concurrent_steps_of_a_reservation_happen_once():
    budget = Budget(1000)
    for _ in range(200):
        reservation = budget.reserve(100)
        taken = []

        def step(name, reservation=reservation, taken=taken):
            try:
                getattr(reservation, name)()
                taken.append(name)
            except ReservationError:
                pass

        in_threads(step, ("commit", "cancel") * 4)
        assert len(taken) == 1
        if taken == ["commit"]:
            reservation.release()
        assert (budget.used, budget.pending) == (0, 0)


# ---- soft limits ---------------------------------------------------------------------------------


def test_soft_limit_notifies_once_per_crossing():
    told = []
    root = Budget(1000, soft=100, name="root", on_pressure=lambda b, n: told.append((b.name, n)))
    child = Budget(1000, soft=50, parent=root, name="child", on_pressure=root.on_pressure)
    held = [child.reserve(50)]
    assert told == []
    held.append(child.reserve(1))
    assert told == [("child", 1)]
    held.append(child.reserve(60))
    assert told == [("child", 1), ("root", 11)]
    held.append(child.reserve(5))
    assert len(told) == 2
    held.clear()
    held.append(child.reserve(101))
    assert sorted(told[2:]) == [("child", 51), ("root", 1)]


def test_refused_request_does_not_notify_the_soft_limit():
    told = []
    root = Budget(100)
    child = Budget(None, soft=50, parent=root, on_pressure=lambda *asked: told.append(asked))
    exceeded(child, 101)
    assert [nbytes for _, nbytes in told] == [1]  # the hard limit's, above: 1 byte is missing
    with child.reserve(40):
        assert len(told) == 1


def test_soft_limit_may_be_set_up_to_the_limit():
    told = []
    budget = Budget(100, soft=10, on_pressure=lambda budget, nbytes: told.append(nbytes))
    budget.soft = 50
    with budget.reserve(50):
        assert (budget.soft, told) == (50, [])
        with budget.reserve(1):
            assert told == [1]
    budget.soft = 100
    with pytest.raises(ValueError, match="invalid soft = 101"):
        budget.soft = 101
    assert budget.soft == 100
    budget.soft = None
    with budget.reserve(100):
        assert (budget.soft, told) == (None, [1])
    assert Budget(None, soft=1).limit is None


def test_soft_limit_of_each_level_above_is_passed_by_itself():
    told = []
    root = Budget(None, soft=10, name="root", on_pressure=lambda b, n: told.append((b.name, n)))
    levels = [root]
    for depth in range(1, 4):
        parent, soft = levels[-1], None if depth == 2 else 10 + depth
        levels.append(
            Budget(None, soft=soft, parent=parent, name=f"{depth}", on_pressure=root.on_pressure)
        )
    held = [levels[-1].reserve(10)]
    assert told == []
    held.append(levels[-1].reserve(4))
    assert sorted(told) == [("1", 3), ("3", 1), ("root", 4)]
    del held


def test_soft_limits_callback_has_run_in_the_thread_that_passed_it_when_the_request_returns():
    told, seen = [], []
    budget = Budget(100, soft=10, on_pressure=lambda *_: told.append(threading.get_ident()))

    def pass_it():
        with budget.reserve(11):
            seen.append(told == [threading.get_ident()])

    in_a_thread(pass_it)
    assert seen == [True]
    assert len(told) == 1


def test_soft_limit_of_a_budget_without_a_callback_calls_nothing():
    told = []
    root = Budget(None, soft=10, name="root", on_pressure=lambda b, n: told.append((b.name, n)))
    child = Budget(None, soft=5, parent=root)
    with child.reserve(11):
        assert told == [("root", 1)]
    child.on_pressure = root.on_pressure
    with child.reserve(6):
        assert told == [("root", 1), ("budget", 1)]


def test_exception_of_a_soft_limit_callback_is_reported_and_fails_nothing(monkeypatch):
    told = []
    monkeypatch.setattr("sys.unraisablehook", lambda hook: told.append(str(hook.exc_value)))

    def refuse(budget, nbytes):
        raise RuntimeError("no")

    budget = Budget(100, soft=10, on_pressure=refuse)
    held = budget.reserve(11)
    assert (told, budget.used) == (["no"], 11)
    held.cancel()


def test_lowered_limit_calls_back_for_the_excess():
    told = []
    budget = Budget(100, on_pressure=lambda budget, nbytes: told.append(nbytes))
    held = budget.reserve(80)
    budget.limit = 50
    assert told == [30]
    held.cancel()


# ---- pressure ------------------------------------------------------------------------------------


class Cache:
    """Holds reservations, and lets go of `step` of them when asked."""

    def __init__(self, step=1000):
        self.held, self.asked, self.step = [], [], step

    def __call__(self, budget, nbytes):
        self.asked.append((budget.name, nbytes))
        for reservation in self.held[: self.step]:
            reservation.cancel()
        del self.held[: self.step]


def test_callback_frees_memory_and_the_request_succeeds():
    cache = Cache()
    budget = Budget(100, name="b", on_pressure=cache)
    cache.held = [budget.reserve(30) for _ in range(3)]
    with budget.reserve(50):
        assert cache.asked == [("b", 40)]
        assert budget.used == 50


def test_callback_is_repeated_while_it_frees_memory():
    cache = Cache(step=1)
    budget = Budget(100, name="b", on_pressure=cache)
    cache.held = [budget.reserve(10) for _ in range(10)]
    with budget.reserve(35):
        assert [nbytes for _, nbytes in cache.asked] == [35, 25, 15, 5]
    cache.held = [budget.reserve(5)]
    cache.asked.clear()
    exceeded(budget, 101)  # asked again after it freed, then no more
    assert len(cache.asked) == 2


def test_callback_that_frees_too_little_is_called_sixteen_times_for_one_request():
    cache = Cache(step=1)
    budget = Budget(100, name="b", on_pressure=cache)
    cache.held = [budget.reserve(1) for _ in range(100)]
    exceeded(budget, 50)
    assert [nbytes for _, nbytes in cache.asked] == list(range(50, 34, -1))


def test_callbacks_run_from_the_refusing_level_upwards_then_below():
    order = []

    def ask(budget, nbytes):
        order.append(budget.name)

    root = Budget(1000, name="root", on_pressure=ask)
    middle = Budget(100, name="middle", parent=root, on_pressure=ask)
    leaf = Budget(1000, name="leaf", parent=middle, on_pressure=ask)
    exceeded(leaf, 101)
    assert order == ["middle", "root", "leaf"]


def test_callbacks_exceptions_are_the_cause_and_all_run():
    asked = []

    def fail(budget, nbytes):
        asked.append(budget.name)
        raise RuntimeError(budget.name)

    root = Budget(1000, name="root", on_pressure=fail)
    leaf = Budget(10, name="leaf", parent=root, on_pressure=fail)
    error = exceeded(leaf, 11)
    assert asked == ["leaf", "root"]
    assert [str(one) for one in error.__cause__.exceptions] == ["leaf", "root"]
    root.on_pressure = None
    assert str(exceeded(leaf, 11).__cause__) == "leaf"
    assert (leaf.used, root.used) == (0, 0)


def test_exception_of_a_successful_callback_is_reported(monkeypatch):
    told = []
    monkeypatch.setattr("sys.unraisablehook", lambda hook: told.append(str(hook.exc_value)))
    budget = Budget(100)
    held = [budget.reserve(100)]

    def free_and_fail(budget, nbytes):
        held.pop().cancel()
        raise RuntimeError("freed")

    budget.on_pressure = free_and_fail
    with budget.reserve(10):
        assert told == ["freed"]


def test_interrupt_in_a_callback_passes_and_leaves_no_charge():
    def interrupt(budget, nbytes):
        raise KeyboardInterrupt

    budget = Budget(100, on_pressure=interrupt)
    for _ in range(2):  # the second time, too: it is not taken for one that still runs
        with pytest.raises(KeyboardInterrupt):
            budget.reserve(101)
    assert budget.used == 0


def test_callback_is_not_called_recursively():
    depth = []

    def ask(budget, nbytes):
        depth.append(nbytes)
        exceeded(budget, 200)

    budget = Budget(100, on_pressure=ask)
    exceeded(budget, 101)
    assert depth == [1]


def test_callback_may_raise_the_limit():
    def more(budget, nbytes):
        budget.limit += nbytes

    budget = Budget(100, on_pressure=more)
    with budget.reserve(150):
        assert (budget.limit, budget.used) == (150, 150)


def test_callbacks_run_on_several_threads_at_once():
    inside = threading.Barrier(4, timeout=30)
    budget = Budget(100, on_pressure=lambda budget, nbytes: inside.wait())
    errors = []
    threads = [
        threading.Thread(target=lambda: errors.append(exceeded(budget, 101))) for _ in range(4)
    ]
    run_threads(threads)
    assert len(errors) == 4
    assert all(error.__cause__ is None for error in errors)


# ---- fork and exit -------------------------------------------------------------------------------


def test_forked_child_has_empty_budgets():
    run_quietly("""
        import os, gpumem
        root = gpumem.Budget(100, name="root")
        child = gpumem.Budget(100, parent=root)
        tenant = gpumem.Budget(None, parent=child)
        arena = gpumem.Arena("host", {"backing": "regions"}, budget=tenant)
        pending, committed = child.reserve(10), child.reserve(20)
        committed.commit()
        pid = os.fork()
        if pid == 0:
            assert (child.used, root.used, child.pending, root.peak) == (0, 0, 0, 0)
            pending.cancel(), committed.release()
            assert (child.used, root.used, child.pending) == (0, 0, 0)
            child.reserve(100).commit()
            arena.close()
            assert (child.used, root.used) == (100, 100)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert (child.used, root.used, child.pending) == (30, 30, 10)
    """)


def test_process_exits_with_live_budgets_callbacks_and_reservations():
    run_quietly("""
        import gpumem
        held = []
        budget = gpumem.Budget(1 << 30, soft=1, on_pressure=lambda b, n: held.append(b))
        held += [budget, budget.reserve(10), gpumem.Arena("host", budget=budget)]
        held.append(held[-1].allocate(100))
    """)


def test_sizes_of_a_budget_may_be_texts_with_a_unit():
    budget = gpumem.Budget("1GiB", soft="512MiB")
    assert (budget.limit, budget.soft) == (1 << 30, 512 << 20)
    budget.limit = "2GiB"
    assert budget.limit == 2 << 30
    with budget.reserve("1MiB") as reservation:
        assert reservation.nbytes == 1 << 20


# ---- ends in any order ---------------------------------------------------------------------------

FORKS = """
import itertools, os
from gpumem import Budget

# Roots and children end in every order; a fork's child finds each of the others, and empties it.
for order in itertools.permutations(range(3)):
    for has_parent in (False, True):
        parent = Budget(1000, name="parent") if has_parent else None
        budgets = [Budget(1000, parent=parent, name=str(i)) for i in range(3)]
        held = [budget.reserve(10 + i) for i, budget in enumerate(budgets)]
        for ended in order[:2]:
            held[ended].cancel()
            held[ended] = budgets[ended] = None
            rest = [budget for budget in budgets if budget is not None]
            if parent is not None:
                names = sorted(name for name, _ in parent.holders())
                assert names == [budget.name for budget in rest], (order, names)
                rest.append(parent)
            assert all(budget.used for budget in rest), order
            child = os.fork()
            if child == 0:
                os._exit(any(budget.used or budget.peak or budget.pending for budget in rest))
            assert os.waitpid(child, 0)[1] == 0, (order, ended, has_parent)
        del rest
"""


def test_budgets_that_end_in_any_order_leave_the_others_in_their_tree():
    run_quietly(FORKS)


def test_reservation_tells_its_size_and_its_state():
    budget = Budget(1 << 20)
    held = budget.reserve(1 << 10)
    assert repr(held) == "<gpumem.Reservation of 1.0 KiB, pending>"
    held.commit()
    assert repr(held) == "<gpumem.Reservation of 1.0 KiB, committed>"
    held.release()
