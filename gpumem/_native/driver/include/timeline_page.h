/* A timeline in one shared page: a value that only rises, and its waiters.
 *
 * Any number of processes map the page (a sealed memfd). Value and sequence lie where any
 * program that shares such a page expects them: a signal raises `value` (byte 0), adds one
 * to `sequence` (byte 64) and wakes the futex there.
 *
 * No wake-up is lost. Every access below is sequentially consistent.
 *   signaller  S1 raise value    S2 sequence += 1   S3 read waiters, wake all unless 0
 *   waiter     W1 waiters += 1   W2 read sequence   W3 read value   W4 sleep if sequence is W2's
 * If W3 does not see S1's value, W3 comes before S1 in the one order of all accesses, so W1
 * before S3: the signaller sees the waiter and calls the kernel. And W2 comes before S2: the
 * kernel, which compares and queues under one lock, finds the sequence moved on and does not
 * let the waiter sleep, or queues it before S3's wake. A waiter would have to be held up
 * between W2 and W4 for exactly 2**32 signals to miss one. `timeline_poison` and
 * `timeline_poll` are signals in this respect: their S1 changes another word.
 *
 * No wake-up is early: a wait returns only after it read a value that is high enough, and
 * what was written before that value was raised is visible by then.
 *
 * A device's store to `value` takes no part in this. The caller that queues the first one sets
 * `polled` beforehand; from then on no waiter sleeps longer than TIMELINE_POLL_NS.
 *
 * A waiter that dies leaves `waiters` too high, which costs each signal a system call.
 */
#ifndef GPUMEM_TIMELINE_PAGE_H
#define GPUMEM_TIMELINE_PAGE_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef TIMELINE_STEP /* between the steps above; a test puts delays there */
#define TIMELINE_STEP()
#endif

enum {
    TIMELINE_PAGE_BYTES = 4096,
    TIMELINE_MAGIC = 0x4c544d47, /* "GMTL" */
    TIMELINE_VERSION = 2,
    TIMELINE_PEERS = 112,
    TIMELINE_POLL_NS = 250000, /* maximum of a sleep where devices write */
};
#define TIMELINE_LARGEST INT64_MAX /* of a value: devices compare differences as signed */
#define TIMELINE_REMOVED UINT64_MAX /* the value of a fence with a removed device */

typedef struct TimelinePeer { /* one process's use; timeline_peers.h */
    _Atomic uint64_t claim;   /* process id << 32 | a number; 0: free */
    _Atomic uint64_t mark;    /* of the process; random */
    uint64_t unused[2];
} TimelinePeer;

/* One cache line each: fields that a signal writes, that a waiter writes, that hardly change. */
typedef struct TimelinePage {
    _Atomic uint64_t value;
    _Atomic uint64_t pending;   /* maximum of the known values that were signalled or queued */
    char apart[48];
    _Atomic uint32_t sequence;  /* at byte 64: incremented by every signal */
    _Atomic uint32_t waiters;   /* asleep, or about to be */
    char apart_too[56];
    uint32_t magic, version;    /* at byte 128; 0 in a page that is nothing but value and sequence */
    _Atomic uint32_t poisoned;  /* 1: it will not be signalled any more */
    _Atomic uint32_t polled;    /* 1: devices write the value */
    _Atomic uint32_t unwatched; /* processes that found no room among the peers */
    char apart_again[364];
    TimelinePeer peers[TIMELINE_PEERS]; /* from byte 512 to the end */
} TimelinePage;

_Static_assert(offsetof(TimelinePage, sequence) == 64, "the futex lies at byte 64");
_Static_assert(offsetof(TimelinePage, magic) == 128, "the third line");
_Static_assert(sizeof(TimelinePage) == TIMELINE_PAGE_BYTES, "one page");

typedef enum TimelineStatus {
    TIMELINE_OK,
    TIMELINE_LATE,     /* the deadline passed */
    TIMELINE_POISONED,
    TIMELINE_GONE      /* its device was removed */
} TimelineStatus;

