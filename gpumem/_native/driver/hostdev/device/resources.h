/* Objects that combine memory and order: physical handles, pools, imports, captures, graphs.
 *
 * Second half of internal.h, which includes it at its end; no other file does.
 */
#ifndef GPUMEM_HOSTDEV_RESOURCES_H
#define GPUMEM_HOSTDEV_RESOURCES_H

/* ---- virtual memory (physical.c: handles; vmm.c: addresses) ---- */
typedef struct Physical { /* memory without an address; every field under map_lock */
    Object object;
    CUmemAllocationProp prop;
    size_t size;       /* bytes, a multiple of HOST_BLOCK */
    int fd;            /* its own memfd, or -1: an extent of the shared one */
    size_t offset;     /* bytes into that file */
    unsigned handles;  /* references that the caller holds; 0: released */
    unsigned mappings; /* addresses it is mapped at; memory is freed when both are 0 */
    bool charged;      /* to prop.location.id */
    uintptr_t shadow;  /* key of its marks in instruments/; above all addresses, never reused */
} Physical;
int host_sparse_file(const char *name); /* as large as offsets may be; -1: refused */
void host_physical_drop(Physical *physical);                      /* caller holds map_lock for writing */
int host_physical_file(const Physical *physical);
enum { HOST_FILE_NAME = 128 };
bool host_file_name(int file, char name[HOST_FILE_NAME]); /* as the kernel shows it */
CUresult host_prop_check(const CUmemAllocationProp *prop);
void host_physicals_reborn(void); /* in a forked child: the shared file is the parent's */
/* In a forked child: memory that the parent never exported is copied when it is written. Makes one
 * system call for each run of mappings. */
void host_mappings_part(const Range *root);

/* ---- pools (pool_blocks.c: memory; pool.c: the driver's functions; pool_share.c) ---- */
typedef struct Segment Segment;
typedef struct Block Block;

struct Block { /* part of a segment; neighbours in address order make up the segment */
    Segment *segment;
    Block *before, *after;       /* by address */
    Block *free_before, *free_after; /* the pool's free list, newest first */
    uintptr_t base;
    size_t size;                 /* bytes, a multiple of HOST_SMALL_UNIT */
    bool used;
    Point freed;                 /* of a free block: the point of its free */
    Range *range;                /* of a used block: its entry in host.pooled */
};

typedef struct Pool Pool;
struct Segment { /* pages of a pool: charged, mapped and released together */
    Pool *pool;
    Segment *next;
    Range *range;  /* in host.ranges */
    Block *first;
    size_t offset; /* into the pool's file, if it has one */
    size_t used;   /* bytes of its blocks in use; 0: it may be released */
};

struct Pool {
    Object object;
    CUmemPoolProps props;
    bool is_default;         /* a device's own: never destroyed */
    bool imported;           /* another process allocates */
    bool exported;           /* once: from then on its pointers can be too */
    bool destroyed;          /* freed with its last allocation */
    bool follow_events, opportunistic, internal_dependencies; /* reuse rules */
    uint64_t threshold;      /* bytes kept when everything is synchronized */
    uint64_t reserved, reserved_high, used, used_high; /* bytes */
    uint64_t readers, writers; /* bit per device */
    Segment *segments;
    Block *free_blocks;
    int file;                /* memfd of an exportable pool, else -1 */
    size_t file_high;        /* maximum of the bytes in use */
};

/* `imported`: another process's file, which the pool owns even if it cannot be made; -1: none. */
CUresult host_pool_new(const CUmemPoolProps *props, CUmemoryPool *pool, bool is_default, int imported);
/* Caller holds the locks of the pool and, to allocate, of the stream. */
CUresult host_block_take(Pool *pool, Stream *stream, size_t size, Block **block);
void host_block_give(Block *block, Point freed);
void host_pool_shrink(Pool *pool, uint64_t keep);
void host_pools_synchronized(void); /* after a host wait: shrinks pools above their threshold */
void host_pool_unlock(Pool *pool);
CUresult host_pooled_free(uintptr_t address, Point freed); /* INVALID_VALUE: none starts there */
bool host_stream_has_seen(const Stream *stream, Point point); /* locked */

/* ---- from outside (external.c: memory; semaphore.c: timelines) ---- */
typedef struct ExternalMemory {
    Object object;
    int fd;      /* ours from a successful import on */
    size_t size; /* bytes of the whole allocation */
} ExternalMemory;

typedef struct Timeline { /* one import; operations in queues hold references */
    _Atomic int references;
    bool binary; /* a wait consumes the signal */
    TimelinePage *page;
} Timeline;

typedef struct Semaphore {
    Object object;
    Timeline *timeline;
} Semaphore;

/* Maps a part of a file as device memory; the descriptor stays open, and the caller's. */
CUresult host_file_map(int file, size_t offset, size_t size, Context *context, CUdeviceptr *pointer);
/* Forgets an imported pointer that is being freed: a later import of it is a mapping of its own. */
void host_import_forget(uintptr_t address);

/* ---- capture and graphs (capture.c, graph.c) ---- */
typedef struct NodeSet { /* nodes of a capture that precede something */
    uint64_t capture;    /* Capture.id */
    size_t words;
    uint64_t bits[];
} NodeSet;

typedef struct Nodes { /* operations in the order of capture, which respects dependencies */
    Op *at;
    size_t count, capacity;
} Nodes;

struct Capture { /* guarded by capture_lock */
    Capture *next;
    uint64_t id;
    CUstreamCaptureMode mode;
    const Thread *thread;  /* that began it */
    Stream *origin;
    bool invalidated;
    Nodes nodes;
    uint64_t graph;        /* handle of the graph being made */
};
extern _Atomic int host_captures; /* the number of active captures, checked first */
CUresult host_capture_forbids(Call call); /* calls that are unsafe during a capture */
CUresult host_capture_push(Stream *stream, const Op *op);                  /* stream locked */
CUresult host_capture_record(Stream *stream, Event *event);                /* both locked */
CUresult host_capture_wait(Stream *stream, const Event *event, bool *done); /* both locked */
CUresult host_capture_check_query(Stream *stream); /* refuses a query of a stream that captures */
CUresult host_capture_check_wait(Stream *stream);  /* also a wait for the legacy stream */
/* Refuses an allocation or a free outside of a capture. Caller holds the stream's lock. */
CUresult host_capture_forbids_pool(const Stream *stream);
bool host_capture_lives(const struct NodeSet *captured);
bool host_capture_blocks_legacy(Context *context, bool use);
void host_capture_abandon(Stream *stream);   /* the stream is being destroyed; stream locked */
bool host_stream_captures(Context *context, CUstream handle);
void host_captured_free(struct NodeSet **captured, struct NodeSet **latest);

typedef struct Program { /* run by launches; unchanged once made, counted */
    _Atomic int references;
    size_t count;
    struct UserObject **objects; /* each holds one reference */
    size_t object_count;
    Op ops[];
} Program;

typedef struct Graph {
    Object object;
    Nodes nodes;
    struct UserObject **objects;
    size_t object_count;
} Graph;

typedef struct GraphExec {
    Object object;
    Program *program;
} GraphExec;

typedef struct UserObject {
    Object object;
    _Atomic unsigned references;
    void *data;
    CUhostFn destroy;
} UserObject;
CUresult host_graph_new(uint64_t *handle);
void host_graph_fill(uint64_t handle, Nodes *nodes); /* the graph owns the nodes from then on */
bool host_nodes_add(Nodes *nodes, const Op *op);

#endif
