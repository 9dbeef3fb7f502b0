/* Mappings of this process: aligned ones, and whether some exist. */
#ifndef GPUMEM_MAPPINGS_H
#define GPUMEM_MAPPINGS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

/* Maps private pages at a multiple of `alignment`, a power of two: it maps more than is wanted and
 * unmaps the ends. `flags` are further ones, such as MAP_NORESERVE. NULL: refused. */
static inline void *map_aligned(size_t bytes, size_t alignment, int protection, int flags) {
    if (bytes > SIZE_MAX - alignment) return NULL;
    char *start = (char *)mmap(NULL, bytes + alignment, protection,
                               MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    if (start == MAP_FAILED) return NULL;
    size_t before = -(uintptr_t)start & (alignment - 1);
    if (before) munmap(start, before);
    munmap(start + before + bytes, alignment - before);
    return start + before;
}

/* The kernel reads its list of mappings, not the pages. */
static inline int pages_exist(uintptr_t address, size_t bytes) {
    uintptr_t first = address & ~((uintptr_t)getpagesize() - 1);
    return msync((void *)first, address + bytes - first, MS_ASYNC) == 0;
}

#endif
