/* Contexts: one primary context per device, and each thread's stack of them. */
#include "internal.h"

void host_context_build(int device) {
    Device *at = &host.devices[device];
    Context *context = &at->context;
    at->slabs = NULL;
    at->default_pool = at->current_pool = 0;
    atomic_store(&at->used, 0);
    atomic_store(&context->handle, 0);
    atomic_store(&context->error, CUDA_SUCCESS);
    atomic_store(&context->peers, 0);
    context->device = device;
    context->references = 0;
    context->streams = context->legacy = NULL;
    pthread_mutex_init(&context->lock, NULL);
}

CUresult host_context_of(CUcontext handle, Context **context) {
    uint64_t number = (uint64_t)(uintptr_t)handle;
    if (!host_handle_is(number, OBJECT_CONTEXT)) return CUDA_ERROR_INVALID_CONTEXT;
    uint32_t device = host_handle_index(number);
    if (device >= HOSTDEV_MAX_DEVICES) return CUDA_ERROR_INVALID_CONTEXT;
    *context = &host.devices[device].context;
    return atomic_load_explicit(&(*context)->handle, memory_order_acquire) == number
               ? CUDA_SUCCESS
               : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUresult host_context_current(Context **context) {
    if (host_thread.depth == 0) return CUDA_ERROR_INVALID_CONTEXT;
    uint64_t handle = host_thread.stack[host_thread.depth - 1];
    return host_context_of((CUcontext)(uintptr_t)handle, context);
}

/* All later calls return the device's first failure until the context ends. Operations that its
 * streams are running end, waits included. Caller holds no lock. */
void host_context_fail(Context *context, CUresult error) {
    int none = CUDA_SUCCESS;
    if (atomic_compare_exchange_strong(&context->error, &none, (int)error)) host_streams_wake();
}

/* ---- primary contexts ---- */

static CUresult context_begin(Context *context) {
    context->legacy = host_stream_make(context, CU_STREAM_DEFAULT, 0, ROLE_LEGACY);
    if (!context->legacy) return CUDA_ERROR_OUT_OF_MEMORY;
    atomic_store(&context->error, CUDA_SUCCESS);
    uint32_t generation = ++context->generation;
    atomic_store_explicit(&context->handle,
                          host_handle_make(OBJECT_CONTEXT, (uint32_t)context->device, generation),
                          memory_order_release);
    return CUDA_SUCCESS;
}

/* Streams end first: their remaining work uses the memory, which is freed last. */
static void context_end(Context *context) {
    uint64_t handle = atomic_exchange(&context->handle, 0); /* from here on no call finds it */
    Points points;
    pthread_mutex_lock(&context->lock);
    for (Stream *stream = context->streams; stream; stream = stream->next)
        atomic_store(&stream->cancelled, true);
    pthread_mutex_unlock(&context->lock);
    host_streams_wake(); /* blocked workers see that they are cancelled */
    host_points_start(&points);
    host_points_wait(&points, host_streams_points(context, NULL, true, &points));
    for (;;) { /* a closed stream is unlinked later: find the first that is open */
        Stream *open = NULL;
        uint64_t number = 0;
        pthread_mutex_lock(&context->lock);
        for (Stream *at = context->streams; at && !open; at = at->next)
            if ((number = atomic_load(&at->object.handle))) open = at;
        pthread_mutex_unlock(&context->lock);
        if (!open) break;
        host_stream_close(open, number);
    }
    host_events_drop(context);
    host_memory_drop(handle);
    context->legacy = NULL;
    atomic_store(&context->peers, 0);
}

CUresult host_cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER(DevicePrimaryCtxRetain);
    if (!context) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(host_device_check(device));
    Context *primary = &host.devices[device].context;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&host.setup_lock);
    atomic_store(&host.device_used, true);
    if (primary->references == 0) result = context_begin(primary);
    if (result == CUDA_SUCCESS) {
        primary->references++;
        *context = (CUcontext)(uintptr_t)atomic_load(&primary->handle);
    }
    pthread_mutex_unlock(&host.setup_lock);
    return result;
}

