"""Graph pools as Python objects."""

from operator import index
from weakref import WeakSet

cimport cython
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from gpumem._arena.arena cimport Arena
from gpumem._arena.open cimport count_of
from gpumem._arena.status cimport raise_status
from gpumem._arena.tags cimport arena_of_tag, arenas_of_tags, close_if_idle, hold, let_go
from gpumem._buffer cimport Buffer
from gpumem._native.arena.api cimport (
    arena_admits, ARENA_CLOSED, arena_context, arena_counts_now, arena_events, arena_is_graph_pool,
    arena_stream_handle, arena_stream_state, ArenaCore, ArenaCounts, pool_adopt, pool_begin,
    pool_retain_with, slot_drop, slot_retain, STATE_CLOSING, STREAM_NAMED,
)
from gpumem._native.driver cimport check, context_is_dead, CUgraph, CUresult, stream_captures
from gpumem._support.events cimport event_source_name

from gpumem._arena import reports
from gpumem._support.releases import release_retired
from gpumem._support.sizes import format_size
from gpumem._support.texts import counted
from gpumem.errors import ClosedError, ConfigError, GpumemError, InUseError


@cython.final
cdef class GraphPool:
    """Memory for what is captured into graphs; made by `Arena.capture`.

    A block allocated on a served stream during a capture comes from here and, freed or not, is
    never used outside of the pool: a graph writes to it whenever it is launched. Inside one
    capture a freed block is used again by its own stream. Later captures into the same pool use it
    again too, unless work that was queued outside of a capture may still use it; their graphs must
    then be launched one after another, in the order of capture, never at once.

    Blocks that are allocated under a tag (`Arena.tag`) have it: the pool sleeps with `Arena.sleep`,
    tag by tag, and its graphs are valid again after `Arena.wake`.

    The pool keeps its memory until it is closed, or until it is dropped and the graphs it is
    retained with, and their last instances, have ended. Its memory is separate from its arena's;
    ``max_mem`` bounds both together. The pool of a paged arena has pages, which move within a
    capture to where a block needs them, and stay mapped for the graph at each address that they
    had.

    Attributes
    ----------
    arena : Arena
        The arena it belongs to.

    Examples
    --------
    >>> import gpumem
    >>> arena, stream = gpumem.Arena("host"), gpumem.Stream("host")
    >>> with arena.capture(stream) as pool:
    ...     arena.allocate(4096, stream).close()     # the graph may write it at every launch
    >>> arena.allocate(4096, stream).ptr in [block.address for block in pool.blocks()]
    False
    """

    def __init__(self):
        raise TypeError("a GraphPool is made by an arena's capture()")

    @property
    def name(self):
        """The name of the arena that holds its memory; used in error messages and reports."""
        return required(self).name

    @property
    def closed(self):
        """Whether `close` has released all memory."""
        return required(self).closed

    @property
    def capturing(self):
        """Whether it serves a stream now."""
        return bool(self.serving)

    @property
    def num_graphs(self):
        """How many graphs it is retained with: each, with its instances, counts once."""
        cdef ArenaCounts counts
        required(self)
        arena_counts_now(self.core, &counts)
        return counts.graphs

    def add_stream(self, stream):
        """Serve another stream, which joined the capture by waiting for an event of it.

        The stream is served until the capture's context ends. A block of one captured stream is not
        reused by another one inside the capture.

        Raises
        ------
        InUseError
            The stream is served already, or this pool serves no capture now.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> stream, side = gpumem.Stream("host"), gpumem.Stream("host")
        >>> with arena.capture(stream) as pool:
        ...     side.wait(stream.record())
        ...     pool.add_stream(side)
        ...     buffer = arena.allocate(1000, side)
        >>> pool.stats().requested_in_use
        1000
        """
        required(self)
        if not self.serving:
            raise InUseError(f"no stream can join {self.name!r}: it is not capturing")
        serve_named(self, stream)

    def retain_with(self, graph):
        """Keep the pool's memory as long as a graph or an instance of it exists.

        Parameters
        ----------
        graph : int or CUgraph
            The native graph, complete or still being captured. Retain it before instantiating:
            earlier instances do not retain the pool.

        Raises
        ------
        TypeError, ValueError
            `graph` is not a handle.
        ClosedError
            The pool is closed.
        DriverError
            The driver refused, or has no user objects.
        """
        if required(self).closed:
            raise ClosedError(f"{self.name!r} is closed")
        retain_with(self, graph_handle(graph))

    def stats(self):
        """Return the counters of this moment as `Stats`; those of all tags together."""
        return reports.sum_of_stats([each.stats() for each in self.members()])

    def blocks(self):
        """Return every block, used and free, as a list of `BlockInfo` in address order."""
        found = [block for each in self.members() for block in each.blocks()]
        return sorted(found, key=lambda block: block.address)

    def snapshot(self):
        """Return the state of this moment, every block of it, as `gpumem.observe.Snapshot`."""
        required(self)
        from gpumem._snapshots.snapshot import snapshot

        return snapshot(self)

    def check_invariants(self):
        """Check every invariant of the pool's metadata, as `Arena.check_invariants`."""
        for each in self.members():
            each.check_invariants()

    def close(self):
        """Release the memory to the driver now. Idempotent.

        The caller ensures that no launch of a graph that uses it is queued or will follow.

        Raises
        ------
        InUseError
            A buffer is alive, a graph retains the pool, or a capture is under way.

        Examples
        --------
        >>> import gpumem
        >>> arena, stream = gpumem.Arena("host"), gpumem.Stream("host")
        >>> with arena.capture(stream) as pool:
        ...     arena.allocate(4096, stream).close()
        >>> pool.stats().reserved > 0
        True
        >>> pool.close()
        >>> pool.closed, pool.stats().reserved
        (True, 0)
        """
        if not required(self).closed:
            require_idle(self)
            held = []
            hold(self.members(), STATE_CLOSING, held)
            try:
                require_idle(self)      # again: nothing is allocated any more
                for each in self.members():
                    each.close()
            finally:
                let_go(held, STATE_CLOSING)

    @property
    def _homes(self):
        return self.members()

    cdef Arena part(self, Arena tagged):
        cdef Arena opened, part
        if tagged is None:
            return self.inner
        part = self.parts.get(tagged)
        if part is None:
            opened = open_pool_arena(self.arena)
            adopt(opened, tagged, self)
            part = self.parts.setdefault(tagged, opened)
            if part is not opened:      # another thread opened one meanwhile
                opened.close()
        return part

    cdef list members(self):
        required(self)
        return [self.inner, *self.parts.values()]

    def __repr__(self):
        return f"<gpumem.GraphPool {self.name!r}{', closed' if self.closed else ''}>"


