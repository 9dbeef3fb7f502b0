"""Rules of gates, which hold streams back, and of timelines."""

from __future__ import annotations

import threading
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from gpumem.errors import InUseError, NonMonotonicError, TimelineTimeout
from gpumem.interop import HostTimeline

from ..helpers.waiting import wait_until
from .diary import note, rule
from .work import PATIENCE, Counter
from .world import World, picks

MOST_TIMELINES = 2
JUMP = 1 << 20  # above all values that a program waits for
steps = st.integers(1, 3)


class Timeline(Counter):
    """A timeline, its objects in this process, and the threads that wait for it."""

    def __init__(self, name: str, initial: int) -> None:
        super().__init__(initial)
        self.name = name
        self.handles = [HostTimeline.create(initial)]
        self.waiters: list[tuple[int, threading.Thread, Any]] = []
        self.reached_by_waiters: list[int] = []

    def __str__(self) -> str:
        return self.name

    def signalled(self, value: int) -> None:
        self.pending = max(self.pending, value)
        self.sure, self.possible = max(self.sure, value), max(self.possible, value)

    def let_go(self) -> None:
        value = self.pending + JUMP
        self.handles[0].signal(value)
        self.signalled(value)

    def wait_in_a_thread(self, value: int, handle: Any) -> None:
        def wait() -> None:
            handle.wait(value)
            self.reached_by_waiters.append(value)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        self.waiters.append((value, thread, handle))

    def check(self) -> None:
        for handle in self.handles:
            value = handle.value()
            assert self.sure <= value <= self.possible, f"{self} is {value}, not {self.sure}"
            assert handle.pending == self.pending, f"{self}: {handle.pending} is pending"
        for value, thread, _ in self.waiters:
            if self.sure >= value:
                wait_until(lambda thread=thread: not thread.is_alive(), PATIENCE)
                assert value in self.reached_by_waiters, f"{self}: the wait for {value} failed"
            elif self.possible < value:
                assert thread.is_alive(), f"{self}: the wait for {value} ended early"
        self.waiters = [waiter for waiter in self.waiters if waiter[1].is_alive()]

    def close(self) -> None:
        for handle in self.handles:
            handle.close(timeout=PATIENCE)


class TimelineRules(World):
    """Gates and timelines."""

    # ---- gates -----------------------------------------------------------------------------------

    @rule(stream=picks)
    def close_a_gate(self, stream):
        queue = self.some(self.queues, stream)
        hold = self.kernels.hold(queue.stream)
        self.holds.append(hold)
        queue.add(after=[hold])
        note(f"    # on {queue}")

    @precondition(lambda self: self.holds)
    @rule(which=picks)
    def open_a_gate(self, which):
        hold = self.some(self.holds, which)
        self.holds.remove(hold)
        hold.open()

    @precondition(lambda self: not self.calm)
    @rule()
    def open_all_gates(self):
        while self.holds:
            self.holds.pop().open()

    @rule(first=picks, then=picks)
    def order_two_streams(self, first, then):
        first = self.some(self.queues, first)
        then = self.some(self.queues_of(first.device), then)
        note(f"    # {first}, then {then}")
        event = first.stream.record()
        then.stream.wait(event)
        then.add(after=first.last)

    # ---- timelines -------------------------------------------------------------------------------

    @precondition(lambda self: len(self.counters) < MOST_TIMELINES)
    @rule(initial=st.integers(0, 2))
    def make_a_timeline(self, initial):
        self.counters.append(Timeline(f"t{next(self.numbers)}", initial))

    @precondition(lambda self: self.counters)
    @rule(timeline=picks, step=steps)
    def signal(self, timeline, step):
        timeline, handle = self.timeline(timeline)
        value = timeline.pending + step
        note(f"    # {timeline} to {value}")
        handle.signal(value)
        timeline.signalled(value)

    @precondition(lambda self: self.counters)
    @rule(timeline=picks, stream=picks, step=steps)
    def signal_on_a_stream(self, timeline, stream, step):
        timeline, handle = self.timeline(timeline)
        queue = self.some(self.queues, stream)
        value = timeline.pending + step
        note(f"    # {timeline} to {value} on {queue}")
        handle.enqueue_signal(queue.stream, value)
        timeline.pending = value
        queue.add(signals=timeline.reached(value))

    @precondition(lambda self: self.counters)
    @rule(timeline=picks, stream=picks, below=st.integers(0, 2))
    def signals_do_not_fall(self, timeline, stream, below):
        timeline, handle = self.timeline(timeline)
        queue = self.some(self.queues, stream)
        if timeline.pending > below:
            with self.refused(NonMonotonicError):
                handle.signal(timeline.pending - below)
            with self.refused(NonMonotonicError):
                handle.enqueue_signal(queue.stream, timeline.pending - below)

    @precondition(lambda self: self.counters)
    @rule(timeline=picks, stream=picks, above=st.integers(-1, 2), point=st.booleans())
    def wait_on_a_stream(self, timeline, stream, above, point):
        timeline, handle = self.timeline(timeline)
        queue = self.some(self.queues, stream)
        value = max(1, timeline.pending + above)
        note(f"    # {queue} for {timeline} to be {value}")
        if point:
            queue.stream.wait(handle.point(value))
        else:
            handle.enqueue_wait(queue.stream, value)
        queue.add(after=[timeline.reached(value)])

    @precondition(lambda self: self.counters)
    @rule(timeline=picks, above=st.integers(-2, 2), in_a_thread=st.booleans())
    def wait_on_the_cpu(self, timeline, above, in_a_thread):
        timeline, handle = self.timeline(timeline)
        value = max(1, timeline.pending + above)
        note(f"    # for {timeline} to be {value}")
        if in_a_thread:
            timeline.wait_in_a_thread(value, handle)
        elif timeline.sure >= value:
            handle.wait(value)
        elif timeline.possible < value:
            with self.refused(TimelineTimeout):
                handle.wait(value, timeout=0)

    @precondition(lambda self: self.counters)
    @rule(timeline=picks)
    def import_it_once_more(self, timeline):
        timeline, handle = self.timeline(timeline)
        if len(timeline.handles) < 2:
            with handle.export() as exported:
                timeline.handles.append(HostTimeline.from_fd(exported.fileno()))

    @precondition(lambda self: self.counters)
    @rule(timeline=picks)
    def close_is_refused_in_use(self, timeline):
        timeline, handle = self.timeline(timeline)
        if any(handle is used for _, _, used in timeline.waiters):
            with self.refused(InUseError):
                handle.close()
            assert not handle.closed

    @precondition(lambda self: self.calm and self.spare())
    @rule(timeline=picks)
    def close_one_of_two(self, timeline):
        timeline = self.some(self.spare(), timeline)
        timeline.handles.pop(0).close(timeout=PATIENCE)

    def spare(self) -> list[Timeline]:
        """Timelines that have two objects and no thread in a wait."""
        return [each for each in self.counters if len(each.handles) > 1 and not each.waiters]

    def timeline(self, pick: int) -> tuple[Timeline, Any]:
        """Return a timeline and one of its objects."""
        timeline = self.some(self.counters, pick)
        return timeline, timeline.handles[pick // 2 % len(timeline.handles)]
