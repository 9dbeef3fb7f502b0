"""DriverPool: allocations ordered by a stream, cached by the driver (cudaMallocAsync's pool)."""

cimport cython
from libc.stdint cimport int32_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from gpumem._buffer cimport (
    Buffer,
    MemoryResource,
    buffer_of,
    empty_buffer,
    resource_init,
    size_of,
)
from gpumem._driver cimport (
    CU_EVENT_DISABLE_TIMING,
    CU_MEM_ALLOCATION_TYPE_PINNED,
    CU_MEM_HANDLE_TYPE_NONE,
    CU_MEM_LOCATION_TYPE_DEVICE,
    CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
    CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
    CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
    CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
    CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC,
    CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES,
    CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
    CU_MEMPOOL_ATTR_USED_MEM_HIGH,
    CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_SUCCESS,
    CUdeviceptr,
    CUevent,
    CUmemPool_attribute,
    CUmemPoolProps,
    CUmemoryPool,
    CUresult,
    CUstream,
    Place,
    check,
    place_enter,
    place_is_dead,
    place_leave,
)
from gpumem._lease cimport Lease, Uses, lease_create, uses_add, uses_free
from gpumem._stream cimport stream_handle

from gpumem.config import PoolConfig
from gpumem.device import MemoryKind
from gpumem.errors import ClosedError, ConfigError, InUseError, OutOfMemoryError
from gpumem.stats import ShrinkReport, Stats

cdef extern from *:
    """
    static inline int32_t gm_pool_count(int32_t *count, int32_t by) {
        return __atomic_add_fetch(count, by, __ATOMIC_ACQ_REL);
    }
    static inline uint64_t gm_pool_add(uint64_t *sum, uint64_t by) {
        return __atomic_add_fetch(sum, by, __ATOMIC_RELAXED);
    }
    """
    int32_t gm_pool_count(int32_t* count, int32_t by) noexcept nogil
    uint64_t gm_pool_add(uint64_t* sum, uint64_t by) noexcept nogil