@cython.embedsignature(False)     # its functions have signatures
class Capture:
    """The context in which a pool serves a stream; made by `Arena.capture`."""

    def __init__(self, pool, stream):
        self._pool = pool
        self._stream = stream
        self._entered = 0
        self._slot = None

    def __enter__(self):
        cdef GraphPool pool = self._pool
        if pool.closed:
            raise ClosedError(f"{pool.name!r} is closed")
        # The first context of a capture: blocks of earlier captures become reusable.
        if not pool.serving:
            with nogil:
                pool_begin(pool.core)
        self._slot = serve_named(pool, self._stream)
        pool.contexts += 1
        self._entered += 1
        return pool

    def __exit__(self, kind, error, trace):
        # Streams that joined end with the last context. Nothing here allocates: a context that
        # cannot end would serve the stream for good.
        cdef GraphPool pool = self._pool
        if not self._entered:
            raise GpumemError(f"this capture into {pool.name!r} is not entered")
        self._entered -= 1
        pool.contexts -= 1
        captures_of(pool.arena).end(pool, None if pool.contexts == 0 else self._slot)


@cython.final
cdef class Captures:
    """Which pools serve which streams of one arena."""

    def __cinit__(self):
        self.served = {}
        self.pools = WeakSet()

    cdef GraphPool pool_of(self, Arena arena, uint32_t slot, bint capturing):
        cdef GraphPool pool = self.served.get(slot)
        cdef uint64_t capture
        cdef CUgraph graph = NULL
        if pool is None and not capturing:
            return None
        if pool is not None and pool.capture == 0:
            return pool                 # until its context ends
        # A pool that the arena opened serves one capture: is it still that one?
        capture = capture_on(arena.core, slot, &graph)
        if pool is not None and pool.capture != capture:
            self.end(pool, None)
            pool = None
        if pool is None and capture != 0:
            pool = self.join(arena, slot, capture, <uintptr_t>graph)
        return pool

    cdef GraphPool join(self, Arena arena, uint32_t slot, uint64_t capture, uint64_t graph):
        # The user opened no pool for this capture: the arena opens one for all its streams.
        cdef GraphPool pool = None
        for pool in self.served.values():
            if pool.capture == capture:
                break
        else:
            pool = open_pool(arena)
            # This comes first, so that no pool is left where the driver has no user objects.
            retain_with(pool, graph)
            pool.capture = capture
        self.serve(arena, slot, None, pool)
        return pool

    cdef int serve(self, Arena arena, uint32_t slot, object stream, GraphPool pool) except -1:
        # A pool that the arena opened may have served a capture that is over.
        cdef GraphPool before = self.served.get(slot)
        if before is not None and not self.end_if_over(before):
            raise InUseError(f"stream {arena.stream_at(slot):#x} already allocates from a graph "
                             f"pool of {arena.name!r}")
        # Another thread may close the pool meanwhile.
        if arena_admits(pool.core) == ARENA_CLOSED:
            raise_status(pool.inner, 0, 0, slot, ARENA_CLOSED)
        # The slot keeps its number while the pool serves the stream.
        slot_retain(arena.core, slot)
        try:
            self.pools.add(pool)
            pool.serving[slot] = stream
            self.served[slot] = pool
        except MemoryError:
            pool.serving.pop(slot, None)
            slot_drop(arena.core, slot)
            raise
        return 0

    cdef int end(self, GraphPool pool, object slot) except -1:
        if slot is not None:
            self.end_slot(pool, slot)
        while slot is None and pool.serving:
            for each in pool.serving:       # an iterator would be an allocation
                self.end_slot(pool, each)
                break
        # Users cannot refer to a pool that the arena opened: without a graph it is not needed.
        if pool.capture and not pool.serving:
            for inner in pool.members():
                close_if_idle(inner)
        return 0

    cdef int end_slot(self, GraphPool pool, object slot) except -1:
        del self.served[slot], pool.serving[slot]
        slot_drop(pool.arena.core, slot)
        return 0

    cdef bint end_if_over(self, GraphPool pool) except -1:
        # The end of the capture that the arena opened a pool for is found by the next query.
        cdef CUgraph graph
        if pool.capture == 0 or any([capture_on(pool.arena.core, slot, &graph) == pool.capture
                                     for slot in pool.serving]):
            return False
        self.end(pool, None)
        return True


