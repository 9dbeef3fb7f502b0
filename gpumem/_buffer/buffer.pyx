"""Buffer: a block of memory and the right to it; MemoryResource: what hands out buffers."""

cimport cython
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from gpumem._budget cimport account_of, admit_or_raise, tell_of_crossings
from gpumem._buffer.arguments cimport advice_of, alignment_of, side_of, size_of
from gpumem._buffer.dlpack cimport (
    DL_CPU, dlpack_bytes, dlpack_check_stream, dlpack_device_from, dlpack_device_of,
    dlpack_wants_versioned, DLDevice, same_device,
)
from gpumem._buffer.ledger cimport (
    BlockLedger, counted_fields, DEFAULT_SLOT, ledger_cancel, ledger_charge, ledger_claim,
    ledger_close, LEDGER_CLOSED, ledger_count_call, ledger_counters, ledger_deliver, ledger_drain,
    ledger_drop, ledger_end, ledger_find_stream, ledger_lease, ledger_make, ledger_note_failure,
    LEDGER_OK, ledger_open_event_source, ledger_open_streams, ledger_return, ledger_stream,
    LedgerBlock, LedgerCounters, ledgers_release_retired,
)
from gpumem._buffer.stream cimport Stream, stream_handle
from gpumem._buffer.user_resource cimport require_raw_methods, user_allocate, user_deallocate
from gpumem._native.backing cimport managed_advise, managed_prefetch
from gpumem._native.bfc cimport ABSURD
from gpumem._native.budget cimport budget_has_crossed
from gpumem._native.driver cimport check, context_is_dead, CUmem_advise, CUresult, CUstream
from gpumem._support.deferred cimport defer, Deferred, run_deferred
from gpumem._support.lease cimport Lease, lease_drop_buffer, lease_retain, Uses, uses_add
from gpumem._support.streams cimport LEGACY_STREAM, PER_THREAD_STREAM

from gpumem._support.arguments import require
from gpumem._support.providers import provided
from gpumem.device import MemoryInfo, MemoryKind
from gpumem.errors import ClosedError, ConfigError, InUseError, OutOfMemoryError


cdef char* BYTES_FORMAT = "B"

cdef int (*on_resource)() except -1     # called when a resource is made; NULL: nothing to call
on_resource = NULL


cdef void set_resource_hook(int (*function)() except -1) noexcept nogil:
    global on_resource
    on_resource = function


