/* Virtual memory: reserved addresses, and physical handles mapped there.
 *
 * A reservation is address space without access. A mapping is a note in the map until
 * access is set; only then does memory appear, as a shared mapping of the handle's file,
 * so one handle can be at several addresses at once. Unmapping puts the hole back in one
 * system call, so that the addresses stay reserved throughout.
 *
 * The rules of an H200 are enforced: 2 MiB granularity, no offset into a handle, whole
 * mappings only (several in one call). Nothing here waits for a stream.
 */
#include "../device/internal.h"
#include "mappings.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { HOST_BIT = 63 };

static bool is_block_multiple(uint64_t value) { return value % HOST_BLOCK == 0; }

/* ---- addresses ---- */

static void *hole(void *at, size_t size, int flags) {
    return mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

static uintptr_t hole_at(uintptr_t hint, size_t size) { /* 0: something else is there */
    void *at = hole((void *)hint, size, MAP_FIXED_NOREPLACE);
    if (at == MAP_FAILED) return 0;
    if ((uintptr_t)at == hint) return hint;
    munmap(at, size); /* a kernel that does not know the flag takes it as a hint */
    return 0;
}

CUresult host_cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment,
                                  CUdeviceptr hint, unsigned long long flags) {
    ENTER(MemAddressReserve);
    if (!pointer || flags != 0 || size == 0 || !is_block_multiple(size)) return CUDA_ERROR_INVALID_VALUE;
    if (alignment & (alignment - 1)) return CUDA_ERROR_INVALID_VALUE;
    if (alignment < HOST_BLOCK) alignment = HOST_BLOCK;
    uintptr_t base = 0;
    if (hint && hint % alignment == 0) base = hole_at((uintptr_t)hint, size);
    if (!base) base = (uintptr_t)map_aligned(size, alignment, PROT_NONE, MAP_NORESERVE);
    if (!base) return CUDA_ERROR_OUT_OF_MEMORY;
    Range *range = host_range_new(RANGE_RESERVATION, base, size, NULL);
    if (!range) {
        munmap((void *)base, size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_rwlock_wrlock(&host.map_lock);
    host_map_insert(&host.reservations, range);
    pthread_rwlock_unlock(&host.map_lock);
    *pointer = base;
    return CUDA_SUCCESS;
}

CUresult host_cuMemAddressFree(CUdeviceptr pointer, size_t size) {
    ENTER(MemAddressFree);
    pthread_rwlock_wrlock(&host.map_lock);
    Range *range = host_map_find(&host.reservations, (uintptr_t)pointer);
    bool whole = range && range->base == pointer && range->size == size;
    bool empty = whole && host_map_free(&host.ranges, range->base, size);
    if (empty) host_map_remove(&host.reservations, range);
    pthread_rwlock_unlock(&host.map_lock);
    if (!empty) return CUDA_ERROR_INVALID_VALUE;
    munmap((void *)range->base, size);
    free(range);
    return CUDA_SUCCESS;
}

/* ---- map and unmap ---- */

static bool reserved_and_empty(uintptr_t base, size_t size) {
    Range *reservation = host_map_find(&host.reservations, base);
    return reservation && size <= reservation->size - (base - reservation->base) &&
           host_map_free(&host.ranges, base, size);
}

static void mapping_insert(Range *range, Physical *physical) {
    physical->mappings++;
    range->owner = physical;
    range->readable = range->writable = false;
    range->flags = (unsigned)physical->prop.location.type;
    range->device = physical->prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE
                        ? physical->prop.location.id
                        : 0;
    host_map_insert(&host.ranges, range);
}

CUresult host_cuMemMap(CUdeviceptr pointer, size_t size, size_t offset,
                       CUmemGenericAllocationHandle handle, unsigned long long flags) {
    ENTER(MemMap);
    if (flags != 0 || size == 0 || !is_block_multiple(pointer)) return CUDA_ERROR_INVALID_VALUE;
    if (offset != 0) return CUDA_ERROR_NOT_SUPPORTED;
    Range *range = host_range_new(RANGE_MAPPING, (uintptr_t)pointer, size, NULL);
    if (!range) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = CUDA_SUCCESS;
    pthread_rwlock_wrlock(&host.map_lock);
    Physical *physical = host_object_find(&host.physicals, handle);
    if (!physical) result = CUDA_ERROR_INVALID_VALUE;
    else if (size != physical->size) result = CUDA_ERROR_NOT_SUPPORTED;
    else if (!reserved_and_empty(range->base, size)) result = CUDA_ERROR_INVALID_VALUE;
    else mapping_insert(range, physical);
    pthread_rwlock_unlock(&host.map_lock);
    if (result != CUDA_SUCCESS) free(range);
    return result;
}

/* Returns the mappings of a range one by one; NULL at the end. */
static Range *mapping_next(uintptr_t *at, uintptr_t end) {
    Range *range = host_map_after(&host.ranges, *at);
    if (!range || range->base >= end) return NULL;
    *at = range->base + range->size;
    return range;
}

/* Counts the mappings that begin in a range. False: one crosses its ends, or is not a mapping. */
static bool mappings_inside(uintptr_t base, uintptr_t end, size_t *count) {
    *count = 0;
    uintptr_t at = base;
    for (const Range *range; (range = mapping_next(&at, end)); ++*count)
        if (range->kind != RANGE_MAPPING || range->base < base || at > end) return false;
    return true;
}

static void mapping_remove(Range *range) {
    Physical *physical = range->owner;
    host_map_remove(&host.ranges, range);
    physical->mappings--;
    host_physical_drop(physical);
    free(range);
}

/* Returns the end of a run of neighbouring mappings, at most `end`. */
static uintptr_t run_end(const Range *first, uintptr_t end) {
    uintptr_t at = first->base + first->size;
    for (const Range *next; at < end; at = next->base + next->size) {
        next = host_map_find(&host.ranges, at);
        if (!next) break;
    }
    return at;
}

static CUresult unmap_run(uintptr_t base, uintptr_t end) { /* one system call for all of it */
    if (hole((void *)base, end - base, MAP_FIXED) == MAP_FAILED) return CUDA_ERROR_UNMAP_FAILED;
    for (uintptr_t at = base; at < end;) {
        Range *range = host_map_find(&host.ranges, at);
        at += range->size;
        mapping_remove(range);
    }
    return CUDA_SUCCESS;
}

/* Gaps are skipped. The range must begin in a reservation and cut no mapping. */
CUresult host_cuMemUnmap(CUdeviceptr pointer, size_t size) {
    uintptr_t base = (uintptr_t)pointer, end = base + size;
    size_t mappings = 0;
    ENTER(MemUnmap);
    if (size == 0 || end < base) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_wrlock(&host.map_lock);
    if (host_map_find(&host.reservations, base) && mappings_inside(base, end, &mappings))
        result = CUDA_SUCCESS;
    for (size_t left = mappings; left > 0 && result == CUDA_SUCCESS;) {
        const Range *first = host_map_after(&host.ranges, base);
        if (!first || first->base >= end) break;
        uintptr_t from = first->base, to = run_end(first, end);
        result = unmap_run(from, to);
        base = to;
    }
    pthread_rwlock_unlock(&host.map_lock);
    spend_handles(HOST_CALL_MemUnmap, mappings);
    return result;
}

/* ---- access ---- */

static int protection(bool readable, bool writable) {
    return (readable ? PROT_READ : PROT_NONE) | (writable ? PROT_WRITE : 0);
}

/* Returns the bit of a location; the host's is accepted only for memory of the host. */
static CUresult location_bit(const CUmemLocation *location, const Range *range, uint64_t *bit) {
    bool host_memory = range->flags != CU_MEM_LOCATION_TYPE_DEVICE;
    switch (location->type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        *bit = (uint64_t)1 << (location->id & 63);
        return host_device_check(location->id) == CUDA_SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        *bit = (uint64_t)1 << HOST_BIT;
        return host_memory ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

static CUresult access_check(uintptr_t base, size_t size, const CUmemAccessDesc *access, size_t count) {
    uintptr_t at = base;
    for (const Range *range; (range = mapping_next(&at, base + size));) {
        for (size_t i = 0; i < count; i++) {
            uint64_t bit;
            HOST_TRY(location_bit(&access[i].location, range, &bit));
            if (access[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
                !host_device_reaches(access[i].location.id, range->device))
                return CUDA_ERROR_INVALID_DEVICE;
            if ((int)access[i].flags == 2 || (unsigned)access[i].flags > 3) return CUDA_ERROR_INVALID_VALUE;
        }
    }
    return CUDA_SUCCESS;
}

/* Pages of a NUMA node come from that node; a kernel without NUMA has node 0 alone. */
static bool settle_on_node(const Range *range, const Physical *physical) {
    enum { BITS = 8 * sizeof(unsigned long), NODES = 1024, BIND = 2 };
    unsigned long nodes[NODES / BITS] = {0};
    int node = physical->prop.location.id;
    if (physical->prop.location.type != CU_MEM_LOCATION_TYPE_HOST_NUMA) return true;
    if (node < 0 || node >= NODES) return false;
    nodes[node / BITS] = 1ul << (node % BITS);
    if (syscall(SYS_mbind, (void *)range->base, range->size, BIND, nodes, (unsigned long)NODES, 0u) == 0)
        return true;
    return node == 0 && errno == ENOSYS;
}

/* The process, which is all devices, gets the widest access that any device or the host has; copies
 * and fills check that of their device. */
static CUresult access_apply(Range *range) {
    const Physical *physical = range->owner;
    bool readable = range->readers != 0, writable = range->writers != 0;
    if (readable == range->readable && writable == range->writable) return CUDA_SUCCESS;
    void *at = mmap((void *)range->base, range->size, protection(readable, writable),
                    MAP_SHARED | MAP_FIXED | MAP_NORESERVE, host_physical_file(physical),
                    (off_t)physical->offset);
    if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY; /* the kernel's limit on mappings */
    if (!settle_on_node(range, physical)) {
        hole((void *)range->base, range->size, MAP_FIXED);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    range->readable = readable;
    range->writable = writable;
    return CUDA_SUCCESS;
}

static CUresult access_set(uintptr_t base, size_t size, const CUmemAccessDesc *access, size_t count) {
    CUresult result = CUDA_SUCCESS;
    uintptr_t at = base;
    for (Range *range; result == CUDA_SUCCESS && (range = mapping_next(&at, base + size));) {
        uint64_t readers = range->readers, writers = range->writers;
        for (size_t i = 0; i < count; i++) {
            uint64_t bit = 0;
            (void)location_bit(&access[i].location, range, &bit);
            host_access_set(&range->readers, &range->writers, bit, access[i].flags);
        }
        result = access_apply(range);
        if (result != CUDA_SUCCESS) {
            range->readers = readers;
            range->writers = writers;
        }
    }
    return result;
}

/* Returns the number of whole mappings that make up exactly this range; 0: they do not. */
static size_t tiles(uintptr_t base, uintptr_t end) {
    size_t mappings;
    const Range *first = host_map_find(&host.ranges, base);
    bool whole = first && mappings_inside(base, end, &mappings) && run_end(first, end) == end;
    return whole ? mappings : 0;
}

CUresult host_cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *access,
                             size_t count) {
    uintptr_t base = (uintptr_t)pointer;
    ENTER(MemSetAccess);
    if (!access || count == 0 || size == 0 || size > UINT64_MAX - pointer) return CUDA_ERROR_INVALID_VALUE;
    if (!is_block_multiple(pointer) || !is_block_multiple(size)) return CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_wrlock(&host.map_lock);
    size_t mappings = tiles(base, base + size);
    CUresult result = mappings ? access_check(base, size, access, count) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) result = access_set(base, size, access, count);
    pthread_rwlock_unlock(&host.map_lock);
    spend_handles(HOST_CALL_MemSetAccess, mappings);
    return result;
}

CUresult host_cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location,
                             CUdeviceptr pointer) {
    ENTER(MemGetAccess);
    if (!flags || !location) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    uint64_t bit;
    pthread_rwlock_rdlock(&host.map_lock);
    Range *range = host_map_find(&host.ranges, (uintptr_t)pointer);
    if (range && range->kind == RANGE_MAPPING) result = location_bit(location, range, &bit);
    if (result == CUDA_SUCCESS)
        *flags = host_access_flags(range->readers & bit, range->writers & bit);
    pthread_rwlock_unlock(&host.map_lock);
    return result;
}

/* ---- a forked child ---- */

typedef struct Run { /* mappings that follow each other in the addresses and in the shared file */
    uintptr_t base;
    size_t size, offset;
    int protection;
    int file;
} Run;

static void run_part(const Run *run) {
    if (run->size == 0) return;
    void *at = mmap((void *)run->base, run->size, run->protection,
                    MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, run->file, (off_t)run->offset);
    /* The kernel refuses another mapping: a write then faults, so that it never reaches the parent. */
    if (at == MAP_FAILED) mprotect((void *)run->base, run->size, run->protection & PROT_READ);
}

static bool run_extend(Run *run, const Range *range) {
    const Physical *physical = range->owner;
    bool follows = run->base + run->size == range->base &&
                   run->offset + run->size == physical->offset &&
                   run->protection == protection(range->readable, range->writable);
    if (follows) run->size += range->size;
    return follows;
}

static void part(const Range *range, Run *run) {
    if (!range) return;
    part(range->left, run);
    const Physical *physical = range->owner;
    if (range->kind == RANGE_MAPPING && range->readable && physical->fd < 0 &&
        !run_extend(run, range)) {
        run_part(run);
        *run = (Run){range->base, range->size, physical->offset,
                     protection(range->readable, range->writable), host_physical_file(physical)};
    }
    part(range->right, run);
}

void host_mappings_part(const Range *root) {
    Run run = {0};
    part(root, &run);
    run_part(&run);
}
