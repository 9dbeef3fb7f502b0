/* Time: the monotonic clock, or a virtual one that only calls advance; and the lag. */
#include "internal.h"

#include <time.h>

static _Atomic bool clock_virtual;
static _Atomic uint64_t clock_time; /* ns; of the virtual clock */
static _Atomic uint64_t clock_lag;  /* ns */

bool host_clock_is_virtual(void) {
    return atomic_load_explicit(&clock_virtual, memory_order_relaxed);
}

uint64_t host_now(void) {
    return host_clock_is_virtual() ? atomic_load(&clock_time) : timeline_now();
}

uint64_t host_clock_due(void) {
    uint64_t lag = atomic_load_explicit(&clock_lag, memory_order_relaxed);
    return lag ? host_now() + lag : 0;
}

/* The clock never moves backwards: another thread may have advanced it further. */
void host_clock_advance_to(uint64_t time) {
    uint64_t now = atomic_load(&clock_time);
    while (now < time && !atomic_compare_exchange_weak(&clock_time, &now, time)) {
    }
    if (now < time) host_streams_wake();
}

void host_deadline(struct timespec *deadline, uint64_t nanoseconds_from_now) {
    uint64_t time = timeline_now() + nanoseconds_from_now;
    deadline->tv_sec = (time_t)(time / 1000000000u);
    deadline->tv_nsec = (long)(time % 1000000000u);
}

void host_cond_build(pthread_cond_t *cond) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
}

void hostdev_set_lag(uint64_t nanoseconds) { atomic_store(&clock_lag, nanoseconds); }
uint64_t hostdev_now(void) { return host_now(); }

int hostdev_use_virtual_clock(int on) {
    host_setup();
    /* It starts at the real time, so that times of earlier events stay comparable. */
    if (on && !host_clock_is_virtual()) atomic_store(&clock_time, timeline_now());
    atomic_store(&clock_virtual, on != 0);
    host_streams_wake();
    return CUDA_SUCCESS;
}

int hostdev_clock_is_virtual(void) { return host_clock_is_virtual(); }

void hostdev_advance_clock(uint64_t nanoseconds) {
    host_setup();
    atomic_fetch_add(&clock_time, nanoseconds);
    host_streams_wake();
}
