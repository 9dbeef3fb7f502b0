/* gpumem's arenas for C and C++: a table of functions, and nothing to link.
 *
 * Python makes the arena and passes it to C in a capsule:
 *
 *     capsule = gpumem.integrations.c.allocator(gpumem.Arena("cuda:0"))
 *
 * C unpacks the capsule and calls the arena, on any thread, with or without the interpreter lock:
 *
 *     gpumem_arena *arena = gpumem_arena_of(capsule);
 *     void *block;
 *     int status = arena->calls->allocate(arena, 4096, 256, stream, &block);
 *     if (status != GPUMEM_OK) puts(arena->calls->text(status));
 *     ...
 *     arena->calls->deallocate_on(arena, block, stream);
 *
 * A stream is a CUstream or cudaStream_t of the arena's device, or the handle of a gpumem.Stream of
 * the host device. NULL is the legacy default stream. Memory is ordered by streams: a block may be
 * used by work queued on its stream after `allocate` returned. A freed block can be allocated again
 * on that stream at once, on others after the work that was queued before the free. Wait for a
 * stream's work before you destroy it: its handle may name another stream afterwards.
 *
 * Only `report` takes the interpreter lock, and an allocation that an arena's budget refuses, because
 * pressure callbacks are Python. No function throws. Pass no stream that captures a graph, unless Python made the
 * capsule with captures=True: then a graph pool serves it, which takes the interpreter lock, too.
 */
#ifndef GPUMEM_H
#define GPUMEM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header. Within a version members are only added, at the table's end: it may be
   longer than this header knows. gpumem_arena_of refuses another version, and a table that lacks members. */
#define GPUMEM_VERSION 1
#define GPUMEM_CAPSULE "gpumem.arena"

enum gpumem_status {
    GPUMEM_OK = 0,
    GPUMEM_OUT_OF_MEMORY = 1,   /* of the device, under the arena's limit or under its budget */
    GPUMEM_INVALID = 2,         /* an argument; nothing was changed */
    GPUMEM_NOT_FOUND = 3,       /* no live block begins at the address */
    GPUMEM_CLOSED = 4,          /* the arena is closed, asleep, or belongs to a fork's parent */
    GPUMEM_CAPTURING = 5,       /* the stream captures a graph */
    GPUMEM_NO_HOST_MEMORY = 6,  /* malloc failed for the record that describes a block */
    GPUMEM_DRIVER_ERROR = 7,
    GPUMEM_STATUSES             /* number of statuses */
};

typedef struct gpumem_arena gpumem_arena;

/* Figures of an arena, over all its users, in bytes except for the counts of blocks. */
typedef struct gpumem_stats {
    size_t size;                /* set to sizeof(gpumem_stats) by the caller */
    uint64_t in_use;            /* of blocks that are allocated, with their padding */
    uint64_t max_in_use;
    uint64_t reserved;          /* held from the driver */
    uint64_t max_reserved;
    uint64_t limit;             /* 0: none */
    uint64_t allocations;       /* blocks, so far */
    uint64_t frees;
} gpumem_stats;

typedef struct gpumem_calls {
    uint32_t version;           /* GPUMEM_VERSION of gpumem */
    uint32_t size;              /* bytes of the table */

    /* A block of at least `nbytes` bytes for work on the stream. It begins at a multiple of 256;
       `alignment` is a power of two up to that, or 0. No bytes: *address is NULL. If the status is
       not GPUMEM_OK, *address is NULL as well. */
    int (*allocate)(gpumem_arena *arena, size_t nbytes, size_t alignment, void *stream,
                    void **address);
    /* Frees a block, of any arena: on the stream that it was allocated for, or on another one of
       its device, which must by then wait for all uses of the block. NULL is GPUMEM_OK. Never waits,
       and never calls the driver for memory; takes the interpreter lock while blocks of graph pools
       live. If it fails the block stays allocated. */
    int (*deallocate)(gpumem_arena *arena, void *address);
    int (*deallocate_on)(gpumem_arena *arena, void *address, void *stream);
    /* Work on this stream uses the block, too: a freed block is allocated again only after the work
       that is queued there at the time of the free. NULL is GPUMEM_OK. */
    int (*record_stream)(gpumem_arena *arena, void *address, void *stream);
    /* Fills in as many members as the caller's struct has. GPUMEM_INVALID: `size` is below the
       first version's. */
    int (*stats)(gpumem_arena *arena, gpumem_stats *stats);
    /* Releases memory without a block, and without unfinished work, to the driver. *released is set
       to the bytes; it may be NULL. The call may wait for the device where the driver does. */
    int (*shrink)(gpumem_arena *arena, uint64_t *released);
    /* A text in English for a status; it lives as long as the process. */
    const char *(*text)(int status);
    /* Waits on the host for the work that is queued on the stream, which must not capture. */
    int (*synchronize)(gpumem_arena *arena, void *stream);
    /* Explains the status that `allocate` returned last: a readable report of the arena, which
       the caller frees with free(); NULL: there is none, or another thread's call was refused with
       another status since. Takes the interpreter lock. */
    char *(*report)(gpumem_arena *arena, size_t nbytes, void *stream, int status);
    /* References in addition to the capsule's. The arena stays usable as long as there is one; the last may
       be dropped on any thread, and ends `arena`. A block does not need one: it can be freed later,
       through any other arena. */
    void (*retain)(gpumem_arena *arena);
    void (*release)(gpumem_arena *arena);
} gpumem_calls;

struct gpumem_arena {
    const gpumem_calls *calls;  /* the same for all arenas of the process */
    const void *identity;       /* equal for two that are the same arena */
    int32_t device;             /* CUDA's ordinal; -1: the host device */
};

#ifdef __cplusplus
}
#endif

#ifdef Py_PYTHON_H /* Python.h was included before */
/* The arena in a capsule, valid as long as the capsule unless it is retained; NULL with a Python
   exception set: it is another object, or gpumem's table is not of this header's version. */
static inline gpumem_arena *gpumem_arena_of(PyObject *capsule) {
    gpumem_arena *arena = (gpumem_arena *)PyCapsule_GetPointer(capsule, GPUMEM_CAPSULE);
    if (arena == NULL) return NULL;
    if (arena->calls->version != GPUMEM_VERSION || arena->calls->size < sizeof(gpumem_calls)) {
        PyErr_Format(PyExc_ImportError,
                     "gpumem has version %u of its C functions, in %u bytes; this was compiled for "
                     "version %u, in %u bytes, or more",
                     (unsigned)arena->calls->version, (unsigned)arena->calls->size,
                     (unsigned)GPUMEM_VERSION, (unsigned)sizeof(gpumem_calls));
        return NULL;
    }
    return arena;
}
#endif

#endif
