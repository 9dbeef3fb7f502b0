"""DriverPool: allocations ordered by a stream, cached by the driver (cudaMallocAsync's pool)."""

import os
import struct

cimport cython
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from gpumem._buffer cimport (
    alignment_in, Buffer, counted_fields, DEFAULT_SLOT, ledger_cancel, ledger_count_call,
    ledger_counters, ledger_keep, ledger_make, ledger_move, ledger_stream, LedgerBlock,
    LedgerCounters, MemoryResource, require_open, resource_begin, resource_claim, resource_deliver,
    resource_init,
)
from gpumem._native.driver cimport (
    check, context_enter, context_leave, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
    CU_MEMPOOL_ATTR_USED_MEM_CURRENT, CU_MEMPOOL_ATTR_USED_MEM_HIGH, CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_SUCCESS, CUdeviceptr, CUmemoryPool, CUmemPoolPtrExportData, CUresult, device_enter,
    device_leave, DeviceContext, DriverDevice,
)
from gpumem._resource.handle cimport descriptor_of, handle_of
from gpumem._resource.pool_driver cimport (
    device_figures, no_way_between, peer_is_reached, pool_attribute, pool_config, pool_core,
    pool_destroy, pool_destroy_native, pool_end, pool_free, pool_free_refused, pool_free_view,
    pool_import_pointer, pool_let, pool_lets, pool_make, pool_require_sharing, pool_take, PoolBlock,
    PoolCore,
)
from gpumem._support.lock cimport lock_acquire, lock_release

from gpumem._support.out_of_memory import kept_mappings
from gpumem._support.signatures import ClassSignature
from gpumem.config import PoolConfig
from gpumem.device import Device, devices, MemoryInfo, MemoryKind
from gpumem.errors import ConfigError, OutOfMemoryError
from gpumem.stats import advised, LimitInForce, OutOfMemoryReport, PoolStats, ShrinkReport


cdef enum:
    POOL_ALIGNMENT = 256        # bytes; the minimum of every driver

cdef tuple KEYWORDS = ("device", "config", "handle", "budget", "count", "default_stream", "name")

# A block in a message to another process: sizes, and the driver's own note.
NOTE = struct.Struct("<8sQQQ64s")
NOTE_MAGIC = b"gmpool 1"