@cython.final
cdef class DriverPool(MemoryResource):
    """The driver's stream-ordered memory pool.

    Every allocation and free is a driver call ordered by a stream; the driver caches, reuses and
    trims. Slower than an `Arena`, but its blocks may be used by whatever else takes memory from
    the same pool. A block that other streams were recorded for (`Buffer.record_stream`) is freed
    behind a wait on the device for them, in the order of the stream that frees it. A private pool
    is made unless `handle` names an existing one, which is then
    neither configured nor destroyed.

    Parameters
    ----------
    device : Device, MemoryInfo or str
        A device whose capability ``memory_pools`` holds.
    config : PoolConfig or Mapping, optional
        Settings of a private pool; a mapping is read by `PoolConfig.from_mapping`.
    handle : int, optional
        A native pool (CUmemoryPool) that somebody else owns.
    name : str, optional
        For people.

    Raises
    ------
    ConfigError
        The device has no pools, or a setting is not accepted, or both `config` and `handle` given.
    DriverError
        The driver refused.

    Examples
    --------
    >>> import gpumem
    >>> pool = gpumem.DriverPool("host")
    >>> with pool.allocate(1 << 20) as buffer:
    ...     buffer.nbytes
    1048576
    """

    def __cinit__(self, device, config=None, *, handle=None, name=None):
        cdef CUmemoryPool pool = NULL
        resource_init(self, device, name)
        require_pools(self)
        self.handles = [0]
        if handle is not None and config is not None:
            raise ConfigError("a pool given by its handle is used as it is: config must be None")
        self.config = config if isinstance(config, PoolConfig) else PoolConfig.from_mapping(
            config or {})
        if handle is None:
            pool = make_pool(self)
        else:
            pool = <CUmemoryPool><uintptr_t>handle
        self.core = <PoolCore*>calloc(1, sizeof(PoolCore))
        if self.core == NULL:
            destroy_pool(self, pool if handle is None else NULL)
            raise MemoryError("no host memory for a pool's books")
        self.core.references = 1
        self.core.owned = handle is None
        self.core.pool = pool
        self.core.place = &self.place.place

    def __init__(self, device, config=None, *, handle=None, name=None):
        pass        # __cinit__ has made it

    def __dealloc__(self):
        if self.core != NULL:
            core_drop(self.core)

    @property
    def handle(self):
        """The native pool (CUmemoryPool) as an integer, for other libraries."""
        self._require_open()
        return <uintptr_t>self.core.pool

    @property
    def closed(self):
        """Whether `close` was called."""
        return bool(self.is_closed)

    def allocate(self, nbytes, stream=None):
        """Hand out a block, in the order of a stream.

        Parameters
        ----------
        nbytes : int
            Size in bytes; 0 gives a valid empty Buffer with pointer 0.
        stream : stream, optional
            The block exists for work queued on it from now on; None is the legacy default stream.

        Raises
        ------
        TypeError, ValueError
            `nbytes` is no integer, or negative.
        OutOfMemoryError
            The driver has no memory left.
        ClosedError
            The pool is closed, or belongs to the parent of a fork.
        """
        cdef uint64_t size = size_of(nbytes)
        cdef uint32_t slot = 0
        cdef CUdeviceptr pointer = 0
        cdef CUresult code
        cdef CUstream handle
        self._require_open()
        if stream is not None:
            self.slot_of(stream, &slot)
        if size == 0:
            return empty_buffer(self, slot)
        handle = <CUstream><uintptr_t>self.handles[slot]
        with nogil:
            code = place_enter(self.core.place)
            if code == CUDA_SUCCESS:
                code = self.core.place.table.cuMemAllocFromPoolAsync(
                    &pointer, size, self.core.pool, handle)
                place_leave(self.core.place)
        if code != CUDA_SUCCESS:
            self._refuse(code, size, <uintptr_t>handle)
        gm_pool_count(&self.core.references, 1)
        gm_pool_add(&self.core.requested, size)
        gm_pool_add(&self.core.num_allocs, 1)
        self.max_alloc = max(self.max_alloc, size)
        return buffer_of(self, pointer, size, size, 0, slot)

    def shrink(self):
        """Let the driver give unused memory back, down to `bytes_to_keep_on_shrink`.

        Returns
        -------
        ShrinkReport
            The bytes that went; a pool does not tell what holds the rest.
        """
        cdef uint64_t before, after
        cdef uint64_t keep = self.config.bytes_to_keep_on_shrink
        cdef CUresult code
        self._require_open()
        before = self._attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
        with nogil:
            code = place_enter(self.core.place)
            if code == CUDA_SUCCESS:
                code = self.core.place.table.cuMemPoolTrimTo(self.core.pool, keep)
                place_leave(self.core.place)
        check(self.core.place.table, code, "cuMemPoolTrimTo")
        self.shrinkages += 1
        after = self._attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
        return ShrinkReport(before - after if before > after else 0, ())

    def stats(self):
        """Return `Stats` as far as a driver's pool tells them; its limit is 0."""
        self._require_open()
        return Stats(
            limit=0,
            in_use=self._attribute(CU_MEMPOOL_ATTR_USED_MEM_CURRENT),
            requested_in_use=self.core.requested,
            reserved=self._attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT),
            max_in_use=self._attribute(CU_MEMPOOL_ATTR_USED_MEM_HIGH),
            max_reserved=self._attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH),
            num_allocs=self.core.num_allocs,
            num_frees=self.core.num_frees,
            num_reserves=0,
            num_extensions=0,
            num_regions=0,
            num_shrinkages=self.shrinkages,
            max_alloc_size=self.max_alloc,
            largest_free=0,
            pages_moved=0,
            driver_calls=self.core.num_allocs + self.core.num_frees,
        )

    def close(self):
        """Give the pool up. Idempotent.

        Raises
        ------
        InUseError
            A buffer, or a view of one, is still alive; nothing is changed.
        """
        if self.is_closed:
            return
        live = self.core.num_allocs - self.core.num_frees
        if live and not place_is_dead(self.core.place):
            raise InUseError(f"pool {self.name!r} cannot be closed: {self.core.requested} bytes in "
                             f"{live} blocks are in use")
        self.is_closed = True
        if self.core.owned and not place_is_dead(self.core.place):
            destroy_pool(self, self.core.pool)
        self.core.owned = False

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __repr__(self):
        state = ", closed" if self.is_closed else ""
        return f"<gpumem.DriverPool {self.name!r} on {self.memory}{state}>"

    def _require_open(self):
        if self.is_closed:
            raise ClosedError(f"pool {self.name!r} is closed")
        if place_is_dead(self.core.place):
            raise ClosedError(f"pool {self.name!r} belongs to the parent process, or the "
                              "interpreter is ending")

    def _refuse(self, int code, nbytes, stream):
        if code != <int>CUDA_ERROR_OUT_OF_MEMORY:
            check(self.core.place.table, <CUresult>code, "cuMemAllocFromPoolAsync")
        stats = self.stats()
        raise OutOfMemoryError(
            f"{self.memory} is out of memory: the driver's pool has no {nbytes} bytes; in use "
            f"{stats.in_use}, reserved {stats.reserved}; free buffers, or memory that others hold "
            "on the device",
            asked=nbytes, rounded=nbytes, in_use=stats.in_use, reserved=stats.reserved,
            device=str(self.memory), stream=stream,
            advice="free buffers, or memory that others hold on the device")

    def _attribute(self, int attribute):
        cdef uint64_t value = 0
        cdef CUresult code = place_enter(self.core.place)
        if code == CUDA_SUCCESS:
            code = self.core.place.table.cuMemPoolGetAttribute(
                self.core.pool, <CUmemPool_attribute>attribute, &value)
            place_leave(self.core.place)
        check(self.core.place.table, code, "cuMemPoolGetAttribute")
        return value

    # ---- what buffers ask ------------------------------------------------------------------------

    cdef int slot_of(self, object stream, uint32_t* slot) except -1:
        cdef CUstream handle = NULL
        stream_handle(stream, self.place, &handle)
        number = <uintptr_t>handle
        if number not in self.handles:
            self.handles.append(number)
        slot[0] = self.handles.index(number)
        if stream is not None and not isinstance(stream, int):
            self.streams[slot[0]] = stream
        return 0

    cdef uint64_t stream_at(self, uint32_t slot) noexcept:
        return self.handles[slot]

    cdef void give_back(self, Buffer buffer) noexcept:
        cdef CUstream handle = <CUstream><uintptr_t>self.handles[buffer.slot]
        cdef CUdeviceptr pointer = buffer.address
        cdef uint64_t nbytes = buffer.block_bytes
        cdef Uses* uses = buffer.uses
        with nogil:
            order_uses(self.core, uses, handle)
            free_in_order(self.core, pointer, nbytes, handle)

    cdef Lease* lease(self, Buffer buffer) except NULL:
        cdef Lease* lease = lease_create(self.handles[buffer.slot], buffer.address,
                                         buffer.block_bytes, buffer.slot, self.core, release_lease)
        if lease == NULL:
            raise MemoryError("no host memory for a view's lease")
        return lease

    cdef void move_lease(self, Lease* lease, uint32_t slot) noexcept:
        lease.handle = self.handles[slot]

    cdef int record(self, Uses** uses, uint32_t slot) except -1:
        cdef bint added
        if not uses_add(uses, slot, &added):
            raise MemoryError("no host memory to note a stream")
        uses[0].at[uses[0].count - 1].until = self.handles[uses[0].at[uses[0].count - 1].slot]
        return 0