cdef class MemoryResource:
    """Base of everything that hands out `Buffer` objects of one memory.

    To make one of your own, derive from it and write two methods, `allocate_raw` and
    `deallocate_raw`; sizes, streams, alignment, statistics, views, their lifetime and the rules at
    fork and exit come from here.

    Parameters
    ----------
    memory : MemoryInfo, Device or str
        Where the blocks live. Its `alignment` is what `allocate_raw` promises; its kind says who
        can reach the blocks, and so which views a Buffer gives.
    name : str, optional
        Name used in error messages and reports; the memory's name by default.
    budget : Budget, optional
        What its blocks are charged to, before `allocate_raw` is called.
    count : {"reserved", "in_use"}
        Until when: until `deallocate_raw` has returned, or until the user has given the block back.

    Attributes
    ----------
    memory : MemoryInfo
    name : str
    budget : Budget or None
        What it charges.

    Raises
    ------
    TypeError
        Of a class that has no `allocate_raw` and `deallocate_raw`, or a second initialisation.
    ValueError
        The memory does not exist here.

    Examples
    --------
    >>> import ctypes
    >>> import gpumem
    >>> class Plain(gpumem.MemoryResource):
    ...     def __init__(self):
    ...         super().__init__(gpumem.MemoryInfo("host", alignment=1))
    ...         self.blocks = {}
    ...     def allocate_raw(self, nbytes, stream):
    ...         block = ctypes.create_string_buffer(nbytes)
    ...         self.blocks[ctypes.addressof(block)] = block
    ...         return ctypes.addressof(block)
    ...     def deallocate_raw(self, ptr, nbytes, stream):
    ...         del self.blocks[ptr]
    >>> resource = Plain()
    >>> with resource.allocate(100, alignment=256) as buffer:
    ...     buffer.ptr % 256, resource.stats().requested_in_use
    (0, 100)
    >>> resource.blocks
    {}

    Notes
    -----
    The two methods may be called from any thread that runs Python, by several at once. A block
    whose last view was dropped on another thread goes back soon after, on the main thread or in
    the next call of this resource. `deallocate_raw` is not called after the interpreter has begun
    to end, and in a fork's child neither is; the child makes a resource of its own.
    """

    def __init__(self, memory, *, name=None, budget=None, count="reserved"):
        if self.memory is not None:
            raise TypeError(f"{type(self).__name__}.__init__ called twice")
        require_raw_methods(type(self), MemoryResource)
        resource_init(self, memory, name)
        resource_begin(
            self, ledger_make(sizeof(BlockLedger), sizeof(LedgerBlock), free_later, NULL),
            "user", None, budget, count)
        self.ledger.is_users = True
        self.ledger.granule = self.memory.alignment
        self.streams[DEFAULT_SLOT] = Stream.from_handle(self.memory.device, 0)

    def __dealloc__(self):
        if self.ledger != NULL:
            ledger_drop(self.ledger)
            ledgers_release_retired()

    @classmethod
    def from_config(cls, memory, config=None, *, budget=None, count="reserved",
                    default_stream=None, name=None):
        """Make the resource that the settings ask for: an arena, or the driver's pool.

        Parameters
        ----------
        memory : MemoryInfo, Device or str
            Where the bytes live.
        config : ArenaConfig or Mapping, optional
            Settings; a mapping is read by `ArenaConfig.from_mapping`. With ``use_cuda_mempool`` a
            `DriverPool` is made (see `PoolConfig.from_arena`).
        budget, count : optional
            What it charges, and for what: see `Arena` and `DriverPool`.
        default_stream : stream, optional
            Used where a call names none; None is the device's legacy default stream.
        name : str, optional
            Name used in error messages and reports.

        Returns
        -------
        Arena or DriverPool
            An arena also where a pool was asked for and the device has none: the other settings
            govern it, and a `PoolFallbackWarning` says why.

        Raises
        ------
        ConfigError
            A setting is invalid, or would have no effect: the pool's without
            ``use_cuda_mempool``, or ``use_cuda_mempool`` for memory that is not a device's own.
        ValueError, DriverError
            As for `Arena` and `DriverPool`.

        Examples
        --------
        >>> import gpumem
        >>> pools = {"arena.use_cuda_mempool": "1"}
        >>> with gpumem.MemoryResource.from_config("host", pools) as resource:
        ...     resource.is_arena
        False
        """
        return provided("resource_from_config")(
            memory, config, budget=budget, count=count, default_stream=default_stream, name=name)

    def allocate_raw(self, nbytes, stream):
        """Take a block from wherever the memory comes from; written by a derived class.

        Parameters
        ----------
        nbytes : int
            Bytes, at least 1.
        stream : Stream
            The stream whose work uses the block first. The block may be used by work that is
            queued on it from now on, and by no other.

        Returns
        -------
        int
            The address of the first byte, a multiple of ``self.memory.alignment``.

        Raises
        ------
        MemoryError
            There is no room. This and every other exception reaches the caller of `allocate`
            as it is, with nothing changed; so do TypeError and ValueError for what is returned and
            is no such address.
        """
        raise NotImplementedError(f"{type(self).__name__} has no allocate_raw")

    def deallocate_raw(self, ptr, nbytes, stream):
        """Take a block back; written by a derived class. Called once for each block.

        Parameters
        ----------
        ptr, nbytes : int
            What `allocate_raw` returned and was asked for.
        stream : Stream
            Work that was queued on it before now may still use the block. It need not be the
            stream of the allocation.

        Notes
        -----
        Runs inside finalizers: it must not wait. What it raises is reported to
        ``sys.unraisablehook``, and the block counts as freed.
        """
        raise NotImplementedError(f"{type(self).__name__} has no deallocate_raw")

    def allocate(self, nbytes, stream=None, *, alignment=None, shareable=False):
        """Hand out a block.

        Parameters
        ----------
        nbytes : int
            Size in bytes; 0 gives a valid empty Buffer with pointer 0.
        stream : stream, optional
            The stream whose work uses the block first, and on which it goes back; None is the
            device's legacy default stream.
        alignment : int, optional
            Bytes, a power of two up to 2 MiB. Beyond what the memory promises, so much more is
            asked for.
        shareable : bool
            Whether other processes may be given the memory: an `Arena` alone accepts True.

        Returns
        -------
        Buffer
            Owns the block; dropping or closing it gives the block back.

        Raises
        ------
        TypeError, ValueError
            An argument is invalid, or what `allocate_raw` returned is no address.
        MemoryError
            There is no room; OutOfMemoryError if the size exceeds the address space.
        ConfigError
            `shareable`.
        ClosedError
            It is closed, or belongs to the parent of a fork.
        """
        cdef uint64_t size = size_of(nbytes)
        cdef uint64_t multiple = 0 if alignment is None else alignment_of(alignment)
        cdef uint32_t slot = DEFAULT_SLOT
        self.require_open()
        refuse_shareable(self, shareable)
        self.slot_of(stream, &slot)
        return serve(self, size, slot, multiple, False)

    def allocate_persistent(self, nbytes):
        """Hand out a long-lived block (weights), on the default stream.

        Parameters
        ----------
        nbytes : int
            Size in bytes.

        Raises
        ------
        TypeError, ValueError, MemoryError, ClosedError
            As `allocate`.
        """
        cdef uint64_t size = size_of(nbytes)
        self.require_open()
        return serve(self, size, DEFAULT_SLOT, 0, True)

    def shrink(self):
        """Give back what can be spared: here nothing, since nothing is kept.

        Returns
        -------
        ShrinkReport

        Examples
        --------
        >>> import gpumem
        >>> gpumem.adaptors.limit(gpumem.Arena("host"), 1 << 20).shrink()
        ShrinkReport(released_bytes=0, retained=())
        """
        self.require_open()
        from gpumem.stats import ShrinkReport
        return ShrinkReport(0, ())

    def reset_stream(self, stream):
        """Declare a stream drained: its blocks go back on the default stream from now on.

        The caller has synchronised the stream. Required before the owner of a stream given as a
        raw handle destroys it; a stream given as an object is kept alive instead.

        Raises
        ------
        ClosedError
            It is closed, or belongs to the parent of a fork.
        """
        cdef uint32_t slot = DEFAULT_SLOT
        self.require_open()
        self.slot_of(stream, &slot)
        if slot != DEFAULT_SLOT:
            ledger_drain(self.ledger, slot)
            self.streams.pop(slot, None)

    def stats(self):
        """Return the counters of this moment as `Stats`; reserved is what is not back yet.

        Raises
        ------
        ClosedError
            It belongs to the parent of a fork.
        """
        cdef LedgerCounters now
        self.require_own()
        run_deferred()
        now = ledger_counters(self.ledger)
        from gpumem.stats import Stats
        return Stats(
            limit=0,
            reserved=now.in_use + now.waiting,
            max_reserved=now.max_held,
            **counted_fields(&now),
        )

    def snapshot(self):
        """Return the state of this moment, every block of it, as `gpumem.observe.Snapshot`.

        Raises
        ------
        ClosedError
            It belongs to the parent of a fork.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host", name="cache")
        >>> buffer = arena.allocate(1000)
        >>> [(each.name, len(each.live)) for each in arena.snapshot().resources]
        [('cache', 1)]
        """
        return provided("snapshot")(self)

    @property
    def is_arena(self):
        """Whether it sub-allocates and can be shrunk."""
        return False

    @property
    def closed(self):
        """Whether `close` was called."""
        return self.ledger == NULL or bool(self.ledger.closed)

    def close(self):
        """Close it: later calls raise ClosedError. Idempotent.

        Raises
        ------
        InUseError
            A buffer, or a view of one, is still alive; nothing is changed.
        """
        cdef LedgerCounters now
        run_deferred()
        if self.ledger == NULL:
            refuse_forgotten(self)
        if self.closed:
            return
        if context_is_dead(&self.driver_device.context):
            self.ledger.closed = True
            return
        if ledger_close(self.ledger) != LEDGER_OK:
            now = ledger_counters(self.ledger)
            raise InUseError(f"{self!r} cannot be closed: {now.requested} bytes in {now.live} "
                             "blocks are in use")
        self.finish_close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __repr__(self):
        state = ", closed" if self.closed else ""
        ours = self.ledger != NULL and not self.ledger.is_users
        kind = f"{'gpumem.' if ours else ''}{type(self).__name__}"
        return f"<{kind} {self.name!r} on {self.memory}{state}>"

    # ---- what buffers ask ------------------------------------------------------------------------

    cdef Buffer obtain(self, uint64_t nbytes):
        return self.allocate(nbytes)

    cdef int slot_of(self, object stream, uint32_t* slot) except -1:
        cdef CUstream handle = NULL
        if stream is None and self.ledger != NULL and self.ledger.default_per_thread:
            stream = PER_THREAD_STREAM
        if stream is None:
            slot[0] = DEFAULT_SLOT
            return 0
        self.require_own()
        stream_handle(stream, self.driver_device, &handle)
        if not ledger_find_stream(self.ledger, handle, slot):
            raise MemoryError("out of host memory while noting a stream")
        self.keep_stream(stream, handle, slot[0])
        return 0

    cdef int keep_stream(self, object stream, CUstream handle, uint32_t slot) except -1:
        cdef bint is_handle = hasattr(stream, "__index__")  # its owner resets it before it ends
        # A stream that ends with its object must be that object; of others the first will do.
        if slot in self.streams and not (isinstance(stream, Stream) and (<Stream>stream).owned):
            return 0
        if self.ledger.is_users and not isinstance(stream, Stream):
            stream = Stream.from_handle(self.memory.device, <uintptr_t>handle,
                                        None if is_handle else stream)
        elif is_handle:
            return 0
        self.streams[slot] = stream
        return 0

    cdef uint64_t stream_at(self, uint32_t slot) noexcept:
        return <uintptr_t>self.ledger.streams[slot].handle

    cdef void give_back(self, Buffer buffer) noexcept:
        cdef LedgerBlock* block = <LedgerBlock*><uintptr_t>buffer.handle
        block.slot = buffer.slot
        free_now(&block.deferred)

    cdef Lease* lease(self, Buffer buffer) except NULL:
        cdef Lease* lease = ledger_lease(<LedgerBlock*><uintptr_t>buffer.handle, buffer.address,
                                         buffer.block_bytes, buffer.slot)
        if lease == NULL:
            raise MemoryError("out of host memory while sharing a block")
        return lease

    cdef void move_lease(self, Lease* lease, uint32_t slot) noexcept:
        lease.stream_slot = slot

    cdef int record(self, Uses** uses, uint32_t slot) except -1:
        raise TypeError(f"{self!r} cannot hold a block back for another stream")

    cdef int require_present(self) except -1:
        return 0

    cdef int before_cpu(self, Buffer buffer) except -1:
        return 0

    cdef int before_stream(self, Buffer buffer, CUstream stream) except -1:
        return 0

    # ---- what a ledger's resource does for one block: here, of a class that users write ----------

    cdef int take_block(self, LedgerBlock* block) except -1:
        block.base = user_allocate(self, block.size, stream_object(self, block.slot))
        ledger_count_call(self.ledger, 0)
        block.deferred.run = free_now
        block.owner = <PyObject*>self
        Py_INCREF(self)
        return 0

    cdef int make_room(self, uint64_t nbytes) except -1:
        return 0

    cdef int finish_close(self) except -1:
        return 0

    cdef int require_open(self) except -1:
        require_made(self)
        run_deferred()
        if self.ledger.closed:
            raise ClosedError(f"{self!r} is closed")
        return self.require_own()

    cdef int require_own(self) except -1:
        require_made(self)
        # A thread of the parent may have held the lock at the fork.
        if context_is_dead(&self.driver_device.context):
            raise ClosedError(f"{self!r} belongs to the parent process, or the interpreter is "
                              "ending")
        return 0


