/* The inside of the host device: its objects, their owners, and the order of its locks.
 *
 * Objects. A handle that the caller holds (stream, event, ...) is not a pointer but a
 * number: kind, birth (which process after how many forks), generation and index of a
 * slot. Slots are never freed, so any number can be looked up, and a stale handle is
 * distinguished from its slot's next tenant. An object found by a handle is used under
 * the object's own lock, after comparing the handle once more.
 *
 * Streams. A stream is a ring of operations numbered from 1. `submitted` and `completed`
 * are the last numbers put in and finished; they never decrease, not even when the slot
 * gets a new tenant, so "stream s has passed n" (a Point) is one comparison, needs no
 * reference and stays true for ever. An event is a Point and a time. A wait is an
 * operation that holds a Point. Points only ever name operations that were already
 * queued, so waits cannot form a cycle.
 *
 * Memory. One ordered map holds every range of the device (allocations, pinned
 * and registered ranges, mappings, segments of pools), a second one the reserved address
 * ranges, a third the allocations inside segments: queued work may still use a block that
 * is free or has another owner by now, so access is a matter of the segment. Code that
 * accesses bytes for the device holds the map for reading, a piece at a time: after a free
 * or an unmap has returned, nothing writes there any more.
 *
 * Lock order. Take only downwards; two locks of one line never together.
 *   1  host.setup_lock        device count, capacity, contexts' reference counts
 *   2  Context.lock           the context's list of streams
 *   3  Stream.lock            the ring and the worker's state
 *   4  Event.lock             the latest record
 *   5  Pool.lock              segments and blocks of a pool; Graph.lock; capture_lock
 *   6  host.map_lock (rw)     the maps and everything that hangs on a Range
 *   7  Table.lock             free slots of one kind of object
 *   8  host.value_lock, host.worker_lock, faults, order: leaves
 * No lock is held while a host function runs.
 */
#ifndef GPUMEM_HOSTDEV_INTERNAL_H
#define GPUMEM_HOSTDEV_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "hostdev.h"
#include "timeline_page.h"

#define HOST_HIDDEN __attribute__((visibility("hidden")))
#pragma GCC visibility push(hidden)

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
enum {
    HOST_SMALL_UNIT = 512,     /* bytes: alignment and unit of every device allocation */
    HOST_CONTEXT_DEPTH = 64,   /* contexts a thread can push */
    HOST_LEAST_PRIORITY = 0,   /* as of an H200 */
    HOST_GREATEST_PRIORITY = -5,
    HOST_COPY_PIECE = 512 * 1024, /* bytes moved while the map is held */
    STREAM_SEEN = 8
};
#define HOST_BLOCK ((size_t)2 << 20) /* bytes: what a device is charged in */

typedef struct Context Context;
typedef struct Stream Stream;
typedef struct Event Event;
typedef struct Range Range;
typedef struct Op Op;
typedef struct Capture Capture;

/* ---- calls: one number per driver function, for counters and faults ---- */
#define HOST_CALL_NUMBER(name, version, parameters) HOST_CALL_##name,
typedef enum Call { GM_DRIVER_FUNCTIONS(HOST_CALL_NUMBER) HOST_CALL_COUNT } Call;
#undef HOST_CALL_NUMBER

#define HOST_PROTOTYPE(name, version, parameters) CUresult host_cu##name parameters;
GM_DRIVER_FUNCTIONS(HOST_PROTOTYPE)
#undef HOST_PROTOTYPE

/* Each driver function begins with one of these. It counts the call, injects faults, and refuses
 * before cuInit, after shutdown and inside a host function. All but the first also return the
 * context: the current one, or that of the stream or event. A refusal returns from the function. */
CUresult host_enter(Call call);
CUresult host_enter_context(Call call, Context **context);
CUresult host_enter_stream(Call call, CUstream stream, Context **context);
CUresult host_enter_event(Call call, CUevent event, Context **context);
#define HOST_TRY(expression)                                                                      \
    do {                                                                                          \
        CUresult try_result = (expression);                                                       \
        if (try_result != CUDA_SUCCESS) return try_result;                                        \
    } while (0)
