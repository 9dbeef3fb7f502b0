"""`gpumem.Arena`: argument checks, and where the interpreter lock is released.

The class has every public method with its docstring. A longer body is a function in another module
of this folder, grouped by subject.
"""

import fcntl
import os
from collections.abc import Mapping

cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from gpumem._arena.graph_pool cimport (
    capture_into, capture_on, children_of, end_finished_captures, pool_for, require_idle_pools,
    reset_pools, take_captured,
)
from gpumem._arena.open cimport (
    add_peer, arena_open, extra_for, let_peer, note_registration, peers_of, region_for,
    require_outside_source,
)
from gpumem._arena.status cimport (
    counters_of, find_apart, heap_blocks_of, is_apart, is_apart_as, raise_asleep, raise_in_use,
    raise_status, require_heap, rows_of, take_under_pressure, under_pressure,
)
from gpumem._arena.tags cimport (
    arena_of_tag, arenas_of_tags, close_if_idle, hold, let_go, named_tags, put_to_sleep,
    require_idle_tags, tagged_as, wake_tags,
)
from gpumem._budget cimport call_crossing_callbacks
from gpumem._buffer cimport (
    alignment_of, Buffer, buffer_of, buffer_share, drop_share, empty_buffer, keeps_itself,
    MemoryResource, Place, PLACE_EXPORTABLE, PLACE_FIXED, PLACE_SLEEPS, ResourceBase, size_of,
    Stream, stream_handle,
)
from gpumem._native.arena.api cimport (
    ALLOCATE_INTERRUPTIBLE, ALLOCATE_PERSISTENT, ALLOCATE_SHAREABLE, ALLOCATE_TRANSPORT,
    APART_SHAREABLE, APART_TRANSPORT, arena_admits, arena_allocate_fast, arena_allocate_slow,
    arena_apart, arena_can_sleep, ARENA_CAPTURING, arena_check, arena_close, arena_close_wait,
    arena_counts_now, ARENA_DEAD, arena_drop, arena_free, arena_free_used, ARENA_IN_USE,
    ARENA_INTERRUPTED, arena_is_open, arena_is_paged, arena_lease, arena_leave, ARENA_MISS,
    arena_move_lease, ARENA_OK, ARENA_OVER_BUDGET, ARENA_OVER_LIMIT, arena_prepare, arena_record,
    arena_reset_peaks, arena_reset_stream, arena_set_limit, arena_shrink, arena_state, arena_stream,
    arena_stream_handle, arena_stream_is_callers, arena_stream_state, ARENA_TAGGED,
    arena_takes_detours, ArenaCounts, arenas_release_kept, arenas_release_retired, Block,
    family_counts, heap_check, invariant_text, slot_drop, slot_retain, STATE_ASLEEP, STATE_CLOSED,
    STATE_CLOSING, STATE_FALLING, STREAM_NAMED, STREAM_VACANT, tag_now,
)
from gpumem._native.backing cimport Mapped, memory_export
from gpumem._native.bfc cimport MAX_BYTES
from gpumem._native.budget cimport budget_has_crossed
from gpumem._native.driver cimport check, context_is_dead, CUgraph, CUresult, CUstream, DriverDevice
from gpumem._node cimport bytes_of
from gpumem._resource cimport handle_of
from gpumem._support.contexts cimport innermost_label
from gpumem._support.lease cimport Lease, Uses, uses_free
from gpumem._support.memory cimport require_memory
from gpumem._support.process cimport process, raise_interrupt
from gpumem._support.streams cimport LEGACY_STREAM, PER_THREAD_STREAM

from gpumem._arena import reports
from gpumem._support.arguments import MISSING, refuse_keywords
from gpumem._support.releases import on_release, release_retired
from gpumem._support.signatures import ClassSignature
from gpumem._support.sizes import format_size, is_share, share_of
from gpumem.config import ArenaConfig
from gpumem.device import Device, MemoryKind
from gpumem.errors import ClosedError, ConfigError, GpumemError, UnsupportedHandleTypeError


cdef tuple VIRTUAL_KEYWORDS = ("shape", "dtype", "committed", "step", "ahead", "stream",
                               "on_pressure", "name")

cdef enum:
    LEGACY_SLOT = 1             # of the device's legacy default stream, in every arena


