/* Stream capture: calls become nodes instead of work; calls that cannot are refused.
 *
 * A capture collects operations in the order of the calls, which respects every
 * dependency. A set of nodes for each stream and recorded event says which nodes precede
 * it, so that joins and forks are checked as the driver checks them. An illegal call
 * invalidates the capture: it can only be ended, with an error.
 */
#include "../device/internal.h"

#include <stdlib.h>
#include <string.h>

_Atomic int host_captures;

static void lock(void) { pthread_mutex_lock(&host.capture_lock); }
static void unlock(void) { pthread_mutex_unlock(&host.capture_lock); }

/* ---- sets of nodes ---- */

static NodeSet *set_new(uint64_t capture, size_t words) {
    NodeSet *set = calloc(1, sizeof *set + words * sizeof set->bits[0]);
    if (!set) return NULL;
    set->capture = capture;
    set->words = words;
    return set;
}

static bool set_join(NodeSet **into, const NodeSet *from) {
    if (!*into || (*into)->words < from->words) {
        NodeSet *grown = set_new(from->capture, from->words);
        if (!grown) return false;
        if (*into) memcpy(grown->bits, (*into)->bits, (*into)->words * sizeof grown->bits[0]);
        free(*into);
        *into = grown;
    }
    for (size_t i = 0; i < from->words; i++) (*into)->bits[i] |= from->bits[i];
    return true;
}

static bool set_add(NodeSet **set, uint64_t capture, size_t node) {
    NodeSet *one = set_new(capture, node / 64 + 1);
    if (!one) return false;
    one->bits[node / 64] |= (uint64_t)1 << (node % 64);
    bool added = set_join(set, one);
    free(one);
    return added;
}

static size_t set_count(const NodeSet *set) {
    size_t count = 0;
    for (size_t i = 0; set && i < set->words; i++) count += (size_t)__builtin_popcountll(set->bits[i]);
    return count;
}

/* ---- calls that a capture forbids ---- */

static const bool unsafe[HOST_CALL_COUNT] = {
    [HOST_CALL_MemAlloc] = true,        [HOST_CALL_MemFree] = true,
    [HOST_CALL_MemHostAlloc] = true,    [HOST_CALL_MemFreeHost] = true,
    [HOST_CALL_MemHostRegister] = true, [HOST_CALL_MemHostUnregister] = true,
    [HOST_CALL_MemAllocManaged] = true, [HOST_CALL_CtxSynchronize] = true,
    [HOST_CALL_CtxRecordEvent] = true,
    [HOST_CALL_EventQuery] = true,      [HOST_CALL_EventSynchronize] = true,
    [HOST_CALL_StreamQuery] = true,     [HOST_CALL_StreamSynchronize] = true,
    [HOST_CALL_MemPoolTrimTo] = true,   [HOST_CALL_GraphInstantiateWithFlags] = true,
};

