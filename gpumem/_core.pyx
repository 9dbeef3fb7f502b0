"""Arena: argument checks, the interpreter lock's boundary, the one place that raises."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memset

from gpumem._arena cimport (
    arena_allocate_fast,
    arena_allocate_persistent,
    arena_allocate_slow,
    arena_check,
    arena_close,
    arena_copy_chunks,
    arena_create,
    arena_drop,
    arena_free,
    arena_lease,
    arena_move_lease,
    arena_reap,
    arena_shrink,
)
from gpumem._arena_cache cimport caches_flush
from gpumem._arena_streams cimport arena_reset_stream, arena_stream, arena_stream_is_used
from gpumem._arena_types cimport (
    ARENA_CLOSED,
    ARENA_DEAD,
    ARENA_DRIVER_REFUSED,
    ARENA_IN_USE,
    ARENA_MISS,
    ARENA_NO_METADATA,
    ARENA_OK,
    ARENA_OVER_LIMIT,
    ArenaCore,
    ArenaSettings,
    Block,
    EXTEND_NEXT_POWER_OF_TWO,
    EXTEND_SAME_AS_REQUESTED,
    REUSE_COMPLETED,
    REUSE_NEVER,
    REUSE_WAIT,
    arena_in_use,
    arena_reserved,
    lock_acquire,
    lock_release,
)
from gpumem._backing cimport (
    BACKING_DEVICE,
    BACKING_MANAGED,
    BACKING_PINNED,
    Backing,
    BackingKind,
    backing_call,
    backing_init,
)
from gpumem._bfc cimport (
    CHUNK_USED,
    Chunk,
    LANE_RELEASED,
    QUANTUM,
    bfc_largest_free,
    round_to_quantum,
)
from gpumem._bfc_check cimport bfc_invariant
from gpumem._buffer cimport Buffer, MemoryResource, empty_buffer, resource_init, size_of
from gpumem._driver cimport (
    CUDA_ERROR_OUT_OF_MEMORY,
    CUresult,
    CUstream,
    check,
    place_is_dead,
    process,
)
from gpumem._lease cimport Lease
from gpumem._stream cimport Stream, stream_handle

from gpumem.config import ArenaConfig
from gpumem.device import MemoryKind, _reapers
from gpumem.errors import ClosedError, ConfigError, GpumemError, InUseError, OutOfMemoryError
from gpumem.stats import BlockInfo, KeptRegion, ShrinkReport, Stats

cdef enum:
    PER_THREAD_STREAM = 2       # handle of each thread's own default stream

# More than any machine has, and far from where sums of sizes overflow.
cdef uint64_t ABSURD = <uint64_t>1 << 48


@cython.final
cdef class Arena(MemoryResource):
    """A stream-aware best-fit-with-coalescing arena over one memory.

    Takes regions from the driver and hands out blocks of them. A block is at least 256-byte
    aligned, rounded up to 256 bytes, and belongs to the stream it was allocated for; freeing it
    makes it available to the same stream at once, and to others when that is safe (see
    `ArenaConfig.stream_reuse`). On one stream, once warm, neither calls the driver.

    Safe to use from many threads. Dead after fork: the child makes its own. Buffers keep their
    arena alive; an arena that nobody refers to gives its memory back at the next call of gpumem
    that may block (a growth, a shrink, a close, `Device.free_bytes`), `close` gives it back now.

    Parameters
    ----------
    memory : MemoryInfo, Device or str
        Where the bytes live: ``"cuda:0"``, ``"cuda:0/host_accessible"``, ``"host"``.
    config : ArenaConfig or Mapping, optional
        Settings; a mapping is read by `ArenaConfig.from_mapping`.
    default_stream : stream, optional
        Used where a call names none; None is the device's legacy default stream.
    name : str, optional
        For people.

    Raises
    ------
    ValueError
        The memory does not exist here.
    ConfigError
        A setting is not accepted.
    DriverError
        The device does not answer.

    Examples
    --------
    >>> import gpumem
    >>> arena = gpumem.Arena("host")
    >>> with arena.allocate(4096) as buffer:
    ...     memoryview(buffer)[0] = 7
    >>> arena.stats().in_use
    0

    Notes
    -----
    The algorithm is TensorFlow's and ONNX Runtime's BFC over a two-level bitmap (TLSF).
    """

    def __cinit__(self, memory, config=None, *, default_stream=None, name=None):
        cdef ArenaSettings settings
        cdef Backing backing
        resource_init(self, memory, name)
        if config is None:
            self.config = ArenaConfig()
        elif isinstance(config, ArenaConfig):
            self.config = config
        else:
            self.config = ArenaConfig.from_mapping(config)
        self.config._require_arena()
        require_backing(self)
        with nogil:
            arena_reap()        # it may wait for the device
        settings_from(self.config, &settings)
        backing_init(&backing, backing_kind(self), &self.place.place)
        self.core = arena_create(&settings, backing)
        if self.core == NULL:
            raise MemoryError(f"no host memory for an arena's books, or no addresses on {memory}")
        self.default_slot = 1       # the legacy default stream's
        if default_stream is not None:
            self.slot_of(default_stream, &self.default_slot)
            self.default_per_thread = self.stream_at(self.default_slot) == PER_THREAD_STREAM

    def __dealloc__(self):
        if self.core != NULL:
            arena_drop(self.core)

    # ---- blocks ----------------------------------------------------------------------------------

    def allocate(self, nbytes, stream=None, *, alignment=None):
        """Hand out a block.

        Parameters
        ----------
        nbytes : int
            Size in bytes; 0 gives a valid empty Buffer with pointer 0.
        stream : stream, optional
            The stream whose work uses the block first; None is the arena's default stream.
        alignment : int, optional
            Bytes, a power of two up to 2 MiB. Every block is aligned to at least 256.

        Returns
        -------
        Buffer
            Owns the block; dropping or closing it frees the block on its stream.

        Raises
        ------
        TypeError
            `nbytes` is not an integer.
        ValueError
            `nbytes` is negative, or `alignment` is not accepted.
        OutOfMemoryError
            Neither the arena nor the driver has the room; the arena is as before.
        ClosedError
            The arena is closed, or belongs to the parent of a fork.
        """
        cdef Block block
        cdef uint32_t slot = self.default_slot
        cdef uint64_t size = size_of(nbytes)
        cdef uint64_t extra = 0
        cdef Buffer buffer
        if stream is not None or self.default_per_thread:
            self.slot_of(stream, &slot)
        if alignment is not None:
            extra = alignment_of(alignment) - QUANTUM
        if size == 0:
            return empty_block(self, slot)
        self.take(size, extra, slot, False, &block)
        buffer = Buffer.__new__(Buffer)
        buffer.resource = self
        buffer.address = (block.address + extra) & ~extra if extra else block.address
        buffer.requested_bytes = size
        buffer.handle = block.handle
        buffer.block_bytes = block.size
        buffer.slot = slot
        return buffer

    def allocate_persistent(self, nbytes):
        """Hand out a long-lived block (weights) in a region of its own.

        It never steers the arena's growth and a shrink does not touch it. Its region goes back
        to the driver after the block is freed, at the next call that may block.

        Parameters
        ----------
        nbytes : int
            Size in bytes.

        Raises
        ------
        TypeError, ValueError, OutOfMemoryError, ClosedError
            As `allocate`.
        """
        cdef Block block
        cdef uint64_t size = size_of(nbytes)
        cdef Buffer buffer
        if size == 0:
            return empty_block(self, self.default_slot)
        self.take(size, 0, self.default_slot, True, &block)
        buffer = Buffer.__new__(Buffer)
        buffer.resource = self
        buffer.address = block.address
        buffer.requested_bytes = size
        buffer.handle = block.handle
        buffer.block_bytes = block.size
        buffer.slot = self.default_slot
        return buffer

    def reserve(self, nbytes):
        """Alias of `allocate_persistent`, ONNX Runtime's name."""
        return self.allocate_persistent(nbytes)

    cdef int take(self, uint64_t asked, uint64_t extra, uint32_t slot, bint persistent,
                  Block* block) except -1:
        # `extra`: bytes so that an aligned part of the block holds what was asked for.
        cdef uint64_t nbytes = asked + extra
        cdef int status
        if self.core.closed:
            raise ClosedError(f"arena {self.name!r} is closed")
        if nbytes > ABSURD - QUANTUM:
            raise_out_of_memory(self, asked, extra, slot, ARENA_OVER_LIMIT)
        if persistent:
            with nogil:
                status = arena_allocate_persistent(self.core, nbytes, slot, block)
        else:
            status = arena_allocate_fast(self.core, nbytes, slot, block)
            if status == ARENA_MISS:
                with nogil:
                    status = arena_allocate_slow(self.core, nbytes, slot, block)
        if status != ARENA_OK:
            raise_status(self, asked, extra, slot, status)
        return 0

    def shrink(self):
        """Give every region without a live block back to the driver.

        Returns
        -------
        ShrinkReport
            What went, and for each region that stayed the blocks that hold it.

        Raises
        ------
        ClosedError
            The arena is closed, or belongs to the parent of a fork.
        """
        cdef uint64_t released = 0
        cdef int status
        self._require_open()
        with nogil:
            status = arena_shrink(self.core, &released)
        if status != ARENA_OK:
            raise_status(self, 0, 0, self.default_slot, status)
        return ShrinkReport(released, kept_regions(self))

    # ---- streams ---------------------------------------------------------------------------------

    cdef int slot_of(self, object stream, uint32_t* slot) except -1:
        cdef CUstream handle = NULL
        cdef int status
        if stream is None and self.default_per_thread:
            stream = PER_THREAD_STREAM
        elif stream is None:
            slot[0] = self.default_slot
            return 0
        if place_is_dead(&self.place.place):
            raise_status(self, 0, 0, 0, ARENA_DEAD)
        stream_handle(stream, self.place, &handle)
        status = arena_stream(self.core, handle, slot)
        if status != ARENA_OK:
            raise_status(self, 0, 0, 0, status)
        if not isinstance(stream, int) and not keeps_itself(self.streams.get(slot[0])):
            self.streams[slot[0]] = stream
        return 0

    cdef uint64_t stream_at(self, uint32_t slot) noexcept:
        return <uintptr_t>self.core.streams[slot].handle

    # ---- what buffers ask ------------------------------------------------------------------------

    cdef void give_back(self, Buffer buffer) noexcept:
        # After a fork or at exit the books are left alone.
        if not place_is_dead(&self.place.place):
            arena_free(self.core, buffer.handle, buffer.slot)

    cdef Lease* lease(self, Buffer buffer) except NULL:
        cdef Lease* lease = arena_lease(self.core, buffer.handle, buffer.slot)
        if lease == NULL:
            raise MemoryError("no host memory for a view's lease")
        return lease

    cdef void move_lease(self, Lease* lease, uint32_t slot) noexcept:
        arena_move_lease(self.core, lease, slot)

    def reset_stream(self, stream):
        """Declare a stream drained: what was freed on it is now free for everyone.

        The caller has synchronised the stream. Also required before the owner of a stream given
        as a raw handle destroys it.
        """
        cdef uint32_t slot
        self._require_open()
        self.slot_of(stream, &slot)
        arena_reset_stream(self.core, slot)
        if not arena_stream_is_used(self.core, slot):
            self.streams.pop(slot, None)

    # ---- looking at it ---------------------------------------------------------------------------

    def stats(self):
        """Return the counters of this moment as `Stats`."""
        cdef ArenaCore* core = self.core
        cdef ArenaCore seen
        cdef uint64_t largest
        self._require_own()
        caches_flush(core)
        lock_acquire(&core.lock)
        seen = core[0]
        largest = max(bfc_largest_free(&core.table), bfc_largest_free(&core.small))
        lock_release(&core.lock)
        return Stats(
            limit=seen.settings.max_mem,
            in_use=arena_in_use(&seen),
            requested_in_use=seen.table.requested_in_use + seen.small.requested_in_use,
            reserved=arena_reserved(&seen),
            max_in_use=seen.stats.max_in_use,
            max_reserved=seen.stats.max_reserved,
            num_allocs=seen.stats.num_allocs,
            num_frees=seen.stats.num_frees,
            num_reserves=seen.stats.num_reserves,
            num_extensions=seen.stats.num_extensions,
            num_regions=seen.table.regions_live + seen.small.regions_live,
            num_shrinkages=seen.stats.num_shrinkages,
            max_alloc_size=seen.stats.max_alloc_size,
            largest_free=largest,
            pages_moved=seen.spaces[0].moved + seen.spaces[1].moved,
            driver_calls=(seen.backing.calls + seen.stats.events_recorded
                          + seen.stats.events_asked + seen.stats.events_waited),
        )

    def blocks(self):
        """Return every block, used and free, as a list of `BlockInfo` in address order."""
        cdef uint32_t count = 0
        cdef uint32_t i
        cdef Chunk* chunks
        self._require_own()
        chunks = arena_copy_chunks(self.core, &count)
        if chunks == NULL:
            raise MemoryError("no host memory for a copy of the arena's books")
        try:
            return sorted((block_info(self, &chunks[i]) for i in range(count)),
                          key=lambda block: block.address)
        finally:
            free(chunks)

    def validate(self):
        """Check every invariant of the arena's books.

        Raises
        ------
        GpumemError
            Naming the first invariant that does not hold. A defect of gpumem, or memory that
            something else overwrote.
        """
        cdef int broken
        self._require_own()
        with nogil:
            broken = arena_check(self.core)
        if broken:
            raise GpumemError(f"arena {self.name!r} is corrupt: it does not hold that "
                              f"{bfc_invariant(broken).decode()} (invariant {broken})")

    @property
    def is_arena(self):
        """True: it sub-allocates and can be shrunk."""
        return True

    @property
    def closed(self):
        """Whether `close` has given everything back."""
        return bool(self.core.closed)

    def close(self):
        """Give all memory back to the driver now. Idempotent.

        Raises
        ------
        InUseError
            A buffer, or a view of one, is still alive; nothing is changed.
        """
        cdef int status
        if self.core.closed:
            return
        with nogil:
            status = arena_close(self.core)
        if status == ARENA_IN_USE:
            stats = self.stats()
            raise InUseError(f"arena {self.name!r} cannot be closed: {stats.in_use} bytes in "
                             f"{stats.num_allocs - stats.num_frees} blocks are in use")
        self.streams.clear()

    def _require_open(self):
        if self.core.closed:
            raise ClosedError(f"arena {self.name!r} is closed")

    def _require_own(self):
        # A thread of the parent may have held the lock at the fork: the child leaves it alone.
        if self.place.place.generation != process.generation:
            raise ClosedError(f"arena {self.name!r} belongs to the parent process")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __repr__(self):
        if self.core.closed:
            return f"<gpumem.Arena {self.name!r} on {self.memory}, closed>"
        return (f"<gpumem.Arena {self.name!r} on {self.memory}: {arena_in_use(self.core)} of "
                f"{arena_reserved(self.core)} bytes in use>")


