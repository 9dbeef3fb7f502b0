"""The objects of one program, what holds after each of its rules, and its end."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine

import gpumem
from gpumem._copy.copy import wait_for_releases
from gpumem._testing.arenas import release_retired

from . import diary
from .books import QUANTUM, Arena, Block, Budget, Freed
from .diary import note
from .work import PATIENCE, Hold, Kernels, Op, Queue, advance_all, require_bytes, wait_for

STREAMS = {"host:0": 3, "host:1": 1}  # of each device, beside its default stream
LEGACY = 1  # handle of a device's default stream
GIVE_UP = 300  # seconds; then the interpreter itself is stuck

T = TypeVar("T")

picks = st.integers(0, 63)  # of whatever there is, modulo how many
sizes = st.one_of(
    st.sampled_from([1000, 256, 1, 4096, 64 << 10, (64 << 10) + 1, 300_000, 1 << 20]),
    st.integers(1, 5000),
    st.sampled_from([2 << 20, (3 << 20) + 1000]),
)


class Watch:
    """Lets everything go if a rule does not end, so that the program fails instead of hanging."""

    def __init__(self, let_go: Callable[[], None]) -> None:
        self.stuck = False
        self._let_go = let_go
        self._beat = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def beat(self) -> None:
        self._beat.set()

    def end(self) -> None:
        self._ended = True
        self._beat.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended:
            if not self._beat.wait(2 * PATIENCE):
                self.stuck = True
                self._let_go()
            self._beat.clear()


class World(RuleBasedStateMachine):
    """What the rules have in common."""

    def __init__(self) -> None:
        super().__init__()
        diary.begin()
        faulthandler.dump_traceback_later(GIVE_UP, exit=True)
        self.kernels = Kernels()
        self.queues: list[Queue] = []
        for device, count in STREAMS.items():
            for number in range(count):
                self.queues.append(Queue(f"{device}.s{number}", gpumem.Stream(device)))
            legacy = gpumem.Stream.from_handle(device, LEGACY)
            self.queues.append(Queue(f"{device}.legacy", legacy))
        self.arenas: list[Arena] = []
        self.budgets: list[Budget] = []
        self.blocks: list[Block] = []
        self.freed: list[Freed] = []
        self.holds: list[Hold] = []
        self.counters: list[Any] = []  # of timelines.py
        self.sessions: list[Any] = []  # of sessions.py
        self.graphs: list[Any] = []  # of captures.py
        self.captured: dict[Any, list[tuple[int, int]]] = {}  # memory of each graph
        self.steps = 0
        self.threads = False
        self.pools_retired = False  # graph pools, which the next call that may block releases
        self.look_every = 1  # statistics empty the threads' caches: always looking would hide them
        self.numbers = itertools.count()
        self.bytes = itertools.cycle(range(1, 251))
        self.pool = ThreadPoolExecutor(1)
        self.watch = Watch(self._let_go)

    # ---- choices ---------------------------------------------------------------------------------

    def some(self, of: Sequence[T], pick: int) -> T:
        return of[pick % len(of)]

    def some_block(self, of: Sequence[Block], pick: int) -> Block:
        """Return a block, mostly one with work that is still queued."""
        busy = [block for block in of if any(not use.possible for use in block.uses)]
        return self.some(busy if busy and pick % 4 else of, pick // 4)

    def queues_of(self, device: Any) -> list[Queue]:
        return [queue for queue in self.queues if queue.device == device]

    def legacy_of(self, device: Any) -> Queue:
        return next(queue for queue in self.queues_of(device) if queue.stream.ptr == LEGACY)

    def queue_of(self, stream: Any) -> Queue:
        """Return the queue of a stream; a new one for a stream that a session made."""
        for queue in self.queues:
            if queue.stream == stream:
                return queue
        self.queues.append(Queue(f"{stream.device}.own{len(self.queues)}", stream))
        return self.queues[-1]

    def open_arenas(self) -> list[Arena]:
        return [arena for arena in self.arenas if not arena.suspended]

    def blocks_with_work(self) -> list[Block]:
        """Blocks that a stream may use: the user has the Buffer, and the memory is there."""
        return [
            block
            for block in self.blocks
            if block.buffer is not None and not block.closed and not block.arena.suspended
        ]

    def on_thread(self, other: bool, call: Callable[[], T]) -> T:
        """Call on this thread or on another one."""
        return self.pool.submit(call).result() if other and self.threads else call()

    # ---- work ------------------------------------------------------------------------------------

    @property
    def calm(self) -> bool:
        """Whether everything queued must be done by now."""
        return all(queue.done for queue in self.queues)

    def everything_on(self, device: Any) -> list[Op]:
        return [op for queue in self.queues if queue.device == device for op in queue.last]

    def finish_everything(self) -> None:
        """Before a call that waits for the device, as its documentation says."""
        if not self.calm:
            note("    # everything queued is let go, because the next call may wait for it")
            self._let_go()
            self.settle()
            assert self.calm

    def release_pools(self) -> None:
        """Before such a call: their regions go back behind all work of the device."""
        if self.pools_retired:
            self.finish_everything()
            release_retired()
            self.pools_retired = False

    def _let_go(self) -> None:
        for hold in self.holds:
            hold.open()
        for counter in self.counters:
            counter.let_go()

    def order(
        self, block: Block, queue: Queue, *, to_free: bool = False, to_run: bool = False
    ) -> None:
        """Let a stream's later work come after what uses a block, unless gpumem does."""
        before = block.unordered(queue, to_free=to_free)
        if to_run:  # a run comes after what is queued on its memory's streams
            before = [op for op in before if op.queue is not block.own]
        for op in before:
            queue.stream.wait(op.event)
        if before:
            behind = queue.add(after=before)
            block.uses = [use for use in block.uses if use not in before] + [behind]

    def write(self, block: Block, queue: Queue) -> None:
        """Queue a write of a new byte."""
        byte = next(self.bytes)
        self.order(block, queue)
        self.kernels.fill(queue.stream, block.start, block.nbytes, byte)
        block.used_by(queue.add(), byte)

    def read(self, block: Block, queue: Queue, *, recorded: bool = False) -> None:
        """Queue a check of its bytes."""
        self.order(block, queue)
        what = f"{block} read on {queue}"
        self.kernels.check(queue.stream, block.start, block.nbytes, block.byte, what)
        block.used_by(queue.add(), recorded=recorded)

    # ---- blocks come and go ----------------------------------------------------------------------

    def placed(self, arena: Arena, buffer: Any, nbytes: int, queue: Queue, extra: int = 0) -> Block:
        """Enter a new block; nobody may have its memory, and nothing queued may use it."""
        block = Block(
            name=f"b{next(self.numbers)}",
            arena=arena,
            start=buffer.ptr,
            nbytes=nbytes,
            first=arena.piece_at(buffer.ptr) if extra else buffer.ptr,
            size=buffer.allocated_nbytes,
            requested=nbytes + extra,
            own=queue,
        )
        assert buffer.nbytes == nbytes, f"{block}: {buffer}"
        assert block.start % QUANTUM == 0, f"{block}: {buffer}"
        assert buffer.stream == queue.stream, f"{block}: {buffer.stream}, expected {queue}"
        for other in self.blocks:
            apart = block.end <= other.start or other.end <= block.start
            assert apart, f"{block} of {arena} lies over {other} of {other.arena}"
        for start, end in itertools.chain.from_iterable(self.captured.values()):
            assert block.end <= start or end <= block.start, f"{block} is memory of a graph"
        self._require_finished(block, queue)
        arena.handed_out(block)
        self.blocks.append(block)
        return block

    def _require_finished(self, block: Block, queue: Queue) -> None:
        behind = []
        if self.freed:
            self.settle()  # what may be done by now
        apart = []
        for freed in self.freed:
            if freed.end <= block.first or block.last <= freed.start:
                apart.append(freed)
                continue
            for op in freed.unfinished:
                block.uses.append(op)  # whoever has the memory after this block comes after it, too
                if op.queue is queue:
                    continue
                waits = block.arena.policy == "wait" and freed.arena is block.arena
                assert waits, f"{block} of {block.arena} is memory that {op.queue} still uses"
                behind.append(op)
            apart += freed.without(block)
        self.freed = apart
        self.may_wait(block.arena, queue, behind)

    def may_wait(self, arena: Arena, queue: Queue, behind: Sequence[Op] = ()) -> None:
        """An allocation may let its stream wait; one that is refused does not."""
        if arena.policy == "wait":
            queue.add(after=behind, perhaps=self.everything_on(queue.device))

    def dropped(self, block: Block, ref: Any) -> None:
        """Enter that a reference to its Buffer has gone."""
        block.refs.discard(ref)
        if not block.refs and not block.closed:
            block.freed_on = block.own
        if not block.live and block.leased:
            if any(not op.sure for op in block.leased):
                self.finish_everything()
            wait_for_releases()  # another thread gives it back, a moment after the work has ended
        self.ended_perhaps(block)

    def ended_perhaps(self, block: Block) -> None:
        """If nothing holds a block any more, enter that it was freed."""
        if block.live or block not in self.blocks:
            return
        self.blocks.remove(block)
        block.arena.took_back(block)
        ops = [op for op in block.uses if not op.sure]
        if ops:
            self.freed.append(Freed(block.arena, block.first, block.last, ops))

    def graph_is_gone(self, owner: Any, arena: Arena, queue: Queue) -> None:
        """Launches that are still queued go on using its memory."""
        self.pools_retired |= owner in self.captured
        for start, end in self.captured.pop(owner, []):
            ops = [op for op in queue.last if not op.possible]
            self.freed.append(Freed(arena, start, end, ops))

    # ---- after each rule -------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for what must be done by now, and compare what can be seen of it."""
        assert not self.watch.stuck, "a call waited for work that only this thread lets go"
        advance_all(self.queues)
        for queue in self.queues:
            queue.settle()
        for counter in self.counters:
            counter.check()
        assert not self.kernels.problems, self.kernels.problems[0]
        self.freed = [freed for freed in self.freed if freed.unfinished]

    def check_invariants(self, *_: Any) -> None:
        # Instead of an invariant, which would be named behind each step of a program.
        self.check()

    def check(self) -> None:
        self.settle()
        self.steps += 1
        if self.steps % self.look_every == 0:
            self.compare_the_books()
        self.watch.beat()

    def compare_the_books(self) -> None:
        for arena in self.arenas:
            if self.threads:
                arena.take_over_peak()
            arena.check()
        for budget in self.budgets:
            budget.check()

    def require_byte(self, block: Block) -> None:
        """Look at the memory itself, without a wait."""
        if not block.arena.suspended and block.byte_now is not None:
            require_bytes(block.start, block.nbytes, block.byte_now, f"{block}")

    @contextlib.contextmanager
    def refused(self, *errors: type[BaseException], arena: Arena | None = None) -> Iterator[None]:
        """Expect an error, after which everything is as it was."""
        try:
            yield
        except errors as error:
            note(f"    # {type(error).__name__}")
            error.with_traceback(None)  # whose frames hold what a run was given
        else:
            raise AssertionError(f"not refused, expected {errors}")
        if arena is not None:
            self.compare_the_books()

    # ---- the end ---------------------------------------------------------------------------------

    def teardown(self) -> None:
        failure = sys.exc_info()[1]
        try:
            if not self.watch.stuck:
                self._let_go()
            self._end()
        except Exception as error:
            failure = error
            raise
        finally:
            if isinstance(failure, Exception) and not isinstance(failure, Flaky):
                diary.keep(failure)
            self.watch.end()
            self.pool.shutdown()
            with contextlib.suppress(AssertionError):
                for queue in self.queues:  # no stream may call a function that is gone
                    wait_for(queue.stream)
                self.kernels.close()
            faulthandler.cancel_dump_traceback_later()

    def _end(self) -> None:
        self.settle()
        assert self.calm, "not everything is done, though all was let go"
        for arena in self.arenas:
            if arena.suspended:
                for budget in self.budgets:
                    budget.real.limit = None
                arena.limit = 0
                arena.real.set_limit(arena.limit)
                arena.real.wake()
                arena.suspended = False
        for block in self.blocks:
            self.require_byte(block)
        for session in list(self.sessions):
            session.close()
        for graph in list(self.graphs):
            graph.end()
        for block in list(self.blocks):
            block.buffer = None
            block.views.clear()
            self.dropped(block, "user")
        gc.collect()
        self.settle()
        self.compare_the_books()
        for counter in self.counters:
            counter.close()
        for arena in self.arenas:
            arena.real.check_invariants()
            arena.real.close()
            assert arena.real.stats().reserved == 0, f"{arena} is closed and holds memory"
        release_retired()
        for budget in self.budgets:
            for reservation in budget.reservations:
                if reservation.state == "pending":
                    reservation.cancel()
                elif reservation.state == "committed":
                    reservation.release()
        for budget in self.budgets:
            assert budget.real.used == 0, f"{budget}: {budget.real.holders()} at the end"


def array_over(buffer: Any) -> np.ndarray:
    """Return a view, which keeps the memory."""
    return np.frombuffer(buffer, np.uint8)
