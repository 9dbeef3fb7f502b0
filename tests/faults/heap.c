// Replaces malloc, calloc, realloc, aligned_alloc and strdup of the C library: one call that comes
// from a watched range of code can be made to fail. Everything else is the C library's.

#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *memory, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);

enum { MOST_RANGES = 512 };

static struct {
    uintptr_t begin, end;
} ranges[MOST_RANGES];
static atomic_int range_count;
static atomic_long calls;         // from watched ranges
static atomic_long due;           // the call that fails: 1 is the next, 0 none
static atomic_uintptr_t failed;   // where the call came from

void heap_watch(uintptr_t begin, uintptr_t end) {
    int count = atomic_load(&range_count);
    if (count == MOST_RANGES)
        return;
    ranges[count].begin = begin;
    ranges[count].end = end;
    atomic_store(&range_count, count + 1);
}

long heap_count(void) {
    return atomic_load(&calls);
}

void heap_fail(long after) {
    atomic_store(&due, 0);
    atomic_store(&failed, 0);
    atomic_store(&due, after);
}

uintptr_t heap_failed(void) {
    return atomic_load(&failed);
}

static int fails(const void *from) {
    uintptr_t caller = (uintptr_t)from;
    int count = atomic_load_explicit(&range_count, memory_order_acquire);
    int i = 0;
    while (i < count && (caller < ranges[i].begin || caller >= ranges[i].end))
        i++;
    if (i == count)
        return 0;
    atomic_fetch_add(&calls, 1);
    if (atomic_load(&due) <= 0 || atomic_fetch_sub(&due, 1) != 1)
        return 0;
    atomic_store(&failed, caller);
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t size) {
    return fails(__builtin_return_address(0)) ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size) {
    return fails(__builtin_return_address(0)) ? NULL : __libc_calloc(count, size);
}

void *realloc(void *memory, size_t size) {
    return fails(__builtin_return_address(0)) ? NULL : __libc_realloc(memory, size);
}

void *aligned_alloc(size_t alignment, size_t size) {
    return fails(__builtin_return_address(0)) ? NULL : __libc_memalign(alignment, size);
}

char *strdup(const char *text) {
    size_t size = strlen(text) + 1;
    char *copy = fails(__builtin_return_address(0)) ? NULL : __libc_malloc(size);
    return copy ? memcpy(copy, text, size) : NULL;
}
