/* Events: a point in a stream's order, and the time it was passed.
 *
 * A record notes the last operation that the stream has queued, and queues nothing itself,
 * except for a timing event on a busy stream: its time is known when the worker gets there.
 */
#include "../device/internal.h"

#include <stdlib.h>

static void forget_record(Event *event) { /* caller holds the event's lock */
    host_captured_free(&event->captured, &event->latest);
    free(event->known);
    event->known = NULL;
}

static void event_unlock(Event *event) { pthread_mutex_unlock(&event->object.lock); }

static bool is_timed(const Event *event) { return !(event->flags & CU_EVENT_DISABLE_TIMING); }

CUresult host_cuEventCreate(CUevent *out, unsigned int flags) {
    enum { KNOWN = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS };
    Context *context = ENTER_CONTEXT(EventCreate);
    bool shared = flags & CU_EVENT_INTERPROCESS;
    if (!out || (flags & ~(unsigned)KNOWN)) return CUDA_ERROR_INVALID_VALUE;
    if (shared && !(flags & CU_EVENT_DISABLE_TIMING)) return CUDA_ERROR_INVALID_VALUE;
    Event *event = host_object_take(&host.events);
    if (!event) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&event->object.lock);
    event->context = context;
    event->flags = flags;
    event->record = event->time = 0;
    event->point = (Point){NULL, 0, 0};
    event->captured = event->latest = NULL;
    event->known = NULL;
    event_unlock(event);
    *out = (CUevent)(uintptr_t)host_object_publish(&host.events, event);
    return CUDA_SUCCESS;
}

/* A record that is still queued is unaffected: it is a number in a stream. */
CUresult host_cuEventDestroy(CUevent handle) {
    ENTER_EVENT(EventDestroy, handle);
    Event *event = HOST_LOCKED(events, handle, CUDA_ERROR_INVALID_HANDLE);
    forget_record(event);
    host_object_end(&host.events, event);
    return CUDA_SUCCESS;
}

static void event_drop(void *pointer, void *data) {
    Event *event = pointer;
    pthread_mutex_lock(&event->object.lock);
    if (!atomic_load(&event->object.handle) || event->context != data) {
        event_unlock(event);
        return;
    }
    forget_record(event);
    host_object_end(&host.events, event);
}

void host_events_drop(Context *context) { host_object_each(&host.events, event_drop, context); }

/* Caller holds the locks of stream and event. */
static CUresult record(Event *event, Stream *stream) {
    if (stream->capture) return host_capture_record(stream, event);
    Point point = host_stream_tail(stream);
    /* The time of a point that has passed is known now; else the worker stamps the event. */
    bool passed = atomic_load(&stream->completed) >= point.seq;
    uint64_t time = 0;
    if (passed && is_timed(event)) time = point.due ? point.due : host_now();
    if (!passed && is_timed(event)) {
        Op stamp = {.kind = OP_STAMP, .stamp = {atomic_load(&event->object.handle), event->record + 1}};
        HOST_TRY(host_stream_push(stream, &stamp));
        point.seq = atomic_load(&stream->submitted);
    }
    delay_record(&point);
    event->record++;
    event->point = point;
    event->time = time;
    forget_record(event);
    WATCH(event->known = host_order_record(stream, event->point));
    return CUDA_SUCCESS;
}

static CUresult record_on(Context *context, CUstream stream_handle, CUevent handle) {
    Stream *stream;
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    HOST_TRY(host_stream_begin(context, stream_handle, &stream));
    Event *event = host_object_lock(&host.events, handle);
    if (event) {
        if (event->context == stream->context) result = record(event, stream);
        event_unlock(event);
    }
    host_stream_end(stream);
    return result;
}

CUresult host_cuEventRecord(CUevent event, CUstream stream) {
    return record_on(ENTER_STREAM(EventRecord, stream), stream, event);
}