#define HOST_ENTERED(call)   \
    ({                       \
        Context *entered;    \
        HOST_TRY(call);      \
        entered;             \
    })
/* The object of a handle, locked; the function returns `refusal` where there is none. */
#define HOST_LOCKED(table, handle, refusal)                         \
    ({                                                              \
        void *locked = host_object_lock(&host.table, handle);       \
        if (!locked) return refusal;                                \
        locked;                                                     \
    })
#define ENTER(name) HOST_TRY(host_enter(HOST_CALL_##name))
#define ENTER_CONTEXT(name) HOST_ENTERED(host_enter_context(HOST_CALL_##name, &entered))
#define ENTER_STREAM(name, stream) HOST_ENTERED(host_enter_stream(HOST_CALL_##name, stream, &entered))
#define ENTER_EVENT(name, event) HOST_ENTERED(host_enter_event(HOST_CALL_##name, event, &entered))

/* ---- objects by handle (object.c) ---- */
typedef enum ObjectKind {
    OBJECT_CONTEXT = 1,
    OBJECT_STREAM,
    OBJECT_EVENT,
    OBJECT_PHYSICAL,
    OBJECT_POOL,
    OBJECT_EXTERNAL_MEMORY,
    OBJECT_SEMAPHORE,
    OBJECT_GRAPH,
    OBJECT_GRAPH_EXEC,
    OBJECT_USER_OBJECT
} ObjectKind;

typedef struct Object { /* first member of every object that has a handle */
    _Atomic uint64_t handle; /* 0: not published */
    uint32_t index;
    uint32_t generation;
    pthread_mutex_t lock;    /* guards the object's fields; map_lock guards a Physical's */
    struct Object *next_free;
} Object;

enum { SEGMENT_SLOTS = 256, SEGMENT_COUNT = 4096 };
typedef struct Table {
    ObjectKind kind;
    size_t size;           /* bytes of one object */
    void (*build)(void *); /* once per slot; NULL: nothing to do */
    pthread_mutex_t lock;
    _Atomic(char *) segments[SEGMENT_COUNT];
    _Atomic uint32_t high;         /* slots ever used */
    Object *oldest_free, *youngest_free; /* a queue: a slot rests before it is used again */
    _Atomic uint64_t live;         /* published */
} Table;

void host_table_build(Table *table, ObjectKind kind, size_t size, void (*build)(void *));
void *host_object_take(Table *table); /* unpublished; NULL: out of memory */
uint64_t host_object_publish(Table *table, void *object);
bool host_object_hide(Table *table, void *object, uint64_t handle); /* false: already hidden */
void host_object_give(Table *table, void *object); /* hidden, and no longer in use */
void host_object_end(Table *table, void *object); /* hides, unlocks and frees a locked object */
void *host_object_find(Table *table, uint64_t handle);
void *host_object_lock(Table *table, const void *handle); /* NULL: no such object */
void host_object_each(Table *table, void (*visit)(void *object, void *data), void *data);
uint64_t host_handle_make(ObjectKind kind, uint32_t index, uint32_t generation);
uint32_t host_handle_index(uint64_t handle);
bool host_handle_is(uint64_t handle, ObjectKind kind); /* of this process, of this kind */

/* ---- devices and contexts (device.c, context.c) ---- */
struct Context { /* a device's primary context; the struct stays, the handle changes */
    _Atomic uint64_t handle; /* 0: not retained */
    int device;
    uint32_t generation;
    unsigned references;     /* setup_lock */
    _Atomic int error;       /* sticky CUresult: every later call returns it */
    pthread_mutex_t lock;
    Stream *streams;         /* all, the legacy one and dying ones included */
    Stream *legacy;
    _Atomic uint64_t peers;  /* bit d: access to device d enabled */
};

