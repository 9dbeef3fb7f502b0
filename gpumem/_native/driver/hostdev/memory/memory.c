/* Device memory: allocation, its accounting, and the life of every range.
 *
 * Pages are private anonymous mappings that reserve nothing: memory that is never touched
 * costs address space alone. A device is charged as a GPU is, in blocks of 2 MiB:
 * an allocation above 1 MiB has its own blocks, smaller ones share a block (a slab) in
 * units of 512 bytes, and the block is released with its last tenant.
 */
#include "../device/internal.h"
#include "mappings.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { SLAB_UNITS = 4096, SLAB_WORDS = SLAB_UNITS / 64, SMALL_LIMIT = 1 << 20 };

typedef struct Slab { /* one block of 2 MiB, cut into units; map_lock */
    struct Slab *next;
    uintptr_t base;
    uint32_t units_free;
    uint64_t taken[SLAB_WORDS]; /* bit: unit in use */
} Slab;

size_t host_round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

void *host_pages_map(size_t bytes, size_t alignment) {
    void *pages = map_aligned(bytes, alignment, PROT_READ | PROT_WRITE, MAP_NORESERVE);
    if (pages && bytes >= HOST_BLOCK) madvise(pages, bytes, MADV_HUGEPAGE);
    return pages;
}

/* ---- ranges ---- */

Range *host_range_new(RangeKind kind, uintptr_t base, size_t size, Context *context) {
    Range *range = calloc(1, sizeof *range);
    if (!range) return NULL;
    range->kind = kind;
    range->base = base;
    range->size = size;
    range->mapped = size;
    range->readable = range->writable = true;
    range->id = host_next_id();
    range->device = context ? context->device : -1;
    range->context = context ? atomic_load(&context->handle) : 0;
    return range;
}

void host_range_add(Range *range) {
    pthread_rwlock_wrlock(&host.map_lock);
    host_map_insert(&host.ranges, range);
    WATCH(host_order_fresh(range->base, range->size));
    pthread_rwlock_unlock(&host.map_lock);
}

/* ---- slabs; callers hold `map_lock` for writing ---- */

static void units_mark(Slab *slab, uint32_t first, uint32_t count, bool taken) {
    for (uint32_t unit = first; unit < first + count; unit++) {
        uint64_t bit = (uint64_t)1 << (unit % 64);
        if (taken) slab->taken[unit / 64] |= bit;
        else slab->taken[unit / 64] &= ~bit;
    }
    slab->units_free += taken ? -count : count;
}

/* First fit; SLAB_UNITS when no run of `count` is free. Whole taken words are skipped. */
static uint32_t units_find(const Slab *slab, uint32_t count) {
    uint32_t run = 0;
    if (slab->units_free < count) return SLAB_UNITS;
    for (uint32_t unit = 0; unit < SLAB_UNITS; unit++) {
        if (unit % 64 == 0 && slab->taken[unit / 64] == UINT64_MAX) {
            run = 0;
            unit += 63;
        } else if (slab->taken[unit / 64] >> (unit % 64) & 1) {
            run = 0;
        } else if (++run == count) {
            return unit + 1 - count;
        }
    }
    return SLAB_UNITS;
}

static Slab *slab_new(int device) {
    if (host_device_charge(device, HOST_BLOCK) != CUDA_SUCCESS) return NULL;
    Slab *slab = calloc(1, sizeof *slab);
    void *pages = slab ? host_pages_map(HOST_BLOCK, HOST_BLOCK) : NULL;
    if (!pages) {
        free(slab);
        host_device_refund(device, HOST_BLOCK);
        return NULL;
    }
    slab->base = (uintptr_t)pages;
    slab->units_free = SLAB_UNITS;
    slab->next = host.devices[device].slabs;
    host.devices[device].slabs = slab;
    return slab;
}

static void slab_delete(int device, Slab *slab) {
    Slab **hook = &host.devices[device].slabs;
    while (*hook != slab) hook = &(*hook)->next;
    *hook = slab->next;
    munmap((void *)slab->base, HOST_BLOCK);
    host_device_refund(device, HOST_BLOCK);
    free(slab);
}