static inline uint64_t timeline_now(void) { /* ns, monotonic */
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline void timeline_page_build(TimelinePage *page, uint64_t initial) { /* zeroed memory */
    atomic_store(&page->value, initial);
    atomic_store(&page->pending, initial);
    page->version = TIMELINE_VERSION;
    page->magic = TIMELINE_MAGIC;
}

static inline bool timeline_page_is_ours(const TimelinePage *page) {
    return page->magic == TIMELINE_MAGIC && page->version == TIMELINE_VERSION;
}

static inline uint64_t timeline_value(TimelinePage *page) { return atomic_load(&page->value); }
static inline bool timeline_is_poisoned(TimelinePage *page) { return atomic_load(&page->poisoned); }
static inline bool timeline_is_polled(TimelinePage *page) { return atomic_load(&page->polled); }

/* ---- signal ---- */

static inline void timeline_wake(TimelinePage *page) {
    TIMELINE_STEP();
    atomic_fetch_add(&page->sequence, 1);
    TIMELINE_STEP();
    if (atomic_load(&page->waiters) != 0)
        syscall(SYS_futex, &page->sequence, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* True: `word` was lower. The word never decreases, even if signals arrive out of order. */
static inline bool timeline_raise(_Atomic uint64_t *word, uint64_t value, uint64_t *before) {
    *before = atomic_load(word);
    while (*before < value)
        if (atomic_compare_exchange_weak(word, before, value)) return true;
    return false;
}

/* Returns the maximum that was signalled or queued. A program that only stores `value` does not
 * raise it. */
static inline uint64_t timeline_pending(TimelinePage *page) {
    uint64_t before, value = atomic_load(&page->value);
    return timeline_raise(&page->pending, value, &before) ? value : before;
}

/* Reserve a value, so that no other process signals it or one below; false: `known` is not lower. */
static inline bool timeline_claim(TimelinePage *page, uint64_t value, uint64_t *known) {
    *known = timeline_pending(page);
    return timeline_raise(&page->pending, value, known);
}

/* Claims only if there was no claim since `from` was read; or undoes a claim, which fails after a
 * later one. */
static inline bool timeline_move(TimelinePage *page, uint64_t from, uint64_t to) {
    return atomic_compare_exchange_strong(&page->pending, &from, to);
}

static inline void timeline_signal(TimelinePage *page, uint64_t value) {
    uint64_t before;
    if (timeline_raise(&page->value, value, &before)) timeline_wake(page);
}

static inline void timeline_poison(TimelinePage *page) {
    atomic_store(&page->poisoned, 1);
    timeline_wake(page);
}

/* Call it before the first store of a device is queued: it wakes sleeping waiters to poll. */
static inline void timeline_poll(TimelinePage *page) {
    if (atomic_exchange(&page->polled, 1) == 0) timeline_wake(page);
}

/* ---- wait ---- */

static inline void timeline_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Reached, lost, or neither (TIMELINE_LATE). A value that is reached stays so, even if poisoned. */
static inline TimelineStatus timeline_look(TimelinePage *page, uint64_t value) {
    uint64_t now = atomic_load(&page->value);
    if (now == TIMELINE_REMOVED) return TIMELINE_GONE;
    if (now >= value) return TIMELINE_OK;
    return atomic_load(&page->poisoned) ? TIMELINE_POISONED : TIMELINE_LATE;
}

/* Sleeps until the sequence is not `seen`, a spurious wake-up, or `longest` ns have passed. */
static inline void timeline_sleep(TimelinePage *page, uint32_t seen, uint64_t longest) {
    if (atomic_load(&page->polled) && longest > TIMELINE_POLL_NS) longest = TIMELINE_POLL_NS;
    struct timespec span = {(time_t)(longest / 1000000000u), (long)(longest % 1000000000u)};
    syscall(SYS_futex, &page->sequence, FUTEX_WAIT, seen, &span, NULL, 0);
}

/* Polls for `spin` ns, and reads the clock every POLLS polls. */
static inline TimelineStatus timeline_spin(TimelinePage *page, uint64_t value, uint64_t spin) {
    enum { POLLS = 32 };
    TimelineStatus status = timeline_look(page, value);
    if (status != TIMELINE_LATE || spin == 0) return status;
    for (uint64_t end = timeline_now() + spin; status == TIMELINE_LATE && timeline_now() < end;)
        for (int i = 0; i < POLLS && status == TIMELINE_LATE; i++) {
            timeline_pause();
            status = timeline_look(page, value);
        }
    return status;
}

static inline TimelineStatus timeline_park(TimelinePage *page, uint64_t value, uint64_t deadline) {
    TimelineStatus status;
    atomic_fetch_add(&page->waiters, 1);
    for (;;) {
        TIMELINE_STEP();
        uint32_t seen = atomic_load(&page->sequence);
        TIMELINE_STEP();
        status = timeline_look(page, value);
        TIMELINE_STEP();
        uint64_t now = status == TIMELINE_LATE ? timeline_now() : 0;
        if (status != TIMELINE_LATE || now >= deadline) break;
        timeline_sleep(page, seen, deadline - now);
    }
    atomic_fetch_sub(&page->waiters, 1);
    return status;
}

/* Waits until the value is reached, the timeline is lost, or the deadline (ns, monotonic) has
 * passed. */
static inline TimelineStatus timeline_wait(TimelinePage *page, uint64_t value, uint64_t deadline,
                                           uint64_t spin) {
    TimelineStatus status = timeline_spin(page, value, spin);
    return status == TIMELINE_LATE ? timeline_park(page, value, deadline) : status;
}

#endif
