"""The virtual backing: pages that move under reserved addresses, and never under a live byte."""

from __future__ import annotations

import threading

import pytest
from helpers.arrays import fill, holds

import gpumem
from gpumem.replay import replay
from gpumem.traces import samples

MIB = 1 << 20
VIRTUAL = {"backing": "virtual"}


@pytest.mark.parametrize("name", sorted(samples()))
def test_real_trace_reserves_at_most_eighteen_thousandths_over_its_peak(name):
    result = replay(name, "host", config=VIRTUAL)
    assert result.failed_allocs == 0
    assert result.fragmentation <= 1.018


@pytest.mark.parametrize(
    ("name", "expandable"), [("gpt2_varlen_train", 1.074), ("multistream_train", 1.288)]
)
def test_without_moves_reserved_is_at_most_that_of_expandable_segments(name, expandable):
    result = replay(name, "host", config=VIRTUAL | {"page_move_threshold": 1000})
    assert result.pages_moved == 0
    assert result.fragmentation <= expandable


def test_moves_cost_at_most_one_per_cent_of_the_traces_time():
    # 45 us for a handle mapped anew, as measured on an H200.
    from gpumem.traces import load_trace

    for name in ("gpt2_varlen_train", "multistream_train"):  # those with times of a GPU
        result = replay(name, "host", config=VIRTUAL)
        assert result.pages_moved * 45 <= 0.01 * load_trace(name).duration_us


def test_pending_memory_of_other_streams_is_used_behind_a_device_side_wait():
    result = replay(
        "multistream_train", "host", config=VIRTUAL | {"stream_reuse": "wait"}, lag_us=10_000
    )
    assert result.fragmentation <= 1.05


def test_reserved_memory_grows_by_pages(make_arena):
    arena = make_arena(VIRTUAL)
    kept = [arena.allocate(5 * MIB) for _ in range(20)]
    assert arena.stats().reserved <= 100 * MIB + 4 * MIB
    del kept


def test_small_and_large_blocks_have_separate_ranges(make_arena):
    arena = make_arena(VIRTUAL)
    large = arena.allocate(64 * MIB)
    small = arena.allocate(1000)
    assert len({block.region for block in arena.blocks() if block.used}) == 2
    small.close()
    large.close()


def test_large_block_is_built_from_pages_of_several_gaps(make_arena):
    arena = make_arena(VIRTUAL | {"max_mem": 64 * MIB, "page_move_threshold": 0})
    blocks = [arena.allocate(8 * MIB) for _ in range(8)]
    for block, value in zip(blocks, range(8), strict=True):
        fill(block, value)
    for block in blocks[::2]:
        block.close()
    assert arena.stats().largest_free < 32 * MIB
    large = arena.allocate(32 * MIB)
    assert arena.stats().reserved <= 64 * MIB
    assert arena.stats().pages_moved > 0
    fill(large, 99)
    for block, value in zip(blocks[1::2], range(1, 8, 2), strict=True):
        assert holds(block, value), "a page with a live byte moved"
        block.close()
    assert holds(large, 99)
    large.close()


def test_no_two_live_blocks_share_memory_under_random_use(make_arena, rng):
    for reuse in ("completed", "wait", "never"):
        arena = make_arena(
            VIRTUAL
            | {
                "stream_reuse": reuse,
                "page_move_threshold": rng.choice([0, 0.0075, 0.1]),
                "max_mem": rng.choice([0, 64 * MIB]),
            }
        )
        streams = [gpumem.Stream("host"), gpumem.Stream("host"), None]
        live = []
        for step in range(1200):
            if live and (rng.random() < 0.47 or sum(b.nbytes for b, _ in live) > 80 * MIB):
                buffer, value = live.pop(rng.randrange(len(live)))
                assert holds(buffer, value), f"step {step}: {buffer} lost its bytes"
                buffer.close(rng.choice(streams))
            else:
                try:
                    buffer = arena.allocate(int(2 ** rng.uniform(8, 24)), rng.choice(streams))
                except gpumem.OutOfMemoryError:
                    continue
                fill(buffer, step % 251)
                live.append((buffer, step % 251))
            if step % 40 == 0:
                arena.check_invariants()
        for buffer, value in live:
            assert holds(buffer, value)
            buffer.close()


def test_addresses_are_recycled_however_long_it_runs(make_arena):
    arena = make_arena(VIRTUAL | {"max_mem": 64 * MIB, "page_move_threshold": 0})
    addresses = set()
    for round_number in range(300):
        kept = [arena.allocate((3 + (round_number * 7 + i) % 5) * MIB) for i in range(6)]
        addresses |= {buffer.ptr >> 21 for buffer in kept}
        del kept[::2]
        large = arena.allocate(12 * MIB)
        large.close()
    span = (max(addresses) - min(addresses)) << 21
    assert span <= 10 * 64 * MIB


