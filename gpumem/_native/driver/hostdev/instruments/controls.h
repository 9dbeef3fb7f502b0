/* Controls of the host device for tests and measurements: counts, faults, costs, misuse.
 *
 * Only gpumem/_testing calls these, through the table at the end. All are
 * off by default, need no cuInit and may be called from any thread. Int results: 0 is
 * success, anything else is the CUresult of the refusal.
 */
#ifndef GPUMEM_HOSTDEV_CONTROLS_H
#define GPUMEM_HOSTDEV_CONTROLS_H

#include "../device/hostdev.h"

/* ---- counts ---- */

/* Calls of one driver function ("cuMemAlloc") since start or reset; refused, failed and
 * injected calls count too. UINT64_MAX for a name that is not in the table. */
HOSTDEV_API uint64_t hostdev_call_count(const char *name);
HOSTDEV_API uint64_t hostdev_total_calls(void);
HOSTDEV_API void hostdev_reset_counts(void);

/* Counts of live objects, for leak checks. */
typedef struct HostdevLive {
    uint64_t streams;     /* made by the caller and not destroyed yet */
    uint64_t events;
    uint64_t workers;     /* threads running */
    uint64_t allocations; /* device, pinned, registered, managed, pool, imported */
    uint64_t handles;     /* physical handles of virtual memory that have memory */
    uint64_t mappings;
    uint64_t reservations;
    uint64_t pools;
    uint64_t imports; /* external memories and semaphores */
    uint64_t graphs;  /* graphs and executables */
} HostdevLive;
HOSTDEV_API void hostdev_live(HostdevLive *live);

/* ---- faults and costs ---- */

/* Calls of `function` (NULL: of any) are counted from now on; number `call` (1: the
 * next) and the `times` - 1 after it return `error` and do nothing else (times 0: every
 * one from there on). Any number of rules up to 32; the first that applies wins. Counting
 * excludes hostdev_* and, for "any", cuGetErrorName and cuGetErrorString. */
HOSTDEV_API int hostdev_fail(const char *function, uint64_t call, uint64_t times, int error);
/* The same of calls that this thread makes. */
HOSTDEV_API int hostdev_fail_here(const char *function, uint64_t call, uint64_t times, int error);
/* The `record`-th cuEventRecord from now (1: the next) completes that much later. */
HOSTDEV_API int hostdev_delay_record(uint64_t record, uint64_t nanoseconds);
/* The device is lost: every call in its context returns `error` until the context is
 * gone, queued work is dropped and waits of its streams end. ILLEGAL_ADDRESS, say. */
HOSTDEV_API int hostdev_lose_device(int ordinal, int error);
/* Two devices cannot reach each other's memory, as on a machine without a link between them. */
HOSTDEV_API int hostdev_separate(int one, int other, int on);
/* Control groups are read below that folder instead of where they are mounted. */
HOSTDEV_API int hostdev_use_control_groups(const char *folder);
/* Removes all faults and delays that have not happened yet, and forgets the last fault. */
HOSTDEV_API void hostdev_clear_faults(void);
/* The driver function that a rule let fail last; "": none since the faults were cleared. */
HOSTDEV_API const char *hostdev_last_fault(void);
/* Calls take as long as on an H200: the caller spins, or, on the virtual clock, the clock
 * moves. */
HOSTDEV_API void hostdev_use_h200_costs(int on);

/* ---- misuse ---- */

typedef enum HostdevMisuse {
    HOSTDEV_USE_AFTER_FREE, /* an operation names memory that was freed */
    HOSTDEV_WRONG_CONTEXT,  /* a stream was used while another device was current */
    HOSTDEV_UNORDERED_ACCESS, /* bytes that another stream accesses, and nothing orders the two */
    HOSTDEV_LEAK,           /* still alive at shutdown; counted and printed to stderr then */
    HOSTDEV_MISUSE_KINDS
} HostdevMisuse;

/* Searches for misuse from now on. Every device allocation that is made while it is on has
 * pages of its own. Their addresses are never used again and lose their access when
 * freed: an operation that names them fails, the host faults. Copies, fills, and blocks
 * allocated from and freed to pools are compared with accesses of other streams to the same
 * bytes: the program's waits must order them, whether or not this run happened to be correct.
 * Values, semaphores and host functions that connect streams count as order. */
HOSTDEV_API void hostdev_find_misuse(int on);
HOSTDEV_API uint64_t hostdev_misuse_count(int kind);
/* The latest finding in words, or "". Valid until the next call of this function. */
HOSTDEV_API const char *hostdev_misuse_report(void);

/* ---- all of them, for a module that is linked apart from the device ---- */

#define HOSTDEV_CONTROLS(C)                                                           \
    C(call_count) C(total_calls) C(reset_counts) C(used) C(live) C(fail) C(fail_here) \
    C(delay_record) C(lose_device) C(separate) C(clear_faults) C(last_fault) C(use_h200_costs)    \
    C(find_misuse) C(misuse_count) C(misuse_report) C(use_control_groups)

#define HOSTDEV_CONTROL(name) __typeof__(hostdev_##name) *name;
typedef struct HostdevControls { HOSTDEV_CONTROLS(HOSTDEV_CONTROL) } HostdevControls;
#undef HOSTDEV_CONTROL

#endif
