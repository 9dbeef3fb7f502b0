/* Counters, words and pointers that several threads access without a lock. */
#ifndef GPUMEM_ATOMICS_H
#define GPUMEM_ATOMICS_H

#include <stddef.h>
#include <stdint.h>

/* References: the last drop sees all writes before the others. Returns the new count. */
static inline int32_t count_add(int32_t *count, int32_t by) {
    return __atomic_add_fetch(count, by, __ATOMIC_ACQ_REL);
}

/* One reference more, unless the last was dropped. */
static inline int count_retain_live(int32_t *count) {
    int32_t seen = __atomic_load_n(count, __ATOMIC_RELAXED);
    while (seen > 0 && !__atomic_compare_exchange_n(count, &seen, seen + 1, 1, __ATOMIC_ACQ_REL,
                                                    __ATOMIC_RELAXED)) {
    }
    return seen > 0;
}

/* The count of this moment; ordered with nothing. */
static inline int32_t count_now(const int32_t *count) {
    return __atomic_load_n(count, __ATOMIC_RELAXED);
}

/* The same as `count_add` of 64 bits. */
static inline uint64_t count64_add(uint64_t *count, uint64_t by) {
    return __atomic_add_fetch(count, by, __ATOMIC_ACQ_REL);
}

/* Sums for statistics: exact, ordered with nothing. Returns the new sum. */
static inline uint64_t sum_add(uint64_t *sum, uint64_t by) {
    return __atomic_add_fetch(sum, by, __ATOMIC_RELAXED);
}
/* The same for a sum with a limit: adds nothing and returns 0 where the sum would pass it. */
static inline int sum_try(uint64_t *sum, uint64_t by, uint64_t limit) {
    uint64_t seen = __atomic_load_n(sum, __ATOMIC_RELAXED);
    do {
        if (by > limit || seen > limit - by) {
            return 0;
        }
    } while (!__atomic_compare_exchange_n(sum, &seen, seen + by, 1, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    return 1;
}
/* A peak only rises. If another thread was faster, `seen` becomes the current value. */
static inline int peak_try(uint64_t *peak, uint64_t *seen, uint64_t value) {
    return __atomic_compare_exchange_n(peak, seen, value, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

/* Words that are written under a lock and read without it: never torn, no order. */
static inline uint8_t load8(const uint8_t *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}
static inline void store8(uint8_t *word, uint8_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}
static inline uint32_t load32(const uint32_t *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}
static inline void store32(uint32_t *word, uint32_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}
static inline uint64_t load64(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}
static inline void store64(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

/* A word that changes under a lock, and that is read without it. */
static inline void locked_add64(uint64_t *word, uint64_t by) {
    store64(word, *word + by);
}
static inline void locked_raise64(uint64_t *peak, uint64_t value) {
    if (value > *peak) store64(peak, value);
}

/* A word such as the fill of a table: a thread that reads it sees all writes before it. */
static inline uint8_t published8(const uint8_t *word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
static inline void publish8(uint8_t *word, uint8_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
static inline uint32_t published32(const uint32_t *word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
static inline void publish32(uint32_t *word, uint32_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
static inline uint64_t published64(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
static inline void publish64(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
static inline void *published_pointer(const void *at) {
    return __atomic_load_n((void *const *)at, __ATOMIC_ACQUIRE);
}
static inline void publish_pointer(void **at, void *value) {
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}

/* A record that its readers check instead of locking it: its version is 0 while it is written, and
   is published again with `publish32`. A reader compares the version before and after its copy. */
static inline void version_begin(uint32_t *version) {
    __atomic_store_n(version, 0, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
}
static inline uint32_t version_of(const uint32_t *version) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(version, __ATOMIC_ACQUIRE);
}

/* A flag that one thread finds set. */
static inline int flag_take(uint32_t *flag) {
    return __atomic_exchange_n(flag, 0, __ATOMIC_ACQ_REL) != 0;
}

/* A pointer that threads replace. `pointer_try` stores `value` if `seen` is still there. */
static inline void *pointer_swap(void **at, void *value) {
    return __atomic_exchange_n(at, value, __ATOMIC_ACQ_REL);
}
static inline int pointer_try(void **at, void *seen, void *value) {
    return __atomic_compare_exchange_n(at, &seen, value, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

/* The head of a list as one word: many threads push, one takes all, and sees all that was pushed.
   A push that fails sets `seen` to the current head. */
static inline int head_try(uint64_t *head, uint64_t *seen, uint64_t wanted) {
    return __atomic_compare_exchange_n(head, seen, wanted, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}
static inline uint64_t head_take(uint64_t *head) {
    return __atomic_exchange_n(head, 0, __ATOMIC_ACQUIRE);
}

#endif
