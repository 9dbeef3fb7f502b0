/* The beginning of every driver function: the call is counted, and refused as by a driver. */
#include "internal.h"

static CUresult state_check(void) {
    int state = atomic_load_explicit(&host.state, memory_order_acquire);
    if (state == HOST_READY)
        return host_thread.in_host_function ? CUDA_ERROR_NOT_PERMITTED : CUDA_SUCCESS;
    return state == HOST_COLD ? CUDA_ERROR_NOT_INITIALIZED : CUDA_ERROR_DEINITIALIZED;
}

CUresult host_enter(Call call) {
    count_call(call);
    HOST_TRY(state_check());
    if (atomic_load_explicit(&host_captures, memory_order_relaxed)) HOST_TRY(host_capture_forbids(call));
    return inject_fault(call); /* last: a call that is refused anyway uses up no fault */
}

CUresult host_enter_context(Call call, Context **context) {
    HOST_TRY(host_enter(call));
    HOST_TRY(host_context_current(context));
    return (CUresult)atomic_load_explicit(&(*context)->error, memory_order_relaxed);
}

/* The default streams are those of the current context. */
CUresult host_enter_stream(Call call, CUstream handle, Context **context) {
    if ((uintptr_t)handle <= (uintptr_t)CU_STREAM_PER_THREAD) return host_enter_context(call, context);
    HOST_TRY(host_enter(call));
    Stream *stream = host_object_find(&host.streams, (uint64_t)(uintptr_t)handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    *context = stream->context;
    WATCH(host_misuse_context(*context, handle));
    return (CUresult)atomic_load_explicit(&(*context)->error, memory_order_relaxed);
}

CUresult host_enter_event(Call call, CUevent handle, Context **context) {
    HOST_TRY(host_enter(call));
    Event *event = host_object_find(&host.events, (uint64_t)(uintptr_t)handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    *context = event->context;
    return (CUresult)atomic_load_explicit(&(*context)->error, memory_order_relaxed);
}
