/* The driver's functions of streams. */
#include "../device/internal.h"

#include <stdlib.h>

static CUstream stream_handle(Stream *stream) {
    return (CUstream)(uintptr_t)atomic_load(&stream->object.handle);
}

/* ---- the calling thread's own default stream, one per device ---- */

typedef struct OwnStreams {
    uint64_t at[HOSTDEV_MAX_DEVICES];
} OwnStreams;

static pthread_key_t own_key;
static pthread_once_t own_once = PTHREAD_ONCE_INIT;

static void own_end(void *pointer) { /* the thread ends; queued work still runs */
    OwnStreams *own = pointer;
    for (int device = 0; device < HOSTDEV_MAX_DEVICES; device++) {
        Stream *stream = own->at[device] ? host_object_find(&host.streams, own->at[device]) : NULL;
        if (stream && !host_is_down()) host_stream_close(stream, own->at[device]);
    }
    free(own);
}

static void own_begin(void) { pthread_key_create(&own_key, own_end); }

static CUstream stream_per_thread(Context *context) {
    pthread_once(&own_once, own_begin);
    OwnStreams *own = pthread_getspecific(own_key);
    if (!own) {
        own = calloc(1, sizeof *own);
        if (!own) return NULL;
        pthread_setspecific(own_key, own);
    }
    uint64_t *handle = &own->at[context->device];
    if (!host_object_find(&host.streams, *handle)) { /* never made, or its context ended */
        /* It belongs to the context; the thread keeps its handle, which may become stale. */
        Stream *stream = host_stream_make(context, CU_STREAM_DEFAULT, 0, ROLE_PER_THREAD);
        *handle = stream ? atomic_load(&stream->object.handle) : 0;
    }
    return (CUstream)(uintptr_t)*handle;
}