@cython.final
cdef class Arena(MemoryResource):
    """A stream-aware best-fit-with-coalescing arena over one memory.

    Reserves regions from the driver and allocates blocks in them. A block is aligned to at least
    256 bytes, rounded up to 256 bytes, and belongs to the stream it was allocated for; a freed
    block is available to the same stream at once, and to others when that is safe (see
    `ArenaConfig.stream_reuse`). On one stream, once warm, neither calls the driver.

    Safe to use from many threads. A fork's child cannot use it, and makes its own. Views of the
    host's memory stay valid there: a page is copied when the child writes it, and shows the
    parent's writes until then; `shareable` blocks are one memory in both. Pinned memory is not
    inherited, and a GPU's is not usable.

    Buffers keep their arena alive. An arena without references releases its memory, once its work
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
        in `config`; a mapping there may not have other values for them.
    source : optional
        Where regions come from instead of the driver: an object with ``allocate(nbytes)``, which
        returns an address or None, and ``free(address, nbytes)``; a `MemoryResource` of the same
        memory: the arena allocates blocks in its buffers; or a pair of addresses of C functions,
        ``void *(size_t)`` and ``void (void *, size_t)``. Addresses are multiples of 256; a region
        that overlaps one that the arena has is refused, and not freed.
        None is a refusal: the arena requests less, then releases idle regions and tries again.
        One call at a time, on any thread, and only where the arena may block; before a region is
        released, work queued on the device is waited for. A source must not call its arena. One
        that refers to its arena keeps it alive until it is closed.
    budget : Budget, optional
        The budget that it charges, in addition to ``max_mem``: a block that would pass a limit is
        refused. With a small budget, "auto" backing is regions, as with a small ``max_mem``.
    count : {"reserved", "in_use"}
        Which bytes are charged to `budget`. "reserved": device memory, charged before each driver
        call. "in_use": allocated blocks, including padding. A driver may round a region up,
        usually to 2 MiB, and does not report it: the difference is not counted.
    default_stream : stream, optional
        Used where a call names none; None is the device's legacy default stream.
    debug_heap : bool, DebugHeapOptions or Mapping, optional
        True, or settings of `gpumem.debugging.DebugHeapOptions`: a debug heap finds writes outside
        of blocks and after their free, invalid frees, and blocks that are never freed, each with
        the places of allocation and free. It costs some microseconds and driver calls per block,
        and does not find invalid reads. None reads the environment variable
        ``GPUMEM_DEBUG_HEAP``. See `check_heap`.
    name : str, optional
        Name used in error messages and reports.

    Raises
    ------
    ValueError
        The memory does not exist here.
    TypeError
        `budget` is not a Budget, or a keyword is not a setting.
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
        # `__init__` has the signature. This runs first, so it refuses what does not fit it.
        arena_open(self, memory, config, excess, source, budget, count, debug_heap, name, given)
        self.default_slot = LEGACY_SLOT
        if default_stream is not None:
            self.slot_of(default_stream, &self.default_slot)
            slot_retain(self.core, self.default_slot)
            self.default_per_thread = self.stream_at(self.default_slot) == PER_THREAD_STREAM
        self.set_default_lookup(self.default_per_thread)

    __signature__ = ClassSignature(ArenaConfig)

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

    def __repr__(self):
        cdef ArenaCounts counts
        if self.closed:
            return f"<gpumem.Arena {self.name!r} on {self.memory}, closed>"
        # Without a lock: a fork's child leaves its parent's locks alone.
        arena_counts_now(self.core, &counts)
        return (f"<gpumem.Arena {self.name!r} on {self.memory}: "
                f"{format_size(counts.in_use)} in use, "
                f"{format_size(counts.reserved)} reserved>")

    # ---- blocks ----------------------------------------------------------------------------------

    def allocate(self, nbytes, stream=None, *, alignment=None, shareable=False, transport=None):
        """Allocate a block, as `MemoryResource.allocate` describes.

        Every block is aligned to at least 256 bytes, and to what its `MemoryInfo.alignment` says.
        If there is no room, the arena is as before.
        A `shareable` block has memory of its own that is cleared, never moves, and may be shared
        with other processes by `gpumem.interop.export`. It takes whole pages (2 MiB of a device's
        memory, 4 KiB of the host's), which are released to the driver after it is freed.

        A block for ``transport="ipc"`` is one driver allocation (``cuMemAlloc``) of its own, which
        the driver's legacy IPC, UCX and network cards can register; pages cannot be. It never
        moves, `sleep` leaves it where it is, and it is released to the driver after it is freed.
        While a transport has it registered, hold `Buffer.register`. With ``backing="regions"``
        every block of an arena can be registered.

        Raises
        ------
        SourceError
            The arena's source failed, or returned an unusable region; the arena is as before.
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
        cdef Region region = REGION_OF_MANY
        cdef int status
        if alignment is not None:
            extra = max(extra, extra_for(alignment_of(alignment)))
        # This comes first because it may run other code, which could vacate a slot.
        if shareable is not False or transport is not None:
            region = <Region>region_for(self, shareable, transport)
        if stream is not None or self.looks_up_default:
            self.slot_of(stream, &slot)
        if size == 0:
            return empty_block(self, slot)
        pool = None if self.captures is None else pool_for(self, slot, False)
        if pool is None:
            status = self.take(size, extra, slot, region, &block)
            if status == ARENA_OK:
                return deliver(self, &block, size, extra, slot)
            if status == ARENA_TAGGED:
                return arena_of_tag(self).allocate(
                    nbytes, stream, alignment=alignment, shareable=shareable, transport=transport)
            pool = pool_for(self, slot, True)
        if region != REGION_OF_MANY:
            setting = "shareable = True" if shareable else "transport = 'ipc'"
            raise ConfigError(f"invalid {setting} while a graph is captured: allocate it before")
        return take_captured(self, pool, nbytes, slot, alignment)

    cdef Buffer obtain(self, uint64_t nbytes):
        cdef Block block
        if nbytes == 0 or self.obtains_slowly:
            return self.allocate(nbytes)
        if self.take(nbytes, 0, self.default_slot, REGION_OF_MANY, &block) != ARENA_OK:
            return self.allocate(nbytes)
        return deliver(self, &block, nbytes, 0, self.default_slot)

    def allocate_persistent(self, nbytes):
        """Allocate a long-lived block (weights) in a region of its own.

        It does not influence how the arena grows, and a shrink does not release it. Its region is
        released to the driver after the block is freed, at the next call that may block.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> weights, scratch = arena.allocate_persistent(1 << 20), arena.allocate(1 << 20)
        >>> scratch.close()
        >>> report = arena.shrink()      # releases the memory of `scratch`, and not the weights
        >>> arena.stats().num_reserves, arena.stats().reserved >= weights.nbytes
        (1, True)
        """
        cdef Block block
        cdef uint32_t slot = self.default_slot
        cdef uint64_t size = size_of(nbytes, self)
        cdef int status
        if self.looks_up_default:
            self.slot_of(None, &slot)
        if size == 0:
            return empty_block(self, slot)
        pool = pool_for(self, slot, False)
        if pool is None:
            status = self.take(size, self.extra, slot, OWN_REGION, &block)
            if status == ARENA_OK:
                return deliver(self, &block, size, self.extra, slot)
            if status == ARENA_TAGGED:
                return arena_of_tag(self).allocate_persistent(nbytes)
            pool = pool_for(self, slot, True)
        return take_captured(self, pool, nbytes, slot, None)

    cdef int take(self, uint64_t asked, uint64_t extra, uint32_t slot, Region region,
                  Block* block) except -1:
        cdef uint64_t nbytes = asked + extra
        cdef int status
        if not arena_is_open(self.core):
            if tag_now(self.core) != NULL:
                return ARENA_TAGGED         # that tag may be awake
            status = arena_admits(self.core)
            if status != ARENA_OK:
                raise_status(self, asked, extra, slot, status)
        if nbytes > MAX_BYTES:
            raise_status(self, asked, extra, slot, ARENA_OVER_LIMIT)
        status = ARENA_MISS
        if region == REGION_OF_MANY:
            status = arena_allocate_fast(self.core, nbytes, slot, block)
        elif tag_now(self.core) != NULL:
            return ARENA_TAGGED
        if status == ARENA_MISS:
            status = self.take_slow(nbytes, slot, region, block)
        elif arena_takes_detours(self.core) and budget_has_crossed():
            call_crossing_callbacks()
        if status != ARENA_OK and status != ARENA_CAPTURING and status != ARENA_TAGGED:
            return take_under_pressure(self, asked, extra, slot, region, status, block)
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
        require_outside_source(self)
        innermost_label(False)          # read with the interpreter lock, for events without it
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
            call_crossing_callbacks()
        return status

    def prepare(self, nbytes):
        """Reserve memory from the device ahead of need, in one piece.

        With pages it is physical memory that is then mapped wherever blocks need it, so that a
        first training step or request does not pay for making it; with regions, one region.

        Parameters
        ----------
        nbytes : int or str
            Bytes, or a text such as ``"2GiB"``, to have free in addition to those in use now.

        Raises
        ------
        TypeError, ValueError, OutOfMemoryError, ClosedError, AsleepError
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
        if not arena_is_paged(self.core) or size == 0 or size > MAX_BYTES:
            self.allocate(nbytes).close()
            return
        with nogil:
            status = arena_admits(self.core)
            if status == ARENA_OK:
                status = arena_prepare(self.core, size)
        if status == ARENA_OVER_BUDGET:
            status = under_pressure(self, arena_prepare, size)
        if status != ARENA_OK:
            raise_status(self, size, 0, self.default_slot, status)

    def shrink(self):
        """Release every region without a live block to the driver.

        Also released is pinned host memory that tags keep for their next `sleep`; PyTorch's
        ``empty_cache`` leaves it.

        Memory that unfinished work may still use stays: work of streams that freed blocks, or that
        were recorded for them. Other streams are waited for only where the driver does so: for
        pinned and managed memory, blocks that were made for a transport or registered, and on a
        device without memory pools. That wait has no bound; Ctrl-C takes effect after it.

        Returns
        -------
        ShrinkReport
            The released bytes, and for each region that stayed the blocks that hold it.

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
        require_outside_source(self)
        end_finished_captures(self)
        with nogil:
            status = arena_shrink(self.core, False, &released)
            if status == ARENA_OK:
                arenas_release_kept(self.core)
        if status != ARENA_OK:
            raise_status(self, 0, 0, self.default_slot, status)
        if self.heap is not None:
            self.heap.deliver()
        left = reports.blocks_of(rows_of(self), heap_blocks_of(self))
        return reports.shrink_report(released, left,
                                     [each.shrink() for each in arenas_of_tags(self)])

    def set_limit(self, limit):
        """Change how much memory the arena may hold from the device, as its ``max_mem`` does.

        Memory above a lower limit stays until a `shrink` or the next growth releases idle memory.
        `stats` returns the limit in force; `config` keeps the settings that the arena was made
        with.

        Parameters
        ----------
        limit : int or str
            Bytes, or a text such as ``"2GiB"``, or a share of the device's whole memory, ``"80%"``;
            0 is unlimited.

        Raises
        ------
        TypeError, ValueError
            `limit` is not an integer, or not from 0 to 2**63 - 1, or a share outside of 0% to
            100%.
        ClosedError
            The arena is closed, or belongs to the parent of a fork.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> arena.set_limit(1 << 30)
        >>> arena.stats().limit
        1073741824
        """
        if is_share(limit):
            limit = share_of("limit", limit, self.memory._total_bytes())
        cdef uint64_t nbytes = bytes_of("limit", limit, True, None)
        self.require_open()
        with nogil:
            arena_set_limit(self.core, nbytes)

    @cython.embedsignature(False)       # it begins the text: Cython's has `others`, too
    def virtual(self, shape, dtype, *, committed=0, step=None, ahead=0, stream=None,
                on_pressure=None, name=None, **others):
        """virtual($self, shape, dtype, *, committed=0, step=None, ahead=0, stream=None, \
on_pressure=None, name=None)\n--\n\n\
Make a tensor: its rows get memory and release it, while its addresses stay.

        It has memory of the device's own, by the driver's virtual memory, also in an arena of
        regions. It belongs to the tag that the calling context has open (see `tag`), and sleeps
        with it.

        Parameters
        ----------
        shape : int or sequence of int
            The first number is the largest number of rows: only addresses are reserved.
        dtype : dtype
            As for `gpumem.empty`.
        committed : int, optional
            Rows that have memory from the beginning.
        step : int, optional
            Rows by which it usually grows and shrinks; it decides the size of a page, see
            `gpumem.VirtualTensor`. None: a 64th of all rows.
        ahead : int, optional
            A commit that has to call the driver makes memory for that many more rows, if there is
            room. They count as reserved, and are released where memory is out or by `shrink`.
        stream : stream, optional
            The stream that uses the rows; see `gpumem.VirtualTensor.record_stream` for others.
            None is the arena's default stream.
        on_pressure : callable, optional
            ``on_pressure(tensor, nbytes)``, called without a lock when an allocation or a commit of
            this arena's other tensors is refused for want of `nbytes`, on the requesting thread. It
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
        OutOfMemoryError, DriverError, ClosedError, AsleepError
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

    @classmethod
    def staging(cls, device):
        """Return the pinned arena that copies of pageable memory are staged through.

        There is one for each device, made at the first use, shared by all copies and limited to
        256 MiB. Between copies all of it is idle: ``Arena.staging(device).shrink()`` releases it
        to the system, and the next copy reserves it again. A copy that gets none of it is staged
        through ordinary memory.

        Parameters
        ----------
        device : Device or str
            The device that is copied to and from.

        Returns
        -------
        Arena
            On the device's HOST_ACCESSIBLE memory. Do not close it.

        Raises
        ------
        ValueError
            Unknown device.

        Examples
        --------
        >>> import gpumem
        >>> gpumem.Arena.staging("host").shrink().retained
        ()
        """
        from gpumem._copy.staged import staging_arena

        return staging_arena(device)

    # ---- how it is set up ------------------------------------------------------------------------

    @property
    def backing(self):
        """The backing in force, "virtual" or "regions"; where the setting is "auto", its choice."""
        return "virtual" if arena_is_paged(self.core) else "regions"

    @property
    def in_use(self):
        """Bytes of live blocks, as of `stats`."""
        return self.stats().in_use

    @property
    def limit(self):
        """Bytes that the arena may hold, None without a limit; may be set, as by `set_limit`."""
        return self.stats().limit

    @limit.setter
    def limit(self, value):
        self.set_limit(0 if value is None else value)

    @property
    def is_arena(self):
        """True, because it sub-allocates and can be shrunk."""
        return True

    @property
    def closed(self):
        """Whether `close` has released all memory."""
        return arena_state(self.core) == STATE_CLOSED

    @property
    def peers(self):
        """The other devices that may access the arena's memory, a tuple of `Device`.

        Those of the settings, of `enable_peer`, and with ``peers="on_use"`` those that used it.
        """
        return peers_of(self)

    def enable_peer(self, device):
        """Let kernels and copies of another device access the arena's memory, now and later.

        Pages, shareable blocks and the arena's graph pools become accessible with their memory of
        now, and with memory that is added or moved later; each page costs the driver about as much
        again for each peer. With regions all memory of the device in this process becomes
        accessible, by the driver's switch between two contexts. Code that uses the memory on the
        other device orders that use with the arena's streams, as between any two streams.
        Idempotent, and never undone.

        With ``ArenaConfig.peers = "on_use"`` gpumem's copies between devices, and PyTorch's, do
        this where they need it; kernels of another library need this call.

        Parameters
        ----------
        device : Device or str
            Another device of the same type, such as ``"cuda:1"``.

        Raises
        ------
        PeerAccessError
            The driver has no way between the two devices; copies still work, through its own
            staging.
        DriverError
            The driver refused; the peer has no access, as before.
        ConfigError
            `device` is the arena's own, or of another type.
        ValueError
            There is no such device.
        ClosedError
            The arena is closed, or belongs to the parent of a fork.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host:0")
        >>> others = [device for device in gpumem.devices() if device.type == "host"][1:]
        >>> for device in others:
        ...     arena.enable_peer(device)
        >>> list(arena.peers) == others
        True
        """
        self.require_open()
        require_outside_source(self)
        peer = Device(device)
        add_peer(self, peer)
        for child in children_of(self):
            child.enable_peer(peer)

    # ---- reports ---------------------------------------------------------------------------------

    def stats(self):
        """Return the counters of this moment as `Stats`; those of all tags together.

        `Stats.max_in_use` and `Stats.max_reserved` are sums of each tag's own maximum.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> buffer = arena.allocate(1000)
        >>> stats = arena.stats()
        >>> stats.requested_in_use, stats.in_use, stats.reserved >= stats.in_use
        (1000, 1024, True)
        """
        self.require_own()
        now = reports.stats_of(counters_of(self))
        if self.tags is not None:
            now = reports.sum_of_stats([now, *[each.stats() for each in arenas_of_tags(self)]])
        # The counters are read one after another: pages that are exchanged meanwhile, or go to
        # another tag, would count twice. The charges do not.
        return reports.bounded(now, family_counts(self.core).held)

    def reset_peaks(self):
        """Set `Stats.max_in_use` and `Stats.max_reserved` to the values of now.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> arena.allocate(1 << 20).close()
        >>> peak = arena.stats().max_in_use
        >>> arena.reset_peaks()
        >>> peak, arena.stats().max_in_use
        (1048576, 0)
        """
        self.require_own()
        with nogil:
            arena_reset_peaks(self.core)
        for each in arenas_of_tags(self):
            each.reset_peaks()

    def blocks(self):
        """Return every block, used and free, as a list of `BlockInfo` in address order.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> buffer = arena.allocate(1000)
        >>> [(block.nbytes, block.allocated_nbytes) for block in arena.blocks() if block.used]
        [(1000, 1024)]
        """
        cdef Arena each
        found = []
        self.require_own()
        for name, each in named_tags(self, None):
            asleep = arena_state(each.core) == STATE_ASLEEP
            rows = [(*row, name, asleep and not is_apart(each, row[0])) for row in rows_of(each)]
            found += reports.blocks_of(rows, heap_blocks_of(each))
        return sorted(found, key=lambda block: block.address)

    def report(self, path, *, title=None):
        """Write a page of HTML that shows what is in use now; see `gpumem.observe.write_report`.

        Blocks have ages, tags and stacks if they were allocated during a recording.

        Parameters
        ----------
        path : str or path
            The page.
        title : str, optional
            Its heading; the arena's name if left out.

        Returns
        -------
        gpumem.observe.Report

        Raises
        ------
        TraceError
            Nothing is in use.
        OSError
            The page cannot be written.

        Examples
        --------
        >>> import os, tempfile, gpumem
        >>> arena = gpumem.Arena("host")
        >>> weights = arena.allocate(1000)
        >>> arena.report(os.path.join(tempfile.mkdtemp(), "arena.html")).peak_live_bytes
        1000
        """
        from gpumem.report import write_report

        return write_report(self.snapshot(), path, title=title or self.name)

    def check_invariants(self):
        """Check every invariant of the arena's metadata.

        Raises
        ------
        GpumemError
            Naming the first invariant that does not hold. A defect of gpumem, or memory that
            something else overwrote.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> buffers = [arena.allocate(nbytes) for nbytes in (100, 5000, 1 << 20)]
        >>> del buffers[1]
        >>> arena.check_invariants()         # returns: all invariants hold
        """
        cdef int broken
        self.require_own()
        with nogil:
            broken = arena_check(self.core)
        if broken:
            raise GpumemError(f"arena {self.name!r} is corrupt: invariant {broken} is violated: "
                              f"{invariant_text(broken).decode()}")

    # ---- debug heap ------------------------------------------------------------------------------

    @property
    def debug_heap(self):
        """The `DebugHeapOptions` of its debug heap; None without one."""
        return None if self.heap is None else self.heap.options

    def check_heap(self, *, wait=True):
        """Search every block of the debug heap for invalid writes.

        It compares the guards of live blocks, and the guards and bytes of freed blocks in
        quarantine. The same happens to each block when it is freed and before its memory is used
        again, once the streams that it was freed on and recorded for are done; those findings are
        reported by the next call that may raise. Each wrong byte is reported once. Blocks of graph
        pools and shareable blocks have no guards and are not checked; sleeping blocks are not
        checked either.

        Parameters
        ----------
        wait : bool
            True waits for all work that is queued on the device first, so that nothing is missed.
            False checks the bytes of now; blocks that unfinished streams may use are left for
            later.

        Returns
        -------
        tuple of HeapReport
            The new findings, if `DebugHeapOptions.on_error` is not "raise".

        Raises
        ------
        HeapCorruptionError, InvalidFreeError
            The findings, under "raise".
        ConfigError
            The arena has no debug heap.
        ClosedError
            The arena is closed, or belongs to the parent of a fork.
        DriverError
            The driver refused to wait, or to copy.

        Examples
        --------
        >>> import gpumem, ctypes
        >>> arena = gpumem.Arena("host", debug_heap=True)
        >>> buffer = arena.allocate(100)
        >>> _ = ctypes.memset(buffer.ptr + 100, 7, 1)
        >>> try:
        ...     arena.check_heap()
        ... except gpumem.errors.HeapCorruptionError as error:
        ...     found = error.reports[0]
        >>> found.kind, found.offset, found.found[:2].hex(" ")
        ('overrun', 100, '07 fd')
        """
        require_heap(self)
        self.require_own()
        self.require_open()
        require_outside_source(self)
        found = self.heap.check(self.core, wait)
        for each in arenas_of_tags(self):
            found += each.check_heap(wait=False)
        return found

    def outstanding(self):
        """Return the live blocks of an arena with a debug heap, tag by tag, the oldest first.

        Returns
        -------
        list of OutstandingBlock
            Address, size, number and the place of allocation of each.

        Raises
        ------
        ConfigError
            The arena has no debug heap. `gpumem.adaptors.track` lists the blocks of any resource.
        ClosedError
            The arena belongs to the parent of a fork.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host", debug_heap=True)
        >>> buffer = arena.allocate(100)
        >>> [(block.nbytes, block.number) for block in arena.outstanding()]
        [(100, 1)]
        """
        cdef Arena each
        require_heap(self)
        self.require_own()
        found = []
        for name, each in named_tags(self, None):
            asleep = arena_state(each.core) == STATE_ASLEEP
            found += reports.tagged_blocks(each.heap.outstanding(), name, asleep)
        return found

    def _check_last(self):
        # The process is ending: this does not wait, and the caller reports the findings.
        if arena_is_open(self.core) and not context_is_dead(&self.driver_device.context):
            with nogil:
                heap_check(self.core)

    # ---- sleep -----------------------------------------------------------------------------------

    def tag(self, name, *, asleep="keep"):
        """Tag the blocks that this context allocates, so that they can sleep separately.

        A context manager and decorator. Blocks of a tag lie on pages of their own, and count in the
        arena's limit, budget and `stats`; PyTorch's tensors over this arena are blocks as well. Of
        nested tags the innermost applies. Recordings and reports show the tag, as
        `gpumem.observe.tag`. Blocks without a tag have the tag ``"default"``, which is "keep".

        Parameters
        ----------
        name : str
            The tag. A tag that was opened before is continued.
        asleep : {"keep", "drop", "stay"}
            What `sleep` does with the tag's blocks. "keep": `wake` restores their bytes. "drop":
            `wake` restores their memory, with undefined bytes. "stay": they stay in memory.

        Raises
        ------
        TypeError, ValueError
            `name` is not a str, or is empty.
        ConfigError
            `asleep` is something else, or not the value that the tag was first opened with; or the
            arena has regions or a source: then addresses cannot be kept.
        ClosedError
            The arena is closed, or belongs to the parent of a fork.
        GpumemError
            On entering: this block was entered before. On leaving: it is not entered, or was in
            another thread or another context.

        Notes
        -----
        A tag belongs to Python's context, as `observe.tag` describes: a task, or a function under
        ``copy_context().run``, has the tags that were open where it was made, and a thread begins
        without. A library's allocation has the tag of the context that calls the library. On a
        thread that Python does not know it has none, and neither have PyTorch's threads for the
        backward pass.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> with arena.tag("cache", asleep="drop"):
        ...     cache = arena.allocate(1 << 20)
        >>> weights = arena.allocate(1 << 20)
        >>> arena.sleep("cache"), arena.asleep
        (2097152, ('cache',))
        >>> arena.wake()
        """
        self.require_own()
        self.require_open()
        return tagged_as(self, name, asleep)

    def sleep(self, tags=None, to="host", *, registered="refuse"):
        """Release memory to the driver and keep addresses; the bytes of "keep" blocks are copied.

        After `wake`, pointers, tensors over them and captured graphs are valid as before. Virtual
        tensors and blocks of graph pools sleep with the tag that they were made under; a graph that
        uses one must not be launched until `wake`. This call waits for all work queued on the
        device; Ctrl-C ends that wait, and the arena stays awake.

        While memory is asleep:

        - No work may touch sleeping memory: a kernel's reads and writes there are undefined,
          usually an illegal address.
        - Python's views, copies and exports of it raise `AsleepError`. So do allocations, and
          commits of rows, under a tag that sleeps. Both hold from the beginning of this call: it
          counts views and copies of other threads once no new one begins.
        - Blocks may be freed and rows released. Their bytes are then not copied back.

        Shareable blocks and those for a transport stay in memory, because others may use them.
        Tags that are already asleep are left unchanged.

        Parameters
        ----------
        tags : str or iterable of str, optional
            The tags that sleep; ``"default"`` is the blocks without one. None: all.
        to : str, Device or path
            Where the bytes are copied. "host": to pinned memory, some of which is kept for the
            next time (see `ArenaConfig.sleep_keep_bytes`). Another device, as "cuda:1". A file,
            which must not exist, and which `wake` and the end of the arena or the process remove.
            A text with a slash is a path.
        registered : {"refuse", "stay"}
            "refuse": blocks that are in use elsewhere refuse this call; "stay": their whole tag
            stays awake. In use elsewhere is a registered block (see `Buffer.register`), unless it
            was allocated for ``transport="ipc"``; a block that is the memory of another arena
            (`source`); and a tensor of PyTorch's that was sent to another process.

        Returns
        -------
        int
            Bytes that were released to the device.

        Raises
        ------
        InUseError
            A registration of a block is held, or the memory of a live block was shared with
            another process, under "refuse". Or, of memory that the CPU reads, a view of a block is
            alive. Or another thread copies or fills a block at this moment, or puts the memory to
            sleep or closes it. Nothing is changed.
        ConfigError
            The arena has regions: their addresses cannot be kept. Or `registered` is invalid.
        ValueError
            There is no such tag or device.
        OutOfMemoryError
            There is no room for the copy; the arena stays awake.
        OSError
            The file cannot be made, or as `SleepFileError` not be written; the arena stays awake.
        DriverError
            The driver refused; the arena stays awake. Tags of "drop" are put to sleep after all
            others: if it refused one of these, the bytes of "drop" tags may be lost.
        AsleepError
            The driver refused a step, and then refused to undo the steps before it. The tags in
            `asleep` are asleep, their bytes are safe, and some memory is still held. `wake`
            completes the undoing.
        ClosedError
            The arena is closed, or belongs to the parent of a fork.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> weights = arena.allocate_persistent(1 << 20)
        >>> arena.sleep(), arena.stats().reserved
        (2097152, 0)
        >>> arena.wake()
        >>> weights.close()
        """
        return put_to_sleep(self, tags, to, registered)

    def wake(self, tags=None):
        """Restore the memory of sleeping blocks at the same addresses, with its bytes.

        Returns when the bytes are there. Tags that are awake are left unchanged.

        Parameters
        ----------
        tags : str or iterable of str, optional
            The tags to wake, in any order; None: all that sleep.

        Raises
        ------
        OutOfMemoryError, DriverError
            The driver refused, or its budget (BudgetExceededError); the tag is still asleep, and
            this can be tried again.
        SleepFileError
            The file cannot be read, or another process has changed it; likewise.
        ConfigError, ValueError, ClosedError
            As `sleep`.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> buffer = arena.allocate(1000)
        >>> with memoryview(buffer) as view:
        ...     view[0] = 7
        >>> address, _ = buffer.ptr, arena.sleep()
        >>> arena.wake()
        >>> buffer.ptr == address, memoryview(buffer)[0]
        (True, 7)
        """
        wake_tags(self, tags)

    def copy_out(self, tags=None, to="host", *, limit="256MiB"):
        """Begin to copy live memory to a file or to memory of the CPU while the program goes on.

        The copy comes after all work that is queued on the device when this is called, and a thread
        makes it. Until it has ended, the caller neither writes nor frees the memory that is copied;
        nothing is duplicated on the device. `sleep` raises `InUseError` meanwhile. At most four
        pieces of 4 MiB are queued on the device at once, so that copies of the program wait for
        few bytes.

        Parameters
        ----------
        tags : str, iterable of str, or mapping, optional
            The tags: their used blocks are copied as bytes, named ``"TAG.0"``, ``"TAG.1"`` and so
            on in the order of their addresses. None: all tags. Or tensors by name, such as a
            PyTorch module's ``state_dict()`` or an optimizer's ``state_dict()["state"]``, of any
            memory. They are copied where the caller has them, whichever arena that is.
            Mappings may be nested: their names are joined by a dot. None as a tensor is left out.
        to : str, path or mapping
            A path, with a slash in it if it is a text: a safetensors file, which other files of the
            name give way to once it is complete. "host": new memory of the CPU. Arrays of an
            earlier copy: the same memory again.
        limit : int or str
            Bytes of host memory that the copy may use besides its destination, pinned or not; at
            least 1 MiB.

        Returns
        -------
        gpumem.CopyOut
            It has the progress, ``wait()`` for the path or for arrays of NumPy by name, and
            ``cancel()``. The end of the program cancels a copy.

        Raises
        ------
        TypeError, ValueError
            An argument is invalid; there is no such tag; or a value is not a tensor, or has a dtype
            that safetensors does not have. bfloat16 and float8 need the package ml_dtypes.
        AsleepError
            A tag is asleep.
        ConfigError
            `limit` is below 1 MiB.
        CopyOutError
            The file cannot be written: the disk is full, say.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> with arena.tag("weights"):
        ...     weights = gpumem.full((2, 2), 7, "int16", resource=arena)
        >>> arena.copy_out({"weights": weights}).wait()["weights"]
        array([[7, 7],
               [7, 7]], dtype=int16)
        >>> arena.copy_out("weights").wait()["weights.0"].nbytes
        8
        """
        from gpumem._tensor.copy_out import copy_out

        self.require_own()
        self.require_open()
        named = isinstance(tags, Mapping)
        return copy_out(self, tags if named else None, named_tags(self, None if named else tags),
                        to, limit)

    @property
    def asleep(self):
        """The tags that are asleep, a tuple of str; ``"default"`` is the blocks without one."""
        cdef Arena each
        return tuple([name for name, each in named_tags(self, None)
                      if arena_state(each.core) == STATE_ASLEEP])

    # ---- graphs ----------------------------------------------------------------------------------

    def capture(self, stream=None, *, pool=None):
        """Serve a stream from a graph pool while a graph is captured on it.

        A context manager that returns the pool; open it around the capture, or inside before the
        first allocation. Every allocation on the stream is served from it until the context
        ends, `allocate_persistent` too. It may be nested for different streams.

        Without this context, the arena queries the driver whether the stream captures whenever it
        is about to call the driver for an allocation, and then opens a pool by itself, retained
        with the graph under capture. That query does not happen for an allocation that is served
        from memory that the arena has: another stream may then use such a block between launches.
        So open the context.

        Parameters
        ----------
        stream : stream, optional
            The stream that captures; None is the arena's default stream.
        pool : GraphPool, optional
            An earlier capture's pool of this arena, shared: see `GraphPool` for the rules that its
            graphs must keep. None makes a new one.

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
        return capture_into(self, stream, pool)

    def _tag_arenas(self):
        return arenas_of_tags(self)

    def _children(self):
        # Returns arenas of tags, and those of graph pools.
        return children_of(self)

    # ---- streams ---------------------------------------------------------------------------------

    cdef int slot_of(self, object stream, uint32_t* slot) except -1:
        # No code that could vacate the slot runs from finding it to using it: objects that this
        # call releases are kept until the next one.
        cdef CUstream handle = NULL
        cdef bint fresh
        cdef int status
        if stream is None and self.default_per_thread:
            stream = PER_THREAD_STREAM
        elif stream is None and self.looks_up_default:
            # It was reset, so the raw handle must be named to the arena again.
            stream = <uintptr_t>arena_stream_handle(self.core, self.default_slot)
            self.set_default_lookup(False)
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
        status = arena_stream(self.core, handle, False, slot, &fresh)
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

    cdef void set_default_lookup(self, bint needed) noexcept:
        self.looks_up_default = needed
        self.obtains_slowly = needed or self.extra != 0

    cdef uint64_t stream_at(self, uint32_t slot) noexcept:
        # Two streams cannot be named here: another thread's default stream, which the legacy
        # stream waits for, and a handle that was reset, which has no unfinished work.
        if (arena_stream_state(self.core, slot) != STREAM_NAMED
                or not arena_stream_is_callers(self.core, slot)):
            return LEGACY_STREAM
        return <uintptr_t>arena_stream_handle(self.core, slot)

    cdef int before_stream(self, Buffer buffer, CUstream stream,
                           DriverDevice driver_device) except -1:
        # The queued work is then ordered before later work of the legacy stream, and the block is
        # free after both.
        if arena_stream_state(self.core, buffer.slot) != STREAM_NAMED and not buffer.is_closed:
            buffer.record_stream(LEGACY_STREAM)
        return MemoryResource.before_stream(self, buffer, stream, driver_device)

    def reset_stream(self, stream):
        """Declare that a stream has no unfinished work: its freed memory is free for every stream.

        The caller has synchronised the stream. Freed blocks that it was recorded for do not wait
        for it any longer. The arena forgets the stream, and its object, unless a live block will be
        freed on it.

        Call it also before the owner of a stream that was given as a raw handle destroys it. Memory
        that is freed on that handle later is kept for it, and the driver is not queried about it,
        until the handle is named or reset again.

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
        self.require_open()
        end_finished_captures(self)
        self.slot_of(stream, &slot)
        named = stream_object(self, slot) if stream is None else stream
        if arena_reset_stream(self.core, slot, may_end(self, slot)):
            self.streams.pop(slot, None)
            self.last_stream = None
        elif slot == self.default_slot and arena_stream_state(self.core, slot) != STREAM_NAMED:
            self.set_default_lookup(True)
        for each in arenas_of_tags(self):
            each.reset_stream(stream)
        reset_pools(self, slot, named)

    # ---- what buffers need of their arena --------------------------------------------------------

    cdef void free_buffer(self, Buffer buffer) noexcept:
        # After a fork or at exit the metadata is not touched.
        if context_is_dead(&self.driver_device.context):
            uses_free(buffer.uses)
        elif buffer.uses != NULL:
            arena_free_used(self.core, buffer.handle, buffer.slot, buffer.uses)
        else:
            arena_free(self.core, buffer.handle, buffer.slot)

    cdef int record(self, Buffer buffer, Uses** uses, uint32_t slot) except -1:
        require_memory(arena_record(self.core, uses, slot) == ARENA_OK, "recording a stream")
        return 0

    cdef Place place_of(self, Buffer buffer) noexcept:
        # A source's regions are fixed, and a source may call this while its arena waits for it.
        if self.source is not None:
            return PLACE_FIXED
        if is_apart_as(self, APART_SHAREABLE, buffer.address):
            return PLACE_EXPORTABLE
        if (arena_can_sleep(self.core)
                and not is_apart_as(self, APART_TRANSPORT, buffer.address)):
            return PLACE_SLEEPS
        return PLACE_FIXED

    cdef int before_registration(self, Buffer buffer) except -1:
        return note_registration(self, buffer.address)

    cdef bint let_access(self, DriverDevice peer) except -1:
        return let_peer(self, peer)

    cdef Lease* lease(self, Buffer buffer) except? NULL:
        return arena_lease(self.core, buffer.handle, buffer.slot)

    cdef void move_lease(self, Lease* lease, uint32_t slot) noexcept:
        arena_move_lease(self.core, lease, slot)

    # ---- what it requires of its state -----------------------------------------------------------

    cdef int require_open(self) except -1:
        if arena_state(self.core) == STATE_CLOSED:
            raise ClosedError(f"arena {self.name!r} is closed")
        return 0

    cdef int require_own(self) except -1:
        # A thread of the parent may have held the lock at the fork: the child leaves it alone.
        if self.driver_device.context.generation != process.generation:
            raise ClosedError(f"arena {self.name!r} belongs to the parent process")
        return 0

    cdef int require_present(self) except -1:
        if arena_state(self.core) >= STATE_FALLING:
            self.require_open()
            raise_asleep(self)
        # A fork's child has no pinned pages: an access would end it.
        if (self.driver_device.context.generation != process.generation
                and self.memory.kind is MemoryKind.HOST_ACCESSIBLE):
            return self.require_own()
        return 0

    cdef ResourceBase given_now(self):
        cdef Arena tagged = arena_of_tag(self)
        return self if tagged is None else tagged

    # ---- its end ---------------------------------------------------------------------------------

    def close(self):
        """Release all memory to the driver now. Idempotent.

        Waits for the streams on which blocks were freed, and for those recorded for them. If one of
        them was a raw handle that was reset before the free, it waits for all work queued on the
        device. Ctrl-C ends that wait, and the arena stays open. Other streams are waited for only
        by the driver, as `shrink` says.

        Raises
        ------
        InUseError
            A buffer, or a view of one, is still alive, or another thread copies or fills a block;
            nothing is changed. With a debug heap the message names the places of allocation. Or
            another thread puts the memory to sleep, or closes it.
        HeapCorruptionError, InvalidFreeError
            The findings of a debug heap, if it is to raise; the arena is closed nevertheless.

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
        if self.closed:
            return
        require_outside_source(self)
        with nogil:
            status = arena_close_wait(self.core)
        if status == ARENA_INTERRUPTED:
            raise_interrupt()
        if not children_of(self):
            close_alone(self)
        else:
            # All or none: the second look comes when no thread allocates any more.
            require_idle_parts(self)
            held = []
            hold([self], STATE_CLOSING, held)
            try:
                hold(children_of(self), STATE_CLOSING, held)
                require_idle_parts(self)
                for each in children_of(self):
                    each.close()
                close_alone(self)
            finally:
                let_go(held, STATE_CLOSING)
        self.sleep_file = self.last_stream = None
        self.streams.clear()
        self.stale = []
        if self.heap is not None:
            self.heap.deliver()

    def _close_if_idle(self):
        close_if_idle(self)


cdef int require_idle_parts(Arena arena) except -1:
    require_idle_tags(arena)
    require_idle_pools(arena)
    return 0


cdef int close_alone(Arena arena) except -1:
    cdef int status
    with nogil:
        status = arena_close(arena.core)
    if status == ARENA_IN_USE:
        # Finished copies, and work for the interpreter, may not have freed their blocks yet.
        release_retired()
        with nogil:
            status = arena_close(arena.core)
    if status == ARENA_IN_USE:
        raise_in_use(arena)
    return 0


cdef int release_vacant(Arena arena, uint32_t fresh) except -1:
    # A fresh or vacant slot named another stream before; its object is not needed any more.
    arena.last_stream = None
    try:
        for slot in list(arena.streams):
            if slot == fresh or arena_stream_state(arena.core, slot) == STREAM_VACANT:
                arena.stale.append(arena.streams.pop(slot))
    except MemoryError:
        arena.streams.pop(fresh, None)      # the caller does not use the slot
        raise
    return 0


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
    cdef int status
    if nbytes == 0:
        return arena.allocate(nbytes, stream)
    arena.slot_of(stream, &slot)
    capturing = capture_on(arena.core, slot, &graph) != 0
    pool = pool_for(arena, slot, capturing)
    if pool is None:
        status = arena.take(nbytes, arena.extra, slot, REGION_OF_MANY, &block)
        if status == ARENA_OK:
            return deliver(arena, &block, nbytes, arena.extra, slot)
        if status == ARENA_TAGGED:
            return arena.allocate(nbytes, stream)
        pool = pool_for(arena, slot, True)
    return take_captured(arena, pool, nbytes, slot, None)


# `buffer_of`, without the check for an exception.
ctypedef PyObject* (*MakeBuffer)(PyObject*, uint64_t, uint64_t, uint64_t, uint64_t,
                                 uint32_t) noexcept

cdef extern from *:
    """
    #define take_over(made) (made)
    """
    # Owns the reference; NULL is raised.
    Buffer take_over(PyObject* made)


cdef inline Buffer deliver(Arena arena, Block* block, uint64_t asked, uint64_t extra,
                           uint32_t slot):
    cdef PyObject* made
    if extra:
        block.address = (block.address + extra) & ~extra
        if arena.heap is not None:
            arena.heap.narrow(arena.core, block, asked, slot)
    # A `try` statement costs every allocation 30 instructions, so the result is tested instead.
    made = (<MakeBuffer><void*>buffer_of)(<PyObject*>arena, block.address, asked, block.size,
                                          block.handle, slot)
    if made == NULL:
        arena_free(arena.core, block.handle, slot)
    return take_over(made)


cdef int arena_bad_free(Arena arena, uint64_t address) except -1:
    return arena.heap.bad_free(address) if arena.heap is not None else 0


cdef bint may_end(Arena arena, uint32_t slot) noexcept:
    # Only a raw handle may end: the default streams stay, and an object keeps its own stream.
    return slot not in arena.streams and arena.stream_at(slot) > PER_THREAD_STREAM


cdef object stream_object(Arena arena, uint32_t slot):
    return arena.streams.get(slot, arena.stream_at(slot))


cdef object default_stream_of(Arena arena):
    cdef uint32_t slot
    arena.slot_of(None, &slot)
    return PER_THREAD_STREAM if arena.default_per_thread else stream_object(arena, slot)


cdef Buffer empty_block(Arena arena, uint32_t slot):
    cdef ArenaCore* tagged = tag_now(arena.core)
    cdef int status = arena_admits(arena.core if tagged == NULL else tagged)
    if status != ARENA_OK:
        raise_status(arena, 0, 0, slot, status)
    if context_is_dead(&arena.driver_device.context):
        raise_status(arena, 0, 0, slot, ARENA_DEAD)
    return empty_buffer(arena, slot)


def export_block(Buffer buffer not None, bint read_only):
    """Export the memory of a shareable block: (handle, is it a file, its bytes, block's offset).

    Raises
    ------
    UnsupportedHandleTypeError
        The block is not shareable, or its memory cannot be exported to be read only.
    ClosedError
        The buffer is closed.
    DriverError
        The driver refused.
    """
    cdef Lease* share = buffer_share(buffer)    # keeps the memory if another thread closes it
    cdef Arena arena
    cdef Mapped memory
    cdef CUresult code
    cdef int fd = -1
    try:
        # A source's regions are not shareable, and it may call this while its arena waits for it.
        if (not isinstance(buffer.home, Arena) or (<Arena>buffer.home).source is not None
                or not find_apart(<Arena>buffer.home, APART_SHAREABLE, buffer.address, &memory)):
            raise UnsupportedHandleTypeError(
                f"{buffer!r} lies among other blocks, so it cannot be exported: allocate it with "
                "arena.allocate(nbytes, shareable=True), or from a DriverPool with shareable=True")
        arena = <Arena>buffer.home
        where = memory.nbytes, buffer.address - memory.address
        if arena_apart(arena.core, APART_SHAREABLE).has_files:
            # A read-only descriptor of a file cannot be mapped to write.
            if read_only:
                fd = os.open(f"/proc/self/fd/{<int>memory.memory}", os.O_RDONLY | os.O_CLOEXEC)
            else:
                fd = fcntl.fcntl(<int>memory.memory, fcntl.F_DUPFD_CLOEXEC, 0)
            return handle_of(fd, None, None), True, *where
        if read_only:
            raise UnsupportedHandleTypeError(
                f"memory of {arena.memory} cannot be exported to be read only: the receiver of the "
                "handle may map it to write")
        with nogil:
            code = memory_export(&arena.driver_device.context, memory.memory, &fd)
        check(arena.driver_device.context.table, code, "cuMemExportToShareableHandle")
        return handle_of(fd, None, None), False, *where
    finally:
        drop_share(share)


def release_retired_arenas(bint may_wait=True):
    """Release the memory of arenas without references to the driver."""
    cdef bint stays
    with nogil:
        arenas_release_retired(may_wait, &stays)


on_release("arenas", release_retired_arenas)
