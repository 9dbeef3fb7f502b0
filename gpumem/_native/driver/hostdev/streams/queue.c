/* Order: a stream's queue, the worker thread that runs it, and waits between streams.
 *
 * Submitting is one lock, one copy of an Op and, only when the worker sleeps, one wake-up.
 * A worker thread starts with its stream's first work and ends when idle for a while.
 */
#include "../device/internal.h"
#include "threads.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

enum { RING_START = 16, WORKER_STACK = 1 << 20, IDLE_NS = 1000000000, TIMER_SLACK_NS = 1000 };

void host_stream_build(void *pointer) {
    Stream *stream = pointer;
    host_cond_build(&stream->work);
    host_cond_build(&stream->progress);
}

bool host_stop_requested(const Stream *stream) {
    if (host_is_down() || !stream) return host_is_down();
    return atomic_load(&stream->cancelled) || atomic_load(&stream->context->error);
}

/* ---- points ---- */

bool host_point_done(Point point) {
    return host_seq_done(point) && (point.due == 0 || host_now() >= point.due);
}

/* Returns when the last operation may finish; 0 without lag. Caller holds the stream's lock. */
static uint64_t due_next(Stream *stream) {
    uint64_t due = host_clock_due();
    uint64_t last = atomic_load_explicit(&stream->last_due, memory_order_relaxed);
    if (last > due) due = last > host_now() ? last : 0;
    if (due != last) atomic_store_explicit(&stream->last_due, due, memory_order_relaxed);
    return due;
}

Point host_stream_tail(Stream *stream) {
    return (Point){stream, host_submitted(stream), due_next(stream)};
}

/* ---- the worker ---- */

static void park(Stream *stream, ParkKind kind, Point point) { /* caller holds its lock */
    stream->park = kind;
    stream->park_point = point;
}

/* Waits until `due`, or until the stream is stopped. On the virtual clock a host that waits for
 * this operation moves the clock to `due` instead. Caller holds the stream's lock, which is
 * released during the wait. */
static void wait_due(Stream *stream, uint64_t due) {
    uint64_t now;
    while (!host_stop_requested(stream) && (now = host_now()) < due) {
        if (!host_clock_is_virtual()) {
            struct timespec deadline;
            host_deadline(&deadline, due - now);
            park(stream, PARK_TIME, (Point){NULL, 0, due});
            pthread_cond_timedwait(&stream->work, &stream->object.lock, &deadline);
        } else if (stream->pulled >= stream->running) {
            pthread_mutex_unlock(&stream->object.lock);
            host_clock_advance_to(due);
            pthread_mutex_lock(&stream->object.lock);
        } else {
            park(stream, PARK_TIME, (Point){NULL, 0, due});
            pthread_cond_broadcast(&stream->progress); /* host_point_settle sees that it is parked */
            pthread_cond_wait(&stream->work, &stream->object.lock);
        }
    }
    park(stream, PARK_NONE, (Point){NULL, 0, 0});
}

static void execute(Stream *stream, uint64_t number) { /* caller holds the stream's lock */
    Op op = stream->ring[number & (stream->capacity - 1)];
    stream->running = number;
    if (op.due) wait_due(stream, op.due);
    pthread_mutex_unlock(&stream->object.lock);
    if (host_stop_requested(stream)) host_op_drop(&op);
    else host_op_run(stream, &op);
    pthread_mutex_lock(&stream->object.lock);
    if (host_is_down()) return; /* not completed: its waiters see the shutdown instead */
    atomic_store_explicit(&stream->completed, number, memory_order_release);
    pthread_cond_broadcast(&stream->progress);
}

/* False: the stream was idle for IDLE_NS. */
static bool wait_for_work(Stream *stream) {
    struct timespec deadline;
    host_deadline(&deadline, IDLE_NS);
    int waited = 0;
    stream->worker_asleep = true;
    while (waited != ETIMEDOUT && host_submitted(stream) == host_completed(stream) && !stream->dying &&
           !host_is_down())
        waited = pthread_cond_timedwait(&stream->work, &stream->object.lock, &deadline);
    stream->worker_asleep = false;
    return host_submitted(stream) != host_completed(stream);
}

/* Frees the slot of a closed stream with an empty queue. */
static void stream_retire(Stream *stream) {
    Context *context = stream->context;
    pthread_mutex_lock(&context->lock);
    if (stream->previous) stream->previous->next = stream->next;
    else context->streams = stream->next;
    if (stream->next) stream->next->previous = stream->previous;
    pthread_mutex_unlock(&context->lock);
    pthread_mutex_lock(&stream->object.lock);
    free(stream->ring);
    free(stream->named);
    stream->ring = NULL;
    stream->named = NULL;
    stream->capacity = 0;
    stream->dying = false;
    pthread_mutex_unlock(&stream->object.lock);
    host_object_give(&host.streams, stream);
}

