/* Access to bytes: copies, fills, values. It runs in workers and, for synchronous
 * copies, in the caller's thread.
 *
 * The map is held for reading while a piece moves, so that an address is checked and
 * used under one lock: a free or an unmap waits for the piece, and the next piece finds
 * the hole and fails with ILLEGAL_ADDRESS instead of touching it.
 */
#include "../device/internal.h"

#include <stdatomic.h>
#include <string.h>
#include <time.h>

#if defined(__SSE2__)
#include <emmintrin.h>
enum { HAVE_STREAMING_STORES = 1 };

static void streaming_copy(void *dst, const void *src, size_t bytes) { /* whole 64 B lines */
    __m128i *to = dst;
    const __m128i *from = src;
    for (size_t i = 0; i < bytes / sizeof *to; i += 4) {
        __m128i a = _mm_loadu_si128(from + i), b = _mm_loadu_si128(from + i + 1);
        __m128i c = _mm_loadu_si128(from + i + 2), d = _mm_loadu_si128(from + i + 3);
        _mm_stream_si128(to + i, a);
        _mm_stream_si128(to + i + 1, b);
        _mm_stream_si128(to + i + 2, c);
        _mm_stream_si128(to + i + 3, d);
    }
    _mm_sfence();
}
#else
enum { HAVE_STREAMING_STORES = 0 };
static void streaming_copy(void *dst, const void *src, size_t bytes) { memcpy(dst, src, bytes); }
#endif

enum { LONG_COPY = 16 << 20 }; /* bytes of one row: larger than most caches' share */

typedef struct Piece { /* the map is held in pieces of HOST_COPY_PIECE bytes */
    const Stream *stream;
    size_t left; /* bytes until the lock is released for a moment */
} Piece;

static void piece_begin(Piece *piece, const Stream *stream) {
    piece->stream = stream;
    piece->left = HOST_COPY_PIECE;
    pthread_rwlock_rdlock(&host.map_lock);
}

static void piece_end(void) { pthread_rwlock_unlock(&host.map_lock); }

static CUresult piece_next(Piece *piece) {
    if (piece->left > 0) return CUDA_SUCCESS;
    piece_end();
    bool stop = host_stop_requested(piece->stream);
    piece_begin(piece, piece->stream);
    return stop ? CUDA_ERROR_DEINITIALIZED : CUDA_SUCCESS;
}

static CUresult reachable(const Context *by, uintptr_t address, size_t size, bool known, bool write) {
    MemoryKind kind = host_memory_kind_locked(address, size, write, by->device);
    bool bad = kind == MEMORY_INACCESSIBLE || (known && kind == MEMORY_PAGEABLE);
    return bad ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
}

/* memcpy bypasses the caches when one call is larger than they are. The pieces here are not, so a
 * long copy bypasses them explicitly, which is half as fast again. */
static void move(uintptr_t dst, uintptr_t src, size_t size, bool around_caches) {
    enum { LINE = 64 };
    size_t head = (LINE - dst % LINE) % LINE;
    if (!HAVE_STREAMING_STORES || !around_caches || size < head + LINE) {
        memmove((void *)dst, (const void *)src, size);
        return;
    }
    size_t body = (size - head) / LINE * LINE;
    memcpy((void *)dst, (const void *)src, head);
    streaming_copy((void *)(dst + head), (const void *)(src + head), body);
    memcpy((void *)(dst + head + body), (const void *)(src + head + body), size - head - body);
}

static CUresult copy_row(Piece *piece, const Copy *copy, uintptr_t dst, uintptr_t src) {
    for (size_t done = 0; done < copy->width;) {
        HOST_TRY(piece_next(piece));
        size_t size = copy->width - done;
        if (size > piece->left) size = piece->left;
        HOST_TRY(reachable(copy->dst_context, dst + done, size, copy->dst_known, true));
        HOST_TRY(reachable(copy->src_context, src + done, size, copy->src_known, false));
        move(dst + done, src + done, size, copy->width >= LONG_COPY);
        piece->left -= size;
        done += size;
    }
    return CUDA_SUCCESS;
}

CUresult host_copy_run(const Stream *stream, const Copy *copy) {
    CUresult result = CUDA_SUCCESS;
    Piece piece;
    piece_begin(&piece, stream);
    for (size_t z = 0; z < copy->depth && result == CUDA_SUCCESS; z++)
        for (size_t y = 0; y < copy->height && result == CUDA_SUCCESS; y++)
            result = copy_row(&piece, copy, copy->dst + z * copy->dst_slice + y * copy->dst_pitch,
                              copy->src + z * copy->src_slice + y * copy->src_pitch);
    piece_end();
    return result;
}

