/* Queries of an address: its kind of memory, and the driver's pointer attributes. */
#include "../device/internal.h"

#include <string.h>

/* ---- access of copies ---- */

static MemoryKind range_memory_kind(const Range *range) {
    switch (range->kind) {
    case RANGE_PINNED:
    case RANGE_REGISTERED: return MEMORY_PINNED;
    case RANGE_MANAGED: return MEMORY_MANAGED;
    case RANGE_MAPPING:
    case RANGE_SEGMENT:
    case RANGE_POOLED:
        return range->flags == CU_MEM_LOCATION_TYPE_DEVICE ? MEMORY_DEVICE : MEMORY_PINNED;
    default: return MEMORY_DEVICE;
    }
}

/* Mapped memory has access for each device; every device can access other memory. */
static bool has_access(const Range *range, bool write, int device) {
    if (range->kind != RANGE_MAPPING || device == ANY_DEVICE)
        return write ? range->writable : range->readable;
    return (write ? range->writers : range->readers) >> device & 1;
}

/* Follows neighbours, since one copy may cross many mappings of one reservation. Caller holds
 * `map_lock`. */
MemoryKind host_memory_kind_locked(uintptr_t address, size_t size, bool write, int device) {
    uintptr_t end = address + size;
    Range *range = host_map_after(&host.ranges, address);
    if (!range || range->base > address) {
        bool clear = !range || range->base >= end;
        if (clear && watch_names_freed(address, size)) return MEMORY_INACCESSIBLE;
        bool unknown = clear && host_map_free(&host.reservations, address, size);
        return unknown ? MEMORY_PAGEABLE : MEMORY_INACCESSIBLE;
    }
    MemoryKind kind = range_memory_kind(range);
    for (;;) {
        if (!has_access(range, write, device)) return MEMORY_INACCESSIBLE;
        uintptr_t next = range->base + range->size;
        if (next >= end) return kind;
        range = host_map_after(&host.ranges, next);
        bool goes_on = range && range->base == next && range_memory_kind(range) == kind;
        if (!goes_on) return MEMORY_INACCESSIBLE;
    }
}

MemoryKind host_memory_kind(uintptr_t address, size_t size, bool write, int device) {
    pthread_rwlock_rdlock(&host.map_lock);
    MemoryKind kind = host_memory_kind_locked(address, size, write, device);
    if (host_misuse() && host_free_block_named(address, size)) kind = MEMORY_INACCESSIBLE;
    pthread_rwlock_unlock(&host.map_lock);
    return kind;
}

/* ---- attributes ---- */

Range *host_range_at(uintptr_t address) {
    Range *range = host_map_find(&host.ranges, address);
    return range && range->kind == RANGE_SEGMENT ? host_map_find(&host.pooled, address) : range;
}

enum { /* attributes of the driver that gpumem itself does not use */
    ATTRIBUTE_MAPPING_SIZE = 18,
    ATTRIBUTE_MAPPING_BASE = 19,
    ATTRIBUTE_BLOCK_ID = 20,
    INVALID_DEVICE = -2 /* CU_DEVICE_INVALID */
};

static size_t attribute_bytes(int attribute) { /* 0: no such attribute */
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: return 4;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: return 1;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
    case ATTRIBUTE_MAPPING_SIZE:
    case ATTRIBUTE_MAPPING_BASE:
    case ATTRIBUTE_BLOCK_ID: return 8;
    default: return 0;
    }
}

static bool host_reaches(const Range *range) { /* as on a GPU: the CPU never reads DEVICE memory */
    return range_memory_kind(range) != MEMORY_DEVICE;
}

static uint64_t pool_of(const Range *range) {
    const Block *block = range->owner;
    return atomic_load(&block->segment->pool->object.handle);
}