def test_shrink_releases_idle_pages_and_keeps_blocks(make_arena):
    arena = make_arena(VIRTUAL)
    keep = arena.allocate(3 * MIB)
    fill(keep, 5)
    arena.allocate(200 * MIB).close()
    before = arena.stats().reserved
    report = arena.shrink()
    assert report.released_bytes >= 190 * MIB
    assert arena.stats().reserved == before - report.released_bytes
    assert [region.blocks[0].address for region in report.retained] == [keep.ptr]
    assert holds(keep, 5)
    again = arena.allocate(100 * MIB)
    fill(again, 6)
    assert holds(keep, 5)
    again.close()
    keep.close()


def test_out_of_memory_changes_nothing(make_arena, leave_room):
    arena = make_arena(VIRTUAL)
    kept = [arena.allocate(6 * MIB) for _ in range(4)]
    for value, buffer in enumerate(kept):
        fill(buffer, value)
    leave_room(4 * MIB)
    before = arena.stats()
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(64 * MIB)
    after = arena.stats()
    assert (after.in_use, after.reserved, after.num_allocs) == (
        before.in_use,
        before.reserved,
        before.num_allocs,
    )
    arena.check_invariants()
    assert all(holds(buffer, value) for value, buffer in enumerate(kept))
    kept.pop(1).close()
    arena.allocate(6 * MIB).close()
    for buffer in kept:
        buffer.close()


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        (1, gpumem.errors.DriverError, "cuMemAddressReserve failed"),
        (2, gpumem.OutOfMemoryError, "asked for 1.0 MiB"),
    ],
)
def test_refused_address_range_changes_nothing(make_arena, host, code, error, said):
    arena = make_arena(VIRTUAL)
    host.fail("cuMemAddressReserve", 1, code, 1000)  # smaller ones too
    with pytest.raises(error, match=said):
        arena.allocate(MIB)
    assert (arena.stats().in_use, arena.stats().reserved, arena.stats().num_allocs) == (0, 0, 0)
    host.clear_faults()
    arena.allocate(MIB).close()


def test_full_device_is_served_from_idle_pages(make_arena, leave_room):
    arena = make_arena(VIRTUAL | {"page_move_threshold": 1000})
    blocks = [arena.allocate(4 * MIB) for _ in range(8)]
    leave_room(0)
    for block in blocks[::2]:
        block.close()
    large = arena.allocate(16 * MIB)
    assert arena.stats().pages_moved > 0
    large.close()
    for block in blocks[1::2]:
        block.close()


def test_max_mem_bounds_the_physical_memory(make_arena):
    arena = make_arena(VIRTUAL | {"max_mem": 32 * MIB})
    kept = [arena.allocate(8 * MIB) for _ in range(4)]
    with pytest.raises(gpumem.OutOfMemoryError) as caught:
        arena.allocate(MIB)
    assert caught.value.limit == 32 * MIB
    assert arena.stats().max_reserved <= 32 * MIB
    for buffer in kept:
        buffer.close()


def test_page_with_pending_work_moves_for_its_own_stream_only(make_arena, virtual_clock):
    virtual_clock.set_lag(1_000_000)
    arena = make_arena(VIRTUAL | {"max_mem": 16 * MIB})
    first, second = gpumem.Stream("host"), gpumem.Stream("host")
    blocks = [arena.allocate(4 * MIB, first) for _ in range(4)]
    for block in blocks:
        block.close()
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(6 * MIB, second)
    arena.allocate(6 * MIB, first).close()
    virtual_clock.set_lag(0)
    virtual_clock.advance_clock(2_000_000)
    arena.allocate(6 * MIB, second).close()


@pytest.mark.parametrize("value", [-0.1, 1001, "much", True, None])
def test_move_threshold_out_of_range_is_refused(value):
    with pytest.raises(gpumem.ConfigError, match="page_move_threshold"):
        gpumem.ArenaConfig(page_move_threshold=value)


def test_invariants_hold_while_another_thread_releases_pages(make_arena, host):
    arena = make_arena(VIRTUAL)
    halfway = 0
    for _ in range(200):  # until a look fell between the first call to the driver and the last
        for block in [arena.allocate(2 * MIB) for _ in range(200)]:
            block.close()
        unmapped = host.call_count("cuMemUnmap")
        shrinking = threading.Thread(target=arena.shrink)
        host.use_h200_costs(True)  # a call takes long enough to be looked at
        shrinking.start()
        while shrinking.is_alive():
            arena.check_invariants()
            halfway += 0 < host.call_count("cuMemUnmap") - unmapped < 200
        shrinking.join()
        host.use_h200_costs(False)
        if halfway:
            return
    pytest.fail("no look fell half-way")
