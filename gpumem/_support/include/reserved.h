/* Arrays that grow without moving: addresses are reserved once, memory is committed as needed.
 *
 * So an index may be turned into a pointer without a lock while another thread grows the array.
 * Reserved addresses cost no memory; fresh memory is zero.
 */
#ifndef GPUMEM_RESERVED_H
#define GPUMEM_RESERVED_H

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/resource.h>

/* Bounds a reservation to a sixteenth of the addresses that the process may use (RLIMIT_AS), so that
 * all reservations of an arena leave some for others. Without such a limit it returns `wanted`. */
static inline uint64_t addresses_bound(uint64_t wanted) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return wanted;
    return wanted < limit.rlim_cur / 16 ? wanted : limit.rlim_cur / 16;
}

/* Returns NULL if the process has no addresses left. */
static inline void *reserved_open(size_t bytes) {
    void *base = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return base == MAP_FAILED ? NULL : base;
}

/* Makes the first `bytes` usable; 0 on success. Nothing changes on failure. */
static inline int reserved_commit(void *base, size_t bytes) {
    return mprotect(base, bytes, PROT_READ | PROT_WRITE);
}

static inline void reserved_close(void *base, size_t bytes) {
    if (base != NULL) munmap(base, bytes);
}

#endif
