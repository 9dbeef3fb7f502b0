/* Counts: calls of each driver function, and how many objects of each kind are alive. */
#include "../device/internal.h"

#include <string.h>

_Atomic uint64_t host_call_counts[HOST_CALL_COUNT];

/* ---- calls ---- */

int host_call_number(const char *name) { /* -1: not in the table */
    for (int call = 0; call < DRIVER_ENTRY_COUNT; call++)
        if (strcmp(driver_entries[call].name, name) == 0) return call;
    return -1;
}

uint64_t hostdev_call_count(const char *name) {
    int call = host_call_number(name);
    return call < 0 ? UINT64_MAX : atomic_load(&host_call_counts[call]);
}

uint64_t hostdev_total_calls(void) {
    uint64_t total = 0;
    for (int call = 0; call < HOST_CALL_COUNT; call++) total += atomic_load(&host_call_counts[call]);
    return total;
}

void hostdev_reset_counts(void) {
    for (int call = 0; call < HOST_CALL_COUNT; call++) atomic_store(&host_call_counts[call], 0);
}

/* ---- live objects ---- */

static void count_stream(void *pointer, void *data) {
    Stream *stream = pointer;
    pthread_mutex_lock(&stream->object.lock);
    if (atomic_load(&stream->object.handle) && stream->role == ROLE_ORDINARY) ++*(uint64_t *)data;
    pthread_mutex_unlock(&stream->object.lock);
}

static void count_ranges(const Range *range, HostdevLive *live) {
    if (!range) return;
    if (range->kind == RANGE_MAPPING) live->mappings++;
    else live->allocations++;
    count_ranges(range->left, live);
    count_ranges(range->right, live);
}

void hostdev_live(HostdevLive *live) {
    host_setup();
    memset(live, 0, sizeof *live);
    host_object_each(&host.streams, count_stream, &live->streams);
    live->events = atomic_load(&host.events.live);
    live->handles = atomic_load(&host.physicals.live);
    live->pools = atomic_load(&host.pools.live);
    live->imports = atomic_load(&host.external_memories.live) + atomic_load(&host.semaphores.live);
    live->graphs = atomic_load(&host.graphs.live) + atomic_load(&host.graph_execs.live);
    pthread_rwlock_rdlock(&host.map_lock);
    count_ranges(host.ranges.root, live);
    live->reservations = host.reservations.count;
    pthread_rwlock_unlock(&host.map_lock);
    pthread_mutex_lock(&host.worker_lock);
    live->workers = host.workers;
    pthread_mutex_unlock(&host.worker_lock);
}