@cython.final
@cython.no_gc_clear
cdef class DriverPool(MemoryResource):
    """The driver's stream-ordered memory pool.

    Every allocation and free is a driver call ordered by a stream; the driver caches, reuses and
    trims. It is slower than an `Arena`, but other libraries that allocate from the same pool, and
    other processes, may share its memory. A block that other streams were recorded for
    (`Buffer.record_stream`) is freed after a wait on the device for them. A private pool is made
    unless `handle` names an existing one, which is then neither configured nor destroyed; `default`
    and `current` use a device's own.

    Safe to use from many threads. A fork's child cannot use it, as an `Arena`. Where a driver has
    no pools, `MemoryResource.from_config` makes an arena instead, with a warning.

    Parameters
    ----------
    device : Device, MemoryInfo or str
        A device with the capability ``memory_pools``.
    config : PoolConfig or Mapping, optional
        Settings of a private pool; a mapping is read by `PoolConfig.from_mapping`, for its memory.
    **settings
        Fields of `PoolConfig` by name, as ``max_size="2GiB"``; as `Arena`.
    handle : int, optional
        A native pool (CUmemoryPool) of that device with another owner. It must outlive this
        object and its buffers.
    budget : Budget, optional
        The budget that its blocks are charged to, before they are allocated.
    count : {"reserved", "in_use"}
        The charge ends when the driver has freed a block, or when its user frees it.
    default_stream : stream, optional
        Used where a call names none; None is the device's legacy default stream.
    name : str, optional
        Name used in error messages and reports.

    Raises
    ------
    ConfigError
        The device has no pools, or none that can be shared, or a setting is invalid, or both
        settings and `handle` are given.
    TypeError, ValueError
        `handle` is not an integer from 1 to 2**64 - 1, or a keyword is no setting.
    DriverError
        The driver refused.

    Examples
    --------
    >>> import gpumem
    >>> pool = gpumem.DriverPool("host")
    >>> with pool.allocate(1 << 20) as buffer:
    ...     buffer.nbytes
    1048576

    Notes
    -----
    Work that is queued on its stream after the allocation may use a block; the caller orders other
    streams after that. A block is freed in the order of the stream that it is freed on. A free that
    the driver refuses, for example because the owner of a raw stream handle destroyed it without
    `reset_stream`, is tried again by the next shrink, close or exhausted allocation, when the
    device is idle.

    A budget is charged for blocks. The driver does not report memory that it caches in addition,
    up to `release_threshold`, so no budget can refuse it; `max_size` limits it.
    """

    __signature__ = ClassSignature(PoolConfig)

    def __init__(self, device, config=None, *, handle=None, budget=None, count="reserved",
                 default_stream=None, name=None, **settings):
        """Take the arguments that the class describes."""
        cdef PoolCore* core
        if self.ledger != NULL:
            raise TypeError("DriverPool.__init__ called twice")
        if handle is not None and (config is not None or settings):
            raise ConfigError("a pool given by its handle is used as it is: expected no config "
                              "and no settings")
        # Every argument is read before the first object of the driver is made.
        memory = require_pools(MemoryInfo.parse(device))
        given = None if handle is None else pool_number(handle)
        core = begin(self, memory, default_stream, name, budget, count)
        if given is None:
            self.config = PoolConfig._given(config, settings, memory, KEYWORDS)
            core.pool = pool_make(self.driver_device, self.config)
            # It is destroyed with the last block, which may outlive this object.
            core.owned = True
        else:
            core.pool = <CUmemoryPool><uintptr_t>given
            self.config = pool_config(core)
        core.ledger.limit = self.config.max_size

    def __dealloc__(self):
        # Blocks may outlive the object; their streams stay with them (no_gc_clear).
        ledger_keep(self.ledger, self.streams)

    @classmethod
    def default(cls, device, *, default_stream=None, name=None):
        """Return the device's default pool as a resource.

        Other users share its settings (PyTorch's ``cudaMallocAsync`` backend, JAX and TensorFlow
        set its release threshold), so they are read and never written.

        Raises
        ------
        ConfigError, DriverError
            As for `DriverPool`.
        """
        return cls(device, handle=pool_of_device(device, False),
                   default_stream=default_stream, name=name)

    @classmethod
    def current(cls, device, *, default_stream=None, name=None):
        """Return the pool that ``cuMemAllocAsync`` on the device uses now.

        Raises
        ------
        ConfigError, DriverError
            As for `DriverPool`.
        """
        return cls(device, handle=pool_of_device(device, True),
                   default_stream=default_stream, name=name)

    @property
    def handle(self):
        """The native pool (CUmemoryPool) as an integer, for other libraries."""
        self.require_open()
        return <uintptr_t>pool_core(self.ledger).pool

    @property
    def imported(self):
        """Whether it is another process's pool, which can only `import_buffer`."""
        return bool(self.is_imported)

    # ---- blocks ----------------------------------------------------------------------------------

    cdef int take_block(self, LedgerBlock* block) except -1:
        cdef CUresult code
        if self.is_imported:
            raise ConfigError(f"{self!r} was imported: only the process that made it allocates "
                              "from it; use import_buffer")
        with nogil:
            code = pool_take(block)
            # Only the memory of refused frees can be reclaimed by a wait.
            if code == CUDA_ERROR_OUT_OF_MEMORY and pool_free_refused(pool_core(self.ledger)):
                code = pool_take(block)
        if code == CUDA_ERROR_OUT_OF_MEMORY:
            raise_out_of_memory(self, block)
        return check(self.driver_device.context.table, code, "cuMemAllocFromPoolAsync")

    cdef int make_room(self, uint64_t nbytes) except -1:
        with nogil:
            pool_free_refused(pool_core(self.ledger))
        return 0

    cdef int finish_close(self) except -1:
        # No user has a block now; refused frees are tried again first, because the pool ends.
        with nogil:
            pool_free_refused(pool_core(self.ledger))
            pool_destroy(pool_core(self.ledger))
        self.streams.clear()
        return 0

    cdef void free_buffer(self, Buffer buffer) noexcept:
        cdef LedgerBlock* block = <LedgerBlock*><uintptr_t>buffer.handle
        ledger_move(block, buffer.slot)
        # The block owns the recorded streams from here on: pool_free is ordered after them.
        block.uses = buffer.uses
        with nogil:
            pool_free(block)

    def shrink(self):
        """Release unused memory to the system, down to `bytes_to_keep_on_shrink`.

        Memory that unfinished work may use stays. If the driver refused to free a block before,
        this waits for all work queued on the device, and frees it again.

        Returns
        -------
        ShrinkReport
            The released bytes; a pool does not report which blocks hold other memory.

        Raises
        ------
        ClosedError
            The pool is closed, or belongs to the parent of a fork.
        DriverError
            The driver refused.
        """
        cdef uint64_t before, after, keep
        cdef CUresult code
        self.require_open()
        keep = self.config.bytes_to_keep_on_shrink
        before = pool_attribute(pool_core(self.ledger), CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
        self.make_room(0)
        device_enter(self.ledger.context, "cuMemPoolTrimTo")
        with nogil:
            code = self.ledger.context.table.cuMemPoolTrimTo(pool_core(self.ledger).pool, keep)
        device_leave(self.ledger.context, code, "cuMemPoolTrimTo")
        # Another process, or thread, may allocate between the two readings.
        ledger_count_call(self.ledger, 1)
        after = pool_attribute(pool_core(self.ledger), CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
        return ShrinkReport(before - after if before > after else 0, ())

    def stats(self):
        """Return the counters of this moment as `PoolStats`.

        Raises
        ------
        ClosedError
            The pool is closed, or belongs to the parent of a fork.
        DriverError
            The driver refused.
        """
        cdef LedgerCounters now
        self.require_open()
        now = ledger_counters(self.ledger)
        # An imported pool's memory is counted in the process that made it.
        driver = [0] * 4
        if not self.is_imported:
            driver = [pool_attribute(pool_core(self.ledger), which) for which in (
                CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
                CU_MEMPOOL_ATTR_USED_MEM_CURRENT, CU_MEMPOOL_ATTR_USED_MEM_HIGH)]
        return PoolStats(
            limit=self.config.max_size or None,
            reserved=driver[0],
            max_reserved=driver[1],
            **counted_fields(&now),
            pool_used=driver[2],
            max_pool_used=driver[3],
        )

    # ---- other devices ---------------------------------------------------------------------------

    @property
    def peers(self):
        """The other devices that may access the pool's memory, as the driver answers now.

        Raises
        ------
        ClosedError
            The pool is closed, or belongs to the parent of a fork.
        """
        self.require_open()
        own = self.memory.device
        return tuple([device for device in devices() if device.type == own.type and device != own
                      and pool_lets(pool_core(self.ledger), device.index)])

    def enable_peer(self, device):
        """Let kernels and copies of another device access the pool's memory, now and later.

        This changes the pool itself for all its users, also a pool of another owner and a device's
        own. The caller orders use on the other device with the blocks' streams. Copies between
        devices work without it, ten times as slow. Idempotent.

        Parameters
        ----------
        device : Device or str
            Another device of the same type, such as ``"cuda:1"``.

        Raises
        ------
        PeerAccessError
            The driver has no way between the two devices.
        DriverError
            The driver refused.
        ConfigError
            `device` is the pool's own, or of another type.
        ValueError
            There is no such device.
        ClosedError
            The pool is closed, or belongs to the parent of a fork.

        Examples
        --------
        >>> import gpumem
        >>> pool = gpumem.DriverPool("host:0")
        >>> others = [device for device in gpumem.devices() if device.type == "host"][1:]
        >>> for device in others:
        ...     pool.enable_peer(device)
        >>> list(pool.peers) == others
        True
        """
        self.require_open()
        peer = Device(device)
        if not peer_is_reached(self, peer):
            raise no_way_between(peer, self.memory.device)
        pool_let(pool_core(self.ledger), peer.index)

    # ---- other processes -------------------------------------------------------------------------

    def export_handle(self):
        """Return a descriptor of the pool, for `import_handle` in another process.

        Returns
        -------
        Handle
            Owns the descriptor; send it through `multiprocessing`, or a socket.

        Raises
        ------
        ConfigError
            The pool was not made with ``shareable=True``, or is imported itself.
        DriverError
            The driver refused.

        Examples
        --------
        >>> import gpumem
        >>> pool = gpumem.DriverPool("host", {"shareable": True})
        >>> handle, note = pool.export_handle(), pool.export_buffer(buffer := pool.allocate(64))
        >>> there = gpumem.DriverPool.import_handle("host", handle)     # in the other process
        >>> with there.import_buffer(note) as copy:
        ...     copy.nbytes
        64
        """
        cdef int fd = -1
        cdef CUresult code
        self.require_open()
        require_shareable(self)
        device_enter(self.ledger.context, "cuMemPoolExportToShareableHandle")
        with nogil:
            code = self.ledger.context.table.cuMemPoolExportToShareableHandle(
                &fd, pool_core(self.ledger).pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
        device_leave(self.ledger.context, code, "cuMemPoolExportToShareableHandle")
        # For export_buffer, which needs an exported pool.
        self.was_exported = True
        return handle_of(fd, None, None)

    @classmethod
    def import_handle(cls, device, fd, *, default_stream=None, name=None):
        """Open another process's pool.

        Parameters
        ----------
        device : Device, MemoryInfo or str
            The device that the pool is on.
        fd : int or object with fileno()
            The descriptor that `export_handle` returned, in this process; it stays the caller's.
        default_stream, name : optional
            As for `DriverPool`.

        Returns
        -------
        DriverPool
            It cannot allocate; `import_buffer` opens single buffers.

        Raises
        ------
        ConfigError
            The device has no pools that can be shared.
        OSError
            `fd` is not open.
        DriverError
            The driver refused: the descriptor is not a pool's.
        """
        cdef DriverPool made
        cdef DriverDevice driver_device
        cdef uintptr_t number
        cdef CUmemoryPool pool = NULL
        cdef CUresult code
        memory = require_pools(MemoryInfo.parse(device))
        driver_device = memory.device._open()
        pool_require_sharing(driver_device, memory)
        number = descriptor_of(fd.fileno() if hasattr(fd, "fileno") else fd)
        # Drivers report a closed descriptor as an invalid value; the system names the reason.
        os.fstat(number)
        device_enter(&driver_device.context, "cuMemPoolImportFromShareableHandle")
        with nogil:
            code = driver_device.context.table.cuMemPoolImportFromShareableHandle(
                &pool, <void*>number, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
        device_leave(&driver_device.context, code, "cuMemPoolImportFromShareableHandle")
        try:
            made = DriverPool.__new__(DriverPool)
            made.is_imported = True
            made.config = PoolConfig(shareable=True)
            begin(made, memory, default_stream, name, None, "reserved")
        except BaseException:
            # No ledger owns the pool yet.
            pool_destroy_native(&driver_device.context, pool)
            raise
        pool_core(made.ledger).pool = pool
        pool_core(made.ledger).owned = True
        return made

    def export_buffer(self, Buffer buffer not None):
        """Return a note with which another process opens a buffer of this pool.

        The buffer must stay alive here until the other process has closed its own, and work on it
        must be ordered between the two by other means: synchronise the stream before sending.

        Parameters
        ----------
        buffer : Buffer
            Allocated from this pool, by itself or through adaptors; not empty.

        Returns
        -------
        bytes
            For `import_buffer`; plain data, without a descriptor.

        Raises
        ------
        ConfigError
            The pool was not made with ``shareable=True``, or is imported itself.
        ValueError
            The buffer is empty, or its memory is another resource's.
        ClosedError
            The buffer or the pool is closed.
        DriverError
            The driver refused.
        """
        cdef CUmemPoolPtrExportData note
        cdef LedgerBlock block
        cdef CUresult code
        self.require_open()
        require_shareable(self)
        if buffer.home is not self:
            raise ValueError(f"{buffer!r} is not a buffer of {self!r}")
        require_open(buffer)
        if buffer.block_bytes == 0:
            raise ValueError("an empty buffer has no memory to export")
        if not self.was_exported:
            self.export_handle().close()    # drivers export a pointer after its pool only
        block = block_of(self, buffer)
        device_enter(self.ledger.context, "cuMemPoolExportPointer")
        with nogil:
            code = self.ledger.context.table.cuMemPoolExportPointer(&note, block.base)
        device_leave(self.ledger.context, code, "cuMemPoolExportPointer")
        return NOTE.pack(NOTE_MAGIC, buffer.requested_bytes, buffer.address - block.base,
                         block.size, (<char*>note.reserved)[:sizeof(note.reserved)])

    def import_buffer(self, data, stream=None):
        """Open a buffer of another process.

        A buffer that is opened twice in one process is the same memory at the same address. It is
        freed with the last of them, after the streams of all.

        Parameters
        ----------
        data : bytes
            The bytes that `export_buffer` returned.
        stream : stream, optional
            The stream that it is freed on here.

        Returns
        -------
        Buffer
            Close it before the exporting process closes its own.

        Raises
        ------
        TypeError, ValueError
            `data` was not returned by `export_buffer`.
        ConfigError
            This pool was not imported.
        DriverError
            The driver refused.
        """
        cdef CUmemPoolPtrExportData note
        cdef CUdeviceptr base = 0
        cdef LedgerBlock* block
        cdef CUresult code
        cdef uint32_t slot = DEFAULT_SLOT
        cdef bytes raw
        self.require_open()
        if not self.is_imported:
            raise ConfigError(f"{self!r} was not imported: buffers of another process are opened "
                              "by the pool that import_handle returned")
        # A note is foreign data: its numbers are checked before the driver sees any of it.
        requested, offset, size, raw = read_note(data)
        self.slot_of(stream, &slot)
        memcpy(note.reserved, <char*>raw, sizeof(note.reserved))
        block = resource_claim(self, requested, size, slot, False)
        (<PoolBlock*>block).imported = True
        with nogil:
            code = context_enter(self.ledger.context)
            if code == CUDA_SUCCESS:
                code = pool_import_pointer(self.ledger.context, pool_core(self.ledger).pool, &note,
                                           &base)
                context_leave(self.ledger.context)
        # The claim keeps the pool open during the call; it is cancelled on failure.
        if code != CUDA_SUCCESS:
            ledger_cancel(block)
            check(self.driver_device.context.table, code, "cuMemPoolImportPointer")
        block.base = base
        return resource_deliver(self, block, base + <uint64_t>offset)


# ---- making one ----------------------------------------------------------------------------------

cdef object require_pools(object memory):
    """Return the memory, or raise ConfigError if no pool can hold it."""
    if memory.kind not in (MemoryKind.DEVICE, MemoryKind.HOST):
        raise ConfigError(f"a driver's pool holds a device's own memory, not {memory}")
    capability = memory.device.capabilities["memory_pools"]
    if not capability:
        if memory.device not in devices():
            raise ConfigError(capability.reason)    # there is no such device
        raise ConfigError(f"{memory} has no driver's pools: {capability.reason}")
    return memory


cdef LedgerBlock block_of(DriverPool pool, Buffer buffer):
    # Returns a copy. A buffer of an adaptor has a block of the adaptor's; the pool's block is found
    # by its address.
    cdef LedgerBlock found
    cdef LedgerBlock* block
    if buffer.resource is pool:
        return (<LedgerBlock*><uintptr_t>buffer.handle)[0]
    with nogil:
        lock_acquire(&pool.ledger.lock)
        block = pool.ledger.newest
        while block != NULL and not block.base <= buffer.address < block.base + block.size:
            block = block.older
        if block != NULL:
            found = block[0]
        lock_release(&pool.ledger.lock)
    if block == NULL:
        raise ValueError(f"{buffer!r} is not a buffer of {pool!r}")
    return found


cdef int require_shareable(DriverPool pool) except -1:
    if pool.is_imported:
        raise ConfigError(f"{pool!r} was imported: only the process that made it exports it")
    if not pool.config.shareable:
        raise ConfigError(f"{pool!r} cannot be exported: it was created without shareable = True")
    return 0


cdef object pool_number(object handle):
    # cuda-python's CUmemoryPool has __int__, and no __index__.
    if isinstance(handle, bool | float | str) or not hasattr(handle, "__int__"):
        raise TypeError(f"a pool's handle must be an integer, not {type(handle).__name__}")
    number = int(handle)
    if not 1 <= number < 1 << 64:
        raise ValueError(f"pool handle {number} is not an integer from 1 to 2**64 - 1")
    return number


cdef object pool_of_device(object device, bint current):
    """Return the handle of a device's default or current pool."""
    cdef DriverDevice driver_device = require_pools(MemoryInfo.parse(device)).device._open()
    cdef DeviceContext* context = &driver_device.context
    # Neither call needs a current device. The pool is not owned.
    cdef CUmemoryPool pool = NULL
    cdef CUresult code
    if current:
        code = context.table.cuDeviceGetMemPool(&pool, context.device)
    else:
        code = context.table.cuDeviceGetDefaultMemPool(&pool, context.device)
    check(context.table, code, "cuDeviceGetMemPool" if current else "cuDeviceGetDefaultMemPool")
    return <uintptr_t>pool


cdef PoolCore* begin(DriverPool pool, object memory, object default_stream, object name,
                     object budget, object count) except NULL:
    resource_init(pool, memory, name)
    resource_begin(pool, ledger_make(sizeof(PoolCore), sizeof(PoolBlock), pool_free_view,
                                     pool_end),
                   "DriverPool", default_stream, budget, count)
    # For a larger alignment MemoryResource.allocate requests more bytes.
    pool.ledger.granule = POOL_ALIGNMENT
    pool.alignment = alignment_in(pool.memory)
    return pool_core(pool.ledger)


# ---- failure and other processes' notes ----------------------------------------------------------

cdef int raise_out_of_memory(DriverPool pool, LedgerBlock* block) except -1:
    cdef LedgerCounters now = ledger_counters(pool.ledger)
    cdef uint64_t reserved = pool_attribute(pool_core(pool.ledger),
                                            CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
    cdef uint64_t most = pool.config.max_size or 0
    with kept_mappings:
        report = OutOfMemoryReport(
            str(pool.memory), block.requested, block.size, pool.name,
            <uintptr_t>ledger_stream(pool.ledger, block.slot),
            (LimitInForce("max_size", most, reserved),) if most else (),
            in_use=now.in_use, reserved=reserved, free=reserved - min(reserved, now.in_use),
            waiting=now.waiting, **device_figures(pool, &pool.driver_device.context, pool.ledger))
        # The driver does not report which it reached; with a maximum size that is more likely.
        raise OutOfMemoryError.of(advised(report, "limit" if most else "driver"))


def pool_of(Buffer buffer not None):
    """Return the driver's pool of a buffer's memory, also through adaptors; None: another's."""
    return buffer.home if isinstance(buffer.home, DriverPool) else None


cdef tuple read_note(object data):
    """Return (requested, offset, size, the driver's note) of a note of `export_buffer`."""
    raw = bytes(memoryview(data))
    if len(raw) != NOTE.size:
        raise ValueError(f"invalid data of {len(raw)} bytes: expected the {NOTE.size} that "
                         "export_buffer returns")
    magic, requested, offset, size, note = NOTE.unpack(raw)
    # The offset is that of an aligned address inside the exported block.
    if magic != NOTE_MAGIC or not 0 < requested <= size < 1 << 48 or offset > size - requested:
        raise ValueError("invalid data: expected the bytes that export_buffer returns")
    return requested, offset, size, note
