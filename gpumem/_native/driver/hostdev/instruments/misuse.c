/* Findings of the search for misuse. */
#include "../device/internal.h"

#include <stdarg.h>
#include <stdio.h>

_Atomic bool host_misuse_on;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* a leaf */
static _Atomic uint64_t found[HOSTDEV_MISUSE_KINDS];
static char latest[256], reported[256];

__attribute__((format(printf, 3, 4))) static void note(HostdevMisuse kind, uint64_t times,
                                                       const char *format, ...) {
    va_list arguments;
    atomic_fetch_add(&found[kind], times);
    pthread_mutex_lock(&lock);
    va_start(arguments, format);
    vsnprintf(latest, sizeof latest, format, arguments);
    va_end(arguments);
    pthread_mutex_unlock(&lock);
}

void host_misuse_use_after_free(uintptr_t address, size_t size) {
    note(HOSTDEV_USE_AFTER_FREE, 1, "use after free: %zu bytes at 0x%zx", size, (size_t)address);
}

void host_misuse_context(Context *context, CUstream stream) {
    Context *current;
    if (host_context_current(&current) == CUDA_SUCCESS && current != context)
        note(HOSTDEV_WRONG_CONTEXT, 1, "wrong context: stream 0x%zx belongs to another device",
             (size_t)(uintptr_t)stream);
}

/* ---- accesses that nothing orders ---- */

static const char *name(Access access, char text[64]) {
    if (access.slot == 0) return "the host";
    snprintf(text, 64, "stream %llu (operation %llu)", (unsigned long long)access.stream,
             (unsigned long long)access.number);
    return text;
}

void host_misuse_unordered(Access access, bool writes, Access before, bool wrote, Bytes bytes) {
    char one[64], other[64];
    note(HOSTDEV_UNORDERED_ACCESS, 1,
         "unordered access: %s %s %zu bytes at 0x%zx that %s %s; nothing orders them",
         name(access, one), writes ? "writes" : "reads", bytes.size, (size_t)bytes.named,
         name(before, other), wrote ? "wrote" : "read");
}

/* ---- objects left at the end ---- */

static void count_own_pool(void *pointer, void *data) { /* a default pool belongs to the device */
    Pool *pool = pointer;
    if (atomic_load(&pool->object.handle) && pool->is_default) --*(uint64_t *)data;
}

void host_misuse_leaks(void) {
    HostdevLive live;
    hostdev_live(&live);
    host_object_each(&host.pools, count_own_pool, &live.pools);
    const struct {
        const char *name;
        uint64_t count;
    } kinds[] = {
        {"streams", live.streams},         {"events", live.events},
        {"allocations", live.allocations}, {"physical handles", live.handles},
        {"mappings", live.mappings},       {"reservations", live.reservations},
        {"pools", live.pools},             {"imports", live.imports},
        {"graphs", live.graphs},
    };
    char text[200];
    uint64_t total = 0;
    int at = 0;
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        if (kinds[i].count == 0) continue;
        at += snprintf(text + at, sizeof text - (size_t)at, "%s%s: %llu", total ? ", " : "", kinds[i].name,
                       (unsigned long long)kinds[i].count);
        total += kinds[i].count;
        if ((size_t)at >= sizeof text) break;
    }
    if (total == 0) return;
    note(HOSTDEV_LEAK, total, "left at the end: %s", text);
    fprintf(stderr, "gpumem host device: left at the end: %s\n", text); /* no call can read it any more */
}

/* ---- the caller's side ---- */

void hostdev_find_misuse(int on) {
    host_setup();
    host_order_start();
    atomic_store(&host_misuse_on, on != 0);
}

uint64_t hostdev_misuse_count(int kind) {
    return kind >= 0 && kind < HOSTDEV_MISUSE_KINDS ? atomic_load(&found[kind]) : 0;
}

const char *hostdev_misuse_report(void) {
    pthread_mutex_lock(&lock);
    snprintf(reported, sizeof reported, "%s", latest);
    pthread_mutex_unlock(&lock);
    return reported;
}
