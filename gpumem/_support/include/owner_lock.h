/* A lock that costs its owner no atomic operation.
 *
 * One thread, the owner, enters often; other threads, visitors, rarely. The owner raises a flag,
 * checks for a visitor, works, and lowers the flag: plain stores and loads. A visitor pays for both:
 * it announces itself, makes every core of the process pass a memory barrier (membarrier(2), so that
 * the owner either saw the announcement or is seen at work), and waits until the flag is down.
 * Biased locking after D. Dice, M. Moir, W. Scherer, "Quickly reacquirable locks" (2003), with the
 * kernel's barrier in place of collocated words.
 *
 * Either the caller knows whether its thread is the owner (owner_enter, visitor_enter), or the lock
 * does (biased_enter): then its owner is the first thread that enters, until a second one does.
 *
 * Where the kernel has no such barrier, and under the thread sanitizer, which does not know it, the
 * owner takes the visitors' lock like every thread.
 */
#ifndef GPUMEM_OWNER_LOCK_H
#define GPUMEM_OWNER_LOCK_H

#include <linux/membarrier.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "lock.h"

typedef struct OwnerLock {
    uint32_t busy;    /* the owner is inside; written by the owner alone */
    uint32_t visited; /* 1: a visitor is inside or waits for the owner to leave; 2: never biased again */
    Lock visitors;    /* held by the one visitor, or by the owner while `visited` */
    /* Used by biased_enter alone: thread_word() of the owner, which a later thread may have once the
     * owner has ended; 0: none yet. */
    uintptr_t owner;
} OwnerLock;

enum { OWNER_YIELDS = 100, OWNER_NAP_NS = 50000 };

static inline int owner_barrier(int command) { return (int)syscall(SYS_membarrier, command, 0, 0); }

/* gcc names the thread sanitizer by a macro, clang by a feature. */
#if defined(__SANITIZE_THREAD__)
#define OWNER_UNDER_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define OWNER_UNDER_THREAD_SANITIZER 1
#endif
#endif

/* Whether owners of this process may enter without an atomic operation. */
static inline int owner_is_biased(void) {
#if defined(OWNER_UNDER_THREAD_SANITIZER)
    return 0;
#else
    return owner_barrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) == 0;
#endif
}

/* A lock that starts `visited` is never biased: its owner always takes the visitors' lock. */
static inline void owner_lock_init(OwnerLock *lock, int biased) {
    lock->busy = 0;
    lock->visited = biased ? 0 : 2;
    lock->owner = 0;
    lock_init(&lock->visitors);
}

static inline void owner_enter(OwnerLock *lock) {
    __atomic_store_n(&lock->busy, 1, __ATOMIC_RELAXED);
    __atomic_signal_fence(__ATOMIC_SEQ_CST); /* the visitor's barrier makes it one for the core */
    if (__builtin_expect(__atomic_load_n(&lock->visited, __ATOMIC_ACQUIRE) == 0, 1)) return;
    __atomic_store_n(&lock->busy, 0, __ATOMIC_RELEASE);
    lock_acquire(&lock->visitors);
}

static inline void owner_leave(OwnerLock *lock) {
    if (__builtin_expect(__atomic_load_n(&lock->busy, __ATOMIC_RELAXED) != 0, 1))
        __atomic_store_n(&lock->busy, 0, __ATOMIC_RELEASE);
    else
        lock_release(&lock->visitors);
}

/* Any thread but the owner. */
static inline void visitor_enter(OwnerLock *lock) {
    lock_acquire(&lock->visitors);
    if (lock->visited == 2) return;
    __atomic_store_n(&lock->visited, 1, __ATOMIC_SEQ_CST);
    owner_barrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED);
    for (int i = 0; __atomic_load_n(&lock->busy, __ATOMIC_ACQUIRE) != 0; i++) {
        struct timespec nap = {0, OWNER_NAP_NS};
        if (i < OWNER_YIELDS)
            sched_yield();
        else
            nanosleep(&nap, NULL);
    }
}

static inline void visitor_leave(OwnerLock *lock) {
    if (lock->visited == 1) __atomic_store_n(&lock->visited, 0, __ATOMIC_RELEASE);
    lock_release(&lock->visitors);
}

/* Not 0, and different for threads that live at once. */
static inline uintptr_t thread_word(void) {
#if defined(__x86_64__) && defined(__GNUC__) && (__GNUC__ >= 11 || defined(__clang__))
    return (uintptr_t)__builtin_thread_pointer();
#else
    return (uintptr_t)pthread_self();
#endif
}

static __attribute__((noinline, unused)) void biased_enter_other(OwnerLock *lock, uintptr_t self) {
    uintptr_t none = 0;
    if (__atomic_load_n(&lock->owner, __ATOMIC_RELAXED) == none &&
        __atomic_compare_exchange_n(&lock->owner, &none, self, 0, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED)) {
        owner_enter(lock);
        return;
    }
    /* From here on all threads take the visitors' lock: the second thread will enter again, and each
     * visit would cost microseconds. */
    visitor_enter(lock);
    __atomic_store_n(&lock->visited, 2, __ATOMIC_RELAXED);
}

static inline void biased_enter(OwnerLock *lock) {
    uintptr_t self = thread_word();
    if (__builtin_expect(__atomic_load_n(&lock->owner, __ATOMIC_RELAXED) != self, 0))
        biased_enter_other(lock, self);
    else
        owner_enter(lock);
}

static inline void biased_leave(OwnerLock *lock) {
    if (__builtin_expect(__atomic_load_n(&lock->owner, __ATOMIC_RELAXED) == thread_word(), 1))
        owner_leave(lock);
    else
        visitor_leave(lock);
}

#endif
