"""Arena: argument checks and the interpreter lock's boundary."""


cimport cython
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from gpumem._budget cimport Relief, tell_errors, tell_of_crossings
from gpumem._buffer cimport (
    alignment_in, alignment_of, Buffer, buffer_of, empty_buffer, keeps_itself, Place,
    PLACE_EXPORTABLE, PLACE_FIXED, PLACE_SLEEPS, resource_init, size_of, Stream, stream_handle,
)
from gpumem._native.arena cimport (
    ALLOCATE_INTERRUPTIBLE, ALLOCATE_PERSISTENT, ALLOCATE_SHAREABLE, ALLOCATE_TRANSPORT,
    APART_SHAREABLE, APART_TRANSPORT, arena_allocate_fast, arena_allocate_slow, arena_can_sleep,
    ARENA_CAPTURING, arena_close, arena_close_wait, ARENA_CLOSED, arena_create, ARENA_DEAD,
    arena_drop, arena_free, arena_free_used, ARENA_IN_USE, ARENA_INTERRUPTED, arena_is_open,
    arena_lease, arena_leave, ARENA_MISS, arena_move_lease, ARENA_OK, ARENA_OVER_BUDGET,
    ARENA_OVER_LIMIT, arena_prepare, arena_record, arena_reset_stream, arena_shrink, arena_state,
    arena_stream, arena_stream_is_callers, ARENA_TAGGED, arenas_release_retired,
    arenas_release_retired_wait, ArenaSettings,
    Block, slot_drop, slot_retain, STATE_ASLEEP, STATE_CLOSED, tag_now,
)
from gpumem._native.backing cimport Backing, mapped_around
from gpumem._native.bfc cimport MOST_BYTES, QUANTUM
from gpumem._native.budget cimport budget_has_crossed
from gpumem._native.driver cimport context_is_dead, CUgraph, CUstream, DriverDevice
from gpumem._resource.arena cimport (
    add_listed_peers, ArenaBase, Asking, capture_on, Captures, choose_backing, count_of, GraphPool,
    join_budget, least_limit, make_heap, make_pool, make_source, name_upstream, note_registration,
    raise_in_use, raise_over_budget, raise_status, relieve, require_shareable, require_transport,
    retained_regions, settings_from, SleepingArena, source_keep, takes_pages, tensors_relieve,
    under_pressure, warn_of_idle_settings,
)
from gpumem._support.atomics cimport count_now
from gpumem._support.events cimport event_source_name, event_source_open, OWNER_ARENA
from gpumem._support.lock cimport lock_acquire, lock_release
from gpumem._support.lease cimport Lease, Uses, uses_free
from gpumem._support.process cimport process, raise_interrupt
from gpumem._support.streams cimport LEGACY_STREAM, PER_THREAD_STREAM

from gpumem._resource.arena.graph_pool import Capture
from gpumem._support.arguments import MISSING, refuse_call, refuse_keywords, require
from gpumem._support.releases import on_release, release_retired
from gpumem.config import ArenaConfig
from gpumem.device import MemoryKind
from gpumem.errors import ConfigError


cdef tuple KEYWORDS = ("memory", "config", "source", "budget", "count", "default_stream",
                       "debug_heap", "name")
cdef tuple VIRTUAL_KEYWORDS = ("shape", "dtype", "committed", "step", "ahead", "stream",
                               "on_pressure", "name")

cdef enum:
    LEGACY_SLOT = 1             # of the device's legacy default stream, in every arena


