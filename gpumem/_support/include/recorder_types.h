/* A recorder and its event sources, for every module that writes events; see recorder.h. */
#ifndef GPUMEM_RECORDER_TYPES_H
#define GPUMEM_RECORDER_TYPES_H

#include <stdint.h>

#define REC_MAGIC "gpumemEV"

enum {
    REC_VERSION = 1,
    /* Kinds of events; 0 is a slot that was never finished. */
    REC_ALLOC = 1,          /* a block was allocated */
    REC_FREE = 2,           /* a block was freed on its stream */
    REC_FREE_REQUESTED = 3, /* a block was freed, and other streams may still use it */
    REC_FREE_COMPLETED = 4, /* the other streams have completed */
    REC_FAILURE = 5,        /* an allocation failed; `block` is the status */
    REC_RESERVE = 6,        /* memory was reserved from the driver: a region, or a page */
    REC_RELEASE = 7,        /* memory was released to the driver */
    REC_ASLEEP = 1,         /* `stream` of these two if the memory woke or fell asleep */
    REC_MOVE = 8,           /* a page was moved from address `stream` to `address` */
    REC_SHRINK = 9,         /* a shrink released `nbytes` bytes */
    REC_RESET = 10,         /* a stream was declared to have no unfinished work */
    REC_PHASE_BEGIN = 11,   /* a phase of the program began; its number is the address */
    REC_PHASE_END = 12,     /* it ended */
    REC_CATEGORY = 13,      /* the purpose of the block that is live at the address */
    REC_DEFINE = 255,       /* a part of a name */
    REC_NO_RESOURCE = 65535, /* of events of the program */
    /* Kinds of names. */
    REC_RESOURCES = 1,
    REC_TAGS = 2,
    REC_FRAMEWORKS = 3,
    REC_THREADS = 4,
    REC_STACKS = 5,
    REC_REFUSALS = 7, /* 6: live blocks */
    /* Numbers of frameworks; observe/_recording has their names. */
    FRAMEWORK_TORCH = 1,
    FRAMEWORK_CUPY = 2,
    FRAMEWORK_NUMBA = 3,
    FRAMEWORK_VIRTUAL = 9, /* none: pages of virtual tensors */
};

typedef struct Recorder {
    uint64_t serial;      /* never used again; 0: no recorder */
    uint32_t generation;  /* of the process it belongs to: a fork's child writes nothing */
    uint32_t sampling;    /* a stack for `sampling` of 2**32 allocations */
    uint64_t began;       /* ns, of the monotonic clock */
    uint64_t began_at;    /* ns since 1970 */
    int file;             /* -1: a ring */
    uint32_t failed;      /* errno of what made it stop; 0: it goes on */
    uint64_t *ring;
    uint64_t *turns;
    uint64_t mask;        /* slots - 1 */
    char **names;         /* of resources, by number */
    uint32_t resources;
    uint32_t native;      /* whether its stacks have native frames */
    uint64_t next;        /* number of the next slot */
    uint64_t allocations;
    uint64_t missed;      /* events that found no slot */
} Recorder;

enum { OWNER_ARENA = 1, OWNER_LEDGER = 2 }; /* kinds of owners */

typedef struct EventSource {
    Recorder *recorder; /* NULL: nothing is recorded */
    void *owner;        /* the resource's C struct; NULL: not in the list */
    uint32_t owner_is;  /* OWNER_ARENA: an ArenaCore, OWNER_LEDGER: a BlockLedger */
    struct EventSource *older;
    struct EventSource *newer;
    uint32_t generation; /* of the process that opened it */
    uint16_t number;     /* of the resource in the recorder's file */
    char memory[32];
    char kind[24];
    char name[64];
    uint64_t serial; /* of the resource in its process, from 1; never used again */
    uint64_t budget; /* serial of the level that it charges; 0: none */
    uint64_t upstream; /* serial of the resource that its memory comes from; 0: none of gpumem's */
    const void *upstream_owner; /* may have ended: its address is the key of a snapshot */
    uint64_t told_allocs; /* the highest counts that readers have seen: they never fall */
    uint64_t told_frees;
} EventSource;

typedef struct RecEvent {
    uint32_t kind;
    uint64_t address;
    uint64_t nbytes; /* requested bytes */
    uint64_t block;  /* bytes of the block */
    uint64_t stream; /* handle; of a move the address that the page left */
} RecEvent;

/* The note of an allocation; seal 0: none. */
typedef struct RecNoted {
    uint64_t number;   /* of the allocation in its recording */
    uint64_t time;     /* ns, of the monotonic clock */
    uint64_t seal;
    uint64_t recorder; /* serial */
} RecNoted;

#endif
