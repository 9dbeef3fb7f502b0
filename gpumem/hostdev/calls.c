/* The way into every driver function: counted, refused where it must be; and what is alive. */
#include "internal.h"

#include <string.h>

static _Atomic uint64_t counts[HOST_CALL_COUNT];

static CUresult state_check(void) {
    int state = atomic_load_explicit(&host.state, memory_order_acquire);
    if (state == HOST_READY)
        return host_thread.in_host_function ? CUDA_ERROR_NOT_PERMITTED : CUDA_SUCCESS;
    return state == HOST_COLD ? CUDA_ERROR_NOT_INITIALIZED : CUDA_ERROR_DEINITIALIZED;
}

CUresult host_enter(Call call) {
    atomic_fetch_add_explicit(&counts[call], 1, memory_order_relaxed);
    HOST_TRY(state_check());
    if (atomic_load_explicit(&host_captures, memory_order_relaxed)) HOST_TRY(host_capture_forbids(call));
    return atomic_load_explicit(&host_faults_armed, memory_order_relaxed) ? host_fault(call) : CUDA_SUCCESS;
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
    Context *current;
    if (host_misuse() && host_context_current(&current) == CUDA_SUCCESS && current != *context)
        host_misuse_note(HOSTDEV_WRONG_CONTEXT, (uintptr_t)handle, 0);
    return (CUresult)atomic_load_explicit(&(*context)->error, memory_order_relaxed);
}

CUresult host_enter_event(Call call, CUevent handle, Context **context) {
    HOST_TRY(host_enter(call));
    Event *event = host_object_find(&host.events, (uint64_t)(uintptr_t)handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    *context = event->context;
    return (CUresult)atomic_load_explicit(&(*context)->error, memory_order_relaxed);
}

/* ---- counters ---- */

int host_call_number(const char *name) { /* -1: not in the table */
    for (int call = 0; call < DRIVER_ENTRY_COUNT; call++)
        if (strcmp(driver_entries[call].name, name) == 0) return call;
    return -1;
}

uint64_t hostdev_call_count(const char *name) {
    int call = host_call_number(name);
    return call < 0 ? UINT64_MAX : atomic_load(&counts[call]);
}

uint64_t hostdev_total_calls(void) {
    uint64_t total = 0;
    for (int call = 0; call < HOST_CALL_COUNT; call++) total += atomic_load(&counts[call]);
    return total;
}

void hostdev_reset_counts(void) {
    for (int call = 0; call < HOST_CALL_COUNT; call++) atomic_store(&counts[call], 0);
}

/* ---- what is alive ---- */

static void count_stream(void *pointer, void *data) {
    Stream *stream = pointer;
    pthread_mutex_lock(&stream->lock);
    if (atomic_load(&stream->object.handle) && stream->role == ROLE_ORDINARY) ++*(uint64_t *)data;
    pthread_mutex_unlock(&stream->lock);
}

static void count_ranges(const Range *range, HostdevLive *live) {
    if (!range) return;
    if (range->kind == RANGE_MAPPING) live->mappings++;
    else live->allocations++;
    count_ranges(range->left, live);
    count_ranges(range->right, live);
}

void hostdev_live(HostdevLive *live) {
    host_setup();
    memset(live, 0, sizeof *live);
    host_object_each(&host.streams, count_stream, &live->streams);
    live->events = atomic_load(&host.events.live);
    live->handles = atomic_load(&host.physicals.live);
    live->pools = atomic_load(&host.pools.live);
    live->imports = atomic_load(&host.external_memories.live) + atomic_load(&host.semaphores.live);
    live->graphs = atomic_load(&host.graphs.live) + atomic_load(&host.graph_execs.live);
    pthread_rwlock_rdlock(&host.map_lock);
    count_ranges(host.ranges.root, live);
    live->reservations = host.reservations.count;
    pthread_rwlock_unlock(&host.map_lock);
    pthread_mutex_lock(&host.worker_lock);
    live->workers = host.workers;
    pthread_mutex_unlock(&host.worker_lock);
}
