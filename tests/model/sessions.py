"""Rules of sessions: bindings, runs that nobody waits for, captured runs, and their ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition

import gpumem
from gpumem._testing.arenas import release_retired
from gpumem.errors import ClosedError, ConcurrentRunError, InUseError, OutOfMemoryError

from .books import Arena, Block
from .diary import note, rule
from .memory import MemoryRules
from .work import Op, Queue
from .world import LEGACY, picks

MIB = 1 << 20
MOST_SESSIONS = 2
DEVICE = "host:0"
# What a run's function does: what it adds, bytes of an output that it makes, with scratch memory.
# Mostly the same, as a captured run is launched only while the function is.
WORKS = st.sampled_from([*[(1, 1000, True)] * 4, (2, 64 << 10, False), (1, 300_000, True)])
kinds = st.sampled_from(["default", "environment", "private"])
kinds_of_options = st.sampled_from(["", "unified", "user's stream", "graph"])


class FailsOnPurpose(Exception):
    """Raised by a run's function."""


class Session:
    """A session, what is bound, and the results of its last run."""

    def __init__(self, name: str, options: Any, environment: Any = None) -> None:
        self.name = name
        self.real = gpumem.Session(DEVICE, options, environment)
        self.environment = environment
        self.captures = self.real.options.enable_cuda_graph
        self.input: Block | None = None
        self.output: Block | None = None  # bound; None: a new one in each run
        self.made: Block | None = None  # what a captured run writes again
        self.results: Block | None = None
        self.queue: Queue | None = None
        self.arena: Arena | None = None  # of scratch, and of outputs that runs make
        self.functions: dict[Any, Callable[[Any], None]] = {}  # by what they do
        self.current: Run | None = None
        self.bindings = 0
        self.graph: Any = None  # the function and bindings of the last run, which may be captured

    def __str__(self) -> str:
        return self.name

    def ref(self, what: str) -> tuple[str, str]:
        """What a block's `refs` hold for this session."""
        return self.name, what


