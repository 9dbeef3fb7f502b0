"""Rules of an arena as a whole: settings, limits, what it says of itself, sleep and end."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st
from hypothesis.stateful import precondition

import gpumem
from gpumem._testing.arenas import release_retired
from gpumem.errors import AsleepError, ConfigError, InUseError, OutOfMemoryError

from .books import Arena
from .diary import note, rule
from .memory import MemoryRules
from .world import picks

KIB, MIB = 1 << 10, 1 << 20
MOST_ARENAS = 4

_common = {
    "stream_reuse": st.sampled_from(["completed", "wait", "never"]),
    "oom_wait_ms": st.sampled_from([0, 1]),
}
pages = st.fixed_dictionaries(
    {
        "backing": st.just("virtual"),
        "max_mem": st.sampled_from([8 * MIB, 16 * MIB, 0]),
        "page_move_threshold": st.sampled_from([0.0075, 0, 0.5]),
        "page_move_budget": st.sampled_from([0.01, 1]),
        **_common,
    }
)
regions = st.fixed_dictionaries(
    {
        "backing": st.just("regions"),
        "max_mem": st.sampled_from([6 * MIB, 0]),
        "split_rule": st.sampled_from(["tight", "ort"]),
        "extend_strategy": st.sampled_from(["next_power_of_two", "same_as_requested"]),
        "initial_chunk_size_bytes": st.sampled_from([64 * KIB, MIB]),
        "enable": st.sampled_from([True] * 7 + [False]),
        **_common,
    }
)
places = st.one_of(
    st.tuples(st.just("host:0"), pages),
    st.tuples(st.just("host:0"), regions),
    st.tuples(st.sampled_from(["host:0/host_accessible", "host:0/managed"]), regions),
    st.tuples(st.just("host:1"), pages),
)
places_of_sessions = st.tuples(st.just("host:0"), st.one_of(pages, regions))
shares = st.tuples(picks, st.sampled_from(["reserved", "in_use"]))  # of which budget


class ArenaRules(MemoryRules):
    """Arenas."""

    @precondition(lambda self: len(self.arenas) < MOST_ARENAS)
    @rule(place=places, share=st.none() | shares)
    def make_an_arena(self, place, share):
        self.open_arena(place, share)

    def open_arena(self, place, share):
        self.release_pools()
        memory, config = place
        name = f"a{next(self.numbers)}"
        more = {}
        budget = None
        if share is not None and self.budgets:
            which, count = share
            budget = self.some(self.budgets, which)
            more = {"budget": budget.real, "count": count}
        real = gpumem.Arena(memory, config, name=name, **more)
        arena = Arena(name, real, budget, more.get("count", "reserved"), config["max_mem"])
        if budget is not None:
            budget.arenas.append(arena)
        self.arenas.append(arena)
        note(f"    # {arena} = {memory}, {config}, {more}")
        return arena

    # ---- limits ----------------------------------------------------------------------------------

    @precondition(lambda self: self.arenas)
    @rule(arena=picks, nbytes=st.sampled_from([0, MIB, 4 * MIB, 12 * MIB]))
    def set_a_limit(self, arena, nbytes):
        arena = self.some(self.arenas, arena)
        note(f"    # of {arena}")
        arena.real.set_limit(nbytes)
        arena.limit = nbytes

    @precondition(lambda self: self.arenas)
    @rule(arena=picks)
    def reset_peaks(self, arena):
        arena = self.some(self.arenas, arena)
        arena.real.reset_peaks()
        arena.max_in_use = arena.in_use
        arena.max_reserved = arena.real.stats().reserved
        assert arena.real.stats().max_reserved == arena.max_reserved

    @precondition(lambda self: any(arena.is_paged for arena in self.open_arenas()))
    @rule(arena=picks, nbytes=st.sampled_from([MIB, 5 * MIB]))
    def prepare(self, arena, nbytes):
        arena = self.some([each for each in self.open_arenas() if each.is_paged], arena)
        self.before_allocation(arena, nbytes)
        note(f"    # {arena}")
        try:
            arena.real.prepare(nbytes)
        except OutOfMemoryError as error:
            self.require_truth(arena, nbytes, error)
            return
        stats = arena.real.stats()
        assert stats.reserved - stats.in_use >= nbytes, f"{arena} is not prepared: {stats}"

    # ---- what it says of itself ------------------------------------------------------------------

    @precondition(lambda self: self.arenas)
    @rule(arena=picks)
    def look_at_the_blocks(self, arena):
        arena = self.some(self.arenas, arena)
        arena.real.check_invariants()
        arena.check_blocks([block for block in arena.real.blocks() if block.used])

    @precondition(lambda self: self.open_arenas())
    @rule(arena=picks)
    def take_a_snapshot(self, arena):
        arena = self.some(self.open_arenas(), arena)
        (resource, *_) = arena.real.snapshot().resources
        arena.check_blocks([block for block in resource.blocks if block.state == "used"])

    # ---- streams, memory that goes back ----------------------------------------------------------

    @precondition(lambda self: self.open_arenas())
    @rule(arena=picks, stream=picks)
    def reset_a_stream(self, arena, stream):
        """Only of one that is drained, as the documentation requires."""
        arena = self.some(self.open_arenas(), arena)
        queue = self.some(self.queues_of(arena.device), stream)
        if queue.done:
            arena.real.reset_stream(queue.stream)

    @precondition(lambda self: self.arenas_that_shrink())
    @rule(arena=picks)
    def shrink(self, arena):
        arena = self.some(self.arenas_that_shrink(), arena)
        before = arena.real.stats().reserved
        note(f"    # {arena}")
        report = arena.real.shrink()
        arena.has_retired = False
        after = arena.real.stats().reserved
        assert report.released_bytes == before - after, f"{report}, {before} to {after}"
        if not arena.is_paged:
            for region in report.retained:
                assert any(block.used for block in region.blocks), f"idle: {region}"

    def arenas_that_shrink(self) -> list[Arena]:
        """Regions go back behind all work of the device, pages at once."""
        return [
            arena
            for arena in self.open_arenas()
            if self.calm or (arena.is_paged and not arena.has_retired and not self.pools_retired)
        ]

    # ---- sleep -----------------------------------------------------------------------------------

    @precondition(lambda self: self.arenas and self.calm)
    @rule(arena=picks)
    def suspend(self, arena):
        arena = self.some(self.arenas, arena)
        note(f"    # {arena}")
        if not arena.is_paged:
            with self.refused(ConfigError, arena=arena):
                arena.real.sleep()
        elif any(block.views for block in arena.live.values()):
            with self.refused(InUseError, arena=arena):
                arena.real.sleep()
        else:
            held = arena.reserved_with_pools()
            released = arena.real.sleep()
            arena.suspended = True
            left = arena.reserved_with_pools()
            assert released == held - left, f"{arena}: {released} of {held} bytes, {left} are left"

    @precondition(lambda self: self.calm and any(arena.suspended for arena in self.arenas))
    @rule(arena=picks)
    def resume(self, arena):
        arena = self.some([each for each in self.arenas if each.suspended], arena)
        note(f"    # {arena}")
        try:
            arena.real.wake()
        except OutOfMemoryError:
            note("    # refused")
            assert arena.real.asleep
            return
        arena.suspended = False
        for block in arena.live.values():
            self.require_byte(block)

    @precondition(lambda self: any(arena.suspended for arena in self.arenas))
    @rule(arena=picks)
    def read_while_suspended(self, arena):
        arena = self.some([each for each in self.arenas if each.suspended], arena)
        for block in itertools.islice(arena.live.values(), 1):
            if block.buffer is not None and not block.closed:
                with self.refused(AsleepError, arena=arena):
                    memoryview(block.buffer)

    # ---- the end ---------------------------------------------------------------------------------

    @precondition(lambda self: self.arenas and self.calm)
    @rule(arena=picks, drop=st.booleans())
    def close_an_arena(self, arena, drop):
        arena = self.some(self.arenas, arena)
        note(f"    # {arena}")
        if arena.live:
            with self.refused(InUseError, arena=arena):
                arena.real.close()
            assert not arena.real.closed
            return
        if len(self.arenas) == 1 or any(
            user.arena is arena for user in self.sessions + self.graphs
        ):
            return
        if not drop:
            arena.real.close()
            assert arena.real.closed
            assert arena.real.stats().reserved == 0
        self.arenas.remove(arena)
        if arena.budget is not None:
            arena.budget.arenas.remove(arena)
        del arena.real
        release_retired()
