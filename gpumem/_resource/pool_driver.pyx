"""The driver's calls of a DriverPool, and figures of the memory of a device."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset, strcmp

from gpumem._buffer cimport (
    BlockLedger, ledger_count_call, ledger_counters, ledger_drop, ledger_end, ledger_order_uses,
    ledger_return, ledger_stream, LedgerBlock, LedgerCounters, MemoryResource,
)
from gpumem._native.arena.api cimport (
    arena_backing, arena_counts_now, arena_is_graph_pool, ArenaCore, ArenaCounts,
)
from gpumem._native.driver cimport (
    context_enter, context_is_dead, context_leave,
    CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, CU_EVENT_DISABLE_TIMING,
    CU_MEM_ACCESS_FLAGS_PROT_NONE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_NONE,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_LOCATION_TYPE_DEVICE,
    CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
    CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES,
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUdeviceptr, CUevent,
    CUmemAccess_flags, CUmemAccessDesc, CUmemLocation, CUmemoryPool, CUmemPool_attribute,
    CUmemPoolProps, CUmemPoolPtrExportData, CUresult, CUstream, device_enter, device_leave,
    DeviceContext, DriverDevice, require,
)
from gpumem._support.events cimport event_sources_visit, EventSource, OWNER_ARENA, OWNER_LEDGER
from gpumem._support.interpreter cimport interpreter_release, interpreter_restore, PyThreadState
from gpumem._support.lock cimport Lock, lock_acquire, lock_init, lock_release
from gpumem._support.process cimport on_fork
from gpumem._support.retired cimport retire, Retired, take_retired

from gpumem._native.driver.nvml import processes_on
from gpumem.config import PoolConfig
from gpumem.device import Device, MemoryKind
from gpumem.errors import ConfigError, PeerAccessError

# The pool's attributes that PoolConfig has as switches.
cdef dict SWITCHES = {
    "reuse_follow_event_dependencies": <int>CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES,
    "reuse_allow_opportunistic": <int>CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC,
    "reuse_allow_internal_dependencies": <int>CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
}

# ---- blocks, without the interpreter -------------------------------------------------------------

cdef CUresult pool_take(LedgerBlock* block) noexcept nogil:
    cdef DeviceContext* context = block.ledger.context
    cdef CUresult code = context_enter(context)
    if code == CUDA_SUCCESS:
        code = context.table.cuMemAllocFromPoolAsync(
            <CUdeviceptr*>&block.base, block.size, pool_core(block.ledger).pool,
            ledger_stream(block.ledger, block.slot))
        context_leave(context)
        # Counted also when it failed: it is a count of calls, not of blocks.
        ledger_count_call(block.ledger, 0)
    return code


cdef void pool_free(LedgerBlock* block) noexcept nogil:
    # Every free of a block is one driver call, which is ordered by the stream and does not wait.
    cdef PoolCore* core = pool_core(block.ledger)
    cdef CUstream stream
    cdef CUresult code = CUDA_SUCCESS
    ledger_return(block, True)
    if not context_is_dead(core.ledger.context):
        stream = ledger_stream(block.ledger, block.slot)
        code = ledger_order_uses(block, stream)
        if code == CUDA_SUCCESS:
            code = free_block(block, stream)
    if code == CUDA_SUCCESS:
        ledger_end(block, True)
        return
    # The block is kept for pool_free_refused, which frees it when the device is idle.
    refuse(block)
    ledger_drop(&core.ledger)


cdef void pool_free_view(LedgerBlock* block) noexcept nogil:
    # A view may be dropped with the interpreter lock, where a full queue must not be waited for.
    cdef PyThreadState* state = NULL
    if not context_is_dead(block.ledger.context):
        state = interpreter_release()
    pool_free(block)
    interpreter_restore(state)


cdef CUresult free_block(LedgerBlock* block, CUstream stream) noexcept nogil:
    cdef DeviceContext* context = block.ledger.context
    cdef CUresult code = context_enter(context)
    if code != CUDA_SUCCESS:
        return code
    if (<PoolBlock*>block).imported:
        code = pool_import_drop(context, block.base, stream)
    else:
        code = context.table.cuMemFreeAsync(block.base, stream)
    context_leave(context)
    ledger_count_call(block.ledger, 0)
    return code


cdef bint pool_free_refused(PoolCore* core) noexcept nogil:
    """Free refused blocks again, once the device is idle; return whether one was freed."""
    cdef Retired* link = take_retired(&core.refused)
    cdef LedgerBlock* block
    cdef bint freed = False
    if link == NULL:
        return False
    if context_enter(core.ledger.context) == CUDA_SUCCESS:
        # The streams of refused frees may have ended, so it waits for the whole device.
        core.ledger.context.table.cuCtxSynchronize()
        context_leave(core.ledger.context)
    while link != NULL:
        block = <LedgerBlock*>link.thing
        link = link.next    # the next line may free the block that it lies in
        if free_block(block, NULL) == CUDA_SUCCESS:
            ledger_end(block, False)
            freed = True
        else:
            refuse(block)
    return freed


cdef inline void refuse(LedgerBlock* block) noexcept nogil:
    # A refused block counts no reference, because it must not keep its own pool alive.
    retire(&pool_core(block.ledger).refused, &block.deferred.link, block)


cdef void pool_destroy(PoolCore* core) noexcept nogil:
    # The driver keeps a pool until its queued work is done. A pool that it refuses to destroy at a
    # close is destroyed with the last reference.
    if core.owned and not context_is_dead(core.ledger.context):
        if pool_destroy_native(core.ledger.context, core.pool) == CUDA_SUCCESS:
            core.owned = False


cdef void pool_end(BlockLedger* ledger) noexcept nogil:
    cdef Retired* link = take_retired(&pool_core(ledger).refused)
    cdef LedgerBlock* block
    while link != NULL:
        block = <LedgerBlock*>link.thing
        link = link.next
        if not context_is_dead(ledger.context):
            free_block(block, NULL)     # the pool ends with them, so its memory is not used again
        ledger_end(block, False)
    pool_destroy(pool_core(ledger))
    pool_destroy(pool_core(ledger))     # once more if the driver refused


cdef CUresult pool_destroy_native(DeviceContext* context, CUmemoryPool pool) noexcept nogil:
    cdef CUresult code = context_enter(context)
    if code == CUDA_SUCCESS:
        code = context.table.cuMemPoolDestroy(pool)
        context_leave(context)
    return code


# ---- pools ---------------------------------------------------------------------------------------

cdef int pool_require_sharing(DriverDevice driver_device, object memory) except -1:
    cdef int offered = driver_device.attribute(CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES)
    if not offered & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
        raise ConfigError(f"pools of {memory} cannot be shared between processes: the device has "
                          f"no handle type for it (it answers {offered})")
    table = driver_device.context.table
    return require(<void*>table.cuMemPoolImportFromShareableHandle,
                   "cuMemPoolImportFromShareableHandle", "sharing a pool")


cdef CUmemoryPool pool_make(DriverDevice driver_device, object config) except? NULL:
    cdef CUmemPoolProps props
    cdef CUmemoryPool made = NULL
    cdef CUresult code
    memset(&props, 0, sizeof(props))
    # Physical memory of the device, which does not migrate.
    props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED
    props.handleTypes = CU_MEM_HANDLE_TYPE_NONE
    # Handle types are fixed when a pool is made: exporting one later needs them now.
    if config.shareable:
        pool_require_sharing(driver_device, f"{driver_device.type}:{driver_device.ordinal}")
        props.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    props.location.type = CU_MEM_LOCATION_TYPE_DEVICE
    props.location.id = driver_device.context.device
    props.maxSize = config.max_size
    device_enter(&driver_device.context, "cuMemPoolCreate")
    with nogil:
        code = driver_device.context.table.cuMemPoolCreate(&made, &props)
    device_leave(&driver_device.context, code, "cuMemPoolCreate")
    # A pool that cannot be configured is destroyed, not returned with other settings.
    try:
        configure(driver_device, made, config)
    except BaseException:
        pool_destroy_native(&driver_device.context, made)
        raise
    return made


cdef int configure(DriverDevice driver_device, CUmemoryPool made, object config) except -1:
    # The driver reads 64 bits for the threshold, an int for each switch.
    cdef uint64_t threshold = config.release_threshold
    cdef int switch
    # 0 is the driver's default.
    if threshold:
        set_attribute(driver_device, made, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold)
    for name, which in SWITCHES.items():
        switch = getattr(config, name)
        set_attribute(driver_device, made, which, &switch)
    return 0


cdef int set_attribute(DriverDevice driver_device, CUmemoryPool made, CUmemPool_attribute which,
                       void* value) except -1:
    cdef CUresult code
    device_enter(&driver_device.context, "cuMemPoolSetAttribute")
    with nogil:
        code = driver_device.context.table.cuMemPoolSetAttribute(made, which, value)
    return device_leave(&driver_device.context, code, "cuMemPoolSetAttribute")


cdef object pool_config(PoolCore* core):
    switches = {name: bool(<int>pool_attribute(core, which)) for name, which in SWITCHES.items()}
    return PoolConfig(release_threshold=pool_attribute(core, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD),
                      **switches)


cdef bint pool_lets(PoolCore* core, int device) except -1:
    cdef CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_NONE
    cdef CUmemLocation location
    cdef CUresult code
    location.type = CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device
    device_enter(core.ledger.context, "cuMemPoolGetAccess")
    code = core.ledger.context.table.cuMemPoolGetAccess(&flags, core.pool, &location)
    device_leave(core.ledger.context, code, "cuMemPoolGetAccess")
    return flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE


cdef int pool_let(PoolCore* core, int device) except -1:
    cdef CUmemAccessDesc access
    cdef CUresult code
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    device_enter(core.ledger.context, "cuMemPoolSetAccess")
    with nogil:
        code = core.ledger.context.table.cuMemPoolSetAccess(core.pool, &access, 1)
    return device_leave(core.ledger.context, code, "cuMemPoolSetAccess")


cdef uint64_t pool_attribute(PoolCore* core, CUmemPool_attribute which) except? <uint64_t>-1:
    cdef uint64_t value = 0     # as wide as the widest
    cdef DeviceContext* context = core.ledger.context
    cdef CUresult code
    device_enter(context, "cuMemPoolGetAttribute")
    with nogil:
        code = context.table.cuMemPoolGetAttribute(core.pool, which, &value)
    device_leave(context, code, "cuMemPoolGetAttribute")
    return value


# ---- Counting the uses of other processes' blocks ------------------------------------------------


cdef struct Import:
    DeviceContext* context
    CUdeviceptr base
    CUmemPoolPtrExportData note
    uint32_t uses
    CUevent ended           # recorded after every use that ended; made for the second use
    Import* next

# It is held across driver calls, so that no thread opens a block while its last use ends.
cdef Lock lock
cdef Import* imports = NULL

lock_init(&lock)


cdef CUresult pool_import_pointer(DeviceContext* context, CUmemoryPool pool,
                                  CUmemPoolPtrExportData* note, CUdeviceptr* base) noexcept nogil:
    cdef Import* found
    cdef CUresult code = CUDA_SUCCESS
    lock_acquire(&lock)
    found = imports
    while found != NULL and (found.context != context
                             or memcmp(&found.note, note, sizeof(found.note)) != 0):
        found = found.next
    if found == NULL:
        code = open_import(context, pool, note, &found)
    # The first use needs no event: only a second one may have to be waited for.
    elif found.ended == NULL:
        code = context.table.cuEventCreate(&found.ended, CU_EVENT_DISABLE_TIMING)
    if code == CUDA_SUCCESS:
        found.uses += 1
        base[0] = found.base
    lock_release(&lock)
    return code


cdef CUresult open_import(DeviceContext* context, CUmemoryPool pool, CUmemPoolPtrExportData* note,
                          Import** out) noexcept nogil:
    global imports
    cdef Import* made = <Import*>calloc(1, sizeof(Import))
    cdef CUresult code
    if made == NULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    code = context.table.cuMemPoolImportPointer(&made.base, pool, note)
    if code != CUDA_SUCCESS:
        free(made)
        return code
    # Only a block that the driver opened enters the list.
    made.context = context
    memcpy(&made.note, note, sizeof(made.note))
    made.next = imports
    imports = made
    out[0] = made
    return CUDA_SUCCESS


cdef CUresult pool_import_drop(DeviceContext* context, CUdeviceptr base,
                               CUstream stream) noexcept nogil:
    cdef Import** at = &imports
    cdef Import* found
    cdef CUresult code = CUDA_SUCCESS
    lock_acquire(&lock)
    while at[0] != NULL and (at[0].context != context or at[0].base != base):
        at = &at[0].next
    found = at[0]
    # A block that was opened before a fork is not in the child's list.
    if found == NULL:
        code = CUDA_ERROR_INVALID_VALUE
    elif found.uses > 1:
        code = end_use(found, stream)
    else:
        code = end_last_use(found, stream)
        if code == CUDA_SUCCESS:
            at[0] = found.next
            free(found)
    lock_release(&lock)
    return code


cdef CUresult end_use(Import* used, CUstream stream) noexcept nogil:
    # All uses share one event: this stream waits for those that ended before, then records it
    # again.
    cdef CUresult code = used.context.table.cuStreamWaitEvent(stream, used.ended, 0)
    if code == CUDA_SUCCESS:
        code = used.context.table.cuEventRecord(used.ended, stream)
    if code == CUDA_SUCCESS:
        used.uses -= 1
    return code


cdef CUresult end_last_use(Import* used, CUstream stream) noexcept nogil:
    cdef CUresult code = CUDA_SUCCESS
    if used.ended != NULL:
        code = used.context.table.cuStreamWaitEvent(stream, used.ended, 0)
    if code == CUDA_SUCCESS:
        # The wait above orders it after the uses on other streams.
        code = used.context.table.cuMemFreeAsync(used.base, stream)
    if code == CUDA_SUCCESS and used.ended != NULL:
        used.context.table.cuEventDestroy(used.ended)
    return code


cdef void forget_after_fork() noexcept nogil:
    # A fork's child cannot use its parent's blocks.
    global imports
    imports = NULL
    lock_init(&lock)


on_fork(NULL, NULL, forget_after_fork)


# ---- figures of the memory of a device -----------------------------------------------------------

cdef struct Held:
    const void* owner
    char[32] memory
    uint64_t here           # bytes that this process's resources hold
    uint64_t idle           # of them, unused bytes that other resources could release


cdef dict device_figures(MemoryResource resource, DeviceContext* context, const void* owner):
    cdef size_t free_bytes = 0
    cdef size_t total = 0
    cdef bint known = False
    cdef Held held
    cdef DriverDevice host
    cdef bytes memory = str(resource.memory).encode()[:sizeof(held.memory) - 1]
    held.owner = owner
    held.here = 0
    held.idle = 0
    memcpy(held.memory, <const char*>memory, len(memory) + 1)
    # Pinned memory is the host's, whichever GPU has it.
    if resource.memory.kind is MemoryKind.HOST_ACCESSIBLE and not context.is_host:
        host = Device("host")._open()
        context = &host.context
    # Both readings are of different moments, hence the limit at 0 below.
    event_sources_visit(add_held, &held)
    with nogil:
        if context_enter(context) == CUDA_SUCCESS:
            # A failure leaves the figures out: this is part of another error's report.
            known = context.table.cuMemGetInfo(&free_bytes, &total) == CUDA_SUCCESS
            context_leave(context)
    return {
        "device_total": total if known else None,
        "device_free": free_bytes if known else None,
        "held_here": held.here,
        "idle_elsewhere": held.idle,
        "held_by_others": max(0, <object>total - free_bytes - held.here) if known else None,
        "processes": () if context.is_host else processes_on(resource.memory.device.uuid),
    }


cdef void add_held(EventSource* source, void* context) noexcept nogil:
    # Figures are approximate, because they are read without the resources' locks. Caller holds the
    # lock of the sources, so that no resource is freed.
    cdef Held* held = <Held*>context
    if strcmp(source.memory, held.memory) == 0:
        if source.owner_is == OWNER_ARENA:
            add_arena(<ArenaCore*>source.owner, held)
        elif source.owner_is == OWNER_LEDGER:
            add_blocks(<BlockLedger*>source.owner, held)


cdef void add_arena(ArenaCore* arena, Held* held) noexcept nogil:
    cdef ArenaCounts counts
    if arena_backing(arena).source != NULL:
        return              # its source is counted, if that is a resource of gpumem
    arena_counts_now(arena, &counts)
    held.here += counts.reserved
    # A graph may write to all memory of a graph pool.
    if arena != held.owner and not arena_is_graph_pool(arena):
        held.idle += counts.reserved - min(counts.in_use, counts.reserved)


cdef void add_blocks(BlockLedger* ledger, Held* held) noexcept nogil:
    # Memory that a driver's pool caches in addition to its blocks is left out, because only the
    # driver counts it; a user's class, because another resource may have counted its memory.
    cdef LedgerCounters now = ledger_counters(ledger)
    if not ledger.is_users:
        held.here += now.in_use + now.waiting


cdef bint peer_is_reached(MemoryResource resource, object device) except -1:
    own = resource.memory.device
    if device.type != own.type or device == own:
        raise ConfigError(f"invalid peer {str(device)!r} of {resource.name!r} on "
                          f"{resource.memory}: expected another {own.type} device")
    return resource.driver_device.is_reached_by(device.index)


cdef object no_way_between(object peer, object own):
    return PeerAccessError(f"{peer} cannot access the memory of {own}: the driver has no way "
                           "between them")
