/* Pools between processes: a pool is sent as a descriptor, each pointer as 64 bytes.
 *
 * An exportable pool's segments are parts of one sparse file, so a pointer is an offset
 * and a size in it. The importing side cannot allocate; what it maps is freed there with
 * cuMemFreeAsync or cuMemFree, before the exporter frees its own.
 */
#include "../device/internal.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct PointerNote { /* the caller's 64 bytes */
    uint64_t magic, file; /* which file: its inode */
    uint64_t offset, size;
} PointerNote;

static const uint64_t MAGIC = 0x676d656d506f6f6cu;

static uint64_t file_identity(int file) {
    struct stat status;
    return fstat(file, &status) == 0 ? (uint64_t)status.st_ino : 0;
}

static bool is_pool_file(int file) {
    char name[HOST_FILE_NAME];
    return host_file_name(file, name) && strncmp(name, "/memfd:gpumem-pool", 18) == 0;
}

CUresult host_cuMemPoolExportToShareableHandle(void *shareable, CUmemoryPool handle,
                                               CUmemAllocationHandleType type, unsigned long long flags) {
    ENTER(MemPoolExportToShareableHandle);
    if (!shareable || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    Pool *pool = HOST_LOCKED(pools, handle, CUDA_ERROR_INVALID_VALUE);
    bool offered = pool->file >= 0 && !pool->imported && type == pool->props.handleTypes;
    int file = offered ? fcntl(pool->file, F_DUPFD_CLOEXEC, 3) : -1;
    if (file >= 0) pool->exported = true;
    host_pool_unlock(pool);
    if (!offered) return CUDA_ERROR_INVALID_VALUE;
    if (file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    memcpy(shareable, &file, sizeof file);
    return CUDA_SUCCESS;
}

/* The descriptor stays the caller's. */
CUresult host_cuMemPoolImportFromShareableHandle(CUmemoryPool *out, void *shareable,
                                                 CUmemAllocationHandleType type, unsigned long long flags) {
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    ENTER(MemPoolImportFromShareableHandle);
    if (!out || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    int given = (int)(intptr_t)shareable;
    if (!is_pool_file(given)) return CUDA_ERROR_INVALID_VALUE;
    int file = fcntl(given, F_DUPFD_CLOEXEC, 3);
    if (file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    return host_pool_new(&props, out, false, file);
}

/* As on an H200, a pointer can be exported once its pool was. */
CUresult host_cuMemPoolExportPointer(CUmemPoolPtrExportData *data, CUdeviceptr pointer) {
    ENTER(MemPoolExportPointer);
    if (!data) return CUDA_ERROR_INVALID_VALUE;
    PointerNote note = {.magic = 0};
    pthread_rwlock_rdlock(&host.map_lock);
    Range *range = host_map_find(&host.pooled, (uintptr_t)pointer);
    const Segment *segment = range ? ((const Block *)range->owner)->segment : NULL;
    if (segment && segment->pool->exported && range->base == pointer)
        note = (PointerNote){MAGIC, file_identity(segment->pool->file),
                             segment->offset + (range->base - segment->range->base), range->size};
    pthread_rwlock_unlock(&host.map_lock);
    if (note.magic == 0) return CUDA_ERROR_INVALID_VALUE;
    memset(data, 0, sizeof *data);
    memcpy(data->reserved, &note, sizeof note);
    return CUDA_SUCCESS;
}

static const Range *already_here(const Range *at, const PointerNote *note) {
    if (!at) return NULL;
    if (at->kind == RANGE_IMPORTED && at->file == note->file && at->file_offset == note->offset) return at;
    const Range *found = already_here(at->left, note);
    return found ? found : already_here(at->right, note);
}

/* Called when the free is queued, which the stream may run much later: from then on an import of
 * the pointer gets a mapping of its own, not one that will be unmapped. */
void host_import_forget(uintptr_t address) {
    pthread_rwlock_wrlock(&host.map_lock);
    Range *range = host_map_find(&host.ranges, address);
    if (range && range->kind == RANGE_IMPORTED) range->file = 0;
    pthread_rwlock_unlock(&host.map_lock);
}

/* A second import of a pointer returns the same address, and one free ends both: callers that
 * share it count their uses. */
CUresult host_cuMemPoolImportPointer(CUdeviceptr *pointer, CUmemoryPool handle, CUmemPoolPtrExportData *data) {
    Context *context = ENTER_CONTEXT(MemPoolImportPointer);
    PointerNote note;
    if (!pointer || !data) return CUDA_ERROR_INVALID_VALUE;
    memcpy(&note, data->reserved, sizeof note);
    Pool *pool = HOST_LOCKED(pools, handle, CUDA_ERROR_INVALID_VALUE);
    bool fits = pool->imported && note.magic == MAGIC && note.file == file_identity(pool->file);
    CUresult result = fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_rdlock(&host.map_lock);
    const Range *there = fits ? already_here(host.ranges.root, &note) : NULL;
    if (there) *pointer = there->base;
    pthread_rwlock_unlock(&host.map_lock);
    if (fits && !there) result = host_file_map(pool->file, note.offset, note.size, context, pointer);
    if (fits && !there && result == CUDA_SUCCESS) {
        pthread_rwlock_wrlock(&host.map_lock);
        Range *range = host_map_find(&host.ranges, (uintptr_t)*pointer);
        range->file = note.file;
        range->file_offset = note.offset;
        pthread_rwlock_unlock(&host.map_lock);
    }
    host_pool_unlock(pool);
    return result;
}
