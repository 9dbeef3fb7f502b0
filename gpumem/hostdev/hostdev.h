/* The host device: a GPU driver's rules on ordinary memory and worker threads.
 *
 * hostdev_table() gives the same functions that a CUDA driver gives, with the same
 * signatures and meanings. Everything else here is what a real device has no function
 * for: its size, its speed, its clock, its faults and its end. None of it needs cuInit
 * unless it says so, and all of it may be called from any thread.
 *
 * Int results: 0 is success, anything else the CUresult that says why not.
 */
#ifndef GPUMEM_HOSTDEV_H
#define GPUMEM_HOSTDEV_H

#include "driver_table.h"

#ifdef HOSTDEV_SHARED_LIBRARY
#define HOSTDEV_API __attribute__((visibility("default")))
#else
#define HOSTDEV_API __attribute__((visibility("hidden")))
#endif

enum { HOSTDEV_MAX_DEVICES = 64 };

/* The functions. Static storage: valid for the life of the process, also after shutdown. */
HOSTDEV_API const DriverTable *hostdev_table(void);

/* ---- shape: how many devices, how large ---- */

/* Devices host:0 .. host:n-1. Fails with ILLEGAL_STATE once a device has been used. */
HOSTDEV_API int hostdev_set_device_count(int n);
HOSTDEV_API int hostdev_device_count(void);

/* Bytes of device memory. Default: the machine's memory, or the control group's limit
 * where that is smaller; GPUMEM_HOST_CAPACITY (bytes) overrides. May be changed at any
 * time; what is already allocated stays. Devices do not share one capacity. */
HOSTDEV_API int hostdev_set_capacity(int ordinal, size_t bytes);
HOSTDEV_API size_t hostdev_capacity(int ordinal);
/* Bytes charged to the device now: capacity - cuMemGetInfo's free. */
HOSTDEV_API size_t hostdev_used(int ordinal);

/* ---- time ---- */

/* Every stream finishes its work that much later than it was enqueued. 0: at once. */
HOSTDEV_API void hostdev_set_lag(uint64_t nanoseconds);
HOSTDEV_API uint64_t hostdev_lag(void);

/* A clock that moves only when told: lag is measured on it, and so are event times.
 * While it is on, queries first let every worker do what is due, so that the answer
 * depends on the clock alone; a host that synchronizes moves the clock to the point it
 * waits for. Switching it on starts at the monotonic clock's reading. */
HOSTDEV_API int hostdev_use_virtual_clock(int on);
HOSTDEV_API void hostdev_advance_clock(uint64_t nanoseconds);
HOSTDEV_API uint64_t hostdev_now(void); /* nanoseconds on the clock in use */

/* ---- counters ---- */

/* Calls of one driver function ("cuMemAlloc") since start or reset; refused, failed and
 * injected calls count too. UINT64_MAX for a name that is not in the table. */
HOSTDEV_API uint64_t hostdev_call_count(const char *name);
HOSTDEV_API uint64_t hostdev_total_calls(void);
HOSTDEV_API void hostdev_reset_counts(void);

/* What is alive now, for leak checks. */
typedef struct HostdevLive {
    uint64_t streams;     /* made by the caller, not yet destroyed */
    uint64_t events;
    uint64_t workers;     /* threads running */
    uint64_t allocations; /* device, pinned, registered, managed, pool, imported */
    uint64_t handles;     /* physical handles of virtual memory not yet gone */
    uint64_t mappings;
    uint64_t reservations;
    uint64_t pools;
    uint64_t imports; /* external memories and semaphores */
    uint64_t graphs;  /* graphs and executables */
} HostdevLive;
HOSTDEV_API void hostdev_live(HostdevLive *live);

/* ---- faults and costs; all off by default ---- */

/* Calls of `function` (NULL: of any) are counted from now on; number `call` (1: the
 * next) and the `times` - 1 after it answer `error` and do nothing else (times 0: every
 * one from there on). Any number of rules up to 32; the first that applies wins. Counting
 * excludes hostdev_* and, for "any", cuGetErrorName and cuGetErrorString. */
