"""Budgets by themselves: limits in a tree, reservations, soft limits, pressure."""

from __future__ import annotations

import gc
import pickle
import threading

import pytest

import gpumem
from gpumem.accounting import Budget, Reservation
from gpumem.errors import BudgetExceededError, ReservationError
from tests.helpers.child import run_quietly


def exceeded(budget, nbytes):
    with pytest.raises(BudgetExceededError) as raised:
        budget.reserve(nbytes)
    return raised.value


# ---- the tree ------------------------------------------------------------------------------------


def test_a_charge_counts_at_its_level_and_at_all_above():
    process = Budget(1000, name="process")
    device = Budget(800, parent=process, name="device")
    tenants = [Budget(500, parent=device, name=f"tenant {i}") for i in range(2)]
    held = [tenants[0].reserve(300), tenants[1].reserve(400)]
    assert [budget.used for budget in (process, device, *tenants)] == [700, 700, 300, 400]
    assert [budget.free for budget in (process, device, *tenants)] == [300, 100, 100, 100]
    held[0].cancel()
    assert [budget.used for budget in (process, device, *tenants)] == [400, 400, 0, 400]


@pytest.mark.parametrize("level", range(3))
def test_whichever_level_refuses_nothing_is_charged_anywhere(level):
    limits = [1000, 1000, 1000]
    limits[level] = 100
    root = Budget(limits[0], name="0")
    middle = Budget(limits[1], parent=root, name="1")
    leaf = Budget(limits[2], parent=middle, name="2")
    error = exceeded(leaf, 101)
    assert (error.budget, error.limit, error.missing, error.asked) == (str(level), 100, 1, 101)
    assert [one.name for one in error.path] == ["2", "1", "0"]
    assert [budget.used for budget in (root, middle, leaf)] == [0, 0, 0]
    leaf.reserve(100).commit()  # exactly equal fits
    assert exceeded(leaf, 1).largest_free == 0


def test_an_error_says_who_holds_what_and_survives_pickling():
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


def test_reservations_are_named_among_the_holders():
    budget = Budget(1000)
    held = budget.reserve(10)
    assert budget.holders() == (("reservations", 10),)
    held.cancel()
    assert budget.holders() == ()


def test_without_a_limit_only_the_levels_above_count():
    root = Budget(100)
    child = Budget(None, parent=root)
    assert child.limit is None
    assert child.free == 100
    assert Budget(None).free is None
    assert exceeded(child, 101).limit == 100


def test_a_limit_may_change_and_nothing_is_taken_away_for_it():
    budget = Budget(100)
    held = budget.reserve(80)
    budget.limit = 50
    assert (budget.used, budget.free) == (80, 0)
    assert exceeded(budget, 1).missing == 31
    held.cancel()
    budget.reserve(50).cancel()
    budget.limit = None
    assert budget.free is None


def test_a_child_that_ends_gives_back_what_was_committed_in_it_for_good():
    root = Budget(100)
    child = Budget(100, parent=root)
    child.reserve(60).commit()
    assert root.used == 60
    del child
    gc.collect()
    assert root.used == 0


def test_the_peak_is_the_highest_use_so_far():
    budget = Budget(100)
    budget.reserve(70).cancel()
    budget.reserve(20).cancel()
    assert (budget.used, budget.peak) == (0, 70)


def test_a_tree_has_a_bounded_depth():
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
        (((1,), {"parent": 5}), TypeError),
        (((1,), {"on_pressure": 5}), TypeError),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, error):
    positional, named = arguments
    with pytest.raises(error, match=next(iter(named), "limit")):
        Budget(*positional, **named)


@pytest.mark.parametrize(
    ("nbytes", "error"), [(-1, ValueError), (None, TypeError), (2.0, TypeError)]
)
def test_a_reservation_takes_a_number_of_bytes(nbytes, error):
    budget = Budget(10)
    with pytest.raises(error, match="nbytes"):
        budget.reserve(nbytes)
    assert budget.used == 0


def test_a_devices_budget_is_one_for_the_process_and_has_what_is_free(leave_room):
    leave_room(10 << 20)
    budget = Budget.of_device("host:0")
    assert budget.limit == gpumem.Device("host").free_bytes == 10 << 20
    assert Budget.of_device(gpumem.MemoryInfo("host")) is budget
    assert budget.name == "host:0"
    del budget
    leave_room(8 << 20)
    assert Budget.of_device("host").limit == 8 << 20


# ---- reservations --------------------------------------------------------------------------------


def test_a_reservation_is_pending_until_it_is_committed_or_cancelled():
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
def test_each_step_is_taken_once_and_in_its_turn(path, step):
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


def test_a_context_cancels_what_it_did_not_commit():
    budget = Budget(100)
    with budget.reserve(40) as reservation:
        assert budget.used == 40
    assert (reservation.state, budget.used) == ("cancelled", 0)
    with budget.reserve(40) as reservation:
        reservation.commit()
    assert (reservation.state, budget.used) == ("committed", 40)


