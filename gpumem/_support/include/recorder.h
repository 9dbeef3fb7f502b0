/* Events of allocators, written at once into a ring in memory, or into a file.
 *
 * An event is a *slot* of 48 bytes; `seal` is written last, so that readers skip a slot that was
 * begun and never finished (the process was killed). Slots are claimed by one atomic addition, in
 * the order of the events of each block: an allocation is written after the block was allocated, a
 * free before the block is freed.
 *
 * In a file, slots follow a header of two slots, little-endian. Each event is one pwrite, so the file
 * has it when the process dies, however it dies. After a write that fails, the recorder writes no
 * further event, and the header counts the lost ones. In a ring each slot has a turn: odd while it is
 * written, else twice the lap it was written in; a writer that was held up for a whole lap drops its
 * event.
 *
 * An *event source* is the part of a resource to which a recorder is attached; one list has all of
 * the process. Each thread has its own state, and holds the lock of that (owner_lock.h) while it
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
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "files.h"
#include "lock.h"
#include "owner_lock.h"
#include "recorder_types.h"

enum {
    SLOT_BYTES = 48,
    HEADER_BYTES = 96,
    TEXT_BYTES = 40,        /* of a text in one slot */
    MAX_TEXT = 60000,       /* bytes; a longer text is cut */
    MAX_PARTS = 32,         /* slots of a text that are written together */
};
static const uint64_t BLOCK_MASK = ((uint64_t)1 << 48) - 1;

typedef struct RecThread {
    OwnerLock lock;
    uint64_t known_to; /* serial of the recorder that has this thread's name in its file */
    uint32_t random;
    uint16_t number;
    uint8_t framework;
    uint8_t capturing; /* inside the hook that reads the stack */
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
    uint64_t lost;  /* events that could not be written, as far as the file has been told */
    char padding[HEADER_BYTES - 48];
} RecHeader;

static __thread RecThread *rec_own;
static RecThread *rec_threads; /* all ever made; reused once their threads have ended */
static EventSource *rec_sources;
static uint64_t rec_sources_opened; /* so far */
static Recorder *rec_for_all; /* of sources that open later; NULL: none */
static Lock rec_lock;         /* the two lists, which recorder is attached to which source */
static uint32_t rec_generation;
static const uint32_t *rec_process; /* the process's generation, see _support/process */
static uint32_t rec_numbers;
static uint64_t rec_serials;
static int rec_biased;
/* Numbers the calling thread's stack, with native frames or without; NULL: stacks are not recorded. */
static uint16_t (*rec_stack)(int native);
/* The label of the calling thread; it may wait for the interpreter lock if that is allowed. */
static uint16_t (*rec_label)(int may_wait);
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

static uint8_t rec_set_framework(uint8_t framework) {
    RecThread *thread = rec_thread();
    if (thread == NULL) return 0;
    uint8_t before = thread->framework;
    thread->framework = framework;
    return before;
}

static int32_t rec_thread_id(uint16_t number) { return rec_thread_ids[number]; }
static void rec_set_stacks(uint16_t (*number)(int native)) { rec_stack = number; }