@cython.final
cdef class Arena(SleepingArena):
    """A stream-aware best-fit-with-coalescing arena over one memory.

    Takes regions from the driver and hands out blocks of them. A block is at least 256-byte
    aligned, rounded up to 256 bytes, and belongs to the stream it was allocated for; freeing it
    makes it available to the same stream at once, and to others when that is safe (see
    `ArenaConfig.stream_reuse`). On one stream, once warm, neither calls the driver.

    Safe to use from many threads. Dead after fork: the child makes its own. There, views of the
    host's memory stay: a page is copied when the child writes it, and shows the parent's writes
    until then; `shareable` blocks are one memory in both. Pinned memory is not inherited, a GPU's
    is not usable.

    Buffers keep their arena alive; an arena without references releases its memory, once its work
    is done, at a call of gpumem that may block (growth, shrink, close, `Device.free_bytes`).

    Parameters
    ----------
    memory : MemoryInfo, Device or str
        Where the bytes live: ``"cuda:0"``, ``"cuda:0/host_accessible"``, ``"host"``.
    config : ArenaConfig or Mapping, optional
        Settings; a mapping is read by `ArenaConfig.from_mapping`, for this memory: keys of another
        one are checked and left out.
    **settings
        Fields of `ArenaConfig` by name, as ``max_mem="1GiB"``. They replace those of an ArenaConfig
        in `config`; a mapping there may not give them other values.
    source : optional
        Where regions come from instead of the driver: an object with ``allocate(nbytes)``, which
        returns an address or None, and ``free(address, nbytes)``; a `MemoryResource` of the same
        memory, inside whose buffers the arena hands out blocks; or a pair of addresses of C
        functions, ``void *(size_t)`` and ``void (void *, size_t)``. Addresses are multiples of 256;
        a region that overlaps one that the arena has is refused, and not freed.
        None is a refusal: the arena requests less, then releases idle regions and tries again.
        One call at a time, on any thread, and only where the arena may block; before a region
        goes back, work queued on the device is waited for. A source must not call its arena. One
        that refers to its arena keeps it alive until it is closed.
    budget : Budget, optional
        What it charges, beside ``max_mem``: a block is refused rather than a limit passed. A
        small one makes "auto" backing regions, as a small ``max_mem`` does.
    count : {"reserved", "in_use"}
        What of it counts there: the bytes that it holds from the device, charged before it asks for
        them; or its blocks that are in use, padding included. A driver may round a region up, to
        2 MiB mostly, and does not say so: that is not counted.
    default_stream : stream, optional
        Used where a call names none; None is the device's legacy default stream.
    debug_heap : bool, DebugHeapOptions or Mapping, optional
        True, or settings of `gpumem.debugging.DebugHeapOptions`: a debug heap finds writes beyond
        blocks, before them and after their free, bad frees, and what was never freed, each with the
        places of allocation and free. It costs some microseconds and driver calls per block; reads
        it cannot see. None reads the environment variable ``GPUMEM_DEBUG_HEAP``. See `check_heap`.
    name : str, optional
        Name used in error messages and reports.

    Raises
    ------
    ValueError
        The memory does not exist here.
    TypeError
        `budget` is not a Budget, or a keyword is no setting.
    ConfigError
        A setting is invalid.
    DriverError
        The device does not answer.

    Warns
    -----
    ConfigWarning
        A setting other than the default has no effect on this arena; the text names it and why.

    Examples
    --------
    >>> import gpumem
    >>> arena = gpumem.Arena("host", max_mem="1GiB")
    >>> with arena.allocate(4096) as buffer:
    ...     memoryview(buffer)[0] = 7
    >>> arena.stats().in_use
    0

    Notes
    -----
    The algorithm is TensorFlow's and ONNX Runtime's BFC over a two-level bitmap (TLSF).
    """

    def __cinit__(self, memory=MISSING, config=None, *excess, source=None, budget=None,
                  count="reserved", default_stream=None, debug_heap=None, name=None, **given):
        cdef ArenaSettings settings
        cdef Backing backing
        # `__init__` has the signature. This runs first, so it refuses what does not fit it.
        if memory is MISSING or excess:
            refuse_call("Arena", "memory", "a memory such as 'cuda:0' or 'host'",
                        (memory, config, *excess), (), most=2, keywords=KEYWORDS)
        resource_init(self, memory, name)
        self.config = ArenaConfig._given(config, given, self.memory, KEYWORDS)
        self.config._require_arena()
        settings_from(self.config, &settings)
        self.extra = extra_for(alignment_in(self.memory))
        self.source = make_source(self, self.config, source)
        settings.paged = (self.source is None and self.config.numa_node is None
                          and takes_pages(self, self.config, least_limit(budget, count)))
        warn_of_idle_settings(self, self.config, settings.paged)
        with nogil:
            arenas_release_retired()
        choose_backing(self, self.config, self.source, &backing)
        self.core = arena_create(&settings, backing)
        if self.core == NULL:
            raise MemoryError("out of host memory while allocating arena metadata, or out of "
                              f"addresses on {memory}")
        self.stale, self.relievers = [], []
        add_listed_peers(self, self.core, self.config)
        join_budget(self, budget, count)
        if self.source is not None:
            source_keep(&self.core.backing, self.source)
        open_event_source(self)
        self.heap = make_heap(self.core, debug_heap, self)
        self.default_slot = LEGACY_SLOT
        if default_stream is not None:
            self.slot_of(default_stream, &self.default_slot)
            slot_retain(self.core, self.default_slot)
            self.default_per_thread = self.stream_at(self.default_slot) == PER_THREAD_STREAM
        self.ask_default(self.default_per_thread)

    def __init__(self, memory, config=None, *, source=None, budget=None, count="reserved",
                 default_stream=None, debug_heap=None, name=None, **settings):
        """Take the arguments that the class describes."""
        # __cinit__ has made it.

    def __del__(self):
        # Before the stream objects end, also where the collector of cycles ends all of them.
        with nogil:
            arena_leave(self.core)

    def __dealloc__(self):
        if self.core != NULL:
            arena_drop(self.core)

    # ---- blocks ----------------------------------------------------------------------------------

    def allocate(self, nbytes, stream=None, *, alignment=None, shareable=False, transport=None):
        """Hand out a block, as `MemoryResource.allocate` describes.

        Every block is aligned to at least 256 bytes, and to what its `MemoryInfo.alignment` says.
        If there is no room, the arena is as before.
        A `shareable` block has memory of its own that is cleared, never moves, and may be given to
        other processes by `gpumem.interop.export`. It takes whole pages (2 MiB of a device's
        memory, 4 KiB of the host's) and goes back to the driver after it is freed.

        A block for ``transport="ipc"`` is one driver allocation (``cuMemAlloc``) of its own, which
        the driver's legacy IPC, UCX and network cards can register; pages cannot be. It never
        moves, `sleep` leaves it where it is, and it goes back to the driver after it is freed.
        While a transport has it registered, hold `Buffer.register`. With ``backing="regions"``
        every block of an arena can be registered.

        Raises
        ------
        SourceError
            The arena's source failed, or gave what cannot be used; the arena is as before.
        ConfigError
            `shareable` or `transport`, of managed memory, of an arena with a source, or while a
            graph is captured; both together.

        Examples
        --------
        >>> import gpumem
        >>> arena, stream = gpumem.Arena("host"), gpumem.Stream("host")
        >>> with arena.allocate(1000, stream, alignment=4096) as buffer:
        ...     buffer.nbytes, buffer.ptr % 4096, buffer.stream == stream
        (1000, 0, True)
        """
        cdef Block block
        cdef uint32_t slot = self.default_slot
        cdef uint64_t size = size_of(nbytes, self)
        cdef uint64_t extra = self.extra
        cdef GraphPool pool
        cdef Region region = REGION_OF_MANY
        cdef int status
        if alignment is not None:
            extra = max(extra, extra_for(alignment_of(alignment)))
        # First, as other code may run here: none does from finding the slot to using it.
        if shareable is not False:
            require("shareable", shareable, bool, "True or False")
            require_shareable(self, self.config, self.source, self.core)
            region = SHARED_REGION
        if transport is not None:
            require_transport(self, transport, shareable, self.source, self.core)
            region = TRANSPORT_REGION
        if stream is not None or self.asks_default:
            self.slot_of(stream, &slot)
        if size == 0:
            return empty_block(self, slot)
        pool = None if self.captures is None else self.pool_for(slot, False)
        if pool is None:
            status = self.take(size, extra, slot, region, &block)
            if status == ARENA_TAGGED:
                return self.tagged().allocate(nbytes, stream, alignment=alignment,
                                              shareable=shareable, transport=transport)
            if status == ARENA_CAPTURING:
                pool = self.pool_for(slot, True)
        if pool is not None:
            if region != REGION_OF_MANY:
                setting = "shareable = True" if shareable else "transport = 'ipc'"
                raise ConfigError(f"invalid {setting} while a graph is captured: "
                                  "allocate it before")
            return self.take_captured(pool, nbytes, slot, alignment)
        return deliver(self, &block, size, extra, slot)

    cdef Buffer obtain(self, uint64_t nbytes):
        cdef Block block
        if nbytes == 0 or self.obtains_slowly:
            return self.allocate(nbytes)
        if self.take(nbytes, 0, self.default_slot, REGION_OF_MANY, &block) != ARENA_OK:
            return self.allocate(nbytes)
        return buffer_of(self, block.address, nbytes, block.size, block.handle, self.default_slot)

    def allocate_persistent(self, nbytes):
        """Hand out a long-lived block (weights) in a region of its own.

        It never steers the arena's growth and a shrink does not touch it. Its region goes back
        to the driver after the block is freed, at the next call that may block.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> weights, scratch = arena.allocate_persistent(1 << 20), arena.allocate(1 << 20)
        >>> scratch.close()
        >>> report = arena.shrink()      # takes what `scratch` left, and not the weights
        >>> arena.stats().num_reserves, arena.stats().reserved >= weights.nbytes
        (1, True)
        """
        cdef Block block
        cdef GraphPool pool
        cdef uint32_t slot = self.default_slot
        cdef uint64_t size = size_of(nbytes, self)
        cdef int status
        if self.asks_default:
            self.slot_of(None, &slot)
        if size == 0:
            return empty_block(self, slot)
        pool = self.pool_for(slot, False)
        if pool is not None:
            return self.take_captured(pool, nbytes, slot, None)
        status = self.take(size, self.extra, slot, OWN_REGION, &block)
        if status == ARENA_TAGGED:
            return self.tagged().allocate_persistent(nbytes)
        if status == ARENA_CAPTURING:
            return self.take_captured(self.pool_for(slot, True), nbytes, slot, None)
        return deliver(self, &block, size, self.extra, slot)

    cdef int take(self, uint64_t asked, uint64_t extra, uint32_t slot, Region region,
                  Block* block) except -1:
        # `extra`: bytes so that an aligned part of the block holds what was asked for.
        cdef uint64_t nbytes = asked + extra
        cdef int status
        if not arena_is_open(self.core):
            if tag_now(self.core) != NULL:
                return ARENA_TAGGED         # which may be awake
            raise_status(self, asked, extra, slot, ARENA_CLOSED)
        if nbytes > MOST_BYTES:
            raise_status(self, asked, extra, slot, ARENA_OVER_LIMIT)
        status = ARENA_MISS
        if region == REGION_OF_MANY:
            status = arena_allocate_fast(self.core, nbytes, slot, block)
        elif tag_now(self.core) != NULL:
            return ARENA_TAGGED
        if status == ARENA_MISS:
            status = self.take_slow(nbytes, slot, region, block)
        elif count_now(&self.core.detour) and budget_has_crossed():
            tell_of_crossings()
        if status != ARENA_OK and status != ARENA_CAPTURING and status != ARENA_TAGGED:
            return self.take_relieved(asked, extra, slot, region, status, block)
        return status

    cdef int take_relieved(self, uint64_t asked, uint64_t extra, uint32_t slot, Region region,
                           int status, Block* block) except -1:
        # Pools of captures that are over go, then callbacks of the arena's own tensors are called,
        # then those of budgets. They may also close the arena or reset the stream: the slot keeps
        # its stream.
        cdef Asking asking = Asking(0, 0)
        slot_retain(self.core, slot)
        try:
            if self.captures is not None and self.captures.end_over():
                status = self.take_slow(asked + extra, slot, region, block)
            while tensors_relieve(self, status, asked, None, &asking):
                status = self.take_slow(asked + extra, slot, region, block)
        finally:
            slot_drop(self.core, slot)
        if status == ARENA_OVER_BUDGET:
            status = self.take_under_pressure(asked, extra, slot, region, block)
        if status != ARENA_OK and status != ARENA_CAPTURING:
            raise_status(self, asked, extra, slot, status)
        return status

    cdef int take_slow(self, uint64_t nbytes, uint32_t slot, Region region,
                       Block* block) except -1:
        cdef uint32_t flags = ALLOCATE_INTERRUPTIBLE
        cdef int status
        if region == SHARED_REGION:
            flags |= ALLOCATE_SHAREABLE
        elif region == TRANSPORT_REGION:
            flags |= ALLOCATE_TRANSPORT
        elif region != REGION_OF_MANY:
            flags |= ALLOCATE_PERSISTENT
        self.require_outside_source()
        slot_retain(self.core, slot)    # other threads run: it must keep its stream
        try:
            if self.heap is not None:
                self.heap.before(self.core)
            with nogil:
                status = arena_allocate_slow(self.core, nbytes, slot, flags, block)
            if status == ARENA_INTERRUPTED:
                raise_interrupt()
        finally:
            slot_drop(self.core, slot)
            if self.heap is not None:
                self.heap.after()
        if budget_has_crossed():
            tell_of_crossings()
        return status

    cdef int take_under_pressure(self, uint64_t asked, uint64_t extra, uint32_t slot,
                                 Region region, Block* block) except -1:
        # Callbacks may also close the arena or reset the stream: the slot keeps its stream.
        cdef Relief relief = Relief(0, 0, 0, 0, NULL, 0, False)
        cdef list errors = []
        cdef int status = ARENA_OVER_BUDGET
        slot_retain(self.core, slot)
        try:
            while status == ARENA_OVER_BUDGET and relieve(self.core, &relief, errors):
                status = self.take_slow(asked + extra, slot, region, block)
        finally:
            slot_drop(self.core, slot)
        if status == ARENA_OVER_BUDGET:
            raise_over_budget(self, asked, extra, slot, errors)
        tell_errors(errors)
        return status

    @cython.embedsignature(False)       # it begins the text: Cython's has `others`, too
    def virtual(self, shape, dtype, *, committed=0, step=None, ahead=0, stream=None,
                on_pressure=None, name=None, **others):
        """virtual($self, shape, dtype, *, committed=0, step=None, ahead=0, stream=None, \
on_pressure=None, name=None)\n--\n\n\
Make a tensor whose rows get memory and give it back, while its addresses stay.

        Of the device's own memory, by the driver's virtual memory, whatever backs the blocks. It
        belongs to the tag that the calling thread has open (see `tag`), and sleeps with it.

        Parameters
        ----------
        shape : int or sequence of int
            The first number is the most rows it may ever have: only addresses are reserved.
        dtype : dtype
            As for `gpumem.empty`.
        committed : int, optional
            Rows that have memory from the beginning.
        step : int, optional
            Rows by which it will mostly grow and shrink; it decides the size of a page, see
            `gpumem.VirtualTensor`. None: a 64th of all rows.
        ahead : int, optional
            A commit that has to call the driver makes memory for so many rows more, if there is
            room. They count as reserved, and go where memory is out or by `shrink`.
        stream : stream, optional
            Whose work uses the rows; see `gpumem.VirtualTensor.record_stream` for others. None is
            the arena's default stream.
        on_pressure : callable, optional
            ``on_pressure(tensor, nbytes)``, called without a lock when an allocation or a commit of
            this arena's other tensors is refused for want of `nbytes`, on the thread that asks. It
            may release rows; then the request is tried again.
        name : str, optional
            Name used in error messages.

        Returns
        -------
        VirtualTensor
            It keeps the arena open.

        Raises
        ------
        TypeError, ValueError
            An invalid argument.
        ConfigError
            The memory has no pages: it is not a device's own or comes from a source, or the driver
            has no virtual memory.
        OutOfMemoryError, DriverError, ClosedError, SuspendedError
            As `VirtualTensor.commit`.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> cache = arena.virtual((100_000, 64), "float16", committed=100)
        >>> cache.full.shape, cache.tensor().shape
        ((100000, 64), (100, 64))
        """
        from gpumem._tensor.virtual import make_virtual

        refuse_keywords("virtual()", others, VIRTUAL_KEYWORDS)
        self.require_own()
        self.require_open()
        return make_virtual(self, shape, dtype, committed=committed, step=step, ahead=ahead,
                            stream=stream, on_pressure=on_pressure, name=name)

    def prepare(self, nbytes):
        """Take memory from the device ahead of need, in one piece.

        With pages it is physical memory that then goes wherever blocks need it, so that a first
        training step or request does not pay for making it; with regions, one region.

        Parameters
        ----------
        nbytes : int or str
            Bytes, or a text such as ``"2GiB"``, to have free beyond what is in use now.

        Raises
        ------
        TypeError, ValueError, OutOfMemoryError, ClosedError, SuspendedError
            As `allocate`.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> arena.prepare(1 << 20)
        >>> calls = arena.stats().driver_calls
        >>> arena.allocate(4096).close()
        >>> arena.stats().driver_calls - calls
        0
        """
        cdef uint64_t size = size_of(nbytes, self)
        cdef int status
        if not self.core.settings.paged or size == 0 or size > MOST_BYTES:
            self.allocate(nbytes).close()
            return
        if not arena_is_open(self.core):
            raise_status(self, size, 0, self.default_slot, ARENA_CLOSED)
        with nogil:
            status = arena_prepare(self.core, size)
        if status == ARENA_OVER_BUDGET:
            status = under_pressure(self, arena_prepare, size)
        if status != ARENA_OK:
            raise_status(self, size, 0, self.default_slot, status)

    def shrink(self):
        """Give every region without a live block back to the driver.

        What work of streams that freed blocks, or were recorded for them, may still use stays.
        Other streams are waited for only where the driver does so: for pinned and managed memory,
        blocks that were made for a transport or registered, and on a device without memory pools.
        That wait has no bound; Ctrl-C comes after it.

        Returns
        -------
        ShrinkReport
            What went, and for each region that stayed the blocks that hold it.

        Raises
        ------
        ClosedError
            The arena is closed, or belongs to the parent of a fork.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host", {"backing": "regions"})
        >>> buffer = arena.allocate(1000)
        >>> [block.nbytes for region in arena.shrink().retained for block in region.blocks]
        [1000]
        >>> buffer.close()
        >>> arena.shrink().released_bytes > 0, arena.stats().reserved
        (True, 0)
        """
        cdef uint64_t released = 0
        cdef int status
        self.require_open()
        self.require_outside_source()
        if self.captures is not None:
            self.captures.end_over()
        with nogil:
            status = arena_shrink(self.core, &released)
        if status != ARENA_OK:
            raise_status(self, 0, 0, self.default_slot, status)
        if self.heap is not None:
            self.heap.tell()
        from gpumem.stats import ShrinkReport
        parts = [each.shrink() for each in self._beside()]
        return ShrinkReport(released + sum([part.released_bytes for part in parts]),
                            sum([part.retained for part in parts], retained_regions(self.core)))

    # ---- graphs ----------------------------------------------------------------------------------

    def capture(self, stream=None, *, pool=None):
        """Serve a stream from a graph pool while a graph is captured on it.

        A context manager; open it around the capture, or inside before the first allocation.
        It gives the pool, from which everything that is allocated on the stream comes until the
        context ends, `allocate_persistent` too. May be nested for different streams.

        If it is not opened, the arena queries the driver whether the stream captures whenever it
        is about to call the driver for an allocation, and then opens a pool by itself, retained
        with the graph under capture. That cannot see an allocation that is served from what the
        arena has: such a block may be given to others between launches. So open the context.

        Parameters
        ----------
        stream : stream, optional
            The stream that captures; None is the arena's default stream.
        pool : GraphPool, optional
            An earlier capture's pool of this arena, shared: see `GraphPool` for what its graphs
            must keep to. None makes a new one.

        Raises
        ------
        TypeError, ValueError
            `stream` is not a stream, or `pool` not a pool of this arena.
        ClosedError
            The arena or the pool is closed.
        InUseError
            On entering: another pool serves the stream.
        GpumemError
            On leaving: this context is not entered.

        Examples
        --------
        >>> import gpumem
        >>> arena, stream = gpumem.Arena("host"), gpumem.Stream("host")
        >>> with arena.capture(stream) as pool:
        ...     # begin the capture, queue work on it, end the capture
        ...     buffer = arena.allocate(4096, stream)
        >>> pool.stats().in_use
        4096
        """
        cdef uint32_t slot
        self.require_open()
        self.slot_of(stream, &slot)
        if pool is None:
            pool = self._open_pool()
        elif not isinstance(pool, GraphPool):
            raise TypeError(f"pool must be a GraphPool, not {type(pool).__name__}")
        elif (<GraphPool>pool).arena is not self:
            raise ValueError(f"{pool!r} is not a pool of arena {self.name!r}")
        return Capture(pool, stream)

    def _open_pool(self):
        if self.captures is not None:
            self.captures.end_over()
        return make_pool(self, self._open_pool_arena())

    def _open_pool_arena(self):
        if self.source is not None:
            raise ConfigError(f"arena {self.name!r} has a source, and a graph pool takes memory "
                              "from the driver: allocate before the capture")
        return Arena(self.memory, self.config._of_graph_pool(self.backing), budget=self.budget,
                     count=count_of(self.core), debug_heap=False, name=f"{self.name}, graph pool")

    def _default_stream(self):
        # For arenas beside this one.
        cdef uint32_t slot
        self.slot_of(None, &slot)
        return (PER_THREAD_STREAM if self.default_per_thread
                else self.streams.get(self.default_slot, self.stream_at(self.default_slot)))

    def _children(self):
        # Arenas of tags, and those of graph pools.
        cdef GraphPool pool
        inner = self._beside()
        if self.captures is not None:
            for pool in self.captures.pools:
                if not pool.closed:
                    inner += pool.members()
        return inner

    def _serve(self, stream, GraphPool pool not None):
        cdef uint32_t slot
        self.require_open()
        self.slot_of(stream, &slot)
        captures_of(self).serve(self, slot, stream, pool)
        return slot

    def _end_service(self, GraphPool pool not None, slot):
        captures_of(self).end(pool, slot)

    cdef GraphPool pool_for(self, uint32_t slot, bint capturing):
        # The end of an earlier capture's pool runs other code: the slot keeps its stream.
        if self.captures is None and not capturing:
            return None
        slot_retain(self.core, slot)
        try:
            return captures_of(self).pool_of(self, slot, capturing)
        finally:
            slot_drop(self.core, slot)

    cdef object take_captured(self, GraphPool pool, object nbytes, uint32_t slot,
                              object alignment):
        stream = self.streams.get(slot)
        return pool.part(self.tagged()).allocate(
            nbytes, self.stream_at(slot) if stream is None else stream, alignment=alignment)

    # ---- streams ---------------------------------------------------------------------------------

    cdef int slot_of(self, object stream, uint32_t* slot) except -1:
        # From finding the slot to using it no code runs that could vacate it: objects that are
        # released meanwhile are kept until the next call.
        cdef CUstream handle = NULL
        cdef bint fresh
        cdef int status
        if stream is None and self.default_per_thread:
            stream = PER_THREAD_STREAM
        elif stream is None and self.asks_default:
            # Reset, so that the arena has to be told that the raw handle is named again.
            stream = <uintptr_t>self.core.streams[self.default_slot].handle
            self.ask_default(False)
        elif stream is None:
            slot[0] = self.default_slot
            return 0
        if context_is_dead(&self.driver_device.context):
            raise_status(self, 0, 0, 0, ARENA_DEAD)
        if stream is self.last_stream and not self.stale:
            slot[0] = self.last_slot
            return 0
        stream_handle(stream, self.driver_device, &handle)
        is_object = not hasattr(stream, "__index__")
        if self.stale:
            self.stale = []
        status = arena_stream(self.core, handle, slot, &fresh)
        if status != ARENA_OK:
            raise_status(self, 0, 0, 0, status)
        if fresh:
            release_vacant(self, slot[0])
        if is_object:
            kept = self.streams.get(slot[0])
            if not keeps_itself(kept):
                self.stale.append(kept)
                self.store_stream(slot[0], stream)
        if keeps_itself(stream):
            self.last_stream = stream
            self.last_slot = slot[0]
        return 0

    cdef void ask_default(self, bint asks) noexcept:
        self.asks_default = asks
        self.obtains_slowly = asks or self.extra != 0

    cdef int store_stream(self, uint32_t slot, object stream) except -1:
        ArenaBase.store_stream(self, slot, stream)
        # A debug heap's free queues work, on a stream that the collector may have ended.
        if self.heap is not None:
            self.tracks_buffers = False
        return 0

    cdef uint64_t stream_at(self, uint32_t slot) noexcept:
        # What cannot be named here: another thread's default stream, for which the legacy stream
        # waits, and a handle that was reset, with nothing left to wait for.
        if self.core.streams[slot].silent or not arena_stream_is_callers(self.core, slot):
            return LEGACY_STREAM
        return <uintptr_t>self.core.streams[slot].handle

    cdef int before_stream(self, Buffer buffer, CUstream stream,
                           DriverDevice driver_device) except -1:
        # What is queued is then joined into the legacy stream, behind which the block is free.
        if self.core.streams[buffer.slot].silent and not buffer.is_closed:
            buffer.record_stream(LEGACY_STREAM)
        return SleepingArena.before_stream(self, buffer, stream, driver_device)

    # ---- what buffers ask ------------------------------------------------------------------------

    cdef void give_back(self, Buffer buffer) noexcept:
        # After a fork or at exit the metadata is not touched.
        if context_is_dead(&self.driver_device.context):
            uses_free(buffer.uses)
        elif buffer.uses != NULL:
            arena_free_used(self.core, buffer.handle, buffer.slot, buffer.uses)
        else:
            arena_free(self.core, buffer.handle, buffer.slot)

    cdef int record(self, Buffer buffer, Uses** uses, uint32_t slot) except -1:
        if arena_record(self.core, uses, slot) != ARENA_OK:
            raise MemoryError("out of host memory while recording a stream")
        return 0

    cdef Place place_of(self, Buffer buffer) noexcept:
        cdef Place place = PLACE_FIXED
        # Regions of a source are nothing else, and a source may ask while its arena waits for it.
        if self.source is not None:
            return place
        with nogil:
            lock_acquire(&self.core.grow_lock)
            if mapped_around(&self.core.apart[APART_SHAREABLE], buffer.address) != NULL:
                place = PLACE_EXPORTABLE
            elif (arena_can_sleep(self.core)
                  and mapped_around(&self.core.apart[APART_TRANSPORT], buffer.address) == NULL):
                place = PLACE_SLEEPS
            lock_release(&self.core.grow_lock)
        return place

    cdef int before_registration(self, Buffer buffer) except -1:
        return note_registration(self, self.core, buffer.address)

    cdef Lease* lease(self, Buffer buffer) except NULL:
        cdef Lease* lease = arena_lease(self.core, buffer.handle, buffer.slot)
        if lease == NULL:
            raise MemoryError("out of host memory while sharing a block")
        return lease

    cdef void move_lease(self, Lease* lease, uint32_t slot) noexcept:
        arena_move_lease(self.core, lease, slot)

    cdef int require_present(self) except -1:
        if arena_state(self.core) == STATE_ASLEEP:
            raise_status(self, 0, 0, self.default_slot, ARENA_CLOSED)
        # A fork's child has no pinned pages: an access would end it.
        if (self.driver_device.context.generation != process.generation
                and self.memory.kind is MemoryKind.HOST_ACCESSIBLE):
            return self.require_own()
        return 0

    cdef int require_awake(self) except -1:
        cdef ArenaBase tagged = self.tagged()
        return self.require_present() if tagged is None else tagged.require_present()

    def reset_stream(self, stream):
        """Declare a stream drained: what was freed on it is now free for everyone.

        The caller has synchronised the stream. Blocks that wait for it because it was recorded for
        them wait no longer. The arena forgets the stream, and its object, unless a live block will
        be freed on it.

        Also required before the owner of a stream given as a raw handle destroys it. Whatever is
        freed on that handle later is kept for it, unasked, until it is named or reset again.

        Parameters
        ----------
        stream : stream
            None is the arena's default stream.

        Raises
        ------
        TypeError, ValueError
            `stream` is not a stream, or is one of another device.
        ClosedError
            The arena is closed, or belongs to the parent of a fork.

        Examples
        --------
        >>> import gpumem
        >>> arena, stream = gpumem.Arena("host", {"stream_reuse": "never"}), gpumem.Stream("host")
        >>> arena.allocate(1000, stream).close()
        >>> {block.stream == stream.ptr for block in arena.blocks()}
        {True}
        >>> stream.synchronize()
        >>> arena.reset_stream(stream)
        >>> {block.stream for block in arena.blocks()}
        {0}
        """
        cdef uint32_t slot
        cdef GraphPool pool
        self.require_open()
        if self.captures is not None:
            self.captures.end_over()
        self.slot_of(stream, &slot)
        named = (self.streams.get(slot, self.stream_at(slot)) if stream is None else stream)
        if arena_reset_stream(self.core, slot, may_end(self, slot)):
            self.streams.pop(slot, None)
            self.last_stream = None
        elif slot == self.default_slot and self.core.streams[slot].silent:
            self.ask_default(True)
        for each in self._beside():
            each.reset_stream(stream)
        for pool in self.captures.pools if self.captures is not None else ():
            if not pool.closed and slot not in pool.serving:
                for each in pool.members():
                    each.reset_stream(named)

    def close(self):
        """Give all memory back to the driver now. Idempotent.

        Waits for the streams on which blocks were freed, or which were recorded for them; where one
        was a raw handle, reset before the free, for everything queued on the device. Ctrl-C ends
        that wait, and the arena stays open. For other streams the driver waits, as `shrink` tells.

        Raises
        ------
        InUseError
            A buffer, or a view of one, is still alive; nothing is changed. With a debug heap the
            message names the places of allocation.
        HeapCorruptionError, InvalidFreeError
            What a debug heap found, if it is to raise; the arena is closed nevertheless.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> buffer = arena.allocate(1000)
        >>> try:
        ...     arena.close()
        ... except gpumem.errors.InUseError:
        ...     buffer.close()
        ...     arena.close()
        >>> arena.closed
        True
        """
        cdef int status
        if arena_state(self.core) == STATE_CLOSED:
            return
        self.require_outside_source()
        with nogil:
            status = arena_close_wait(self.core)
        if status == ARENA_INTERRUPTED:
            raise_interrupt()
        self._close_tags()
        if self.captures is not None:
            self.captures.close()
        with nogil:
            status = arena_close(self.core)
        if status == ARENA_IN_USE:
            # Finished copies, and work for the interpreter, may not have freed their blocks yet.
            release_retired()
            with nogil:
                status = arena_close(self.core)
        if status == ARENA_IN_USE:
            raise_in_use(self)
        self.files = None
        self.streams.clear()
        self.last_stream = None
        self.stale = []
        if self.heap is not None:
            self.heap.tell()


