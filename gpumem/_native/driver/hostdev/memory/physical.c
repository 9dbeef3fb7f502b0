/* Physical handles: memory that has no address yet.
 *
 * A handle that can be exported is a memfd of its own. All others are extents of one
 * sparse memfd, since a process may hold some thousand files but needs a handle for
 * every two megabytes; its pages return to the kernel when the handle's memory is freed.
 */
#include "../device/internal.h"
#include "files.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- the shared file; callers hold `map_lock` for writing ---- */

typedef struct Extent { /* a free part of the file below its high mark, ordered by offset */
    struct Extent *next;
    size_t offset, size;
} Extent;

static const size_t FILE_BYTES = (size_t)1 << 46; /* sparse: only a bound on offsets */
static int shared_file = -1;
static size_t shared_high; /* maximum of the bytes in use */
static Extent *shared_free;

int host_sparse_file(const char *name) { return file_in_memory(name, FILE_BYTES); }

static bool extent_take(size_t size, size_t *offset) {
    if (shared_file < 0) shared_file = host_sparse_file("gpumem-device");
    if (shared_file < 0) return false;
    for (Extent **hook = &shared_free; *hook; hook = &(*hook)->next) {
        Extent *extent = *hook;
        if (extent->size < size) continue;
        *offset = extent->offset;
        extent->offset += size;
        extent->size -= size;
        if (extent->size == 0) {
            *hook = extent->next;
            free(extent);
        }
        return true;
    }
    if (size > FILE_BYTES - shared_high) return false;
    *offset = shared_high;
    shared_high += size;
    return true;
}

static void extent_merge_next(Extent *extent) {
    Extent *next = extent->next;
    if (!next || extent->offset + extent->size != next->offset) return;
    extent->size += next->size;
    extent->next = next->next;
    free(next);
}

/* Frees an extent's pages. If malloc fails for the note, the offsets are lost, never the pages. */
static void extent_give(size_t offset, size_t size) {
    Extent *before = NULL, *after = shared_free;
    fallocate(shared_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)size);
    while (after && after->offset < offset) {
        before = after;
        after = after->next;
    }
    Extent *extent = malloc(sizeof *extent);
    if (!extent) return;
    *extent = (Extent){after, offset, size};
    if (before) before->next = extent;
    else shared_free = extent;
    extent_merge_next(extent);
    if (before) extent_merge_next(before);
}

void host_physicals_reborn(void) {
    if (shared_file >= 0) close(shared_file); /* the parent's own descriptor stays open */
    shared_file = -1;
    shared_high = 0;
    shared_free = NULL;
}

/* ---- handles ---- */

static bool is_on_device(const CUmemAllocationProp *prop) {
    return prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
}

static bool node_exists(int node) {
    char path[64];
    snprintf(path, sizeof path, "/sys/devices/system/node/node%d", node);
    return node == 0 || (node > 0 && access(path, F_OK) == 0);
}