static int rec_init(const uint32_t *generation, uint16_t (*label)(int may_wait)) {
    rec_process = generation;
    rec_label = label;
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

static int rec_write_header(const Recorder *recorder, uint64_t slots) {
    RecHeader header = {.version = REC_VERSION, .slot_bytes = SLOT_BYTES, .slots = slots};
    memcpy(header.magic, REC_MAGIC, sizeof(header.magic));
    header.began = recorder->began_at;
    header.process = (uint64_t)getpid();
    header.lost = __atomic_load_n(&recorder->missed, __ATOMIC_RELAXED);
    return file_write(recorder->file, &header, sizeof(header), 0);
}

/* Counts lost events. A file is told at powers of two, so that it has more than half of them after
 * a kill. */
static void rec_miss(Recorder *recorder, uint64_t count) {
    uint64_t before = __atomic_fetch_add(&recorder->missed, count, __ATOMIC_RELAXED);
    if (recorder->file >= 0 && ((before + count) ^ before) > before) rec_write_header(recorder, 0);
}

/* Writes slots into a file. The first failure ends the recording. */
static void rec_write(Recorder *recorder, const uint64_t *words, uint64_t count) {
    if (__atomic_load_n(&recorder->failed, __ATOMIC_RELAXED) == 0) {
        uint64_t number = __atomic_fetch_add(&recorder->next, count, __ATOMIC_RELAXED);
        int code = file_write(recorder->file, words, count * SLOT_BYTES,
                              HEADER_BYTES + SLOT_BYTES * number);
        if (code == 0) return;
        __atomic_store_n(&recorder->failed, code, __ATOMIC_RELEASE);
    }
    rec_miss(recorder, count);
}

static inline void rec_put(Recorder *recorder, const uint64_t *words) {
    if (recorder->file >= 0) {
        rec_write(recorder, words, 1);
        return;
    }
    uint64_t number = __atomic_fetch_add(&recorder->next, 1, __ATOMIC_RELAXED);
    uint64_t at = number & recorder->mask;
    uint64_t turn = 2 * (number / (recorder->mask + 1));
    uint64_t seen = __atomic_load_n(&recorder->turns[at], __ATOMIC_RELAXED);
    if ((seen & 1) || seen > turn ||
        !__atomic_compare_exchange_n(&recorder->turns[at], &seen, turn + 1, 0, __ATOMIC_ACQUIRE,
                                     __ATOMIC_RELAXED)) {
        rec_miss(recorder, 1);
        return;
    }
    __atomic_thread_fence(__ATOMIC_RELEASE);
    uint64_t *slot = recorder->ring + 6 * at;
    for (int i = 0; i < 6; i++) __atomic_store_n(&slot[i], words[i], __ATOMIC_RELAXED);
    __atomic_store_n(&recorder->turns[at], turn + 2, __ATOMIC_RELEASE);
}

/* A name for a number, in a file: parts of 40 bytes, each of which says how much is left. */
static void rec_define(Recorder *recorder, unsigned what, unsigned number, const char *text,
                       size_t length) {
    uint64_t words[6 * MAX_PARTS];
    unsigned part = 0, filled = 0;
    if (recorder->file < 0) return;
    if (length > MAX_TEXT) length = MAX_TEXT;
    do {
        uint64_t *slot = words + 6 * filled++;
        size_t here = length < TEXT_BYTES ? length : TEXT_BYTES;
        memset(slot, 0, TEXT_BYTES);
        memcpy(slot, text, here);
        slot[5] = rec_seal(REC_DEFINE, what, part++, number, (unsigned)length);
        text += here;
        length -= here;
        if (length == 0 || filled == MAX_PARTS) {
            rec_write(recorder, words, filled);
            filled = 0;
        }
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

/* The number of the calling thread's stack, if it is sampled; 0: none. Caller holds no lock. */
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
    unsigned label = rec_label(may_wait && event->kind == REC_ALLOC);
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
        noted->seal = rec_seal(event->kind, thread->framework, thread->number, label, stack);
        uint64_t block = event->block < BLOCK_MASK ? event->block : BLOCK_MASK;
        uint64_t words[6] = {noted->time - recorder->began, event->address, event->nbytes,
                             block | (uint64_t)source->number << 48, event->stream, noted->seal};
        rec_put(recorder, words);
        noted->recorder = recorder->serial;
        if (event->kind == REC_ALLOC)
            noted->number = __atomic_fetch_add(&recorder->allocations, 1, __ATOMIC_RELAXED);
    }
    owner_leave(&thread->lock);
}

/* Writes an event of the program, which no resource has: a phase, or a category. Caller keeps the
 * recorder from ending. */
static void rec_mark(Recorder *recorder, uint32_t kind, uint64_t address, uint16_t label,
                     uint16_t module) {
    const RecThread *thread = rec_thread();
    if (thread == NULL || recorder->generation != *rec_process) return;
    uint64_t words[6] = {rec_now(CLOCK_MONOTONIC) - recorder->began, address, module,
                         (uint64_t)REC_NO_RESOURCE << 48, 0,
                         rec_seal(kind, thread->framework, thread->number, label, 0)};
    rec_put(recorder, words);
}

/* ---- event sources -------------------------------------------------------------------------- */

/* Caller holds `rec_lock`. The name is written first, before every event of the source. */
static int rec_attach(Recorder *recorder, EventSource *source) {
    char text[sizeof(source->memory) + sizeof(source->kind) + sizeof(source->name)];
    if (recorder->resources >= REC_NO_RESOURCE) return EOVERFLOW;
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

/* Attaches the recorder of another source, if there is one, to a source that has opened. */
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

static void rec_detach(const Recorder *recorder) { /* caller holds `rec_lock` */
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

/* Into an empty file that is open to read and write, and stays open until rec_free. NULL, and *code
 * says why. */
static Recorder *rec_make_file(int file, uint32_t sampling, int *code) {
    Recorder *recorder = rec_make(sampling);
    *code = ENOMEM;
    if (recorder == NULL) return NULL;
    recorder->file = file;
    *code = rec_write_header(recorder, 0);
    if (*code == 0) return recorder;
    rec_free(recorder);
    return NULL;
}

/* After rec_end: the file ends with its last slot, and its header says how many there are. Returns 0,
 * or an errno: ENODATA, if another process has shortened the file, which has a hole or lacks its end
 * then. */
static int rec_finish_file(Recorder *recorder) {
    struct stat found;
    uint64_t slots = recorder->next, end = HEADER_BYTES + SLOT_BYTES * slots;
    if (fstat(recorder->file, &found) != 0) return errno;
    uint64_t size = (uint64_t)found.st_size;
    if (recorder->failed != 0 && size < end) {
        slots = size > HEADER_BYTES ? (size - HEADER_BYTES) / SLOT_BYTES : 0;
        end = HEADER_BYTES + SLOT_BYTES * slots;
    }
    off_t hole = lseek(recorder->file, 0, SEEK_HOLE);
    int shortened = size < end || (hole >= 0 && (uint64_t)hole < end);
    int code = rec_write_header(recorder, slots);
    if (code == 0 && size > end && ftruncate(recorder->file, (off_t)end) != 0) code = errno;
    return code == 0 && shortened ? ENODATA : code;
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