cdef int refuse_shareable(MemoryResource resource, object shareable) except -1:
    require("shareable", shareable, bool, "True or False")
    if shareable:
        raise ConfigError(f"invalid shareable = True for {resource!r}: only an Arena "
                          "allocates memory that can be exported to other processes")
    return 0


cdef int require_made(MemoryResource resource) except -1:
    if resource.ledger == NULL:
        refuse_forgotten(resource)
        raise ClosedError(f"this {type(resource).__name__} was never initialised")
    return 0


cdef int refuse_forgotten(MemoryResource resource) except -1:
    # An __init__ that was written in Python is one that may forget its base.
    if hasattr(type(resource).__init__, "__code__"):
        raise TypeError(f"this {type(resource).__name__} was never initialised: its __init__ calls "
                        "super().__init__(memory)")
    return 0


# ---- resources with a ledger ---------------------------------------------------------------------

cdef Buffer serve(MemoryResource resource, uint64_t requested, uint32_t slot, uint64_t alignment,
                  bint persistent):
    cdef BlockLedger* ledger = resource.ledger
    cdef uint64_t size = requested
    cdef LedgerBlock* block
    if requested == 0:
        return empty_buffer(resource, slot)
    if alignment > ledger.granule:
        size += alignment - ledger.granule
    if size >= ABSURD:
        from gpumem._support.out_of_memory import absurd
        now = ledger_counters(ledger)
        raise OutOfMemoryError.of(absurd(
            str(resource.memory), requested, size, resource=resource.name,
            stream=resource.stream_at(slot), in_use=now.in_use, reserved=now.in_use + now.waiting))
    block = resource_claim(resource, requested, size, slot, persistent)
    try:
        resource_charge(resource, block)
        resource.take_block(block)
    except BaseException as error:
        if isinstance(error, MemoryError):
            ledger_note_failure(block)
        ledger_cancel(block)
        raise
    alignment = max(alignment, 1)
    return resource_deliver(resource, block, (block.base + alignment - 1) & ~(alignment - 1))


