"""What carries blocks from one stream, memory, library or device to another."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import gpumem
from gpumem.interop import HostTimeline

from .blocks import Blocks, Held

SCRATCH = 64 << 20  # bytes of a session's own arena


class Exporter:
    """A library that hands over a block through DLPack and knows nothing of gpumem."""

    def __init__(self, buffer: gpumem.Buffer) -> None:
        self._buffer = buffer

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._buffer.__dlpack_device__()

    def __dlpack__(self, **keywords: Any) -> Any:
        return self._buffer.__dlpack__(**keywords)


class Crossings:
    """One thread's copies, imports, sessions and timelines.

    Parameters
    ----------
    blocks : Blocks
        The thread's blocks; what arrives is added to them.
    beside : list of Arena
        Arenas over other memory, which copies go through: pinned memory, other devices.
    rng : random.Random
        Where decisions come from.
    """

    def __init__(self, blocks: Blocks, beside: list[gpumem.Arena], rng: random.Random) -> None:
        self._blocks = blocks
        self._beside = beside
        self._rng = rng
        self._device = blocks.arena.memory.device
        self._timeline = HostTimeline.create()
        self._value = 0
        self._session: gpumem.Session | None = None
        self._nothing = gpumem.empty(0, "u1", memory=self._device)
        self._out: list[Held] = []  # blocks that wait in other memory

    def actions(self) -> dict[Callable[[], None], int]:
        """Return what a thread may do, with weights."""
        one_cpu = self._device.type == "host" and self._device.index > 0  # DLPack knows one
        return {
            self.copy: 40,
            self.copy_through_other_memory: 20 if self._beside else 0,
            self.move_out: 20 if self._beside else 0,
            self.move_back: 20 if self._beside else 0,
            self.import_from_another_library: 0 if one_cpu else 20,
            self.order_by_a_timeline: 20,
            self.run_a_session: 20,
            self.replace_the_session: 2,
        }

    def close(self) -> None:
        """End the session and the timeline; the thread's streams have finished."""
        self._out.clear()
        if self._session is not None:
            self._session.close()
        self._timeline.close()

    # ---- copies ----------------------------------------------------------------------------------

    def copy(self) -> None:
        """Copy a block into a new one, and go on before either stream has passed."""
        held = self._blocks.drawn()
        if held is None:
            return
        stream = self._blocks.some_stream()
        made = self._blocks.made(held.buffer.nbytes, stream)
        if made is not None:
            self._blocks.read_on(held, stream)
            gpumem.copy(made, held.buffer, stream)
            self._blocks.add(Held(made, held.tag, stream))
        self._blocks.add(held)

    def copy_through_other_memory(self) -> None:
        held = self._blocks.some()
        if held is None:
            return
        try:
            between = self._rng.choice(self._beside).allocate(held.buffer.nbytes)
        except gpumem.OutOfMemoryError:
            return
        stream = self._blocks.some_stream()
        self._blocks.read_on(held, stream)
        gpumem.copy(between, held.buffer, stream)
        made = self._blocks.made(held.buffer.nbytes, stream)
        if made is not None:
            gpumem.copy(made, between, stream)
            self._blocks.add(Held(made, held.tag, stream))
        between.close()

    def move_out(self) -> None:
        """Copy a block into other memory and free it at once, as an offload does."""
        held = self._blocks.drawn()
        if held is None:
            return
        try:
            between = self._rng.choice(self._beside).allocate(held.buffer.nbytes)
        except gpumem.OutOfMemoryError:
            self._blocks.add(held)
            return
        stream = self._blocks.some_stream()
        self._blocks.read_on(held, stream)
        gpumem.copy(between, held.buffer, stream)
        held.buffer.close(stream)
        self._out.append(Held(between, held.tag, stream))

    def move_back(self) -> None:
        """Allocate a block anew for one that was moved out."""
        if not self._out:
            return
        out = self._out.pop(self._rng.randrange(len(self._out)))
        stream = self._blocks.some_stream()
        made = self._blocks.made(out.buffer.nbytes, stream)
        if made is None:
            self._out.append(out)
            return
        gpumem.copy(made, out.buffer, stream)  # after the copy out, without an event between
        out.buffer.close()
        self._blocks.add(Held(made, out.tag, stream))

    # ---- other libraries -------------------------------------------------------------------------

    def import_from_another_library(self) -> None:
        """Take a block over through DLPack on some stream, and let its owner free it at once."""
        held = self._blocks.drawn()
        if held is None:
            return
        stream = self._blocks.some_stream()
        made = self._blocks.made(held.buffer.nbytes, stream)
        if made is None:
            self._blocks.add(held)
            return
        self._blocks.move_to(held, held.buffer.stream)  # which the protocol orders before `stream`
        if self._device.type == "host":
            held.buffer.stream.synchronize()  # a consumer on the CPU gives no stream
        imported = gpumem.from_dlpack(Exporter(held.buffer), stream=stream)
        held.buffer.close()
        gpumem.copy(made, imported.view("u1"), stream)
        del imported
        self._blocks.add(Held(made, held.tag, stream))

    # ---- timelines and sessions ------------------------------------------------------------------

    def order_by_a_timeline(self) -> None:
        """Hand a block to another stream behind a value instead of an event."""
        held = self._blocks.some()
        if held is None or held.read_elsewhere:
            return
        stream = self._blocks.some_stream()
        if self._value:  # values are reached in order
            self._timeline.enqueue_wait(held.stream, self._value)
        self._value += 1
        self._timeline.enqueue_signal(held.stream, self._value)
        self._timeline.enqueue_wait(stream, self._value)
        held.stream = stream
        self._blocks.check(held)

    def run_a_session(self) -> None:
        """Queue a run, free what it was given, and keep its output; nobody waits."""
        held = self._blocks.drawn()
        if held is None:
            return
        if self._session is None:
            self.replace_the_session()
        self._blocks.move_to(held, held.buffer.stream)
        made = self._blocks.made(held.buffer.nbytes, held.buffer.stream)
        if made is None:
            self._blocks.add(held)
            return
        session = self._session
        session.bind_input("x", gpumem.from_dlpack(held.buffer))
        session.bind_output("y", gpumem.from_dlpack(made))
        session.run(_copy_in_a_run, synchronize=False)
        stream = session.compute_stream
        session.bind_input("x", self._nothing)
        session.bind_output("y")
        held.buffer.close()
        self._blocks.add(Held(made, held.tag, stream))

    def replace_the_session(self) -> None:
        """Close the session or drop it, while its runs are still queued."""
        if self._session is not None and self._rng.random() < 0.5:
            self._session.close()
        options = {"use_ep_level_unified_stream": True, "arena": {"max_mem": SCRATCH}}
        self._session = gpumem.Session(self._device, options)


def _copy_in_a_run(context: gpumem.session.RunContext) -> None:
    x = context.inputs["x"]
    with context.allocator.allocate(x.nbytes) as scratch:
        gpumem.copy(scratch, x, context.stream)
        gpumem.copy(context.output("y", x.shape, x.dtype), scratch, context.stream)
