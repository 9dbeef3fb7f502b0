"""The driver's calls behind a DriverPool; see _pool_core.pxd."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from gpumem._direct cimport (
    DirectBlock,
    DirectCore,
    direct_count_call,
    direct_drop,
    direct_forget,
    direct_gone,
    direct_is_default,
    direct_returned,
    direct_stream_at,
)
from gpumem._driver cimport (
    CU_EVENT_DISABLE_TIMING,
    CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES,
    CU_MEM_ALLOCATION_TYPE_PINNED,
    CU_MEM_HANDLE_TYPE_NONE,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    CU_MEM_LOCATION_TYPE_DEVICE,
    CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
    CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
    CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC,
    CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES,
    CUDA_SUCCESS,
    CUevent,
    CUmemPool_attribute,
    CUmemPoolProps,
    CUmemoryPool,
    CUresult,
    CUstream,
    DriverDevice,
    Place,
    check,
    place_enter,
    place_is_dead,
    place_leave,
    require,
)
from gpumem._pool_imports cimport pool_import_drop
from gpumem._support.lock cimport lock_acquire, lock_release

from gpumem.errors import ConfigError

# ---- blocks, without the interpreter -------------------------------------------------------------

cdef CUresult pool_take(DirectBlock* block) noexcept nogil:
    cdef Place* place = block.core.place
    cdef CUresult code = place_enter(place)
    if code == CUDA_SUCCESS:
        code = place.table.cuMemAllocFromPoolAsync(
            &block.base, block.size, pool_core(block.core).pool,
            direct_stream_at(block.core, block.slot))
        place_leave(place)
        direct_count_call(block.core, 0)
    return code


cdef void pool_give(DirectBlock* block) noexcept nogil:
    # The only way back for a block. One driver call, which orders and does not wait.
    cdef PoolCore* core = pool_core(block.core)
    cdef CUstream stream
    cdef CUresult code = CUDA_SUCCESS
    direct_returned(block)
    if not place_is_dead(core.direct.place):
        stream = direct_stream_at(block.core, block.slot)
        code = order_behind_uses(block, stream)
        if code == CUDA_SUCCESS:
            code = free_block(block, stream)
    if code == CUDA_SUCCESS:
        direct_gone(block)
        return
    push_refused(block)
    direct_drop(&core.direct)


cdef CUresult order_behind_uses(DirectBlock* block, CUstream stream) noexcept nogil:
    """Let the stream wait on the device for what is queued on recorded ones."""
    cdef Place* place = block.core.place
    cdef CUevent event = NULL
    cdef CUresult code = CUDA_SUCCESS
    cdef uint32_t i
    if block.uses == NULL:
        return CUDA_SUCCESS
    code = place_enter(place)
    if code != CUDA_SUCCESS:
        return code
    code = place.table.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING)
    for i in range(block.uses.count):
        # A stream that was reset is drained; the one event may be recorded anew at once.
        if direct_is_default(block.core, block.uses.at[i].slot) and block.uses.at[i].slot:
            continue
        if code == CUDA_SUCCESS:
            code = place.table.cuEventRecord(
                event, direct_stream_at(block.core, block.uses.at[i].slot))
        if code == CUDA_SUCCESS:
            code = place.table.cuStreamWaitEvent(stream, event, 0)
    if event != NULL:
        place.table.cuEventDestroy(event)
    place_leave(place)
    return code


cdef CUresult free_block(DirectBlock* block, CUstream stream) noexcept nogil:
    cdef Place* place = block.core.place
    cdef CUresult code = place_enter(place)
    if code != CUDA_SUCCESS:
        return code
    if block.imported:
        code = pool_import_drop(place, block.base, stream)
    else:
        code = place.table.cuMemFreeAsync(block.base, stream)
    place_leave(place)
    direct_count_call(block.core, 0)
    return code


cdef bint pool_free_refused(PoolCore* core) noexcept nogil:
    """Free what the driver refused to, once the device is idle; tell whether anything went."""
    cdef DirectBlock* block
    cdef DirectBlock* next_block
    cdef bint freed = False
    lock_acquire(&core.direct.lock)
    block = core.refused
    core.refused = NULL
    lock_release(&core.direct.lock)
    if block == NULL:
        return False
    if place_enter(core.direct.place) == CUDA_SUCCESS:
        core.direct.place.table.cuCtxSynchronize()
        place_leave(core.direct.place)
    while block != NULL:
        next_block = block.next
        if free_block(block, NULL) == CUDA_SUCCESS:
            direct_forget(block)
            freed = True
        else:
            push_refused(block)
        block = next_block
    return freed


cdef void push_refused(DirectBlock* block) noexcept nogil:
    # Such a block counts no reference: it must not keep what alone could free it.
    cdef PoolCore* core = pool_core(block.core)
    lock_acquire(&core.direct.lock)
    block.next = core.refused
    core.refused = block
    lock_release(&core.direct.lock)


cdef void pool_destroy(PoolCore* core) noexcept nogil:
    # A pool that still has work in flight is kept by the driver until that is done.
    if core.owned and not place_is_dead(core.direct.place):
        pool_destroy_native(core.direct.place, core.pool)
    core.owned = False


cdef void pool_end(DirectCore* core) noexcept nogil:
    cdef DirectBlock* block = pool_core(core).refused
    cdef DirectBlock* next_block
    while block != NULL:
        next_block = block.next
        if not place_is_dead(core.place):
            free_block(block, NULL)     # the pool ends with them: nobody takes the memory again
        direct_forget(block)
        block = next_block
    pool_destroy(pool_core(core))


cdef void pool_destroy_native(Place* place, CUmemoryPool pool) noexcept nogil:
    if pool != NULL and place_enter(place) == CUDA_SUCCESS:
        place.table.cuMemPoolDestroy(pool)
        place_leave(place)


# ---- pools ---------------------------------------------------------------------------------------

cdef int pool_require_sharing(DriverDevice place, object memory) except -1:
    cdef int offered = place.attribute(CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES)
    if not offered & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
        raise ConfigError(f"pools of {memory} cannot be shared between processes: the device has "
                          f"no handle type for it (it answers {offered})")
    table = place.place.table
    return require(<void*>table.cuMemPoolImportFromShareableHandle,
                   "cuMemPoolImportFromShareableHandle", "sharing a pool")


cdef CUmemoryPool pool_make(DriverDevice place, object config) except? NULL:
    cdef CUmemPoolProps props
    cdef CUmemoryPool made = NULL
    cdef CUresult code
    memset(&props, 0, sizeof(props))
    props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED
    props.handleTypes = CU_MEM_HANDLE_TYPE_NONE
    if config.shareable:
        pool_require_sharing(place, f"{place.type}:{place.ordinal}")
        props.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    props.location.type = CU_MEM_LOCATION_TYPE_DEVICE
    props.location.id = place.place.device
    props.maxSize = config.max_size
    with nogil:
        code = place_enter(&place.place)
        if code == CUDA_SUCCESS:
            code = place.place.table.cuMemPoolCreate(&made, &props)
            place_leave(&place.place)
    check(place.place.table, code, "cuMemPoolCreate")
    try:
        configure(place, made, config)
    except BaseException:
        pool_destroy_native(&place.place, made)
        raise
    return made


cdef int configure(DriverDevice place, CUmemoryPool made, object config) except -1:
    cdef uint64_t threshold = config.release_threshold
    if threshold:
        set_attribute(place, made, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold)
    set_switch(place, made, CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES,
               config.reuse_follow_event_dependencies)
    set_switch(place, made, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC,
               config.reuse_allow_opportunistic)
    set_switch(place, made, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
               config.reuse_allow_internal_dependencies)
    return 0


cdef int set_switch(DriverDevice place, CUmemoryPool made, CUmemPool_attribute which,
                    bint on) except -1:
    cdef int value = on
    return set_attribute(place, made, which, &value)


cdef int set_attribute(DriverDevice place, CUmemoryPool made, CUmemPool_attribute which,
                       void* value) except -1:
    cdef CUresult code
    with nogil:
        code = place_enter(&place.place)
        if code == CUDA_SUCCESS:
            code = place.place.table.cuMemPoolSetAttribute(made, which, value)
            place_leave(&place.place)
    return check(place.place.table, code, "cuMemPoolSetAttribute")


cdef uint64_t pool_attribute(PoolCore* core, CUmemPool_attribute which) except? <uint64_t>-1:
    cdef uint64_t value = 0     # as wide as the widest
    cdef Place* place = core.direct.place
    cdef CUresult code
    with nogil:
        code = place_enter(place)
        if code == CUDA_SUCCESS:
            code = place.table.cuMemPoolGetAttribute(core.pool, which, &value)
            place_leave(place)
    check(place.table, code, "cuMemPoolGetAttribute")
    return value
