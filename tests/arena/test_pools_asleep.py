"""Graph pools that sleep: with their arena, by tags, and their graphs, which work on."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.arrays import fill, holds
from helpers.graph import Graph
from helpers.quiesce import held_by_kind
from helpers.refused_sleep import sleep_and_wake_refused_once

import gpumem
from gpumem.errors import AsleepError, InUseError, OutOfMemoryError

KIB, MIB = 1 << 10, 1 << 20


class Captured:
    """A graph that fills a block of its pool and copies it to another one, freed or not."""

    def __init__(self, driver, arena, stream, tag=None):
        self.stream = stream
        with arena.capture(stream) as self.pool, Graph(driver, stream) as self.graph:
            scratch = arena.allocate(3 * MIB, stream)
            driver.fill(scratch, 7, stream)
            if tag is None:
                self.out = arena.allocate(3 * MIB, stream)
            else:
                with arena.tag(tag):
                    self.out = arena.allocate(3 * MIB, stream)
            driver.call("cuMemcpyDtoDAsync", self.out.ptr, scratch.ptr, 3 * MIB, stream.ptr)
            self.scratch = scratch.ptr
            scratch.close()
        self.graph.instantiate()

    def launch(self):
        self.graph.launch()
        self.stream.synchronize()

    def end(self):
        self.graph.destroy_instance()
        self.graph.destroy()
        self.out.close()
        self.pool.close()


def test_graph_works_on_after_its_pool_has_slept(driver, stream, host, arena):
    graph = Captured(driver, arena, stream)
    graph.launch()
    address, used = graph.out.ptr, host.used(0)
    assert graph.pool.stats().reserved >= 6 * MIB
    assert arena.sleep() == used - host.used(0) == graph.pool.stats().reserved + used - host.used(0)
    assert graph.pool.stats().reserved == 0
    assert graph.pool.stats().asleep_bytes == 3 * MIB  # what was freed has no bytes to keep
    with pytest.raises(AsleepError):
        memoryview(graph.out)
    with arena.capture(stream, pool=graph.pool), pytest.raises(AsleepError):
        arena.allocate(100, stream)
    arena.wake()
    assert graph.out.ptr == address
    assert holds(graph.out, 7)
    fill(graph.out, 1)
    graph.launch()
    assert holds(graph.out, 7)
    graph.pool.check_invariants()
    graph.end()


def test_blocks_of_a_pool_sleep_with_their_tags(driver, stream, host, arena):
    graph = Captured(driver, arena, stream, tag="out")
    graph.launch()
    held = graph.pool.stats().reserved
    arena.sleep("out")
    assert 0 < graph.pool.stats().reserved < held
    with pytest.raises(AsleepError):
        memoryview(graph.out)
    assert ctypes.string_at(graph.scratch, 4) == b"\x07" * 4  # its tag is "default"
    arena.wake("out")
    assert holds(graph.out, 7)
    arena.sleep("default")
    assert holds(graph.out, 7)
    arena.wake()
    fill(graph.out, 2)
    graph.launch()
    assert holds(graph.out, 7)
    assert sum(block.used for block in graph.pool.blocks()) == 1
    graph.end()
    assert graph.pool.stats().reserved == 0


def test_threads_that_allocate_first_under_one_tag_share_the_pools_part(
    driver, stream, arena, monkeypatch
):
    """One part is kept: another one would stay open, and refuse the sleep of its tag for good."""
    config, both = type(arena.config), threading.Barrier(2)
    settings = config._of_graph_pool
    side = gpumem.Stream("host")
    with arena.capture(stream) as pool, Graph(driver, stream):
        side.wait(stream.record())
        pool.add_stream(side)
        monkeypatch.setattr(config, "_of_graph_pool", lambda *a: (both.wait(20), settings(*a))[1])

        def allocate(used):
            with arena.tag("out"):
                return arena.allocate(3 * MIB, used)

        with ThreadPoolExecutor(2) as threads:
            blocks = list(threads.map(allocate, (stream, side)))
        monkeypatch.undo()
        stream.wait(side.record())
    assert len(pool._homes) == 2
    assert pool.stats().in_use == 6 * MIB
    arena.sleep("out")
    arena.wake("out")
    for block in blocks:
        block.close()
    pool.close()


def test_dropped_tag_of_a_pool_is_not_copied(driver, stream, host, arena):
    with arena.tag("scratch", asleep="drop"), arena.capture(stream) as pool:
        block = arena.allocate(4 * MIB, stream)
    copies = host.call_count("cuMemcpyDtoHAsync")
    arena.sleep()
    assert host.call_count("cuMemcpyDtoHAsync") == copies
    arena.wake()
    fill(block, 1)
    block.close()
    pool.close()


def test_pools_bytes_wait_in_the_file_of_its_tag(driver, stream, tmp_path, arena):
    blocks = [arena.allocate(5000)]
    with arena.capture(stream) as pool:
        blocks += [arena.allocate(3 * MIB + 5, stream)]
    with arena.tag("a"), arena.capture(stream, pool=pool):
        blocks += [arena.allocate(700, stream)]
    for number, block in enumerate(blocks, 1):
        fill(block, number)
    arena.sleep(to=tmp_path / "asleep")
    arena.wake()
    assert not (tmp_path / "asleep").exists()
    assert [holds(block, number) for number, block in enumerate(blocks, 1)] == [True] * 3
    blocks.clear()
    del block
    pool.close()


def test_pool_that_ends_asleep_leaves_nothing(driver, stream, host, arena):
    arena.allocate(100).close()
    before = held_by_kind()
    graph = Captured(driver, arena, stream, tag="out")
    arena.sleep()
    graph.end()
    arena.wake()
    del graph
    arena.shrink()
    after = held_by_kind()
    assert (after["handles"], after["mappings"]) <= (before["handles"], before["mappings"])


def test_sleep_is_refused_while_the_cpu_views_a_pools_block(driver, stream, arena):
    with arena.tag("a"), arena.capture(stream) as pool:
        block = arena.allocate(1000, stream)
    view = memoryview(block)
    with pytest.raises(InUseError, match="view"):
        arena.sleep()
    assert arena.asleep == ()
    view.release()
    arena.sleep()
    arena.wake()
    block.close()
    pool.close()


def test_sleeping_pool_leaves_room_under_the_limit(make_arena, driver, stream):
    budget = gpumem.Budget(64 * MIB)
    arena = make_arena({"max_mem": 20 * MIB}, budget=budget)
    with arena.capture(stream) as pool:
        block = arena.allocate(10 * MIB, stream)
    fill(block, 3)
    arena.sleep("default")
    assert budget.used == 0
    with arena.tag("other"):
        other = arena.allocate(16 * MIB)
    with pytest.raises(OutOfMemoryError):
        arena.wake()
    assert arena.asleep == ("default",)
    other.close()
    arena.wake()
    assert holds(block, 3)
    assert arena.stats().limit >= budget.used >= 10 * MIB
    block.close()
    pool.close()


def test_wake_counts_a_pool_and_its_arena_together_in_the_limit(make_arena, driver, stream, host):
    arena = make_arena({"max_mem": 24 * MIB})
    block = arena.allocate(10 * MIB)
    with arena.capture(stream) as pool:
        captured = arena.allocate(10 * MIB, stream)
    fill(block, 1)
    fill(captured, 2)
    held = arena.sleep()
    used = host.used(0)
    with arena.tag("other"):
        other = arena.allocate(8 * MIB)
    before = host.used(0)
    with pytest.raises(OutOfMemoryError):
        arena.wake("default")  # either of them alone has room
    assert (arena.asleep, host.used(0)) == (("default",), before)
    other.close()
    arena.wake()
    assert host.used(0) - used == held
    assert holds(block, 1)
    assert holds(captured, 2)
    block.close()
    captured.close()
    pool.close()


@pytest.mark.parametrize("number", range(1, 70))
def test_sleep_and_wake_of_pools_refused_once_keep_their_bytes(driver, stream, host, number, arena):
    graph = Captured(driver, arena, stream, tag="out")
    with arena.capture(stream, pool=graph.pool):
        other = arena.allocate(2 * MIB, stream)
    plain = arena.allocate(MIB)
    graph.launch()
    fill(other, 5)
    fill(plain, 6)
    sleep_and_wake_refused_once(arena, host, number, graph.pool)
    assert holds(graph.out, 7)
    assert holds(other, 5)
    assert holds(plain, 6)
    fill(graph.out, 1)
    graph.launch()
    assert holds(graph.out, 7)
    other.close()
    plain.close()
    graph.end()
    arena.close()