cdef LedgerBlock* resource_claim(MemoryResource resource, uint64_t requested, uint64_t size,
                                 uint32_t slot, bint persistent) except NULL:
    cdef LedgerBlock* block = NULL
    cdef int status = ledger_claim(resource.ledger, requested, size, slot, persistent, &block)
    if status == LEDGER_CLOSED:
        raise ClosedError(f"{resource!r} is closed")
    if status != LEDGER_OK:
        raise MemoryError("out of host memory while allocating a block's metadata")
    return block


cdef int resource_charge(MemoryResource resource, LedgerBlock* block) except -1:
    if block.ledger.account == NULL:
        return 0
    if ledger_charge(block):
        if budget_has_crossed():
            tell_of_crossings()
        return 0
    resource.make_room(block.size)
    now = ledger_counters(block.ledger)
    admit_or_raise(block.ledger.account, block.size, {
        "requested_nbytes": block.requested, "in_use": now.in_use,
        "reserved": now.in_use + now.waiting, "memory": str(resource.memory),
        "stream": resource.stream_at(block.slot)})
    block.charged = block.size
    return 0


cdef Buffer resource_deliver(MemoryResource resource, LedgerBlock* block, uint64_t address):
    ledger_deliver(block)
    try:
        return buffer_of(resource, address, block.requested, block.size, <uintptr_t>block,
                         block.slot)
    except BaseException:
        block.ledger.free(block)
        raise