static bool concerns(const Capture *capture) { /* this thread's mode against the capture's */
    bool mine = capture->thread == &host_thread;
    switch (host_thread.capture_mode) {
    case CU_STREAM_CAPTURE_MODE_RELAXED: return false;
    case CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: return mine && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    default:
        return capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL ||
               (mine && capture->mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    }
}

static CUresult forbid(bool whatever_mode) {
    bool forbidden = false;
    lock();
    for (Capture *at = host.captures; at; at = at->next)
        if (whatever_mode || concerns(at)) at->invalidated = forbidden = true;
    unlock();
    return forbidden ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

/* A point in all streams of a context would include the stream that captures. */
CUresult host_capture_forbids(Call call) {
    bool whatever_mode = call == HOST_CALL_CtxSynchronize || call == HOST_CALL_CtxRecordEvent;
    return unsafe[call] ? forbid(whatever_mode) : CUDA_SUCCESS;
}

CUresult host_capture_forbids_pool(const Stream *stream) {
    if (atomic_load(&host_captures) == 0 || stream->capture) return CUDA_SUCCESS;
    return forbid(false);
}

/* The legacy stream would have to wait for captured work, which never runs. Using it then
 * invalidates the capture; a query about it does not. */
bool host_capture_blocks_legacy(Context *context, bool use) {
    bool blocks = false;
    if (atomic_load(&host_captures) == 0) return false;
    lock();
    for (Capture *at = host.captures; at; at = at->next)
        if (at->origin->context == context && !(at->origin->flags & CU_STREAM_NON_BLOCKING)) {
            blocks = true;
            if (use) at->invalidated = true;
        }
    unlock();
    return blocks;
}

CUresult host_capture_check_wait(Stream *stream) {
    if (stream->role == ROLE_LEGACY && host_capture_blocks_legacy(stream->context, true))
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    return host_capture_check_query(stream);
}

CUresult host_capture_check_query(Stream *stream) {
    if (atomic_load(&host_captures) == 0) return CUDA_SUCCESS;
    pthread_mutex_lock(&stream->object.lock);
    Capture *capture = stream->capture;
    lock();
    if (capture) capture->invalidated = true;
    unlock();
    pthread_mutex_unlock(&stream->object.lock);
    return capture ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

/* ---- nodes and order ---- */

void host_captured_free(NodeSet **captured, NodeSet **latest) {
    free(*captured);
    free(*latest);
    *captured = *latest = NULL;
}

/* The new node comes after everything before it in the stream, and alone is the latest. */
static bool stream_node(Stream *stream, const Capture *capture) {
    NodeSet *latest = NULL;
    bool noted = set_add(&latest, capture->id, capture->nodes.count) &&
                 set_add(&stream->captured, capture->id, capture->nodes.count);
    if (!noted) {
        free(latest);
        return false;
    }
    free(stream->latest);
    stream->latest = latest;
    return true;
}

CUresult host_capture_push(Stream *stream, const Op *op) {
    Capture *capture = stream->capture;
    CUresult result = CUDA_SUCCESS;
    lock();
    if (op->kind == OP_RUN || op->kind == OP_NOTHING) { /* once only, or a hint: no node */
        capture->invalidated = true;
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    } else if (capture->invalidated) {
        result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    } else if (!stream_node(stream, capture) || !host_nodes_add(&capture->nodes, op)) {
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    unlock();
    return result;
}

CUresult host_capture_record(Stream *stream, Event *event) {
    NodeSet *captured = set_new(stream->capture->id, 0), *latest = set_new(stream->capture->id, 0);
    bool copied = captured && latest && (!stream->captured || set_join(&captured, stream->captured)) &&
                  (!stream->latest || set_join(&latest, stream->latest));
    if (!copied) {
        host_captured_free(&captured, &latest);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    host_captured_free(&event->captured, &event->latest);
    event->captured = captured;
    event->latest = latest;
    return CUDA_SUCCESS;
}

static Capture *capture_find(uint64_t id) { /* caller holds capture_lock */
    Capture *at = host.captures;
    while (at && at->id != id) at = at->next;
    return at;
}

bool host_capture_lives(const NodeSet *captured) {
    lock();
    bool lives = capture_find(captured->capture) != NULL;
    unlock();
    return lives;
}

/* A wait for a captured event brings the stream into that capture; a captured stream
 * may wait for nothing else. */
CUresult host_capture_wait(Stream *stream, const Event *event, bool *done) {
    CUresult result = CUDA_SUCCESS;
    if (!event->captured && !stream->capture) return CUDA_SUCCESS;
    *done = true;
    lock();
    Capture *other = event->captured ? capture_find(event->captured->capture) : NULL;
    if (!event->captured && event->record == 0) result = CUDA_SUCCESS;
    else if (!other) result = stream->capture ? CUDA_ERROR_STREAM_CAPTURE_ISOLATION : CUDA_ERROR_INVALID_VALUE;
    else if (stream->capture && stream->capture != other) result = CUDA_ERROR_STREAM_CAPTURE_MERGE;
    else if (stream->role == ROLE_LEGACY) result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    if (result != CUDA_SUCCESS && stream->capture) stream->capture->invalidated = true;
    if (result != CUDA_SUCCESS && other) other->invalidated = true;
    if (result == CUDA_SUCCESS && other) {
        stream->capture = other;
        if (!set_join(&stream->captured, event->captured) || !set_join(&stream->latest, event->latest))
            result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    unlock();
    return result;
}

bool host_stream_captures(Context *context, CUstream handle) {
    Stream *stream;
    if (atomic_load(&host_captures) == 0) return false;
    if (host_stream_resolve(context, handle, &stream) != CUDA_SUCCESS) return false;
    pthread_mutex_lock(&stream->object.lock);
    bool captures = stream->capture != NULL;
    pthread_mutex_unlock(&stream->object.lock);
    return captures;
}

/* ---- begin and end ---- */

CUresult host_cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
    Context *context = ENTER_STREAM(StreamBeginCapture, handle);
    Stream *stream;
    if ((unsigned)mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(host_stream_resolve(context, handle, &stream));
    if (stream->role == ROLE_LEGACY) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    Capture *capture = calloc(1, sizeof *capture);
    if (!capture) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = host_graph_new(&capture->graph);
    pthread_mutex_lock(&stream->object.lock);
    if (result == CUDA_SUCCESS && stream->capture) result = CUDA_ERROR_ILLEGAL_STATE;
    if (result == CUDA_SUCCESS) {
        capture->id = host_next_id();
        capture->mode = mode;
        capture->thread = &host_thread;
        capture->origin = stream;
        stream->capture = capture;
        lock();
        capture->next = host.captures;
        host.captures = capture;
        atomic_fetch_add(&host_captures, 1);
        unlock();
    }
    pthread_mutex_unlock(&stream->object.lock);
    if (result == CUDA_SUCCESS) return result;
    if (capture->graph) host_cuGraphDestroy((CUgraph)(uintptr_t)capture->graph);
    free(capture);
    return result;
}

static void stream_leave(void *pointer, void *capture) {
    Stream *stream = pointer;
    pthread_mutex_lock(&stream->object.lock);
    if (stream->capture == capture) {
        stream->capture = NULL;
        host_captured_free(&stream->captured, &stream->latest);
    }
    pthread_mutex_unlock(&stream->object.lock);
}

/* Returns why the capture may not be ended by this call, or how it ends. Caller holds the
 * stream's lock. */
static CUresult end_check(const Capture *capture, const Stream *stream, bool *ends) {
    bool mine = capture->thread == &host_thread || capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED;
    *ends = false;
    if (!mine) return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    if (capture->origin != stream) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    *ends = true;
    if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    bool joined = set_count(stream->captured) == capture->nodes.count;
    return joined ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
}

static void capture_finish(Capture *capture, bool keep) { /* caller holds no lock */
    lock();
    Capture **hook = &host.captures;
    while (*hook != capture) hook = &(*hook)->next;
    *hook = capture->next;
    atomic_fetch_sub(&host_captures, 1);
    unlock();
    host_object_each(&host.streams, stream_leave, capture);
    if (keep) host_graph_fill(capture->graph, &capture->nodes);
    else host_cuGraphDestroy((CUgraph)(uintptr_t)capture->graph);
    if (!keep) free(capture->nodes.at);
    free(capture);
}

CUresult host_cuStreamEndCapture(CUstream handle, CUgraph *graph) {
    Context *context = ENTER_STREAM(StreamEndCapture, handle);
    Stream *stream;
    bool ends = false;
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    *graph = NULL;
    HOST_TRY(host_stream_resolve(context, handle, &stream));
    pthread_mutex_lock(&stream->object.lock);
    Capture *capture = stream->capture;
    lock();
    CUresult result = capture ? end_check(capture, stream, &ends) : CUDA_ERROR_ILLEGAL_STATE;
    if (capture && !ends) capture->invalidated = true;
    unlock();
    pthread_mutex_unlock(&stream->object.lock);
    if (!ends) return result;
    if (result == CUDA_SUCCESS) *graph = (CUgraph)(uintptr_t)capture->graph;
    capture_finish(capture, result == CUDA_SUCCESS);
    return result;
}

/* A captured stream is destroyed, and its capture cannot be completed any more. If the stream was
 * the origin, no call could end the capture, so it ends here. */
void host_capture_abandon(Stream *stream) {
    Capture *capture = stream->capture;
    stream->capture = NULL;
    host_captured_free(&stream->captured, &stream->latest);
    lock();
    capture->invalidated = true;
    bool origin = capture->origin == stream;
    unlock();
    if (!origin) return;
    pthread_mutex_unlock(&stream->object.lock);
    capture_finish(capture, false);
    pthread_mutex_lock(&stream->object.lock);
}

/* ---- queries ---- */

/* Lists the dependencies of the stream's next node; the list stays valid until the caller's
 * next query. Nodes have no memory of their own: a handle is the graph's, counted up, as
 * cuGraphGetNodes returns it. Caller holds the stream's lock. */
static size_t name_latest(Stream *stream, uint64_t graph) {
    size_t count = set_count(stream->latest), named = 0;
    CUgraphNode *grown = count ? realloc(stream->named, count * sizeof *grown) : NULL;
    if (!grown) return 0;
    stream->named = grown;
    for (size_t node = 0; node < stream->latest->words * 64; node++)
        if (stream->latest->bits[node / 64] >> (node % 64) & 1)
            grown[named++] = (CUgraphNode)(uintptr_t)(graph + node + 1);
    return named;
}

static CUresult capture_info(Context *context, CUstream handle, CUstreamCaptureStatus *status, uint64_t *id,
                             CUgraph *graph, const CUgraphNode **dependencies, size_t *count) {
    Stream *stream;
    if (!status) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(host_stream_resolve(context, handle, &stream));
    if (stream->role == ROLE_LEGACY && host_capture_blocks_legacy(context, false))
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    pthread_mutex_lock(&stream->object.lock);
    lock();
    const Capture *capture = stream->capture;
    if (!capture) *status = CU_STREAM_CAPTURE_STATUS_NONE;
    else if (capture->invalidated) *status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    else *status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = capture ? (CUgraph)(uintptr_t)capture->graph : NULL;
    size_t named = capture && (dependencies || count) ? name_latest(stream, capture->graph) : 0;
    if (dependencies) *dependencies = named ? stream->named : NULL;
    if (count) *count = named;
    unlock();
    pthread_mutex_unlock(&stream->object.lock);
    return CUDA_SUCCESS;
}

CUresult host_cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus *status, uint64_t *id,
                                     CUgraph *graph, const CUgraphNode **dependencies, size_t *count) {
    Context *context = ENTER_STREAM(StreamGetCaptureInfo, handle);
    return capture_info(context, handle, status, id, graph, dependencies, count);
}

CUresult host_cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
    Context *context = ENTER_STREAM(StreamIsCapturing, handle);
    return capture_info(context, handle, status, NULL, NULL, NULL, NULL);
}

CUresult host_cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    ENTER(ThreadExchangeStreamCaptureMode);
    if (!mode || (unsigned)*mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode before = host_thread.capture_mode;
    host_thread.capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
