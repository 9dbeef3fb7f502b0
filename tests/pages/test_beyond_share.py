"""Memory that an arena made for lack of time to move pages goes back once there is time.

All clocks are virtual: nothing here depends on how fast the machine is. Work ends where a test
waits for it.
"""

from __future__ import annotations

import contextlib

import pytest
from helpers.driver import HostDriver
from helpers.graph import Graph

import gpumem
from gpumem._testing.arenas import saved_move_time, spend_move_time

MIB = 1 << 20
KIB = 1 << 10
MS = 10**6
SECOND = 10**9
LARGE = 8 * MIB
BEFORE = 20 * MIB  # live peak of `crowded`, and what it reserves
# Half of the 100 ms that are saved up come within 0.1 s.
SETTINGS = {"page_move_threshold": 0, "page_move_budget": 0.5}


@pytest.fixture
def crowded(make_arena, virtual_clock):
    """Make arenas in which nothing is idle: every page of 20 MiB keeps one of two blocks."""
    held = []

    def make(**settings):
        arena = make_arena(SETTINGS | settings)
        blocks = [arena.allocate(MIB) for _ in range(20)]
        held.extend(blocks[::2])
        for block in blocks[1::2]:
            block.close()
        return arena

    yield make
    for block in held:
        block.close()


def hurried(arena, nbytes=LARGE, stream=None):
    """Return a block for which there was no time to move pages."""
    spend_move_time(arena, 200 * MS)  # of at most 100 ms
    return arena.allocate(nbytes, stream)


def search(arena, looks=3, stream=None):
    """Search the table 64 times for each look; work queued before a look is done at the next."""
    for _ in range(looks):
        search_once(arena, stream, 64)
        gpumem.Device("host").synchronize()


def search_once(arena, stream=None, times=1):
    """Search without a wait for work. No thread caches blocks of these sizes, which alternate."""
    for number in range(times):
        arena.allocate((256 + 64 * (number % 2)) * KIB, stream).close()


def reserved_after(arena, clock, *pauses):
    """Return what is reserved after each pause, in ns, beyond what was before all."""
    found = []
    for pause in pauses:
        clock.advance_clock(pause)
        search(arena)
        found.append(arena.stats().reserved - BEFORE)
    return found


def test_memory_made_for_lack_of_time_goes_back_in_rounds_that_double(crowded, virtual_clock):
    arena = crowded()
    hurried(arena).close()
    pauses = [5 * SECOND - 1, 1, 5 * SECOND - 1, 1, 5 * SECOND, 60 * SECOND]
    left = reserved_after(arena, virtual_clock, *pauses)
    assert left == [8 * MIB, 6 * MIB, 6 * MIB, 2 * MIB, 0, 0]
    assert arena.stats().max_in_use == BEFORE


def test_round_that_gave_back_half_of_its_step_goes_on_without_a_pause(crowded, virtual_clock):
    arena = crowded()
    hurried(arena).close()
    assert reserved_after(arena, virtual_clock, 5 * SECOND) == [6 * MIB]
    held = arena.allocate(4 * MIB)
    assert reserved_after(arena, virtual_clock, 5 * SECOND) == [4 * MIB], "of a step of 4 MiB"
    held.close()
    search(arena)
    assert arena.stats().reserved == BEFORE + 2 * MIB


def test_memory_made_because_nothing_was_idle_stays(crowded, virtual_clock):
    arena = crowded()
    arena.allocate(LARGE).close()
    assert reserved_after(arena, virtual_clock, *[60 * SECOND] * 4) == [LARGE] * 4


def test_an_arena_that_made_nothing_for_lack_of_time_makes_no_driver_call(crowded, virtual_clock):
    arena = crowded()
    arena.allocate(LARGE).close()
    search(arena)
    before = arena.stats().driver_calls
    reserved_after(arena, virtual_clock, *[60 * SECOND] * 4)
    assert arena.stats().driver_calls == before


def test_one_search_in_64_looks_whether_memory_may_go_back(crowded, virtual_clock):
    arena = crowded()
    hurried(arena).close()
    gpumem.Device("host").synchronize()
    arena.reset_stream(None)  # all is idle for every stream
    virtual_clock.advance_clock(5 * SECOND)
    search_once(arena, None, 62)
    assert arena.stats().reserved == BEFORE + LARGE
    search_once(arena)
    assert arena.stats().reserved == BEFORE + 6 * MIB


def test_memory_goes_back_where_each_allocation_is_for_another_stream(crowded, virtual_clock):
    """Such an allocation leaves the fast path, where searches are counted, before its search."""
    arena = crowded()
    hurried(arena).close()
    virtual_clock.advance_clock(5 * SECOND)
    streams = [gpumem.Stream("host") for _ in range(2)]
    for _ in range(3 * 64):
        for stream in streams:  # only one has unfinished memory at a time
            stream.synchronize()
        search_once(arena, streams[0])
        streams.reverse()
    assert arena.stats().reserved == BEFORE + 6 * MIB


