/* The driver's functions of stream-ordered pools. */
#include "../device/internal.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- pools by handle ---- */

/* The slot is freed when the pool is destroyed and its last allocation freed. */
void host_pool_unlock(Pool *pool) {
    bool gone = false;
    if (pool->destroyed && pool->used == 0) {
        host_pool_shrink(pool, 0);
        gone = !pool->segments;
    }
    if (gone && pool->file >= 0) close(pool->file);
    if (gone) {
        pool->file = -1;
        pool->destroyed = false;
    }
    pthread_mutex_unlock(&pool->object.lock);
    if (gone) host_object_give(&host.pools, pool);
}

CUresult host_pool_new(const CUmemPoolProps *props, CUmemoryPool *out, bool is_default, int imported) {
    bool exportable = imported < 0 && props->handleTypes != CU_MEM_HANDLE_TYPE_NONE;
    int file = exportable ? host_sparse_file("gpumem-pool") : imported;
    if (exportable && file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    Pool *pool = host_object_take(&host.pools);
    if (!pool) {
        if (file >= 0) close(file);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&pool->object.lock);
    pool->props = *props;
    pool->is_default = is_default;
    pool->imported = imported >= 0;
    pool->exported = pool->destroyed = false;
    pool->follow_events = pool->opportunistic = pool->internal_dependencies = true;
    pool->threshold = pool->reserved = pool->reserved_high = pool->used = pool->used_high = 0;
    pool->readers = pool->writers = 0;
    pool->segments = NULL;
    pool->free_blocks = NULL;
    pool->file = file;
    pool->file_high = 0;
    *out = (CUmemoryPool)(uintptr_t)host_object_publish(&host.pools, pool);
    pthread_mutex_unlock(&pool->object.lock);
    return CUDA_SUCCESS;
}

CUresult host_cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props) {
    ENTER(MemPoolCreate);
    if (!pool || !props) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(host_prop_check(&(CUmemAllocationProp){.type = props->allocType,
                                                    .requestedHandleTypes = props->handleTypes,
                                                    .location = props->location}));
    return host_pool_new(props, pool, false, -1);
}

CUresult host_cuMemPoolDestroy(CUmemoryPool handle) {
    ENTER(MemPoolDestroy);
    Pool *pool = HOST_LOCKED(pools, handle, CUDA_ERROR_INVALID_VALUE);
    bool is_default = pool->is_default;
    host_pool_unlock(pool); /* in the order of locks setup_lock comes first */
    if (is_default) return CUDA_ERROR_INVALID_VALUE;
    uint64_t number = (uint64_t)(uintptr_t)handle;
    pthread_mutex_lock(&host.setup_lock);
    for (int device = 0; device < HOSTDEV_MAX_DEVICES; device++)
        if (host.devices[device].current_pool == number) host.devices[device].current_pool = 0;
    pthread_mutex_unlock(&host.setup_lock);
    /* Another thread may have destroyed the pool while it was unlocked. */
    pool = HOST_LOCKED(pools, handle, CUDA_ERROR_INVALID_VALUE);
    pool->destroyed = host_object_hide(&host.pools, pool, number);
    host_pool_unlock(pool);
    return CUDA_SUCCESS;
}

/* ---- a device's pools ---- */

static CUresult default_pool(int device, uint64_t *handle) { /* caller holds setup_lock */
    uint64_t *at = &host.devices[device].default_pool;
    if (*at == 0) {
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
        CUmemoryPool made;
        HOST_TRY(host_pool_new(&props, &made, true, -1));
        *at = (uint64_t)(uintptr_t)made;
    }
    *handle = *at;
    return CUDA_SUCCESS;
}

static CUresult device_pool(int device, bool current, CUmemoryPool *pool) {
    uint64_t handle = 0;
    if (!pool) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(host_device_check(device));
    pthread_mutex_lock(&host.setup_lock);
    CUresult result = default_pool(device, &handle);
    if (current && host.devices[device].current_pool) handle = host.devices[device].current_pool;
    pthread_mutex_unlock(&host.setup_lock);
    if (result == CUDA_SUCCESS) *pool = (CUmemoryPool)(uintptr_t)handle;
    return result;
}

CUresult host_cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
    ENTER(DeviceGetDefaultMemPool);
    return device_pool(device, false, pool);
}

CUresult host_cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) {
    ENTER(DeviceGetMemPool);
    return device_pool(device, true, pool);
}

CUresult host_cuDeviceSetMemPool(CUdevice device, CUmemoryPool handle) {
    ENTER(DeviceSetMemPool);
    HOST_TRY(host_device_check(device));
    Pool *pool = HOST_LOCKED(pools, handle, CUDA_ERROR_INVALID_VALUE);
    bool fits = !pool->imported && pool->props.location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
                pool->props.location.id == device;
    host_pool_unlock(pool);
    if (!fits) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&host.setup_lock);
    host.devices[device].current_pool = (uint64_t)(uintptr_t)handle;
    pthread_mutex_unlock(&host.setup_lock);
    return CUDA_SUCCESS;
}

/* ---- allocate and free in stream order ---- */