CUresult host_stream_resolve(Context *current, CUstream handle, Stream **stream) {
    if (!handle || handle == CU_STREAM_LEGACY) {
        *stream = current->legacy;
        return CUDA_SUCCESS;
    }
    if (handle == CU_STREAM_PER_THREAD) handle = stream_per_thread(current);
    *stream = host_object_find(&host.streams, (uint64_t)(uintptr_t)handle);
    return *stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* ---- make and destroy ---- */

static int clamp_priority(int priority) { /* as by a driver: the nearest in range */
    if (priority > HOST_LEAST_PRIORITY) return HOST_LEAST_PRIORITY;
    return priority < HOST_GREATEST_PRIORITY ? HOST_GREATEST_PRIORITY : priority;
}

static CUresult stream_create(Context *context, CUstream *out, unsigned flags, int priority) {
    if (!out || flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    Stream *stream = host_stream_make(context, flags, clamp_priority(priority), ROLE_ORDINARY);
    if (!stream) return CUDA_ERROR_OUT_OF_MEMORY;
    *out = stream_handle(stream);
    return CUDA_SUCCESS;
}

CUresult host_cuStreamCreate(CUstream *stream, unsigned int flags) {
    return stream_create(ENTER_CONTEXT(StreamCreate), stream, flags, 0);
}

CUresult host_cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
    return stream_create(ENTER_CONTEXT(StreamCreateWithPriority), stream, flags, priority);
}

/* Returns at once; queued work still runs. */
CUresult host_cuStreamDestroy(CUstream handle) {
    ENTER_STREAM(StreamDestroy, handle);
    uint64_t number = (uint64_t)(uintptr_t)handle;
    Stream *stream = host_object_find(&host.streams, number);
    if (!stream || stream->role != ROLE_ORDINARY) return CUDA_ERROR_INVALID_HANDLE;
    return host_stream_close(stream, number);
}

/* ---- waits and queries ---- */

static CUresult stream_collect(Context *context, CUstream handle, Stream **stream, Points *points) {
    host_points_start(points);
    HOST_TRY(host_stream_resolve(context, handle, stream));
    HOST_TRY(host_capture_check_wait(*stream));
    return host_stream_points(*stream, points);
}

/* Ends a query or a wait that has had a result: the host has seen the end of the stream's work. */
static CUresult stream_seen(Context *context, Stream *stream, CUresult result) {
    if (result != CUDA_SUCCESS) return result;
    WATCH(host_order_host_after(stream));
    return (CUresult)atomic_load(&context->error);
}

CUresult host_cuStreamQuery(CUstream handle) {
    Context *context = ENTER_STREAM(StreamQuery, handle);
    Stream *stream = NULL;
    Points points;
    CUresult result = stream_collect(context, handle, &stream, &points);
    for (size_t i = 0; i < points.count && result == CUDA_SUCCESS; i++) {
        host_point_settle(points.at[i]);
        if (!host_point_done(points.at[i])) result = CUDA_ERROR_NOT_READY;
    }
    host_points_end(&points);
    return stream_seen(context, stream, result);
}

CUresult host_cuStreamSynchronize(CUstream handle) {
    Context *context = ENTER_STREAM(StreamSynchronize, handle);
    Stream *stream = NULL;
    Points points;
    CUresult result = stream_collect(context, handle, &stream, &points);
    result = stream_seen(context, stream, host_points_wait(&points, result));
    host_pools_synchronized(); /* as by a driver: pools trim when a host waits */
    return result;
}

/* Resolves the stream of a query; its result is written to `out`. */
static CUresult stream_queried(Context *context, CUstream handle, const void *out, Stream **stream) {
    return out ? host_stream_resolve(context, handle, stream) : CUDA_ERROR_INVALID_VALUE;
}

CUresult host_cuStreamGetPriority(CUstream handle, int *priority) {
    Stream *stream;
    HOST_TRY(stream_queried(ENTER_STREAM(StreamGetPriority, handle), handle, priority, &stream));
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

CUresult host_cuStreamGetFlags(CUstream handle, unsigned int *flags) {
    Stream *stream;
    HOST_TRY(stream_queried(ENTER_STREAM(StreamGetFlags, handle), handle, flags, &stream));
    HOST_TRY(host_capture_check_query(stream));
    *flags = stream->flags;
    return CUDA_SUCCESS;
}

CUresult host_cuStreamGetCtx(CUstream handle, CUcontext *out) {
    Stream *stream;
    HOST_TRY(stream_queried(ENTER_STREAM(StreamGetCtx, handle), handle, out, &stream));
    *out = (CUcontext)(uintptr_t)atomic_load(&stream->context->handle);
    return CUDA_SUCCESS;
}

CUresult host_cuStreamGetId(CUstream handle, unsigned long long *id) {
    Stream *stream;
    HOST_TRY(stream_queried(ENTER_STREAM(StreamGetId, handle), handle, id, &stream));
    HOST_TRY(host_capture_check_query(stream));
    *id = stream->id;
    return CUDA_SUCCESS;
}

/* ---- work without memory traffic ---- */

CUresult host_cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data) {
    Context *context = ENTER_STREAM(LaunchHostFunc, handle);
    if (!function) return CUDA_ERROR_INVALID_VALUE;
    Op op = {.kind = OP_CALL, .call = {function, data}};
    return host_stream_submit(context, handle, &op, NULL);
}

static CUresult submit_value(Context *context, CUstream handle, OpKind kind, Value value) {
    size_t bytes = value.wide ? 8 : 4;
    bool write = kind == OP_WRITE_VALUE;
    unsigned known = write ? (unsigned)CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER
                           : (unsigned)CU_STREAM_WAIT_VALUE_NOR | CU_STREAM_WAIT_VALUE_FLUSH;
    if (value.address % bytes != 0 || (value.flags & ~known)) return CUDA_ERROR_INVALID_VALUE;
    /* A stream of a GPU does not reach the program's pageable memory. */
    MemoryKind memory = host_memory_kind(value.address, bytes, write, context->device);
    if (memory == MEMORY_PAGEABLE || memory == MEMORY_INACCESSIBLE) return CUDA_ERROR_INVALID_VALUE;
    return host_stream_submit(context, handle, &(Op){.kind = kind, .value = value}, NULL);
}

#define VALUE_CALL(name, kind, type, wide)                                                         \
    CUresult host_cu##name(CUstream stream, CUdeviceptr address, type value, unsigned int flags) { \
        Value given = {address, value, flags, wide};                                               \
        return submit_value(ENTER_STREAM(name, stream), stream, kind, given);                      \
    }
VALUE_CALL(StreamWaitValue32, OP_WAIT_VALUE, uint32_t, false)
VALUE_CALL(StreamWaitValue64, OP_WAIT_VALUE, uint64_t, true)
VALUE_CALL(StreamWriteValue32, OP_WRITE_VALUE, uint32_t, false)
VALUE_CALL(StreamWriteValue64, OP_WRITE_VALUE, uint64_t, true)
#undef VALUE_CALL
