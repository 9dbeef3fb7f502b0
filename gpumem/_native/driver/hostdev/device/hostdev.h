/* The host device: a GPU driver's rules on ordinary memory and worker threads.
 *
 * hostdev_table() returns the functions of a CUDA driver, with the same signatures and
 * meanings. All other functions here have no counterpart on a GPU: size, speed, clock and
 * end; faults, counts and the search for misuse are in instruments/controls.h. None of them
 * needs cuInit, and all of them may be called from any thread.
 *
 * Int results: 0 is success, anything else is the CUresult of the refusal.
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

/* ---- number and size of devices ---- */

/* Devices host:0 .. host:n-1. Fails with ILLEGAL_STATE once a device has been used. */
HOSTDEV_API int hostdev_set_device_count(int n);
HOSTDEV_API int hostdev_device_count(void);

/* Bytes of device memory. Default: the machine's memory, or the control groups' limit
 * where that is smaller; GPUMEM_HOST_CAPACITY (bytes) overrides. May be changed at any
 * time; what is already allocated stays. Devices do not share one capacity. */
HOSTDEV_API int hostdev_set_capacity(int ordinal, size_t bytes);
HOSTDEV_API size_t hostdev_capacity(int ordinal);
/* Bytes charged to the device now. cuMemGetInfo reports the remainder of the capacity as free;
 * where the capacity is the machine's, at most the bytes that the machine and the process's control
 * groups have left. */
HOSTDEV_API size_t hostdev_used(int ordinal);

/* ---- time ---- */

/* Every stream finishes its work that much later than it was enqueued. 0: at once. */
HOSTDEV_API void hostdev_set_lag(uint64_t nanoseconds);

/* A clock that only hostdev_advance_clock moves: lag is measured on it, and so are event times.
 * While it is on, queries first wait until every worker has run what is due, so that the
 * result depends on the clock alone; a host that synchronizes moves the clock to the point that
 * it waits for. It starts at the monotonic clock's reading. */
HOSTDEV_API int hostdev_use_virtual_clock(int on);
HOSTDEV_API int hostdev_clock_is_virtual(void);
HOSTDEV_API void hostdev_advance_clock(uint64_t nanoseconds);
HOSTDEV_API uint64_t hostdev_now(void); /* nanoseconds on the clock in use */

/* ---- instruments ---- */

/* The HostdevControls of instruments/controls.h, for gpumem/_testing. Static storage. */
HOSTDEV_API const void *hostdev_controls(void);

/* ---- the end ---- */

/* Called at interpreter exit. Workers stop between operations (a long copy between its pieces, a
 * blocked wait at once). The call returns when they have ended, or after about a second when
 * a host function does not return. Work still queued is dropped. From then on every call
 * returns CUDA_ERROR_DEINITIALIZED. Memory stays mapped: views of it may still be alive. */
HOSTDEV_API void hostdev_shutdown(void);

#endif
