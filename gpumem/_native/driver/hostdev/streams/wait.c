/* Points, and waits for them: a host that synchronizes, queries on the virtual clock. */
#include "../device/internal.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- lists ---- */

void host_points_start(Points *points) {
    points->at = points->few;
    points->count = 0;
    points->capacity = sizeof points->few / sizeof points->few[0];
}

static bool points_add(Points *points, Point point) {
    if (points->count == points->capacity) {
        size_t bytes = 2 * points->capacity * sizeof(Point);
        bool first = points->at == points->few;
        Point *grown = first ? malloc(bytes) : realloc(points->at, bytes);
        if (!grown) return false;
        if (first) memcpy(grown, points->few, sizeof points->few);
        points->at = grown;
        points->capacity *= 2;
    }
    points->at[points->count++] = point;
    return true;
}

void host_points_end(Points *points) {
    if (points->at != points->few) free(points->at);
}

/* Collects the unfinished points of a context's streams: of all, or of the blocking ones. */
CUresult host_streams_points(Context *context, const Stream *except, bool all, Points *points) {
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&context->lock);
    for (Stream *at = context->streams; at; at = at->next) {
        if (at == except || !(all || host_stream_is_blocking(at))) continue;
        Point point = host_stream_point(at);
        if (!host_point_done(point) && !points_add(points, point))
            result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&context->lock);
    return result;
}

/* ---- waiting ---- */

CUresult host_stream_points(Stream *stream, Points *points) {
    if (!points_add(points, host_stream_point(stream))) return CUDA_ERROR_OUT_OF_MEMORY;
    if (stream->role != ROLE_LEGACY) return CUDA_SUCCESS;
    return host_streams_points(stream->context, stream, false, points);
}

CUresult host_points_wait(Points *points, CUresult result) {
    /* In any order: the last one to be reached decides. */
    for (size_t i = 0; i < points->count && result == CUDA_SUCCESS; i++)
        result = host_point_wait(points->at[i]);
    host_points_end(points);
    return result;
}

CUresult host_context_wait(Context *context) {
    Points points;
    host_points_start(&points);
    CUresult result = host_points_wait(&points, host_streams_points(context, NULL, true, &points));
    if (result == CUDA_SUCCESS) WATCH(host_order_host_after_all(context));
    host_pools_synchronized();
    int error = atomic_load(&context->error);
    return result == CUDA_SUCCESS ? (CUresult)error : result;
}

/* Virtual clock: all work up to this point may take its time now; so may the work that it
 * waits for, stream by stream. */
void host_point_pull(Point point) {
    while (!host_seq_done(point)) {
        Stream *stream = point.stream;
        pthread_mutex_lock(&stream->object.lock);
        if (point.seq > stream->pulled) stream->pulled = point.seq;
        pthread_cond_broadcast(&stream->work);
        bool blocked = stream->park == PARK_POINT && stream->running <= point.seq;
        point = blocked ? stream->park_point : (Point){NULL, 0, 0};
        pthread_mutex_unlock(&stream->object.lock);
    }
}

static CUresult wait_age(uint64_t due) {
    if (due == 0) return CUDA_SUCCESS;
    if (host_clock_is_virtual()) {
        host_clock_advance_to(due);
        return CUDA_SUCCESS;
    }
    for (uint64_t now; (now = host_now()) < due;) {
        if (host_is_down()) return CUDA_ERROR_DEINITIALIZED;
        struct timespec deadline; /* in steps, so that shutdown is noticed */
        host_deadline(&deadline, due - now < 50000000 ? due - now : 50000000);
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &deadline, NULL);
    }
    return CUDA_SUCCESS;
}

CUresult host_point_wait(Point point) {
    Stream *stream = point.stream;
    if (!stream) return CUDA_SUCCESS;
    if (host_clock_is_virtual()) host_point_pull(point);
    if (!host_seq_done(point)) {
        pthread_mutex_lock(&stream->object.lock);
        while (!host_seq_done(point) && !host_is_down())
            pthread_cond_wait(&stream->progress, &stream->object.lock);
        pthread_mutex_unlock(&stream->object.lock);
    }
    if (!host_seq_done(point)) return CUDA_ERROR_DEINITIALIZED;
    return wait_age(point.due);
}

/* Whether the worker continues without a move of the clock. Caller holds the stream's lock. */
static bool continues(const Stream *stream) {
    switch (stream->park) {
    case PARK_NONE: return stream->worker_alive;
    case PARK_TIME: return stream->park_point.due <= host_now();
    case PARK_POINT: return host_point_done(stream->park_point);
    default: return false;
    }
}

void host_point_settle(Point point) {
    Stream *stream = point.stream;
    if (!stream || !host_clock_is_virtual()) return;
    pthread_mutex_lock(&stream->object.lock);
    while (!host_seq_done(point) && !host_is_down()) {
        if (continues(stream)) {
            pthread_cond_wait(&stream->progress, &stream->object.lock);
        } else if (stream->park == PARK_POINT && stream->running <= point.seq) {
            /* No two streams' locks are held at once; waits form no cycle. */
            Point before = stream->park_point;
            pthread_mutex_unlock(&stream->object.lock);
            host_point_settle(before);
            pthread_mutex_lock(&stream->object.lock);
            if (!host_point_done(before)) break;
        } else {
            break;
        }
    }
    pthread_mutex_unlock(&stream->object.lock);
}