# ---- an arena's use of its pools -----------------------------------------------------------------


cdef Captures captures_of(Arena arena):
    if arena.captures is None:
        arena.captures = Captures()
    return arena.captures


cdef object capture_into(Arena arena, object stream, object pool):
    if pool is None:
        pool = open_pool(arena)
    elif not isinstance(pool, GraphPool):
        raise TypeError(f"pool must be a GraphPool, not {type(pool).__name__}")
    elif (<GraphPool>pool).arena is not arena:
        raise ValueError(f"{pool!r} is not a pool of arena {arena.name!r}")
    return Capture(pool, stream)


cdef GraphPool open_pool(Arena arena):
    end_finished_captures(arena)
    return make_pool(arena, open_pool_arena(arena))


cdef Arena open_pool_arena(Arena arena):
    if arena.source is not None:
        raise ConfigError(f"arena {arena.name!r} has a source, and a graph pool takes memory "
                          "from the driver: allocate before the capture")
    return Arena(arena.memory, arena.config._of_graph_pool(arena.backing), budget=arena.budget,
                 count=count_of(arena), debug_heap=False, name=f"{arena.name}, graph pool")


cdef object serve_named(GraphPool pool, object stream):
    """Let a pool serve a stream; return the stream's slot."""
    cdef uint32_t slot
    pool.arena.require_open()
    pool.arena.slot_of(stream, &slot)
    key = slot
    captures_of(pool.arena).serve(pool.arena, slot, stream, pool)
    return key


cdef GraphPool pool_for(Arena arena, uint32_t slot, bint capturing):
    # The end of an earlier capture's pool runs other code: the slot keeps its stream.
    if arena.captures is None and not capturing:
        return None
    slot_retain(arena.core, slot)
    try:
        return captures_of(arena).pool_of(arena, slot, capturing)
    finally:
        slot_drop(arena.core, slot)


cdef Buffer take_captured(Arena arena, GraphPool pool, object nbytes, uint32_t slot,
                          object alignment):
    stream = arena.streams.get(slot)
    return pool.part(arena_of_tag(arena)).allocate(
        nbytes, arena.stream_at(slot) if stream is None else stream, alignment=alignment)


cdef list children_of(Arena arena):
    inner = arenas_of_tags(arena)
    for pool in open_pools(arena):
        inner += (<GraphPool>pool).members()
    return inner


