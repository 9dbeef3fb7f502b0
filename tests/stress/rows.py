"""One thread's virtual tensor: rows that grow and shrink under work on several streams."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import gpumem

from .blocks import Blocks

ROW = 256 << 10  # bytes: eight rows a page
ROWS = 96
LONGEST_RUN = 20  # rows filled or released at once
LONGEST_DRAG = 500  # microseconds


@dataclass
class Run:
    """Rows with one pattern, and the stream behind whose work all use of them is ordered."""

    first: int
    last: int
    tag: int
    stream: object


class Rows:
    """A tensor of the shared arena, whose rows only this thread uses.

    A released run may still be read by queued work: what is checked then is that its pages are
    nobody else's before. Streams of everybody's are used, which no thread resets.
    """

    def __init__(self, blocks: Blocks, rng: random.Random) -> None:
        self._blocks = blocks
        self._rng = rng
        self._runs: list[Run] = []
        try:
            self._tensor: gpumem.VirtualTensor | None = blocks.arena.virtual(
                (ROWS, ROW),
                "uint8",
                step=rng.choice([1, 16]),
                ahead=rng.choice([0, 0, 16]),
                stream=blocks.streams[0],
            )
        except gpumem.ConfigError:
            self._tensor = None  # this memory has no pages

    def actions(self) -> dict[Callable[[], None], int]:
        """Return what a thread may do, with weights."""
        if self._tensor is None:
            return {}
        return {self.grow: 40, self.release_rows: 30, self.check_rows: 20, self.resize: 5}

    def finish(self) -> None:
        """Check and release everything."""
        if self._tensor is None:
            return
        for run in self._runs:
            self._check(run)
        self._runs.clear()
        self._tensor.close()

    # ---- actions ---------------------------------------------------------------------------------

    def grow(self) -> None:
        """Commit rows that nothing uses, some of them perhaps released just now, and fill them."""
        assert self._tensor
        first = self._rng.randrange(ROWS)
        last = min(first + self._rng.randrange(1, LONGEST_RUN), ROWS)
        if any(run.first < last and first < run.last for run in self._runs):
            return
        try:
            self._tensor.commit(first, last)
        except gpumem.OutOfMemoryError:
            self._blocks.done["out of memory for rows"] += 1
            self._blocks.free()
            return
        # The pages may be those of a release that other streams' work has not passed yet.
        stream = self._stream(first, last)
        for other in self._blocks.streams:
            self._blocks.order(other, stream)
        self._runs.append(Run(first, last, self._fill(first, last, stream), stream))

    def release_rows(self) -> None:
        """Release a run, or a part of it, right behind the work that reads it."""
        assert self._tensor
        if not self._runs:
            return
        run = self._runs.pop(self._rng.randrange(len(self._runs)))
        if self._rng.random() < 0.5:
            self._blocks.patterns.drag(self._rng.randrange(LONGEST_DRAG), run.stream)
        self._check(run)
        self._tensor.release(run.first, run.last)

    def check_rows(self) -> None:
        """Read a run, and perhaps fill it anew, on another stream."""
        if not self._runs:
            return
        run = self._rng.choice(self._runs)
        stream = self._stream(run.first, run.last)
        self._blocks.order(run.stream, stream)
        run.stream = stream
        self._check(run)
        if self._rng.random() < 0.3:
            run.tag = self._fill(run.first, run.last, stream)

    def resize(self) -> None:
        """Release all rows behind one, and commit those before it."""
        assert self._tensor
        rows = self._rng.randrange(ROWS)
        if any(run.first < rows < run.last for run in self._runs):
            return
        try:
            self._tensor.resize(rows)
        except gpumem.OutOfMemoryError:
            self._blocks.done["out of memory for rows"] += 1
            return
        self._runs = [run for run in self._runs if run.last <= rows]

    # ---- work ------------------------------------------------------------------------------------

    def _stream(self, first: int, last: int):
        assert self._tensor
        stream = self._rng.choice(self._blocks.streams)
        self._tensor.record_stream(stream, first, last)
        return stream

    def _fill(self, first: int, last: int, stream) -> int:
        assert self._tensor
        at = self._tensor.ptr + first * ROW
        return self._blocks.patterns.fill(at, (last - first) * ROW, stream)

    def _check(self, run: Run) -> None:
        assert self._tensor
        at, nbytes = self._tensor.ptr + run.first * ROW, (run.last - run.first) * ROW
        what = f"rows {run.first} to {run.last}"
        self._blocks.patterns.check(at, nbytes, run.tag, run.stream, what)