static uint64_t handle_types(const Range *range) {
    if (range->kind == RANGE_MAPPING) return ((const Physical *)range->owner)->prop.requestedHandleTypes;
    if (range->kind != RANGE_POOLED || ((const Block *)range->owner)->segment->pool->file < 0)
        return CU_MEM_HANDLE_TYPE_NONE;
    return CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

/* For a mapping, the driver reports the reservation around it as the range. */
static const Range *whole_range(const Range *range) {
    const Range *around = range->kind == RANGE_MAPPING ? host_map_find(&host.reservations, range->base) : NULL;
    return around ? around : range;
}

/* In a query for a single attribute, a pointer that does not exist is an error. */
static bool attribute_exists(const Range *range, int attribute) {
    if (attribute == CU_POINTER_ATTRIBUTE_HOST_POINTER) return host_reaches(range);
    return attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER || range->kind != RANGE_MAPPING || range->readable;
}

/* Returns the access of the current context's device. */
static CUmemAccess_flags access_flags(const Range *range) {
    Context *context;
    int device = host_context_current(&context) == CUDA_SUCCESS ? context->device : ANY_DEVICE;
    return host_access_flags(has_access(range, false, device), has_access(range, true, device));
}

static uint64_t attribute_value(const Range *range, int attribute, uintptr_t address) {
    bool host_kind = range_memory_kind(range) == MEMORY_PINNED;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: return range->context;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        return host_kind ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: return address;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: return host_reaches(range) ? address : 0;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: return range->sync_memops || range->kind == RANGE_MANAGED;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case ATTRIBUTE_BLOCK_ID: return range->id;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: return range->kind == RANGE_MANAGED;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: return (uint64_t)(int64_t)range->device;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: return whole_range(range)->base;
    case ATTRIBUTE_MAPPING_BASE: return range->base;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: return whole_range(range)->size;
    case ATTRIBUTE_MAPPING_SIZE: return range->size;
    case CU_POINTER_ATTRIBUTE_MAPPED: return 1;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: return handle_types(range);
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: return access_flags(range);
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        return range->kind == RANGE_POOLED ? pool_of(range) : 0;
    default: return 0;
    }
}

static CUresult attribute_write(void *data, const Range *range, int attribute, uintptr_t address) {
    size_t bytes = attribute_bytes(attribute);
    if (!data || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    uint64_t value = 0; /* of an address that the device does not know */
    if (range) value = attribute_value(range, attribute, address);
    else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) value = (uint64_t)INVALID_DEVICE;
    memcpy(data, &value, bytes); /* little-endian: the low bytes come first */
    return CUDA_SUCCESS;
}

CUresult host_cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    ENTER(PointerGetAttribute);
    pthread_rwlock_rdlock(&host.map_lock);
    Range *range = host_range_at((uintptr_t)pointer);
    if (range && attribute_exists(range, (int)attribute))
        result = attribute_write(data, range, (int)attribute, (uintptr_t)pointer);
    pthread_rwlock_unlock(&host.map_lock);
    return result;
}

/* Unlike the query of one attribute, this one returns zeros for an unknown address. */
CUresult host_cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data,
                                     CUdeviceptr pointer) {
    CUresult result = CUDA_SUCCESS;
    ENTER(PointerGetAttributes);
    if (count == 0 || !attributes || !data) return CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_rdlock(&host.map_lock);
    Range *range = host_range_at((uintptr_t)pointer);
    for (unsigned int i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = attribute_write(data[i], range, (int)attributes[i], (uintptr_t)pointer);
    pthread_rwlock_unlock(&host.map_lock);
    return result;
}

CUresult host_cuPointerSetAttribute(const void *value, CUpointer_attribute attribute,
                                    CUdeviceptr pointer) {
    ENTER(PointerSetAttribute);
    if (!value || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) return CUDA_ERROR_INVALID_VALUE;
    unsigned int on;
    memcpy(&on, value, sizeof on);
    pthread_rwlock_wrlock(&host.map_lock);
    Range *range = host_range_at((uintptr_t)pointer);
    bool device = range && range_memory_kind(range) == MEMORY_DEVICE;
    if (device) range->sync_memops = on != 0;
    pthread_rwlock_unlock(&host.map_lock);
    return device ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