# ---- below the interpreter -----------------------------------------------------------------------

cdef void free_in_order(PoolCore* core, CUdeviceptr pointer, uint64_t nbytes,
                        CUstream stream) noexcept nogil:
    # The only way back for a block. One driver call, which orders and does not wait.
    if not place_is_dead(core.place) and place_enter(core.place) == CUDA_SUCCESS:
        core.place.table.cuMemFreeAsync(pointer, stream)
        place_leave(core.place)
    gm_pool_add(&core.requested, -nbytes)
    gm_pool_add(&core.num_frees, 1)
    core_drop(core)


cdef void order_uses(PoolCore* core, Uses* uses, CUstream stream) noexcept nogil:
    # Lets the freeing stream wait on the device for what is queued on the recorded ones, whose
    # handles are in `until`. The free that follows is ordered behind all of them.
    cdef uint32_t i
    if uses != NULL and not place_is_dead(core.place) and place_enter(core.place) == CUDA_SUCCESS:
        for i in range(uses.count):
            if <CUstream><uintptr_t>uses.at[i].until != stream:
                order_behind(core.place, stream, <CUstream><uintptr_t>uses.at[i].until)
        place_leave(core.place)
    uses_free(uses)


cdef void order_behind(Place* place, CUstream stream, CUstream other) noexcept nogil:
    # Without an event there is nothing left but to wait here.
    cdef CUevent event = NULL
    cdef CUresult code = place.table.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING)
    if code == CUDA_SUCCESS:
        code = place.table.cuEventRecord(event, other)
        if code == CUDA_SUCCESS:
            code = place.table.cuStreamWaitEvent(stream, event, 0)
        place.table.cuEventDestroy(event)
    if code != CUDA_SUCCESS:
        place.table.cuStreamSynchronize(other)


