/* The functions of gpumem that PyTorch's side calls: one table, which _hooks.pyx fills in.
 *
 * PyTorch's side is allocator.cpp, a subclass of its allocator that is compiled for the installed
 * version.
 *
 * No function takes the interpreter lock, except to collect garbage and to report when memory is
 * out, to find the arena of a device that is used for the first time, and to let a device access
 * another's memory.
 *
 * A `hook` is an AllocatorHook of gpumem/_native/arena/allocator_hooks.pxd: the arena that serves a
 * device, a pool or pinned memory. Here it is opaque.
 */
#ifndef GPUMEM_TORCH_HOOKS_H
#define GPUMEM_TORCH_HOOKS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Numbers of arenas: of devices by their ordinals, then the one of pinned memory. */
enum { TORCH_DEVICES = 64, TORCH_PINNED = TORCH_DEVICES, TORCH_ARENAS };

/* Of PyTorch's memory: all of it, and its two parts, in the order of its StatType. */
enum { TORCH_ALL, TORCH_SMALL, TORCH_LARGE, TORCH_PARTS };

/* Sizes in bytes; sums only rise. */
typedef struct TorchFigures {
    uint64_t allocs, frees;
    uint64_t requested, requested_freed;
    uint64_t allocated, allocated_freed; /* the same, with padding */
    uint64_t peak_blocks, peak_requested, peak_allocated;
    uint64_t pending, pending_bytes; /* freed, and other streams still use them */
    uint64_t reserved;
    uint64_t segments;
    uint64_t idle, idle_bytes; /* free pieces of segments in use */
} TorchFigures;

typedef struct TorchStats {
    TorchFigures parts[TORCH_PARTS];
    uint64_t peak_reserved;
    uint64_t retries;       /* growths that first released idle memory */
    uint64_t waits;         /* for other streams */
    uint64_t device_allocs; /* of regions and pages */
    uint64_t device_frees;
    uint64_t failures; /* allocations that were refused */
} TorchStats;

enum { TORCH_FREE, TORCH_PENDING, TORCH_USED };

/* Outcomes of a garbage collection. TORCH_RELIEVED: it was not needed yet, memory was freed otherwise. */
enum { TORCH_NOTHING_FREED, TORCH_FREED, TORCH_NO_INTERPRETER, TORCH_RELIEVED };

typedef struct TorchBlock {
    uint64_t address;
    uint64_t size;
    uint64_t requested;
    uint64_t stream;
    uint64_t pool[2]; /* PyTorch's number of a pool; zeros: none */
    uint32_t segment; /* blocks of the same one lie side by side */
    int32_t device;
    uint8_t state;
    uint8_t is_small;
    uint8_t is_expandable; /* its segment grows and shrinks by pages */
} TorchBlock;

/* Bytes that a pool has from the device. */
typedef struct TorchPoolBytes {
    uint64_t pool[2];
    uint64_t reserved;
} TorchPoolBytes;

/* The source of a pool's memory, if that is not its device. `release` is called on any thread. */
typedef struct TorchSource {
    void *(*reserve)(struct TorchSource *self, size_t nbytes);
    void (*release)(struct TorchSource *self, void *address);
    void (*forget)(struct TorchSource *self); /* the last call, for a source that was accepted */
} TorchSource;

typedef struct TorchCalls {
    void *hooks[TORCH_ARENAS]; /* to be read atomically; NULL: none yet */

    /* 0, or a status that `report` explains. */
    int (*allocate)(void *hook, size_t nbytes, void *stream, void **address);
    /* A block with memory of its own, which is released when the block is freed and its work is done. It
       counts in no statistics. The device has a hook. */
    int (*allocate_alone)(int device, size_t nbytes, void *stream, void **address);
    int (*release)(void *address);
    int (*record)(void *address, void *stream);
    /* Make the hook of a device, or of pinned memory, that has none yet; NULL: there is no arena. */
    void *(*find)(int device);
    /* Release the idle memory of every device, and of pools that have ended, to the driver. */
    void (*shrink)(void);
    void (*shrink_pinned)(void);
    /* Release that of one pool that has ended; its blocks stay. */
    void (*shrink_pool)(const uint64_t id[2]);
    void (*limit)(int device, double fraction);

    /* False: no block of PyTorch begins at the address. */
    int (*block)(void *address, TorchBlock *found);
    /* Every block and free piece of the arenas that serve PyTorch, by segment and address; the
       caller frees it. NULL: out of host memory. */
    TorchBlock *(*blocks)(size_t *count);
    /* Addresses of up to `capacity` live blocks of a pool; returns the number of all. */
    size_t (*live)(void *pool, uint64_t *addresses, size_t capacity);
    /* Number of times that these arenas' memory has grown or shrunk. */
    uint64_t (*changes)(void);
    /* Of a device, or of pinned memory. */
    void (*stats)(int device, TorchStats *now);
    void (*reset_peaks)(int device);
    /* Bytes of up to `capacity` pools of a device, ended ones with live blocks too; returns the number
       of all. */
    size_t (*pool_bytes)(int device, TorchPoolBytes *found, size_t capacity);
    /* Bytes of the largest block that a device may have room for. */
    size_t (*largest)(int device);

    /* Memory of captured graphs and of MemPools: a reference to a new hook next to the device's;
       NULL: refused. Its memory is released with its last reference; each of its blocks has one.
       `captured`: work outside of captures uses it to warm up only. */
    void *(*open_pool)(void *hook, const uint64_t id[2], TorchSource *source, int splits,
                       int captured);
    /* The work of the pool's streams is done: blocks freed in it are free for all of them. */
    void (*begin_pool)(void *pool);
    void (*retain_pool)(void *pool);
    void (*drop_pool)(void *pool);
    /* In a pool without blocks, after begin_pool: a block where an earlier one was. */
    int (*restore)(void *pool, const TorchBlock *block);

    /* Let a device access the memory of the arena of `owner`: NULL, or why it cannot, in a string that
       the caller frees. */
    char *(*add_peer)(int owner, int device);
    /* A copy between the devices of two hooks, neither of which need have access to the other's
       memory: a CUresult. */
    int (*copy)(void *to, void *dst, void *from, const void *src, size_t nbytes, void *stream);
    /* Blocks in other processes. `share` returns a text that names a block there, and the block's
       offset in their mapping; `open_shared` returns that mapping, and its first address, until
       `close_shared`. The caller frees the strings; NULL: refused, for the reason. */
    char *(*share)(void *address, size_t *offset, char **reason);
    void *(*open_shared)(const char *text, void **address, char **reason);
    void (*close_shared)(void *opened);
    /* The reason of a failure, in a string that the caller frees. `is_memory`: memory is out. */
    char *(*report)(int device, size_t nbytes, void *stream, int status, int *is_memory);
    int (*is_memory)(int status);
    /* One full garbage collection after a refusal. The interpreter is waited for at most as long as the
       arena's settings say, and the caller may hold locks: finalizers run on this thread only if it
       holds the interpreter lock. `said`: TORCH_FREED, TORCH_RELIEVED, a line to add to the report;
       TORCH_NO_INTERPRETER, the text in the place of a report, which would wait as well. The caller
       frees it; else it is NULL. */
    int (*collect)(int device, size_t nbytes, int status, char **said);
} TorchCalls;

#ifdef __cplusplus
}
#endif

#endif
