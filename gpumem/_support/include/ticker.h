/* A thread that calls a function repeatedly. It never uses the interpreter, handles no signal, and
 * ends at ticker_stop. There is one per process; a fork's child has none, and may start it.
 */
#ifndef GPUMEM_TICKER_H
#define GPUMEM_TICKER_H

#include <errno.h>
#include <stdint.h>
#include <time.h>

#include "threads.h"

enum { TICKER_STACK_BYTES = 256 << 10 };

static struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    int ending;
    uint64_t period; /* ns */
    void (*tick)(void);
} ticker;

static void *ticker_run(void *nothing) {
    struct timespec next;
    clock_gettime(CLOCK_MONOTONIC, &next);
    pthread_mutex_lock(&ticker.lock);
    while (!ticker.ending) {
        uint64_t ns = (uint64_t)next.tv_nsec + ticker.period;
        next.tv_sec += (time_t)(ns / 1000000000u);
        next.tv_nsec = (long)(ns % 1000000000u);
        while (!ticker.ending &&
               pthread_cond_timedwait(&ticker.ended, &ticker.lock, &next) != ETIMEDOUT) {}
        if (ticker.ending) break;
        pthread_mutex_unlock(&ticker.lock);
        ticker.tick();
        clock_gettime(CLOCK_MONOTONIC, &next); /* calls missed while it was stopped are skipped */
        pthread_mutex_lock(&ticker.lock);
    }
    pthread_mutex_unlock(&ticker.lock);
    return nothing;
}

/* Returns an errno. */
static int ticker_start(void (*tick)(void), uint64_t period) {
    pthread_condattr_t clock;
    int code;
    ticker.tick = tick;
    ticker.period = period;
    ticker.ending = 0;
    pthread_mutex_init(&ticker.lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&ticker.ended, &clock);
    pthread_condattr_destroy(&clock);
    code = thread_start(&ticker.thread, 0, TICKER_STACK_BYTES, ticker_run, NULL);
    if (code == 0) pthread_setname_np(ticker.thread, "gpumem-top");
    return code;
}

/* The new period applies from the next call on. */
static void ticker_set_period(uint64_t period) {
    pthread_mutex_lock(&ticker.lock);
    ticker.period = period;
    pthread_mutex_unlock(&ticker.lock);
}

/* When it returns the function is not called any more. */
static void ticker_stop(void) {
    pthread_mutex_lock(&ticker.lock);
    ticker.ending = 1;
    pthread_cond_signal(&ticker.ended);
    pthread_mutex_unlock(&ticker.lock);
    pthread_join(ticker.thread, NULL);
    pthread_cond_destroy(&ticker.ended);
    pthread_mutex_destroy(&ticker.lock);
}

#endif
