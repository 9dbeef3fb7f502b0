/* Memory of the null CUDA: addresses, the bytes that are used, and copies.
 *
 * Addresses lie in one span that the process reserves, and rise from allocation to allocation, as
 * those of a driver mostly do: PyTorch's allocator prefers the lower of two blocks of one size.
 * Arguments of functions that follow those which have an effect, such as flags, are left out.
 */
#include "null.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { SPAN_BITS = 44, MIN_SPAN_BITS = 38, PAGE = 4096 };

typedef struct Table { /* ranges by address, none overlapping another */
    Range *rows;
    size_t count, room;
} Table;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uintptr_t span, span_end, next; /* next: where the last placed range ends */
static Table ranges, mappings;
static uint64_t used[MAX_DEVICES], peak[MAX_DEVICES];

static size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

static void span_reserve(void) {
    for (int bits = SPAN_BITS; bits >= MIN_SPAN_BITS; bits--) {
        void *at = mmap(NULL, (size_t)1 << bits, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) continue;
        next = span = round_up((uintptr_t)at, NULL_GRANULE);
        span_end = (uintptr_t)at + ((size_t)1 << bits);
        return;
    }
}

__attribute__((constructor)) static void memory_begin(void) { span_reserve(); }

bool is_device(const void *address) {
    return (uintptr_t)address >= span && (uintptr_t)address < span_end;
}

/* ---- tables; caller holds `lock` ---- */

