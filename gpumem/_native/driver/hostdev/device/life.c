/* The device's life: first use, fork, shutdown. */
#include "internal.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

Host host;
_Thread_local Thread host_thread;
static pthread_once_t setup_once = PTHREAD_ONCE_INIT;

/* Initializes the locks and empties the tables; keeps the configured count and capacities. */
static void build(void) {
    pthread_rwlockattr_t fair; /* else copies without a pause block frees for ever */
    pthread_rwlockattr_init(&fair);
    pthread_rwlockattr_setkind_np(&fair, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&host.map_lock, &fair);
    pthread_rwlockattr_destroy(&fair);
    pthread_mutex_init(&host.setup_lock, NULL);
    pthread_mutex_init(&host.value_lock, NULL);
    pthread_mutex_init(&host.worker_lock, NULL);
    pthread_mutex_init(&host.capture_lock, NULL);
    host.captures = NULL;
    atomic_store(&host_captures, 0);
    host_cond_build(&host.value_written);
    host_cond_build(&host.worker_gone);
    host.ranges = host.reservations = host.pooled = (AddressMap){.root = NULL};
    host.workers = 0;
    atomic_store(&host.value_waiters, 0);
    host_table_build(&host.streams, OBJECT_STREAM, sizeof(Stream), host_stream_build);
    host_table_build(&host.events, OBJECT_EVENT, sizeof(Event), NULL);
    host_table_build(&host.physicals, OBJECT_PHYSICAL, sizeof(Physical), NULL);
    host_table_build(&host.pools, OBJECT_POOL, sizeof(Pool), NULL);
    host_table_build(&host.external_memories, OBJECT_EXTERNAL_MEMORY, sizeof(ExternalMemory), NULL);
    host_table_build(&host.semaphores, OBJECT_SEMAPHORE, sizeof(Semaphore), NULL);
    host_table_build(&host.graphs, OBJECT_GRAPH, sizeof(Graph), NULL);
    host_table_build(&host.graph_execs, OBJECT_GRAPH_EXEC, sizeof(GraphExec), NULL);
    host_table_build(&host.user_objects, OBJECT_USER_OBJECT, sizeof(UserObject), NULL);
    for (int device = 0; device < HOSTDEV_MAX_DEVICES; device++) host_context_build(device);
}

/* A forked child has no workers, and threads that no longer exist may have been in the middle of
 * a change of the structures. So none of them is read but the map, which a fork therefore waits
 * for. The device is reborn empty, and its handles carry another birth. The parent's memory stays
 * mapped in the child (readable, copy-on-write, never freed). Physical handles are mapped shared,
 * and become copy-on-write, too; only memory that can be exported, or was imported, stays one with
 * the parent's. */
static void before_fork(void) { pthread_rwlock_rdlock(&host.map_lock); }
static void after_fork(void) { pthread_rwlock_unlock(&host.map_lock); }

static void reborn(void) {
    host_mappings_part(host.ranges.root);
    host_physicals_reborn();
    host_order_reborn();
    host_graves_reborn();
    host.birth++;
    memset(&host_thread, 0, sizeof host_thread);
    after_fork(); /* then a new one: the old may record threads of the parent as waiting */
    build();
}

static void setup(void) {
    build();
    pthread_atfork(before_fork, after_fork, reborn);
    bool is_simulated;
    size_t capacity = host_default_capacity(&is_simulated);
    for (int device = 0; device < HOSTDEV_MAX_DEVICES; device++) {
        atomic_store(&host.devices[device].capacity, capacity);
        atomic_store(&host.devices[device].is_simulated, is_simulated);
    }
    int none = 0;
    atomic_compare_exchange_strong(&host.device_count, &none, 1);
}

void host_setup(void) { pthread_once(&setup_once, setup); }

CUresult host_cuInit(unsigned int flags) {
    host_setup();
    CUresult result = host_enter(HOST_CALL_Init);
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_INITIALIZED) return result;
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    int cold = HOST_COLD;
    atomic_compare_exchange_strong(&host.state, &cold, HOST_READY);
    return CUDA_SUCCESS;
}

void hostdev_shutdown(void) {
    host_setup();
    bool first = atomic_exchange(&host.state, HOST_DOWN) == HOST_READY;
    host_streams_wake();
    struct timespec deadline;
    host_deadline(&deadline, 1000000000u);
    pthread_mutex_lock(&host.worker_lock);
    while (host.workers > 0 &&
           pthread_cond_timedwait(&host.worker_gone, &host.worker_lock, &deadline) != ETIMEDOUT) {
    }
    pthread_mutex_unlock(&host.worker_lock);
    if (first) WATCH(host_misuse_leaks());
}