static void fill_bytes(uintptr_t dst, uint32_t value, uint32_t element, size_t bytes) {
    if (element == 1) memset((void *)dst, (int)value, bytes);
    if (element == 2)
        for (size_t i = 0; i < bytes / 2; i++) ((uint16_t *)dst)[i] = (uint16_t)value;
    if (element == 4)
        for (size_t i = 0; i < bytes / 4; i++) ((uint32_t *)dst)[i] = value;
}

static CUresult fill_row(Piece *piece, const Fill *fill, uintptr_t dst) {
    size_t width = fill->width * fill->element;
    for (size_t done = 0; done < width;) {
        HOST_TRY(piece_next(piece));
        size_t size = width - done;
        if (size > piece->left) size = host_round_up(piece->left, fill->element);
        HOST_TRY(reachable(piece->stream->context, dst + done, size, true, true));
        fill_bytes(dst + done, fill->value, fill->element, size);
        piece->left -= size < piece->left ? size : piece->left;
        done += size;
    }
    return CUDA_SUCCESS;
}

CUresult host_fill_run(const Stream *stream, const Fill *fill) {
    CUresult result = CUDA_SUCCESS;
    Piece piece;
    piece_begin(&piece, stream);
    for (size_t y = 0; y < fill->height && result == CUDA_SUCCESS; y++)
        result = fill_row(&piece, fill, fill->dst + y * fill->pitch);
    piece_end();
    return result;
}

/* ---- values ---- */

CUresult host_value_write(const Stream *stream, const Value *value) {
    pthread_rwlock_rdlock(&host.map_lock);
    CUresult result = reachable(stream->context, value->address, value->wide ? 8 : 4, true, true);
    if (result == CUDA_SUCCESS && value->wide)
        atomic_store((_Atomic uint64_t *)value->address, value->value);
    if (result == CUDA_SUCCESS && !value->wide)
        atomic_store((_Atomic uint32_t *)value->address, (uint32_t)value->value);
    pthread_rwlock_unlock(&host.map_lock);
    host_value_wake();
    return result;
}

/* GEQ compares cyclically: the difference, as a signed number, is not negative. */
static bool satisfied(const Value *want, uint64_t found) {
    uint64_t mask = want->wide ? UINT64_MAX : UINT32_MAX;
    uint64_t difference = (found - want->value) & mask;
    switch (want->flags & ~(unsigned)CU_STREAM_WAIT_VALUE_FLUSH) {
    case CU_STREAM_WAIT_VALUE_EQ: return difference == 0;
    case CU_STREAM_WAIT_VALUE_AND: return (found & want->value & mask) != 0;
    case CU_STREAM_WAIT_VALUE_NOR: return (~(found | want->value) & mask) != 0;
    default: return difference <= mask >> 1;
    }
}

static CUresult value_poll(const Stream *stream, const Value *want, bool *met) {
    pthread_rwlock_rdlock(&host.map_lock);
    CUresult result = reachable(stream->context, want->address, want->wide ? 8 : 4, true, false);
    if (result == CUDA_SUCCESS)
        *met = satisfied(want, want->wide ? atomic_load((_Atomic uint64_t *)want->address)
                                          : atomic_load((_Atomic uint32_t *)want->address));
    pthread_rwlock_unlock(&host.map_lock);
    return result;
}

/* A change of memory wakes no thread: the value is read again after a time that grows to a
 * millisecond, or when a stream of this device has written a value. */
void host_value_wait(Stream *stream, const Value *want) {
    enum { FIRST_NS = 2000, MAX_NS = 1000000 };
    uint64_t pause = FIRST_NS;
    bool met = false;
    atomic_fetch_add(&host.value_waiters, 1);
    while (!host_stop_requested(stream)) {
        struct timespec deadline;
        pthread_mutex_lock(&host.value_lock);
        CUresult result = value_poll(stream, want, &met);
        if (result == CUDA_SUCCESS && !met) {
            host_deadline(&deadline, pause);
            pthread_cond_timedwait(&host.value_written, &host.value_lock, &deadline);
        }
        pthread_mutex_unlock(&host.value_lock);
        if (result != CUDA_SUCCESS) host_context_fail(stream->context, result);
        if (result != CUDA_SUCCESS || met) break;
        if (pause < MAX_NS) pause *= 2;
    }
    atomic_fetch_sub(&host.value_waiters, 1);
}

void host_value_wake(void) {
    if (atomic_load(&host.value_waiters) == 0) return;
    pthread_mutex_lock(&host.value_lock);
    pthread_cond_broadcast(&host.value_written);
    pthread_mutex_unlock(&host.value_lock);
}
