/* Copies in two and three dimensions, and between devices; managed memory's hints. */
#include "../device/internal.h"

/* ---- boxes ---- */

typedef struct Side { /* one end of a box of either form */
    CUmemorytype type;
    uintptr_t host, device;
    size_t x, y, z, pitch, height;
} Side;

#define SIDE(box, end, z, height)                                                          \
    {(box)->end##MemoryType, (uintptr_t)(box)->end##Host, (box)->end##Device,              \
     (box)->end##XInBytes, (box)->end##Y, z, (box)->end##Pitch, height}

/* Computes where one end begins, the steps from row to row and slice to slice, and the expected
 * memory. A pitch or height of 0 is that of the box. */
static CUresult side_resolve(const Side *side, const Copy *copy, uintptr_t *address, size_t *pitch,
                             size_t *slice, int *expect) {
    uintptr_t base = side->type == CU_MEMORYTYPE_HOST ? side->host : side->device;
    size_t height = side->height ? side->height : copy->height;
    bool has_rows = copy->height > 1 || copy->depth > 1;
    *pitch = side->pitch ? side->pitch : copy->width;
    *slice = height * *pitch;
    if (has_rows && *pitch < side->x + copy->width) return CUDA_ERROR_INVALID_VALUE;
    if (copy->depth > 1 && height < copy->height) return CUDA_ERROR_INVALID_VALUE;
    switch (side->type) {
    case CU_MEMORYTYPE_HOST: *expect = COPY_HOST_SIDE; break;
    case CU_MEMORYTYPE_DEVICE: *expect = COPY_DEVICE_SIDE; break;
    case CU_MEMORYTYPE_UNIFIED: *expect = COPY_ANY_SIDE; break;
    default: return CUDA_ERROR_NOT_SUPPORTED; /* the host device has no arrays */
    }
    *address = base + side->x + side->y * *pitch + side->z * *slice;
    return base ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult box_copy(Context *context, CUstream stream, Copy copy, Side dst, Side src, bool synchronous) {
    int to, from;
    HOST_TRY(side_resolve(&dst, &copy, &copy.dst, &copy.dst_pitch, &copy.dst_slice, &to));
    HOST_TRY(side_resolve(&src, &copy, &copy.src, &copy.src_pitch, &copy.src_slice, &from));
    return synchronous ? host_copy_sync(context, &copy, to, from)
                       : host_copy_async(context, stream, &copy, to, from);
}

static CUresult box_2d(Context *context, const CUDA_MEMCPY2D *box, CUstream stream, bool synchronous) {
    if (!box) return CUDA_ERROR_INVALID_VALUE;
    Copy copy = {.width = box->WidthInBytes, .height = box->Height, .depth = 1};
    Side dst = SIDE(box, dst, 0, 0), src = SIDE(box, src, 0, 0);
    return box_copy(context, stream, copy, dst, src, synchronous);
}

static CUresult box_3d(Context *context, const CUDA_MEMCPY3D *box, CUstream stream, bool synchronous) {
    if (!box) return CUDA_ERROR_INVALID_VALUE;
    Copy copy = {.width = box->WidthInBytes, .height = box->Height, .depth = box->Depth};
    Side dst = SIDE(box, dst, box->dstZ, box->dstHeight), src = SIDE(box, src, box->srcZ, box->srcHeight);
    return box_copy(context, stream, copy, dst, src, synchronous);
}

CUresult host_cuMemcpy2D(const CUDA_MEMCPY2D *box) {
    return box_2d(ENTER_CONTEXT(Memcpy2D), box, CU_STREAM_LEGACY, true);
}

CUresult host_cuMemcpy2DUnaligned(const CUDA_MEMCPY2D *box) {
    return box_2d(ENTER_CONTEXT(Memcpy2DUnaligned), box, CU_STREAM_LEGACY, true);
}

CUresult host_cuMemcpy2DAsync(const CUDA_MEMCPY2D *box, CUstream stream) {
    return box_2d(ENTER_STREAM(Memcpy2DAsync, stream), box, stream, false);
}

CUresult host_cuMemcpy3D(const CUDA_MEMCPY3D *box) {
    return box_3d(ENTER_CONTEXT(Memcpy3D), box, CU_STREAM_LEGACY, true);
}

CUresult host_cuMemcpy3DAsync(const CUDA_MEMCPY3D *box, CUstream stream) {
    return box_3d(ENTER_STREAM(Memcpy3DAsync, stream), box, stream, false);
}

/* ---- between devices ---- */

/* The synchronous form is ordered after all earlier work of both contexts, and before later work
 * of their default streams. It returns at once. */
static CUresult peer_ordered(Context *context, const Copy *copy) {
    Context *ends[2] = {copy->dst_context, copy->src_context};
    Stream *stream;
    Points points;
    host_points_start(&points);
    CUresult result = host_stream_points(ends[0]->legacy, &points);
    if (result == CUDA_SUCCESS) result = host_stream_points(ends[1]->legacy, &points);
    /* The points were collected without the stream's lock, which comes after Context.lock. */
    if (result == CUDA_SUCCESS) result = host_stream_begin(context, CU_STREAM_LEGACY, &stream);
    if (result == CUDA_SUCCESS) {
        for (size_t i = 0; i < points.count && result == CUDA_SUCCESS; i++) {
            result = host_stream_wait_point(stream, points.at[i]);
            WATCH(host_order_stream_after(stream, points.at[i]));
        }
        if (result == CUDA_SUCCESS)
            result = host_stream_push(stream, &(Op){.kind = OP_COPY, .copy = *copy});
        host_stream_end(stream);
    }
    Point end = {context->legacy, atomic_load(&context->legacy->submitted), 0};
    for (int i = 0; i < 2 && result == CUDA_SUCCESS; i++) {
        if (ends[i] == context) continue;
        result = host_stream_begin(ends[i], CU_STREAM_LEGACY, &stream);
        if (result != CUDA_SUCCESS) break;
        result = host_stream_wait_point(stream, end);
        WATCH(host_order_stream_after(stream, end));
        host_stream_end(stream);
    }
    host_points_end(&points);
    return result;
}

static CUresult peer_copy(Copy *copy, CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src,
                          CUcontext src_context, size_t size) {
    *copy = host_copy_linear((uintptr_t)dst, (uintptr_t)src, size);
    HOST_TRY(host_context_of(dst_context, &copy->dst_context));
    return host_context_of(src_context, &copy->src_context);
}

CUresult host_cuMemcpyPeer(CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src,
                           CUcontext src_context, size_t size) {
    Context *context = ENTER_CONTEXT(MemcpyPeer);
    Copy copy;
    HOST_TRY(peer_copy(&copy, dst, dst_context, src, src_context, size));
    if (size == 0) return CUDA_SUCCESS;
    HOST_TRY(host_copy_check(context, &copy, COPY_DEVICE_SIDE, COPY_DEVICE_SIDE));
    return peer_ordered(context, &copy);
}

CUresult host_cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src,
                                CUcontext src_context, size_t size, CUstream stream) {
    Context *context = ENTER_STREAM(MemcpyPeerAsync, stream);
    Copy copy;
    HOST_TRY(peer_copy(&copy, dst, dst_context, src, src_context, size));
    return host_copy_async(context, stream, &copy, COPY_DEVICE_SIDE, COPY_DEVICE_SIDE);
}

/* ---- managed memory: hints are checked, and have no visible effect ---- */

static bool is_managed(CUdeviceptr pointer, size_t size) {
    return size > 0 && host_memory_kind((uintptr_t)pointer, size, false, ANY_DEVICE) == MEMORY_MANAGED;
}

static CUresult location_check(const CUmemLocation *location) {
    switch (location->type) {
    case CU_MEM_LOCATION_TYPE_DEVICE: return host_device_check(location->id);
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT: return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult host_cuMemAdvise(CUdeviceptr pointer, size_t size, CUmem_advise advice, CUmemLocation location) {
    ENTER_CONTEXT(MemAdvise);
    if (!is_managed(pointer, size)) return CUDA_ERROR_INVALID_VALUE;
    if ((int)advice < CU_MEM_ADVISE_SET_READ_MOSTLY || (int)advice > CU_MEM_ADVISE_UNSET_ACCESSED_BY)
        return CUDA_ERROR_INVALID_VALUE;
    bool ignores_location = advice <= CU_MEM_ADVISE_UNSET_READ_MOSTLY ||
                            advice == CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION;
    return ignores_location ? CUDA_SUCCESS : location_check(&location);
}

CUresult host_cuMemPrefetchAsync(CUdeviceptr pointer, size_t size, CUmemLocation location,
                                 unsigned int flags, CUstream stream) {
    Context *context = ENTER_STREAM(MemPrefetchAsync, stream);
    if (flags != 0 || !is_managed(pointer, size)) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(location_check(&location));
    return host_stream_submit(context, stream, &(Op){.kind = OP_NOTHING}, NULL);
}