cdef list open_pools(Arena arena):
    captures = <Captures>arena.captures
    return [] if captures is None else [pool for pool in captures.pools if not pool.closed]


cdef bint end_finished_captures(Arena arena) except -1:
    cdef Captures captures = arena.captures
    return captures is not None and any(
        [captures.end_if_over(pool) for pool in set(captures.served.values())])


cdef int reset_pools(Arena arena, uint32_t slot, object stream) except -1:
    for pool in open_pools(arena):
        if slot not in (<GraphPool>pool).serving:
            for each in (<GraphPool>pool).members():
                each.reset_stream(stream)
    return 0


cdef int require_idle_pools(Arena arena) except -1:
    for pool in open_pools(arena):
        captures_of(arena).end_if_over(pool)
        require_idle(pool)
    return 0


cdef uint64_t capture_on(const ArenaCore* core, uint32_t slot, CUgraph* graph) noexcept:
    """Return the driver's number of the capture that a stream is in; 0: none."""
    cdef uint64_t capture = 0
    cdef CUresult refusal
    # The stream may have ended.
    if arena_stream_state(core, slot) != STREAM_NAMED or not stream_captures(
            arena_context(core), arena_stream_handle(core, slot), &capture, graph, &refusal):
        return 0
    return capture


cdef int require_idle(GraphPool pool) except -1:
    # A fork's child may close what its parent has in use.
    if context_is_dead(arena_context(pool.core)):
        return 0
    if pool.serving:
        raise InUseError(f"{pool.name!r} cannot be closed: a capture uses it; end the "
                         "capture first")
    # A graph, or an instance of one, may be launched as long as it exists.
    if pool.num_graphs > 0:
        raise InUseError(f"{pool.name!r} cannot be closed; in use by "
                         f"{counted(pool.num_graphs, 'graph')}; drop graphs and their "
                         "instances first")
    stats = pool.stats()
    if stats.in_use:
        # Finished copies, and work for the interpreter, may not have freed their blocks yet.
        release_retired()
        stats = pool.stats()
    if stats.in_use:
        raise InUseError(f"{pool.name!r} cannot be closed; in use: {format_size(stats.in_use)} in "
                         f"{counted(stats.num_allocs - stats.num_frees, 'block')}; close the "
                         "buffers and drop their views first")
    return 0


cdef object required(GraphPool pool):
    # GraphPool.__new__ makes one without an arena.
    if pool.inner is None:
        raise TypeError("a GraphPool is made by an arena's capture(); this one was not")
    return pool.inner


cdef bint is_in_graph_pool(Buffer buffer) noexcept:
    return isinstance(buffer.home, Arena) and arena_is_graph_pool((<Arena>buffer.home).core)


cdef GraphPool make_pool(Arena arena, Arena inner):
    cdef GraphPool pool = GraphPool.__new__(GraphPool)
    pool.arena = arena
    pool.inner = inner
    pool.core = inner.core
    pool.serving = {}
    pool.parts = {}
    adopt(inner, arena, pool)
    return pool


cdef int adopt(Arena inner, Arena owner, GraphPool pool) except -1:
    # From here on the limit and the counters of the pool's arena include the pool.
    cdef ArenaCore* whole = NULL if inner is pool.inner else pool.core
    with nogil:
        pool_adopt(inner.core, owner.core, whole)
    for peer in owner.peers:
        inner.enable_peer(peer)
    event_source_name(arena_events(inner.core), arena_events(owner.core).memory, b"graph pool",
                      inner.name.encode("utf-8", "replace"))
    return 0


cdef int retain_with(GraphPool pool, uint64_t graph) except -1:
    cdef CUresult code
    with nogil:
        code = pool_retain_with(pool.core, <CUgraph><uintptr_t>graph)
    return check(arena_context(pool.core).table, code, "cuGraphRetainUserObject")


cdef uint64_t graph_handle(object graph) except? 0:
    # cuda-python's CUgraph converts to an int, but has no __index__. int() would accept these types
    # as well.
    if isinstance(graph, (bool, float, str)):
        raise TypeError(f"{graph!r} is not a graph: expected a native handle")
    try:
        number = index(graph) if hasattr(graph, "__index__") else int(graph)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{graph!r} is not a graph: expected a native handle") from error
    if not 0 < number < 1 << 64:
        raise ValueError(f"graph handle {number} is not an integer from 1 to 2**64 - 1")
    return number
