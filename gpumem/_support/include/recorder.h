/* Events of allocators, written down as they happen: into a ring in memory, or into a file.
 *
 * An event is a *slot* of 48 bytes; `seal` is written last, so that a slot that was begun and never
 * finished (the process was killed) is seen to be none. Slots are claimed by one atomic addition, in
 * the order of the events of each block: an allocation is written after the block was taken, a free
 * before it is released.
 *
 * In a file, slots follow a header of two slots, little-endian. The file is mapped
 * and shared, so what was written is in it when the process dies, however it dies; it grows by
 * windows whose room is asked of the file system beforehand, because a mapped page without room
 * would end the process. In a ring each slot has a turn: odd while it is written, else twice the lap
 * it was written in; a writer that was held up for a whole lap gives up its event.
 *
 * An *event source* is the part of a resource to which a recorder is attached; all of the process
 * are in one list. Each thread has a state of its own, whose lock (owner_lock.h) it holds while it
 * writes: after a recorder is detached from its sources and every thread was visited, it can be
 * freed.
 *
 * Included by one module only, since the thread-local storage is its own.
 */
#ifndef GPUMEM_RECORDER_H
#define GPUMEM_RECORDER_H

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "lock.h"
#include "owner_lock.h"
#include "recorder_types.h"

enum {
    SLOT_BYTES = 48,
    HEADER_BYTES = 96,
    TEXT_BYTES = 40,        /* of a text in one slot */
    LONGEST_TEXT = 60000,   /* bytes; what is longer is cut */
    WINDOW_BYTES = 1 << 20, /* of a file, by which it grows */
};
/* Addresses that a recorder of a file reserves, and so the longest file: 64 GiB. */
static const uint64_t FILE_BYTES = (uint64_t)64 << 30;
static const uint64_t BLOCK_MASK = ((uint64_t)1 << 48) - 1;

typedef struct RecThread {
    OwnerLock lock;
    uint64_t known_to; /* serial of the recorder that has this thread's name in its file */
    uint32_t random;
    uint16_t number;
    uint16_t tag;
    uint8_t framework;
    uint8_t capturing; /* inside the hook that looks at the stack */
    int32_t ended;
    struct RecThread *next;
} RecThread;

typedef struct RecHeader {
    char magic[8];
    uint32_t version;
    uint32_t slot_bytes;
    uint64_t began; /* ns since 1970 */
    uint64_t process;
    uint64_t slots; /* of a file that was finished; 0: it was not */
    char padding[HEADER_BYTES - 40];
} RecHeader;

static __thread RecThread *rec_own;
static RecThread *rec_threads; /* every one that there ever was; reused once its thread has ended */
static EventSource *rec_sources;
static uint64_t rec_sources_opened; /* so far */
static Recorder *rec_for_all; /* what sources that open get; NULL: nothing */
static Lock rec_lock;         /* the two lists, which recorder is attached to which source */
static uint32_t rec_generation;
static const uint32_t *rec_process; /* the process's generation, see _support/process */
static uint32_t rec_numbers;
static uint64_t rec_serials;
static int rec_biased;
/* Numbers the calling thread's stack, with native frames or without; NULL: stacks are not recorded. */
static uint16_t (*rec_stack)(int native);
static pthread_key_t rec_key;
static int32_t rec_thread_ids[65536]; /* number -> the system's id of the thread */