class SessionRules(MemoryRules):
    """Sessions."""

    @precondition(lambda self: len(self.sessions) < MOST_SESSIONS)
    @rule(arena=picks, stream=picks, block=picks, kind=kinds, options=kinds_of_options)
    def make_a_session(self, arena, stream, block, kind, options):
        usable = [
            each
            for each in self.open_arenas()
            if str(each.real.memory) == DEVICE and each.owner is None and not each.passes
        ]
        if kind != "private" and not usable:
            return
        self.release_pools()
        name = f"session{next(self.numbers)}"
        given: dict[str, Any] = {
            "": {},
            "unified": {"use_ep_level_unified_stream": True},
            "user's stream": {
                "user_compute_stream": self.some(self.queues_of_device(), stream).stream
            },
            "graph": {"enable_cuda_graph": True},
        }[options]
        if kind == "private":
            given = given | {"private_arena": True, "arena": {"max_mem": 64 * MIB}}
            session = Session(name, given)
            real = session.real.allocator()
            session.arena = Arena(f"{name}'s arena", real, limit=64 * MIB, owner=session)
            self.arenas.append(session.arena)
        else:
            chosen = self.some(usable, arena)
            if kind == "default":
                with gpumem.using_resource(chosen.real):
                    session = Session(name, given)
            else:
                environment = gpumem.Environment()
                environment.register("host", chosen.real)
                session = Session(name, given, environment)
            session.arena = chosen
        session.real.bind_output("y")
        session.queue = self.queue_of(session.real.compute_stream)
        session.close = lambda: self.end(session)
        self.sessions.append(session)
        note(f"    # {session} on {session.queue}, {session.arena}")
        if self.bindable():
            self.bind(session, self.some(self.bindable(), block))

    def queues_of_device(self) -> list[Queue]:
        mine = self.queues_of(gpumem.Device(DEVICE))
        return [queue for queue in mine if queue.stream.ptr != LEGACY]

    # ---- bindings --------------------------------------------------------------------------------

    @precondition(lambda self: self.sessions and self.bindable())
    @rule(session=picks, block=picks)
    def bind_an_input(self, session, block):
        session = self.some(self.sessions, session)
        self.bind(session, self.some(self.bindable(), block))

    def bind(self, session: Session, block: Block) -> None:
        note(f"    # {block} to {session}")
        session.real.bind_input("x", gpumem.from_dlpack(block.buffer))
        block.refs.add(session.ref("x"))
        before, session.input = session.input, block
        self.rebound(session, before, block, "x")

    @precondition(lambda self: self.sessions and self.bindable())
    @rule(session=picks, block=picks)
    def bind_an_output(self, session, block):
        session = self.some(self.sessions, session)
        block = self.some(self.bindable(), block)
        note(f"    # {block} to {session}")
        session.real.bind_output("y", gpumem.from_dlpack(block.buffer))
        block.refs.add(session.ref("y"))
        before, session.output = session.output, block
        self.rebound(session, before, block, "y")

    @precondition(lambda self: self.sessions)
    @rule(session=picks)
    def let_runs_make_the_output(self, session):
        session = self.some(self.sessions, session)
        session.real.bind_output("y")
        before, session.output = session.output, None
        self.rebound(session, before, None, "y")

    @precondition(lambda self: any(session.input for session in self.sessions))
    @rule(session=picks, to=st.sampled_from(["a new block", "a new block", "the end"]), own=picks)
    def free_what_a_run_reads(self, session, to, own):
        """Free a bound input, perhaps with runs unfinished, and ask for as much at once."""
        session = self.some([each for each in self.sessions if each.input], session)
        block = session.input
        if to == "the end" and session.arena.owner is session:
            return
        if to == "the end":
            note(f"    # {session}, then {block}")
            self.end(session, drop=bool(own % 2))
        else:
            stream = self.some(self.queues_of(block.arena.device), own)
            made = self.allocate_once_more(block, stream)
            if made is None or made.buffer is None:  # a callback under pressure may have freed it
                return
            self.bind(session, made)
        if block.buffer is not None:
            self.give_back(block, "drop", block.own)
        if not block.arena.suspended:
            self.allocate_once_more(block, block.own)

    def bindable(self) -> list[Block]:
        """Blocks whose end does not wait: a binding may be the last that holds one."""
        return [block for block in self.blocks_with_work() if not block.arena.passes]

    def rebound(self, session: Session, before: Block | None, now: Any, what: str) -> None:
        if before is not None and before is not now:
            self.dropped(before, session.ref(what))
        session.bindings += 1
        if what == "y" and session.made is not None:
            made, session.made = session.made, None
            self.dropped(made, session.ref("made"))

    # ---- runs ------------------------------------------------------------------------------------

    @precondition(lambda self: self.sessions)
    @rule(
        session=picks,
        work=WORKS,
        synchronize=st.booleans(),
        fails=st.sampled_from([False, False, False, True]),
    )
    def run(self, session, work, synchronize, fails):
        session = self.some(self.sessions, session)
        if session.input is not None and self.is_ready(session):
            self.before_allocation(session.arena, 2 * work[1])
            if self.is_ready(session):  # a callback under pressure may have freed a block
                self.leave_a_closed_output(session)
                Run(self, session, work, fails).run(synchronize)

    def is_ready(self, session: Session) -> bool:
        """Whether a run is correct: its memory is there."""
        bound = [block for block in (session.input, session.output) if block is not None]
        if session.arena.suspended or any(block.arena.suspended for block in bound):
            return False
        if session.output is session.input:
            return False
        if any(block.closed for block in bound):
            with self.refused(ClosedError):
                session.real.run(lambda context: context.output("y", 1, "u1"))
            return False
        return True

    def leave_a_closed_output(self, session: Session) -> None:
        """In place of an output that the user closed a run makes a new one, and a new graph."""
        made = session.made
        if made is not None and made.closed:
            if session in self.captured:
                self.finish_everything()  # the run may release its memory
            self.retire_graph(session)
            session.made = None
            self.dropped(made, session.ref("made"))

    @precondition(lambda self: any(session.results for session in self.sessions))
    @rule(session=picks)
    def keep_the_result(self, session):
        session = self.some([each for each in self.sessions if each.results], session)
        outputs = session.real.outputs()
        block = session.results
        if block.closed or block.buffer is not None or "y" not in outputs:
            return
        assert outputs["y"].ptr == block.start, f"{session} shows another tensor than {block}"
        block.buffer = outputs["y"].buffer
        block.refs.add("user")

    # ---- the end ---------------------------------------------------------------------------------

    @precondition(lambda self: self.sessions)
    @rule(session=picks, drop=st.booleans())
    def close_a_session(self, session, drop):
        session = self.some(self.sessions, session)
        note(f"    # {session}")
        self.end(session, drop=drop)

    def end(self, session: Session, *, drop: bool = False) -> None:
        """Close or drop it, perhaps with runs unfinished."""
        if session.arena.owner is session:
            self.finish_everything()  # its arena is closed with it
        self.sessions.remove(session)
        session.functions.clear()
        if session.environment is not None and not drop:
            with self.refused(InUseError):
                session.environment.close()
        if not drop:
            session.real.close()
            with self.refused(ClosedError):
                session.real.run(lambda context: None)
        self.retire_graph(session)
        session.real = None
        if session.environment is not None:
            session.environment.close()
            assert not session.arena.real.closed
        for block, what in (
            (session.input, "x"),
            (session.output, "y"),
            (session.results, "results"),
            (session.made, "made"),
        ):
            if block is not None:
                self.dropped(block, session.ref(what))
        self.end_private_arena(session, closed=not drop)

    def end_private_arena(self, session: Session, *, closed: bool) -> None:
        arena = session.arena
        if arena.owner is session and not arena.live:
            assert arena.real.closed or not closed, f"{session} left its arena open"
            self.arenas.remove(arena)
            del arena.real
            release_retired()  # now, while everything is done: the driver's free waits
        session.arena.owner = None

    def retire_graph(self, session: Session) -> None:
        """The graph is gone; launches that are still queued go on using its memory."""
        session.graph = None
        self.graph_is_gone(session, session.arena, session.queue)


