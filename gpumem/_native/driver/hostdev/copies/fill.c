/* The driver's functions of fills. */
#include "../device/internal.h"

static CUresult submit(Context *context, CUstream stream, Fill fill, bool synchronous) {
    Point end;
    if (fill.width == 0 || fill.height == 0) return CUDA_SUCCESS;
    if (fill.width > SIZE_MAX / 8 || fill.dst % fill.element) return CUDA_ERROR_INVALID_VALUE;
    size_t extent = (fill.height - 1) * fill.pitch + fill.width * fill.element;
    MemoryKind kind = host_memory_kind(fill.dst, extent, true, context->device);
    if (kind == MEMORY_INACCESSIBLE || kind == MEMORY_PAGEABLE) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(host_stream_submit(context, stream, &(Op){.kind = OP_FILL, .fill = fill}, &end));
    /* As the driver does, the synchronous form returns at once, too, except on memory that
     * the host can read. */
    if (!synchronous || kind == MEMORY_DEVICE) return CUDA_SUCCESS;
    HOST_TRY(host_point_wait(end));
    WATCH(host_order_host_after(end.stream));
    return (CUresult)atomic_load(&context->error);
}

static Fill linear(CUdeviceptr dst, uint32_t value, uint32_t element, size_t count) {
    return (Fill){(uintptr_t)dst, 0, count, 1, value, element};
}

CUresult host_cuMemsetD8(CUdeviceptr dst, unsigned char value, size_t count) {
    return submit(ENTER_CONTEXT(MemsetD8), CU_STREAM_LEGACY, linear(dst, value, 1, count), true);
}

CUresult host_cuMemsetD32(CUdeviceptr dst, unsigned int value, size_t count) {
    return submit(ENTER_CONTEXT(MemsetD32), CU_STREAM_LEGACY, linear(dst, value, 4, count), true);
}

CUresult host_cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t count, CUstream stream) {
    return submit(ENTER_STREAM(MemsetD8Async, stream), stream, linear(dst, value, 1, count), false);
}

CUresult host_cuMemsetD16Async(CUdeviceptr dst, unsigned short value, size_t count, CUstream stream) {
    return submit(ENTER_STREAM(MemsetD16Async, stream), stream, linear(dst, value, 2, count), false);
}

CUresult host_cuMemsetD32Async(CUdeviceptr dst, unsigned int value, size_t count, CUstream stream) {
    return submit(ENTER_STREAM(MemsetD32Async, stream), stream, linear(dst, value, 4, count), false);
}

CUresult host_cuMemsetD2D8Async(CUdeviceptr dst, size_t pitch, unsigned char value, size_t width,
                                size_t height, CUstream stream) {
    Context *context = ENTER_STREAM(MemsetD2D8Async, stream);
    if (height > 1 && pitch < width) return CUDA_ERROR_INVALID_VALUE;
    Fill fill = {(uintptr_t)dst, pitch, width, height, value, 1};
    return submit(context, stream, fill, false);
}