cdef int record_use(Uses** uses, uint32_t slot) except -1:
    cdef bint added
    if not uses_add(uses, slot, &added):
        raise MemoryError("out of host memory while noting a stream")
    return 0


cdef object stream_object(MemoryResource resource, uint32_t slot):
    # Of a user's class: every slot has its Stream, and the default stream is the legacy one. That
    # stands for streams that were reset, and for another thread's default stream.
    cdef uintptr_t handle = <uintptr_t>ledger_stream(resource.ledger, slot)
    return resource.streams[slot if handle > LEGACY_STREAM else DEFAULT_SLOT]


cdef void free_later(LedgerBlock* block) noexcept nogil:
    # A user's block whose last view was dropped, perhaps on a thread without the interpreter.
    defer(&block.deferred)


cdef void free_now(Deferred* work) noexcept:
    cdef LedgerBlock* block = <LedgerBlock*>work
    cdef MemoryResource resource = <MemoryResource>block.owner
    Py_DECREF(resource)     # the variable holds it now
    if not context_is_dead(&resource.driver_device.context):
        ledger_return(block, True)
        user_deallocate(resource, block.base, block.size, stream_object(resource, block.slot))
        ledger_count_call(resource.ledger, 0)
    ledger_end(block, True)


cdef int resource_begin(MemoryResource resource, BlockLedger* ledger, str kind,
                        object default_stream, object budget, object count) except -1:
    cdef CUstream handle = NULL
    if ledger == NULL:
        raise MemoryError("out of host memory while allocating a resource's metadata")
    resource.ledger = ledger
    ledger.context = &resource.driver_device.context
    ledger.account = account_of(budget, count, resource.name, &ledger.counts_in_use)
    resource.budget = budget
    stream_handle(default_stream, resource.driver_device, &handle)
    if not ledger_open_streams(ledger, handle):
        raise MemoryError("out of host memory while allocating a resource's metadata")
    if default_stream is not None and not hasattr(default_stream, "__index__"):
        resource.streams[DEFAULT_SLOT] = default_stream
    ledger_open_event_source(ledger, str(resource.memory).encode(), kind.encode(),
                             resource.name.encode("utf-8", "replace"))
    return 0


cdef int resource_init(MemoryResource resource, object memory, object name) except -1:
    """Fill in what every resource has; opens the device."""
    require("name", name, (str, type(None)), "a str or None")
    resource.memory = MemoryInfo.parse(memory)
    resource.name = str(resource.memory) if name is None else name
    resource.driver_device = resource.memory.device._open()
    resource.cpu_can_read = resource.memory.host_accessible
    resource.dl_device = dlpack_device_of(resource.memory)
    resource.streams = {}
    if on_resource != NULL:
        on_resource()
    return 0


