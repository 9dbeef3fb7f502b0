/* For tests only: the functions that take "the default stream" to be the calling thread's.
 *
 * A program built, or a cuda-python started, with per-thread default streams asks
 * cuGetProcAddress for these. The null stream becomes the thread's own; what has no
 * stream runs on it too and, where it must be done on return, is waited for there.
 */
#include "libcuda.h"

#include <string.h>

static CUstream own(CUstream stream) { return stream ? stream : CU_STREAM_PER_THREAD; }

#define OWN(name, parameters, arguments) \
    static CUresult own_cu##name parameters { return host_cu##name arguments; }

OWN(StreamQuery, (CUstream s), (own(s)))
OWN(StreamSynchronize, (CUstream s), (own(s)))
OWN(StreamWaitEvent, (CUstream s, CUevent e, unsigned int f), (own(s), e, f))
OWN(StreamGetPriority, (CUstream s, int *priority), (own(s), priority))
OWN(StreamGetFlags, (CUstream s, unsigned int *flags), (own(s), flags))
OWN(StreamGetCtx, (CUstream s, CUcontext *context), (own(s), context))
OWN(StreamGetId, (CUstream s, unsigned long long *id), (own(s), id))
OWN(LaunchHostFunc, (CUstream s, CUhostFn function, void *data), (own(s), function, data))
OWN(StreamWaitValue32, (CUstream s, CUdeviceptr at, uint32_t v, unsigned int f), (own(s), at, v, f))
OWN(StreamWriteValue32, (CUstream s, CUdeviceptr at, uint32_t v, unsigned int f), (own(s), at, v, f))
OWN(StreamWaitValue64, (CUstream s, CUdeviceptr at, uint64_t v, unsigned int f), (own(s), at, v, f))
OWN(StreamWriteValue64, (CUstream s, CUdeviceptr at, uint64_t v, unsigned int f), (own(s), at, v, f))
OWN(EventRecord, (CUevent e, CUstream s), (e, own(s)))
OWN(MemPrefetchAsync, (CUdeviceptr at, size_t size, CUmemLocation where, unsigned int f, CUstream s),
    (at, size, where, f, own(s)))
OWN(MemcpyAsync, (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream s), (to, from, size, own(s)))
OWN(MemcpyHtoDAsync, (CUdeviceptr to, const void *from, size_t size, CUstream s), (to, from, size, own(s)))
OWN(MemcpyDtoHAsync, (void *to, CUdeviceptr from, size_t size, CUstream s), (to, from, size, own(s)))
OWN(MemcpyDtoDAsync, (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream s), (to, from, size, own(s)))
OWN(MemcpyPeerAsync,
    (CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t size, CUstream s),
    (to, there, from, here, size, own(s)))
OWN(Memcpy2DAsync, (const CUDA_MEMCPY2D *copy, CUstream s), (copy, own(s)))
OWN(Memcpy3DAsync, (const CUDA_MEMCPY3D *copy, CUstream s), (copy, own(s)))
OWN(MemsetD8Async, (CUdeviceptr to, unsigned char v, size_t count, CUstream s), (to, v, count, own(s)))
OWN(MemsetD16Async, (CUdeviceptr to, unsigned short v, size_t count, CUstream s), (to, v, count, own(s)))
OWN(MemsetD32Async, (CUdeviceptr to, unsigned int v, size_t count, CUstream s), (to, v, count, own(s)))
OWN(MemsetD2D8Async,
    (CUdeviceptr to, size_t pitch, unsigned char v, size_t width, size_t height, CUstream s),
    (to, pitch, v, width, height, own(s)))
OWN(MemAllocAsync, (CUdeviceptr *out, size_t size, CUstream s), (out, size, own(s)))
OWN(MemFreeAsync, (CUdeviceptr at, CUstream s), (at, own(s)))
OWN(MemAllocFromPoolAsync, (CUdeviceptr *out, size_t size, CUmemoryPool pool, CUstream s),
    (out, size, pool, own(s)))
OWN(SignalExternalSemaphoresAsync,
    (const CUexternalSemaphore *which, const CUDA_EXTERNAL_SEMAPHORE_PARAMS *how, unsigned int n, CUstream s),
    (which, how, n, own(s)))
OWN(WaitExternalSemaphoresAsync,
    (const CUexternalSemaphore *which, const CUDA_EXTERNAL_SEMAPHORE_PARAMS *how, unsigned int n, CUstream s),
    (which, how, n, own(s)))
OWN(StreamBeginCapture, (CUstream s, CUstreamCaptureMode mode), (own(s), mode))
OWN(StreamEndCapture, (CUstream s, CUgraph *graph), (own(s), graph))
OWN(StreamIsCapturing, (CUstream s, CUstreamCaptureStatus *status), (own(s), status))
OWN(GraphLaunch, (CUgraphExec exec, CUstream s), (exec, own(s)))