def test_memory_whose_work_is_not_done_goes_back_once_it_is(crowded, virtual_clock):
    arena, stream = crowded(), gpumem.Stream("host")
    block = hurried(arena, LARGE, stream)
    virtual_clock.advance_clock(5 * SECOND)
    with HostDriver().block(stream):
        block.close()
        search_once(arena, stream, 3 * 64)
        assert arena.stats().reserved == BEFORE + LARGE
    stream.synchronize()
    search(arena, 3, stream)
    assert arena.stats().reserved == BEFORE + 6 * MIB, "in the same round"


@pytest.mark.parametrize("reuse", ["completed", "wait"])
def test_memory_stays_where_several_streams_have_unfinished_frees(crowded, virtual_clock, reuse):
    """One cannot have what another has freed, except behind a wait: all need more together."""
    arena = crowded(stream_reuse=reuse)
    streams = [gpumem.Stream("host") for _ in range(2)]
    blocks = [arena.allocate(2 * MIB, stream) for stream in streams]
    between = arena.allocate(2 * MIB)  # else the memory joins their unfinished frees under "wait"
    hurried(arena).close()
    gpumem.Device("host").synchronize()
    arena.reset_stream(None)
    made = arena.stats().reserved
    virtual_clock.advance_clock(5 * SECOND)
    gates = [HostDriver().block(stream) for stream in streams]
    for block in blocks:
        block.close()
    search_once(arena, None, 64)
    during = arena.stats().reserved
    for gate in gates:
        gate.open()
    gpumem.Device("host").synchronize()
    between.close()
    assert (during == made) == (reuse == "completed")
    if reuse == "completed":
        virtual_clock.advance_clock(10 * SECOND - 1)
        search(arena)
        assert arena.stats().reserved == made, "a round in vain doubles the pause"
        virtual_clock.advance_clock(1)
        search(arena)
        assert arena.stats().reserved < made


def test_a_round_that_finds_nothing_idle_doubles_the_pause(crowded, virtual_clock):
    arena = crowded()
    block = hurried(arena)
    virtual_clock.advance_clock(5 * SECOND)
    search(arena, 32)
    assert arena.stats().reserved == BEFORE + LARGE
    block.close()
    left = reserved_after(arena, virtual_clock, 10 * SECOND - 1, 1)
    assert left == [LARGE, 6 * MIB]


@pytest.mark.parametrize(("looks", "left"), [(31, 6 * MIB), (32, LARGE)])
def test_a_round_ends_after_32_looks(crowded, virtual_clock, looks, left):
    arena = crowded()
    block = hurried(arena)
    gpumem.Device("host").synchronize()
    virtual_clock.advance_clock(5 * SECOND)
    search(arena, looks)
    block.close()
    gpumem.Device("host").synchronize()
    arena.reset_stream(None)
    search(arena, 1)
    assert arena.stats().reserved == BEFORE + left


def test_memory_is_not_kept_longer_after_a_look_that_gave_nothing_back(crowded, virtual_clock):
    arena = crowded()
    blocks = [hurried(arena)]
    virtual_clock.advance_clock(5 * SECOND)
    search(arena, 1)
    blocks.append(hurried(arena))
    for block in blocks:
        block.close()
    assert reserved_after(arena, virtual_clock, 5 * SECOND - 1, 1) == [
        2 * LARGE,
        2 * LARGE - 2 * MIB,
    ]


def test_memory_that_is_made_again_in_every_round_is_kept_ever_longer(crowded, virtual_clock):
    """A program that needs it every second: a cycle would make and release it 120 times."""
    arena = crowded()
    for _ in range(600):
        hurried(arena).close()
        virtual_clock.advance_clock(SECOND)
        search(arena)
    assert arena.stats().num_shrinkages == 6, "pages, after 5, 10, 20 .. 160 s"


def test_memory_that_is_made_again_for_lack_of_idle_memory_is_not_released_again(
    crowded, virtual_clock
):
    arena = crowded()
    hurried(arena).close()
    for _ in range(600):
        virtual_clock.advance_clock(SECOND)
        search(arena)
        arena.allocate(LARGE).close()
    assert arena.stats().num_shrinkages == LARGE // (2 * MIB), (
        "as much as was made for lack of time"
    )
    assert arena.stats().reserved == BEFORE + LARGE


def test_memory_that_is_made_again_after_a_long_time_goes_back_as_the_first_time(
    crowded, virtual_clock
):
    arena = crowded()
    for _ in range(5):
        hurried(arena).close()
        assert reserved_after(arena, virtual_clock, *[5 * SECOND] * 3) == [6 * MIB, 2 * MIB, 0]
        virtual_clock.advance_clock(16 * 5 * SECOND)


