/* Host memory that the device can access: allocated pinned, or registered by the caller.
 *
 * Nothing is locked into memory: there is no DMA engine that needs it, and an
 * unprivileged process may lock a few megabytes only. Device and host address are one.
 */
#include "../device/internal.h"
#include "mappings.h"

#include <stdlib.h>

enum {
    ALLOC_FLAGS = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED,
    REGISTER_FLAGS = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
                     CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY
};

CUresult host_cuMemHostAlloc(void **pointer, size_t size, unsigned int flags) {
    Context *context = ENTER_CONTEXT(MemHostAlloc);
    if (!pointer || (flags & ~(unsigned)ALLOC_FLAGS)) return CUDA_ERROR_INVALID_VALUE;
    *pointer = NULL;
    if (size == 0) return CUDA_SUCCESS;
    CUdeviceptr address = 0;
    CUresult result = host_memory_take(context, RANGE_PINNED, size, flags, &address);
    *pointer = (void *)(uintptr_t)address;
    return result;
}

CUresult host_cuMemHostRegister(void *pointer, size_t size, unsigned int flags) {
    Context *context = ENTER_CONTEXT(MemHostRegister);
    uintptr_t address = (uintptr_t)pointer;
    if (!pointer || size == 0 || (flags & ~(unsigned)REGISTER_FLAGS)) return CUDA_ERROR_INVALID_VALUE;
    if (size > UINTPTR_MAX - address || !pages_exist(address, size)) return CUDA_ERROR_INVALID_VALUE;
    Range *range = host_range_new(RANGE_REGISTERED, address, size, context);
    if (!range) return CUDA_ERROR_OUT_OF_MEMORY;
    range->flags = flags;
    range->writable = !(flags & CU_MEMHOSTREGISTER_READ_ONLY);
    CUresult result = CUDA_SUCCESS;
    pthread_rwlock_wrlock(&host.map_lock);
    Range *there = host_map_after(&host.ranges, address);
    if (!there || there->base >= address + size) host_map_insert(&host.ranges, range);
    else if (there->kind == RANGE_REGISTERED) result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    else result = CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_unlock(&host.map_lock);
    if (result != CUDA_SUCCESS) free(range);
    return result;
}

/* Waits for the context first: the caller may unmap the pages right afterwards. */
CUresult host_cuMemHostUnregister(void *pointer) {
    RangeKind kind;
    ENTER(MemHostUnregister);
    if (!pointer) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = host_memory_wait((uintptr_t)pointer, &kind);
    if (result == CUDA_SUCCESS)
        result = host_memory_free((uintptr_t)pointer, RANGE_REGISTERED, RANGE_REGISTERED);
    return result == CUDA_ERROR_INVALID_VALUE ? CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED : result;
}

static bool is_host_range(const Range *range) {
    return range && (range->kind == RANGE_PINNED || range->kind == RANGE_REGISTERED);
}

CUresult host_cuMemHostGetDevicePointer(CUdeviceptr *device, void *pointer, unsigned int flags) {
    ENTER_CONTEXT(MemHostGetDevicePointer);
    if (!device || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_rdlock(&host.map_lock);
    bool known = is_host_range(host_map_find(&host.ranges, (uintptr_t)pointer));
    pthread_rwlock_unlock(&host.map_lock);
    if (!known) return CUDA_ERROR_INVALID_VALUE;
    *device = (uintptr_t)pointer;
    return CUDA_SUCCESS;
}

/* With unified addressing every such range is mapped and portable, requested or not; the
 * driver reports the first and not the second. */
CUresult host_cuMemHostGetFlags(unsigned int *flags, void *pointer) {
    ENTER_CONTEXT(MemHostGetFlags);
    if (!flags) return CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_rdlock(&host.map_lock);
    Range *range = host_map_find(&host.ranges, (uintptr_t)pointer);
    bool known = is_host_range(range);
    if (known) *flags = (range->flags & ~(unsigned)CU_MEMHOSTALLOC_PORTABLE) | CU_MEMHOSTALLOC_DEVICEMAP;
    pthread_rwlock_unlock(&host.map_lock);
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
