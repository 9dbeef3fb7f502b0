"""Pages of graph pools: they move inside a capture, and the graph still finds what it used."""

from __future__ import annotations

import pytest
from helpers.graph import Graph
from helpers.refused_sleep import sleep_and_wake_refused_once

import gpumem

MIB = 1 << 20


class Captured:
    """A graph whose blocks share pages one after the other; `results` shows what each held.

    It fills eight blocks, frees every second one, and fills a block that is as large as these
    together.
    """

    SIZE, COUNT = 4 * MIB, 8

    def __init__(self, driver, arena, stream, pool=None, first=1):
        self.driver, self.stream, self.expected = driver, stream, []
        with arena.capture(stream, pool=pool) as self.pool, Graph(driver, stream) as self.graph:
            self.results = arena.allocate(2 * MIB, stream)
            blocks = [arena.allocate(self.SIZE, stream) for _ in range(self.COUNT)]
            for value, block in enumerate(blocks, first):
                driver.fill(block, value, stream)
            for value, block in enumerate(blocks, first):
                self._show(block.ptr, value)
            self.freed = [block.ptr for block in blocks[1::2]]
            for block in blocks[1::2]:
                block.close()
            large = arena.allocate(self.SIZE * self.COUNT // 2, stream)
            driver.fill(large, first + self.COUNT, stream)
            for offset in range(0, large.nbytes, self.SIZE):
                self._show(large.ptr + offset, first + self.COUNT)
            for value, block in enumerate(blocks, first):
                if not block.closed:
                    self._show(block.ptr, value)
                    block.close()
            large.close()
        self.graph.instantiate()

    def _show(self, address, value):
        place = self.results.ptr + len(self.expected)
        self.driver.call("cuMemcpyDtoDAsync", place, address, 1, self.stream.ptr)
        self.expected.append(value)

    def works(self):
        """Launch it, and tell whether every block held what was written to it."""
        memoryview(self.results)[:] = bytes(self.results.nbytes)
        self.graph.launch()
        self.stream.synchronize()
        return list(memoryview(self.results)[: len(self.expected)]) == self.expected

    def end(self):
        self.graph.destroy_instance()
        self.graph.destroy()
        self.results.close()


def test_freed_memory_of_a_capture_moves_to_where_a_larger_block_needs_it(
    driver, stream, host, arena
):
    before = host.used(0)
    graph = Captured(driver, arena, stream)
    stats = graph.pool.stats()
    assert stats.reserved == 34 * MIB  # a region for the large block would be 16 more
    assert stats.pages_moved >= 4
    assert host.used(0) - before == stats.reserved + arena.stats().reserved
    for _ in range(3):
        assert graph.works()
    graph.pool.check_invariants()
    graph.end()
    graph.pool.close()
    assert host.used(0) - before == arena.stats().reserved


def test_graphs_of_one_pool_share_its_pages_in_the_order_of_their_captures(driver, stream, arena):
    graphs = [Captured(driver, arena, stream)]
    held = graphs[0].pool.stats().reserved
    for first in (20, 40, 60):
        graphs.append(Captured(driver, arena, stream, graphs[0].pool, first))
    assert graphs[0].pool.stats().reserved == held + 3 * 2 * MIB  # for the other graphs' results
    for _ in range(2):
        assert all([graph.works() for graph in graphs])
    for graph in graphs:
        graph.end()
    graphs[0].pool.close()


def test_pool_with_a_graph_releases_no_page(driver, stream, host, arena):
    graph = Captured(driver, arena, stream)
    held = graph.pool.stats().reserved
    with arena.capture(stream, pool=graph.pool):
        pass  # what is free there is free for all streams now
    arena.shrink()
    arena.sleep()
    arena.wake()
    arena.shrink()
    assert graph.pool.stats().reserved == held
    assert graph.works()
    graph.end()
    graph.pool.close()


@pytest.mark.parametrize("number", range(1, 70))
def test_graph_with_moved_pages_survives_a_refused_sleep_and_wake(
    driver, stream, host, number, arena
):
    before = host.used(0)
    graph = Captured(driver, arena, stream)
    again = Captured(driver, arena, stream, graph.pool, 30)
    sleep_and_wake_refused_once(arena, host, number, graph.pool)
    assert graph.works()
    assert again.works()
    # What was left after a refusal is not in the way of the next capture.
    last = Captured(driver, arena, stream, graph.pool, 60)
    assert graph.works()
    assert last.works()
    for each in (graph, again, last):
        each.end()
    arena.close()
    assert host.used(0) == before


@pytest.mark.parametrize("end", ["close", "wake"])
def test_pool_ends_asleep_after_its_pages_moved_repeatedly(stream, host, rng, end, arena):
    before = host.used(0)
    live: list[gpumem.Buffer] = []
    with arena.capture(stream) as pool:
        for step in range(10_000):
            if step >= 300 and pool.stats().pages_moved:
                break
            if len(live) > 12:
                live.pop(rng.randrange(len(live))).close()
            else:
                live.append(arena.allocate(int(2 ** rng.uniform(18, 25)), stream))
    assert pool.stats().pages_moved > 0
    arena.sleep()
    for block in live:
        block.close()
    if end == "wake":
        arena.wake()
        pool.check_invariants()
    pool.close()
    del pool, live, block
    if end == "close":
        arena.wake()
    arena.close()
    assert host.used(0) == before


def test_arena_releases_idle_memory_where_a_pool_grows(make_arena, driver, stream):
    """Else the arena's pages of before the capture are held beside the pool's."""
    arena = make_arena()
    arena.allocate(64 * MIB, stream).close()
    stream.synchronize()
    with arena.capture(stream) as pool:
        block = arena.allocate(60 * MIB, stream)
    assert arena.stats().reserved + pool.stats().reserved <= 66 * MIB
    block.close()
    pool.close()


def test_random_programs_in_captures_hold_their_bytes(driver, stream, rng, arena):
    """Each block has a value of its own, which is looked at when it is freed."""
    results = arena.allocate(MIB, stream)
    expected, graphs, pool = [], [], None
    for _ in range(6):
        live: list[tuple[gpumem.Buffer, int]] = []
        with arena.capture(stream, pool=pool) as pool, Graph(driver, stream) as graph:
            for _ in range(100):
                if live and rng.random() < 0.45:
                    block, value = live.pop(rng.randrange(len(live)))
                    for place in {0, block.nbytes // 2, block.nbytes - 1}:
                        driver.call(
                            "cuMemcpyDtoDAsync",
                            results.ptr + len(expected),
                            block.ptr + place,
                            1,
                            stream.ptr,
                        )
                        expected.append(value)
                    block.close()
                    continue
                nbytes = int(2 ** rng.uniform(10, 24))
                block = arena.allocate(nbytes, stream)
                value = rng.randrange(1, 256)
                driver.fill(block, value, stream)
                live.append((block, value))
        pool.check_invariants()
        for block, _ in live:
            block.close()
        graphs.append(graph.instantiate())
    for sleeps in (False, True):
        if sleeps:
            arena.sleep()
            arena.wake()
        memoryview(results)[:] = bytes(MIB)
        for graph in graphs:
            graph.launch()
        stream.synchronize()
        assert list(memoryview(results)[: len(expected)]) == expected
    for graph in graphs:
        graph.destroy_instance()
        graph.destroy()
    results.close()
    pool.close()
