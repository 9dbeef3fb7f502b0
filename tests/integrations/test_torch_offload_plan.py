"""The plan of saved storages that move, without PyTorch."""

import random

from gpumem.integrations.torch._offload.plan import AHEAD, Item, Planner, choose


def step_of(planner, sizes, base=100, key="m", grown=0):
    """Run a forward and a backward pass in a model of an allocator; return its peak and moves."""
    live, moved, steps = base, [], []
    peak = planner._peak or base
    begun = live
    for nbytes in sizes:
        live += nbytes
        peak = max(peak, live)
        if planner.save(key, nbytes, live, peak):
            moved.append(len(steps))
            planner.out += nbytes
            live -= nbytes
        steps.append((planner.step, len(steps)))
    top = live
    for (step, number), nbytes in reversed(list(zip(steps, sizes, strict=True))):
        planner.need(step, number, live, peak, frees=True)
        if number in moved:
            planner.out -= nbytes
            live += nbytes
        peak = max(peak, live)
        top = max(top, live)
        live -= nbytes - grown
    assert live == begun + grown * len(sizes)
    return top, moved


def test_step_that_fits_moves_nothing_from_the_second_on():
    planner = Planner(100 + 64 * 20)
    step_of(planner, [20] * 40)
    assert step_of(planner, [20] * 40)[1] == []


def test_longest_lives_move_first_and_no_more_than_the_limit_needs():
    planner = Planner(100 + 20 * 20)
    step_of(planner, [10] * 48)
    moved = step_of(planner, [10] * 48)[1]
    assert moved == list(range(len(moved)))
    assert 0 < len(moved) < 20


def test_first_step_moves_by_an_estimate():
    planner = Planner(100 + 20 * 20)
    top, moved = step_of(planner, [10] * 48)
    assert 0 < len(moved) < 48
    assert top <= planner.limit


def test_no_point_is_above_the_limit_if_that_can_be_and_no_chosen_item_is_spare():
    draw = random.Random(3)
    for _ in range(50):
        n = draw.randrange(4, 30)
        items = [Item("m", draw.randrange(1, 50), i, 2 * n - i) for i in range(n)]
        lives = [0]
        for each in items:
            lives.append(lives[-1] + each.nbytes)
        lives = lives[1:] + lives[:0:-1]
        limit = max(lives) * draw.uniform(0.5, 1.1)

        def highest(chosen, items=items, lives=lives):
            left = list(lives)
            for i in chosen:
                for point in range(items[i].begin + 1, items[i].end - AHEAD):
                    left[point] -= items[i].nbytes
            return max(left)

        chosen = choose(items, lives, limit)
        reachable = highest(range(n)) <= limit
        assert not reachable or highest(chosen) <= limit
        assert not reachable or all(highest(chosen - {i}) > limit for i in chosen)


def test_larger_steps_scale_the_plan_and_other_ones_leave_it():
    planner = Planner(100 + 20 * 20)
    for _ in range(2):
        few = step_of(planner, [10] * 48)[1]
    assert len(step_of(planner, [12] * 48)[1]) > len(few)
    assert planner.plan is not None
    step_of(planner, [12] * 20 + [40] * 5)
    assert planner.plan is None


def test_storage_that_the_program_keeps_is_not_chosen():
    items = [Item("m", 10, 0, 19, frees=False), Item("m", 10, 1, 18)]
    assert choose(items, [20] * 20, 12) == {1}


def test_storages_that_no_pass_needs_live_to_the_end():
    items = [Item("m", 10, 1, 18), Item("m", 10, 2)]
    assert choose(items, [0] * 16 + [20] + [0] * 3, 12) == {1}


def backward_begun(limit, sizes):
    """Follow a recorded step to the first need of its backward pass; returns the planner."""
    planner = Planner(limit)
    for _ in range(2):
        step_of(planner, sizes)
    live = 100
    for nbytes in sizes:
        live += nbytes
        planner.save("m", nbytes, live, live)
    planner.need(planner.step, len(sizes) - 1, live, live, frees=True)
    return planner


def test_storage_comes_back_where_the_points_up_to_its_use_have_room():
    planner = backward_begun(100 + 64 * 20, [20] * 40)
    room = planner.usable() - planner.step.slack - 4 * 20
    assert planner.has_room(10, room - 20)
    assert not planner.has_room(10, room - 19)
    here = len(planner.step.lives)
    planner.plan.lives[here + 2] = planner.plan.lives[here - 1] + 7
    assert not planner.has_room(10, room - 20)
    assert planner.has_room(10, room - 27)
    assert planner.has_room(39 - 1, room - 20)  # is needed before


def test_storages_come_back_in_the_order_of_the_recorded_backward():
    planner = backward_begun(1 << 20, [20] * 4)
    ends = {0: 5, 1: 4, 2: None, 3: 6}
    for i, end in ends.items():
        planner.plan.items[i].end = end
    assert planner.order() == [1, 0, 3, 2]
