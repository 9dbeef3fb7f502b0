"""MemoryResource: the base of all resources; sizes and alignments that callers pass."""

from dataclasses import replace

cimport cython
from cpython.dict cimport PyDict_GetItem
from cpython.long cimport PyLong_AsSsize_t
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from gpumem._budget cimport account_of, admit_or_raise, call_crossing_callbacks
from gpumem._buffer.buffer cimport (
    Buffer, buffer_of, empty_buffer, ResourceBase, refuse_forgotten, require_made,
)
from gpumem._buffer.dlpack cimport dlpack_device_of
from gpumem._buffer.ledger cimport (
    BlockLedger, counted_fields, DEFAULT_SLOT, ledger_cancel, ledger_charge, ledger_claim,
    ledger_close, LEDGER_CLOSED, ledger_count_call, ledger_counters, ledger_deliver, ledger_drain,
    ledger_drop, ledger_end, ledger_make, ledger_note, LEDGER_OK, ledger_open_event_source,
    ledger_open_streams, ledger_order_uses, ledger_return, ledger_stream, LedgerBlock,
    LedgerCounters, ledgers_release_retired,
)
from gpumem._buffer.stream cimport Stream, stream_handle
from gpumem._native.bfc cimport ABSURD, QUANTUM
from gpumem._native.budget cimport budget_has_crossed
from gpumem._native.driver cimport (
    context_enter, context_is_dead, context_leave, CUDA_SUCCESS, CUstream, device_enter,
    DeviceContext,
)
from gpumem._support.atomics cimport load32, store32
from gpumem._support.events cimport REC_FAILURE
from gpumem._support.lease cimport Lease, lease_create, Uses
from gpumem._support.memory cimport require_memory
from gpumem._support.process cimport call_unraisable, defer, Deferred, run_deferred
from gpumem._support.streams cimport LEGACY_STREAM

from gpumem._support.arguments import power_of_two, require, require_name
from gpumem._support.closing import close_after_body
from gpumem._support.releases import release_retired
from gpumem._support.signatures import ClassSignature
from gpumem._support.sizes import format_size, whole_bytes
from gpumem._support.texts import counted
from gpumem.device import MemoryInfo
from gpumem.errors import ClosedError, ConfigError, InUseError, OutOfMemoryError
from gpumem.stats import absurd, ShrinkReport, Stats


ctypedef int (*OnResource)() except -1

cdef OnResource[RESOURCE_HOOKS] on_resource     # called when a resource is made; NULL: not set


cdef void set_resource_hook(ResourceHook hook, int (*function)() except -1) noexcept nogil:
    on_resource[<int>hook] = function


