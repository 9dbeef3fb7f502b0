"""All rules together, and a search that runs programs of them."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings, stateful
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RULE_MARKER, initialize, precondition, run_state_machine_as_test

from gpumem.device import set_host_device_count
from gpumem.errors import ConfigWarning

from . import diary
from .arenas import ArenaRules, places_of_sessions, shares
from .budgets import BudgetRules, limits_at_first
from .captures import CaptureRules
from .sessions import SessionRules, kinds, kinds_of_options
from .timelines import TimelineRules
from .world import STREAMS, picks, sizes

PROGRAMS = 50  # of one round; each round has a seed of its own


class Machine(BudgetRules, ArenaRules, TimelineRules, SessionRules, CaptureRules):
    """Programs over arenas, budgets, sessions and timelines."""

    @initialize(
        every=st.sampled_from([1, 7]),
        threads=st.booleans(),
        parents=st.lists(picks, max_size=3),
        most=st.lists(limits_at_first, min_size=4, max_size=4),
        place=places_of_sessions,
        share=st.none() | shares,
        blocks=st.lists(st.tuples(sizes, picks), min_size=1, max_size=3),
        sessions=st.lists(st.tuples(kinds, kinds_of_options, picks), max_size=2),
        timelines=st.integers(0, 2),
        held=st.lists(picks, max_size=4),
    )
    def begin(self, every, threads, parents, most, place, share, blocks, sessions, timelines, held):
        """Begin with something of each kind, and with streams that are held back."""
        self.look_every, self.threads = every, threads
        self.make_the_tree(parents, most)
        self.open_arena(place, share)
        for nbytes, stream in blocks:
            self.allocate(nbytes, 0, stream, "plain", False)
        for kind, options, pick in sessions:
            self.make_a_session(0, pick, pick, kind, options)
        for initial in range(timelines):
            self.make_a_timeline(initial)
        for stream in held:
            self.close_a_gate(stream)


# Rules are drawn alike, so a rule is drawn as often as it has names.
OFTEN = {
    "allocate": 8,
    "free": 5,
    "free_and_allocate_small_blocks": 2,
    "launch_a_graph": 2,
    "run": 12,
    "write_on_a_stream": 3,
    "read_on_a_stream": 4,
    "copy_to_a_new_block": 2,
    "make_a_session": 2,
    "bind_an_input": 2,
    "free_what_a_run_reads": 5,
    "close_a_gate": 5,
    "signal": 2,
    "signal_on_a_stream": 3,
    "wait_on_a_stream": 4,
    "wait_on_the_cpu": 2,
    "drop_a_view": 3,
    "see_a_block_by_its_handle": 3,
    "end_a_reservation": 3,
}


def once_more(name: str, copy: str) -> Callable[..., None]:
    """Return a rule under another name; hypothesis leaves some names out of each program."""
    original = getattr(getattr(Machine, name), RULE_MARKER)

    def call(self: Machine, **arguments: Any) -> None:
        original.function(self, **arguments)

    call.__name__ = copy
    for condition in original.preconditions:
        call = precondition(condition)(call)
    return stateful.rule(**original.arguments)(call)


for _name, _times in OFTEN.items():
    for _number in range(1, _times):
        _copy = f"{_name}_{_number}"
        setattr(Machine, _copy, once_more(_name, _copy))


def search(seed: int, seconds: float, steps: int, *, shorten: bool = True) -> int:
    """Run rounds of programs until the time is over; raises what the shortest program shows."""
    set_host_device_count(len(STREAMS))
    warnings.simplefilter("ignore", ConfigWarning)  # some settings have no effect together
    seeds = random.Random(seed)
    end = time.monotonic() + seconds
    programs = 0
    while programs == 0 or time.monotonic() < end:
        machine = type("Machine", (Machine,), {})
        hypothesis.seed(seeds.randrange(1 << 32))(machine)
        try:
            run_state_machine_as_test(
                machine,
                settings=settings(
                    max_examples=PROGRAMS,
                    stateful_step_count=steps,
                    deadline=None,
                    database=None,
                    phases=[Phase.generate, Phase.shrink][: 1 + shorten],
                    suppress_health_check=list(HealthCheck),
                ),
            )
        except Flaky:
            # Two programs that begin alike may go on differently: what waits for a millisecond gets
            # its memory or does not. Where none of them failed, only this round ends.
            if diary.failed:
                raise
        programs += PROGRAMS
    return programs