static void worker_leave(void) {
    pthread_mutex_lock(&host.worker_lock);
    host.workers--;
    pthread_cond_broadcast(&host.worker_gone);
    pthread_mutex_unlock(&host.worker_lock);
}

static void *worker_main(void *argument) {
    Stream *stream = argument;
    prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0);
    pthread_mutex_lock(&stream->object.lock);
    while (!host_is_down()) {
        uint64_t next = host_completed(stream) + 1;
        if (next <= host_submitted(stream)) execute(stream, next);
        else if (stream->dying || !wait_for_work(stream)) break;
    }
    bool retire = stream->dying && !host_is_down();
    stream->worker_alive = false;
    pthread_mutex_unlock(&stream->object.lock);
    if (retire) stream_retire(stream);
    worker_leave();
    return NULL;
}

static CUresult worker_start(Stream *stream) {
    pthread_t thread;
    pthread_mutex_lock(&host.worker_lock);
    host.workers++;
    pthread_mutex_unlock(&host.worker_lock);
    stream->worker_alive = thread_start(&thread, 1, WORKER_STACK, worker_main, stream) == 0;
    if (stream->worker_alive) return CUDA_SUCCESS;
    worker_leave();
    return CUDA_ERROR_OPERATING_SYSTEM;
}

void host_park(Stream *stream, ParkKind kind, Point point) {
    pthread_mutex_lock(&stream->object.lock);
    park(stream, kind, point);
    bool pulled = stream->pulled >= stream->running;
    pthread_cond_broadcast(&stream->progress);
    pthread_mutex_unlock(&stream->object.lock);
    if (kind == PARK_POINT && pulled && host_clock_is_virtual()) host_point_pull(point);
}

/* Waits in a worker until another stream has passed a point. It sleeps on that stream's
 * `progress`, which a stop of either stream wakes. */
void host_stream_follow(Stream *stream, Point point) {
    Stream *other = point.stream;
    host_park(stream, PARK_POINT, point);
    pthread_mutex_lock(&other->object.lock);
    while (!host_seq_done(point) && !host_stop_requested(stream))
        pthread_cond_wait(&other->progress, &other->object.lock);
    pthread_mutex_unlock(&other->object.lock);
    pthread_mutex_lock(&stream->object.lock);
    wait_due(stream, point.due); /* unparks */
    pthread_mutex_unlock(&stream->object.lock);
}

static void stream_wake(void *pointer, void *data) {
    Stream *stream = pointer;
    (void)data;
    pthread_mutex_lock(&stream->object.lock);
    pthread_cond_broadcast(&stream->work);
    pthread_cond_broadcast(&stream->progress);
    pthread_mutex_unlock(&stream->object.lock);
}

void host_streams_wake(void) {
    host_object_each(&host.streams, stream_wake, NULL);
    host_value_wake();
}

/* ---- queueing; between host_stream_begin and host_stream_end ---- */

static CUresult ring_grow(Stream *stream) {
    size_t capacity = stream->capacity ? 2 * stream->capacity : RING_START;
    Op *ring = malloc(capacity * sizeof *ring);
    if (!ring) return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t last = host_submitted(stream);
    for (uint64_t number = host_completed(stream) + 1; number <= last; number++)
        ring[number & (capacity - 1)] = stream->ring[number & (stream->capacity - 1)];
    free(stream->ring);
    stream->ring = ring;
    stream->capacity = capacity;
    return CUDA_SUCCESS;
}

CUresult host_stream_push(Stream *stream, const Op *op) {
    uint64_t number = host_submitted(stream) + 1;
    if (host_is_down()) return CUDA_ERROR_DEINITIALIZED;
    if (stream->capture) return host_capture_push(stream, op);
    if (number - host_completed(stream) > stream->capacity) HOST_TRY(ring_grow(stream));
    if (!stream->worker_alive) HOST_TRY(worker_start(stream));
    Op *slot = &stream->ring[number & (stream->capacity - 1)];
    *slot = *op;
    slot->due = due_next(stream);
    atomic_store_explicit(&stream->submitted, number, memory_order_release);
    WATCH(host_order_op(stream, number, op));
    return CUDA_SUCCESS;
}

void host_stream_end(Stream *stream) {
    bool wake = stream->worker_asleep && host_submitted(stream) != host_completed(stream);
    if (wake) stream->worker_asleep = false; /* one signal is enough */
    pthread_mutex_unlock(&stream->object.lock);
    if (wake) pthread_cond_signal(&stream->work);
}

