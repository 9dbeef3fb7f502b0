"""Rules of blocks: they are handed out, used by streams, read, seen by others and freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition

import gpumem
from gpumem import interop
from gpumem._testing.arenas import release_retired
from gpumem.errors import AsleepError, BudgetExceededError, ConfigError, OutOfMemoryError

from .books import PAGE, QUANTUM, Arena, Block, pages_of, rounded
from .diary import note, rule
from .work import Queue, require_bytes
from .world import World, array_over, picks, sizes

small_sizes = st.sampled_from([256, 700, 5000, 64 << 10])  # what threads cache


class MemoryRules(World):
    """Blocks."""

    # ---- handing out -----------------------------------------------------------------------------

    @precondition(lambda self: self.arenas)
    @rule(
        nbytes=sizes,
        arena=picks,
        stream=picks,
        how=st.sampled_from(["plain", "tensor", "aligned"]),
        other_thread=st.booleans(),
    )
    def allocate(self, nbytes, arena, stream, how, other_thread):
        arena = self.some(self.arenas, arena)
        queue = self.some(self.queues_of(arena.device), stream)
        extra = 4096 - QUANTUM if how == "aligned" else 0

        def make() -> Any:
            if how == "tensor":
                return gpumem.empty(nbytes, "u1", resource=arena.real, stream=queue.stream).buffer
            alignment = 4096 if how == "aligned" else None
            return arena.real.allocate(nbytes, queue.stream, alignment=alignment)

        self.before_allocation(arena, nbytes + extra)
        block = self.obtain(
            arena, nbytes, queue, lambda: self.on_thread(other_thread, make), extra=extra
        )
        if block is not None:
            note(f"    # {block} = {nbytes} bytes of {arena} on {queue}, at {block.start:#x}")

    @precondition(lambda self: self.arenas)
    @rule(nbytes=sizes, arena=picks)
    def allocate_persistent(self, nbytes, arena):
        arena = self.some(self.arenas, arena)
        queue = self.legacy_of(arena.device)
        self.before_allocation(arena, nbytes)
        block = self.obtain(
            arena, nbytes, queue, lambda: arena.real.allocate_persistent(nbytes), persistent=True
        )
        if block is not None:
            note(f"    # {block} = {nbytes} bytes of {arena}, persistent")

    @precondition(lambda self: self.arenas)
    @rule(nbytes=sizes, arena=picks, stream=picks)
    def allocate_shareable(self, nbytes, arena, stream):
        arena = self.some(self.arenas, arena)
        queue = self.some(self.queues_of(arena.device), stream)
        self.before_allocation(arena, pages_of(nbytes))

        def make() -> Any:
            return arena.real.allocate(nbytes, queue.stream, shareable=True)

        if arena.real.memory.kind is gpumem.MemoryKind.MANAGED:
            with self.refused(ConfigError, arena=arena):
                make()
            return
        block = self.obtain(arena, nbytes, queue, make, shareable=True)
        if block is not None:
            note(f"    # {block} = {nbytes} bytes of {arena} on {queue}, shareable")

    @precondition(lambda self: self.arenas)
    @rule(
        arena=picks,
        stream=picks,
        steps=st.lists(st.tuples(small_sizes, st.booleans()), min_size=4, max_size=16),
    )
    def free_and_allocate_small_blocks(self, arena, stream, steps):
        """With nothing in between: a thread's cache serves them, and counts for itself."""
        arena = self.some(self.arenas, arena)
        queue = self.some(self.queues_of(arena.device), stream)
        self.before_allocation(arena, sum(nbytes for nbytes, _ in steps))
        held: list[Block] = []
        for nbytes, frees in steps:
            held = [block for block in held if not block.closed]  # under pressure some may be
            if frees and held:
                block = held.pop(nbytes % len(held))
                self.before_a_free(block)
                self.give_back(block, "close", block.own)
                continue
            made = self.obtain(
                arena, nbytes, queue, lambda n=nbytes: arena.real.allocate(n, queue.stream)
            )
            if made is None:
                return
            held.append(made)

    def before_allocation(self, arena: Arena, nbytes: int) -> None:
        """Regions go back where memory is out, and the driver's free waits for the device."""
        self.release_pools()
        if arena.is_paged and not arena.has_retired:
            return
        stats = arena.real.stats()
        room = [arena.limit - stats.reserved] if arena.limit else []
        if arena.budget is not None:
            room += [arena.budget.real.free] if arena.budget.real.free is not None else []
        if arena.has_retired or any(rounded(nbytes) > each for each in room):
            self.finish_everything()

    def obtain(
        self,
        arena: Arena,
        nbytes: int,
        queue: Queue,
        make: Callable[[], Any],
        *,
        extra: int = 0,
        persistent: bool = False,
        shareable: bool = False,
    ) -> Block | None:
        """Allocate, and write a first byte; None: it was refused, and nothing has changed."""
        try:
            buffer = make()
        except AsleepError:
            assert arena.suspended, f"{arena} is not suspended"
            return None
        except OutOfMemoryError as error:
            self.require_truth(arena, nbytes + extra, error)
            return None
        assert not arena.suspended, f"{arena} handed out a block while it was suspended"
        block = self.placed(arena, buffer, nbytes, queue, extra)
        block.buffer = buffer
        block.refs.add("user")
        if persistent:
            arena.persistent += 1
            block.persistent = True
        if shareable:
            require_bytes(block.start, block.nbytes, 0, f"{block}, shareable")
            block.shareable = True
        self.write(block, queue)
        return block

    def require_truth(self, arena: Arena, nbytes: int, error: OutOfMemoryError) -> None:
        """A refusal is right: there is no room under the limits, and its numbers are true."""
        note(f"    # refused {nbytes} bytes of {arena}")
        need = rounded(nbytes) + (2 * PAGE if arena.is_paged else 0)
        if arena.may_be_padded:
            need *= 2  # a block may be padded so far, and padding is in use
            arena.restart_counters()
        room = [arena.limit - arena.reserved_with_pools()] if arena.limit else []
        free = arena.budget.real.free if arena.budget is not None else None
        room += [free] if free is not None else []
        assert any(each < need for each in room), f"{arena} refused {nbytes} bytes: {error}"
        if isinstance(error, BudgetExceededError):
            levels = {level.name: level for level in arena.budget.path()}
            assert error.budget in levels, f"{error.budget} is not above {arena}"
            assert error.limit == levels[error.budget].real.limit, f"{error}"
        self.compare_the_books()

    # ---- use by streams --------------------------------------------------------------------------

    @precondition(lambda self: self.blocks_with_work())
    @rule(block=picks, stream=picks)
    def write_on_a_stream(self, block, stream):
        block = self.some(self.blocks_with_work(), block)
        queue = self.some(self.queues_of(block.arena.device), stream)
        note(f"    # {block} on {queue}")
        self.write(block, queue)

    @precondition(lambda self: self.blocks_with_work())
    @rule(block=picks, stream=picks, record=st.booleans())
    def read_on_a_stream(self, block, stream, record):
        block = self.some_block(self.blocks_with_work(), block)
        queue = self.some(self.queues_of(block.arena.device), stream)
        note(f"    # {block} on {queue}")
        if record:
            block.buffer.record_stream(queue.stream)
        self.read(block, queue, recorded=record)

    @precondition(lambda self: self.blocks_with_work())
    @rule(block=picks, arena=picks, own=picks, stream=picks)
    def copy_to_a_new_block(self, block, arena, own, stream):
        source = self.some(self.blocks_with_work(), block)
        arena = self.some(self.arenas, arena)
        queue = self.some(self.queues_of(source.arena.device), stream)
        self.before_allocation(arena, source.nbytes)
        if source.closed:  # a callback under pressure freed it
            return
        own = self.some(self.queues_of(arena.device), own)
        made = self.obtain(
            arena, source.nbytes, own, lambda: arena.real.allocate(source.nbytes, own.stream)
        )
        if made is None or source.closed:
            return
        note(f"    # {source} to {made} = a block of {arena} on {own}; copied on {queue}")
        self.order(source, queue)
        gpumem.copy(made.buffer, source.buffer, queue.stream)
        copied = queue.add(after=(*source.own.last, *own.last))
        made.writes.append((copied, source.byte))
        for end in (source, made):
            is_default = end.own is self.legacy_of(end.arena.device)
            if end.own is queue or (is_default and end.arena.device == source.arena.device):
                end.used_by(copied, recorded=True)  # a default stream is not held up
            else:  # another own stream comes after the copy
                end.used_by(end.own.add(after=[copied]))

    # ---- the CPU ---------------------------------------------------------------------------------

    @precondition(lambda self: self.blocks)
    @rule(block=picks)
    def look_at_the_bytes(self, block):
        self.require_byte(self.some(self.blocks, block))

    @precondition(lambda self: self.blocks_with_work())
    @rule(block=picks, how=st.sampled_from(["numpy", "memoryview", "dlpack"]))
    def make_a_view(self, block, how):
        """The CPU waits for the block's own stream, and for copies, which are done before."""
        block = self.some(self.blocks_with_work(), block)
        copies_are_done = all(use.sure for use in block.uses if use in block.recorded)
        if not block.own.done or block.byte_now is None or not copies_are_done:
            return
        if how == "numpy":
            view = array_over(block.buffer)
        elif how == "memoryview":
            view = memoryview(block.buffer)
        else:
            view = np.from_dlpack(gpumem.from_dlpack(block.buffer))
        require_bytes(
            np.asarray(view).ctypes.data, block.nbytes, block.byte_now, f"a view of {block}"
        )
        note(f"    # of {block}")
        block.views.append(view)

    @precondition(lambda self: any(block.views for block in self.blocks))
    @rule(block=picks, other_thread=st.booleans())
    def drop_a_view(self, block, other_thread):
        block = self.some([each for each in self.blocks if each.views], block)
        note(f"    # of {block}")
        self.before_a_free(block)
        last = len(block.views) == 1 and not (block.refs and not block.closed)
        if last and block.freed_on is not None:
            self.order(block, block.freed_on, to_free=True)
        self.on_thread(other_thread, lambda: block.views.__delitem__(-1))
        self.ended_perhaps(block)

    @precondition(lambda self: self.calm and self.shareable())
    @rule(block=picks)
    def see_a_block_by_its_handle(self, block):
        """Another process would see the same bytes, and write them."""
        block = self.some(self.shareable(), block)
        note(f"    # of {block}")
        with interop.export(block.buffer) as handle:
            there = interop.attach(handle)
        require_bytes(there.ptr, there.nbytes, block.byte, f"{block} seen by its handle")
        block.writes.append((None, next(self.bytes)))
        there.numpy()[:] = block.byte
        self.require_byte(block)
        del there
        release_retired()  # now, while everything is done: it waits for the device

    def shareable(self) -> list[Block]:
        return [block for block in self.blocks_with_work() if block.shareable]

    # ---- handing back ----------------------------------------------------------------------------

    @precondition(lambda self: any(block.buffer is not None for block in self.blocks))
    @rule(
        block=picks,
        how=st.sampled_from(["close", "drop", "close on a stream"]),
        stream=picks,
        still_writing=st.booleans(),
        other_thread=st.booleans(),
        again=st.sampled_from(["", "on its stream", "on its stream", "on another"]),
    )
    def free(self, block, how, stream, still_writing, other_thread, again):
        """Free a block, and perhaps ask for as much at once, on any stream."""
        held = [each for each in self.blocks if each.buffer is not None]
        block = self.some_block(held, block)
        queue = block.own
        if how == "close on a stream":
            queue = self.some(self.queues_of(block.arena.device), stream)
        self.before_a_free(block)
        note(f"    # {block} on {queue}")
        self.give_back(block, how, queue, still_writing=still_writing, other_thread=other_thread)
        if again:
            other = self.some(self.queues_of(block.arena.device), stream)
            self.allocate_once_more(block, other if again == "on another" else block.own)

    def allocate_once_more(self, block: Block, queue: Queue) -> Block | None:
        arena, nbytes = block.arena, block.nbytes
        self.before_allocation(arena, nbytes)
        made = self.obtain(arena, nbytes, queue, lambda: arena.real.allocate(nbytes, queue.stream))
        if made is not None:
            note(f"    # {made} on {queue}, at {made.start:#x}; {block} was at {block.start:#x}")
        return made

    def before_a_free(self, block: Block) -> None:
        """Without caching a block goes back to the driver, whose free waits for the device."""
        if block.arena.passes:
            self.finish_everything()

    def give_back(
        self,
        block: Block,
        how: str,
        queue: Queue,
        *,
        still_writing: bool = False,
        other_thread: bool = False,
    ) -> None:
        self.require_byte(block)
        if still_writing and not block.arena.suspended and not block.views and not block.closed:
            self.write(block, queue)
        if block.closed:  # the memory lives in views; what is left is an empty Buffer
            queue = block.freed_on
        self.order(block, queue, to_free=True)
        box, block.buffer = [block.buffer], None
        if how == "close":
            self.on_thread(other_thread, box[0].close)
        elif how == "close on a stream":
            self.on_thread(other_thread, lambda: box[0].close(queue.stream))
        if how != "drop" and not block.closed:
            block.freed_on = queue
        self.on_thread(other_thread, box.clear)
        self.dropped(block, "user")