cdef bint keeps_itself(object stream) noexcept:
    """Tell whether it is a stream that ends with its object: nothing may take its place."""
    return isinstance(stream, Stream) and (<Stream>stream).owned


cdef Buffer empty_block(Arena arena, uint32_t slot):
    if arena.core.closed:
        raise ClosedError(f"arena {arena.name!r} is closed")
    if place_is_dead(&arena.place.place):
        raise_status(arena, 0, 0, slot, ARENA_DEAD)
    return empty_buffer(arena, slot)


cdef int require_backing(Arena arena) except -1:
    """Raise ConfigError if the memory cannot be backed as the settings ask."""
    if arena.config.backing != "virtual":
        return 0
    if arena.memory.kind not in (MemoryKind.DEVICE, MemoryKind.HOST):
        raise ConfigError(f"backing = 'virtual' is not accepted for {arena.memory}: it takes a "
                          "device's own memory")
    capability = arena.memory.device.capabilities["virtual_memory"]
    if not capability:
        raise ConfigError(f"backing = 'virtual' is not accepted on {arena.memory}: "
                          f"{capability.reason}")
    return 0


# ---- arguments -----------------------------------------------------------------------------------

cdef uint64_t alignment_of(object alignment) except? 0:
    if (isinstance(alignment, bool) or not isinstance(alignment, int)
            or not 1 <= alignment <= 1 << 21 or alignment & (alignment - 1)):
        raise ValueError(f"alignment {alignment!r} is not a power of two from 1 to 2097152")
    return max(alignment, QUANTUM)