/* A stream is ordered after the points that it has waited for: a pool may reuse memory by it. */
static void note_seen(Stream *stream, Point point) {
    for (int i = 0; i < STREAM_SEEN; i++) {
        if (stream->seen[i].stream != point.stream) continue;
        if (stream->seen[i].seq < point.seq) stream->seen[i] = point;
        return;
    }
    stream->seen[stream->seen_next++ % STREAM_SEEN] = point;
}

bool host_stream_has_seen(const Stream *stream, Point point) {
    for (int i = 0; i < STREAM_SEEN; i++)
        if (stream->seen[i].stream == point.stream && stream->seen[i].seq >= point.seq) return true;
    return false;
}

/* Queues a wait for a point that has not finished. A point that has finished, but not yet
 * passed its lag, moves the stream's own clock instead. */
CUresult host_stream_wait_point(Stream *stream, Point point) {
    if (point.stream == stream || host_point_done(point) || stream->capture) return CUDA_SUCCESS;
    if (host_seq_done(point)) {
        if (point.due > atomic_load(&stream->last_due)) atomic_store(&stream->last_due, point.due);
        return CUDA_SUCCESS;
    }
    HOST_TRY(host_stream_push(stream, &(Op){.kind = OP_WAIT_POINT, .point = point}));
    note_seen(stream, point);
    return CUDA_SUCCESS;
}

/* The legacy stream starts after every blocking stream, and they after it. */
static CUresult begin_legacy(Stream *stream) {
    Points points;
    host_points_start(&points);
    CUresult result = host_streams_points(stream->context, stream, false, &points);
    if (host_capture_blocks_legacy(stream->context, true)) result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    pthread_mutex_lock(&stream->object.lock);
    for (size_t i = 0; i < points.count && result == CUDA_SUCCESS; i++)
        result = host_stream_wait_point(stream, points.at[i]);
    host_points_end(&points);
    return result;
}

static CUresult begin_ordinary(Stream *stream) {
    Point legacy = host_stream_is_blocking(stream) ? host_stream_point(stream->context->legacy) : (Point){NULL, 0, 0};
    pthread_mutex_lock(&stream->object.lock);
    return host_stream_wait_point(stream, legacy);
}

CUresult host_stream_begin(Context *current, CUstream handle, Stream **out) {
    Stream *stream;
    HOST_TRY(host_stream_resolve(current, handle, &stream));
    uint64_t number = atomic_load(&stream->object.handle);
    WATCH(host_order_begin(stream));
    CUresult result = stream->role == ROLE_LEGACY ? begin_legacy(stream) : begin_ordinary(stream);
    bool gone = number == 0 || atomic_load(&stream->object.handle) != number;
    if (gone) result = CUDA_ERROR_INVALID_HANDLE;
    if (result != CUDA_SUCCESS) host_stream_end(stream);
    else *out = stream;
    return result;
}

CUresult host_stream_submit(Context *current, CUstream handle, const Op *op, Point *end) {
    Stream *stream;
    HOST_TRY(host_stream_begin(current, handle, &stream));
    CUresult result = host_stream_push(stream, op);
    if (end) *end = host_stream_point(stream);
    host_stream_end(stream);
    return result;
}

/* ---- creation and destruction ---- */

Stream *host_stream_make(Context *context, unsigned flags, int priority, StreamRole role) {
    Stream *stream = host_object_take(&host.streams);
    if (!stream) return NULL;
    pthread_mutex_lock(&stream->object.lock);
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    stream->role = role;
    stream->id = host_next_id();
    stream->pulled = 0;
    stream->capture = NULL;
    memset(stream->seen, 0, sizeof stream->seen);
    park(stream, PARK_NONE, (Point){NULL, 0, 0});
    atomic_store(&stream->last_due, 0);
    atomic_store(&stream->cancelled, false);
    pthread_mutex_unlock(&stream->object.lock);
    pthread_mutex_lock(&context->lock);
    stream->previous = NULL;
    stream->next = context->streams;
    if (stream->next) stream->next->previous = stream;
    context->streams = stream;
    pthread_mutex_unlock(&context->lock);
    host_object_publish(&host.streams, stream);
    return stream;
}

/* The handle ends at once; the queue ends when all of it has run. */
CUresult host_stream_close(Stream *stream, uint64_t handle) {
    pthread_mutex_lock(&stream->object.lock);
    bool mine = host_object_hide(&host.streams, stream, handle);
    bool alive = stream->worker_alive;
    if (mine && stream->capture) host_capture_abandon(stream);
    if (mine && alive) {
        stream->dying = true;
        pthread_cond_signal(&stream->work);
    }
    pthread_mutex_unlock(&stream->object.lock);
    if (mine && !alive) stream_retire(stream);
    return mine ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