def test_memory_stays_while_the_live_peak_rises(crowded, virtual_clock):
    arena = crowded()
    hurried(arena).close()
    held = [arena.allocate(MIB) for _ in range(2)]
    for _ in range(4):
        held.append(arena.allocate(MIB))
        virtual_clock.advance_clock(4 * SECOND)
        arena.allocate(LARGE).close()
        search(arena)
        assert arena.stats().reserved == BEFORE + LARGE
    # The live peak has come nearer by four blocks; that much of the memory is as good as any.
    left = reserved_after(arena, virtual_clock, 5 * SECOND, 5 * SECOND, 60 * SECOND)
    assert left == [6 * MIB, 4 * MIB, 4 * MIB]
    assert arena.stats().max_in_use == BEFORE + 4 * MIB
    for block in held:
        block.close()


def test_memory_that_the_live_peak_has_reached_stays(crowded, virtual_clock):
    arena = crowded()
    block = hurried(arena)
    filled = [arena.allocate(MIB) for _ in range(10)]
    block.close()
    for part in filled:
        part.close()
    assert reserved_after(arena, virtual_clock, 60 * SECOND) == [LARGE]


def test_a_shrink_leaves_nothing_to_give_back(crowded, virtual_clock):
    """What was made afterwards within the share stays, idle as it is."""
    arena = crowded()
    hurried(arena).close()
    gpumem.Device("host").synchronize()
    arena.shrink()
    assert arena.stats().reserved == BEFORE
    search(arena)
    arena.prepare(LARGE)
    assert reserved_after(arena, virtual_clock, 60 * SECOND) == [LARGE]


def test_without_a_move_budget_nothing_goes_back(crowded, virtual_clock):
    arena = crowded(page_move_budget=0)
    hurried(arena).close()
    assert reserved_after(arena, virtual_clock, 60 * SECOND) == [LARGE]


def test_at_most_64_pages_go_back_at_once(make_arena, virtual_clock):
    arena = make_arena(SETTINGS)
    blocks = [arena.allocate(MIB) for _ in range(1600)]  # in pages of 4 MiB
    for block in blocks[1::2]:
        block.close()
    for block in [hurried(arena, 175 * MIB) for _ in range(4)]:
        block.close()
    gone = []
    for _ in range(8):
        virtual_clock.advance_clock(5 * SECOND)
        before = arena.stats().num_shrinkages
        search(arena, 2)
        gone.append(arena.stats().num_shrinkages - before)
    assert max(gone) == 64
    assert arena.stats().reserved < 1604 * MIB
    for block in blocks[::2]:
        block.close()


def test_memory_goes_back_once_half_of_the_time_is_saved_up(crowded, virtual_clock):
    """200 ms were spent of 100; at 1 %, 15 s bring 150 ms."""
    arena = crowded(page_move_budget=0.01)
    hurried(arena).close()
    left = reserved_after(arena, virtual_clock, 15 * SECOND - 100, 100)
    assert left == [LARGE, 6 * MIB]


def test_the_time_of_giving_back_comes_out_of_the_move_budget(crowded, virtual_clock):
    arena = crowded(page_move_budget=0.01)
    hurried(arena).close()
    gpumem.Device("host").synchronize()
    arena.reset_stream(None)
    virtual_clock.advance_clock(30 * SECOND)
    virtual_clock.use_h200_costs(True)
    try:
        search(arena, 1)
    finally:
        virtual_clock.use_h200_costs(False)
    assert arena.stats().reserved == BEFORE + 6 * MIB
    assert saved_move_time(arena) < 99.99 * MS, "full before"


def test_prepared_memory_stays(crowded, virtual_clock):
    arena = crowded()
    spend_move_time(arena, 200 * MS)
    arena.prepare(LARGE)
    assert reserved_after(arena, virtual_clock, 60 * SECOND) == [LARGE]


@pytest.mark.parametrize("captures", [False, True])
def test_nothing_goes_back_for_a_stream_that_captures(crowded, virtual_clock, captures):
    """Its graph may use what is idle; no pool is open here, so blocks come from the arena."""
    arena = crowded()
    hurried(arena).close()
    gpumem.Device("host").synchronize()
    arena.reset_stream(None)
    virtual_clock.advance_clock(5 * SECOND)
    stream = gpumem.Stream("host")
    graph = Graph(HostDriver(), stream)
    with graph if captures else contextlib.nullcontext():
        search_once(arena, stream, 128)
    if captures:
        graph.destroy()
    assert arena.stats().reserved == BEFORE + (LARGE if captures else 6 * MIB)