static CUresult slab_take(Range *range) {
    uint32_t count = (uint32_t)(host_round_up(range->size, HOST_SMALL_UNIT) / HOST_SMALL_UNIT);
    uint32_t unit = SLAB_UNITS;
    Slab *slab = host.devices[range->device].slabs;
    while (slab && (unit = units_find(slab, count)) == SLAB_UNITS) slab = slab->next;
    if (!slab) {
        slab = slab_new(range->device);
        unit = 0;
    }
    if (!slab) return CUDA_ERROR_OUT_OF_MEMORY;
    units_mark(slab, unit, count, true);
    range->owner = slab;
    range->base = slab->base + (uintptr_t)unit * HOST_SMALL_UNIT;
    range->mapped = (size_t)count * HOST_SMALL_UNIT;
    return CUDA_SUCCESS;
}

static void slab_give(Range *range) {
    Slab *slab = range->owner;
    uint32_t first = (uint32_t)((range->base - slab->base) / HOST_SMALL_UNIT);
    units_mark(slab, first, (uint32_t)(range->mapped / HOST_SMALL_UNIT), false);
    if (slab->units_free == SLAB_UNITS) slab_delete(range->device, slab);
}

/* ---- allocate ---- */

static CUresult blocks_take(Range *range, size_t unit) {
    if (range->size > SIZE_MAX / 2) return CUDA_ERROR_OUT_OF_MEMORY;
    range->mapped = host_round_up(range->size, unit);
    HOST_TRY(host_device_charge(range->device, range->mapped));
    range->base = (uintptr_t)host_pages_map(range->mapped, unit);
    if (range->base) return CUDA_SUCCESS;
    host_device_refund(range->device, range->mapped);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult host_cuMemAlloc(CUdeviceptr *pointer, size_t size) {
    Context *context = ENTER_CONTEXT(MemAlloc);
    if (!pointer || size == 0) return CUDA_ERROR_INVALID_VALUE;
    Range *range = host_range_new(RANGE_DEVICE, 0, size, context);
    if (!range) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = CUDA_SUCCESS;
    bool own_pages = size > SMALL_LIMIT || host_misuse(); /* to lose their access when freed */
    if (own_pages) result = blocks_take(range, size > SMALL_LIMIT ? HOST_BLOCK : 4 * KIB);
    pthread_rwlock_wrlock(&host.map_lock);
    if (!own_pages) result = slab_take(range);
    if (result == CUDA_SUCCESS) host_map_insert(&host.ranges, range);
    if (result == CUDA_SUCCESS) WATCH(host_order_fresh(range->base, size));
    pthread_rwlock_unlock(&host.map_lock);
    if (result != CUDA_SUCCESS) free(range);
    else *pointer = range->base;
    return result;
}

CUresult host_cuMemAllocManaged(CUdeviceptr *pointer, size_t size, unsigned int flags) {
    Context *context = ENTER_CONTEXT(MemAllocManaged);
    bool attach = flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST;
    if (!pointer || size == 0 || !attach) return CUDA_ERROR_INVALID_VALUE;
    return host_memory_take(context, RANGE_MANAGED, size, flags, pointer);
}

/* Allocates pages that host and device both use; no device is charged. */
CUresult host_memory_take(Context *context, RangeKind kind, size_t size, unsigned flags,
                          CUdeviceptr *pointer) {
    if (size > SIZE_MAX / 2) return CUDA_ERROR_OUT_OF_MEMORY;
    size_t mapped = host_round_up(size, 4 * KIB);
    void *pages = host_pages_map(mapped, size >= HOST_BLOCK ? HOST_BLOCK : 4 * KIB);
    Range *range = pages ? host_range_new(kind, (uintptr_t)pages, size, context) : NULL;
    if (!range) {
        if (pages) munmap(pages, mapped);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    range->mapped = mapped;
    range->flags = flags;
    host_range_add(range);
    *pointer = range->base;
    return CUDA_SUCCESS;
}

/* ---- free ---- */

static void range_release(Range *range) {
    if (watch_bury(range)) return;
    switch (range->kind) {
    case RANGE_DEVICE: host_device_refund(range->device, range->mapped); /* fall through */
    case RANGE_PINNED:
    case RANGE_MANAGED:
    case RANGE_IMPORTED: munmap((void *)(range->base & ~(uintptr_t)4095), range->mapped); break;
    default: break;
    }
    free(range);
}

/* Removes a range from the map. Units of a slab are freed at once, under the same lock; pages of
 * its own are still to be released: then it returns true. Caller holds `map_lock` for writing. */
static bool range_remove(Range *range) {
    host_map_remove(&host.ranges, range);
    if (range->kind != RANGE_DEVICE || !range->owner) return true;
    slab_give(range);
    free(range);
    return false;
}

CUresult host_memory_free(uintptr_t address, RangeKind kind, RangeKind other) {
    pthread_rwlock_wrlock(&host.map_lock);
    Range *range = host_map_find(&host.ranges, address);
    bool found = range && range->base == address && (range->kind == kind || range->kind == other);
    bool has_pages = found && range_remove(range);
    pthread_rwlock_unlock(&host.map_lock);
    if (has_pages) range_release(range);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Finds the allocation at exactly this address, and waits for all work that is queued in its
 * context, so that nothing can still write into the memory of the next allocation. Pool memory is
 * the exception: as with the driver, the caller knows that nothing uses it any more. */
CUresult host_memory_wait(uintptr_t address, RangeKind *kind) {
    Context *context;
    pthread_rwlock_rdlock(&host.map_lock);
    Range *range = host_range_at(address);
    bool found = range && range->base == address && !range->leaving;
    uint64_t owner = found ? range->context : 0;
    if (found) *kind = range->kind;
    pthread_rwlock_unlock(&host.map_lock);
    if (!found) return CUDA_ERROR_INVALID_VALUE;
    if (owner == 0) return CUDA_SUCCESS;
    HOST_TRY(host_context_of((CUcontext)(uintptr_t)owner, &context));
    HOST_TRY((CUresult)atomic_load(&context->error));
    return host_context_wait(context);
}

CUresult host_cuMemFree(CUdeviceptr pointer) {
    RangeKind kind;
    ENTER(MemFree);
    if (pointer == 0) return CUDA_SUCCESS;
    HOST_TRY(host_memory_wait((uintptr_t)pointer, &kind));
    if (kind == RANGE_POOLED) {
        WATCH(host_order_block_ends(NULL, (uintptr_t)pointer));
        return host_pooled_free((uintptr_t)pointer, (Point){NULL, 0, 0});
    }
    if (kind == RANGE_IMPORTED)
        return host_memory_free((uintptr_t)pointer, RANGE_IMPORTED, RANGE_IMPORTED);
    return host_memory_free((uintptr_t)pointer, RANGE_DEVICE, RANGE_MANAGED);
}

CUresult host_cuMemFreeHost(void *pointer) {
    RangeKind kind;
    ENTER(MemFreeHost);
    if (!pointer) return CUDA_SUCCESS;
    HOST_TRY(host_memory_wait((uintptr_t)pointer, &kind));
    return host_memory_free((uintptr_t)pointer, RANGE_PINNED, RANGE_PINNED);
}

/* Finds a range that the context owns; virtual mappings belong to no context. */
static Range *owned_by(Range *at, uint64_t context) {
    if (!at) return NULL;
    if (at->context == context) return at;
    Range *found = owned_by(at->left, context);
    return found ? found : owned_by(at->right, context);
}

void host_memory_drop(uint64_t context) {
    for (;;) {
        pthread_rwlock_wrlock(&host.map_lock);
        Range *range = owned_by(host.ranges.root, context);
        bool has_pages = range && range_remove(range);
        pthread_rwlock_unlock(&host.map_lock);
        if (!range) return;
        if (has_pages) range_release(range);
    }
}

/* ---- queries ---- */

CUresult host_cuMemGetInfo(size_t *free_bytes, size_t *total) {
    Context *context = ENTER_CONTEXT(MemGetInfo);
    if (!free_bytes || !total) return CUDA_ERROR_INVALID_VALUE;
    *free_bytes = host_device_free(context->device);
    *total = hostdev_capacity(context->device);
    return CUDA_SUCCESS;
}

CUresult host_cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
    ENTER_CONTEXT(MemGetAddressRange);
    pthread_rwlock_rdlock(&host.map_lock);
    Range *range = host_range_at((uintptr_t)pointer);
    if (range && range->kind == RANGE_MAPPING && !range->readable) range = NULL;
    if (range && base) *base = range->base;
    if (range && size) *size = range->size;
    pthread_rwlock_unlock(&host.map_lock);
    return range ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
