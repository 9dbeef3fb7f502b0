/* The state of a thread: its caches, by arena, and whether it still lives.
 *
 * Included by one module only, since the thread-local storage is its own. Arenas are told apart by
 * serial numbers that are never used again, so that a thread may remember one that is long gone.
 */
#ifndef GPUMEM_THREAD_CACHE_H
#define GPUMEM_THREAD_CACHE_H

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

/* Outlives its thread for as long as a cache names it. */
typedef struct ThreadMark {
    int32_t references;
    int32_t ended;
} ThreadMark;

typedef struct CacheRef {
    uint64_t serial;
    void *cache;
} CacheRef;

enum { CACHE_REFS = 16 };

static __thread CacheRef cache_refs[CACHE_REFS];
static __thread ThreadMark *own_mark;
static pthread_key_t mark_key;
static pthread_once_t mark_once = PTHREAD_ONCE_INIT;

static inline void mark_retain(ThreadMark *mark) {
    __atomic_add_fetch(&mark->references, 1, __ATOMIC_RELAXED);
}

static inline void mark_drop(ThreadMark *mark) {
    if (__atomic_sub_fetch(&mark->references, 1, __ATOMIC_ACQ_REL) == 0) free(mark);
}

static inline int mark_ended(const ThreadMark *mark) {
    return __atomic_load_n(&mark->ended, __ATOMIC_ACQUIRE);
}

static void thread_ends(void *mark) {
    own_mark = NULL;
    for (int i = 0; i < CACHE_REFS; i++) cache_refs[i].serial = 0;
    __atomic_store_n(&((ThreadMark *)mark)->ended, 1, __ATOMIC_RELEASE);
    mark_drop((ThreadMark *)mark);
}

static void make_mark_key(void) { pthread_key_create(&mark_key, thread_ends); }

/* The calling thread's mark; NULL: out of host memory. */
static inline ThreadMark *thread_mark(void) {
    if (own_mark != NULL) return own_mark;
    ThreadMark *mark = calloc(1, sizeof(ThreadMark));
    if (mark == NULL) return NULL;
    pthread_once(&mark_once, make_mark_key);
    mark->references = 1;
    if (pthread_setspecific(mark_key, mark) != 0) {
        free(mark);
        return NULL;
    }
    return own_mark = mark;
}

static inline void *cache_remembered(uint64_t serial) {
    CacheRef *ref = &cache_refs[serial % CACHE_REFS];
    return ref->serial == serial ? ref->cache : NULL;
}

static inline void cache_remember(uint64_t serial, void *cache) {
    cache_refs[serial % CACHE_REFS].serial = serial;
    cache_refs[serial % CACHE_REFS].cache = cache;
}

#endif
