"""Device contexts, the calls that need one, and the errors of a driver.

The driver table has an entry for each driver function (abi.pxd). `table` fills one from the
installed CUDA driver, `host` one from the host device. All other folders call through a
`DeviceContext`.
"""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.driver.abi cimport *
from gpumem._support.atomics cimport sum_add
from gpumem._support.process cimport process

# One device as C code without the interpreter sees it. Lives as long as the process.
cdef struct DeviceContext:
    const DriverTable* table
    CUcontext primary           # the device's primary context, retained
    CUdevice device
    int ordinal
    uint32_t generation         # of the process that opened it; in a fork's child it is dead
    bint is_host                # the host device: its streams accept the page of a timeline
    uint64_t (*now)() noexcept nogil    # nanoseconds, on the clock of the device's calls
    bint (*clock_is_virtual)() noexcept nogil   # whether only calls move it; NULL: no
    bint frees_in_order         # the driver frees memory of cuMemAlloc in stream order
    uint64_t padding[8]         # a cache line: fields above are read at every allocation
    uint64_t calls              # driver calls made through it by arenas (atomic)
    CUstream free_stream        # for frees alone, see frees_in_order; NULL before one (atomic)
    uint64_t waits_begun        # waits for everything on the device, numbered from 1 (atomic)
    uint64_t waits_done         # the number of the latest wait that has ended (atomic)


cdef enum:
    MAX_PLACES = 65             # each device that a process may use, and a node of the host

# The places that may access memory that a driver call maps: the device that it is made for, the CPU
# if the memory is a node's, then peers. It only grows; an entry is complete before it is counted.
cdef struct Access:
    CUmemAccessDesc places[MAX_PLACES]
    uint32_t count              # read without a lock

cdef enum Awaited:
    AWAIT_STREAM
    AWAIT_EVENT


@cython.final
cdef class DriverDevice:
    cdef DeviceContext context
    cdef readonly str type
    cdef readonly int ordinal

# Makes the device's context current for a few driver calls; each enter has a leave.
cdef CUresult context_enter(DeviceContext* context) noexcept nogil
cdef void context_leave(DeviceContext* context) noexcept nogil
# `node`: a NUMA node, for its memory; -1: for the device's own.
cdef void access_init(Access* access, const DeviceContext* context, int node) noexcept nogil
cdef bint access_has(const Access* access, int device) noexcept nogil
# Returns the entry after the last one, for a further device; the caller counts it. NULL: no room.
cdef CUmemAccessDesc* access_next(Access* access, int device) noexcept nogil
# Sets the access of all places to mappings that lie side by side, in one call.
cdef CUresult access_apply(const DeviceContext* context, const Access* access, uint64_t address,
                           uint64_t nbytes) noexcept nogil
# Lets kernels and copies of `peer` access memory of cuMemAlloc in `context`, present and future.
cdef CUresult context_allow(DeviceContext* context, DeviceContext* peer) noexcept nogil
# While any thread captures a graph, calls that may block or allocate invalidate the capture unless
# this thread has relaxed itself. Returns the mode to restore. Each relax has a restore.
cdef CUstreamCaptureMode context_relax(const DeviceContext* context) noexcept nogil
cdef void context_restore(const DeviceContext* context, CUstreamCaptureMode before) noexcept nogil
# Returns an attribute of an address, of 4 or 8 bytes; 0 where the driver has none.
cdef CUresult pointer_attribute(DeviceContext* context, CUpointer_attribute which, uint64_t address,
                                uint64_t* value) noexcept nogil
# Returns whether the stream captures a graph, and its capture and graph; legal at any time. A
# stream that cannot be queried does not capture, like the legacy one while a stream that blocks it
# captures; `refusal` is then the driver's error, else CUDA_SUCCESS.
cdef bint stream_captures(DeviceContext* context, CUstream stream, uint64_t* capture,
                          CUgraph* graph, CUresult* refusal) noexcept nogil
# Returns why a stream must not be queried, waited for or recorded on. CUDA_SUCCESS: it may be;
# CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: it captures; else the driver's error for the handle.
cdef CUresult stream_refusal(DeviceContext* context, CUstream stream) noexcept nogil
cdef inline bint may_capture(DeviceContext* context, CUstream stream) noexcept nogil:
    return stream_refusal(context, stream) != CUDA_SUCCESS
# Whether the refusal ends with a capture. The legacy stream is refused while a stream that it waits
# for captures.
cdef inline bint ends_with_capture(CUresult refusal) noexcept nogil:
    return (refusal == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
            or refusal == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
cdef inline bint context_is_dead(const DeviceContext* context) noexcept nogil:
    return process.exiting or context.generation != process.generation

# Waits that Ctrl-C ends on the main thread: the exception is raised, and the work continues. Memory
# that the device may then still use must be alive and have no other owner: queue nothing before
# these waits that only their end makes safe.
cdef int synchronize_stream(DeviceContext* context, CUstream stream) except -1
cdef int synchronize_event(DeviceContext* context, CUevent event) except -1
# Waits for all work of the device, on any stream. A driver before CUDA 12.5 has no query for that:
# the wait is the driver's, and Ctrl-C comes afterwards.
cdef int synchronize_device(DeviceContext* context) except -1
# The same below the interpreter; `interrupted`: Ctrl-C ended the wait, and the exception is set.
# `device_wait` may not be called while any stream of the device captures.
cdef CUresult point_wait(DeviceContext* context, Awaited what, void* point,
                         bint* interrupted) noexcept nogil
cdef CUresult device_wait(DeviceContext* context, bint* interrupted) noexcept nogil
# Waits for the device until a time of `clock_ns`, on any thread; CUDA_ERROR_NOT_READY: work is
# unfinished then. Without a query for that it returns at once.
cdef CUresult device_wait_until(DeviceContext* context, uint64_t until,
                                bint* interrupted) noexcept nogil
# Calls cuCtxSynchronize for the current context, and numbers the wait.
cdef CUresult context_synchronize(DeviceContext* context) noexcept nogil

# Counts a driver call in `calls` and, if it failed, keeps its name in `refused`.
cdef inline CUresult note_call(uint64_t* calls, const char** refused, const char* call,
                               CUresult code) noexcept nogil:
    sum_add(calls, 1)
    if code != CUDA_SUCCESS:
        refused[0] = call
    return code

cdef int check(const DriverTable* table, CUresult code, str call) except -1
# Makes a context current for one driver call, named `call` in errors. `device_leave` ends that, and
# raises if the call failed.
cdef int device_enter(DeviceContext* context, str call) except -1
cdef int device_leave(DeviceContext* context, CUresult code, str call) except -1
# Returns a name such as "CUDA_ERROR_INVALID_HANDLE".
cdef str error_name(const DriverTable* table, CUresult code)
cdef int require(const void* entry, str call, str what) except -1
# Returns an attribute of an address; 0 where the driver or this memory does not have it.
cdef uint64_t pointer_value(DriverDevice driver_device, CUpointer_attribute which,
                            uint64_t address) noexcept
cdef DriverDevice open_driver_device(const DriverTable* table, str type, int ordinal)
cdef bytes uuid_of_device(const DriverTable* table, int ordinal)