cdef int resource_adapt(MemoryResource resource, MemoryResource upstream, object name) except -1:
    if upstream.memory is None:
        raise TypeError(f"this {type(upstream).__name__} was never initialised")
    require("name", name, (str, type(None)), "a str or None")
    resource.memory = upstream.memory
    resource.name = upstream.name if name is None else name
    resource.driver_device = upstream.driver_device
    resource.cpu_can_read = upstream.cpu_can_read
    resource.is_read_only = upstream.is_read_only
    resource.dl_device = upstream.dl_device
    resource.streams = upstream.streams
    return 0


cdef Buffer buffer_of(MemoryResource resource, uint64_t address, uint64_t requested,
                      uint64_t nbytes, uint64_t handle, uint32_t slot):
    cdef Buffer buffer = Buffer.__new__(Buffer)
    buffer.resource = resource
    buffer.home = resource
    buffer.address = address
    buffer.requested_bytes = requested
    buffer.block_bytes = nbytes
    buffer.handle = handle
    buffer.slot = slot
    return buffer


cdef Buffer empty_buffer(MemoryResource resource, uint32_t slot):
    return buffer_of(resource, 0, 0, 0, 0, slot)


@cython.final
@cython.no_gc
@cython.freelist(256)
cdef class Buffer:
    """A block of memory and the right to it.

    Made by `Arena.allocate`. Dropping the last reference, `close`, or leaving a ``with`` block
    frees it; views made through NumPy, DLPack or the buffer protocol keep the memory until they
    are gone too.

    Examples
    --------
    >>> import gpumem
    >>> arena = gpumem.Arena("host")
    >>> buffer = arena.allocate(1000)
    >>> view = memoryview(buffer)
    >>> del buffer                       # the view has the memory now
    >>> view[999] = 7
    >>> view.release()
    >>> arena.stats().in_use
    0
    """

    def __init__(self):
        raise TypeError("a Buffer is made by an allocator's allocate()")

    def __dealloc__(self):
        buffer_end(self)

    @property
    def ptr(self):
        """Address of the first byte; 0 for an empty buffer."""
        return self.address

    @property
    def nbytes(self):
        """Bytes that were asked for; what every view shows."""
        return self.requested_bytes

    @property
    def allocated_nbytes(self):
        """Bytes of the block behind it, padding included."""
        return self.block_bytes

    @property
    def memory(self):
        """The MemoryInfo it lives in."""
        return made(self).memory

    @property
    def stream(self):
        """The stream it is freed on."""
        cdef MemoryResource resource = made(self)
        kept = resource.streams.get(self.slot)
        if isinstance(kept, Stream):
            return kept
        return Stream.from_handle(resource.memory.device, resource.stream_at(self.slot), kept)

    @property
    def closed(self):
        """Whether it was closed."""
        return bool(self.is_closed)

    def close(self, stream=None):
        """Free the block on `stream` (None: its own). Idempotent.

        The free is ordered as ``cudaFreeAsync`` orders one: behind what is queued on `stream` now,
        and behind nothing else. Work on other streams, the block's own too when another is named,
        must be ordered before it by an event, or be told of by `record_stream`.

        Views of it stay valid and keep the memory until the last of them is gone; the block is
        freed on `stream` then.

        Parameters
        ----------
        stream : stream, optional
            None is the stream that the block was allocated for.

        Raises
        ------
        TypeError, ValueError
            `stream` is no stream, or one of another device; nothing is changed.

        Examples
        --------
        >>> import gpumem
        >>> arena, stream = gpumem.Arena("host"), gpumem.Stream("host")
        >>> buffer = arena.allocate(1000)
        >>> stream.wait(buffer.stream.record())      # behind the work that used the block
        >>> buffer.close(stream)
        >>> buffer.closed, arena.stats().in_use
        (True, 0)
        """
        if self.is_closed:
            return
        if stream is not None:
            made(self).slot_of(stream, &self.slot)
            if self.is_closed:      # meanwhile: reading a foreign stream runs foreign code
                return
            if self.shared != NULL:
                self.resource.move_lease(self.shared, self.slot)
        buffer_end(self)

    def record_stream(self, stream):
        """Note that work on another stream uses the block, too.

        When the block is freed, by whatever and on whatever stream, nobody gets it, not even its
        own stream, before the work that is queued on `stream` at that moment is known to be done;
        under ``stream_reuse="wait"`` a taker's stream may wait for that on the device instead.
        Views that outlive the buffer keep the note. Until then the block is neither in use nor
        free: `Arena.stats` counts it in ``reserved`` only.

        Nothing is queued on any stream by this call, and the free calls no driver. Recording a
        stream twice changes nothing, nor does the one that the block is freed on. After
        ``reset_stream(stream)`` by a raw handle the note is void unless the stream was named
        again.

        Parameters
        ----------
        stream : stream
            Of the same device. None is the allocator's default stream.

        Raises
        ------
        TypeError, ValueError
            `stream` is no stream, or one of another device.
        ClosedError
            The buffer is closed.

        Notes
        -----
        PyTorch's ``Tensor.record_stream``.

        Examples
        --------
        >>> import gpumem
        >>> arena, side = gpumem.Arena("host"), gpumem.Stream("host")
        >>> buffer = arena.allocate(4096)
        >>> buffer.record_stream(side)      # queue work on `side`, then:
        >>> buffer.close()                  # held back until that work is done
        """
        cdef uint32_t slot
        cdef MemoryResource resource = made(self)
        if not self.is_closed:
            resource.slot_of(stream, &slot)
        if self.is_closed:              # perhaps meanwhile: reading a stream runs foreign code
            raise ClosedError("this buffer is closed")
        if self.block_bytes == 0:
            return
        resource.record(&self.uses if self.shared == NULL else &self.shared.uses, slot)

    # ---- managed memory: hints -------------------------------------------------------------------

    def prefetch(self, destination=None, stream=None):
        """Move the pages of managed memory, in the order of a stream.

        A hint: the bytes are the same wherever the pages are.

        Parameters
        ----------
        destination : Device or str, optional
            A device, or ``"host"`` for the CPU's memory; None is the buffer's own device.
        stream : stream, optional
            Where the move is queued; None is the buffer's own stream.

        Raises
        ------
        ValueError
            The memory is not managed, or the destination is not of its driver.
        ClosedError
            The buffer is closed.
        DriverError
            The driver refused: a device without concurrent access to managed memory, or no such
            device.

        Examples
        --------
        >>> import gpumem
        >>> with gpumem.Arena("host/managed").allocate(1 << 20) as buffer:
        ...     buffer.prefetch()
        ...     buffer.prefetch("host")
        """
        cdef MemoryResource resource = require_managed(self, "prefetched")
        cdef CUstream handle = NULL
        cdef CUresult code
        cdef int where = side_of(resource.memory, destination)
        if stream is None:
            handle = <CUstream><uintptr_t>resource.stream_at(self.slot)
        else:
            stream_handle(stream, resource.driver_device, &handle)
        if self.block_bytes == 0:
            return
        with nogil:
            code = managed_prefetch(&resource.driver_device.context, self.address,
                                    self.requested_bytes, where, handle)
        check(resource.driver_device.context.table, code, "cuMemPrefetchAsync")

    def advise(self, advice, location=None):
        """Tell the driver how managed memory will be used.

        The driver keeps advice for whole pages, so that a small buffer's neighbours share it, and
        as long as the arena holds the memory.

        Parameters
        ----------
        advice : str
            ``"read_mostly"``, ``"preferred_location"``, ``"accessed_by"``, or one of them after
            ``"unset_"``; the meanings are cuMemAdvise's.
        location : Device or str, optional
            The device meant, or ``"host"`` for the CPU; None is the buffer's own device. Without
            a meaning for ``read_mostly`` and ``unset_preferred_location``.

        Raises
        ------
        ValueError
            Unknown advice, memory that is not managed, or a location that is not its driver's.
        ClosedError
            The buffer is closed.
        DriverError
            The driver refused.

        Examples
        --------
        >>> import gpumem
        >>> with gpumem.Arena("host/managed").allocate(1 << 20) as buffer:
        ...     buffer.advise("preferred_location", "host")
        """
        cdef MemoryResource resource = require_managed(self, "advised")
        cdef CUresult code
        cdef int where = side_of(resource.memory, location)
        cdef int number = advice_of(advice)
        if self.block_bytes == 0:
            return
        with nogil:
            code = managed_advise(&resource.driver_device.context, self.address,
                                  self.requested_bytes, <CUmem_advise>number, where)
        check(resource.driver_device.context.table, code, "cuMemAdvise")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __len__(self):
        return self.requested_bytes

    def __repr__(self):
        state = ", closed" if self.is_closed else ""
        return (f"<gpumem.Buffer {self.requested_bytes} bytes at {self.address:#x} in "
                f"{made(self).memory}{state}>")

    # ---- views -----------------------------------------------------------------------------------

    def __getbuffer__(self, Py_buffer* view, int flags):
        if not made(self).cpu_can_read:
            raise BufferError(f"{self.home.memory} is not readable by the CPU: copy it to host "
                              "memory first")
        if flags & PyBUF_WRITABLE and self.home.is_read_only:
            raise BufferError("this buffer is read-only")
        self.home.before_cpu(self)
        view.internal = buffer_share(self)
        view.buf = <void*>self.address
        view.len = self.requested_bytes
        view.readonly = self.home.is_read_only
        view.itemsize = 1
        view.format = BYTES_FORMAT if flags & PyBUF_FORMAT else NULL
        view.ndim = 1
        view.shape = <Py_ssize_t*>&self.requested_bytes if flags & PyBUF_ND else NULL
        view.strides = &view.itemsize if (flags & PyBUF_STRIDES) == PyBUF_STRIDES else NULL
        view.suboffsets = NULL
        view.obj = self

    def __releasebuffer__(self, Py_buffer* view):
        drop_share(view.internal)

    def __dlpack_device__(self):
        """Return DLPack's (device type, device id)."""
        cdef MemoryResource resource = made(self)
        return resource.dl_device.device_type, resource.dl_device.device_id

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """Return a DLPack capsule over the bytes: one dimension of uint8.

        Parameters
        ----------
        stream : int, optional
            The consumer's stream, by the protocol; a Buffer has no pending work of its own.
        max_version : tuple of int, optional
            The newest DLPack the consumer reads; from (1, 0) it gets a versioned capsule.
        dl_device : tuple of int, optional
            Must be the buffer's own device.
        copy : bool, optional
            True is refused: a Buffer only exports itself.

        Raises
        ------
        BufferError
            The export asked for is not possible.
        """
        cdef DLDevice device = made(self).dl_device
        cdef bint versioned = dlpack_wants_versioned(max_version)
        if dl_device is not None and not same_device(dlpack_device_from(dl_device), device):
            raise BufferError(f"this buffer is on DLPack device {self.__dlpack_device__()}, "
                              f"not on {dl_device}")
        if copy:
            raise BufferError("a Buffer exports its own memory only: copy=True is not possible")
        dlpack_check_stream(device, stream)
        if self.home.is_read_only and not versioned:
            raise BufferError("read-only memory needs a versioned DLPack capsule: ask with "
                              "max_version=(1, 0)")
        if device.device_type == DL_CPU:
            self.home.before_cpu(self)
        elif stream is None or stream != -1:
            self.home.before_stream(self, <CUstream><uintptr_t><uint64_t>(stream or 1))
        return dlpack_bytes(self.address, self.requested_bytes, device, self.home.is_read_only,
                            versioned, buffer_share(self))

    @property
    def __cuda_array_interface__(self):
        """Version 3 of the CUDA array interface; absent on memory that CUDA does not reach."""
        cdef MemoryResource resource = made(self)
        if resource.memory.device.type != "cuda":
            raise AttributeError(f"CUDA does not reach {resource.memory}")
        if self.is_closed:
            raise ClosedError("this buffer is closed")
        return {"shape": (self.requested_bytes,), "typestr": "|u1", "strides": None,
                "data": (self.address, bool(resource.is_read_only)), "version": 3, "stream": None}


