/* The hooks of the instruments: all that the device's own code calls of this folder.
 *
 * A reader of the device may skip every call of count_, inject_, spend_, delay_ or watch_,
 * and every WATCH. While its instrument is off a hook does nothing, at the price
 * of one relaxed load. controls.h is what switches the instruments on.
 *
 * Third part of internal.h, which includes it at its end; no other file does.
 */
#ifndef GPUMEM_HOSTDEV_INSTRUMENTS_H
#define GPUMEM_HOSTDEV_INSTRUMENTS_H

#include "controls.h"

/* ---- counts of calls (counts.c) ---- */

extern _Atomic uint64_t host_call_counts[HOST_CALL_COUNT];
int host_call_number(const char *name); /* -1: not in the table */

static inline void count_call(Call call) {
    atomic_fetch_add_explicit(&host_call_counts[call], 1, memory_order_relaxed);
}

/* ---- faults, costs, late records (faults.c) ---- */

extern _Atomic bool host_faults_armed; /* any of these three is on */
CUresult host_fault(Call call);
void host_spend(Call call, size_t handles);
uint64_t host_record_delay(void); /* ns */

static inline bool host_faulty(void) {
    return atomic_load_explicit(&host_faults_armed, memory_order_relaxed);
}
/* The error that the call returns instead of doing anything; it also takes its time here. */
static inline CUresult inject_fault(Call call) {
    return host_faulty() ? host_fault(call) : CUDA_SUCCESS;
}
/* One call that named `handles` of them costs as much as that many calls. */
static inline void spend_handles(Call call, size_t handles) {
    if (handles > 1 && host_faulty()) host_spend(call, handles - 1);
}
/* Before an event keeps the point that it marks. */
static inline void delay_record(Point *point) {
    uint64_t late = host_faulty() ? host_record_delay() : 0;
    if (late) point->due = (point->due ? point->due : host_now()) + late;
}

/* ---- misuse: known order (order.c, shadow.c), findings (misuse.c, graves.c) ---- */

typedef struct Known Known;
typedef struct Access { /* a stream's or the host's use of some bytes */
    uint32_t slot;      /* of the stream, + 1; 0: the host */
    uint64_t number;    /* of the operation there */
    uint64_t stream;    /* its id, for messages */
} Access;
typedef struct Bytes {
    uintptr_t named; /* the address that was used */
    uintptr_t marks; /* the key of their marks: one for one page, wherever it is mapped */
    size_t size;
} Bytes;
typedef bool (*Ordered)(const Access *access, const void *data);

/* Returns what a recorded event keeps. Caller holds the locks of event and stream. */
Known *host_order_record(Stream *stream, Point point);
/* Notes the order that the default stream's rules give the stream's next operation. Caller does
 * not hold the stream's lock. */
void host_order_begin(Stream *stream);
/* The stream waits for an event's latest record, or for a point. Caller holds the event's lock. */
void host_order_stream_saw(Stream *stream, const Known *known, Point point);
void host_order_stream_after(Stream *stream, Point point);
void host_order_stream_after_all(Stream *stream, bool all); /* else after the blocking ones */
/* The host saw that this record of an event has been passed. Caller holds no lock. */
void host_order_event_seen(CUevent handle, Point point);
/* The host has waited for the stream; for the legacy stream: for all blocking ones. */
void host_order_host_after(Stream *stream);
void host_order_host_after_all(Context *context);
/* Operation `number` was queued. Caller holds the stream's lock. */
void host_order_op(Stream *stream, uint64_t number, const Op *op);
/* A graph was queued as one operation. Caller holds the stream's lock, so that its worker has
 * neither begun nor dropped the program. */
void host_order_program(Stream *stream, const Program *program);
void host_order_copy(Stream *stream, uint64_t number, const Copy *copy); /* NULL: the host copies */
/* Memory was allocated, and has not been accessed. Caller holds `map_lock` for writing. */
void host_order_fresh(uintptr_t address, size_t size);
/* A pool's block was allocated, or is being freed; NULL: by the host. Caller holds the stream's
 * lock. */
void host_order_block_begins(Stream *stream, uintptr_t base, size_t size);
void host_order_block_ends(Stream *stream, uintptr_t address);
/* The latest operation waits for a semaphore, or signals one. Caller holds the stream's lock. */
void host_order_loosen(Stream *stream);
void host_order_publish(Stream *stream);
void host_order_start(void);
void host_order_reborn(void);

void host_shadow_touch(Access access, Bytes bytes, bool write, Ordered ordered, const void *data);
void host_shadow_forget(uintptr_t address, size_t size);
void host_shadow_reborn(void);

void host_grave_add(Range *range);
/* Whether bytes that no range holds were freed during the search. Caller holds `map_lock`. */
bool watch_names_freed(uintptr_t address, size_t size);
/* Whether bytes lie in a segment, but in no used block of it. Caller holds `map_lock`. */
bool host_free_block_named(uintptr_t address, size_t size);
void host_graves_reborn(void);

extern _Atomic bool host_misuse_on;
void host_misuse_unordered(Access access, bool writes, Access before, bool wrote, Bytes bytes);
void host_misuse_context(Context *context, CUstream stream); /* is it the current one? */
void host_misuse_use_after_free(uintptr_t address, size_t size);
void host_misuse_leaks(void);

static inline bool host_misuse(void) {
    return atomic_load_explicit(&host_misuse_on, memory_order_relaxed);
}

/* Runs a statement only during the search for misuse. */
#define WATCH(action)              \
    do {                           \
        if (host_misuse()) action; \
    } while (0)
/* Device memory was freed. True: its addresses stay reserved for ever, and the range with them. */
static inline bool watch_bury(Range *range) {
    bool buries = range->kind == RANGE_DEVICE && host_misuse();
    if (buries) host_grave_add(range);
    return buries;
}

#endif