/* Records on a stream of its own, which waits for all streams of the context and is destroyed. */
CUresult host_cuCtxRecordEvent(CUcontext handle, CUevent event) {
    Context *context;
    Points points;
    ENTER(CtxRecordEvent);
    HOST_TRY(host_context_of(handle, &context));
    Stream *stream = host_stream_make(context, CU_STREAM_NON_BLOCKING, 0, ROLE_ORDINARY);
    if (!stream) return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t number = atomic_load(&stream->object.handle);
    host_points_start(&points);
    CUresult result = host_streams_points(context, stream, true, &points);
    WATCH(host_order_stream_after_all(stream, true));
    pthread_mutex_lock(&stream->object.lock);
    for (size_t i = 0; i < points.count && result == CUDA_SUCCESS; i++)
        result = host_stream_wait_point(stream, points.at[i]);
    host_stream_end(stream);
    host_points_end(&points);
    if (result == CUDA_SUCCESS) result = record_on(context, (CUstream)(uintptr_t)number, event);
    host_stream_close(stream, number);
    return result;
}

/* The worker has come to a timed record. If the event was recorded again since, or destroyed,
 * the time belongs to no record. */
void host_event_stamp(uint64_t handle, uint64_t record_number) {
    Event *event = host_object_lock(&host.events, (CUevent)(uintptr_t)handle);
    if (!event) return;
    if (event->record == record_number) event->time = host_now();
    event_unlock(event);
}

/* Waits for the event's latest record as it is now; recording it again changes nothing. */
CUresult host_cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned int flags) {
    Context *context = ENTER_STREAM(StreamWaitEvent, stream_handle);
    Stream *stream;
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(host_stream_begin(context, stream_handle, &stream));
    Event *event = host_object_lock(&host.events, handle);
    if (event) {
        bool done = false; /* an event or a stream in a capture: nothing to queue */
        result = host_capture_wait(stream, event, &done);
        if (result == CUDA_SUCCESS && !done) result = host_stream_wait_point(stream, event->point);
        if (result == CUDA_SUCCESS && !done) WATCH(host_order_stream_saw(stream, event->known, event->point));
        event_unlock(event);
    }
    host_stream_end(stream);
    return result;
}

static CUresult event_point(CUevent handle, Point *point) {
    Event *event = HOST_LOCKED(events, handle, CUDA_ERROR_INVALID_HANDLE);
    *point = event->point;
    CUresult result = CUDA_SUCCESS;
    if (event->captured)
        result = host_capture_lives(event->captured) ? CUDA_ERROR_CAPTURED_EVENT : CUDA_ERROR_INVALID_VALUE;
    event_unlock(event);
    return result;
}

CUresult host_cuEventQuery(CUevent handle) {
    Context *context = ENTER_EVENT(EventQuery, handle);
    Point point;
    HOST_TRY(event_point(handle, &point));
    host_point_settle(point);
    if (!host_point_done(point)) return CUDA_ERROR_NOT_READY;
    WATCH(host_order_event_seen(handle, point));
    return (CUresult)atomic_load(&context->error);
}

CUresult host_cuEventSynchronize(CUevent handle) {
    Context *context = ENTER_EVENT(EventSynchronize, handle);
    Point point;
    HOST_TRY(event_point(handle, &point));
    HOST_TRY(host_point_wait(point));
    WATCH(host_order_event_seen(handle, point));
    host_pools_synchronized();
    return (CUresult)atomic_load(&context->error);
}

static CUresult event_time(CUevent handle, uint64_t *time) {
    Event *event = HOST_LOCKED(events, handle, CUDA_ERROR_INVALID_HANDLE);
    bool timed = is_timed(event) && event->record > 0;
    Point point = event->point;
    event_unlock(event);
    if (!timed) return CUDA_ERROR_INVALID_HANDLE;
    /* Caller does not hold the event's lock: the worker needs it to stamp the event. */
    host_point_settle(point);
    if (!host_point_done(point)) return CUDA_ERROR_NOT_READY;
    event = HOST_LOCKED(events, handle, CUDA_ERROR_INVALID_HANDLE);
    *time = event->time;
    event_unlock(event);
    return CUDA_SUCCESS;
}

CUresult host_cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
    uint64_t from, to;
    ENTER_EVENT(EventElapsedTime, start);
    if (!milliseconds) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(event_time(start, &from));
    HOST_TRY(event_time(end, &to));
    *milliseconds = (float)((double)(int64_t)(to - from) / 1e6);
    return CUDA_SUCCESS;
}