HOSTDEV_API int hostdev_fail(const char *function, uint64_t call, uint64_t times, int error);
/* The same of calls that this thread makes. */
HOSTDEV_API int hostdev_fail_here(const char *function, uint64_t call, uint64_t times, int error);
/* The `record`-th cuEventRecord from now (1: the next) completes that much later. */
HOSTDEV_API int hostdev_delay_record(uint64_t record, uint64_t nanoseconds);
/* The device is lost: every call in its context answers `error` until the context is
 * gone, and queued work is dropped. ILLEGAL_ADDRESS or LAUNCH_FAILED, say. */
HOSTDEV_API int hostdev_lose_device(int ordinal, int error);
/* Takes back all of the above that has not happened yet. */
HOSTDEV_API void hostdev_clear_faults(void);
/* Calls take the time that they take on an H200: the caller spins for it, or, on the
 * virtual clock, the clock moves. */
HOSTDEV_API void hostdev_use_h200_costs(int on);

/* ---- misuse ---- */

typedef enum HostdevMisuse {
    HOSTDEV_USE_AFTER_FREE, /* an operation names memory that was freed */
    HOSTDEV_WRONG_CONTEXT,  /* a stream was used while another device was current */
    HOSTDEV_UNORDERED_ACCESS, /* bytes that another stream touches, and nothing orders the two */
    HOSTDEV_LEAK,           /* still there at shutdown; counted and told on stderr then */
    HOSTDEV_MISUSE_KINDS
} HostdevMisuse;

/* Looks for misuse from now on, at a price: every device allocation made while it is on
 * has pages of its own, whose addresses are never used again and lose their access when
 * freed: an operation that names them fails, the host faults. Copies, fills, and blocks
 * taken from and given to pools are compared with what other streams did to the same bytes,
 * by what the program waited for, whether or not it went well this time; what streams tell
 * each other through values, semaphores and host functions counts as order. */
HOSTDEV_API void hostdev_find_misuse(int on);
HOSTDEV_API uint64_t hostdev_misuse_count(int kind);
/* The latest finding in words, or "". Valid until the next call of this function. */
HOSTDEV_API const char *hostdev_misuse_report(void);

/* ---- imports ---- */

/* While on, external memory and semaphores import by Windows' types too: the number of a
 * descriptor stands for an NT handle, the name of a POSIX shared memory object for a name.
 * What is given stays the caller's; the device keeps a reference of its own. */
HOSTDEV_API void hostdev_rehearse_windows(int on);
HOSTDEV_API int hostdev_windows_rehearsed(void);

enum { HOSTDEV_MEMORY = 1, HOSTDEV_SEMAPHORE = 2, HOSTDEV_NAME_BYTES = 256 };
typedef struct HostdevImport { /* what an import was told, successful or not */
    uint64_t number;   /* of the import, from 1; 0: there was none */
    uint32_t kind;     /* HOSTDEV_MEMORY, HOSTDEV_SEMAPHORE */
    uint32_t type;     /* the driver's handle type */
    uint32_t flags;
    uint32_t reserved; /* all reserved words together; 0: they were zero */
    uint64_t handle;   /* descriptor or NT handle; 0 with a name */
    uint64_t size;     /* bytes; of memory */
    char name[HOSTDEV_NAME_BYTES]; /* UTF-8; empty: none */
} HostdevImport;
/* The latest import of external memory or semaphores that had a descriptor to read. */
HOSTDEV_API void hostdev_last_import(HostdevImport *import);

/* ---- the end ---- */

/* Interpreter exit. Workers stop between operations (a long copy between its pieces, a
 * blocked wait at once); returns when they are gone, or after about a second when a host
 * function does not come back. Work still queued is dropped. From then on every call
 * answers CUDA_ERROR_DEINITIALIZED. Memory stays mapped: views of it may still be alive. */
HOSTDEV_API void hostdev_shutdown(void);

#endif