static CUresult pool_alloc(Context *context, CUdeviceptr *pointer, size_t size, CUmemoryPool handle,
                           CUstream stream_handle) {
    Stream *stream;
    Block *block;
    if (!pointer) return CUDA_ERROR_INVALID_VALUE;
    *pointer = 0; /* an empty block has no address, and freeing it does nothing */
    if (size == 0) return CUDA_SUCCESS;
    if (size > SIZE_MAX / 2) return CUDA_ERROR_OUT_OF_MEMORY;
    HOST_TRY(host_stream_begin(context, stream_handle, &stream));
    CUresult result = host_capture_forbids_pool(stream);
    Pool *pool = result == CUDA_SUCCESS ? host_object_lock(&host.pools, handle) : NULL;
    if (result == CUDA_SUCCESS && !pool) result = CUDA_ERROR_INVALID_VALUE;
    if (pool) {
        if (pool->imported) result = CUDA_ERROR_INVALID_VALUE;
        else if (stream->capture) result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        else result = host_block_take(pool, stream, size, &block);
        if (result == CUDA_SUCCESS) *pointer = block->base;
        if (result == CUDA_SUCCESS) WATCH(host_order_block_begins(stream, block->base, size));
        host_pool_unlock(pool);
    }
    host_stream_end(stream);
    return result;
}

CUresult host_cuMemAllocAsync(CUdeviceptr *pointer, size_t size, CUstream stream) {
    Context *context = ENTER_STREAM(MemAllocAsync, stream);
    Stream *found;
    CUmemoryPool pool;
    /* The pool of the stream's device, which need not be the current one. */
    HOST_TRY(host_stream_resolve(context, stream, &found));
    HOST_TRY(device_pool(found->context->device, true, &pool));
    return pool_alloc(context, pointer, size, pool, stream);
}

CUresult host_cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t size, CUmemoryPool pool,
                                      CUstream stream) {
    return pool_alloc(ENTER_STREAM(MemAllocFromPoolAsync, stream), pointer, size, pool, stream);
}

/* Of several threads that free the block one succeeds: it is looked up again under its pool's
 * lock, which comes before map_lock. */
CUresult host_pooled_free(uintptr_t address, Point freed) {
    pthread_rwlock_rdlock(&host.map_lock);
    Range *range = host_map_find(&host.pooled, address);
    bool found = range && range->base == address;
    Pool *pool = found ? ((Block *)range->owner)->segment->pool : NULL;
    pthread_rwlock_unlock(&host.map_lock);
    if (!found) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&pool->object.lock);
    pthread_rwlock_rdlock(&host.map_lock);
    range = host_map_find(&host.pooled, address);
    Block *block = range && range->base == address ? range->owner : NULL;
    if (block && block->segment->pool != pool) block = NULL;
    pthread_rwlock_unlock(&host.map_lock);
    if (block) host_block_give(block, freed);
    host_pool_unlock(pool);
    return block ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Runs on the stream: frees memory that is not a block of one of this process's pools. */
static CUresult release_run(Stream *stream, void *data) {
    (void)stream;
    host_memory_free((uintptr_t)data, RANGE_IMPORTED, RANGE_DEVICE);
    return CUDA_SUCCESS;
}

static CUresult release_push(Stream *stream, uintptr_t address) {
    Op release = {.kind = OP_RUN, .run = {release_run, NULL, (void *)address}};
    pthread_rwlock_wrlock(&host.map_lock);
    Range *range = host_map_find(&host.ranges, address);
    /* Marked until the stream reaches the free, so that a second free is refused. */
    bool first = range && range->base == address && !range->leaving;
    if (first) range->leaving = true;
    pthread_rwlock_unlock(&host.map_lock);
    return first ? host_stream_push(stream, &release) : CUDA_ERROR_INVALID_VALUE;
}

static RangeKind kind_at(uintptr_t address) { /* RANGE_RESERVATION: nothing starts there */
    pthread_rwlock_rdlock(&host.map_lock);
    const Range *range = host_range_at(address);
    RangeKind kind = range && range->base == address ? range->kind : RANGE_RESERVATION;
    pthread_rwlock_unlock(&host.map_lock);
    return kind;
}

CUresult host_cuMemFreeAsync(CUdeviceptr pointer, CUstream stream_handle) {
    Context *context = ENTER_STREAM(MemFreeAsync, stream_handle);
    Stream *stream;
    if (pointer == 0) return CUDA_SUCCESS;
    /* Managed memory is refused before anything is queued. */
    RangeKind kind = kind_at((uintptr_t)pointer);
    if (kind == RANGE_MANAGED) return CUDA_ERROR_NOT_SUPPORTED;
    HOST_TRY(host_stream_begin(context, stream_handle, &stream));
    CUresult result = stream->capture ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : host_capture_forbids_pool(stream);
    if (result == CUDA_SUCCESS) WATCH(host_order_block_ends(stream, (uintptr_t)pointer));
    if (result == CUDA_SUCCESS && kind == RANGE_IMPORTED) host_import_forget((uintptr_t)pointer);
    if (result == CUDA_SUCCESS)
        result = kind == RANGE_IMPORTED || kind == RANGE_DEVICE
                     ? release_push(stream, (uintptr_t)pointer)
                     : host_pooled_free((uintptr_t)pointer, host_stream_tail(stream));
    host_stream_end(stream);
    return result;
}