static inline uint64_t rec_now(int clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* In a fork's child the lists are the parent's, and another thread may have held the lock. */
static inline void rec_lock_acquire(void) {
    if (rec_generation != *rec_process) {
        rec_generation = *rec_process;
        lock_init(&rec_lock);
        rec_sources = NULL;
        rec_for_all = NULL;
        rec_threads = rec_own;
        if (rec_own != NULL) {
            rec_own->next = NULL;
            owner_lock_init(&rec_own->lock, rec_biased);
        }
    }
    lock_acquire(&rec_lock);
}

/* ---- threads -------------------------------------------------------------------------------- */

static void rec_thread_ends(void *thread) {
    rec_own = NULL;
    __atomic_store_n(&((RecThread *)thread)->ended, 1, __ATOMIC_RELEASE);
}

static RecThread *rec_thread_make(void) {
    rec_lock_acquire();
    RecThread *thread = rec_threads; /* the state of one that has ended, if there is any */
    while (thread != NULL && !__atomic_load_n(&thread->ended, __ATOMIC_ACQUIRE)) thread = thread->next;
    if (thread == NULL && (thread = calloc(1, sizeof(RecThread))) != NULL) {
        owner_lock_init(&thread->lock, rec_biased);
        thread->next = rec_threads;
        rec_threads = thread;
    }
    if (thread != NULL) {
        if (rec_numbers < 65535) rec_numbers++; /* the last number is shared by all further ones */
        thread->number = (uint16_t)rec_numbers;
        thread->random = rec_numbers * 2654435761u;
        thread->known_to = 0;
        thread->tag = 0;
        thread->framework = 0;
        thread->ended = 0;
        rec_thread_ids[thread->number] = (int32_t)syscall(SYS_gettid);
    }
    lock_release(&rec_lock);
    if (thread == NULL) return NULL;
    if (pthread_setspecific(rec_key, thread) != 0) {
        __atomic_store_n(&thread->ended, 1, __ATOMIC_RELEASE);
        return NULL;
    }
    return rec_own = thread;
}

static inline RecThread *rec_thread(void) { return rec_own != NULL ? rec_own : rec_thread_make(); }

static uint16_t rec_set_tag(uint16_t tag) {
    RecThread *thread = rec_thread();
    if (thread == NULL) return 0;
    uint16_t before = thread->tag;
    thread->tag = tag;
    return before;
}

static uint8_t rec_set_framework(uint8_t framework) {
    RecThread *thread = rec_thread();
    if (thread == NULL) return 0;
    uint8_t before = thread->framework;
    thread->framework = framework;
    return before;
}

static int32_t rec_thread_id(uint16_t number) { return rec_thread_ids[number]; }
static void rec_set_stacks(uint16_t (*number)(int native)) { rec_stack = number; }

static int rec_init(const uint32_t *generation) {
    rec_process = generation;
    rec_generation = *generation;
    rec_biased = owner_is_biased();
    lock_init(&rec_lock);
    return pthread_key_create(&rec_key, rec_thread_ends);
}

/* ---- slots ---------------------------------------------------------------------------------- */

static inline uint64_t rec_seal(unsigned kind, unsigned framework, unsigned thread, unsigned tag,
                                unsigned stack) {
    return (uint64_t)kind | (uint64_t)framework << 8 | (uint64_t)thread << 16 |
           (uint64_t)tag << 32 | (uint64_t)stack << 48;
}

/* Maps the file up to `end` bytes; 0 if it cannot be. */
static int rec_reach(Recorder *recorder, uint64_t end) {
    lock_acquire(&recorder->growing);
    while (recorder->mapped < end && recorder->failed == 0) {
        uint64_t at = recorder->mapped;
        int code = at + WINDOW_BYTES > FILE_BYTES
                       ? EFBIG
                       : posix_fallocate(recorder->file, (off_t)at, WINDOW_BYTES);
        if (code == 0 &&
            mmap(recorder->base + at, WINDOW_BYTES, PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_FIXED | MAP_POPULATE, recorder->file, (off_t)at) == MAP_FAILED)
            code = errno;
        if (code != 0)
            __atomic_store_n(&recorder->failed, code, __ATOMIC_RELEASE);
        else
            __atomic_store_n(&recorder->mapped, at + WINDOW_BYTES, __ATOMIC_RELEASE);
    }
    lock_release(&recorder->growing);
    return recorder->mapped >= end;
}

/* The next slot of a file; NULL: there is none. A window is opened half a window before it is
 * needed, by a thread that may wait, so that one that holds a lock hardly ever finds none. */
static inline uint64_t *rec_claim_file(Recorder *recorder, int may_wait) {
    if (__atomic_load_n(&recorder->failed, __ATOMIC_RELAXED) != 0) return NULL;
    uint64_t number = __atomic_fetch_add(&recorder->next, 1, __ATOMIC_RELAXED);
    uint64_t begin = HEADER_BYTES + SLOT_BYTES * number, ahead = begin + WINDOW_BYTES / 2;
    uint64_t mapped = __atomic_load_n(&recorder->mapped, __ATOMIC_ACQUIRE);
    if (__builtin_expect(ahead > mapped, 0) && may_wait) {
        rec_reach(recorder, ahead);
        mapped = __atomic_load_n(&recorder->mapped, __ATOMIC_ACQUIRE);
    }
    return begin + SLOT_BYTES <= mapped ? (uint64_t *)(recorder->base + begin) : NULL;
}

static inline void rec_put(Recorder *recorder, const uint64_t *words, int may_wait) {
    if (recorder->base != NULL) {
        uint64_t *slot = rec_claim_file(recorder, may_wait);
        if (slot != NULL) {
            memcpy(slot, words, 5 * sizeof(uint64_t));
            __atomic_store_n(&slot[5], words[5], __ATOMIC_RELEASE);
            return;
        }
    } else {
        uint64_t number = __atomic_fetch_add(&recorder->next, 1, __ATOMIC_RELAXED);
        uint64_t at = number & recorder->mask;
        uint64_t turn = 2 * (number / (recorder->mask + 1));
        uint64_t seen = __atomic_load_n(&recorder->turns[at], __ATOMIC_RELAXED);
        if (!(seen & 1) && seen <= turn &&
            __atomic_compare_exchange_n(&recorder->turns[at], &seen, turn + 1, 0, __ATOMIC_ACQUIRE,
                                        __ATOMIC_RELAXED)) {
            __atomic_thread_fence(__ATOMIC_RELEASE);
            uint64_t *slot = recorder->ring + 6 * at;
            for (int i = 0; i < 6; i++) __atomic_store_n(&slot[i], words[i], __ATOMIC_RELAXED);
            __atomic_store_n(&recorder->turns[at], turn + 2, __ATOMIC_RELEASE);
            return;
        }
    }
    __atomic_fetch_add(&recorder->missed, 1, __ATOMIC_RELAXED);
}

/* A name for a number, in a file: parts of 40 bytes, each of which says how much is left. */
static void rec_define(Recorder *recorder, unsigned what, unsigned number, const char *text,
                       size_t length) {
    unsigned part = 0;
    if (recorder->base == NULL) return;
    if (length > LONGEST_TEXT) length = LONGEST_TEXT;
    do {
        uint64_t words[6] = {0};
        size_t here = length < TEXT_BYTES ? length : TEXT_BYTES;
        memcpy(words, text, here);
        words[5] = rec_seal(REC_DEFINE, what, part++, number, (unsigned)length);
        rec_put(recorder, words, 1);
        text += here;
        length -= here;
    } while (length != 0);
}

/* ---- events --------------------------------------------------------------------------------- */

static inline int rec_sampled(RecThread *thread, uint32_t threshold) {
    thread->random ^= thread->random << 13; /* G. Marsaglia, "Xorshift RNGs" (2003) */
    thread->random ^= thread->random >> 17;
    thread->random ^= thread->random << 5;
    return thread->random < threshold || threshold == UINT32_MAX;
}

static inline Recorder *rec_of(const EventSource *source) {
    Recorder *recorder = __atomic_load_n(&source->recorder, __ATOMIC_ACQUIRE);
    return recorder != NULL && recorder->generation == *rec_process ? recorder : NULL;
}

/* The number of the calling thread's stack, where chance wants it; 0: none. Without a lock. */
static __attribute__((noinline)) uint16_t rec_sample(const EventSource *source, RecThread *thread) {
    owner_enter(&thread->lock);
    const Recorder *recorder = rec_of(source);
    uint32_t threshold = recorder != NULL ? recorder->sampling : 0;
    int native = recorder != NULL && recorder->native;
    owner_leave(&thread->lock);
    if (threshold == 0 || thread->capturing || rec_stack == NULL ||
        !rec_sampled(thread, threshold))
        return 0;
    thread->capturing = 1;
    uint16_t stack = rec_stack(native);
    thread->capturing = 0;
    return stack;
}

static void rec_note(EventSource *source, const RecEvent *event, int may_wait, RecNoted *noted) {
    RecThread *thread = rec_thread();
    unsigned stack = 0;
    noted->seal = 0;
    if (thread == NULL) return;
    if (rec_stack != NULL && may_wait && event->kind == REC_ALLOC)
        stack = rec_sample(source, thread);
    owner_enter(&thread->lock);
    Recorder *recorder = rec_of(source);
    if (recorder != NULL) {
        if (thread->known_to != recorder->serial && may_wait) {
            char text[24];
            int length = snprintf(text, sizeof(text), "%d", rec_thread_ids[thread->number]);
            thread->known_to = recorder->serial;
            rec_define(recorder, REC_THREADS, thread->number, text, (size_t)length);
        }
        noted->time = rec_now(CLOCK_MONOTONIC);
        noted->seal = rec_seal(event->kind, thread->framework, thread->number, thread->tag, stack);
        uint64_t block = event->block < BLOCK_MASK ? event->block : BLOCK_MASK;
        uint64_t words[6] = {noted->time - recorder->began, event->address, event->nbytes,
                             block | (uint64_t)source->number << 48, event->stream, noted->seal};
        rec_put(recorder, words, may_wait);
        noted->recorder = recorder->serial;
        if (event->kind == REC_ALLOC)
            noted->number = __atomic_fetch_add(&recorder->allocations, 1, __ATOMIC_RELAXED);
    }
    owner_leave(&thread->lock);
}

/* ---- event sources -------------------------------------------------------------------------- */

/* With the lock. The name goes first, so that every event of the source finds it. */
static int rec_attach(Recorder *recorder, EventSource *source) {
    char text[sizeof(source->memory) + sizeof(source->kind) + sizeof(source->name)];
    if (recorder->resources >= 65535) return EOVERFLOW;
    char **names = realloc(recorder->names, (recorder->resources + 1) * sizeof(char *));
    if (names == NULL) return ENOMEM;
    recorder->names = names;
    int length = snprintf(text, sizeof(text), "%s\t%s\t%s", source->memory, source->kind, source->name);
    names[recorder->resources] = strdup(text);
    if (names[recorder->resources] == NULL) return ENOMEM;
    source->number = (uint16_t)recorder->resources++;
    rec_define(recorder, REC_RESOURCES, source->number, text, (size_t)length);
    __atomic_store_n(&source->recorder, recorder, __ATOMIC_RELEASE);
    return 0;
}

static void rec_source_name(EventSource *source, const char *memory, const char *kind,
                            const char *name) {
    snprintf(source->memory, sizeof(source->memory), "%s", memory);
    snprintf(source->kind, sizeof(source->kind), "%s", kind);
    snprintf(source->name, sizeof(source->name), "%s", name);
}

static void rec_source_open(EventSource *source, void *owner, uint32_t owner_is) {
    source->owner = owner;
    source->owner_is = owner_is;
    rec_lock_acquire();
    source->generation = *rec_process;
    source->serial = ++rec_sources_opened;
    source->older = rec_sources;
    source->newer = NULL;
    if (rec_sources != NULL) rec_sources->newer = source;
    rec_sources = source;
    if (rec_for_all != NULL && rec_attach(rec_for_all, source) != 0)
        __atomic_fetch_add(&rec_for_all->missed, 1, __ATOMIC_RELAXED);
    lock_release(&rec_lock);
}

/* A source that has opened is recorded by what records another one, if anything does. */
static void rec_source_join(EventSource *source, const EventSource *other) {
    rec_lock_acquire();
    Recorder *recorder = other->recorder;
    if (recorder != NULL && source->recorder == NULL && rec_attach(recorder, source) != 0)
        __atomic_fetch_add(&recorder->missed, 1, __ATOMIC_RELAXED);
    lock_release(&rec_lock);
}

static void rec_source_close(EventSource *source) {
    if (source->owner == NULL) return; /* never opened */
    rec_lock_acquire();
    if (source->generation == *rec_process) {
        if (source->older != NULL) source->older->newer = source->newer;
        if (source->newer != NULL)
            source->newer->older = source->older;
        else
            rec_sources = source->older;
    }
    source->owner = NULL;
    source->recorder = NULL;
    lock_release(&rec_lock);
}

static void rec_visit(void (*visit)(EventSource *source, void *context), void *context) {
    rec_lock_acquire();
    for (EventSource *source = rec_sources; source != NULL; source = source->older)
        visit(source, context);
    lock_release(&rec_lock);
}

static void rec_detach(const Recorder *recorder) { /* with the lock */
    for (EventSource *source = rec_sources; source != NULL; source = source->older)
        if (source->recorder == recorder)
            __atomic_store_n(&source->recorder, NULL, __ATOMIC_RELEASE);
}

/* Attaches a recorder to one source, or to all and to those that open later. EBUSY: one has
 * another. */
static int rec_begin(Recorder *recorder, EventSource *only) {
    int code = 0;
    rec_lock_acquire();
    for (EventSource *source = only ? only : rec_sources; source != NULL && code == 0;
         source = only ? NULL : source->older)
        if (source->recorder != NULL) code = EBUSY;
    if (only == NULL && rec_for_all != NULL) code = EBUSY;
    for (EventSource *source = only ? only : rec_sources; source != NULL && code == 0;
         source = only ? NULL : source->older)
        code = rec_attach(recorder, source);
    if (code == 0 && only == NULL) rec_for_all = recorder;
    if (code != 0 && code != EBUSY) rec_detach(recorder);
    lock_release(&rec_lock);
    return code;
}

/* When this returns no thread writes with the recorder any more. */
static void rec_end(Recorder *recorder) {
    RecThread *own = rec_thread();
    rec_lock_acquire();
    if (rec_for_all == recorder) rec_for_all = NULL;
    rec_detach(recorder);
    for (RecThread *thread = rec_threads; thread != NULL; thread = thread->next) {
        if (thread == own) continue;
        visitor_enter(&thread->lock);
        visitor_leave(&thread->lock);
    }
    lock_release(&rec_lock);
}

/* ---- life ----------------------------------------------------------------------------------- */

static void rec_free(Recorder *recorder) {
    if (recorder->base != NULL) munmap(recorder->base, FILE_BYTES);
    for (uint32_t i = 0; i < recorder->resources; i++) free(recorder->names[i]);
    free(recorder->names);
    free(recorder->ring);
    free(recorder->turns);
    free(recorder);
}

static Recorder *rec_make(uint32_t sampling) {
    Recorder *recorder = calloc(1, sizeof(Recorder));
    if (recorder == NULL) return NULL;
    recorder->serial = __atomic_add_fetch(&rec_serials, 1, __ATOMIC_RELAXED);
    recorder->generation = *rec_process;
    recorder->sampling = sampling;
    recorder->file = -1;
    lock_init(&recorder->growing);
    recorder->began_at = rec_now(CLOCK_REALTIME);
    recorder->began = rec_now(CLOCK_MONOTONIC);
    return recorder;
}

/* `slots` is a power of two. NULL: no memory. */
static Recorder *rec_make_ring(uint64_t slots, uint32_t sampling) {
    Recorder *recorder = rec_make(sampling);
    if (recorder == NULL) return NULL;
    recorder->mask = slots - 1;
    recorder->ring = calloc(slots, SLOT_BYTES);
    recorder->turns = calloc(slots, sizeof(uint64_t));
    if (recorder->ring != NULL && recorder->turns != NULL) return recorder;
    rec_free(recorder);
    return NULL;
}

/* Into an empty file that is open to read and write. NULL, and *code says why. */
static Recorder *rec_make_file(int file, uint32_t sampling, int *code) {
    Recorder *recorder = rec_make(sampling);
    *code = ENOMEM;
    if (recorder == NULL) return NULL;
    recorder->file = file;
    void *base = mmap(NULL, FILE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    recorder->base = base == MAP_FAILED ? NULL : base;
    if (recorder->base == NULL || !rec_reach(recorder, WINDOW_BYTES)) {
        if (recorder->failed != 0) *code = recorder->failed;
        rec_free(recorder);
        return NULL;
    }
    RecHeader *header = (RecHeader *)recorder->base;
    header->version = REC_VERSION;
    header->slot_bytes = SLOT_BYTES;
    header->began = recorder->began_at;
    header->process = (uint64_t)getpid();
    memcpy(header->magic, REC_MAGIC, sizeof(header->magic));
    return recorder;
}

/* After rec_end: the file ends with its last slot, and its header says how many there are. */
static int rec_finish_file(Recorder *recorder) {
    uint64_t end = HEADER_BYTES + SLOT_BYTES * recorder->next;
    if (end > recorder->mapped) end = recorder->mapped;
    ((RecHeader *)recorder->base)->slots = (end - HEADER_BYTES) / SLOT_BYTES;
    return ftruncate(recorder->file, (off_t)end) == 0 ? 0 : errno;
}

/* Copies one event of a ring; 0 if it was overwritten during the copy, or never finished. */
static int rec_read_ring(const Recorder *recorder, uint64_t number, uint64_t *words) {
    uint64_t at = number & recorder->mask;
    uint64_t turn = 2 * (number / (recorder->mask + 1)) + 2;
    const uint64_t *slot = recorder->ring + 6 * at;
    if (__atomic_load_n(&recorder->turns[at], __ATOMIC_ACQUIRE) != turn) return 0;
    for (int i = 0; i < 6; i++) words[i] = __atomic_load_n(&slot[i], __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(&recorder->turns[at], __ATOMIC_RELAXED) == turn;
}

#endif