typedef struct Device {
    _Atomic size_t capacity; /* bytes */
    atomic_bool is_simulated; /* it was set; else it is the machine's, which other processes share */
    _Atomic size_t used;     /* bytes charged */
    struct Slab *slabs;      /* map_lock: 2 MiB blocks that hold small allocations */
    _Atomic uint64_t separate; /* bit d: it cannot reach memory of device d */
    uint64_t default_pool, current_pool; /* setup_lock; handles, 0: not made yet */
    Context context;
} Device;

CUresult host_device_check(CUdevice device);
bool host_device_reaches(int device, int peer);
CUresult host_device_charge(int device, size_t bytes);
void host_device_refund(int device, size_t bytes);
size_t host_default_capacity(bool *is_simulated);
size_t host_device_free(int device);
CUresult host_context_current(Context **context);
CUresult host_context_of(CUcontext handle, Context **context);
void host_context_build(int device);
void host_context_fail(Context *context, CUresult error);

/* ---- what a thread carries ---- */
typedef struct Thread {
    uint64_t stack[HOST_CONTEXT_DEPTH]; /* context handles, the current one last */
    int depth;
    bool in_host_function;
    CUstreamCaptureMode capture_mode;
} Thread;
extern _Thread_local Thread host_thread;

/* ---- time (clock.c) ---- */
uint64_t host_now(void);
bool host_clock_is_virtual(void);
uint64_t host_clock_due(void); /* now + lag; 0 without lag, so that no clock is read */
void host_clock_advance_to(uint64_t time);
void host_deadline(struct timespec *deadline, uint64_t nanoseconds_from_now); /* monotonic */
void host_cond_build(pthread_cond_t *cond); /* timed waits on the monotonic clock */

/* ---- streams (queue.c: order and workers; stream.c: the driver's functions) ---- */
typedef struct Point { /* "stream has finished operation number `seq`, and it is `due`" */
    Stream *stream; /* NULL: nothing to wait for */
    uint64_t seq;
    uint64_t due;   /* clock ns; 0: no lag */
} Point;

typedef enum ParkKind {
    PARK_NONE,  /* it runs, or will without a further event */
    PARK_TIME,  /* until `point.due` */
    PARK_POINT, /* until `point` */
    PARK_VALUE, /* until memory holds a value */
    PARK_CALL   /* in a host function */
} ParkKind;

typedef enum StreamRole { ROLE_ORDINARY, ROLE_LEGACY, ROLE_PER_THREAD } StreamRole;

struct Stream {
    Object object;
    pthread_cond_t work;     /* the worker waits here: for work, for its time */
    pthread_cond_t progress; /* all others wait here: `completed` moved */
    Context *context;
    Stream *next, *previous; /* Context.lock */
    StreamRole role;
    unsigned flags;
    int priority;
    uint64_t id;             /* unique */
    _Atomic uint64_t submitted, completed;
    _Atomic uint64_t last_due; /* clock ns: when the last thing queued may finish */
    Op *ring;                /* number n at [n & (capacity - 1)] */
    size_t capacity;
    bool worker_alive, worker_asleep;
    bool dying;              /* destroyed: the worker retires it when drained */
    _Atomic bool cancelled;  /* its context has ended: queued operations are dropped */
    ParkKind park;           /* why the worker waits, and for which point */
    Point park_point;
    uint64_t running;        /* number of the operation that runs */
    uint64_t pulled;         /* virtual clock: a host waits for this number */
    Capture *capture;        /* NULL: not capturing */
    struct NodeSet *captured; /* of that capture: nodes before the stream's next one */
    struct NodeSet *latest;   /* of those: the next one's direct dependencies */
    CUgraphNode *named;       /* their handles, as the caller last got them; owned */
    Point seen[STREAM_SEEN]; /* other streams' points it has waited for, oldest overwritten */
    unsigned seen_next;
};