/* The number of rows that begin at `address` or below. */
static size_t rows_to(const Table *table, uintptr_t address) {
    size_t low = 0, high = table->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (table->rows[middle].base <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static Range *find(const Table *table, uintptr_t address) {
    size_t i = rows_to(table, address);
    if (i == 0) return NULL;
    Range *row = &table->rows[i - 1];
    return address - row->base < row->size ? row : NULL;
}

static bool is_free(const Table *table, uintptr_t base, size_t size) {
    size_t i = rows_to(table, base);
    if (i > 0 && base - table->rows[i - 1].base < table->rows[i - 1].size) return false;
    return i == table->count || table->rows[i].base - base >= size;
}

static bool insert(Table *table, Range row) {
    if (table->count == table->room) {
        size_t room = table->room ? 2 * table->room : 256;
        Range *rows = realloc(table->rows, room * sizeof *rows);
        if (!rows) return false;
        table->rows = rows;
        table->room = room;
    }
    size_t i = rows_to(table, row.base);
    memmove(&table->rows[i + 1], &table->rows[i], (table->count - i) * sizeof row);
    table->rows[i] = row;
    table->count++;
    return true;
}

static void drop(Table *table, Range *row) {
    size_t i = (size_t)(row - table->rows);
    table->count--;
    memmove(row, row + 1, (table->count - i) * sizeof *row);
}

bool range_find(uintptr_t address, Range *found) {
    pthread_mutex_lock(&lock);
    const Range *row = find(&mappings, address);
    if (!row) row = find(&ranges, address);
    if (row) *found = *row;
    pthread_mutex_unlock(&lock);
    return row != NULL;
}

/* Returns the first gap that is large enough; 0: there is none. */
static uintptr_t first_gap(size_t size, size_t alignment) {
    uintptr_t at = span;
    for (size_t i = rows_to(&ranges, span - 1); i < ranges.count; i++) {
        const Range *row = &ranges.rows[i];
        if (row->base >= at && row->base - at >= size) break;
        at = round_up(row->base + row->size, alignment);
    }
    return at <= span_end && span_end - at >= size ? at : 0;
}

/* Returns free addresses: above all others until the span's end is reached; 0: there are none. */
static uintptr_t place(size_t size, size_t alignment) {
    uintptr_t at = round_up(next, alignment);
    if (at > span_end || span_end - at < size) return first_gap(size, alignment);
    next = at + size;
    return at;
}

/* ---- bytes; caller holds `lock` ---- */

static bool charge(int device, size_t size) {
    if (null.context + used[device] + size > null.total) return false;
    used[device] += size;
    if (used[device] > peak[device]) peak[device] = used[device];
    return true;
}

void null_memory(int device, uint64_t *used_bytes, uint64_t *peak_bytes) {
    pthread_mutex_lock(&lock);
    *used_bytes = used[device];
    *peak_bytes = peak[device];
    pthread_mutex_unlock(&lock);
}

EXPORT CUresult cuMemGetInfo(size_t *free_bytes, size_t *total) {
    pthread_mutex_lock(&lock);
    if (free_bytes) *free_bytes = null.total - null.context - used[current_device()];
    if (total) *total = null.total;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

/* ---- allocations ---- */

EXPORT CUresult cuMemAlloc(uintptr_t *address, size_t size) {
    int device = current_device();
    if (!address) return CUDA_ERROR_INVALID_VALUE;
    *address = 0;
    if (size == 0) return CUDA_SUCCESS;
    if (size > span_end - span) return CUDA_ERROR_OUT_OF_MEMORY;
    size = round_up(size, NULL_GRANULE);
    pthread_mutex_lock(&lock);
    bool fits = charge(device, size);
    uintptr_t at = fits ? place(size, NULL_GRANULE) : 0;
    Range row = {at, size, RANGE_DEVICE, device, NULL};
    if (fits && (!at || !insert(&ranges, row))) {
        used[device] -= size;
        at = 0;
    }
    pthread_mutex_unlock(&lock);
    *address = at;
    return at ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemFree(uintptr_t address) {
    CUresult code = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    Range *row = find(&ranges, address);
    if (row && row->base == address && row->kind == RANGE_DEVICE) {
        used[row->device] -= row->size;
        drop(&ranges, row);
        code = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return address ? code : CUDA_SUCCESS;
}

/* ---- reserved addresses, and physical memory that is mapped there ---- */

EXPORT CUresult cuMemAddressReserve(uintptr_t *address, size_t size, size_t alignment,
                                    uintptr_t hint) {
    if (!address || size == 0 || size % NULL_GRANULE || alignment & (alignment - 1))
        return CUDA_ERROR_INVALID_VALUE;
    if (alignment < NULL_GRANULE) alignment = NULL_GRANULE;
    pthread_mutex_lock(&lock);
    bool takes_hint = hint && hint % alignment == 0 && is_device((void *)hint) &&
                      size <= span_end - hint && is_free(&ranges, hint, size);
    uintptr_t at = takes_hint ? hint : place(size, alignment);
    Range row = {at, size, RANGE_RESERVED, 0, NULL};
    if (at && !insert(&ranges, row)) at = 0;
    if (at && at + size > next) next = at + size;
    pthread_mutex_unlock(&lock);
    *address = at;
    return at ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemAddressFree(uintptr_t address, size_t size) {
    CUresult code = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    Range *row = find(&ranges, address);
    if (row && row->base == address && row->size == size && row->kind == RANGE_RESERVED &&
        is_free(&mappings, address, size)) {
        drop(&ranges, row);
        code = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

EXPORT CUresult cuMemCreate(Physical **physical, size_t size, const CUmemAllocationProp *prop) {
    int device = prop->location.id;
    bool is_present = device >= 0 && device < null.count;
    if (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE || !is_present)
        return CUDA_ERROR_INVALID_VALUE;
    if (!physical || size == 0 || size % NULL_GRANULE) return CUDA_ERROR_INVALID_VALUE;
    Physical *made = malloc(sizeof *made);
    if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
    *made = (Physical){size, device, 1};
    pthread_mutex_lock(&lock);
    bool fits = charge(device, size);
    pthread_mutex_unlock(&lock);
    if (!fits) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *physical = made;
    return CUDA_SUCCESS;
}

/* Caller holds `lock`. */
static void unclaim(Physical *physical) {
    if (--physical->claims > 0) return;
    used[physical->device] -= physical->size;
    free(physical);
}

EXPORT CUresult cuMemRelease(Physical *physical) {
    if (!physical) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    unclaim(physical);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMap(uintptr_t address, size_t size, size_t offset, Physical *physical) {
    CUresult code = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    const Range *row = find(&ranges, address);
    bool inside = row && row->kind == RANGE_RESERVED && size <= row->base + row->size - address;
    bool whole = physical && offset == 0 && size == physical->size;
    if (inside && whole && is_free(&mappings, address, size)) {
        Range mapping = {address, size, RANGE_MAPPED, physical->device, physical};
        code = insert(&mappings, mapping) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
        if (code == CUDA_SUCCESS) physical->claims++;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

EXPORT CUresult cuMemUnmap(uintptr_t address, size_t size) {
    pthread_mutex_lock(&lock);
    size_t first = rows_to(&mappings, address), last = first;
    uintptr_t end = address;
    if (first > 0 && mappings.rows[first - 1].base == address) first--;
    for (last = first; last < mappings.count && mappings.rows[last].base == end; last++) {
        if (end - address >= size) break;
        end += mappings.rows[last].size;
    }
    bool whole = size > 0 && end - address == size;
    for (; whole && last > first; last--) {
        unclaim(mappings.rows[first].physical);
        drop(&mappings, &mappings.rows[first]);
    }
    pthread_mutex_unlock(&lock);
    return whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- pinned memory of the host: ordinary memory ---- */

static CUresult host_insert(void *address, size_t size, bool registered) {
    pthread_mutex_lock(&lock);
    Range row = {(uintptr_t)address, size, RANGE_HOST, registered, NULL};
    bool inserted = is_free(&ranges, row.base, size) && insert(&ranges, row);
    pthread_mutex_unlock(&lock);
    return inserted ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

EXPORT CUresult cuMemHostAlloc(void **address, size_t size) {
    if (!address) return CUDA_ERROR_INVALID_VALUE;
    *address = NULL;
    if (size == 0) return CUDA_SUCCESS;
    size = round_up(size, PAGE);
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                    -1, 0);
    if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = at;
    return host_insert(at, size, false);
}

EXPORT CUresult cuMemHostRegister(void *address, size_t size) {
    if (!address || size == 0) return CUDA_ERROR_INVALID_VALUE;
    return host_insert(address, size, true);
}

EXPORT CUresult cuMemFreeHost(void *address) {
    if (!address) return CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    Range *row = find(&ranges, (uintptr_t)address);
    bool found = row && row->kind == RANGE_HOST && row->base == (uintptr_t)address;
    if (found) {
        if (!row->device) munmap(address, row->size);
        drop(&ranges, row);
    }
    pthread_mutex_unlock(&lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- copies and fills ---- */

/* Writes zeros to host memory. Whole pages of a large range are dropped instead, so that a copy of
 * a model takes neither time nor memory: ordinary memory then reads as zeros. */
static void zero(char *to, size_t size) {
    char *first = (char *)round_up((uintptr_t)to, PAGE);
    char *last = (char *)((uintptr_t)(to + size) / PAGE * PAGE);
    bool released = size >= 1 << 20 && madvise(first, (size_t)(last - first), MADV_DONTNEED) == 0;
    if (!released) first = last = to;
    memset(to, 0, (size_t)(first - to));
    memset(last, 0, (size_t)(to + size - last));
}

/* The last small copy from the host. A broadcast from this rank leaves it as it is, so that a copy
 * back to the host is true. */
static struct Sent {
    const void *to;
    size_t size;
    bool is_broadcast;
    char bytes[1 << 16];
} sent;

static void keep_sent(const void *to, const void *from, size_t size) {
    pthread_mutex_lock(&lock);
    sent.to = size <= sizeof sent.bytes ? to : NULL;
    sent.size = size;
    sent.is_broadcast = false;
    if (sent.to) memcpy(sent.bytes, from, size);
    pthread_mutex_unlock(&lock);
}

void memory_broadcast(const void *address) {
    pthread_mutex_lock(&lock);
    if (sent.to == address) sent.is_broadcast = true;
    pthread_mutex_unlock(&lock);
}

static bool copy_sent(void *to, const void *from, size_t size) {
    pthread_mutex_lock(&lock);
    bool is_true = sent.is_broadcast && sent.to == from && sent.size == size;
    if (is_true) memcpy(to, sent.bytes, size);
    sent.to = NULL;
    pthread_mutex_unlock(&lock);
    return is_true;
}

EXPORT int cuMemcpyAsync(void *to, const void *from, size_t size) {
    if (size == 0) return CUDA_SUCCESS;
    if (is_device(to)) {
        if (!is_device(from)) keep_sent(to, from, size);
    } else if (is_device(from)) {
        if (copy_sent(to, from, size)) return CUDA_SUCCESS;
        zero(to, size);
        null_report(NULL_READ, "", to, size);
    } else {
        memmove(to, from, size);
    }
    return CUDA_SUCCESS;
}

EXPORT int cuMemsetD8Async(void *to, int value, size_t count) {
    if (!is_device(to)) memset(to, value, count);
    return CUDA_SUCCESS;
}

SAME(cuMemcpy, cuMemcpyAsync) SAME(cuMemcpyHtoD, cuMemcpyAsync)
SAME(cuMemcpyHtoDAsync, cuMemcpyAsync) SAME(cuMemcpyDtoH, cuMemcpyAsync)
SAME(cuMemcpyDtoHAsync, cuMemcpyAsync) SAME(cuMemcpyDtoD, cuMemcpyAsync)
SAME(cuMemcpyDtoDAsync, cuMemcpyAsync) SAME(cudaMemcpy, cuMemcpyAsync)
SAME(cudaMemcpyAsync, cuMemcpyAsync) SAME(cudaMemset, cuMemsetD8Async)
SAME(cudaMemsetAsync, cuMemsetD8Async)

SAME(cuMemAllocAsync, cuMemAlloc) SAME(cuMemFreeAsync, cuMemFree)
SAME(cuMemHostUnregister, cuMemFreeHost) SAME(cudaMemGetInfo, cuMemGetInfo)
SAME(cudaMalloc, cuMemAlloc) SAME(cudaMallocAsync, cuMemAlloc) SAME(cudaFree, cuMemFree)
SAME(cudaFreeAsync, cuMemFree) SAME(cudaHostAlloc, cuMemHostAlloc)
SAME(cudaFreeHost, cuMemFreeHost) SAME(cudaHostRegister, cuMemHostRegister)
SAME(cudaHostUnregister, cuMemFreeHost)