class Run:
    """One run: it adds a number to the byte of the input, perhaps through scratch memory."""

    def __init__(
        self, world: SessionRules, session: Session, work: tuple[int, int, bool], fails: bool
    ) -> None:
        self.world = world
        self.session = session
        self.summand, nbytes, self.scratch = work
        self.source = session.input
        self.nbytes = nbytes if session.output is None else session.output.nbytes
        self.fails = fails
        self.output: Block | None = session.output or session.made
        self.queued = False

    def run(self, synchronize: bool) -> None:
        world, session = self.world, self.session
        world.order(self.source, session.queue, to_run=True)
        if self.output is not None:
            world.order(self.output, session.queue, to_run=True)
        world.settle()
        # A run waits for what is queued on the streams of its input and a bound output.
        used = [block for block in (self.source, self.output) if block is not None]
        self.before = tuple(op for block in used for op in block.own.last)
        # Under "wait" memory that is handed out may hold the run back.
        free = world.calm or session.arena.policy != "wait"
        ends = free and session.queue.done and all(op.sure for op in self.before)
        synchronize = synchronize and ends
        function = self.function()
        note(f"    # {session}: {self.source} + {self.summand}, {synchronize=}")
        session.current = self
        try:
            session.real.run(function, synchronize=synchronize)
        except FailsOnPurpose:
            note("    # failed on purpose")
            done, refusal = False, None
        except OutOfMemoryError as error:
            done, refusal = False, error.with_traceback(None)  # which holds the run's memory
        else:
            done, refusal = True, None
        session.current = None
        if not done:
            world.may_wait(session.arena, session.queue)
            if not self.queued:
                session.queue.add(after=self.before)  # it had been ordered before it failed
        for block in (self.source, self.output):
            if block is not None and block.arena.device != session.queue.device:
                block.leased.update(session.queue.last)
        if done:
            self.succeeded(synchronize)
        else:
            world.retire_graph(session)
        if self.output is not None:
            world.dropped(self.output, session.ref("run"))
        if refusal is not None:
            world.require_truth(session.arena, self.nbytes, refusal)

    def function(self) -> Callable[[Any], None]:
        """Return one object for the same work, by which a captured run is known again."""
        session = self.session
        key = (self.summand, self.nbytes, self.scratch)
        if session.graph != (key, session.bindings):
            if session in self.world.captured:
                self.world.finish_everything()  # the run may release its memory
            self.world.retire_graph(session)
            session.graph = (key, session.bindings)
        return session.functions.setdefault(key, lambda context: session.current.work(context))

    def work(self, context: Any) -> None:
        """Queue the work; while it is captured, nothing is done yet."""
        session, captures = self.session, context.stream.capturing
        x = context.inputs["x"]
        assert x.ptr == self.source.start, f"{session} has {x}, bound was {self.source}"
        if session.real.options.unified_stream or session.captures:
            with self.world.refused(ConcurrentRunError):
                session.real.run(lambda context: None)
        y = context.output("y", self.nbytes, "u1")
        if not captures:
            self.enter_output(y.buffer)
        origin = (x.ptr, x.nbytes)
        if self.scratch:
            with context.allocator.allocate(self.nbytes) as scratch:
                temporary = self.enter_scratch(scratch, captures)
                self.world.kernels.add(context.stream, (scratch.ptr, self.nbytes), origin, 0)
                origin = (scratch.ptr, self.nbytes)
                self.world.kernels.add(context.stream, (y.ptr, y.nbytes), origin, self.summand)
                if temporary is not None:
                    temporary.used_by(self.enter_work())
            if temporary is not None:
                self.world.dropped(temporary, "run")
        else:
            self.world.kernels.add(context.stream, (y.ptr, y.nbytes), origin, self.summand)
            if not captures:
                self.enter_work()
        if self.fails:
            raise FailsOnPurpose

    def enter_output(self, buffer: Any) -> None:
        session = self.session
        if self.output is None or (self.output is session.made and buffer.ptr != self.output.start):
            self.output = self.world.placed(session.arena, buffer, self.nbytes, session.queue)
        self.output.refs.add(session.ref("run"))
        if session.captures and session.output is None and session.made is not self.output:
            before, session.made = session.made, self.output
            self.output.refs.add(session.ref("made"))
            if before is not None:
                self.world.dropped(before, session.ref("made"))

    def enter_scratch(self, buffer: Any, captures: bool) -> Block | None:
        if captures:  # the graph pool's, as long as there is the graph
            place = (buffer.ptr, buffer.ptr + self.nbytes)
            self.world.captured.setdefault(self.session, []).append(place)
            return None
        temporary = self.world.placed(self.session.arena, buffer, self.nbytes, self.session.queue)
        temporary.refs.add("run")
        return temporary

    def enter_work(self) -> Op:
        """Note the work of the run, or of the launch of a graph."""
        op = self.session.queue.add(after=self.before)
        self.source.used_by(op, recorded=True)
        self.output.used_by(op, (self.source.byte + self.summand) % 256, recorded=True)
        self.queued = True
        return op

    def succeeded(self, synchronize: bool) -> None:
        world, session = self.world, self.session
        if not self.queued:
            self.enter_work()
        before, session.results = session.results, self.output
        self.output.refs.add(session.ref("results"))
        if before is not None and before is not self.output:
            world.dropped(before, session.ref("results"))
        if synchronize:
            world.settle()
            assert session.queue.done
            world.require_byte(self.output)