cdef int settings_from(object config, ArenaSettings* settings) except -1:
    memset(settings, 0, sizeof(ArenaSettings))
    settings.max_mem = config.max_mem
    settings.initial_chunk = config.initial_chunk_size_bytes
    settings.initial_growth_chunk = round_to_quantum(config.initial_growth_chunk_size_bytes)
    settings.max_extend = round_to_quantum(config.max_power_of_two_extend_bytes)
    settings.max_dead = config.max_dead_bytes_per_chunk
    settings.extend = (EXTEND_SAME_AS_REQUESTED if config.extend_strategy == "same_as_requested"
                       else EXTEND_NEXT_POWER_OF_TWO)
    settings.reuse = {"completed": REUSE_COMPLETED, "wait": REUSE_WAIT,
                      "never": REUSE_NEVER}[config.stream_reuse]
    settings.ort_split = config.split_rule == "ort"
    settings.passthrough = not config.enable
    settings.paged = config.backing == "virtual" and config.enable
    settings.move_share = config.page_move_threshold
    return 0


cdef BackingKind backing_kind(Arena arena) except *:
    if arena.memory.kind is MemoryKind.HOST_ACCESSIBLE:
        return BACKING_PINNED
    if arena.memory.kind is MemoryKind.MANAGED:
        return BACKING_MANAGED
    return BACKING_DEVICE