def test_a_dropped_reservation_keeps_what_was_committed_and_nothing_else():
    budget = Budget(100)
    budget.reserve(40)
    assert budget.used == 0
    reservation = budget.reserve(40)
    reservation.commit()
    del reservation
    assert budget.used == 40


def test_a_reservation_keeps_its_budget():
    held = Budget(100).reserve(10)
    gc.collect()
    assert held.budget.used == 10
    held.commit()


def test_nobody_makes_a_reservation_by_hand():
    with pytest.raises(TypeError, match="reserve"):
        Reservation()
    with pytest.raises(ReservationError):
        Reservation.__new__(Reservation).commit()


def test_no_bytes_always_fit():
    budget = Budget(0)
    with budget.reserve(0) as reservation:
        assert (reservation.nbytes, budget.used) == (0, 0)


def test_one_step_of_many_threads_is_taken():
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

        threads = [threading.Thread(target=step, args=(name,)) for name in ("commit", "cancel") * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(taken) == 1
        if taken == ["commit"]:
            reservation.release()
        assert (budget.used, budget.pending) == (0, 0)


# ---- soft limits ---------------------------------------------------------------------------------


def test_a_soft_limit_tells_once_for_each_time_it_is_passed():
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


def test_a_refused_request_passes_no_soft_limit():
    told = []
    root = Budget(100)
    child = Budget(None, soft=50, parent=root, on_pressure=lambda *asked: told.append(asked))
    exceeded(child, 101)
    assert [nbytes for _, nbytes in told] == [1]  # the hard limit's, above: 1 byte is missing
    with child.reserve(40):
        assert len(told) == 1


def test_what_a_soft_limits_callback_raises_is_told_and_fails_nothing(monkeypatch):
    told = []
    monkeypatch.setattr("sys.unraisablehook", lambda hook: told.append(str(hook.exc_value)))

    def refuse(budget, nbytes):
        raise RuntimeError("no")

    budget = Budget(100, soft=10, on_pressure=refuse)
    held = budget.reserve(11)
    assert (told, budget.used) == (["no"], 11)
    held.cancel()


def test_a_lowered_limit_asks_for_what_is_above_it():
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


def test_a_callback_makes_room_and_the_request_succeeds():
    cache = Cache()
    budget = Budget(100, name="b", on_pressure=cache)
    cache.held = [budget.reserve(30) for _ in range(3)]
    with budget.reserve(50):
        assert cache.asked == [("b", 40)]
        assert budget.used == 50


def test_a_callback_is_asked_again_as_long_as_it_frees_something():
    cache = Cache(step=1)
    budget = Budget(100, name="b", on_pressure=cache)
    cache.held = [budget.reserve(10) for _ in range(10)]
    with budget.reserve(35):
        assert [nbytes for _, nbytes in cache.asked] == [35, 25, 15, 5]
    cache.held = [budget.reserve(5)]
    cache.asked.clear()
    exceeded(budget, 101)  # asked again after it freed, then no more
    assert len(cache.asked) == 2


def test_callbacks_are_asked_from_the_level_that_refuses_upwards_then_below_it():
    order = []

    def ask(budget, nbytes):
        order.append(budget.name)

    root = Budget(1000, name="root", on_pressure=ask)
    middle = Budget(100, name="middle", parent=root, on_pressure=ask)
    leaf = Budget(1000, name="leaf", parent=middle, on_pressure=ask)
    exceeded(leaf, 101)
    assert order == ["middle", "root", "leaf"]


def test_what_callbacks_raise_is_the_errors_cause_and_all_are_asked():
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


def test_what_a_callback_raises_after_it_made_room_is_told(monkeypatch):
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


def test_an_interrupt_goes_through_and_leaves_nothing_charged():
    def interrupt(budget, nbytes):
        raise KeyboardInterrupt

    budget = Budget(100, on_pressure=interrupt)
    for _ in range(2):  # the second time, too: it is not taken for one that still runs
        with pytest.raises(KeyboardInterrupt):
            budget.reserve(101)
    assert budget.used == 0


def test_a_callback_that_asks_for_more_is_not_called_for_that():
    depth = []

    def ask(budget, nbytes):
        depth.append(nbytes)
        exceeded(budget, 200)

    budget = Budget(100, on_pressure=ask)
    exceeded(budget, 101)
    assert depth == [1]


def test_a_callback_may_raise_the_limit():
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
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4
    assert all(error.__cause__ is None for error in errors)


# ---- fork and exit -------------------------------------------------------------------------------


def test_a_forks_child_has_empty_budgets():
    run_quietly(
        """
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
        """
    )


def test_a_process_ends_with_budgets_callbacks_and_reservations_alive():
    run_quietly(
        """
        import gpumem
        held = []
        budget = gpumem.Budget(1 << 30, soft=1, on_pressure=lambda b, n: held.append(b))
        held += [budget, budget.reserve(10), gpumem.Arena("host", budget=budget)]
        held.append(held[-1].allocate(100))
        """
    )