/* ---- without a stream: the asynchronous form on the thread's own ---- */

static CUresult done(CUresult queued) {
    return queued == CUDA_SUCCESS ? host_cuStreamSynchronize(CU_STREAM_PER_THREAD) : queued;
}

#define DONE(name, parameters, call) \
    static CUresult own_cu##name parameters { return done(host_cu##call); }
#define QUEUED(name, parameters, call) \
    static CUresult own_cu##name parameters { return host_cu##call; }

DONE(Memcpy, (CUdeviceptr to, CUdeviceptr from, size_t size), MemcpyAsync(to, from, size, own(NULL)))
DONE(MemcpyHtoD, (CUdeviceptr to, const void *from, size_t size), MemcpyHtoDAsync(to, from, size, own(NULL)))
DONE(MemcpyDtoH, (void *to, CUdeviceptr from, size_t size), MemcpyDtoHAsync(to, from, size, own(NULL)))
QUEUED(MemcpyDtoD, (CUdeviceptr to, CUdeviceptr from, size_t size),
       MemcpyDtoDAsync(to, from, size, own(NULL)))
QUEUED(MemcpyPeer, (CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t size),
       MemcpyPeerAsync(to, there, from, here, size, own(NULL)))
DONE(Memcpy2D, (const CUDA_MEMCPY2D *copy), Memcpy2DAsync(copy, own(NULL)))
DONE(Memcpy2DUnaligned, (const CUDA_MEMCPY2D *copy), Memcpy2DAsync(copy, own(NULL)))
DONE(Memcpy3D, (const CUDA_MEMCPY3D *copy), Memcpy3DAsync(copy, own(NULL)))
QUEUED(MemsetD8, (CUdeviceptr to, unsigned char v, size_t count), MemsetD8Async(to, v, count, own(NULL)))
QUEUED(MemsetD32, (CUdeviceptr to, unsigned int v, size_t count), MemsetD32Async(to, v, count, own(NULL)))

/* ---- by name ---- */

#define ROW(name) {"cu" #name, (void *)own_cu##name}
static const struct {
    const char *name;
    void *function;
} functions[] = {
    ROW(StreamQuery), ROW(StreamSynchronize), ROW(StreamWaitEvent), ROW(StreamGetPriority),
    ROW(StreamGetFlags), ROW(StreamGetId), ROW(LaunchHostFunc), ROW(StreamWaitValue32),
    ROW(StreamWriteValue32), ROW(StreamWaitValue64), ROW(StreamWriteValue64), ROW(EventRecord),
    ROW(MemPrefetchAsync), ROW(MemcpyAsync), ROW(MemcpyHtoDAsync), ROW(MemcpyDtoHAsync),
    ROW(MemcpyDtoDAsync), ROW(MemcpyPeerAsync), ROW(Memcpy2DAsync), ROW(Memcpy3DAsync),
    ROW(MemsetD8Async), ROW(MemsetD16Async), ROW(MemsetD32Async), ROW(MemsetD2D8Async),
    ROW(MemAllocAsync), ROW(MemFreeAsync), ROW(MemAllocFromPoolAsync),
    ROW(SignalExternalSemaphoresAsync), ROW(WaitExternalSemaphoresAsync), ROW(StreamBeginCapture),
    ROW(StreamEndCapture), ROW(StreamIsCapturing), ROW(GraphLaunch), ROW(Memcpy), ROW(MemcpyHtoD),
    ROW(MemcpyDtoH), ROW(MemcpyDtoD), ROW(MemcpyPeer), ROW(Memcpy2D), ROW(Memcpy2DUnaligned),
    ROW(Memcpy3D), ROW(MemsetD8), ROW(MemsetD32),
};

static CUresult stream_context_v12(CUstream stream, CUcontext *context, void **green) {
    return libcuda_stream_context(own(stream), context, green);
}

static CUresult capture_info_v12(CUstream stream, CUstreamCaptureStatus *status, uint64_t *id,
                                 CUgraph *graph, const CUgraphNode **dependencies,
                                 const void **edges, size_t *count) {
    return libcuda_capture_info(own(stream), status, id, graph, dependencies, edges, count);
}

void *libcuda_per_thread(const char *name, int version) {
    if (strcmp(name, "cuStreamGetCtx") == 0)
        return version >= 12050 ? (void *)stream_context_v12 : (void *)own_cuStreamGetCtx;
    if (strcmp(name, "cuStreamGetCaptureInfo") == 0) return version >= 12030 ? (void *)capture_info_v12 : NULL;
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++)
        if (strcmp(functions[i].name, name) == 0) return functions[i].function;
    return NULL;
}
