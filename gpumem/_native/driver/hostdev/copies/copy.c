/* The driver's functions of copies: when each returns, and in which order.
 *
 * "Synchronous" and "asynchronous" depend on where the bytes lie, and follow the driver's
 * documentation (API synchronization behavior):
 *   synchronous   device to device returns at once, everything else when done;
 *   asynchronous  from pageable memory returns when the source has been staged,
 *                 to pageable memory, or host to host, when done,
 *                 everything else at once.
 */
#include "../device/internal.h"

#include <stdlib.h>
#include <string.h>

typedef struct Ends {
    MemoryKind dst, src;
} Ends;

static bool on_device(MemoryKind kind) { return kind == MEMORY_DEVICE; }
static bool on_host(MemoryKind kind) { return kind == MEMORY_PAGEABLE || kind == MEMORY_PINNED; }

/* Returns the bytes from the first to the last one of the box. */
static size_t extent(const Copy *copy, size_t pitch, size_t slice) {
    return (copy->depth - 1) * slice + (copy->height - 1) * pitch + copy->width;
}

/* The device that copies accesses each end; in a copy between peers each end's own device. */
static CUresult ends_find(Context *context, Copy *copy, int dst_side, int src_side, Ends *ends) {
    if (!copy->dst || !copy->src) return CUDA_ERROR_INVALID_VALUE;
    if (!copy->dst_context) copy->dst_context = context;
    if (!copy->src_context) copy->src_context = context;
    ends->dst = host_memory_kind(copy->dst, extent(copy, copy->dst_pitch, copy->dst_slice), true,
                                 copy->dst_context->device);
    ends->src = host_memory_kind(copy->src, extent(copy, copy->src_pitch, copy->src_slice), false,
                                 copy->src_context->device);
    copy->dst_known = ends->dst != MEMORY_PAGEABLE;
    copy->src_known = ends->src != MEMORY_PAGEABLE;
    if (ends->dst == MEMORY_INACCESSIBLE || ends->src == MEMORY_INACCESSIBLE) return CUDA_ERROR_INVALID_VALUE;
    if (dst_side == COPY_DEVICE_SIDE && !copy->dst_known) return CUDA_ERROR_INVALID_VALUE;
    if (src_side == COPY_DEVICE_SIDE && !copy->src_known) return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

CUresult host_copy_check(Context *context, Copy *copy, int dst_side, int src_side) {
    Ends ends;
    return ends_find(context, copy, dst_side, src_side, &ends);
}

/* Reads the source now: the box is packed tight into memory that the copy owns. */
static CUresult stage(Copy *copy) {
    size_t rows = copy->height * copy->depth;
    Copy inner = *copy;
    char *bytes = malloc(copy->width * rows);
    if (!bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    inner.dst = (uintptr_t)bytes;
    inner.dst_pitch = copy->width;
    inner.dst_slice = copy->width * copy->height;
    for (size_t z = 0; z < inner.depth; z++)
        for (size_t y = 0; y < inner.height; y++)
            memcpy(bytes + z * inner.dst_slice + y * inner.dst_pitch,
                   (const char *)inner.src + z * inner.src_slice + y * inner.src_pitch, inner.width);
    copy->staged = bytes;
    copy->src = inner.dst;
    copy->src_pitch = inner.dst_pitch;
    copy->src_slice = inner.dst_slice;
    return CUDA_SUCCESS;
}

static CUresult submit(Context *context, CUstream stream, const Copy *copy, bool wait) {
    Point end;
    CUresult result = host_stream_submit(context, stream, &(Op){.kind = OP_COPY, .copy = *copy}, &end);
    if (result != CUDA_SUCCESS) free(copy->staged);
    if (result != CUDA_SUCCESS || !wait) return result;
    HOST_TRY(host_point_wait(end));
    WATCH(host_order_host_after(end.stream));
    return (CUresult)atomic_load(&context->error);
}

CUresult host_copy_async(Context *context, CUstream stream, Copy *copy, int dst_side, int src_side) {
    Ends ends;
    if (copy->width == 0 || copy->height == 0 || copy->depth == 0) return CUDA_SUCCESS;
    HOST_TRY(ends_find(context, copy, dst_side, src_side, &ends));
    if (host_stream_captures(context, stream)) return submit(context, stream, copy, false);
    bool wait = ends.dst == MEMORY_PAGEABLE || (on_host(ends.dst) && on_host(ends.src));
    if (!wait && ends.src == MEMORY_PAGEABLE) HOST_TRY(stage(copy));
    return submit(context, stream, copy, wait);
}

/* Copies in the caller's thread after the default stream's work, so that no worker is woken. */
static CUresult copy_here(Context *context, const Copy *copy) {
    Points points;
    host_points_start(&points);
    CUresult result = host_points_wait(&points, host_stream_points(context->legacy, &points));
    if (result == CUDA_SUCCESS) result = (CUresult)atomic_load(&context->error);
    if (result != CUDA_SUCCESS) return result;
    WATCH(host_order_host_after(context->legacy));
    WATCH(host_order_copy(NULL, 0, copy));
    return host_copy_run(NULL, copy);
}

CUresult host_copy_sync(Context *context, Copy *copy, int dst_side, int src_side) {
    Ends ends;
    if (copy->width == 0 || copy->height == 0 || copy->depth == 0) return CUDA_SUCCESS;
    HOST_TRY(ends_find(context, copy, dst_side, src_side, &ends));
    if (host_capture_blocks_legacy(context, true)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    if (on_device(ends.dst) && on_device(ends.src))
        return submit(context, CU_STREAM_LEGACY, copy, false);
    return copy_here(context, copy);
}

Copy host_copy_linear(uintptr_t dst, uintptr_t src, size_t size) {
    return (Copy){.dst = dst, .src = src, .width = size, .height = 1, .depth = 1};
}

/* ---- one dimension ---- */

#define COPY_CALL(name, dst_type, dst_side, src_type, src_side)                                   \
    CUresult host_cu##name(dst_type dst, src_type src, size_t size) {                             \
        Copy copy = host_copy_linear((uintptr_t)dst, (uintptr_t)src, size);                       \
        return host_copy_sync(ENTER_CONTEXT(name), &copy, dst_side, src_side);                    \
    }                                                                                             \
    CUresult host_cu##name##Async(dst_type dst, src_type src, size_t size, CUstream stream) {     \
        Context *context = ENTER_STREAM(name##Async, stream);                                     \
        Copy copy = host_copy_linear((uintptr_t)dst, (uintptr_t)src, size);                       \
        return host_copy_async(context, stream, &copy, dst_side, src_side);                       \
    }
COPY_CALL(Memcpy, CUdeviceptr, COPY_ANY_SIDE, CUdeviceptr, COPY_ANY_SIDE)
COPY_CALL(MemcpyHtoD, CUdeviceptr, COPY_DEVICE_SIDE, const void *, COPY_HOST_SIDE)
COPY_CALL(MemcpyDtoH, void *, COPY_HOST_SIDE, CUdeviceptr, COPY_DEVICE_SIDE)
COPY_CALL(MemcpyDtoD, CUdeviceptr, COPY_DEVICE_SIDE, CUdeviceptr, COPY_DEVICE_SIDE)
#undef COPY_CALL