# ---- reports -------------------------------------------------------------------------------------

cdef object block_info(Arena arena, const Chunk* chunk):
    cdef bint used = chunk.state == CHUNK_USED
    stream = 0
    if used or chunk.lane != LANE_RELEASED:
        stream = <uintptr_t>arena.core.streams[chunk.lane].handle
    return BlockInfo(address=chunk.address, nbytes=chunk.size, requested=chunk.requested,
                     used=used, region=chunk.region, stream=stream)


cdef object kept_regions(Arena arena):
    regions = {}
    for block in arena.blocks():
        regions.setdefault(block.region, []).append(block)
    kept = []
    for blocks in regions.values():
        live = tuple(block for block in blocks if block.used)
        kept.append(KeptRegion(
            address=blocks[0].address,
            nbytes=sum(block.nbytes for block in blocks),
            reason=f"{len(live)} live block{'s' if len(live) != 1 else ''} of "
                   f"{sum(block.nbytes for block in live)} bytes",
            blocks=live))
    return tuple(kept)


# ---- the one place that raises -------------------------------------------------------------------

cdef int raise_status(Arena arena, uint64_t asked, uint64_t extra, uint32_t slot,
                      int status) except -1:
    """Turn an arena's status into its exception; called after every lock is released."""
    if status == ARENA_DEAD:
        raise ClosedError(f"arena {arena.name!r} belongs to the parent process, or the "
                          "interpreter is ending")
    if status == ARENA_CLOSED:
        raise ClosedError(f"arena {arena.name!r} is closed")
    if status == ARENA_NO_METADATA:
        raise MemoryError("no host memory for an arena's books")
    if status == ARENA_DRIVER_REFUSED and arena.core.last_code != <int>CUDA_ERROR_OUT_OF_MEMORY:
        check(arena.place.place.table, <CUresult>arena.core.last_code,
              backing_call(backing_kind(arena)).decode())
    raise_out_of_memory(arena, asked, extra, slot, status)