@cython.no_gc_clear
cdef class MemoryResource(ResourceBase):
    """Base of all resources, which allocate `Buffer` objects of one memory.

    To write a resource, derive from it and define two methods, `allocate_raw` and `deallocate_raw`.
    The base handles sizes, streams, alignment, statistics, views and their lifetime, and the rules
    at fork and exit.

    Parameters
    ----------
    memory : MemoryInfo, Device or str
        Where the blocks live. `allocate_raw` promises its `alignment`; its kind decides which
        processors reach the blocks, and so which views a Buffer has.
    name : str, optional
        Name used in error messages and reports; the memory's name by default.
    budget : Budget, optional
        The budget that its blocks are charged to, before `allocate_raw` is called.
    count : {"reserved", "in_use"}
        The charge ends when `deallocate_raw` has returned, or when the user frees the block.

    Attributes
    ----------
    memory : MemoryInfo
    name : str
    budget : Budget or None
        The budget that it charges.

    Raises
    ------
    TypeError
        The class has no `allocate_raw` or `deallocate_raw`, or this is a second initialisation.
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
    The two methods are called with the device of `memory` current. They may be called from any
    thread that runs Python, by several at once. If another thread drops the last view of a block,
    it is freed soon after, on the main thread or in the next call of this resource.
    `deallocate_raw` is not called after the interpreter has begun to end, and neither method in a
    fork's child, which makes its own resource.

    Python's garbage collector does not see buffers. A resource that keeps its own buffers must
    close them; otherwise it and they live until the process ends.
    """

    __signature__ = ClassSignature()

    def __init__(self, memory, *, name=None, budget=None, count="reserved"):
        """Take the arguments that the class describes."""
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
            with nogil:
                ledger_drop(self.ledger)    # it may end a driver's pool
            ledgers_release_retired()

    @classmethod
    def from_config(cls, memory, config=None, *, budget=None, count="reserved",
                    default_stream=None, name=None):
        """Make the resource that the settings request: an arena, or the driver's pool.

        Parameters
        ----------
        memory : MemoryInfo, Device or str
            Where the bytes live.
        config : ArenaConfig or Mapping, optional
            Settings; a mapping is read by `ArenaConfig.from_mapping`, for this memory. With
            ``use_cuda_mempool`` a `DriverPool` is made (see `PoolConfig.from_arena`).
        budget, count : optional
            The budget that it charges, and the bytes that count: see `Arena` and `DriverPool`.
        default_stream : stream, optional
            Used where a call names none; None is the device's legacy default stream.
        name : str, optional
            Name used in error messages and reports.

        Returns
        -------
        Arena or DriverPool
            If a pool is requested and the device has none, an arena with the other settings, and a
            `PoolFallbackWarning` with the reason.

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
        from gpumem._defaults import resource_from_config

        return resource_from_config(
            memory, config, budget=budget, count=count, default_stream=default_stream, name=name)

    def allocate_raw(self, nbytes, stream):
        """Allocate a block; defined by a derived class.

        Parameters
        ----------
        nbytes : int
            Bytes, at least 1.
        stream : Stream
            The stream that uses the block first. The block may be used by work that is
            queued on it from now on, and by no other.

        Returns
        -------
        int
            The address of the first byte, a multiple of ``self.memory.alignment``.

        Raises
        ------
        MemoryError
            There is no room. This and every other exception reaches the caller of `allocate`
            as it is, with nothing changed; so do TypeError and ValueError for a returned value
            that is not such an address.
        """
        raise NotImplementedError(f"{type(self).__name__} has no allocate_raw")

    def deallocate_raw(self, ptr, nbytes, stream):
        """Free a block; defined by a derived class. Called once for each block.

        Parameters
        ----------
        ptr, nbytes : int
            The address that `allocate_raw` returned, and the bytes that were requested.
        stream : Stream
            Work that was queued on it before now may still use the block. It need not be the
            stream of the allocation. It waits, on the device, for the streams of
            `Buffer.record_stream`.

        Notes
        -----
        It runs inside finalizers, so it must not wait. Its exception is reported to
        ``sys.unraisablehook``, and the block counts as freed.
        """
        raise NotImplementedError(f"{type(self).__name__} has no deallocate_raw")

    def allocate(self, nbytes, stream=None, *, alignment=None, shareable=False, transport=None):
        """Allocate a block.

        Parameters
        ----------
        nbytes : int or str
            Size in bytes, or a text such as ``"512MiB"``; 0 returns a valid empty Buffer with
            pointer 0.
        stream : stream, optional
            Work on this stream uses the block first, and the block is freed on it; None is the
            device's legacy default stream.
        alignment : int, optional
            Bytes, a power of two up to 2 MiB. An alignment above that of the memory requests as
            many bytes more.
        shareable : bool
            Whether other processes may map the memory: only an `Arena` accepts True.
        transport : {None, "ipc"}
            The transport that must be able to register the memory: only an `Arena` accepts
            ``"ipc"``.

        Returns
        -------
        Buffer
            Owns the block; dropping or closing it frees the block.

        Raises
        ------
        TypeError, ValueError
            An argument is invalid, or `allocate_raw` did not return an address.
        MemoryError
            There is no room; OutOfMemoryError if the size exceeds the address space.
        ConfigError
            `shareable` or `transport`.
        ClosedError
            It is closed, or belongs to the parent of a fork.
        """
        cdef uint64_t size = size_of(nbytes, self)
        cdef uint64_t multiple = self.alignment
        cdef uint32_t slot = DEFAULT_SLOT
        if alignment is not None:
            multiple = max(multiple, alignment_of(alignment))
        self.require_open()
        require("shareable", shareable, bool, "True or False")
        if shareable:
            raise ConfigError(f"invalid shareable = True for {self!r}: only an Arena allocates "
                              "memory that can be exported to other processes")
        if transport is not None:
            raise ConfigError(f"invalid transport = {transport!r} for {self!r}: only an Arena "
                              "allocates memory for a transport")
        self.slot_of(stream, &slot)
        return serve(self, size, slot, multiple, False)

    def allocate_persistent(self, nbytes):
        """Allocate a long-lived block (weights), on the default stream.

        Parameters
        ----------
        nbytes : int or str
            Size in bytes, or a text such as ``"512MiB"``.

        Raises
        ------
        TypeError, ValueError, MemoryError, ClosedError
            As `allocate`.
        """
        cdef uint64_t size = size_of(nbytes, self)
        self.require_open()
        return serve(self, size, DEFAULT_SLOT, self.alignment, True)

    def shrink(self):
        """Release unused memory: here none, because this resource keeps none.

        Returns
        -------
        ShrinkReport

        Examples
        --------
        >>> import gpumem
        >>> gpumem.adaptors.limit(gpumem.Arena("host"), 1 << 20).shrink()
        <gpumem.ShrinkReport: 0 B released, 0 B retained in 0 regions>
        """
        self.require_open()
        return ShrinkReport(0, ())

    def reset_stream(self, stream):
        """Declare that a stream has no unfinished work; its blocks are freed on the default stream.

        The caller has synchronised the stream. Call it before the owner of a stream that was given
        as a raw handle destroys it; a stream that was given as an object is kept alive.

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
        """Return the counters of this moment as `Stats`; reserved counts blocks not yet freed.

        Raises
        ------
        ClosedError
            It belongs to the parent of a fork.
        """
        cdef LedgerCounters now
        self.require_own()
        run_deferred()
        now = ledger_counters(self.ledger)
        return Stats(
            limit=None,
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
        from gpumem._snapshots.snapshot import snapshot

        return snapshot(self)

    @property
    def is_arena(self):
        """Whether it sub-allocates and can be shrunk."""
        return False

    @property
    def closed(self):
        """Whether `close` was called."""
        if self.ledger == NULL:         # never made, or one of memory that others own
            return self.memory is None
        return bool(load32(<uint32_t*>&self.ledger.closed))

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
            return
        if self.closed:
            return
        if context_is_dead(&self.driver_device.context):
            store32(<uint32_t*>&self.ledger.closed, True)
            return
        status = ledger_close(self.ledger)
        if status != LEDGER_OK:
            # Finished copies, and work for the interpreter, may not have freed their blocks yet.
            release_retired()
            status = ledger_close(self.ledger)
        if status != LEDGER_OK:
            now = ledger_counters(self.ledger)
            raise InUseError(f"{self!r} cannot be closed; in use: {format_size(now.requested)} in "
                             f"{counted(now.live, 'block')}; close the buffers and drop their "
                             "views first")
        self.finish_close()

    def _close_if_idle(self):
        # Its caller drops it and may not wait: a resource in use ends without references.
        run_deferred()
        if (self.ledger != NULL and not self.closed
                and not context_is_dead(&self.driver_device.context)
                and ledger_counters(self.ledger).waiting == 0
                and ledger_close(self.ledger) == LEDGER_OK):
            self.finish_close()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        close_after_body(self.close, error)

    def __repr__(self):
        state = ", closed" if self.closed else ""
        ours = self.ledger != NULL and not self.ledger.is_users
        kind = f"{'gpumem.' if ours else ''}{type(self).__name__}"
        return f"<{kind} {self.name!r} on {self.memory}{state}>"

    def _repr_html_(self):
        from html import escape

        return f"<p>{escape(repr(self))}</p>" + self.stats()._repr_html_()

    cdef Buffer obtain(self, uint64_t nbytes):
        return self.allocate(nbytes)

    # ---- blocks of a user's class; other resources with a ledger override these ------------------

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
        if load32(<uint32_t*>&self.ledger.closed):
            raise ClosedError(f"{self!r} is closed")
        return self.require_own()


# ---- sizes and alignments that callers pass ------------------------------------------------------

cdef enum:
    MAX_ALIGNMENT = 1 << 21    # bytes
    MAX_TEXTS = 256            # sizes as texts that are not parsed again

cdef dict sizes_of_texts = {}    # bytes by text, at most MAX_TEXTS

cdef uint64_t size_of(object nbytes, object resource) except? <uint64_t>-1:
    cdef Py_ssize_t size
    if type(nbytes) is not int:
        nbytes = size_of_text(nbytes) if type(nbytes) is str else whole_bytes("nbytes", nbytes)
    try:
        size = PyLong_AsSsize_t(nbytes)
    except OverflowError:
        size = -1 if nbytes < 0 else refuse_absurd(nbytes, resource)
    if size < 0:
        raise ValueError(f"invalid nbytes = {nbytes}: expected 0 or more bytes")
    return size


cdef object size_of_text(object text):
    cdef PyObject* known = PyDict_GetItem(sizes_of_texts, text)
    if known != NULL:
        return <object>known
    cdef object nbytes = whole_bytes("nbytes", text)
    if len(sizes_of_texts) < MAX_TEXTS:
        sizes_of_texts[text] = nbytes
    return nbytes


cdef int refuse_absurd(object nbytes, object resource) except -2:
    if resource is None:
        raise ValueError(f"invalid nbytes = {nbytes}: expected 0 to 2**63 - 1 bytes")
    try:
        # No resource has that many bytes: its refusal has all other figures.
        resource.allocate(<uint64_t>ABSURD)
    except OutOfMemoryError as error:
        raise OutOfMemoryError.of(replace(
            error.report, requested_nbytes=nbytes,
            allocated_nbytes=-(-nbytes // QUANTUM) * QUANTUM)) from None
    raise MemoryError(f"{resource!r} cannot allocate {nbytes} bytes")


cdef uint64_t alignment_of(object alignment) except? 0:
    cdef uint64_t number
    if type(alignment) is int and 1 <= alignment <= MAX_ALIGNMENT:
        number = alignment
        if number & (number - 1) == 0:
            return number
    return power_of_two("alignment", alignment, MAX_ALIGNMENT, "2097152")


cdef uint64_t alignment_in(object memory) except? 0:
    if memory.alignment > MAX_ALIGNMENT:
        raise ConfigError(f"invalid alignment = {memory.alignment} of {memory} for the blocks of "
                          f"an arena or a pool: expected at most {<int>MAX_ALIGNMENT}")
    return memory.alignment


# ---- memory of others ----------------------------------------------------------------------------

cdef class BorrowedMemory(MemoryResource):
    """Base of resources of buffers over memory with another owner."""

    cdef int borrow(self, object memory, str name, object stream, bint may_have_none,
                    ReleaseOwner release) except -1:
        resource_init(self, memory, name)
        self.release = release
        self.is_borrowed = True
        if stream is None and may_have_none:
            self.is_streamless = True
            self.queued_uses = []
        # The legacy stream orders itself against every blocking stream of the device.
        self.own = <CUstream><uintptr_t>LEGACY_STREAM
        if stream is not None:
            self.own = self.named(stream)
            self.store_stream(0, stream)        # kept alive, because buffers name its handle
        return 0

    cdef CUstream named(self, object stream) except? NULL:
        cdef CUstream handle = NULL
        stream_handle(stream, self.driver_device, &handle)
        return handle if handle != NULL else <CUstream><uintptr_t>LEGACY_STREAM

    cdef int slot_of(self, object stream, uint32_t* slot) except -1:
        # Slot 0 is the own stream, 1 any other.
        slot[0] = 0 if stream is None or self.named(stream) == self.own else 1
        return 0

    cdef uint64_t stream_at(self, uint32_t slot) noexcept:
        return <uintptr_t>self.own

    cdef void free_buffer(self, Buffer buffer) noexcept:
        self.release(<void*><uintptr_t>buffer.handle)

    cdef Lease* lease(self, Buffer buffer) except? NULL:
        return lease_create(buffer.handle, buffer.address, buffer.requested_bytes, 0,
                            <void*>self.release, release_borrowed)

    cdef void move_lease(self, Lease* lease, uint32_t slot) noexcept:
        pass

    cdef int record(self, Buffer buffer, Uses** uses, uint32_t slot) except -1:
        return 0        # the release waits for every stream that `slot_of` accepts


cdef void release_borrowed(Lease* lease) noexcept nogil:
    (<ReleaseOwner>lease.owner)(<void*><uintptr_t>lease.handle)


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
            ledger_note(block, REC_FAILURE)
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
    require_memory(status == LEDGER_OK, "allocating a block's metadata")
    return block


cdef int resource_charge(MemoryResource resource, LedgerBlock* block) except -1:
    if block.ledger.account == NULL:
        return 0
    if ledger_charge(block):
        if budget_has_crossed():
            call_crossing_callbacks()
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
    cdef Buffer buffer
    ledger_deliver(block)
    try:
        buffer = buffer_of(resource, address, block.requested, block.size, <uintptr_t>block,
                           block.slot)
    except BaseException:
        block.ledger.free(block)
        raise
    return buffer


cdef object stream_object(MemoryResource resource, uint32_t slot):
    # Every slot of a user's class has its Stream, and the default stream is the legacy one, which
    # stands for streams that were reset, and for another thread's default stream.
    cdef uintptr_t handle = <uintptr_t>ledger_stream(resource.ledger, slot)
    return resource.streams[slot if handle > LEGACY_STREAM else DEFAULT_SLOT]


cdef void free_later(LedgerBlock* block) noexcept nogil:
    # The last view of a user's block was dropped, perhaps on a thread without the interpreter.
    defer(&block.deferred)


cdef void free_now(Deferred* work) noexcept:
    cdef LedgerBlock* block = <LedgerBlock*>work
    cdef MemoryResource resource = <MemoryResource>block.owner
    Py_DECREF(resource)     # the variable holds it now
    if not context_is_dead(&resource.driver_device.context):
        ledger_return(block, True)
        if block.uses != NULL:
            with nogil:
                follow_uses(block)
        user_deallocate(resource, block.base, block.size, stream_object(resource, block.slot))
        ledger_count_call(resource.ledger, 0)
    ledger_end(block, True)


cdef void follow_uses(LedgerBlock* block) noexcept nogil:
    # The stream that is passed to deallocate_raw is ordered after the recorded streams. If the
    # driver cannot order it, only a wait is correct.
    cdef DeviceContext* context = block.ledger.context
    if (ledger_order_uses(block, ledger_stream(block.ledger, block.slot)) != CUDA_SUCCESS
            and context_enter(context) == CUDA_SUCCESS):
        context.table.cuCtxSynchronize()
        context_leave(context)


cdef int resource_begin(MemoryResource resource, BlockLedger* ledger, str kind,
                        object default_stream, object budget, object count) except -1:
    cdef CUstream handle = NULL
    require_memory(ledger != NULL, "allocating a resource's metadata")
    resource.ledger = ledger
    ledger.context = &resource.driver_device.context
    ledger.account = account_of(budget, count, resource.name, &ledger.counts_in_use)
    resource.budget = budget
    stream_handle(default_stream, resource.driver_device, &handle)
    require_memory(ledger_open_streams(ledger, handle), "allocating a resource's metadata")
    if default_stream is not None and not hasattr(default_stream, "__index__"):
        resource.store_stream(DEFAULT_SLOT, default_stream)
    ledger_open_event_source(ledger, str(resource.memory).encode(), kind.encode(),
                             resource.name.encode("utf-8", "replace"))
    return 0


cdef int resource_init(MemoryResource resource, object memory, object name) except -1:
    """Set the fields that every resource has; open the device."""
    require_name(name)
    resource.memory = MemoryInfo.parse(memory)
    resource.name = str(resource.memory) if name is None else name
    resource.driver_device = resource.memory.device._open()
    resource.cpu_can_read = resource.memory.host_accessible
    resource.dl_device = dlpack_device_of(resource.memory)
    resource.streams = {}
    for hook in on_resource:
        if hook != NULL:
            hook()
    return 0


cdef int resource_adapt(MemoryResource resource, MemoryResource upstream, object name) except -1:
    if upstream.memory is None:
        raise TypeError(f"this {type(upstream).__name__} was never initialised")
    require_name(name)
    resource.memory = upstream.memory
    resource.name = upstream.name if name is None else name
    resource.driver_device = upstream.driver_device
    resource.cpu_can_read = upstream.cpu_can_read
    resource.is_read_only = upstream.is_read_only
    resource.dl_device = upstream.dl_device
    resource.streams = upstream.streams
    return 0


# ---- the two methods that users write ------------------------------------------------------------

cdef int require_raw_methods(object cls, object base) except -1:
    if cls.allocate is not base.allocate:
        return 0    # it returns blocks of another resource
    for method in ("allocate_raw", "deallocate_raw"):
        if getattr(cls, method) is getattr(base, method):
            raise TypeError(f"{cls.__name__} has no {method}: a class of MemoryResource writes "
                            "allocate_raw and deallocate_raw")
    return 0


cdef uint64_t user_allocate(MemoryResource resource, uint64_t size, object stream) except 0:
    cdef DeviceContext* context = &resource.driver_device.context
    cdef uint64_t alignment = resource.memory.alignment
    # Most allocators allocate on the current device, not on the stream's.
    device_enter(context, "cuCtxPushCurrent")
    try:
        given = resource.allocate_raw(size, stream)
    finally:
        context_leave(context)
    where = f"{type(resource).__name__}.allocate_raw({size}, ...) returned"
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise TypeError(f"{where} {given!r}: it returns an address as an integer, or raises "
                        "MemoryError")
    number = given.__index__()
    if not 0 < number < 1 << 64:
        raise ValueError(f"{where} {number}: it returns an address from 1 to 2**64 - 1, or "
                         "raises MemoryError")
    if number % alignment:
        user_deallocate(resource, number, size, stream)
        raise ValueError(f"{where} {number:#x}, which is not a multiple of {alignment}, "
                         "the alignment that its memory promises")
    return number


cdef int user_deallocate(MemoryResource resource, uint64_t address, uint64_t size,
                         object stream) noexcept:
    cdef DeviceContext* context = &resource.driver_device.context
    cdef bint is_current = context_enter(context) == CUDA_SUCCESS
    call_unraisable(resource.deallocate_raw, (address, size, stream), resource)
    if is_current:
        context_leave(context)
    return 0