static CUresult location_check(const CUmemAllocationProp *prop) {
    bool exported = prop->requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE;
    switch (prop->location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE: return host_device_check(prop->location.id);
    case CU_MEM_LOCATION_TYPE_HOST: return exported ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        return node_exists(prop->location.id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT: return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult host_prop_check(const CUmemAllocationProp *prop) {
    if (!prop || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(location_check(prop));
    switch ((int)prop->requestedHandleTypes) {
    case CU_MEM_HANDLE_TYPE_NONE:
    case CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: return CUDA_SUCCESS;
    case CU_MEM_HANDLE_TYPE_FABRIC: return CUDA_ERROR_NOT_PERMITTED;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}

/* The name holds the location, which an importing process reads. */
static int file_new(const CUmemAllocationProp *prop, size_t size) {
    char name[64];
    snprintf(name, sizeof name, "gpumem-handle-%d-%d", (int)prop->location.type, prop->location.id);
    return file_in_memory(name, size);
}

static _Atomic uintptr_t next_shadow = (uintptr_t)1 << 62; /* above all addresses */

static Physical *physical_blank(const CUmemAllocationProp *prop, size_t size) {
    Physical *physical = host_object_take(&host.physicals);
    if (!physical) return NULL;
    physical->prop = *prop;
    physical->size = size;
    physical->offset = 0;
    physical->handles = physical->mappings = 0;
    physical->charged = false;
    physical->shadow = atomic_fetch_add_explicit(&next_shadow, size, memory_order_relaxed);
    return physical;
}

/* It is not published. Caller has charged its bytes. */
static Physical *physical_new(const CUmemAllocationProp *prop, size_t size, bool exportable) {
    Physical *physical = physical_blank(prop, size);
    bool made = false;
    if (!physical) return NULL;
    physical->fd = exportable ? file_new(prop, size) : -1;
    if (!exportable) {
        pthread_rwlock_wrlock(&host.map_lock);
        made = extent_take(size, &physical->offset);
        pthread_rwlock_unlock(&host.map_lock);
    }
    if (made || physical->fd >= 0) return physical;
    host_object_give(&host.physicals, physical);
    return NULL;
}

int host_physical_file(const Physical *physical) {
    return physical->fd >= 0 ? physical->fd : shared_file;
}

/* Frees the memory when it has neither handles nor mappings. */
void host_physical_drop(Physical *physical) {
    if (physical->handles > 0 || physical->mappings > 0) return;
    if (physical->charged) host_device_refund(physical->prop.location.id, physical->size);
    if (physical->fd >= 0) close(physical->fd);
    else extent_give(physical->offset, physical->size);
    host_object_give(&host.physicals, physical);
}

static CUmemGenericAllocationHandle physical_publish(Physical *physical) {
    pthread_rwlock_wrlock(&host.map_lock);
    physical->handles = 1;
    CUmemGenericAllocationHandle handle = host_object_publish(&host.physicals, physical);
    pthread_rwlock_unlock(&host.map_lock);
    return handle;
}

CUresult host_cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                          const CUmemAllocationProp *prop, unsigned long long flags) {
    ENTER(MemCreate);
    if (!handle || flags != 0 || size == 0 || size % HOST_BLOCK) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(host_prop_check(prop));
    bool charged = is_on_device(prop);
    if (charged) HOST_TRY(host_device_charge(prop->location.id, size));
    bool exportable = prop->requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE;
    Physical *physical = physical_new(prop, size, exportable);
    if (!physical) {
        if (charged) host_device_refund(prop->location.id, size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    physical->charged = charged;
    *handle = physical_publish(physical);
    return CUDA_SUCCESS;
}

CUresult host_cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER(MemRelease);
    pthread_rwlock_wrlock(&host.map_lock);
    Physical *physical = host_object_find(&host.physicals, handle);
    if (physical && --physical->handles == 0) {
        host_object_hide(&host.physicals, physical, handle);
        host_physical_drop(physical);
    }
    pthread_rwlock_unlock(&host.map_lock);
    return physical ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Returns the handle that is mapped at an address. A handle that was released while it was mapped
 * gets a new number. */
CUresult host_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    ENTER(MemRetainAllocationHandle);
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_wrlock(&host.map_lock);
    Range *range = host_map_find(&host.ranges, (uintptr_t)address);
    bool mapped = range && range->kind == RANGE_MAPPING;
    if (mapped) {
        Physical *physical = range->owner;
        bool known = physical->handles++ > 0;
        *handle = known ? atomic_load(&physical->object.handle)
                        : host_object_publish(&host.physicals, physical);
    }
    pthread_rwlock_unlock(&host.map_lock);
    return mapped ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult host_cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop,
                                                     CUmemGenericAllocationHandle handle) {
    ENTER(MemGetAllocationPropertiesFromHandle);
    if (!prop) return CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_rdlock(&host.map_lock);
    Physical *physical = host_object_find(&host.physicals, handle);
    if (physical) *prop = physical->prop;
    pthread_rwlock_unlock(&host.map_lock);
    return physical ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult host_cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                            CUmemAllocationGranularity_flags option) {
    ENTER(MemGetAllocationGranularity);
    if (!granularity || (unsigned)option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        return CUDA_ERROR_INVALID_VALUE;
    CUmemAllocationProp anywhere = prop ? *prop : (CUmemAllocationProp){0};
    if (is_on_device(&anywhere)) anywhere.location.id = 0; /* also for a device that does not exist */
    HOST_TRY(host_prop_check(&anywhere));
    *granularity = HOST_BLOCK;
    return CUDA_SUCCESS;
}

/* ---- between processes ---- */

/* Each export is a new descriptor, the caller's to close. */
CUresult host_cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                           CUmemAllocationHandleType type, unsigned long long flags) {
    ENTER(MemExportToShareableHandle);
    if (!shareable || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    int file = -1;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_rdlock(&host.map_lock);
    Physical *physical = host_object_find(&host.physicals, handle);
    bool offered = physical && physical->fd >= 0 && type == physical->prop.requestedHandleTypes;
    if (offered) {
        file = fcntl(physical->fd, F_DUPFD_CLOEXEC, 3);
        result = file >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
    }
    pthread_rwlock_unlock(&host.map_lock);
    if (file >= 0) memcpy(shareable, &file, sizeof file);
    return result;
}

bool host_file_name(int file, char name[HOST_FILE_NAME]) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    ssize_t length = readlink(path, name, HOST_FILE_NAME - 1);
    if (length >= 0) name[length] = 0;
    return length >= 0;
}

/* Reads the location of a descriptor: files made here have it in their names. */
static bool file_describe(int file, CUmemAllocationProp *prop, size_t *size) {
    char name[HOST_FILE_NAME];
    struct stat status;
    int type, id;
    if (!host_file_name(file, name) || fstat(file, &status) != 0) return false;
    if (sscanf(name, "/memfd:gpumem-handle-%d-%d", &type, &id) != 2) return false;
    *prop = (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                  .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
    prop->location.type = (CUmemLocationType)type;
    prop->location.id = id;
    *size = (size_t)status.st_size;
    return *size > 0 && *size % HOST_BLOCK == 0 && host_prop_check(prop) == CUDA_SUCCESS;
}

/* The descriptor stays the caller's. The memory was charged where it was created. */
CUresult host_cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                             CUmemAllocationHandleType type) {
    CUmemAllocationProp prop;
    size_t size;
    ENTER(MemImportFromShareableHandle);
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    int given = (int)(intptr_t)shareable;
    if (!file_describe(given, &prop, &size)) return CUDA_ERROR_UNKNOWN;
    int file = fcntl(given, F_DUPFD_CLOEXEC, 3);
    if (file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    Physical *physical = physical_blank(&prop, size);
    if (!physical) {
        close(file);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    physical->fd = file;
    *handle = physical_publish(physical);
    return CUDA_SUCCESS;
}

/* A memfd is not a dma-buf, and this machine may have no way to make one. */
CUresult host_cuMemGetHandleForAddressRange(void *handle, CUdeviceptr pointer, size_t size,
                                            CUmemRangeHandleType type, unsigned long long flags) {
    enum { PAGE = 4096 };
    ENTER(MemGetHandleForAddressRange);
    (void)type;
    if (!handle || flags != 0 || size == 0 || pointer % PAGE || size % PAGE) return CUDA_ERROR_INVALID_VALUE;
    bool device = host_memory_kind((uintptr_t)pointer, size, false, ANY_DEVICE) == MEMORY_DEVICE;
    return device ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
}
