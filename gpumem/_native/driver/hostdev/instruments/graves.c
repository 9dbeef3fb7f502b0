/* Use after free: freed device memory keeps its addresses, without access and without pages. */
#include "../device/internal.h"

#include <sys/mman.h>

static AddressMap graves; /* memory freed during a search for misuse; guarded by map_lock */

void host_grave_add(Range *range) {
    mmap((void *)range->base, range->mapped, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    host_device_refund(range->device, range->mapped);
    pthread_rwlock_wrlock(&host.map_lock);
    host_map_insert(&graves, range);
    pthread_rwlock_unlock(&host.map_lock);
}

bool watch_names_freed(uintptr_t address, size_t size) {
    if (host_map_free(&graves, address, size)) return false;
    host_misuse_use_after_free(address, size);
    return true;
}

/* Queued operations may use any block of a segment, but a new operation may not name a
 * free one. */
bool host_free_block_named(uintptr_t address, size_t size) {
    Range *segment = host_map_find(&host.ranges, address);
    if (!segment || segment->kind != RANGE_SEGMENT) return false;
    Range *block = host_map_find(&host.pooled, address);
    if (block && size <= block->size - (address - block->base)) return false;
    host_misuse_use_after_free(address, size);
    return true;
}

void host_graves_reborn(void) { graves = (AddressMap){.root = NULL}; }
