"""Random programs of calls, each followed through the model in oracle.py.

Blocks are written by work on their streams, each with a byte of its own, and read before they go
back; some go back with a slow write still queued. A block that two have at once shows as a wrong
byte, whatever the books say.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from helpers.driver import HostDriver
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import gpumem
from model.oracle import Oracle

KIB, MIB = 1 << 10, 1 << 20
LIMIT = 6 * MIB
SLOW = 1_000_000  # ns on the virtual clock
STREAMS = 3

sizes = st.one_of(
    st.integers(1, 2000),
    st.sampled_from([256, 4096, 5000, 64 * KIB, 64 * KIB + 1, 100 * KIB]),
    st.integers(1, MIB),
    st.just(3 * MIB),
)
stream_numbers = st.integers(0, STREAMS - 1)
picks = st.integers(0, 1 << 16)


@dataclass
class Held:
    """A block in the caller's hands, by its buffer or by a view that outlived it."""

    memory: object
    block: object  # what the oracle calls it
    stream: gpumem.Stream
    byte: int

    @property
    def is_view(self) -> bool:
        return not isinstance(self.memory, gpumem.Buffer)

    def check_bytes(self) -> None:
        self.stream.synchronize()
        assert (np.frombuffer(self.memory, np.uint8) == self.byte).all(), "bytes of another block"


class ArenaMachine(RuleBasedStateMachine):
    """One arena, a few streams, blocks with their bytes, and the oracle that watches."""

    config: gpumem.ArenaConfig
    driver: HostDriver
    streams: tuple
    controls = None

    @initialize()
    def make(self):
        self.arena = gpumem.Arena("host", self.config)
        self.oracle = Oracle(self.arena)
        self.held = []
        self.coming = None  # handed out, not yet looked at
        self.bytes = itertools.cycle(range(1, 250))

    # ---- handing out ----

    @rule(nbytes=sizes, number=stream_numbers)
    def allocate(self, nbytes, number):
        stream = self.streams[number]
        idle = stream.query()
        try:
            buffer = self.arena.allocate(nbytes, stream)
        except gpumem.OutOfMemoryError as error:
            self.oracle.refused(nbytes, stream, error)
            return
        self.coming = buffer
        self.oracle.served(buffer, nbytes, stream, idle)
        self.hold(buffer, stream)

    @rule(nbytes=sizes)
    def allocate_persistent(self, nbytes):
        try:
            buffer = self.arena.allocate_persistent(nbytes)
        except gpumem.OutOfMemoryError as error:
            self.oracle.refused(nbytes, None, error)
            return
        self.coming = buffer
        self.oracle.served_persistent(buffer, nbytes)
        self.hold(buffer, buffer.stream)

    @rule(number=stream_numbers)
    def allocate_nothing(self, number):
        with self.arena.allocate(0, self.streams[number]) as buffer:
            assert (buffer.ptr, buffer.nbytes) == (0, 0)
        self.oracle.check()

    @rule(number=stream_numbers)
    def allocate_more_than_the_limit(self, number):
        with pytest.raises(gpumem.OutOfMemoryError) as caught:
            self.arena.allocate(LIMIT + 1, self.streams[number])
        self.oracle.refused(LIMIT + 1, self.streams[number], caught.value)

    def hold(self, buffer, stream):
        byte = next(self.bytes)
        self.driver.fill(buffer, byte, stream)
        self.held.append(Held(buffer, self.oracle.live[buffer.ptr], stream, byte))
        self.coming = None

    # ---- handing back ----

    @precondition(lambda self: self.held)
    @rule(pick=picks, still_writing=st.booleans(), look=st.booleans())
    def free(self, pick, still_writing, look):
        held = self.held.pop(pick % len(self.held))
        held.check_bytes()
        self.give_back(held, held.stream, still_writing, look)

    @precondition(lambda self: self.held)
    @rule(pick=picks, number=stream_numbers, still_writing=st.booleans(), look=st.booleans())
    def free_on_another_stream(self, pick, number, still_writing, look):
        held = self.held.pop(pick % len(self.held))
        held.check_bytes()
        stream = held.stream if held.is_view else self.streams[number]
        stream.wait(held.stream.record())
        self.give_back(held, stream, still_writing, look)

    @precondition(lambda self: self.held)
    @rule(pick=picks)
    def close_while_a_view_keeps_the_bytes(self, pick):
        held = self.held[pick % len(self.held)]
        if not held.is_view:
            buffer, held.memory = held.memory, np.frombuffer(held.memory, np.uint8)
            buffer.close()

    def give_back(self, held, stream, still_writing, look):
        if still_writing:
            self.controls.set_lag(SLOW)
            self.driver.fill(held.block, 0xEE, stream)
            self.controls.set_lag(0)
        if not held.is_view:
            held.memory.close(stream)
        held.memory = None  # a view that is dropped gives its block back
        self.oracle.gave_back(held.block, stream, stream.record())
        if look:
            self.oracle.check()

    # ---- the arena as a whole ----

    @rule()
    def shrink(self):
        self.oracle.shrunk(self.arena.shrink())

    @precondition(lambda self: self.held)
    @rule()
    def close_is_refused(self):
        with pytest.raises(gpumem.errors.InUseError):
            self.arena.close()
        assert not self.arena.closed
        self.oracle.check()

    # ---- streams ----

    @rule(number=stream_numbers, look=st.booleans())
    def reset_a_drained_stream(self, number, look):
        stream = self.streams[number]
        stream.synchronize()
        self.arena.reset_stream(stream)
        self.oracle.drained(stream)
        if look:
            self.oracle.check()

    @rule(before=stream_numbers, after=stream_numbers)
    def let_one_stream_wait_for_another(self, before, after):
        self.streams[after].wait(self.streams[before].record())

    @rule(nanoseconds=st.sampled_from([1, SLOW // 2, SLOW]))
    def let_time_pass(self, nanoseconds):
        self.controls.advance_clock(nanoseconds)

    # ---- after each call, and at the end ----

    @invariant()
    def books_are_whole(self):
        if hasattr(self, "arena"):
            self.arena.check_invariants()

    def teardown(self):
        self.controls.advance_clock(SLOW)
        for stream in self.streams:
            stream.synchronize()
        for held in getattr(self, "held", ()):
            held.check_bytes()
            held.memory = None
        if hasattr(self, "arena"):
            if self.coming is not None:
                self.coming.close()
            self.arena.close()


# Every combination has the same numbers, of which some have no effect.
@pytest.mark.filterwarnings("ignore::gpumem.errors.ConfigWarning")
@pytest.mark.parametrize("stream_reuse", ["completed", "wait", "never"])
@pytest.mark.parametrize("extend_strategy", ["next_power_of_two", "same_as_requested"])
@pytest.mark.parametrize("split_rule", ["tight", "ort"])
def test_arena_matches_the_oracle(split_rule, extend_strategy, stream_reuse, virtual_clock):
    class Machine(ArenaMachine):
        config = gpumem.ArenaConfig(
            split_rule=split_rule,
            extend_strategy=extend_strategy,
            stream_reuse=stream_reuse,
            max_mem=LIMIT,
            initial_chunk_size_bytes=64 * KIB,
            initial_growth_chunk_size_bytes=200 * KIB,
            max_power_of_two_extend_bytes=MIB,
            max_dead_bytes_per_chunk=300 * KIB,
        )
        driver = HostDriver()
        streams = tuple(gpumem.Stream("host") for _ in range(STREAMS))
        controls = virtual_clock

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=24,
            stateful_step_count=50,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
