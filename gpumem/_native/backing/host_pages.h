/* Pages of the host, made by several threads while the caller uses those that are made already.
 *
 * The kernel clears a page when it is first touched, one core at a few GB/s: for pinned memory that
 * is most of the time. MADV_POPULATE_WRITE makes pages, because it fails where no memory is left;
 * where the kernel has no such advice, each page is touched.
 *
 * The caller takes the pages in order, from the first on, and owns them from then on; all
 * others are freed at the end.
 */
#ifndef GPUMEM_HOST_PAGES_H
#define GPUMEM_HOST_PAGES_H

#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "mappings.h"
#include "meminfo.h"
#include "threads.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

enum {
    HUGE_PAGE_BYTES = 2 << 20,      /* the pages begin at a multiple of it */
    HOST_PAGES_THREADS = 15,        /* at most, in addition to the caller */
    HOST_PAGES_PER_THREAD = 32 << 20,       /* less is done before another thread has started */
    HOST_PAGES_PIECE = 16 << 20,    /* bytes that a thread makes at a time */
    HOST_RESERVE = 256 << 20,       /* bytes that pinned memory leaves to the host's other work */
    PREFERRED_NODE = 1,             /* MPOL_PREFERRED */
    MAX_NODES = 1024,
};

typedef struct HostPages {
    char *base;         /* NULL: there are none */
    size_t nbytes;
    size_t taken;       /* bytes, from the first on, that are the caller's */
    pthread_mutex_t lock;           /* guards the fields below */
    pthread_cond_t changed;         /* a piece was made */
    size_t next;        /* offset of the piece that is made next */
    size_t making[HOST_PAGES_THREADS + 1];  /* offset of each thread's piece; SIZE_MAX: none */
    int failed;         /* no memory is left */
    int thread_count;   /* without the caller, which has the last place in `making` */
    pthread_t threads[HOST_PAGES_THREADS];
} HostPages;

static inline size_t whole_pages(size_t nbytes) {
    size_t page = (size_t)getpagesize();
    return (nbytes + page - 1) / page * page;
}

static inline size_t smaller_size(size_t one, size_t other) { return one < other ? one : other; }

/* A preference: where the kernel refuses it, the pages come from any node. */
static inline void prefer_node(void *at, size_t nbytes, int node) {
    unsigned long mask[MAX_NODES / (8 * sizeof(unsigned long))] = {0};
    if (node < 0 || node >= MAX_NODES) return;
    mask[node / (8 * sizeof mask[0])] |= 1ul << (node % (8 * sizeof mask[0]));
    syscall(SYS_mbind, at, nbytes, PREFERRED_NODE, mask, (unsigned long)MAX_NODES, 0u);
}

static inline int populate(char *at, size_t nbytes) {
    size_t page = (size_t)getpagesize();
    while (madvise(at, nbytes, MADV_POPULATE_WRITE) != 0) {
        if (errno == EINTR || errno == EAGAIN) continue;
        if (errno != EINVAL) return -1;
        for (size_t i = 0; i < nbytes; i += page) ((volatile char *)at)[i] = 0;
        return 0;
    }
    return 0;
}

/* Makes pieces below `end`, one after the other. Caller holds `lock`, which is released during the
 * work on each piece. */
static inline void make_pieces(HostPages *pages, int place, size_t end) {
    while (!pages->failed && pages->next < end) {
        size_t at = pages->next;
        int failed;
        pages->next += HOST_PAGES_PIECE;
        pages->making[place] = at;
        pthread_mutex_unlock(&pages->lock);
        failed = populate(pages->base + at, smaller_size(HOST_PAGES_PIECE, pages->nbytes - at));
        pthread_mutex_lock(&pages->lock);
        pages->making[place] = SIZE_MAX;
        pages->failed |= failed != 0;
        pthread_cond_broadcast(&pages->changed);
    }
}

static inline void *make_all_pieces(void *shared) {
    HostPages *pages = (HostPages *)shared;
    int place = 0;
    pthread_mutex_lock(&pages->lock);
    while (!pthread_equal(pages->threads[place], pthread_self())) place++;
    make_pieces(pages, place, pages->nbytes);
    pthread_mutex_unlock(&pages->lock);
    return NULL;
}