cdef inline MemoryResource made(Buffer buffer):
    # Buffer.__new__ alone makes one that nobody handed out.
    if buffer.home is None:
        raise TypeError("a Buffer is made by an allocator's allocate(); this one was not")
    return buffer.home


cdef MemoryResource require_managed(Buffer buffer, str what):
    """Return the resource of an open buffer of managed memory; else raise."""
    cdef MemoryResource resource = made(buffer)
    if buffer.is_closed:
        raise ClosedError("this buffer is closed")
    if resource.memory.kind is not MemoryKind.MANAGED:
        raise ValueError(f"{resource.memory} is not managed memory and cannot be {what}")
    if context_is_dead(&resource.driver_device.context):
        raise ClosedError("this buffer belongs to the parent process")
    return resource


cdef void buffer_end(Buffer buffer) noexcept:
    if buffer.is_closed:
        return
    buffer.is_closed = True
    if buffer.block_bytes == 0:
        return
    if buffer.shared != NULL:
        lease_drop_buffer(buffer.shared)
        buffer.shared = NULL
    else:
        buffer.resource.give_back(buffer)


cdef int require_open(Buffer buffer) except -1:
    if buffer.is_closed:
        raise ClosedError("this buffer is closed")
    if buffer.block_bytes:
        buffer.resource.require_present()
    return 0


cdef Lease* buffer_share(Buffer buffer) except? NULL:
    """Return one more reference to the block, for a view; NULL for an empty buffer."""
    require_open(buffer)
    if buffer.block_bytes == 0:
        return NULL
    if buffer.shared == NULL:
        buffer.shared = buffer.resource.lease(buffer)
        buffer.shared.uses = buffer.uses
        buffer.uses = NULL
    lease_retain(buffer.shared)
    return buffer.shared