/* ---- release ---- */

CUresult host_cuMemPoolTrimTo(CUmemoryPool handle, size_t bytes_to_keep) {
    ENTER(MemPoolTrimTo);
    Pool *pool = HOST_LOCKED(pools, handle, CUDA_ERROR_INVALID_VALUE);
    host_pool_shrink(pool, bytes_to_keep);
    host_pool_unlock(pool);
    return CUDA_SUCCESS;
}

static void pool_settle(void *pointer, void *data) {
    Pool *pool = pointer;
    (void)data;
    pthread_mutex_lock(&pool->object.lock);
    /* A slot that was never used, or is free, has no handle and is not destroyed. */
    bool live = atomic_load(&pool->object.handle) != 0;
    if (live && pool->reserved > pool->threshold) host_pool_shrink(pool, pool->threshold);
    if (live || !pool->destroyed) pthread_mutex_unlock(&pool->object.lock);
    else host_pool_unlock(pool);
}

void host_pools_synchronized(void) {
    if (host.pools.high > 0) host_object_each(&host.pools, pool_settle, NULL);
}

/* ---- attributes and access ---- */

static uint64_t *wide_attribute(Pool *pool, int attribute) {
    switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: return &pool->threshold;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: return &pool->reserved;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: return &pool->reserved_high;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: return &pool->used;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: return &pool->used_high;
    default: return NULL;
    }
}

static bool *switch_attribute(Pool *pool, int attribute) {
    switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES: return &pool->follow_events;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC: return &pool->opportunistic;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: return &pool->internal_dependencies;
    default: return NULL;
    }
}

CUresult host_cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void *value) {
    ENTER(MemPoolGetAttribute);
    if (!value) return CUDA_ERROR_INVALID_VALUE;
    Pool *pool = HOST_LOCKED(pools, handle, CUDA_ERROR_INVALID_VALUE);
    uint64_t *wide = wide_attribute(pool, (int)attribute);
    bool *on = switch_attribute(pool, (int)attribute);
    /* The driver's attributes are of two sizes: bytes are 64 bits, switches an int. */
    if (wide) memcpy(value, wide, sizeof *wide);
    else if (on) memcpy(value, &(int){*on}, sizeof(int));
    host_pool_unlock(pool);
    return wide || on ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* High-water marks can be set to zero only, which resets them to the current value. */
static CUresult high_reset(Pool *pool, int attribute, uint64_t value) {
    if (value != 0) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) pool->reserved_high = pool->reserved;
    else pool->used_high = pool->used;
    return CUDA_SUCCESS;
}

static CUresult attribute_set(Pool *pool, int attribute, const void *value) {
    uint64_t wide;
    int narrow;
    bool *on = switch_attribute(pool, attribute);
    if (on) {
        memcpy(&narrow, value, sizeof narrow);
        *on = narrow != 0;
        return CUDA_SUCCESS;
    }
    memcpy(&wide, value, sizeof wide);
    switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: pool->threshold = wide; return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: return high_reset(pool, attribute, wide);
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult host_cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void *value) {
    ENTER(MemPoolSetAttribute);
    if (!value) return CUDA_ERROR_INVALID_VALUE;
    Pool *pool = HOST_LOCKED(pools, handle, CUDA_ERROR_INVALID_VALUE);
    CUresult result = attribute_set(pool, (int)attribute, value);
    host_pool_unlock(pool);
    return result;
}

static bool is_home(const Pool *pool, const CUmemLocation *location) {
    return pool->props.location.type == location->type && pool->props.location.id == location->id;
}

static CUresult pool_access(Pool *pool, const CUmemAccessDesc *access) {
    bool writes = access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (access->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(host_device_check(access->location.id));
    /* The pool's own device always has full access. */
    if (is_home(pool, &access->location)) return writes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    host_access_set(&pool->readers, &pool->writers, (uint64_t)1 << access->location.id, access->flags);
    return CUDA_SUCCESS;
}

CUresult host_cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc *access, size_t count) {
    ENTER(MemPoolSetAccess);
    if (!access && count > 0) return CUDA_ERROR_INVALID_VALUE;
    Pool *pool = HOST_LOCKED(pools, handle, CUDA_ERROR_INVALID_VALUE);
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) result = pool_access(pool, &access[i]);
    host_pool_unlock(pool);
    return result;
}

CUresult host_cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool handle, CUmemLocation *location) {
    ENTER(MemPoolGetAccess);
    if (!flags || !location) return CUDA_ERROR_INVALID_VALUE;
    if (location->type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(host_device_check(location->id));
    Pool *pool = HOST_LOCKED(pools, handle, CUDA_ERROR_INVALID_VALUE);
    uint64_t bit = (uint64_t)1 << location->id;
    bool home = is_home(pool, location);
    *flags = host_access_flags(pool->readers & bit, home || (pool->writers & bit));
    host_pool_unlock(pool);
    return CUDA_SUCCESS;
}
