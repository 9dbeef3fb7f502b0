/* Counters and words that several threads touch without a lock. */
#ifndef GPUMEM_ATOMICS_H
#define GPUMEM_ATOMICS_H

#include <stdint.h>

/* References: the last drop sees everything that was done under the others. Returns the new count. */
static inline int32_t count_add(int32_t *count, int32_t by) {
    return __atomic_add_fetch(count, by, __ATOMIC_ACQ_REL);
}

/* The same of a counter that only rises. */
static inline uint64_t count_up(uint64_t *count) {
    return __atomic_add_fetch(count, 1, __ATOMIC_ACQ_REL);
}

/* Sums for statistics: exact, ordered with nothing. */
static inline uint64_t sum_add(uint64_t *sum, uint64_t by) {
    return __atomic_add_fetch(sum, by, __ATOMIC_RELAXED);
}

/* Words that one side changes under a lock and another looks at without it: never torn, no order. */
static inline uint8_t load8(const uint8_t *word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
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

/* A word that says how much of a table is filled, or a sum: who sees it sees what was done before. */
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

#endif