cdef void open_event_source(Arena arena) except *:
    memory, name = str(arena.memory).encode(), arena.name.encode("utf-8", "replace")
    if arena.source is not None:
        name_upstream(arena)
    event_source_name(&arena.core.events, memory, b"arena", name)
    event_source_open(&arena.core.events, arena.core, OWNER_ARENA)


cdef void release_vacant(Arena arena, uint32_t fresh) noexcept:
    # The object of the stream that a fresh or vacant slot named before is not needed any more.
    arena.last_stream = None
    for slot in list(arena.streams):
        if slot == fresh or arena.core.streams[<uint32_t>slot].vacant:
            arena.stale.append(arena.streams.pop(slot))


cdef Buffer arena_take_on_legacy(Arena arena, uint64_t nbytes):
    cdef Block block
    if nbytes == 0 or arena.captures is not None:
        return arena.allocate(nbytes, 0)
    if arena.take(nbytes, arena.extra, LEGACY_SLOT, REGION_OF_MANY, &block) != ARENA_OK:
        return arena.allocate(nbytes, 0)
    return deliver(arena, &block, nbytes, arena.extra, LEGACY_SLOT)


cdef Buffer arena_take_on(Arena arena, uint64_t nbytes, Stream stream):
    cdef Block block
    cdef uint32_t slot
    cdef CUgraph graph = NULL
    cdef int status = ARENA_OK
    if nbytes == 0:
        return arena.allocate(nbytes, stream)
    arena.slot_of(stream, &slot)
    capturing = capture_on(arena.core, slot, &graph) != 0
    pool = arena.pool_for(slot, capturing)
    if pool is None:
        status = arena.take(nbytes, arena.extra, slot, REGION_OF_MANY, &block)
        if status == ARENA_TAGGED:
            return arena.allocate(nbytes, stream)
    if pool is None and status == ARENA_CAPTURING:
        pool = arena.pool_for(slot, True)
    if pool is not None:
        return arena.take_captured(pool, nbytes, slot, None)
    return deliver(arena, &block, nbytes, arena.extra, slot)


