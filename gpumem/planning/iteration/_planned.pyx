"""PlannedResource: blocks at planned offsets while a program repeats a recorded iteration."""

from contextlib import contextmanager

import numpy as np

cimport cython
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from gpumem._buffer cimport alignment_of, Buffer, buffer_of, MemoryResource, resource_adapt, size_of
from gpumem._core cimport Arena
from gpumem._native.arena cimport (
    ARENA_MISS, ARENA_OK, arena_place_fast, arena_place_slow, arena_places_init, Block, slot_drop,
    slot_retain,
)
from gpumem._native.bfc cimport NIL, Places, places_free, QUANTUM
from gpumem._native.driver cimport context_is_dead
from gpumem._support.columns cimport column_of

from gpumem._support.sizes import exact_size
from gpumem.config import ArenaConfig
from gpumem.errors import ClosedError, ConcurrentRunError, ConfigError
from gpumem.planning.iteration.recorded import IterationPlan, IterationReport


# An allocation of the plan: bytes, number of its stream, and the edges between which it lies.
cdef struct Planned:
    uint64_t nbytes
    uint64_t stream
    uint64_t begin
    uint64_t end


@cython.final
cdef class PlannedResource(MemoryResource):
    """Follows the plan of an iteration in one block; allocates from its upstream otherwise.

    The block, `plan.peak_bytes` of the upstream's memory, is allocated when the resource is made
    and freed by `close`. Inside ``with planned.iteration():`` the n-th allocation is compared with
    the plan, by size and stream, and placed at its planned offset. After the first mismatch the
    upstream serves the rest of that iteration, and `report` has the reason. Allocations outside of
    an iteration, persistent ones, and those of a captured graph go to the upstream and are not
    counted.

    A planned offset is used only if no block lives there and the allocation's stream may have it,
    by the rules of an arena (`ArenaConfig.stream_reuse`). A program may free its blocks late, in
    another order, on other streams or threads, or keep them beyond the iteration: then the upstream
    serves more blocks, and nothing else changes.

    Parameters
    ----------
    plan : IterationPlan
        A plan with at least one allocation.
    upstream : MemoryResource
        An `Arena`, for instance.
    stream_reuse : str, optional
        As of `ArenaConfig`; None: that of the upstream if it is an arena, else ``"completed"``.
    name : str, optional
        Name used in error messages and reports; the upstream's by default.

    Attributes
    ----------
    plan : IterationPlan
    upstream : MemoryResource
    ptr : int
        Address of the block.

    Raises
    ------
    ConfigError
        A plan without an allocation, or an invalid `stream_reuse`.
    ModelGraphError
        The plan is invalid: blocks overlap.
    OutOfMemoryError
        The upstream has no memory for the block.

    Examples
    --------
    >>> import gpumem
    >>> from gpumem.planning import PlannedResource, IterationRecording, plan
    >>> def step(resource):
    ...     a = resource.allocate(1000)
    ...     b = resource.allocate(500)
    ...     a.close()
    ...     c = resource.allocate(1000)
    >>> arena = gpumem.Arena("host")
    >>> recording = IterationRecording(arena)
    >>> step(recording.resource)
    >>> planned = PlannedResource(plan(recording.trace()), arena)
    >>> with planned.iteration():
    ...     step(planned)
    >>> planned.report
    IterationReport(planned=3, displaced=0, online=0, mismatch=None)

    Notes
    -----
    Safe to use from several threads; but threads that allocate at the same time do so in an order
    that a plan cannot predict. A block's `Buffer.resource` is the upstream, or an arena inside of
    this resource; buffers of both behave alike.
    """

    cdef readonly object plan
    cdef readonly MemoryResource upstream
    cdef Arena inner            # its one region is the block
    cdef Places places
    cdef object rows            # the array of `planned`
    cdef const Planned* planned
    cdef uint32_t count
    cdef uint32_t stream_count
    cdef uint32_t* slots        # number of a stream -> its retained slot in `inner`; NIL: none yet
    cdef uint32_t upcoming      # index of the next allocation
    cdef bint is_open           # inside of an iteration
    cdef bint follows           # inside of an iteration, before a mismatch
    cdef uint64_t served[3]     # planned, displaced, online
    cdef object mismatch

    def __init__(self, plan, MemoryResource upstream not None, *, stream_reuse=None, name=None):
        """Take the arguments that the class describes."""
        if self.memory is not None:
            raise TypeError("__init__ of PlannedResource called twice")
        if not isinstance(plan, IterationPlan):
            raise TypeError(f"plan must be an IterationPlan, not {type(plan).__name__}")
        if len(plan) == 0:
            raise ConfigError("the plan has no allocation: expected one or more")
        plan.verify()
        resource_adapt(self, upstream, name)
        self.plan = plan
        self.upstream = upstream
        self.inner = block_arena(upstream, plan, stream_reuse)
        try:
            self.read(plan)
        except BaseException:
            self.inner.close()  # a caller that keeps the exception would keep the block
            raise

    def __dealloc__(self):
        places_free(&self.places)
        free(self.slots)

    cdef int read(self, plan) except -1:
        """Turn the plan's columns into rows, one for each allocation."""
        ends = plan.offsets + (plan.sizes + 255) // 256 * 256
        edges = np.unique(np.concatenate(([0], plan.offsets, ends)))
        self.rows = np.column_stack((plan.sizes, plan.streams, np.searchsorted(edges, plan.offsets),
                                     np.searchsorted(edges, ends)))
        cdef const uint64_t* edge = <const uint64_t*>column_of(edges, len(edges), sizeof(uint64_t))
        cdef uint32_t i
        self.count = len(plan)
        self.planned = <const Planned*>column_of(self.rows, 4 * self.count, sizeof(uint64_t))
        self.stream_count = plan.streams.max() + 1
        self.slots = <uint32_t*>calloc(self.stream_count, sizeof(uint32_t))
        if self.slots == NULL or not arena_places_init(self.inner.core, &self.places, edge,
                                                       len(edges)):
            raise MemoryError("out of host memory while preparing a plan")
        for i in range(self.stream_count):
            self.slots[i] = NIL
        return 0

    # ---- blocks ----------------------------------------------------------------------------------

    def allocate(self, nbytes, stream=None, *, alignment=None, shareable=False, transport=None):
        """Allocate a block: at its planned offset inside of an iteration, or from the upstream.

        Parameters
        ----------
        nbytes, stream, alignment, shareable, transport
            As of the upstream's ``allocate``.

        Returns
        -------
        Buffer

        Raises
        ------
        ClosedError
            It is closed, or belongs to the parent of a fork.
        Exception
            The upstream's exceptions, unchanged.
        """
        cdef uint64_t size = size_of(nbytes, self)
        cdef uint64_t multiple = self.inner.extra + QUANTUM
        cdef Buffer buffer = None
        if alignment is not None:
            multiple = max(multiple, alignment_of(alignment))
        self.require_open()
        if self.is_open and size != 0 and not self.is_captured(stream):
            buffer = self.place_next(size, stream, 0 if shareable or transport else multiple)
        if buffer is not None:
            return buffer
        # Users' resources may lack these parameters.
        more = {"alignment": alignment, "transport": transport} | (
            {"shareable": True} if shareable else {})
        more = {name: value for name, value in more.items() if value is not None}
        return self.upstream.allocate(size, stream, **more)

    def allocate_persistent(self, nbytes):
        """Allocate a long-lived block from the upstream; see its ``allocate_persistent``."""
        self.require_open()
        return self.upstream.allocate_persistent(nbytes)

    cdef Buffer place_next(self, uint64_t size, object stream, uint64_t multiple):
        """Return the next block of the plan; None: the upstream serves it. Both are counted.

        `multiple` is the requested alignment; 0: no planned offset fits the request.
        """
        cdef uint32_t slot
        cdef const Planned* wanted
        cdef Block block
        self.inner.slot_of(stream, &slot)
        # Up to the count the interpreter lock is held: threads' allocations have one order.
        if not self.follows or not self.is_expected(size, slot):
            self.served[2] += 1
            return None
        wanted = &self.planned[self.upcoming]
        self.upcoming += 1
        if multiple == 0 or (self.places.base + self.places.edges[wanted.begin]) % multiple:
            self.served[1] += 1
            return None
        if not self.allocate_at(wanted, slot, &block):
            self.served[1] += 1
            return None
        self.served[0] += 1
        return buffer_of(self.inner, block.address, size, block.size, block.handle, slot)

    cdef bint allocate_at(self, const Planned* wanted, uint32_t slot, Block* block) noexcept:
        # On any failure the upstream serves the request, and raises if it is out of memory.
        cdef int status = arena_place_fast(self.inner.core, &self.places, wanted.begin, wanted.end,
                                           wanted.nbytes, slot, block)
        if status == ARENA_MISS:
            slot_retain(self.inner.core, slot)  # other threads run: the slot keeps its stream
            with nogil:
                status = arena_place_slow(self.inner.core, &self.places, wanted.begin, wanted.end,
                                          wanted.nbytes, slot, block)
                slot_drop(self.inner.core, slot)
        return status == ARENA_OK

    cdef bint is_expected(self, uint64_t size, uint32_t slot) except -1:
        """Compare an allocation with the plan; after the first mismatch the plan is not used."""
        cdef uint32_t number
        n = self.upcoming
        if n == self.count:
            return self.differs(f"{exact_size(size)} asked for after all {n} allocations of the "
                                "plan")
        if self.planned[n].nbytes != size:
            return self.differs(f"allocation {n} is of {exact_size(size)}, in the plan of "
                                f"{exact_size(self.planned[n].nbytes)}")
        number = self.planned[n].stream
        if self.slots[number] == slot or self.bind(number, slot):
            return True
        return self.differs(f"allocation {n} is for another stream than the plan's {number}")

    cdef bint differs(self, reason) except -1:
        self.follows = False
        self.mismatch = reason
        return False

    cdef bint bind(self, uint32_t number, uint32_t slot) noexcept:
        """Bind a stream to a number of the plan until the iteration ends; False if one is bound."""
        cdef uint32_t i
        if self.slots[number] != NIL:
            return False
        for i in range(self.stream_count):
            if self.slots[i] == slot:
                return False
        slot_retain(self.inner.core, slot)      # the slot keeps its stream
        self.slots[number] = slot
        return True

    cdef bint is_captured(self, object stream) except -1:
        # A captured graph's blocks come from the upstream's graph pool.
        cdef Arena arena
        cdef uint32_t slot
        if not isinstance(self.upstream, Arena):
            return False
        arena = <Arena>self.upstream
        if arena.captures is None:
            return False
        arena.slot_of(stream, &slot)
        return arena.captures.pool_of(arena, slot, False) is not None

    # ---- iterations ------------------------------------------------------------------------------

    @contextmanager
    def iteration(self):
        """Follow the plan from its beginning; a context manager that returns this resource.

        Raises
        ------
        ConcurrentRunError
            On entering: another iteration is running.
        ClosedError
            On entering: it is closed, or belongs to the parent of a fork.
        """
        self.require_open()
        if self.is_open:
            raise ConcurrentRunError(f"{self!r} is already in an iteration")
        self.is_open = self.follows = True
        self.upcoming = 0
        self.served = [0, 0, 0]
        self.mismatch = None
        try:
            yield self
        finally:
            self.end_iteration()

    cdef int end_iteration(self) except -1:
        cdef uint32_t i
        if self.follows and self.upcoming < self.count:
            self.mismatch = f"it ended after {self.upcoming} of {self.count} allocations"
        self.is_open = self.follows = False
        for i in range(self.stream_count):
            if self.slots[i] != NIL:
                slot_drop(self.inner.core, self.slots[i])
                self.slots[i] = NIL
        return 0

    @property
    def report(self):
        """Report of the running iteration, or of the last one."""
        return IterationReport(self.served[0], self.served[1], self.served[2], self.mismatch)

    # ---- the block and its upstream --------------------------------------------------------------

    @property
    def ptr(self):
        """Address of the block."""
        return self.places.base

    def shrink(self):
        """Shrink the upstream; see its ``shrink``. The block stays."""
        return self.upstream.shrink()

    def reset_stream(self, stream):
        """Declare a stream drained, here and in the upstream; see its ``reset_stream``."""
        self.inner.reset_stream(stream)
        self.upstream.reset_stream(stream)

    def stats(self):
        """Return the upstream's `Stats`, in which the block is in use."""
        return self.upstream.stats()

    def check_invariants(self):
        """Check every invariant of the block; see `Arena.check_invariants`."""
        self.inner.check_invariants()

    @property
    def is_arena(self):
        """Whether the upstream sub-allocates and can be shrunk."""
        return self.upstream.is_arena

    @property
    def closed(self):
        """Whether `close` was called."""
        return self.inner is None or self.inner.closed

    def close(self):
        """Free the block; the upstream stays open. Idempotent.

        Raises
        ------
        InUseError
            A buffer in the block, or a view of one, is still alive; nothing is changed.
        ConcurrentRunError
            An iteration is running.
        """
        if self.is_open and not context_is_dead(&self.driver_device.context):
            raise ConcurrentRunError(f"{self!r} is in an iteration: close it after the iteration")
        if self.inner is not None:
            self.inner.close()

    def __repr__(self):
        state = ", closed" if self.closed else ""
        return f"<gpumem.planning.PlannedResource of {self.plan!r} around {self.upstream!r}{state}>"

    cdef int require_open(self) except -1:
        if self.closed:
            raise ClosedError(f"{self!r} is closed")
        if context_is_dead(&self.driver_device.context):
            raise ClosedError(f"{self!r} belongs to the parent process, or the interpreter is "
                              "ending")
        return 0

    cdef int slot_of(self, object stream, uint32_t* slot) except -1:
        return self.upstream.slot_of(stream, slot)

    cdef uint64_t stream_at(self, uint32_t slot) noexcept:
        return self.upstream.stream_at(slot)

    cdef int require_awake(self) except -1:
        return self.upstream.require_awake()


cdef Arena block_arena(MemoryResource upstream, plan, stream_reuse):
    """Make an arena whose one region is a block of the upstream, of the size of the plan."""
    cdef uint32_t slot
    cdef Arena arena
    nbytes = plan.peak_bytes
    if stream_reuse is None:
        stream_reuse = (<Arena>upstream).config.stream_reuse if isinstance(
            upstream, Arena) else "completed"
    config = ArenaConfig(backing="regions", extend_strategy="same_as_requested", max_mem=nbytes,
                         stream_reuse=stream_reuse, oom_wait_ms=0)
    upstream.slot_of(None, &slot)
    default = upstream.streams.get(slot)
    if default is None:
        default = upstream.stream_at(slot)
    arena = Arena(upstream.memory, config, source=upstream, default_stream=default,
                  debug_heap=False, name=f"{upstream.name}, planned")
    arena.allocate(nbytes).close()
    return arena