typedef struct Points { /* a growing list; the first ones cost no malloc */
    Point few[8];
    Point *at;
    size_t count, capacity;
} Points;
void host_points_start(Points *points);
void host_points_end(Points *points);

CUresult host_stream_resolve(Context *current, CUstream handle, Stream **stream);
/* Locks a stream to queue operations, after those that the default stream's rules put first.
 * Between begin and end host_stream_push may be called any number of times. */
CUresult host_stream_begin(Context *current, CUstream handle, Stream **stream);
CUresult host_stream_push(Stream *stream, const Op *op);
Point host_stream_tail(Stream *stream); /* of all queued work; caller holds the stream's lock */
CUresult host_stream_wait_point(Stream *stream, Point point);
void host_stream_follow(Stream *stream, Point point); /* worker only */
void host_stream_end(Stream *stream);
CUresult host_stream_submit(Context *current, CUstream handle, const Op *op, Point *end);

Stream *host_stream_make(Context *context, unsigned flags, int priority, StreamRole role);
CUresult host_stream_close(Stream *stream, uint64_t handle);
void host_stream_build(void *stream);

static inline uint64_t host_submitted(const Stream *stream) {
    return atomic_load_explicit(&stream->submitted, memory_order_acquire);
}
static inline uint64_t host_completed(const Stream *stream) {
    return atomic_load_explicit(&stream->completed, memory_order_acquire);
}
static inline bool host_seq_done(Point point) {
    return !point.stream || host_completed(point.stream) >= point.seq;
}
static inline bool host_stream_is_blocking(const Stream *stream) {
    return !(stream->flags & CU_STREAM_NON_BLOCKING);
}
/* The point of all queued work, for a query: unlike a record, it queues nothing. */
static inline Point host_stream_point(Stream *stream) {
    return (Point){stream, host_submitted(stream), atomic_load(&stream->last_due)};
}
bool host_point_done(Point point);
void host_point_pull(Point point);     /* virtual clock: work up to the point may take its time */
CUresult host_point_wait(Point point); /* host thread; DEINITIALIZED at shutdown */
void host_point_settle(Point point);   /* virtual clock: waits until due work has run */
/* The points that a wait on this stream covers: its own work and, for the legacy stream,
 * that of every blocking stream. */
CUresult host_stream_points(Stream *stream, Points *points);
CUresult host_streams_points(Context *context, const Stream *except, bool all, Points *points);
/* Ends a list: waits for its points, unless collecting them failed with `result`. */
CUresult host_points_wait(Points *points, CUresult result);
CUresult host_context_wait(Context *context); /* everything queued in the context */
void host_streams_wake(void);  /* all waiters check again: shutdown, cancel, clock */
bool host_stop_requested(const Stream *stream);
void host_park(Stream *stream, ParkKind kind, Point point); /* worker only, unlocked */

/* ---- operations ---- */
typedef enum OpKind {
    OP_NOTHING,
    OP_COPY,
    OP_FILL,
    OP_CALL,
    OP_WAIT_POINT,
    OP_WAIT_VALUE,
    OP_WRITE_VALUE,
    OP_STAMP,
    OP_RUN /* a rare operation, by function */
} OpKind;

typedef struct Copy { /* a box of bytes; one row when height and depth are 1 */
    uintptr_t dst, src;
    size_t width, height, depth;         /* bytes, rows, slices */
    size_t dst_pitch, dst_slice;         /* bytes from row to row, slice to slice */
    size_t src_pitch, src_slice;
    void *staged;                        /* owned: freed after the copy */
    bool dst_known, src_known;           /* in the map when queued, so it must still be */
    Context *dst_context, *src_context;  /* device with access to the end; NULL: the stream's */
} Copy;

typedef struct Fill {
    uintptr_t dst;
    size_t pitch, width, height; /* width in elements */
    uint32_t value;
    uint32_t element;            /* bytes: 1, 2, 4 */
} Fill;

