/* Structs that threads share, laid out by cache lines. */
#ifndef GPUMEM_LINES_H
#define GPUMEM_LINES_H

#include <stdlib.h>
#include <string.h>

enum { CACHE_LINE = 64 };

/* A member of no size: the next member of a struct begins a cache line. */
typedef struct LineStart {
    char none[0];
} __attribute__((aligned(CACHE_LINE))) LineStart;

/* Zeroed memory that begins with a cache line and shares none; `free` frees it. */
static inline void *lines_alloc(size_t bytes) {
    bytes = (bytes + CACHE_LINE - 1) & ~(size_t)(CACHE_LINE - 1);
    void *lines = aligned_alloc(CACHE_LINE, bytes);
    if (lines != NULL) memset(lines, 0, bytes);
    return lines;
}

#endif