/* Starts threads. They begin when all are there: the stack
 * of a new thread needs the lock of the process's mappings, which those that make pages hold. Where
 * no further thread can be started, fewer do the work.
 */
static inline void start_threads(HostPages *pages) {
    size_t wanted = smaller_size(pages->nbytes / HOST_PAGES_PER_THREAD, HOST_PAGES_THREADS);
    cpu_set_t cpus;
    if (sched_getaffinity(0, sizeof cpus, &cpus) != 0) return;
    wanted = smaller_size(wanted, (size_t)CPU_COUNT(&cpus) - 1);
    pthread_mutex_lock(&pages->lock);
    while (pages->thread_count < (int)wanted &&
           thread_start(&pages->threads[pages->thread_count], 0, 0, make_all_pieces, pages) == 0)
        pages->thread_count++;
    pthread_mutex_unlock(&pages->lock);
}

/* Whether the host has memory left for pages. Otherwise the kernel would end processes to make room,
 * and a control group those of the group. A small group keeps a sixteenth. */
static inline int host_has_room(size_t nbytes) {
    GroupMemory group = group_memory(CONTROL_GROUPS);
    uint64_t available = memory_available_in(group);
    uint64_t kept = smaller_size(HOST_RESERVE, group.limit / 16);
    return available == 0 || (kept < available && nbytes <= available - kept);
}

/* Begins to make pages, on `node` if possible (-1: on any). False: the host has no memory, and
 * there are none. `host_pages_end` ends it.
 */
static inline int host_pages_begin(HostPages *pages, size_t nbytes, int node) {
    memset(pages, 0, sizeof *pages);
    memset(pages->making, 0xff, sizeof pages->making);
    nbytes = whole_pages(nbytes);
    if (!host_has_room(nbytes)) return 0;
    pages->base = (char *)map_aligned(nbytes, HUGE_PAGE_BYTES, PROT_READ | PROT_WRITE, 0);
    if (pages->base == NULL) return 0;
    madvise(pages->base, nbytes, MADV_HUGEPAGE);
    /* A fork must not mark these pages copy-on-write: the parent's next write would move its data
     * away from the page that the device reads. */
    madvise(pages->base, nbytes, MADV_DONTFORK);
    prefer_node(pages->base, nbytes, node);
    pages->nbytes = nbytes;
    pthread_mutex_init(&pages->lock, NULL);
    pthread_cond_init(&pages->changed, NULL);
    start_threads(pages);
    return 1;
}

static inline size_t host_pages_left(const HostPages *pages) {
    return pages->nbytes - pages->taken;
}

/* Returns the bytes that are made, from the first on. Caller holds `lock`. */
static inline size_t made_bytes(const HostPages *pages) {
    size_t made = smaller_size(pages->next, pages->nbytes);
    for (int i = 0; i <= pages->thread_count; i++) made = smaller_size(made, pages->making[i]);
    return made;
}

/* Takes the next `nbytes`, rounded up to pages, of those that are left, and helps to make them.
 * NULL: the host has no memory, and nothing is taken.
 */
static inline char *host_pages_take(HostPages *pages, size_t nbytes) {
    char *at = pages->base + pages->taken;
    size_t end = pages->taken + whole_pages(nbytes);
    int failed;
    pthread_mutex_lock(&pages->lock);
    make_pieces(pages, pages->thread_count, end);
    while (!pages->failed && made_bytes(pages) < end)
        pthread_cond_wait(&pages->changed, &pages->lock);
    failed = pages->failed;
    pthread_mutex_unlock(&pages->lock);
    if (failed) return NULL;
    pages->taken = end;
    return at;
}

/* Ends the threads, and frees the pages that were not taken. Without effect where there are none.
 */
static inline void host_pages_end(HostPages *pages) {
    if (pages->base == NULL) return;
    pthread_mutex_lock(&pages->lock);
    pages->next = pages->nbytes;
    pthread_mutex_unlock(&pages->lock);
    for (int i = 0; i < pages->thread_count; i++) pthread_join(pages->threads[i], NULL);
    pthread_cond_destroy(&pages->changed);
    pthread_mutex_destroy(&pages->lock);
    if (host_pages_left(pages))
        munmap(pages->base + pages->taken, host_pages_left(pages));
    memset(pages, 0, sizeof *pages);
}

#endif
