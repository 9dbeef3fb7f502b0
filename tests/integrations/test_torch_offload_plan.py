"""The plan of saved storages that move, without PyTorch."""

import itertools
import random

from gpumem.integrations.torch._offload.plan import AHEAD, Item, Planner, choose

from gpumem.integrations.torch._offload.host import HostMemory


def step_of(planner, sizes, base=100, key="m", grown=0):
    """Run a forward and a backward pass in a model of an allocator; return its peak and moves."""
    live, moved, steps = base, [], []
    peak = max(planner._peak, base)
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
                for point in range(items[i].begin + 1, items[i].end - AHEAD + 1):
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
    room = planner.limit - planner.margin
    assert planner.has_room(10, room - 20)
    assert not planner.has_room(10, room - 19)
    here = len(planner.step.lives)
    planner.plan.tops[here + 2] = planner.plan.lives[here - 1] + 7
    assert not planner.has_room(10, room - 20)
    assert planner.has_room(10, room - 27)
    assert planner.has_room(38, room - 20)  # is needed before


def test_storages_come_back_in_the_order_of_the_recorded_backward():
    planner = backward_begun(1 << 20, [20] * 4)
    ends = {0: 5, 1: 4, 2: None, 3: 6}
    for i, end in ends.items():
        planner.plan.items[i].end = end
    assert planner.order() == [1, 0, 3, 2]


def test_time_between_points_counts_with_the_most_that_it_can_need():
    planner = Planner(1 << 20)
    for live, peak in ((100, 100), (110, 150), (120, 150), (145, 150), (10, 10)):
        planner.save("m", 10, live, peak)
    planner.need(planner.step, 4, 10, 10, frees=True)
    planner.end_step()
    step = planner._steps["m"]
    assert step.slack == 40
    assert step.tops == [100, 150, 150, 150, 225, 10]
    # The counter of peaks began anew before the fifth: twice the slack that was seen. Else the peak
    # itself is the bound.


def test_step_below_an_earlier_peak_leaves_room_for_its_largest_storage():
    tops = []
    for earlier in (0, 10_000):
        planner = Planner(100 + 20 * 20)
        planner._peak = earlier
        for _ in range(3):
            top = step_of(planner, [10] * 48)[0]
        tops.append(top)
    assert tops[1] <= tops[0] - 10


