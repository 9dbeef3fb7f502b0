/* Copies in two and three dimensions, and between devices; managed memory's hints. */
#include "../device/internal.h"

/* ---- boxes ---- */

typedef struct Side { /* one end of a box, whatever the driver calls its fields */
    CUmemorytype type;
    uintptr_t host, device;
    size_t x, y, z, pitch, height;
} Side;

static CUresult side_address(const Side *side, size_t slice, uintptr_t *address, int *expect) {
    uintptr_t base;
    switch (side->type) {
    case CU_MEMORYTYPE_HOST:
        base = side->host;
        *expect = COPY_HOST_SIDE;
        break;
    case CU_MEMORYTYPE_DEVICE:
        base = side->device;
        *expect = COPY_DEVICE_SIDE;
        break;
    case CU_MEMORYTYPE_UNIFIED:
        base = side->device;
        *expect = COPY_ANY_SIDE;
        break;
    default: return CUDA_ERROR_NOT_SUPPORTED; /* the host device has no arrays */
    }
    if (!base) return CUDA_ERROR_INVALID_VALUE;
    *address = base + side->x + side->y * side->pitch + side->z * slice;
    return CUDA_SUCCESS;
}

static CUresult box_fill(Copy *copy, const Side *dst, const Side *src, int *expect_dst, int *expect_src) {
    copy->dst_pitch = dst->pitch ? dst->pitch : copy->width;
    copy->src_pitch = src->pitch ? src->pitch : copy->width;
    if (copy->height > 1 || copy->depth > 1)
        if (copy->dst_pitch < dst->x + copy->width || copy->src_pitch < src->x + copy->width)
            return CUDA_ERROR_INVALID_VALUE;
    size_t dst_height = dst->height ? dst->height : copy->height;
    size_t src_height = src->height ? src->height : copy->height;
    if (copy->depth > 1 && (dst_height < copy->height || src_height < copy->height))
        return CUDA_ERROR_INVALID_VALUE;
    copy->dst_slice = dst_height * copy->dst_pitch;
    copy->src_slice = src_height * copy->src_pitch;
    Side to = *dst, from = *src;
    to.pitch = copy->dst_pitch;
    from.pitch = copy->src_pitch;
    HOST_TRY(side_address(&to, copy->dst_slice, &copy->dst, expect_dst));
    return side_address(&from, copy->src_slice, &copy->src, expect_src);
}

static CUresult box_2d(Context *context, const CUDA_MEMCPY2D *box, CUstream stream, bool synchronous) {
    int to, from;
    if (!box) return CUDA_ERROR_INVALID_VALUE;
    Copy copy = {.width = box->WidthInBytes, .height = box->Height, .depth = 1};
    Side dst = {box->dstMemoryType, (uintptr_t)box->dstHost, (uintptr_t)box->dstDevice,
                box->dstXInBytes, box->dstY, 0, box->dstPitch, 0};
    Side src = {box->srcMemoryType, (uintptr_t)box->srcHost, (uintptr_t)box->srcDevice,
                box->srcXInBytes, box->srcY, 0, box->srcPitch, 0};
    HOST_TRY(box_fill(&copy, &dst, &src, &to, &from));
    return synchronous ? host_copy_sync(context, &copy, to, from)
                       : host_copy_async(context, stream, &copy, to, from);
}

static CUresult box_3d(Context *context, const CUDA_MEMCPY3D *box, CUstream stream, bool synchronous) {
    int to, from;
    if (!box) return CUDA_ERROR_INVALID_VALUE;
    Copy copy = {.width = box->WidthInBytes, .height = box->Height, .depth = box->Depth};
    Side dst = {box->dstMemoryType, (uintptr_t)box->dstHost, (uintptr_t)box->dstDevice,
                box->dstXInBytes, box->dstY, box->dstZ, box->dstPitch, box->dstHeight};
    Side src = {box->srcMemoryType, (uintptr_t)box->srcHost, (uintptr_t)box->srcDevice,
                box->srcXInBytes, box->srcY, box->srcZ, box->srcPitch, box->srcHeight};
    HOST_TRY(box_fill(&copy, &dst, &src, &to, &from));
    return synchronous ? host_copy_sync(context, &copy, to, from)
                       : host_copy_async(context, stream, &copy, to, from);
}

