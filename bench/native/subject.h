/* An allocator under test, and what is measured of it.
 *
 * Every allocator is called through the same two function pointers, so that what the call itself
 * costs is the same for all, and is measured with an allocator that does nothing.
 */
#ifndef BENCH_SUBJECT_H
#define BENCH_SUBJECT_H

#include <cstddef>
#include <cstdint>

struct Subject {
    void *state;
    uint64_t (*allocate)(void *state, uint64_t size, uint32_t stream); /* a handle, or FAILED */
    void (*release)(void *state, uint64_t handle, uint32_t stream);
    void (*destroy)(void *state); /* every handle was released; may be NULL */
};

const uint64_t FAILED = ~UINT64_C(0);

/* One replacement of a live block: free what is in the slot, allocate a new one of that size. */
struct Step {
    uint64_t size;
    uint64_t slot;
};

/* The baselines; both with gpumem's lock and the same statistics. */
Subject subject_nothing();
Subject subject_binned_sets(uint64_t bytes); /* 21 bins of ordered sets, ONNX Runtime's split rule */
Subject subject_best_fit(uint64_t bytes);    /* one ordered set, exact split */
Subject subject_bitmap_bins(uint64_t bytes); /* two levels of bitmaps over lists, any fit */
/* A C library's malloc and free, by their addresses. */
Subject subject_malloc(void *malloc, void *free);

/* Nanoseconds of all steps; 0 if an allocation failed. */
uint64_t run_pairs(const Subject *subject, uint64_t *handles, const Step *steps, size_t count,
                   uint32_t stream);

/* Nanoseconds of each free and each allocation by itself, the clock's own cost taken off; false if
 * an allocation failed. */
bool run_latencies(const Subject *subject, uint64_t *handles, const Step *steps, size_t count,
                   uint32_t stream, float *free_ns, float *allocate_ns);

/* Several threads at once, each on a CPU of its own of those that the caller may use, with its own
 * allocator, which may be the same for all, slots and stream; the mean of their nanoseconds. */
uint64_t run_threads(const Subject *const *subjects, uint64_t **handles, const Step *const *steps,
                     size_t count, const uint32_t *streams, int threads);

/* One thread allocates, another frees; nanoseconds from the first to the last. */
uint64_t run_handoff(const Subject *subject, const Step *steps, size_t count, uint32_t stream);

#endif