typedef struct Value {
    uintptr_t address;
    uint64_t value;
    unsigned flags;
    bool wide; /* 64 bits, else 32 */
} Value;

struct Op {
    OpKind kind;
    uint64_t due; /* clock ns; 0: at once */
    union {
        Copy copy;
        Fill fill;
        Value value;
        Point point;
        struct {
            CUhostFn function;
            void *data;
        } call;
        struct {
            uint64_t event, record;
        } stamp;
        struct { /* one of the two is called, and owns `data`; `drop` if the operation is dropped */
            CUresult (*run)(Stream *stream, void *data);
            void (*drop)(void *data);
            void *data;
        } run;
    };
};

void host_op_run(Stream *stream, Op *op);
void host_op_drop(Op *op);

/* ---- events (event.c) ---- */
struct Event {
    Object object;
    Context *context;
    unsigned flags;
    uint64_t record; /* how often recorded; 0: never */
    Point point;     /* what the latest record marks */
    uint64_t time;   /* clock ns when it was passed; 0: not yet */
    struct NodeSet *captured, *latest; /* recorded in a capture: as a stream's; owned */
    struct Known *known; /* of instruments/order.c; owned */
};
void host_event_stamp(uint64_t handle, uint64_t record);
void host_events_drop(Context *context); /* a context ends */

/* ---- memory (map.c, memory.c, pinned.c, pointer.c) ---- */
typedef enum RangeKind {
    RANGE_DEVICE,     /* cuMemAlloc */
    RANGE_PINNED,     /* cuMemHostAlloc */
    RANGE_REGISTERED, /* the caller's own memory */
    RANGE_MANAGED,
    RANGE_MAPPING,    /* a physical handle at an address */
    RANGE_SEGMENT,    /* memory of a pool, allocated in blocks */
    RANGE_IMPORTED,   /* a buffer of external memory, or a pointer of an imported pool */
    RANGE_RESERVATION, /* only in the second map */
    RANGE_POOLED      /* only in the third map: one allocation from a pool */
} RangeKind;

struct Range {
    uintptr_t base;
    size_t size;             /* bytes that the caller requested */
    Range *left, *right;     /* treap by base */
    uint32_t heat;           /* treap priority */
    RangeKind kind;
    int device;
    uint64_t context;        /* handle; 0: belongs to none */
    unsigned flags;          /* the caller's; of a mapping: the type of its location */
    uint64_t readers, writers; /* of a mapping: bit per device; bit 63 the host */
    uint64_t id;             /* unique */
    size_t mapped;           /* bytes of its address space */
    bool readable, writable; /* false: device access faults */
    bool sync_memops;
    bool leaving;            /* freed in stream order, and the stream has not reached the free */
    uint64_t file, file_offset; /* of a pointer of an imported pool: its identity */
    void *owner;             /* Slab, Physical, Segment, Block: by kind */
};

typedef struct AddressMap {
    Range *root;
    size_t count;
    uint32_t heat; /* of the latest range; 0: none yet */
} AddressMap;
Range *host_map_find(const AddressMap *map, uintptr_t address);  /* the range that contains it */
Range *host_map_after(const AddressMap *map, uintptr_t address); /* the first that ends after it */
bool host_map_free(const AddressMap *map, uintptr_t address, size_t size);
void host_map_insert(AddressMap *map, Range *range);
void host_map_remove(AddressMap *map, Range *range);

Range *host_range_at(uintptr_t address); /* the caller's allocation there; caller holds `map_lock` */
Range *host_range_new(RangeKind kind, uintptr_t base, size_t size, Context *context);
void host_range_add(Range *range); /* takes map_lock */

