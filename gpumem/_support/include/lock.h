/* A lock that sleeps: a bounded spin, then a futex wait.
 *
 * Four bytes, about 10 ns a pair without contention. A pure spin lock is very slow with two
 * threads, and a PyThread lock costs four times as much. A thread that holds one never acquires
 * the interpreter lock (order: interpreter lock, grow lock, arena lock).
 *
 * state: 0 free, 1 held, 2 held and a thread may sleep (U. Drepper, "Futexes are tricky",
 * 2011, third mutex).
 */
#ifndef GPUMEM_LOCK_H
#define GPUMEM_LOCK_H

#include <limits.h>
#include <linux/futex.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct Lock {
    int32_t state;
} Lock;

enum { LOCK_SPINS = 256 };

static inline void lock_init(Lock *lock) { __atomic_store_n(&lock->state, 0, __ATOMIC_RELAXED); }

static inline void lock_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static __attribute__((noinline)) void lock_acquire_slow(Lock *lock) {
    for (int i = 0; i < LOCK_SPINS; i++) {
        int32_t seen = __atomic_load_n(&lock->state, __ATOMIC_RELAXED);
        if (seen == 0 && __atomic_compare_exchange_n(&lock->state, &seen, 1, 0, __ATOMIC_ACQUIRE,
                                                     __ATOMIC_RELAXED))
            return;
        lock_pause();
    }
    while (__atomic_exchange_n(&lock->state, 2, __ATOMIC_ACQUIRE) != 0)
        syscall(SYS_futex, &lock->state, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0);
}

static inline void lock_acquire(Lock *lock) {
    int32_t seen = 0;
    if (!__atomic_compare_exchange_n(&lock->state, &seen, 1, 0, __ATOMIC_ACQUIRE,
                                     __ATOMIC_RELAXED))
        lock_acquire_slow(lock);
}

static inline int lock_try(Lock *lock) { /* 1: acquired */
    int32_t seen = 0;
    return __atomic_compare_exchange_n(&lock->state, &seen, 1, 0, __ATOMIC_ACQUIRE,
                                       __ATOMIC_RELAXED);
}

static inline void lock_release(Lock *lock) {
    int32_t before = __atomic_exchange_n(&lock->state, 0, __ATOMIC_RELEASE);
#if defined(GPUMEM_DEBUG) || defined(GPUMEM_CHECK_LOCKS)
    if (before == 0) abort(); /* it was not held: its acquire is missing */
#endif
    if (before == 2)
        syscall(SYS_futex, &lock->state, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

#endif