CUresult host_cuMemcpy2D(const CUDA_MEMCPY2D *box) {
    Context *context = ENTER_CONTEXT(Memcpy2D);
    return box_2d(context, box, CU_STREAM_LEGACY, true);
}

CUresult host_cuMemcpy2DUnaligned(const CUDA_MEMCPY2D *box) {
    Context *context = ENTER_CONTEXT(Memcpy2DUnaligned);
    return box_2d(context, box, CU_STREAM_LEGACY, true);
}

CUresult host_cuMemcpy2DAsync(const CUDA_MEMCPY2D *box, CUstream stream) {
    Context *context = ENTER_STREAM(Memcpy2DAsync, stream);
    return box_2d(context, box, stream, false);
}

CUresult host_cuMemcpy3D(const CUDA_MEMCPY3D *box) {
    Context *context = ENTER_CONTEXT(Memcpy3D);
    return box_3d(context, box, CU_STREAM_LEGACY, true);
}

CUresult host_cuMemcpy3DAsync(const CUDA_MEMCPY3D *box, CUstream stream) {
    Context *context = ENTER_STREAM(Memcpy3DAsync, stream);
    return box_3d(context, box, stream, false);
}

/* ---- between devices ---- */

/* The synchronous form is ordered with all work of both contexts: what is queued there
 * first, and what their default streams are given afterwards. It returns at once. */
static CUresult peer_ordered(Context *context, Context *dst_context, Context *src_context, const Copy *copy) {
    Stream *stream;
    Points points;
    host_points_start(&points);
    CUresult result = host_stream_points(dst_context->legacy, &points);
    if (result == CUDA_SUCCESS) result = host_stream_points(src_context->legacy, &points);
    if (result == CUDA_SUCCESS) result = host_stream_begin(context, CU_STREAM_LEGACY, &stream);
    if (result == CUDA_SUCCESS) {
        for (size_t i = 0; i < points.count && result == CUDA_SUCCESS; i++) {
            result = host_stream_wait_point(stream, points.at[i]);
            watch_wait_point(stream, points.at[i]);
        }
        if (result == CUDA_SUCCESS)
            result = host_stream_push(stream, &(Op){.kind = OP_COPY, .copy = *copy});
        host_stream_end(stream);
    }
    Point end = {context->legacy, atomic_load(&context->legacy->submitted), 0};
    Context *others[2] = {dst_context, src_context};
    for (int i = 0; i < 2 && result == CUDA_SUCCESS; i++) {
        if (others[i] == context) continue;
        result = host_stream_begin(others[i], CU_STREAM_LEGACY, &stream);
        if (result != CUDA_SUCCESS) break;
        result = host_stream_wait_point(stream, end);
        watch_wait_point(stream, end);
        host_stream_end(stream);
    }
    host_points_end(&points);
    return result;
}

static CUresult peer_contexts(CUcontext dst, CUcontext src, Context **to, Context **from) {
    HOST_TRY(host_context_of(dst, to));
    return host_context_of(src, from);
}

CUresult host_cuMemcpyPeer(CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src,
                           CUcontext src_context, size_t size) {
    Context *context = ENTER_CONTEXT(MemcpyPeer);
    Context *to, *from;
    HOST_TRY(peer_contexts(dst_context, src_context, &to, &from));
    Copy copy = host_copy_linear((uintptr_t)dst, (uintptr_t)src, size);
    if (size == 0) return CUDA_SUCCESS;
    HOST_TRY(host_copy_check(&copy, COPY_DEVICE_SIDE, COPY_DEVICE_SIDE));
    return peer_ordered(context, to, from, &copy);
}

CUresult host_cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src,
                                CUcontext src_context, size_t size, CUstream stream) {
    Context *context = ENTER_STREAM(MemcpyPeerAsync, stream);
    Context *to, *from;
    HOST_TRY(peer_contexts(dst_context, src_context, &to, &from));
    Copy copy = host_copy_linear((uintptr_t)dst, (uintptr_t)src, size);
    return host_copy_async(context, stream, &copy, COPY_DEVICE_SIDE, COPY_DEVICE_SIDE);
}

/* ---- managed memory: hints are checked and change nothing that could be seen ---- */

static bool is_managed(CUdeviceptr pointer, size_t size) {
    return size > 0 && host_memory_kind((uintptr_t)pointer, size, false) == MEMORY_MANAGED;
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
