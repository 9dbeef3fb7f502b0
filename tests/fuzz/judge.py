"""Tries inputs on one target and raises what is wrong with it; `__main__` runs it in a child.

Wrong are an exception that is not one of the target's, a message that is not one printable line,
memory far beyond the size of the input, and a leak of descriptors, of the host device's memory or
of Python objects. A crash or a hang ends the process: the input under trial stands in a file.
"""

from __future__ import annotations

import faulthandler
import gc
import mmap
import os
import resource
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from .changes import MAX_BYTES, mutate
from .targets import Target

RSS_PER_BYTE = 2000  # zlib unpacks a byte to 1032, NumPy's columns hold some copies
ADDRESS_SPACE = 1 << 30
MIN_LEAK = 64  # bytes of each repetition
ROUND = 1000  # examples that hypothesis draws under one seed


class Wrong(AssertionError):
    """A reader did what no reader may."""


class Judge:
    """One target, and the file that holds the input under trial."""

    def __init__(self, target: Target, trial: Path, hang_seconds: float) -> None:
        self.target = target
        self.tried = 0
        self._trial = trial
        self._hang_seconds = hang_seconds

    def prepare(self, data: bytes) -> None:
        """Import what is imported late, and limit the addresses."""
        self._outcome(data)
        gc.collect()
        gc.freeze()
        if self.target.limit_address_space:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * mmap.PAGESIZE + ADDRESS_SPACE
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def check(self, data: bytes) -> bool:
        """Try an input; return whether the reader accepted it."""
        descriptors, rss = _descriptors(), _peak_rss()
        is_read = self._outcome(data)
        grown = _peak_rss() - rss
        if grown > self.target.max_rss + RSS_PER_BYTE * len(data):
            raise Wrong(f"memory: {grown >> 20} MiB for {len(data)} bytes")
        if _descriptors() > descriptors:
            # A descriptor that is opened once for all is not a leak.
            counts = [self._descriptors_after(data) for _ in range(3)]
            if counts[0] < counts[1] < counts[2]:
                raise Wrong(f"leak: descriptors after each trial: {counts}")
        return is_read

    def check_leaks(self, data: bytes) -> None:
        """Repeat an input: each repetition leaves the state that it found.

        A leak keeps at least `MIN_LEAK` bytes of each repetition in every round. A cache that has
        filled up keeps fewer, and a round with fewer ends the search. Most inputs need one round.
        """
        alive = self.target.alive()
        tracemalloc.start()
        try:
            before, growth = self._traced(data, 1), []
            for count in self.target.rounds:
                after = self._traced(data, count)
                growth.append((after - before) // count)
                before = after
                if growth[-1] < MIN_LEAK:
                    break
            else:
                raise Wrong(f"leak: bytes of each repetition, by round: {growth}")
        finally:
            tracemalloc.stop()
        if self.target.alive() != alive:
            raise Wrong(f"leak: {alive} before, {self.target.alive()} after")

    def search(self, corpus: list[bytes], seconds: float, first_seed: int, examples: int) -> None:
        """Try changed inputs, in rounds of hypothesis, at least one round."""
        begun = time.monotonic()
        number = first_seed
        while number == first_seed or time.monotonic() - begun < seconds:

            @seed(number)
            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(st.sampled_from(corpus), st.sampled_from(corpus), st.randoms())
            def check_changed(one, other, rng):
                data = self._changed(rng, one, other)
                self.check(data)
                if rng.random() < 0.03:
                    self.check_leaks(data)

            check_changed()
            number += 1

    def _changed(self, rng, one: bytes, other: bytes) -> bytes:
        if self.target.structured and rng.random() < 0.6:
            return rng.choice(self.target.structured)(rng, one, other)[:MAX_BYTES]
        return mutate(rng, one, other, self.target.tokens)

    def _outcome(self, data: bytes) -> bool:
        self.tried += 1
        self._trial.write_bytes(data)
        faulthandler.dump_traceback_later(self._hang_seconds, exit=True)
        try:
            self.target.run(data)
        except self.target.accepts as error:
            if any(type(each) is MemoryError for each in _chain(error)):
                raise Wrong("memory: Python had none left") from error
            message = str(error)
            if self.target.one_line and not (
                message.isprintable() and len(message) <= self.target.max_characters
            ):
                raise Wrong(f"message: {message!r}") from error
            return False
        finally:
            faulthandler.cancel_dump_traceback_later()
        return True

    def _descriptors_after(self, data: bytes) -> int:
        self._outcome(data)
        gc.collect()
        return _descriptors()

    def _traced(self, data: bytes, repeats: int) -> int:
        for _ in range(repeats):
            self._outcome(data)
        # Python keeps the last 4096 names looked up in types, also names made at run time.
        sys._clear_type_cache()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__context__


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _peak_rss() -> int:
    # Not getrusage: it counts what the process had before exec, which is its parent's memory.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10