def test_pieces_of_the_host_take_what_is_free_and_no_more_is_held():
    made = []

    def make(nbytes):
        made.append(nbytes)
        return bytearray(nbytes)

    host = HostMemory(make)
    slab = 32 << 20
    blocks = [host.allocate(slab // 4) for _ in range(4)]
    assert made == [slab]
    host.free(blocks[0])
    host.free(blocks[2])
    pieces = host.allocate(slab // 2 - 100)
    assert made == [slab]
    assert [(low, high, len(view)) for low, high, view in host.views(pieces, 7, slab // 2)] == [
        (7, slab // 4, slab // 4 - 7),
        (slab // 4, slab // 2, slab // 4),
    ]
    for each in (blocks[1], blocks[3], pieces):
        host.free(each)
    host.begin_step()
    assert host.used == 0
    assert host._free == [(1, 0, slab)]


def test_pieces_lie_beside_each_other_without_overlap():
    draw, host, blocks = random.Random(5), HostMemory(bytearray), []
    for _ in range(500):
        if blocks and draw.random() < 0.5:
            host.free(blocks.pop(draw.randrange(len(blocks))))
        else:
            blocks.append(host.allocate(draw.randrange(1, 60 << 20)))
        host._collect()
        pieces = sorted([*host._free, *(piece for each in blocks for piece in each)])
        assert sum(last - first for _, first, last in pieces) == host.held
        for a, b in itertools.pairwise(pieces):
            assert a[0] != b[0] or a[2] == b[1]
        assert all(a[:1] + a[2:] != b[:2] for a, b in itertools.pairwise(host._free))


def test_storage_lies_in_the_smallest_piece_that_has_room_else_first_in_the_largest():
    host = HostMemory(bytearray)
    first, *blocks = [host.allocate(each << 20) for each in (8, 1, 4, 1, 2, 16)]
    for each in (first, blocks[1], blocks[3]):  # 8, 4 and 2 MiB are free
        host.free(each)
    (whole,) = host.allocate(3 << 20)
    assert whole == (1, 9 << 20, 12 << 20)
    large, rest = host.allocate(10 << 20)
    assert large == (1, 0, 8 << 20)
    assert rest == (1, 14 << 20, 16 << 20)


def test_slabs_that_the_last_steps_have_not_needed_are_released():
    host = HostMemory(bytearray)
    large = [host.allocate(64 << 20) for _ in range(4)]
    for each in large:
        host.free(each)
    for _ in range(8):
        assert host.held == 256 << 20
        host.begin_step()
        host.free(host.allocate(64 << 20))
    host.begin_step()
    assert host.held == 64 << 20


def test_host_memory_that_is_refused_is_asked_for_in_its_own_size_first():
    asked = []

    def make(nbytes):
        asked.append(nbytes)
        return bytearray(nbytes) if nbytes < 2 << 20 else None

    host = HostMemory(make)
    assert host.allocate(3 << 20) is None
    assert host.allocate(1 << 20) is not None
    assert asked == [32 << 20, 3 << 20, 32 << 20, 1 << 20]
    assert host.held == host.used == 1 << 20


def test_free_memory_between_blocks_raises_the_margin():
    margins = {}
    for waste in (0, 300):
        planner = Planner(6400)
        planner.save("m", 20, 120, 120, waste)
        planner.need(planner.step, 0, 120, 120, waste, frees=True)
        planner.end_step()
        margins[waste] = planner.margin
    assert margins[0] < margins[300]


def test_refused_request_raises_the_margin_at_once_by_the_bytes_that_no_request_can_have():
    planner = Planner(6400)
    planner.save("m", 20, 120, 120)
    margin = planner.margin
    planner.refuse(100, 6100, early=False)
    assert planner.margin == margin + 200 - margin // 2
    planner.refuse(100, 1000, early=False)
    assert planner.margin == margin // 2 + 6400 // 16


def test_refusal_beside_storages_that_are_back_early_delays_the_others_and_changes_no_plan():
    planner = backward_begun(6400, [20] * 4)
    margin = planner.margin
    planner.refuse(100, 6100, early=True)
    assert planner.margin == margin // 2 + 200
    planner.refuse(100, 1000, early=True)
    assert planner.margin == margin // 2 + 6400 // 4
    planner.end_step()
    assert planner.margin == margin


def test_refusal_beside_blocks_that_leave_frees_them_earlier_and_moves_no_more():
    planner = backward_begun(6400, [20] * 4)
    margin, room = planner.margin, planner.room(1000)
    planner.refuse(100, 6100, leaving=True)
    assert planner.margin == margin
    assert planner.room(1000) == room + margin // 2 - 200
    assert planner.has_room(0, planner.limit - margin - 20)
    unknown = Planner(6400)
    unknown.save("m", 20, 120, 120)
    room = unknown.room(1000)
    unknown.refuse(100, 6100, leaving=True)
    assert unknown.room(1000) == room - 200


def test_margin_falls_later_where_refusals_followed_and_soon_again_where_none_did():
    planner, falls = Planner(6400), []

    def steps_to_a_fall():
        margin = planner.margin
        for steps in range(1, 600):
            planner.end_step()
            if planner.margin < margin:
                return steps
        return None

    for _ in range(10):
        planner.end_step()  # there is nothing that could fall
    for _ in range(8):
        planner.refuse(0, 6000, early=False)
        planner.refuse(100, 6000, leaving=True)  # is met, and changes nothing of it
        falls.append(steps_to_a_fall())
    assert falls == [5, 9, 17, 33, 65, 129, 257, 257]
    assert steps_to_a_fall() == 256
    assert steps_to_a_fall() == 4


def test_margin_falls_again_while_no_request_is_refused():
    planner, margins = Planner(6400), []
    planner.refuse(0, 6000, early=False)
    for _ in range(40):
        step_of(planner, [10] * 4)
        planner.end_step()
        margins.append(planner.margin)
    assert margins == sorted(margins, reverse=True)
    assert margins[0] > margins[10] > margins[-1] == Planner(6400).margin


def test_refused_request_is_in_the_plan_of_the_next_step():
    planner = Planner(1 << 20, sees_peaks=True)
    planner.save("m", 10, 100, 100)
    planner.refuse(500, 120, early=False)  # its memory was never allocated
    planner.save("m", 10, 130, 130)
    planner.need(planner.step, 1, 130, 130, frees=True)
    assert planner.step.bounds[1:] == [500 + 120 - 130, 0]


def test_blocks_that_are_freed_at_a_point_count_as_out_for_the_time_after_it():
    planner = Planner(1 << 20, sees_peaks=True)
    planner.save("m", 10, 100, 100)
    planner.out = planner.out_before = 40
    planner.save("m", 10, 70, 90)
    assert planner.step.bounds == [0, 90 + 40 - (70 + 40)]


def test_of_the_storages_that_live_long_the_largest_move():
    items = [Item("m", 10, 0, 19), Item("m", 30, 1, 18), Item("m", 30, 8, 11)]
    assert choose(items, [0] * 9 + [70, 70] + [0] * 9, 45) == {1}


def test_highest_bytes_between_two_points_are_exact_where_the_allocator_tells_them():
    planner = Planner(1 << 20, sees_peaks=True)
    for live, peak in ((100, 100), (110, 150), (120, 130), (10, 160)):
        planner.save("m", 10, live, peak)
    planner.need(planner.step, 3, 10, 15, frees=True)
    planner.end_step()
    assert planner._steps["m"].tops == [100, 150, 130, 160, 15]


def test_step_that_differs_moves_no_more_than_its_plan_and_then_a_first_step_does():
    sizes, other = [10] * 48, [10] * 4 + [20] * 6
    planner = Planner(100 + 20 * 20)
    for _ in range(2):
        planned = step_of(planner, sizes)[1]
    top, moved = step_of(planner, other)
    assert planner.plan is None
    assert top <= planner.limit
    first = step_of(Planner(planner.limit), other)[1]
    assert {each for each in moved if each < 4} <= {*planned, *first}
    assert {each for each in moved if each >= 4} <= {*first} < {*range(4, 10)}