cdef int raise_out_of_memory(Arena arena, uint64_t asked, uint64_t extra, uint32_t slot,
                             int status) except -1:
    stats = arena.stats()
    rounded = round_to_quantum(asked + extra)
    if rounded >= ABSURD:
        advice = "no machine has that much memory: check the size"
    elif status == ARENA_OVER_LIMIT and not stats.limit:
        advice = "no range of addresses holds such a block: take smaller ones"
    elif status == ARENA_OVER_LIMIT and rounded > stats.limit:
        advice = "the block alone is larger than max_mem: raise max_mem"
    elif status == ARENA_OVER_LIMIT:
        advice = "free buffers, or raise max_mem"
    else:
        advice = "free buffers, or memory that others hold on the device"
    limit = f"limit {stats.limit}" if stats.limit else "no limit"
    raise OutOfMemoryError(
        f"{arena.memory} is out of memory: asked for {asked} bytes ({rounded} rounded); "
        f"in use {stats.in_use}, reserved {stats.reserved}, {limit}, largest free block "
        f"{stats.largest_free}; {advice}",
        asked=asked, rounded=rounded, in_use=stats.in_use, reserved=stats.reserved,
        limit=stats.limit, largest_free=stats.largest_free, device=str(arena.memory),
        stream=<uintptr_t>arena.core.streams[slot].handle, advice=advice)


def reap():
    """Give the memory of arenas that nobody refers to any more back to the driver."""
    with nogil:
        arena_reap()


_reapers.append(reap)
