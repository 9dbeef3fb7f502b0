/* Findings of the mode that looks for misuse. */
#include "internal.h"

#include <stdio.h>

_Atomic bool host_misuse_on;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* a leaf */
static _Atomic uint64_t found[HOSTDEV_MISUSE_KINDS];
static char latest[160], reported[160];

void host_misuse_note(HostdevMisuse kind, uintptr_t address, size_t size) {
    atomic_fetch_add(&found[kind], 1);
    pthread_mutex_lock(&lock);
    if (kind == HOSTDEV_USE_AFTER_FREE)
        snprintf(latest, sizeof latest, "use after free: %zu bytes at 0x%zx", size, (size_t)address);
    else
        snprintf(latest, sizeof latest, "wrong context: stream 0x%zx belongs to another device",
                 (size_t)address);
    pthread_mutex_unlock(&lock);
}

void hostdev_find_misuse(int on) {
    host_setup();
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
