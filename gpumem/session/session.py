"""Sessions: inputs and outputs bound to memory, and runs that use them without needless copies.

A session runs work on one device, with inputs and outputs in memory that the caller chooses. If the
device can use that memory, the work uses it; else a copy is queued, before or after the work.
`Session.copy_plan` returns which, and why.

>>> import gpumem, numpy as np
>>> with gpumem.Session("host") as session:
...     session.bind_input("x", np.arange(3.0))
...     session.bind_output("y", "host/host_accessible")
...     def double(ctx):
...         x = ctx.inputs["x"]
...         np.multiply(x.numpy(), 2, out=ctx.output("y", x.shape, x.dtype).numpy())
...     session.run(double)
...     session.outputs()["y"].numpy()
array([0., 2., 4.])
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Unpack

from gpumem._buffer.buffer import Accesses
from gpumem._buffer.resource import MemoryResource
from gpumem._buffer.stream import Stream, _native_handle
from gpumem._copy.copy import order_behind, retain_until_done
from gpumem._defaults import get_default_resource, resource_from_config
from gpumem._resource.external import ExternalAllocator
from gpumem._resource.pool import DriverPool
from gpumem._support.arguments import refuse, refuse_keywords
from gpumem._support.closing import Closable
from gpumem._support.forks import ForkLock
from gpumem._support.signatures import ClassSignature
from gpumem._tensor import Tensor, asarray, copy, empty
from gpumem._tensor.create import _seen
from gpumem.adaptors._adaptor import Adaptor
from gpumem.config import ArenaConfig
from gpumem.device import CopyDecision, Device, MemoryInfo, decide_copy
from gpumem.errors import ClosedError, ConcurrentRunError, ConfigError
from gpumem.session.bindings import BoundInput, BoundOutput, RunContext
from gpumem.session.captured import CapturedRun
from gpumem.session.environment import (
    PRIVATE,
    Environment,
    named_settings,
    names_of,
    read_prefixes,
    warn_of_other_prefix,
    without_other_devices,
)
from gpumem.session.options import SessionOptions, SessionSettings

_held_externals: weakref.WeakSet[MemoryResource] = weakref.WeakSet()
_held_lock = ForkLock()


def _release_shared(
    resource: weakref.ref[MemoryResource], environment: weakref.ref[Environment] | None
) -> None:
    """Release a session's shared allocator, in a finalizer: on any thread and under any lock.

    The references are weak because a finalizer keeps its arguments, and those could not be
    collected together with the session. Objects collected with it need no release.
    """
    held = resource()
    if held is None:
        return
    if environment is None:
        _held_externals.discard(held)
    elif (shared_by := environment()) is not None:
        shared_by._release_soon(held)


class Session(Closable):
    """Work on one device with bound inputs and outputs.

    Parameters
    ----------
    device : Device or str
        The device of the work.
    options : SessionOptions or Mapping, optional
        A mapping is read by `SessionOptions.from_mapping`. Keys under another device's name,
        ``ep.cuda.<option>`` in a session on the host, are for sessions there: one mapping may serve
        several devices. Any other name than this device's is refused.
    environment : Environment, optional
        Source of the allocators; None: the default resources (see `get_default_resource`).
    **settings
        Fields of `SessionOptions`, in place of `options`.

    Attributes
    ----------
    device : Device
    options : SessionOptions
    environment : Environment or None
    closed : bool
        Whether `close` was called.

    Raises
    ------
    ConfigError
        An option is invalid here: it contradicts another, the shared arena or the device.
    NoAllocatorError
        The environment has no allocator for the device's memory.
    ValueError
        The device does not exist.

    Notes
    -----
    Safe to use from many threads, and many sessions at once. If no stream is unified, runs of one
    session may overlap, each on a stream of its own; they write to the same bound arrays then.

    Examples
    --------
    >>> import gpumem, numpy as np
    >>> with gpumem.Session("host", arena={"max_mem": "1MiB"}) as session:
    ...     session.bind_output("y", "host")
    ...     session.run(lambda ctx: ctx.output("y", 2, "int8").numpy().fill(7))
    ...     session.outputs()["y"].numpy()
    array([7, 7], dtype=int8)
    """

    __signature__: ClassVar[Any] = ClassSignature(SessionOptions)

    def __init__(
        self,
        device: Device | str,
        options: SessionOptions | Mapping[str, object] | None = None,
        environment: Environment | None = None,
        **settings: Unpack[SessionSettings],
    ) -> None:
        self._closed = True
        self.device = Device(device)
        self.memory = MemoryInfo(self.device)
        self.options = _options(options, settings, self.memory)
        self.environment = environment
        self._lock = ForkLock()
        self._inputs: dict[str, BoundInput] = {}
        self._outputs: dict[str, BoundOutput] = {}
        self._results: dict[str, Tensor] = {}
        self._bound = 0  # counts bindings
        self._running = 0
        self._private: MemoryResource | None = None
        self._end: weakref.finalize[Any, Session] | None = None  # if its allocator is shared
        if environment is not None and not isinstance(environment, Environment):
            raise TypeError(f"environment {environment!r} is not an Environment")
        if self.options.enable_cuda_graph:
            self._require_graphs()
        self._set_streams()
        self._own_memory = self._choose_allocator()
        if self.options.enable_cuda_graph:
            self._require_no_pool()
        self._captured_run = (
            CapturedRun(self._own_memory) if self.options.enable_cuda_graph else None
        )
        self._closed = False

    # ---- streams ---------------------------------------------------------------------------------

    def _set_streams(self) -> None:
        given = self.options.user_compute_stream
        if not self.options.has_user_compute_stream:
            self._compute = Stream(self.device)
        elif isinstance(given, Stream):
            if given.device != self.device:
                raise ConfigError(
                    f"invalid user_compute_stream = {given!r}: expected a stream of {self.device}"
                )
            self._compute = given
        else:
            owner = None if isinstance(given, int) else given
            self._compute = Stream.from_handle(self.device, _native_handle(given), owner)
        alone = not self.options.do_copy_in_default_stream
        self._copy = Stream(self.device) if alone else self._compute
        self._idle = [self._compute]  # for runs; more are made for runs that overlap

    def _require_graphs(self) -> None:
        capability = self.device.capabilities["graph_capture"]
        if not capability:
            raise ConfigError(
                f"invalid enable_cuda_graph = True on {self.device}: {capability.reason}"
            )

    def _require_no_pool(self) -> None:
        resource: Any = self._own_memory
        while isinstance(resource, Adaptor):
            resource = resource.upstream
        if isinstance(resource, DriverPool):
            self._release()
            raise ConfigError(
                f"invalid enable_cuda_graph = True with {resource!r}: a graph cannot retain its "
                "blocks; expected an arena"
            )

    @property
    def compute_stream(self) -> Stream:
        """The stream of the work: the user's, or the session's own."""
        return self._compute

    @property
    def copy_stream(self) -> Stream:
        """The stream of the copies; `compute_stream` unless `do_copy_in_default_stream` is off."""
        return self._copy

    # ---- allocators ------------------------------------------------------------------------------

    def _choose_allocator(self) -> MemoryResource:
        """Return the allocator of the device's memory in this session."""
        options = self.options
        if options.external_allocator is not None:
            external = self._take_external(options.external_allocator)
            self._release_at_end(external, None)
            return external
        settings = options.arena if isinstance(options.arena, Mapping) else {}
        wanted = without_other_devices({**settings, **options._arena_keys}, self.device)
        given = isinstance(options.arena, ArenaConfig) or wanted
        if options.private_arena or (self.environment is None and given):
            more = options.arena if isinstance(options.arena, ArenaConfig) else wanted
            own = (self.environment or Environment()).settings_for(self.memory, PRIVATE, more)
            self._private = resource_from_config(self.memory, own)
            return self._private
        if self.environment is None:
            return get_default_resource(self.memory)
        shared = self.environment.acquire(self.memory)
        try:
            self._require_like_shared(shared, wanted)
        except BaseException:
            self.environment.release(shared)
            raise
        self._release_at_end(shared, self.environment)
        return shared

    def _release_at_end(self, resource: MemoryResource, environment: Environment | None) -> None:
        shared_by = None if environment is None else weakref.ref(environment)
        self._end = weakref.finalize(self, _release_shared, weakref.ref(resource), shared_by)
        self._end.atexit = False

    def _take_external(self, given: Any) -> MemoryResource:
        if isinstance(given, tuple):
            alloc, free, empty_cache = given
            given = ExternalAllocator(alloc, free, empty_cache, memory=self.memory)
        resource: MemoryResource = given
        if (resource.memory.device, resource.memory.kind) != (self.device, self.memory.kind):
            raise ConfigError(
                f"invalid external_allocator = {resource!r}: expected one of {self.memory}"
            )
        with _held_lock:
            if resource in _held_externals:
                raise ConfigError(
                    f"invalid external_allocator = {resource!r}: another session uses it"
                )
            _held_externals.add(resource)
        return resource

    def _require_like_shared(self, shared: MemoryResource, wanted: Mapping[str, object]) -> None:
        arena = self.options.arena
        if arena is None and not wanted:
            return
        if isinstance(arena, ArenaConfig):
            explicit = {each.name: getattr(arena, each.name) for each in fields(arena)}
        else:
            given = read_prefixes(wanted)
            explicit = named_settings(given, shared.memory, PRIVATE)
            warn_of_other_prefix(given, PRIVATE, names_of(shared.memory))
        config = getattr(shared, "config", None)
        for name, value in explicit.items():
            actual = getattr(config, name, None)
            if not isinstance(config, ArenaConfig) or actual != value:
                raise ConfigError(
                    f"arena.{name} = {value!r} differs from the shared allocator's {actual!r} "
                    f"({shared!r}): expected that value, or private_arena = True"
                )

    def allocator(self, memory: MemoryInfo | Device | str | None = None) -> MemoryResource:
        """Return the allocator of a memory in this session; None is the device's own memory.

        Raises
        ------
        NoAllocatorError
            The environment has no allocator for it.
        ClosedError
            The session is closed.

        Examples
        --------
        >>> import gpumem
        >>> with gpumem.Session("host", {"private_arena": True}) as session:
        ...     session.allocator() is gpumem.get_default_resource("host")
        False
        """
        self._require_open()
        info = self.memory if memory is None else MemoryInfo.parse(memory)
        if (info.device, info.kind) == (self.device, self.memory.kind):
            return self._own_memory
        if self.environment is None:
            return get_default_resource(info)
        return self.environment._entry_of(info).resource

    # ---- bindings --------------------------------------------------------------------------------

    def bind_input(self, name: str, x: Any) -> None:
        """Bind an input, in place of the name's previous binding.

        Parameters
        ----------
        name : str
        x : Tensor, ndarray, or anything with DLPack or an array interface
            Used as it is, or copied to the device in each run; its memory is kept alive. A run
            uses its values at the beginning of the run. Lists and numbers share no memory: bind
            ``numpy.asarray`` of them.

        Raises
        ------
        TypeError, BufferError
            `x` shares no memory.
        ValueError
            `name` is an output.

        Examples
        --------
        >>> import gpumem, numpy as np
        >>> x = np.zeros(2)
        >>> with gpumem.Session("host") as session:
        ...     session.bind_input("x", x)
        ...     x[:] = 3, 4                  # before the run, so the run sees it
        ...     session.run(lambda ctx: print(ctx.inputs["x"].numpy()))
        [3. 4.]
        """
        # `asarray` would copy a list: later changes of it would not reach the runs.
        tensor = asarray(x) if hasattr(x, "__array_interface__") else _seen(x, "x")
        bound = BoundInput(tensor, decide_copy(self.device, tensor.memory))
        with self._lock:
            self._require_open()
            _require_name(name, self._outputs, "an output")
            self._inputs[name] = bound
            self._bound += 1

    def bind_output(self, name: str, memory: Any = None) -> None:
        """Bind an output, in place of the name's previous binding.

        Parameters
        ----------
        name : str
        memory : MemoryInfo, Device, str, MemoryResource or array, optional
            A memory or a resource: each run makes a tensor there. An array: each run writes to it,
            directly where the device can, else by a copy; its shape and dtype are the output's.
            None: the device's own memory.

        Raises
        ------
        TypeError, ValueError, BufferError
            `memory` is not one of these, or a read-only array; `name` is an input.
        NoAllocatorError
            The environment has no allocator for the memory.

        Examples
        --------
        >>> import gpumem, numpy as np
        >>> with gpumem.Session("host") as session:
        ...     session.bind_output("made", "host/host_accessible")      # a new tensor in each run
        ...     session.bind_output("given", np.zeros((2, 3)))           # always this array
        ...     list(session.copy_plan())
        ['made', 'given']
        """
        bound = self._bound_output(memory)
        with self._lock:
            self._require_open()
            _require_name(name, self._inputs, "an input")
            self._outputs[name] = bound
            self._bound += 1

    def _bound_output(self, memory: Any) -> BoundOutput:
        if isinstance(memory, MemoryInfo):  # its alignment counts, too
            return BoundOutput(memory, decide_copy(self.device, memory), self.allocator(memory))
        if memory is None or isinstance(memory, Device | str):
            memory = self.allocator(memory)
        if isinstance(memory, MemoryResource):
            return BoundOutput(memory.memory, decide_copy(self.device, memory.memory), memory)
        given = _seen(memory, "memory")
        if given.read_only:
            raise BufferError("a bound output is read-only: expected a writable array")
        return BoundOutput(given.memory, decide_copy(self.device, given.memory), None, given)

    def copy_plan(self) -> dict[str, CopyDecision]:
        """Return the decision for every input and output: "alias" or "copy", and the reason.

        Examples
        --------
        >>> import gpumem, numpy as np
        >>> with gpumem.Session("host") as session:
        ...     session.bind_input("x", np.zeros(4))
        ...     {name: decision.action for name, decision in session.copy_plan().items()}
        {'x': 'alias'}
        """
        with self._lock:
            bindings = self._inputs | self._outputs
            return {name: bound.decision for name, bound in bindings.items()}

    # ---- runs ------------------------------------------------------------------------------------

    def run(
        self,
        fn: Callable[[RunContext], object],
        *,
        synchronize: bool = True,
        shrink: bool | Iterable[MemoryInfo | Device | str] = False,
    ) -> None:
        """Run the work once.

        Parameters
        ----------
        fn : callable
            ``fn(ctx)`` queues the work on ``ctx.stream`` and gets its outputs from
            ``ctx.output``. Its exceptions are raised here; then `outputs` stays as it was.
        synchronize : bool, optional
            Wait until the work is done. False: the caller waits, with `compute_stream`. A run that
            overlaps others is on a stream of its own, and work queued on `compute_stream` from its
            end on comes after its work, too, unless either stream is being captured. There is no
            wait for a stream that is being captured. The work comes after the queued work of the
            streams of inputs and bound arrays; the CPU waits for that between the host device and
            a GPU.
        shrink : bool or iterable of MemoryInfo, Device or str, optional
            Shrink the allocator of the device's memory when the work is done, or the session's
            allocators of these memories: after a run that was larger than usual. It may wait for
            other runs' work, as a driver does before it takes memory back. As ONNX Runtime's
            ``memory.enable_memory_arena_shrinkage``.

        Raises
        ------
        TypeError
            `fn` is not callable, or `shrink` is neither a bool nor an iterable.
        NoAllocatorError
            The environment has no allocator of a memory in `shrink`.
        ConcurrentRunError
            Another run is active, and the stream is unified or runs are captured; nothing is
            changed.
        ValueError
            `fn` did not get a bound output from ``ctx.output``; or `shrink` of a run that does not
            wait, because of `synchronize` or a capture by the caller.
        DriverError
            With `enable_cuda_graph`: `fn` made a call that cannot be captured, such as a wait for
            the stream.
        ClosedError
            The session is closed, or the buffer of a bound array is.
        AsleepError
            Memory of a binding, of the captured work, or the session's own arena is asleep (see
            `Arena.sleep`): under the thread's tag, where memory is still to be allocated. Nothing
            is called or queued; after `Arena.wake` the run goes on as before.

        Notes
        -----
        With `enable_cuda_graph` the first run calls `fn` as usual; the second calls it once more,
        while the stream captures its work; later runs do not call `fn`: they launch the captured
        work, between the copies of inputs and outputs. Another `fn`, or a new binding, starts
        again with a first run. The outputs stay the same tensors; memory that `fn` allocated
        during the capture lives as long as the graph. A function that queues nothing on the stream
        is called every time. If the caller captures the user's stream, `fn` is called and becomes
        a part of the caller's graph.

        Examples
        --------
        >>> import gpumem, numpy as np
        >>> with gpumem.Session("host") as session:
        ...     session.bind_output("y")
        ...     def fill(ctx):
        ...         ctx.output("y", (2, 2), "int8").numpy().fill(7)
        ...     session.run(fill)
        ...     session.outputs()["y"].numpy().tolist()
        [[7, 7], [7, 7]]
        """
        if not callable(fn):
            refuse("fn", fn, "a callable")
        shrinking = self._to_shrink(shrink)
        if shrinking and not (synchronize and not self._compute.capturing):
            raise ValueError(
                f"invalid shrink = {shrink!r} for a run that does not wait: expected False, and "
                "shrink() of the allocators later"
            )
        stream, inputs, outputs, bound = self._begin()
        used: list[Tensor] = []
        try:
            with Accesses() as accesses:
                self._begin_accesses(inputs, outputs, accesses)
                context = self._queue(fn, (fn, bound), stream, inputs, outputs, used, accesses)
            if synchronize and not stream.capturing:
                stream.synchronize()
                used.clear()
            with self._lock:
                self._results = context._results
        finally:
            try:
                # Bindings may be replaced, and the session closed or dropped, while that work is
                # still queued. The memory of a graph that is being captured is the caller's.
                if used and not stream.capturing:
                    for tensor in used:
                        retain_until_done(tensor.buffer, stream)
                self._join(stream)
            finally:
                with self._lock:
                    self._running -= 1
                    # First, so that runs which do not overlap are on the stream that callers know.
                    self._idle.insert(0 if stream is self._compute else len(self._idle), stream)
        for resource in shrinking:
            resource.shrink()

    def _join(self, stream: Stream) -> None:
        """Let the stream that callers wait for come after a run on another one."""
        # An event of work outside of a capture, or inside of one, does not cross its border.
        apart = stream is not self._compute
        if apart and not stream.capturing and not self._compute.capturing:
            self._compute.wait(stream.record())

    def _to_shrink(self, shrink: Any) -> list[MemoryResource]:
        if isinstance(shrink, bool):
            return [self.allocator()] if shrink else []
        if isinstance(shrink, MemoryInfo | Device | str) or not isinstance(shrink, Iterable):
            raise TypeError(
                f"invalid shrink = {shrink!r}: expected True, False, or an iterable of memories"
            )
        return [self.allocator(memory) for memory in shrink]

    def _queue(
        self,
        fn: Callable[[RunContext], object],
        key: object,
        stream: Stream,
        inputs: Mapping[str, BoundInput],
        outputs: Mapping[str, BoundOutput],
        used: list[Tensor],
        accesses: Accesses,
    ) -> RunContext:
        """Queue the copies and the work of one run; append the tensors of the work to `used`."""
        launches = None if stream.capturing else self._captured_run
        if launches is not None:
            launches.begin(key, accesses)
        ready = {name: self._fed(each, stream, used) for name, each in inputs.items()}
        for each in outputs.values():
            each.order_behind(stream)

        def call(allocator: MemoryResource) -> RunContext:
            keep = self.options.enable_cuda_graph
            context = RunContext(ready, outputs, stream, allocator, keep=keep)
            try:
                fn(context)
                missing = [name for name in outputs if name not in context._results]
                if missing:
                    raise ValueError(
                        "the run did not call output() of its context for the bound outputs "
                        f"{missing}"
                    )
            except BaseException:
                used.extend(context._work.values())  # work queued before the error still runs
                raise
            return context

        context = call(self._own_memory) if launches is None else launches.run(key, stream, call)
        used.extend(context._work.values())
        for name, result in context._results.items():
            work = context._work[name]
            if work is not result:  # the work could not write the output directly
                # The buffer belongs to the run's stream, on which the copy is ordered too.
                copy(result, work, self._copies_for(stream))
        return context

    def _begin_accesses(
        self,
        inputs: Mapping[str, BoundInput],
        outputs: Mapping[str, BoundOutput],
        accesses: Accesses,
    ) -> None:
        """Refuse memory that is closed or asleep, and keep the rest awake until all is queued."""
        accesses.add_given(self._own_memory)
        for name, source in inputs.items():
            _add_bound(accesses, name, source.tensor)
            _add_kept(accesses, source.staged)
        for name, result in outputs.items():
            if result.given is not None:
                _add_bound(accesses, name, result.given)
            elif result.resource is not None:
                accesses.add_given(result.resource)
            _add_kept(accesses, result.made)
            _add_kept(accesses, result.staged)

    def _begin(self) -> tuple[Stream, dict[str, BoundInput], dict[str, BoundOutput], int]:
        with self._lock:
            self._require_open()
            if self._running and self.options.unified_stream:
                raise ConcurrentRunError(
                    "a run of this session is active: with a unified stream "
                    f"({self.options._why_unified()}) runs cannot overlap"
                )
            if self._running and self.options.enable_cuda_graph:
                raise ConcurrentRunError(
                    "a run of this session is active: with enable_cuda_graph runs share their "
                    "memory and cannot overlap"
                )
            stream = self._idle.pop(0) if self._idle else Stream(self.device)
            self._running += 1
            return stream, dict(self._inputs), dict(self._outputs), self._bound

    def _fed(self, bound: BoundInput, stream: Stream, used: list[Tensor]) -> Tensor:
        """Return an input where the device can use it, ready for work on the stream."""
        source = bound.tensor
        if bound.decision.action == "alias":
            order_behind(source.buffer, stream)
            used.append(source)
            return source
        copies = self._copies_for(stream)
        staged = bound.staged
        if staged is None or staged.buffer.closed or not self.options.enable_cuda_graph:
            if self._captured_run is not None:
                self._captured_run.forget()  # its graph reads the one before
            staged = empty(source.shape, source.dtype, resource=self._own_memory, stream=copies)
            bound.staged = staged if self.options.enable_cuda_graph else None
        elif copies != stream and not stream.capturing:
            copies.wait(stream.record())  # the launch before may still read it
        copy(staged, source, copies)
        order_behind(staged.buffer, stream)
        used.append(staged)
        return staged

    def _copies_for(self, stream: Stream) -> Stream:
        return stream if self._copy is self._compute else self._copy

    def outputs(self) -> dict[str, Tensor]:
        """Return the outputs of the run that ended last, by name, in the order of binding.

        Those in memory that the CPU can read have NumPy views without a copy (`Tensor.numpy`).

        Examples
        --------
        >>> import gpumem, numpy as np
        >>> with gpumem.Session("host") as session:
        ...     session.bind_output("y")
        ...     session.run(lambda ctx: ctx.output("y", 3, "int8").numpy().fill(1))
        ...     kept = session.outputs()["y"]
        >>> kept.numpy()                     # outlives the session
        array([1, 1, 1], dtype=int8)
        """
        with self._lock:
            return {name: self._results[name] for name in self._outputs if name in self._results}

    def device_for_outputs(self) -> list[Device | None]:
        """Return the device of the memory that each output lives in, in the order of binding.

        None: an output in ordinary host memory, of a session on a GPU.

        Examples
        --------
        >>> import gpumem
        >>> with gpumem.Session("host") as session:
        ...     session.bind_output("y", "host/managed")
        ...     session.device_for_outputs()
        [Device("host:0")]
        """
        with self._lock:
            memories = [bound.memory for bound in self._outputs.values()]
        gpu = self.device.type != "host"
        return [None if gpu and m.device.type == "host" else m.device for m in memories]

    # ---- life ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release bindings, results and allocators. Idempotent.

        Waits for no stream. A private arena is closed, unless a buffer of it is in use or work of
        the device still uses its memory: then it ends when nothing refers to it any more, as a
        dropped arena does. So do the arenas of a session that is dropped, which releases the same.
        The user's stream is not destroyed.

        A session in a cycle of references is dropped when the cycle is collected. While it has a
        block of an external allocator on its stream, as the outputs of a run, a callable that
        refers back to the session keeps it: close it.

        Raises
        ------
        ConcurrentRunError
            A run is active; nothing is changed.

        Examples
        --------
        >>> import gpumem
        >>> session = gpumem.Session("host", {"private_arena": True})
        >>> arena = session.allocator()
        >>> session.close()
        >>> arena.closed                     # no other session used it
        True
        """
        with self._lock:
            if self._closed:
                return
            if self._running:
                raise ConcurrentRunError("a run of this session is active: close it afterwards")
            self._closed = True
        self._inputs, self._outputs, self._results = {}, {}, {}
        self._idle = []
        self._captured_run = None
        try:
            self._release()
        except MemoryError:
            self._closed = False  # the caller closes it again
            raise
        # An arena that work of the device still uses ends when nothing refers to it any more.
        del self._own_memory
        self._private = None

    def _release(self) -> None:
        if self._end is not None:
            self._end.detach()
        if self._private is not None:
            self._private._close_if_idle()
        elif self.options.external_allocator is not None:
            _held_externals.discard(self._own_memory)
        elif self.environment is not None:
            self.environment.release(self._own_memory)

    def __repr__(self) -> str:
        return f"<gpumem.Session on {self.device}{', closed' * self._closed}>"


def _options(options: Any, settings: Mapping[str, Any], memory: MemoryInfo) -> SessionOptions:
    if options is None:
        return SessionOptions._of_keywords(settings)
    refuse_keywords("Session() with options", settings, ("environment",))
    if isinstance(options, SessionOptions):
        return options
    return SessionOptions._for_memory(options, memory.device, names_of(memory))


def _add_bound(accesses: Accesses, name: str, tensor: Tensor) -> None:
    if tensor.buffer.closed:
        raise ClosedError(f"{name!r} is bound to a closed buffer, {tensor.buffer!r}")
    accesses.add(tensor.buffer)


def _add_kept(accesses: Accesses, tensor: Tensor | None) -> None:
    # A tensor of the last run that the user closed is replaced by a new one.
    if tensor is not None and not tensor.buffer.closed:
        accesses.add(tensor.buffer)


def _require_name(name: object, others: Mapping[str, object], what: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"name {name!r} is not a string")
    if name in others:
        raise ValueError(f"{name!r} is already bound as {what}: use another name")
