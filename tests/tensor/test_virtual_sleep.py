"""Virtual tensors that sleep: with their arena, with their tag, and released meanwhile."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from helpers.refused_sleep import sleep_and_wake_refused_once

import gpumem
from gpumem.errors import AsleepError, InUseError, OutOfMemoryError

MIB = 1 << 20
ROWS = 64


def cache_of(arena, rows=0, **settings):
    return arena.virtual((ROWS, MIB), "uint8", committed=rows, **{"step": 2} | settings)


def fill(cache, first, last):
    for row in range(first, last):
        ctypes.memset(cache.ptr + row * MIB, row + 1, MIB)


def right(cache, first, last):
    return all(
        ctypes.string_at(cache.ptr + row * MIB, MIB) == bytes([row + 1]) * MIB
        for row in range(first, last)
    )


def test_virtual_tensor_sleeps_and_wakes_at_its_addresses(arena, host):
    cache, block = cache_of(arena, 5), arena.allocate(5 * MIB)
    fill(cache, 0, 5)
    address, used = cache.ptr, host.used(0)
    assert arena.sleep() == used - host.used(0) == 12 * MIB
    assert cache.held_nbytes == arena.stats().reserved == arena.stats().virtual == 0
    assert arena.stats().asleep_bytes == 11 * MIB
    for touch in (
        cache.numpy,
        lambda: cache.commit(7),
        lambda: cache.commit(2),
        cache.tensor().numpy,
    ):
        with pytest.raises(AsleepError, match="wake"):
            touch()
    arena.wake()
    assert (cache.ptr, cache.committed, cache.held_nbytes) == (address, 5, 6 * MIB)
    assert right(cache, 0, 5)
    assert host.used(0) == used
    cache.commit(9)
    block.close()


def test_tensor_made_under_a_tag_sleeps_with_it(arena, host):
    with arena.tag("cache", asleep="drop"):
        cache = cache_of(arena, 4)
    with arena.tag("stays", asleep="stay"):
        stays = cache_of(arena, 4)
    other = cache_of(arena, 4)
    for each in (stays, other):
        fill(each, 0, 4)
    copies = host.call_count("cuMemcpyDtoHAsync")
    arena.sleep("cache")
    assert (cache.held_nbytes, other.held_nbytes) == (0, 4 * MIB)
    assert host.call_count("cuMemcpyDtoHAsync") == copies
    assert right(other, 0, 4)
    arena.sleep()
    assert stays.held_nbytes == 4 * MIB
    assert right(stays, 0, 4)
    arena.wake("cache")
    cache.numpy()[:] = 1
    arena.wake()
    assert right(other, 0, 4)


def test_rows_released_while_asleep_are_not_made_again(arena, host):
    cache = cache_of(arena, 8, ahead=4)
    fill(cache, 0, 8)
    arena.sleep()
    cache.release(2, 6)
    cache.release(7, 8)
    arena.wake()
    assert cache.rows == ((0, 2), (6, 7))
    assert cache.held_nbytes == 4 * MIB
    assert right(cache, 0, 2)
    assert right(cache, 6, 7)
    cache.commit(8)
    fill(cache, 2, 8)
    assert right(cache, 0, 8)


def test_tensor_that_ends_asleep_leaves_nothing(host, arena):
    used = host.used(0)
    with arena.tag("cache"):
        cache, dropped = cache_of(arena, 4), cache_of(arena, 4)
    arena.sleep()
    cache.close()
    del dropped
    arena.wake()
    arena.shrink()
    assert host.used(0) == used
    arena.close()


def test_arena_is_not_closed_while_a_tag_has_an_empty_tensor(arena):
    with arena.tag("cache"):
        cache = cache_of(arena)
    with pytest.raises(InUseError, match="'cache'"):
        arena.close()
    arena.allocate(100).close()  # it is open
    cache.close()


def test_sleep_is_refused_while_the_cpu_has_a_view_of_rows(arena):
    cache = cache_of(arena, 4)
    view = np.from_dlpack(cache.full)
    with pytest.raises(InUseError, match="view"):
        arena.sleep()
    assert arena.asleep == ()
    del view
    arena.sleep()
    arena.wake()


def test_sleep_is_refused_while_rows_are_registered(arena):
    cache = cache_of(arena, 4)
    with cache.tensor(0, 2).buffer.register(), pytest.raises(InUseError, match="registration"):
        arena.sleep()
    arena.sleep()
    arena.wake()


def test_sleeping_tensor_leaves_room_under_limit_and_budget(make_arena):
    budget = gpumem.Budget(16 * MIB)
    arena = make_arena({"max_mem": 16 * MIB}, budget=budget)
    with arena.tag("cache"):
        cache = cache_of(arena, 10)
    fill(cache, 0, 10)
    arena.sleep("cache")
    assert budget.used == 0
    block = arena.allocate(12 * MIB)
    with pytest.raises(OutOfMemoryError):
        arena.wake("cache")
    assert (arena.asleep, cache.held_nbytes, budget.used) == (("cache",), 0, 12 * MIB)
    block.close()
    arena.wake("cache")
    assert right(cache, 0, 10)
    assert budget.used == 10 * MIB


def test_pressure_callback_of_a_tags_tensor_serves_untagged_blocks(make_arena):
    arena = make_arena({"max_mem": 16 * MIB})
    with arena.tag("cache"):
        cache = cache_of(arena, 14, on_pressure=lambda tensor, nbytes: tensor.resize(2))
    arena.allocate(8 * MIB).close()
    assert cache.committed == 2


@pytest.mark.parametrize("number", range(1, 46))
def test_sleep_and_wake_of_tensors_refused_once_keep_their_bytes(host, number, arena):
    cache = cache_of(arena, 6)
    with arena.tag("cache"):
        tagged = cache_of(arena, 4)
    block = arena.allocate(3 * MIB)
    fill(cache, 0, 6)
    fill(tagged, 0, 4)
    sleep_and_wake_refused_once(arena, host, number)
    assert right(cache, 0, 6)
    assert right(tagged, 0, 4)
    assert arena.stats().virtual == 10 * MIB
    block.close()
    cache.close()
    tagged.close()
    arena.close()