CUresult host_cuDevicePrimaryCtxRelease(CUdevice device) {
    ENTER(DevicePrimaryCtxRelease);
    HOST_TRY(host_device_check(device));
    Context *primary = &host.devices[device].context;
    pthread_mutex_lock(&host.setup_lock);
    bool held = primary->references > 0;
    if (held && --primary->references == 0) context_end(primary);
    pthread_mutex_unlock(&host.setup_lock);
    return held ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult host_cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
    ENTER(DevicePrimaryCtxGetState);
    if (!flags || !active) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(host_device_check(device));
    *flags = 0;
    *active = atomic_load(&host.devices[device].context.handle) != 0;
    return CUDA_SUCCESS;
}

/* ---- the thread's stack ---- */

CUresult host_cuCtxGetCurrent(CUcontext *context) {
    ENTER(CtxGetCurrent);
    if (!context) return CUDA_ERROR_INVALID_VALUE;
    Context *current;
    /* A destroyed context stays the current one, as with a driver. */
    bool none = host_context_current(&current) == CUDA_ERROR_INVALID_CONTEXT;
    *context = none ? NULL : (CUcontext)(uintptr_t)host_thread.stack[host_thread.depth - 1];
    return CUDA_SUCCESS;
}

static CUresult stack_push(CUcontext context) {
    if (host_thread.depth == HOST_CONTEXT_DEPTH) return CUDA_ERROR_OUT_OF_MEMORY;
    host_thread.stack[host_thread.depth++] = (uint64_t)(uintptr_t)context;
    return CUDA_SUCCESS;
}

/* Replaces the top; NULL pops it, so that the thread is as before the first push. */
CUresult host_cuCtxSetCurrent(CUcontext context) {
    ENTER(CtxSetCurrent);
    Context *found;
    if (!context) {
        if (host_thread.depth > 0) host_thread.depth--;
        return CUDA_SUCCESS;
    }
    HOST_TRY(host_context_of(context, &found));
    if (host_thread.depth > 0) host_thread.depth--;
    return stack_push(context);
}

CUresult host_cuCtxPushCurrent(CUcontext context) {
    ENTER(CtxPushCurrent);
    Context *found;
    HOST_TRY(host_context_of(context, &found));
    return stack_push(context);
}

CUresult host_cuCtxPopCurrent(CUcontext *context) {
    ENTER(CtxPopCurrent);
    if (host_thread.depth == 0) return CUDA_ERROR_INVALID_CONTEXT;
    uint64_t handle = host_thread.stack[--host_thread.depth];
    if (context) *context = (CUcontext)(uintptr_t)handle;
    return CUDA_SUCCESS;
}

CUresult host_cuCtxGetDevice(CUdevice *device) {
    Context *context;
    ENTER(CtxGetDevice);
    if (!device) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(host_context_current(&context));
    *device = context->device;
    return CUDA_SUCCESS;
}

CUresult host_cuCtxSynchronize(void) {
    Context *context = ENTER_CONTEXT(CtxSynchronize);
    return host_context_wait(context);
}

CUresult host_cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER_CONTEXT(CtxGetStreamPriorityRange);
    if (least) *least = HOST_LEAST_PRIORITY;
    if (greatest) *greatest = HOST_GREATEST_PRIORITY;
    return CUDA_SUCCESS;
}

/* ---- peers: recorded only; every host device can access memory that is not mapped ---- */

/* INVALID_DEVICE: a device cannot be its own peer. */
static CUresult peer_bit(CUcontext peer, const Context *context, uint64_t *bit) {
    Context *other;
    HOST_TRY(host_context_of(peer, &other));
    if (other == context) return CUDA_ERROR_INVALID_DEVICE;
    *bit = (uint64_t)1 << other->device;
    return host_device_reaches(context->device, other->device) ? CUDA_SUCCESS
                                                               : CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
}

CUresult host_cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
    Context *context = ENTER_CONTEXT(CtxEnablePeerAccess);
    uint64_t bit;
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(peer_bit(peer, context, &bit));
    bool had = atomic_fetch_or(&context->peers, bit) & bit;
    return had ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_SUCCESS;
}

CUresult host_cuCtxDisablePeerAccess(CUcontext peer) {
    Context *context = ENTER_CONTEXT(CtxDisablePeerAccess);
    uint64_t bit;
    HOST_TRY(peer_bit(peer, context, &bit));
    bool had = atomic_fetch_and(&context->peers, ~bit) & bit;
    return had ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}