typedef enum MemoryKind { /* of a whole range of bytes */
    MEMORY_PAGEABLE,
    MEMORY_PINNED,
    MEMORY_DEVICE,
    MEMORY_MANAGED,
    MEMORY_INACCESSIBLE /* the device may not access all of it, or it is of several kinds */
} MemoryKind;
enum { ANY_DEVICE = -1 };
MemoryKind host_memory_kind(uintptr_t address, size_t size, bool write, int device); /* takes map_lock */
MemoryKind host_memory_kind_locked(uintptr_t address, size_t size, bool write, int device);
void *host_pages_map(size_t bytes, size_t alignment); /* private, zero; untouched they cost nothing */
CUresult host_memory_take(Context *context, RangeKind kind, size_t size, unsigned flags,
                          CUdeviceptr *pointer);
CUresult host_memory_free(uintptr_t address, RangeKind kind, RangeKind other);
CUresult host_memory_wait(uintptr_t address, RangeKind *kind); /* before a free */
void host_memory_drop(uint64_t context); /* a context ends: all that it allocated */
size_t host_round_up(size_t value, size_t unit);

/* ---- copies (copy.c) ---- */
enum { COPY_ANY_SIDE, COPY_HOST_SIDE, COPY_DEVICE_SIDE }; /* the memory that the call states */
Copy host_copy_linear(uintptr_t dst, uintptr_t src, size_t size);
CUresult host_copy_check(Context *context, Copy *copy, int dst_side, int src_side);
CUresult host_copy_sync(Context *context, Copy *copy, int dst_side, int src_side);
CUresult host_copy_async(Context *context, CUstream stream, Copy *copy, int dst_side, int src_side);
CUresult host_copy_run(const Stream *stream, const Copy *copy);
CUresult host_fill_run(const Stream *stream, const Fill *fill);
CUresult host_value_write(const Stream *stream, const Value *value);
void host_value_wait(Stream *stream, const Value *value);
void host_value_wake(void);

/* ---- the whole (life.c) ---- */
typedef enum HostState { HOST_COLD, HOST_READY, HOST_DOWN } HostState;
typedef struct Host {
    _Atomic int state;
    _Atomic int device_count;
    _Atomic bool device_used;      /* the count is settled */
    uint32_t birth;                /* forks since the first process */
    pthread_mutex_t setup_lock;
    pthread_rwlock_t map_lock;
    AddressMap ranges, reservations, pooled;
    Table streams, events, physicals, pools, external_memories, semaphores;
    Table graphs, graph_execs, user_objects;
    pthread_mutex_t value_lock;    /* streams that wait for a value sleep here */
    pthread_cond_t value_written;
    _Atomic int value_waiters;
    pthread_mutex_t worker_lock;
    pthread_cond_t worker_gone;
    uint64_t workers;              /* worker_lock */
    pthread_mutex_t capture_lock;
    Capture *captures;
    _Atomic uint64_t next_id;
    Device devices[HOSTDEV_MAX_DEVICES];
} Host;
extern Host host;
void host_setup(void);   /* idempotent; every public function that needs locks calls it */
static inline bool host_is_down(void) {
    return atomic_load_explicit(&host.state, memory_order_acquire) == HOST_DOWN;
}
static inline uint64_t host_next_id(void) {
    return atomic_fetch_add_explicit(&host.next_id, 1, memory_order_relaxed) + 1;
}

static inline CUmemAccess_flags host_access_flags(bool reads, bool writes) {
    if (writes) return CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return reads ? CU_MEM_ACCESS_FLAGS_PROT_READ : CU_MEM_ACCESS_FLAGS_PROT_NONE;
}
/* Sets the access of the device of `bit` in the sets of devices that read and write. */
static inline void host_access_set(uint64_t *readers, uint64_t *writers, uint64_t bit,
                                   CUmemAccess_flags flags) {
    *readers = flags != CU_MEM_ACCESS_FLAGS_PROT_NONE ? *readers | bit : *readers & ~bit;
    *writers = flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? *writers | bit : *writers & ~bit;
}

#include "resources.h"

#include "../instruments/instruments.h"

#pragma GCC visibility pop
#endif