cdef inline uint64_t extra_for(uint64_t alignment) noexcept:
    return max(alignment, <uint64_t>QUANTUM) - QUANTUM  # a block is a multiple of the quantum


cdef inline Buffer deliver(Arena arena, Block* block, uint64_t asked, uint64_t extra,
                           uint32_t slot):
    if extra:
        block.address = (block.address + extra) & ~extra
        if arena.heap is not None:
            arena.heap.narrow(arena.core, block, asked, slot)
    return buffer_of(arena, block.address, asked, block.size, block.handle, slot)


cdef int arena_bad_free(Arena arena, uint64_t address) except -1:
    return arena.heap.bad_free(address) if arena.heap is not None else 0


cdef Captures captures_of(Arena arena):
    if arena.captures is None:
        arena.captures = Captures()
    return arena.captures


cdef bint may_end(Arena arena, uint32_t slot) noexcept:
    # Only a raw handle: the default streams stay, and an object keeps its own stream.
    return slot not in arena.streams and arena.stream_at(slot) > PER_THREAD_STREAM


cdef Buffer empty_block(Arena arena, uint32_t slot):
    if not arena_is_open(arena.core):
        raise_status(arena, 0, 0, slot, ARENA_CLOSED)
    if context_is_dead(&arena.driver_device.context):
        raise_status(arena, 0, 0, slot, ARENA_DEAD)
    return empty_buffer(arena, slot)


def release_retired_arenas(bint may_wait=True):
    """Release the memory of arenas without references to the driver."""
    with nogil:
        if may_wait:
            arenas_release_retired_wait()
        else:
            arenas_release_retired()


on_release("arenas", release_retired_arenas)
