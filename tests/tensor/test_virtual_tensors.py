"""Virtual tensors: rows that get memory and give it back at addresses that stay."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest
from helpers.quiesce import held_by_kind, quiesce

import gpumem
from gpumem.errors import ClosedError, ConfigError, DriverError, InUseError

MIB = 1 << 20
ROWS = 64  # of 1 MiB
OUT_OF_MEMORY, INVALID_VALUE = 2, 1


def left():
    """What the driver has given out, without events, which arenas keep for the next work."""
    quiesce()
    return held_by_kind() | {"events": 0}


def cache_of(arena, **settings):
    return arena.virtual((ROWS, MIB), "uint8", **{"step": 2} | settings)


def test_addresses_and_bytes_stay_while_rows_come_and_go(arena):
    cache = cache_of(arena, committed=3)
    address, full = cache.ptr, cache.full
    cache.numpy()[:] = 7
    cache.commit(40)
    assert (cache.tensor(0, 3).numpy() == 7).all()
    cache.tensor(39, 40).numpy()[:] = 9
    cache.release(3, 39)
    assert cache.rows == ((0, 3), (39, 40))
    assert cache.ptr == full.ptr == address
    assert ctypes.string_at(full.ptr + 39 * MIB, 2) == b"\x09\x09"
    assert (cache.numpy() == 7).all()
    assert full.shape == cache.shape == (ROWS, MIB)


@pytest.mark.parametrize(
    ("row", "step", "page"),
    [
        (MIB, 1, 2 * MIB),
        (MIB, 2, 2 * MIB),
        (MIB, 7, 4 * MIB),
        (MIB, 8, 8 * MIB),
        (MIB, 63, 32 * MIB),
        (3 * MIB, 1, 2 * MIB),
        (3 * MIB, 64, 32 * MIB),
        (1000, 64, 2 * MIB),
        (32 * MIB, None, 32 * MIB),
    ],
)
def test_page_is_the_largest_power_of_two_in_a_step(arena, row, step, page):
    cache = arena.virtual((ROWS, row), "uint8", step=step)
    assert cache.page_nbytes == page
    assert cache.row_nbytes == row


def test_page_is_released_when_none_of_its_rows_is_committed(arena):
    cache = cache_of(arena, committed=6)
    cache.release(1, 3)
    assert cache.held_nbytes == 6 * MIB  # rows 0 and 3 keep their pages
    cache.release(3, 4)
    assert cache.held_nbytes == 4 * MIB
    cache.release(0, 1)
    assert cache.held_nbytes == 2 * MIB
    cache.release(0, ROWS)
    assert cache.rows == ()
    assert cache.held_nbytes == 0


def test_rows_that_lie_across_pages_have_both(arena):
    cache = arena.virtual((ROWS, 3 * MIB), "uint8", step=1)
    cache.commit(1, 2)  # bytes from 3 to 6 MiB, in the pages at 2 and at 4 MiB
    assert cache.held_nbytes == 4 * MIB
    cache.commit(0, 1)
    cache.release(1, 2)
    assert cache.held_nbytes == 4 * MIB  # row 0 ends in the page at 2 MiB
    cache.numpy()[:] = 1


def test_last_page_is_not_larger_than_the_range(arena):
    cache = arena.virtual((5, MIB), "uint8", step=5, committed=5)
    assert cache.page_nbytes == 4 * MIB
    assert cache.held_nbytes == 6 * MIB
    cache.numpy()[:] = 1
    cache.release(4, 5)
    assert cache.held_nbytes == 4 * MIB


def test_random_commits_and_releases_keep_to_a_model(arena, rng):
    row = rng.choice([300_000, MIB, 5 * MIB])
    cache = arena.virtual((ROWS, row), "uint8", step=rng.choice([1, 4]))
    page = cache.page_nbytes
    model = [False] * ROWS
    for _ in range(200):
        first = rng.randrange(ROWS + 1)
        last = rng.randrange(first, ROWS + 1)
        wanted = rng.random() < 0.5
        if wanted:
            cache.commit(first, last)
        else:
            cache.release(first, last)
        for number in range(first, last):
            if wanted and not model[number]:
                for offset in (*range(0, row, MIB), row - 1):  # at least once in every page
                    ctypes.memset(cache.ptr + number * row + offset, number, 1)
            model[number] = wanted
        kept = [number for number in range(ROWS) if model[number]]
        pages = {at for n in kept for at in range(n * row // page, (n * row + row - 1) // page + 1)}
        edges = [n for n in range(ROWS + 1) if (n > 0 and model[n - 1]) != (n < ROWS and model[n])]
        assert cache.rows == tuple(zip(edges[::2], edges[1::2], strict=True))
        end = -(-ROWS * row // (2 * MIB)) * 2 * MIB
        held = sum(min(page, end - at * page) for at in pages)
        assert cache.held_nbytes == cache.used_nbytes == held == arena.stats().virtual
        for number in rng.sample(kept, min(3, len(kept))):
            at = cache.ptr + number * row
            assert ctypes.string_at(at, 1) == ctypes.string_at(at + row - 1, 1) == bytes([number])


def test_neighbouring_pages_get_access_in_one_call(arena, host):
    before = arena.stats().driver_calls
    cache = cache_of(arena)
    assert arena.stats().driver_calls - before == 1  # the addresses
    before = arena.stats().driver_calls
    cache.commit(32)
    assert arena.stats().driver_calls - before == 16 + 16 + 1
    before = arena.stats().driver_calls
    cache.commit(32)
    assert arena.stats().driver_calls == before


def test_rows_ahead_need_no_driver_call_and_follow_the_end(arena):
    cache = cache_of(arena, ahead=8)
    cache.commit(2)
    assert (cache.held_nbytes, cache.used_nbytes) == (10 * MIB, 2 * MIB)
    calls = arena.stats().driver_calls
    cache.commit(9)
    assert arena.stats().driver_calls == calls
    cache.commit(11)
    assert cache.held_nbytes == 20 * MIB  # rows 0 to 19
    cache.release(2, 11)
    assert cache.held_nbytes == 10 * MIB
    assert arena.shrink().released_bytes == 8 * MIB
    assert cache.held_nbytes == 2 * MIB


def test_memory_ahead_is_left_out_where_it_is_refused(make_arena):
    cache = cache_of(make_arena({"max_mem": 8 * MIB}), ahead=20)
    cache.commit(6)
    assert cache.held_nbytes == 6 * MIB


# ---- tensors of its rows -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        lambda cache: cache.tensor(2, 4),
        lambda cache: cache.tensor(2)[1:],
        lambda cache: cache.tensor(2, 4).numpy(),
        lambda cache: memoryview(cache.tensor(2, 4)),
        np.from_dlpack,
        lambda cache: cache.numpy()[3:],
        lambda cache: cache.__dlpack__(max_version=(1, 0)),
    ],
)
def test_rows_of_a_live_view_are_not_released(arena, view):
    cache = cache_of(arena, committed=4)
    seen = view(cache)
    for refused in (
        lambda: cache.release(3, 4),
        lambda: cache.release(0, ROWS),
        lambda: cache.resize(3),
        cache.close,
    ):
        with pytest.raises(InUseError):
            refused()
    assert cache.committed == 4
    cache.commit(10)
    cache.release(4, 10)
    del seen
    gc.collect()
    cache.release(3, 4)


def test_views_of_all_rows_hold_none(arena):
    cache = cache_of(arena, committed=4)
    kept = cache.full[1:], cache.full.as_read_only()
    cache.release(0, 4)
    assert cache.held_nbytes == 0
    assert kept[0].ptr == cache.ptr + MIB


def test_dlpack_is_of_the_committed_rows_from_the_first(arena):
    cache = cache_of(arena, committed=3)
    array = np.from_dlpack(cache)
    assert array.shape == (3, MIB)
    assert array.ctypes.data == cache.ptr
    assert cache.__dlpack_device__() == (1, 0)
    del array
    cache.release(1, 2)
    assert np.from_dlpack(cache).shape == (1, MIB)
    cache.release(0, 1)
    assert (cache.committed, cache.rows) == (0, ((2, 3),))
    assert cache.tensor().shape == (0, MIB)


def test_torch_tensor_of_all_rows_stays_valid_through_commits(arena):
    torch = pytest.importorskip("torch")
    cache = arena.virtual((ROWS, MIB // 4), "float32", step=2)
    tensor = torch.from_dlpack(cache.full)
    cache.commit(10)
    tensor[9] = 5.0
    cache.commit(60)
    tensor[59].copy_(tensor[9])
    assert tensor.shape == (ROWS, MIB // 4)
    assert float(cache.tensor(59, 60).numpy().sum()) == 5.0 * MIB / 4
    cache.release(10, 60)
    assert (tensor[9] == 5).all()


def test_view_keeps_the_memory_of_a_tensor_that_ended(arena):
    cache = cache_of(arena, committed=2)
    array = cache.numpy()
    array[:] = 3
    del cache
    gc.collect()
    arena.shrink()
    assert (array == 3).all()
    del array
    arena.shrink()
    assert arena.stats().virtual == 0


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda it: it.commit(65), ValueError, "rows = 65: expected 0 to 64, the rows that the"),
        (lambda it: it.commit(3, 2), ValueError, "invalid last = 2: expected 3 to 64"),
        (lambda it: it.commit(-1, 2), ValueError, "invalid first = -1: expected 0 to 64"),
        (lambda it: it.commit(1.5), TypeError, "invalid rows = 1.5: expected an integer"),
        (lambda it: it.release(True, 3), TypeError, "invalid first = True"),
        (lambda it: it.resize(100), ValueError, "invalid rows = 100: expected 0 to 64, the rows"),
        (lambda it: it.tensor(0, 5), ValueError, "rows 0 to 5 .* expected last = 4 at most"),
        (lambda it: it.tensor(5, 6), ValueError, "expected last = 5 at most"),
        (lambda it: setattr(it, "on_pressure", 3), TypeError, "expected a callable or None"),
        (lambda it: it.record_stream("x"), TypeError, "stream"),
        (lambda it: it.full.buffer.register(), ValueError, "a tensor of committed rows"),
    ],
)
def test_wrong_arguments_change_nothing(arena, call, error, text):
    cache = cache_of(arena, committed=4)
    with pytest.raises(error, match=text):
        call(cache)
    assert cache.rows == ((0, 4),)


@pytest.mark.parametrize(
    ("named", "error", "text"),
    [
        ({"shape": ()}, ValueError, "one dimension or more"),
        ({"shape": (0, 3)}, ValueError, "expected one dimension or more, and elements"),
        ({"shape": (1 << 62, 8)}, ValueError, "more than"),
        ({"committed": 65}, ValueError, "invalid committed = 65: expected 0 to 64"),
        ({"step": 0}, ValueError, "invalid step = 0: expected 1 to 64"),
        ({"ahead": -1}, ValueError, "invalid ahead"),
        ({"name": 3}, TypeError, "invalid name"),
        ({"on_pressure": 3}, TypeError, "on_pressure"),
    ],
)
def test_wrong_settings_make_nothing(arena, host, named, error, text):
    before = left()
    with pytest.raises(error, match=text):
        arena.virtual(named.pop("shape", (ROWS, 8)), "uint8", **named)
    arena.shrink()
    assert left() == before


@pytest.mark.parametrize("memory", ["host/host_accessible", "host/managed"])
def test_memory_without_pages_is_refused(memory):
    arena = gpumem.Arena(memory)
    with pytest.raises(ConfigError, match="cannot have virtual tensors"):
        arena.virtual(10, "uint8")
    outer = gpumem.Arena("host", source=gpumem.Arena("host"))
    with pytest.raises(ConfigError, match="source"):
        outer.virtual(10, "uint8")


def test_every_backing_of_blocks_will_do():
    arena = gpumem.Arena("host", {"backing": "regions"})
    with cache_of(arena, committed=3) as cache:
        assert arena.stats().reserved == cache.held_nbytes == 4 * MIB
    arena.close()


# ---- its life ------------------------------------------------------------------------------------


def test_close_releases_all_and_lets_the_arena_close(host):
    before = left()
    arena = gpumem.Arena("host")
    cache = cache_of(arena, committed=3)
    with pytest.raises(InUseError, match=r"in use: \d\.0 MiB in 1 virtual tensor;"):
        arena.close()
    block = arena.allocate(1000)
    with pytest.raises(InUseError, match=r"in 1 block, 1 virtual tensor;"):
        arena.close()
    block.close()
    cache.close()
    cache.close()
    assert cache.closed
    assert "closed" in repr(cache)
    arena.close()
    calls = [
        lambda it: it.commit(1),
        lambda it: it.release(0, 1),
        lambda it: it.numpy(),
        lambda it: it.full.numpy(),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call(cache)
    del cache, arena, block
    gc.collect()
    assert left() == before


def test_dropped_tensors_leave_nothing(host):
    before = left()
    arena = gpumem.Arena("host")
    for turn in range(5):
        cache = cache_of(arena, committed=turn)
        arrays = [cache.tensor(n, n + 1).numpy() for n in range(turn)]
        del cache
        del arrays
    arena.shrink()
    assert arena.stats().virtual == 0
    cache = cache_of(arena, committed=5)
    del arena, cache
    gc.collect()
    assert left() == before


def test_cycle_through_the_callback_is_collected(host):
    before = left()
    arena = gpumem.Arena("host")
    cache = cache_of(arena, committed=2)
    cache.on_pressure = lambda tensor, nbytes, itself=cache: itself.resize(0)
    del cache
    gc.collect()
    arena.close()
    del arena
    assert left() == before


# ---- refused driver calls ------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, INVALID_VALUE])
@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("cuMemCreate", 1),
        ("cuMemCreate", 3),
        ("cuMemMap", 1),
        ("cuMemMap", 3),
        ("cuMemSetAccess", 1),
        ("cuMemSetAccess", 2),
    ],
)
def test_refused_commit_changes_nothing(arena, host, call, number, error):
    cache = cache_of(arena, committed=2)
    cache.commit(4, 6)
    cache.numpy()[:] = 3
    before = left(), arena.stats().reserved, cache.rows
    host.fail(call, number, error, 0 if error == INVALID_VALUE else 1 << 30)
    kind = gpumem.OutOfMemoryError if error == OUT_OF_MEMORY else DriverError
    with pytest.raises(kind):
        cache.commit(12)
    host.clear_faults()
    assert (left(), arena.stats().reserved, cache.rows) == before
    assert (cache.numpy() == 3).all()
    cache.commit(12)
    assert (cache.tensor(0, 2).numpy() == 3).all()


@pytest.mark.parametrize("call", ["cuMemUnmap", "cuMemRelease"])
def test_refused_release_is_tried_again(arena, host, call):
    cache = cache_of(arena, committed=8)
    host.fail(call, 1, INVALID_VALUE, 0)
    cache.release(2, 8)
    host.clear_faults()
    assert cache.rows == ((0, 2),)
    assert 2 * MIB < cache.held_nbytes <= 8 * MIB
    assert arena.stats().reserved == cache.held_nbytes
    cache.commit(4)  # takes pages back, mapped or not
    cache.numpy()[:] = 1
    arena.shrink()
    assert cache.held_nbytes == 4 * MIB


def test_refused_addresses_make_no_tensor(arena, host):
    before = left()
    host.fail("cuMemAddressReserve", 1, INVALID_VALUE, 0)
    with pytest.raises(DriverError, match="cuMemAddressReserve"):
        cache_of(arena)
    host.clear_faults()
    assert left() == before
