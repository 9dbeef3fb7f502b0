"""A small model of a best-fit-with-coalescing arena: what must hold, not how it is searched.

It predicts every number that the caller's own calls determine (sizes of regions, sums, peaks,
counts) and, where the arena has a choice (which free block), checks that the choice was allowed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

QUANTUM = 256


def rounded(nbytes: int) -> int:
    return -(-nbytes // QUANTUM) * QUANTUM


@dataclass
class Growth:
    """The sizes of the regions that an arena asks its driver for."""

    config: object
    next: int = 0

    def __post_init__(self) -> None:
        limit = self.config.max_mem or 1 << 63
        self.next = rounded(min(self.config.initial_chunk_size_bytes, limit))

    def grow(self, need: int, room: int) -> int:
        if self.config.extend_strategy == "same_as_requested":
            return need
        forced = need > self.next
        while need > self.next:
            self.next *= 2
        size = min(self.next, room)
        if not forced:
            cap = rounded(self.config.max_power_of_two_extend_bytes)
            self.next = self.next * 2 if self.next < cap // 2 else cap
        return size

    def shrunk(self) -> None:
        self.next = rounded(self.config.initial_growth_chunk_size_bytes)


@dataclass(frozen=True)
class Live:
    """A block that the caller holds."""

    start: int
    size: int
    requested: int
    persistent: bool

    @property
    def ptr(self) -> int:
        return self.start

    @property
    def nbytes(self) -> int:
        return self.requested

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass
class Freed:
    """Bytes that were handed back, and the point on their stream from which they are safe."""

    start: int
    end: int
    stream: object
    event: object


@dataclass
class Seen:
    """What an arena says about itself."""

    stats: object
    regions: dict = field(default_factory=dict)  # start -> blocks in address order

    @classmethod
    def of(cls, arena) -> Seen:
        arena.check_invariants()
        seen = cls(arena.stats())
        by_slot: dict = {}
        for block in arena.blocks():
            by_slot.setdefault(block.region, []).append(block)
        seen.regions = {blocks[0].address: blocks for blocks in by_slot.values()}
        return seen

    def region_size(self, start: int) -> int:
        return sum(block.allocated_nbytes for block in self.regions[start])

    def region_holding(self, address: int) -> int:
        return next(
            start for start in self.regions if start <= address < start + self.region_size(start)
        )


class Oracle:
    """Follows one arena call by call."""

    def __init__(self, arena) -> None:
        self.arena = arena
        self.config = arena.config
        self.growth = Growth(arena.config)
        self.live: dict[int, Live] = {}  # by start
        self.freed: list[Freed] = []
        self.own_freed: list[Freed] = []  # persistent blocks
        self.own_regions: set[int] = set()  # persistent blocks' regions, also after their free
        self.allocs = self.frees = self.reserves = self.extensions = 0
        self.max_in_use = self.max_size = self.max_reserved = 0
        self.seen = Seen.of(arena)
        self.streams: set = set()  # of several, a mark spreads no further than its own size
        self.looked = True  # since the last free: a mark may have spread over free neighbours

    # ---- calls -----------------------------------------------------------------------------------

    def served(self, buffer, nbytes: int, stream, idle_before: bool) -> None:
        before, after = self.seen, Seen.of(self.arena)
        self.streams.add(stream.ptr)
        block = Live(buffer.ptr, buffer.allocated_nbytes, nbytes, False)
        self._check_block(block)
        if after.stats.num_extensions == before.stats.num_extensions:
            assert self.extensions == after.stats.num_extensions
        else:
            fits = self.looked and self._must_fit(before, nbytes, stream)
            assert not fits, "grew although a free block fits"
            self._check_growth(after, block)
        self._check_stream(block, stream, idle_before)
        self._hand_out(block, after)

    def served_persistent(self, buffer, nbytes: int) -> None:
        after = Seen.of(self.arena)
        block = Live(buffer.ptr, buffer.allocated_nbytes, nbytes, True)
        assert block.size == rounded(nbytes)
        assert after.region_size(block.start) == block.size, "persistent: a region of its own"
        self.own_regions.add(block.start)
        self._forget(block.start, block.end)
        self.reserves += 1
        self._hand_out(block, after)

    def refused(self, nbytes: int, stream, error) -> None:
        """An OutOfMemoryError: it was true, its numbers are right, and nothing is lost.

        `stream` is None for a persistent block, which needs a region of its own.
        """
        if stream is not None:
            self.streams.add(stream.ptr)
        after = Seen.of(self.arena)
        stats = after.stats
        assert rounded(nbytes) > self.config.max_mem - stats.reserved, "there was room to grow"
        assert stream is None or not self._must_fit(after, nbytes, stream), "a free block fits"
        numbers = (nbytes, rounded(nbytes), stats.in_use, stats.reserved, self.config.max_mem)
        assert (
            error.requested_nbytes,
            error.allocated_nbytes,
            error.in_use,
            error.reserved,
            error.limit,
        ) == numbers
        assert error.largest_free == stats.largest_free
        self.check()

    def gave_back(self, block: Live, stream, event) -> None:
        """A block was freed. Whether the arena is looked at now is the caller's choice.

        A look merges what the arena keeps unmerged for its next taker, so both must happen.
        """
        del self.live[block.start]
        self.frees += 1
        self.looked = False
        freed = self.own_freed if block.persistent else self.freed
        freed.append(Freed(block.start, block.end, stream, event))

    def drained(self, stream) -> None:
        """The stream was synchronised and reset: its bytes are free for everyone."""
        self.freed = [freed for freed in self.freed if freed.stream is not stream]

    def shrunk(self, report) -> None:
        before, after = self.seen, Seen.of(self.arena)
        assert report.released_bytes == before.stats.reserved - after.stats.reserved
        assert {kept.address for kept in report.retained} == set(after.regions)
        for start, blocks in after.regions.items():
            end = start + after.region_size(start)
            # The arena may have recorded no event before later work of the stream.
            works = any(
                start <= freed.start < end and not freed.stream.query()
                for freed in self.freed + self.own_freed
            )
            assert works or any(block.used for block in blocks), f"region {start:#x} is idle"
        for kept in report.retained:
            assert kept.allocated_nbytes == after.region_size(kept.address)
            assert kept.blocks == tuple(b for b in after.regions[kept.address] if b.used)
        self.growth.shrunk()
        self.check()

    # ---- what holds after every call -------------------------------------------------------------

    def check(self) -> None:
        seen = self.seen = Seen.of(self.arena)
        self.looked = True
        self.own_regions &= set(seen.regions)
        for start, blocks in seen.regions.items():
            self._check_region(start, blocks)
        self._check_regions_apart(seen)
        used = {b.address: b for blocks in seen.regions.values() for b in blocks if b.used}
        assert set(used) == set(self.live), "the used blocks are those that the caller holds"
        for start, block in self.live.items():
            assert (used[start].allocated_nbytes, used[start].nbytes) == (
                block.size,
                block.requested,
            )
        self._check_stats(seen)

    def _check_region(self, start: int, blocks) -> None:
        end = start
        for before, block in zip([None, *blocks], blocks, strict=False):
            assert block.address == end, "no gap and no overlap"
            assert block.allocated_nbytes > 0
            assert block.allocated_nbytes % QUANTUM == block.address % QUANTUM == 0
            if before is not None and not before.used and not block.used:
                assert before.stream != block.stream, "free neighbours of one stream are one block"
                if self.config.stream_reuse != "never" and len(self.streams) < 2:
                    assert before.stream, "a released block joins its neighbour"
                    assert block.stream, "a released block joins its neighbour"
            end = block.address + block.allocated_nbytes
        if start in self.own_regions:
            assert len(blocks) == 1

    @staticmethod
    def _check_regions_apart(seen: Seen) -> None:
        starts = sorted(seen.regions)
        for low, high in itertools.pairwise(starts):
            assert low + seen.region_size(low) <= high, "regions do not overlap"

    def _check_stats(self, seen: Seen) -> None:
        stats, live = seen.stats, self.live.values()
        reserved = sum(map(seen.region_size, seen.regions))
        self.max_reserved = max(self.max_reserved, reserved)
        assert stats.in_use == sum(block.size for block in live)
        assert stats.requested_in_use == sum(block.requested for block in live)
        assert stats.reserved == stats.total_allocated == reserved
        assert stats.num_regions == len(seen.regions)
        assert (stats.num_allocs, stats.num_frees) == (self.allocs, self.frees)
        assert stats.num_allocs - stats.num_frees == len(self.live)
        assert (stats.num_reserves, stats.num_extensions) == (self.reserves, self.extensions)
        ordinary = len(set(seen.regions) - self.own_regions)
        assert stats.num_extensions - stats.num_shrinkages == ordinary
        assert stats.max_in_use == self.max_in_use
        assert stats.max_alloc_size == self.max_size
        assert self.max_reserved <= stats.max_reserved <= (self.config.max_mem or 1 << 63)
        free = [
            b.allocated_nbytes
            for s in set(seen.regions) - self.own_regions
            for b in seen.regions[s]
            if not b.used
        ]
        assert stats.largest_free == max(free, default=0)
        assert stats.limit == (self.config.max_mem or None)
        assert stats.in_use <= stats.reserved

    # ---- one block -------------------------------------------------------------------------------

    def _hand_out(self, block: Live, after: Seen) -> None:
        self.live[block.start] = block
        self.allocs += 1
        self.max_in_use = max(self.max_in_use, after.stats.in_use)
        self.max_size = max(self.max_size, block.size)
        self.check()

    def _check_block(self, block: Live) -> None:
        assert block.start % QUANTUM == 0
        for other in self.live.values():
            assert block.end <= other.start or other.end <= block.start, "blocks overlap"
        need, waste = rounded(block.requested), block.size - rounded(block.requested)
        if self.config.split_rule == "tight":
            assert waste == 0
        else:
            assert waste >= 0
            assert waste == 0 or (waste < need and waste < self.config.max_dead_bytes_per_chunk)

    def _check_growth(self, after: Seen, block: Live) -> None:
        self.extensions += 1
        start = after.region_holding(block.start)
        size = after.region_size(start)
        limit = self.config.max_mem or 1 << 63
        room = (limit - (after.stats.reserved - size)) // QUANTUM * QUANTUM
        assert size == self.growth.grow(rounded(block.requested), room)
        self.own_regions.discard(start)  # one that went back may have lain at the same place
        self._forget(start, start + size)

    def _must_fit(self, seen: Seen, nbytes: int, stream) -> bool:
        # A bin spans 1/32 of its size and a search looks at a few of the request's own bin, so
        # what is that much larger is always found.
        need = rounded(nbytes) * 33 // 32 + QUANTUM
        return any(
            run >= need
            for start in set(seen.regions) - self.own_regions
            for run in self._runs(seen.regions[start], stream)
        )

    def _runs(self, blocks, stream) -> Iterator[int]:
        """Bytes that lie side by side and that the stream may have."""
        run = 0
        for block in blocks:
            may_have = not block.used and block.stream in (0, stream.ptr)
            run = run + block.allocated_nbytes if may_have else 0
            if may_have and self.config.stream_reuse == "never":
                run = block.allocated_nbytes
            yield run

    def _check_stream(self, block: Live, stream, idle_before: bool) -> None:
        for freed in self._forget(block.start, block.end):
            if freed.stream is stream:
                continue
            assert self.config.stream_reuse != "never", "another stream's block, never reset"
            if freed.event.query():
                continue
            assert self.config.stream_reuse == "wait", "another stream's unfinished block"
            if idle_before:
                assert not stream.record().query(), "the taker's stream does not wait"

    def _forget(self, start: int, end: int) -> list[Freed]:
        """Take a range out of the freed ranges; returns those that it met."""
        met, rest = [], []
        for freed in self.freed:
            if freed.end <= start or end <= freed.start:
                rest.append(freed)
                continue
            met.append(freed)
            if freed.start < start:
                rest.append(Freed(freed.start, start, freed.stream, freed.event))
            if end < freed.end:
                rest.append(Freed(end, freed.end, freed.stream, freed.event))
        self.freed = rest
        return met
