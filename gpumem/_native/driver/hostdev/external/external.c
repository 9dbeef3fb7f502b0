/* External memory: a file that another program filled, mapped as device memory.
 *
 * On the host device an OPAQUE_FD is any file that can be mapped shared: a memfd, POSIX
 * shared memory, an exported physical handle. As with CUDA, a successful import acquires the
 * descriptor and a failed one leaves it with the caller; mapped buffers are freed one by one
 * with cuMemFree and outlive the import. Windows' types are refused.
 */
#include "../device/internal.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* On success the import owns the descriptor. */
static CUresult memory_import(CUexternalMemory *out, int file, size_t size) {
    struct stat status;
    if (file < 0 || fstat(file, &status) != 0) return CUDA_ERROR_INVALID_VALUE;
    if (status.st_size <= 0 || size > (size_t)status.st_size) return CUDA_ERROR_INVALID_VALUE;
    /* Only an attempt shows whether a file can be mapped. */
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (page == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
    munmap(page, 4096);
    ExternalMemory *memory = host_object_take(&host.external_memories);
    if (!memory) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&memory->object.lock);
    memory->fd = file;
    memory->size = size;
    *out = (CUexternalMemory)(uintptr_t)host_object_publish(&host.external_memories, memory);
    pthread_mutex_unlock(&memory->object.lock);
    return CUDA_SUCCESS;
}

CUresult host_cuImportExternalMemory(CUexternalMemory *out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc) {
    ENTER_CONTEXT(ImportExternalMemory);
    if (!out || !desc || desc->size == 0 || (desc->flags & ~(unsigned)CUDA_EXTERNAL_MEMORY_DEDICATED))
        return CUDA_ERROR_INVALID_VALUE;
    if (desc->type != CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD) return CUDA_ERROR_NOT_SUPPORTED;
    return memory_import(out, desc->handle.fd, desc->size);
}

/* Maps a part of a file as device memory, from the page on that the offset lies in. */
CUresult host_file_map(int file, size_t offset, size_t size, Context *context, CUdeviceptr *pointer) {
    size_t inside = offset % 4096;
    Range *range = host_range_new(RANGE_IMPORTED, 0, size, context);
    if (!range) return CUDA_ERROR_OUT_OF_MEMORY;
    range->mapped = inside + size;
    char *pages = mmap(NULL, range->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file,
                       (off_t)(offset - inside));
    if (pages == MAP_FAILED) {
        free(range);
        return CUDA_ERROR_MAP_FAILED;
    }
    range->base = (uintptr_t)pages + inside;
    host_range_add(range);
    *pointer = range->base;
    return CUDA_SUCCESS;
}

CUresult host_cuExternalMemoryGetMappedBuffer(CUdeviceptr *pointer, CUexternalMemory handle,
                                              const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *desc) {
    Context *context = ENTER_CONTEXT(ExternalMemoryGetMappedBuffer);
    if (!pointer || !desc || desc->flags != 0 || desc->size == 0) return CUDA_ERROR_INVALID_VALUE;
    ExternalMemory *memory = HOST_LOCKED(external_memories, handle, CUDA_ERROR_INVALID_HANDLE);
    bool inside = desc->offset <= memory->size && desc->size <= memory->size - desc->offset;
    CUresult result = inside ? host_file_map(memory->fd, desc->offset, desc->size, context, pointer)
                             : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&memory->object.lock);
    return result;
}

CUresult host_cuDestroyExternalMemory(CUexternalMemory handle) {
    ENTER_CONTEXT(DestroyExternalMemory);
    ExternalMemory *memory = HOST_LOCKED(external_memories, handle, CUDA_ERROR_INVALID_HANDLE);
    close(memory->fd);
    host_object_end(&host.external_memories, memory);
    return CUDA_SUCCESS;
}