cdef void release_lease(Lease* lease) noexcept nogil:
    order_uses(<PoolCore*>lease.owner, lease.uses, <CUstream><uintptr_t>lease.handle)
    free_in_order(<PoolCore*>lease.owner, lease.address, lease.nbytes,
                  <CUstream><uintptr_t>lease.handle)


cdef void core_drop(PoolCore* core) noexcept nogil:
    # A pool that still has work in flight is kept by the driver until that is done.
    if gm_pool_count(&core.references, -1) != 0:
        return
    if core.owned and not place_is_dead(core.place) and place_enter(core.place) == CUDA_SUCCESS:
        core.place.table.cuMemPoolDestroy(core.pool)
        place_leave(core.place)
    free(core)


# ---- making one ----------------------------------------------------------------------------------

cdef int require_pools(DriverPool pool) except -1:
    if pool.memory.kind not in (MemoryKind.DEVICE, MemoryKind.HOST):
        raise ConfigError(f"a driver's pool holds a device's own memory, not {pool.memory}")
    capability = pool.memory.device.capabilities["memory_pools"]
    if not capability:
        raise ConfigError(f"{pool.memory} has no driver's pools: {capability.reason}")
    return 0


cdef CUmemoryPool make_pool(DriverPool pool) except? NULL:
    cdef CUmemPoolProps props
    cdef CUmemoryPool made = NULL
    cdef CUresult code
    memset(&props, 0, sizeof(props))
    props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED
    props.handleTypes = CU_MEM_HANDLE_TYPE_NONE
    props.location.type = CU_MEM_LOCATION_TYPE_DEVICE
    props.location.id = pool.place.place.device
    props.maxSize = pool.config.max_size
    with nogil:
        code = place_enter(&pool.place.place)
        if code == CUDA_SUCCESS:
            code = pool.place.place.table.cuMemPoolCreate(&made, &props)
            place_leave(&pool.place.place)
    check(pool.place.place.table, code, "cuMemPoolCreate")
    try:
        configure(pool, made)
    except BaseException:
        destroy_pool(pool, made)
        raise
    return made


cdef int configure(DriverPool pool, CUmemoryPool made) except -1:
    cdef uint64_t threshold = pool.config.release_threshold
    set_attribute(pool, made, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold)
    set_switch(pool, made, CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES,
               pool.config.reuse_follow_event_dependencies)
    set_switch(pool, made, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC,
               pool.config.reuse_allow_opportunistic)
    set_switch(pool, made, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
               pool.config.reuse_allow_internal_dependencies)
    return 0


cdef int set_switch(DriverPool pool, CUmemoryPool made, CUmemPool_attribute attribute,
                    bint on) except -1:
    cdef int value = on
    return set_attribute(pool, made, attribute, &value)


cdef int set_attribute(DriverPool pool, CUmemoryPool made, CUmemPool_attribute attribute,
                       void* value) except -1:
    cdef CUresult code = place_enter(&pool.place.place)
    if code == CUDA_SUCCESS:
        code = pool.place.place.table.cuMemPoolSetAttribute(made, attribute, value)
        place_leave(&pool.place.place)
    return check(pool.place.place.table, code, "cuMemPoolSetAttribute")


cdef int destroy_pool(DriverPool pool, CUmemoryPool made) noexcept:
    if made != NULL and place_enter(&pool.place.place) == CUDA_SUCCESS:
        pool.place.place.table.cuMemPoolDestroy(made)
        place_leave(&pool.place.place)
    return 0
