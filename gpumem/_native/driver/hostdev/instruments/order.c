/* The order of work between streams and the host, during the search for misuse.
 *
 * Everything here happens when calls are made, not when work runs, so findings depend on
 * the program's calls and not on speed. For each
 * stream and for the host there is a row of numbers: of every stream, the last operation
 * that is certain to come before the next request. A wait joins the row of what it waits
 * for into the waiter's.
 *
 *   an event          the row of its stream when it was recorded
 *   a wait for it     joins that row into the waiting stream's
 *   synchronizing, or a query answered with "done"          joins into the host's
 *   every submission  joins the host's row: a program's calls come one after another
 *
 * Where order cannot be seen, the result is "ordered", never "unordered". All threads of the host
 * count as one. After a host function, a written value or a signalled semaphore the host may
 * be ordered after all that came before it, in ways that are not seen here. After a wait for
 * a value or a semaphore only the program knows the order: the stream is loose, which means
 * that its accesses are not checked, until the host synchronizes with it; so is every stream
 * that waits for it.
 */
#include "../device/internal.h"

#include <stdlib.h>
#include <string.h>

struct Known {
    size_t count;
    bool loose;
    uint64_t loosened; /* number of the stream's last operation when it became so */
    uint64_t at[];     /* 0: the host; i + 1: the stream in slot i. 0 there: nothing */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* a leaf; guards all below */
static Known *host_row;
static Known **rows; /* by slot */
static size_t row_count;
static uint64_t host_steps; /* the host's own accesses of device memory */

/* ---- rows ---- */

static bool row_grow(Known **row, size_t count) {
    size_t before = *row ? (*row)->count : 0;
    if (*row && before >= count) return true;
    Known *grown = realloc(*row, sizeof *grown + count * sizeof grown->at[0]);
    if (!grown) return false;
    if (!*row) grown->loose = false;
    memset(grown->at + before, 0, (count - before) * sizeof grown->at[0]);
    grown->count = count;
    *row = grown;
    return true;
}

static void row_set(Known **row, size_t index, uint64_t number) {
    if (!row_grow(row, index + 1)) return;
    if ((*row)->at[index] < number) (*row)->at[index] = number;
}

static void row_join(Known **row, const Known *from) {
    if (!from || !row_grow(row, from->count)) return;
    for (size_t i = 0; i < from->count; i++)
        if ((*row)->at[i] < from->at[i]) (*row)->at[i] = from->at[i];
}

static Known **row_of(const Stream *stream) {
    size_t index = stream->object.index;
    if (index >= row_count) {
        size_t count = index + 64;
        Known **grown = realloc(rows, count * sizeof *grown);
        if (!grown) return NULL;
        memset(grown + row_count, 0, (count - row_count) * sizeof *grown);
        rows = grown;
        row_count = count;
    }
    return &rows[index];
}

static void loosen(Stream *stream, Known **row) {
    if (!row_grow(row, 1)) return;
    (*row)->loose = true;
    (*row)->loosened = host_submitted(stream);
}

/* ---- streams learn ---- */

static void stream_learns(Stream *stream, const Known *known, Point point) { /* caller holds `lock` */
    Known **row = row_of(stream);
    if (!row || !point.stream || point.stream == stream) return;
    row_join(row, known);
    row_set(row, point.stream->object.index + 1u, point.seq);
    if (known && known->loose) loosen(stream, row);
}

Known *host_order_record(Stream *stream, Point point) {
    Known *known = NULL;
    pthread_mutex_lock(&lock);
    Known **row = row_of(stream);
    if (row) row_join(&known, host_row);
    if (row) row_join(&known, *row);
    row_set(&known, stream->object.index + 1u, point.seq);
    if (known && row && *row) known->loose = (*row)->loose;
    pthread_mutex_unlock(&lock);
    return known;
}

void host_order_stream_saw(Stream *stream, const Known *known, Point point) {
    pthread_mutex_lock(&lock);
    stream_learns(stream, known, point);
    pthread_mutex_unlock(&lock);
}

void host_order_stream_after(Stream *stream, Point point) {
    pthread_mutex_lock(&lock);
    Known **other = point.stream ? row_of(point.stream) : NULL;
    stream_learns(stream, other ? *other : NULL, point);
    pthread_mutex_unlock(&lock);
}

void host_order_stream_after_all(Stream *stream, bool all) {
    Context *context = stream->context;
    pthread_mutex_lock(&context->lock);
    for (Stream *at = context->streams; at; at = at->next)
        if (all || host_stream_is_blocking(at))
            host_order_stream_after(stream, (Point){at, host_submitted(at), 0});
    pthread_mutex_unlock(&context->lock);
}

/* Joins the rows of streams that the default stream's rules put before the next operation.
 * Caller holds no lock. */
void host_order_begin(Stream *stream) {
    Stream *legacy = stream->context->legacy;
    if (stream->role == ROLE_LEGACY) host_order_stream_after_all(stream, false);
    else if (legacy && host_stream_is_blocking(stream))
        host_order_stream_after(stream, (Point){legacy, host_submitted(legacy), 0});
}

void host_order_loosen(Stream *stream) {
    pthread_mutex_lock(&lock);
    Known **row = row_of(stream);
    if (row) loosen(stream, row);
    pthread_mutex_unlock(&lock);
}

/* ---- the host learns ---- */

static void all_that_is_done(void *pointer, void *data) {
    Stream *stream = pointer;
    (void)data;
    pthread_mutex_lock(&lock);
    row_set(&host_row, stream->object.index + 1u, host_completed(stream));
    pthread_mutex_unlock(&lock);
}

static void host_saw(const Known *known, Point point) {
    if (!point.stream) return;
    pthread_mutex_lock(&lock);
    row_join(&host_row, known);
    row_set(&host_row, point.stream->object.index + 1u, point.seq);
    bool loose = known && known->loose;
    Known **row = row_of(point.stream);
    if (row && *row && (*row)->loose && point.seq >= (*row)->loosened) {
        (*row)->loose = false;
        loose = true;
    }
    pthread_mutex_unlock(&lock);
    if (loose) host_object_each(&host.streams, all_that_is_done, NULL);
}

/* A record that a later one has replaced says nothing. */
void host_order_event_seen(CUevent handle, Point point) {
    Event *event = host_object_lock(&host.events, handle);
    if (!event) return;
    if (event->point.stream == point.stream && event->point.seq == point.seq)
        host_saw(event->known, point);
    pthread_mutex_unlock(&event->object.lock);
}

static void host_saw_all_of(Stream *stream) {
    pthread_mutex_lock(&lock);
    Known **row = row_of(stream), *copy = NULL;
    if (row && *row) row_join(&copy, *row);
    pthread_mutex_unlock(&lock);
    host_saw(copy, (Point){stream, host_completed(stream), 0});
    free(copy);
}

/* The host waited for the stream; for the legacy stream: for all blocking ones. */
void host_order_host_after(Stream *stream) {
    Context *context = stream->context;
    host_saw_all_of(stream);
    if (stream->role != ROLE_LEGACY) return;
    pthread_mutex_lock(&context->lock);
    for (Stream *at = context->streams; at; at = at->next)
        if (host_stream_is_blocking(at)) host_saw_all_of(at);
    pthread_mutex_unlock(&context->lock);
}

void host_order_host_after_all(Context *context) {
    pthread_mutex_lock(&context->lock);
    for (Stream *at = context->streams; at; at = at->next) host_saw_all_of(at);
    pthread_mutex_unlock(&context->lock);
}

/* ---- accesses ---- */

/* The stream's operation `number`, as an access to compare with others. */
static Access access_of(Stream *stream, uint64_t number) {
    return (Access){stream->object.index + 1u, number, stream->id};
}

static bool is_before(Access access, const Known *row) {
    return row && access.slot < row->count && row->at[access.slot] >= access.number;
}

typedef struct Question {
    const Known *row;
    uint32_t slot;
} Question;

static bool ordered(const Access *access, const void *data) {
    const Question *question = data;
    return access->slot == question->slot || is_before(*access, question->row);
}

static void touch(Access access, const Known *row, Bytes bytes, bool write) { /* caller holds `lock` */
    Question question = {row, access.slot};
    if (row && row->loose) host_shadow_forget(bytes.marks, bytes.size);
    else host_shadow_touch(access, bytes, write, ordered, &question);
}

static void stream_touch(Stream *stream, uint64_t number, Bytes bytes, bool write) {
    pthread_mutex_lock(&lock);
    Known **row = row_of(stream);
    if (row) row_join(row, host_row);
    if (row) touch(access_of(stream, number), *row, bytes, write);
    pthread_mutex_unlock(&lock);
}

static void host_touch(Bytes bytes, bool write) {
    pthread_mutex_lock(&lock);
    row_set(&host_row, 0, ++host_steps);
    touch((Access){0, host_steps, 0}, host_row, bytes, write);
    pthread_mutex_unlock(&lock);
}

void host_order_fresh(uintptr_t address, size_t size) {
    pthread_mutex_lock(&lock);
    host_shadow_forget(address, size);
    pthread_mutex_unlock(&lock);
}

/* ---- operations ---- */

/* By the pieces that an address range has in memory, so that one page at two addresses
 * is one page. */
static void touch_memory(Stream *stream, uint64_t number, uintptr_t address, size_t size, bool write) {
    pthread_rwlock_rdlock(&host.map_lock);
    for (uintptr_t at = address, end = address + size; at < end;) {
        const Range *range = host_map_after(&host.ranges, at);
        if (!range || range->base >= end) break;
        if (range->base > at) at = range->base;
        uintptr_t stop = range->base + range->size < end ? range->base + range->size : end;
        bool mapping = range->kind == RANGE_MAPPING;
        uintptr_t marks = mapping ? ((const Physical *)range->owner)->shadow + (at - range->base) : at;
        Bytes bytes = {at, marks, stop - at};
        if (stream) stream_touch(stream, number, bytes, write);
        else host_touch(bytes, write);
        at = stop;
    }
    pthread_rwlock_unlock(&host.map_lock);
}

static void touch_box(Stream *stream, uint64_t number, const Copy *copy, bool write) {
    uintptr_t base = write ? copy->dst : copy->src;
    size_t pitch = write ? copy->dst_pitch : copy->src_pitch;
    size_t slice = write ? copy->dst_slice : copy->src_slice;
    for (size_t z = 0; z < copy->depth; z++)
        for (size_t y = 0; y < copy->height; y++)
            touch_memory(stream, number, base + z * slice + y * pitch, copy->width, write);
}

void host_order_copy(Stream *stream, uint64_t number, const Copy *copy) {
    if (copy->src_known && !copy->staged) touch_box(stream, number, copy, false);
    if (copy->dst_known) touch_box(stream, number, copy, true);
}

/* From then on the host may be ordered after all of the stream's work up to `number`. */
static void publish(Stream *stream, uint64_t number) {
    pthread_mutex_lock(&lock);
    Known **row = row_of(stream);
    if (row) row_join(&host_row, *row);
    row_set(&host_row, stream->object.index + 1u, number);
    pthread_mutex_unlock(&lock);
}

void host_order_publish(Stream *stream) { publish(stream, host_submitted(stream)); }

void host_order_op(Stream *stream, uint64_t number, const Op *op) {
    switch (op->kind) {
    case OP_COPY: host_order_copy(stream, number, &op->copy); break;
    case OP_FILL:
        for (size_t y = 0; y < op->fill.height; y++)
            touch_memory(stream, number, op->fill.dst + y * op->fill.pitch,
                         op->fill.width * op->fill.element, true);
        break;
    case OP_WAIT_VALUE: host_order_loosen(stream); break;
    case OP_CALL:
    case OP_WRITE_VALUE: publish(stream, number); break;
    default: break;
    }
}

void host_order_program(Stream *stream, const Program *program) {
    for (size_t i = 0; i < program->count; i++)
        host_order_op(stream, host_submitted(stream), &program->ops[i]);
}

/* ---- blocks of pools ---- */

/* A block begins and ends as an operation of its stream that writes all of it, so an
 * access on another stream must be ordered between the two. */
void host_order_block_begins(Stream *stream, uintptr_t base, size_t size) {
    if (host_stream_push(stream, &(Op){.kind = OP_NOTHING}) != CUDA_SUCCESS) return;
    host_order_fresh(base, size);
    stream_touch(stream, host_submitted(stream), (Bytes){base, base, size}, true);
}

void host_order_block_ends(Stream *stream, uintptr_t address) {
    pthread_rwlock_rdlock(&host.map_lock);
    const Range *range = host_map_find(&host.pooled, address);
    size_t size = range && range->base == address ? range->size : 0;
    pthread_rwlock_unlock(&host.map_lock);
    if (size == 0) return;
    Bytes bytes = {address, address, size};
    if (!stream) host_touch(bytes, true);
    else if (host_stream_push(stream, &(Op){.kind = OP_NOTHING}) == CUDA_SUCCESS)
        stream_touch(stream, host_submitted(stream), bytes, true);
}

/* ---- on, off, fork ---- */

static void forget_all(void) { /* caller holds `lock` */
    free(host_row);
    host_row = NULL;
    for (size_t i = 0; i < row_count; i++) free(rows[i]);
    free(rows);
    rows = NULL;
    row_count = 0;
    host_shadow_forget(0, UINTPTR_MAX);
}

void host_order_start(void) {
    pthread_mutex_lock(&lock);
    forget_all();
    pthread_mutex_unlock(&lock);
}

/* In a forked child: memory that a thread of the parent was changing is abandoned. */
void host_order_reborn(void) {
    pthread_mutex_init(&lock, NULL);
    host_row = NULL;
    rows = NULL;
    row_count = 0;
    host_shadow_reborn();
}
