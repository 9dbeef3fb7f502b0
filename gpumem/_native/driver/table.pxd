"""The driver table, the devices behind it and the state of this process.

`DriverTable` has one entry per driver function, with the CUDA driver API's signature and
meaning (include/driver_table.h). Two modules fill one each: `cuda` from the installed driver,
`host` from the host device. Everything above calls through a `DeviceContext`.
"""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from gpumem._support.atomics cimport sum_add
from gpumem._support.process cimport process

cdef extern from "driver_table.h" nogil:
    ctypedef int CUdevice
    ctypedef unsigned long long CUdeviceptr
    ctypedef void* CUcontext
    ctypedef void* CUstream
    ctypedef void* CUevent
    ctypedef void (*CUhostFn)(void*) noexcept nogil
    ctypedef void* CUgraph
    ctypedef void* CUgraphExec
    ctypedef void* CUgraphNode
    ctypedef void* CUuserObject

    ctypedef enum CUstreamCaptureStatus:
        CU_STREAM_CAPTURE_STATUS_NONE

    ctypedef enum CUstreamCaptureMode:
        CU_STREAM_CAPTURE_MODE_RELAXED

    ctypedef enum CUresult:
        CUDA_SUCCESS
        CUDA_ERROR_INVALID_VALUE
        CUDA_ERROR_OUT_OF_MEMORY
        CUDA_ERROR_DEINITIALIZED
        CUDA_ERROR_NO_DEVICE
        CUDA_ERROR_INVALID_HANDLE
        CUDA_ERROR_NOT_READY
        CUDA_ERROR_NOT_SUPPORTED
        CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
        CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        CUDA_ERROR_UNKNOWN

    ctypedef enum CUdevice_attribute:
        CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
        CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED
        CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED
        CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES

    enum:
        CU_STREAM_NON_BLOCKING
        CU_EVENT_DISABLE_TIMING
        CU_MEMHOSTALLOC_PORTABLE
        CU_MEMHOSTALLOC_DEVICEMAP
        CU_MEMHOSTREGISTER_PORTABLE
        CU_MEMHOSTREGISTER_DEVICEMAP
        CU_MEMHOSTREGISTER_READ_ONLY
        CU_MEM_ATTACH_GLOBAL

    ctypedef enum CUpointer_attribute:
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        CU_POINTER_ATTRIBUTE_IS_MANAGED
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        CU_POINTER_ATTRIBUTE_HOST_POINTER
        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
        CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE
        CU_POINTER_ATTRIBUTE_ACCESS_FLAGS

    ctypedef enum CUmem_advise:
        CU_MEM_ADVISE_SET_READ_MOSTLY
        CU_MEM_ADVISE_UNSET_READ_MOSTLY
        CU_MEM_ADVISE_SET_PREFERRED_LOCATION
        CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION
        CU_MEM_ADVISE_SET_ACCESSED_BY
        CU_MEM_ADVISE_UNSET_ACCESSED_BY

    ctypedef struct CUuuid:
        char bytes[16]

    ctypedef unsigned long long CUmemGenericAllocationHandle

    ctypedef void* CUmemoryPool

    ctypedef enum CUmemorytype:
        CU_MEMORYTYPE_HOST
        CU_MEMORYTYPE_DEVICE
        CU_MEMORYTYPE_UNIFIED

    ctypedef struct CUDA_MEMCPY2D:
        CUmemorytype srcMemoryType
        CUdeviceptr srcDevice
        size_t srcPitch
        CUmemorytype dstMemoryType
        CUdeviceptr dstDevice
        size_t dstPitch
        size_t WidthInBytes
        size_t Height

    ctypedef struct CUDA_MEMCPY3D:
        CUmemorytype srcMemoryType
        CUdeviceptr srcDevice
        size_t srcPitch
        size_t srcHeight
        CUmemorytype dstMemoryType
        CUdeviceptr dstDevice
        size_t dstPitch
        size_t dstHeight
        size_t WidthInBytes
        size_t Height
        size_t Depth

    ctypedef enum CUmemAllocationHandleType:
        CU_MEM_HANDLE_TYPE_NONE
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        CU_MEM_HANDLE_TYPE_FABRIC

    ctypedef enum CUmemPool_attribute:
        CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES
        CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC
        CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES
        CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
        CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH
        CU_MEMPOOL_ATTR_USED_MEM_CURRENT
        CU_MEMPOOL_ATTR_USED_MEM_HIGH

    ctypedef enum CUmemLocationType:
        CU_MEM_LOCATION_TYPE_DEVICE
        CU_MEM_LOCATION_TYPE_HOST
        CU_MEM_LOCATION_TYPE_HOST_NUMA

    ctypedef enum CUmemAllocationType:
        CU_MEM_ALLOCATION_TYPE_PINNED

    ctypedef enum CUmemAccess_flags:
        CU_MEM_ACCESS_FLAGS_PROT_NONE
        CU_MEM_ACCESS_FLAGS_PROT_READ
        CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    ctypedef struct CUmemLocation:
        CUmemLocationType type
        int id

    ctypedef struct CUmemAllocationProp:
        CUmemAllocationType type
        CUmemAllocationHandleType requestedHandleTypes
        CUmemLocation location

    ctypedef struct CUmemAccessDesc:
        CUmemLocation location
        CUmemAccess_flags flags

    ctypedef struct CUmemPoolProps:
        CUmemAllocationType allocType
        CUmemAllocationHandleType handleTypes
        CUmemLocation location
        size_t maxSize

    ctypedef struct CUmemPoolPtrExportData:
        unsigned char reserved[64]

    ctypedef void* CUexternalMemory

    ctypedef enum CUexternalMemoryHandleType:
        pass

    enum:
        CUDA_EXTERNAL_MEMORY_DEDICATED

    ctypedef union ExternalHandle "GMexternalHandle":
        int fd

    ctypedef struct CUDA_EXTERNAL_MEMORY_HANDLE_DESC:
        CUexternalMemoryHandleType type
        ExternalHandle handle
        unsigned long long size
        unsigned int flags

    ctypedef struct CUDA_EXTERNAL_MEMORY_BUFFER_DESC:
        unsigned long long offset
        unsigned long long size
        unsigned int flags

    ctypedef void* CUexternalSemaphore

    ctypedef enum CUexternalSemaphoreHandleType:
        CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD

    ctypedef struct CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC:
        CUexternalSemaphoreHandleType type
        ExternalHandle handle
        unsigned int flags

    ctypedef struct ExternalFence:      # nor has this
        unsigned long long value

    ctypedef struct ExternalFenceParams:
        ExternalFence fence

    ctypedef struct CUDA_EXTERNAL_SEMAPHORE_PARAMS:
        ExternalFenceParams params
        unsigned int flags

    enum:
        CU_STREAM_WAIT_VALUE_GEQ

    ctypedef struct DriverTable:
        CUresult (*cuInit)(unsigned int) nogil
        CUresult (*cuDriverGetVersion)(int*) nogil
        CUresult (*cuGetErrorName)(CUresult, const char**) nogil
        CUresult (*cuGetErrorString)(CUresult, const char**) nogil
        CUresult (*cuDeviceGetCount)(int*) nogil
        CUresult (*cuDeviceGet)(CUdevice*, int) nogil
        CUresult (*cuDeviceGetName)(char*, int, CUdevice) nogil
        CUresult (*cuDeviceGetUuid)(CUuuid*, CUdevice) nogil
        CUresult (*cuDeviceGetAttribute)(int*, CUdevice_attribute, CUdevice) nogil
        CUresult (*cuDeviceCanAccessPeer)(int*, CUdevice, CUdevice) nogil
        CUresult (*cuDevicePrimaryCtxRetain)(CUcontext*, CUdevice) nogil
        CUresult (*cuCtxPushCurrent)(CUcontext) nogil
        CUresult (*cuCtxPopCurrent)(CUcontext*) nogil
        CUresult (*cuCtxSynchronize)() nogil
        CUresult (*cuCtxRecordEvent)(CUcontext, CUevent) nogil
        CUresult (*cuCtxEnablePeerAccess)(CUcontext, unsigned int) nogil
        CUresult (*cuStreamCreate)(CUstream*, unsigned int) nogil
        CUresult (*cuStreamDestroy)(CUstream) nogil
        CUresult (*cuStreamQuery)(CUstream) nogil
        CUresult (*cuStreamSynchronize)(CUstream) nogil
        CUresult (*cuStreamWaitEvent)(CUstream, CUevent, unsigned int) nogil
        CUresult (*cuStreamIsCapturing)(CUstream, CUstreamCaptureStatus*) nogil
        CUresult (*cuLaunchHostFunc)(CUstream, CUhostFn, void*) nogil
        CUresult (*cuStreamWaitValue64)(CUstream, CUdeviceptr, uint64_t, unsigned int) nogil
        CUresult (*cuStreamWriteValue64)(CUstream, CUdeviceptr, uint64_t, unsigned int) nogil
        CUresult (*cuEventCreate)(CUevent*, unsigned int) nogil
        CUresult (*cuEventDestroy)(CUevent) nogil
        CUresult (*cuEventRecord)(CUevent, CUstream) nogil
        CUresult (*cuEventQuery)(CUevent) nogil
        CUresult (*cuEventSynchronize)(CUevent) nogil
        CUresult (*cuMemGetInfo)(size_t*, size_t*) nogil
        CUresult (*cuMemAlloc)(CUdeviceptr*, size_t) nogil
        CUresult (*cuMemFree)(CUdeviceptr) nogil
        CUresult (*cuMemHostAlloc)(void**, size_t, unsigned int) nogil
        CUresult (*cuMemFreeHost)(void*) nogil
        CUresult (*cuMemHostGetDevicePointer)(CUdeviceptr*, void*, unsigned int) nogil
        CUresult (*cuMemHostRegister)(void*, size_t, unsigned int) nogil
        CUresult (*cuMemHostUnregister)(void*) nogil
        CUresult (*cuMemAllocManaged)(CUdeviceptr*, size_t, unsigned int) nogil
        CUresult (*cuMemAdvise)(CUdeviceptr, size_t, CUmem_advise, CUmemLocation) nogil
        CUresult (*cuMemPrefetchAsync)(CUdeviceptr, size_t, CUmemLocation, unsigned int,
                                       CUstream) nogil
        CUresult (*cuMemcpyHtoDAsync)(CUdeviceptr, const void*, size_t, CUstream) nogil
        CUresult (*cuMemcpyDtoHAsync)(void*, CUdeviceptr, size_t, CUstream) nogil
        CUresult (*cuMemcpyDtoDAsync)(CUdeviceptr, CUdeviceptr, size_t, CUstream) nogil
        CUresult (*cuMemcpyAsync)(CUdeviceptr, CUdeviceptr, size_t, CUstream) nogil
        CUresult (*cuMemcpyPeerAsync)(CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t,
                                      CUstream) nogil
        CUresult (*cuMemcpy2DAsync)(const CUDA_MEMCPY2D*, CUstream) nogil
        CUresult (*cuMemcpy3DAsync)(const CUDA_MEMCPY3D*, CUstream) nogil
        CUresult (*cuPointerGetAttribute)(void*, CUpointer_attribute, CUdeviceptr) nogil
        CUresult (*cuMemsetD8Async)(CUdeviceptr, unsigned char, size_t, CUstream) nogil
        CUresult (*cuMemsetD16Async)(CUdeviceptr, unsigned short, size_t, CUstream) nogil
        CUresult (*cuMemsetD32Async)(CUdeviceptr, unsigned int, size_t, CUstream) nogil

        CUresult (*cuMemAddressReserve)(CUdeviceptr*, size_t, size_t, CUdeviceptr,
                                        unsigned long long) nogil
        CUresult (*cuMemAddressFree)(CUdeviceptr, size_t) nogil
        CUresult (*cuMemCreate)(CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*,
                                unsigned long long) nogil
        CUresult (*cuMemRelease)(CUmemGenericAllocationHandle) nogil
        CUresult (*cuMemMap)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle,
                             unsigned long long) nogil
        CUresult (*cuMemUnmap)(CUdeviceptr, size_t) nogil
        CUresult (*cuMemSetAccess)(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) nogil

        CUresult (*cuMemAllocFromPoolAsync)(CUdeviceptr*, size_t, CUmemoryPool, CUstream) nogil
        CUresult (*cuMemFreeAsync)(CUdeviceptr, CUstream) nogil
        CUresult (*cuMemPoolCreate)(CUmemoryPool*, const CUmemPoolProps*) nogil
        CUresult (*cuMemPoolDestroy)(CUmemoryPool) nogil
        CUresult (*cuMemPoolTrimTo)(CUmemoryPool, size_t) nogil
        CUresult (*cuMemPoolSetAttribute)(CUmemoryPool, CUmemPool_attribute, void*) nogil
        CUresult (*cuMemPoolGetAttribute)(CUmemoryPool, CUmemPool_attribute, void*) nogil
        CUresult (*cuMemPoolSetAccess)(CUmemoryPool, const CUmemAccessDesc*, size_t) nogil
        CUresult (*cuMemPoolGetAccess)(CUmemAccess_flags*, CUmemoryPool, CUmemLocation*) nogil
        CUresult (*cuMemPoolExportToShareableHandle)(void*, CUmemoryPool, CUmemAllocationHandleType,
                                                     unsigned long long) nogil
        CUresult (*cuMemPoolImportFromShareableHandle)(
            CUmemoryPool*, void*, CUmemAllocationHandleType, unsigned long long) nogil
        CUresult (*cuMemPoolExportPointer)(CUmemPoolPtrExportData*, CUdeviceptr) nogil
        CUresult (*cuMemPoolImportPointer)(CUdeviceptr*, CUmemoryPool,
                                           CUmemPoolPtrExportData*) nogil
        CUresult (*cuMemExportToShareableHandle)(void*, CUmemGenericAllocationHandle,
                                                 CUmemAllocationHandleType,
                                                 unsigned long long) nogil
        CUresult (*cuMemImportFromShareableHandle)(CUmemGenericAllocationHandle*, void*,
                                                   CUmemAllocationHandleType) nogil
        CUresult (*cuMemGetAllocationPropertiesFromHandle)(CUmemAllocationProp*,
                                                           CUmemGenericAllocationHandle) nogil
        CUresult (*cuImportExternalMemory)(CUexternalMemory*,
                                           const CUDA_EXTERNAL_MEMORY_HANDLE_DESC*) nogil
        CUresult (*cuExternalMemoryGetMappedBuffer)(CUdeviceptr*, CUexternalMemory,
                                                    const CUDA_EXTERNAL_MEMORY_BUFFER_DESC*) nogil
        CUresult (*cuDestroyExternalMemory)(CUexternalMemory) nogil
        CUresult (*cuImportExternalSemaphore)(CUexternalSemaphore*,
                                              const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC*) nogil
        CUresult (*cuSignalExternalSemaphoresAsync)(const CUexternalSemaphore*,
                                                    const CUDA_EXTERNAL_SEMAPHORE_PARAMS*,
                                                    unsigned int, CUstream) nogil
        CUresult (*cuWaitExternalSemaphoresAsync)(const CUexternalSemaphore*,
                                                  const CUDA_EXTERNAL_SEMAPHORE_PARAMS*,
                                                  unsigned int, CUstream) nogil
        CUresult (*cuDestroyExternalSemaphore)(CUexternalSemaphore) nogil
        CUresult (*cuDeviceGetDefaultMemPool)(CUmemoryPool*, CUdevice) nogil
        CUresult (*cuDeviceGetMemPool)(CUmemoryPool*, CUdevice) nogil

        CUresult (*cuMemAdvise_v1)(CUdeviceptr, size_t, CUmem_advise, CUdevice) nogil
        CUresult (*cuMemPrefetchAsync_v1)(CUdeviceptr, size_t, CUdevice, CUstream) nogil

        CUresult (*cuStreamGetCaptureInfo)(CUstream, CUstreamCaptureStatus*, uint64_t*, CUgraph*,
                                           const CUgraphNode**, size_t*) nogil
        CUresult (*cuStreamBeginCapture)(CUstream, CUstreamCaptureMode) nogil
        CUresult (*cuStreamEndCapture)(CUstream, CUgraph*) nogil
        CUresult (*cuThreadExchangeStreamCaptureMode)(CUstreamCaptureMode*) nogil
        CUresult (*cuGraphDestroy)(CUgraph) nogil
        CUresult (*cuGraphGetNodes)(CUgraph, CUgraphNode*, size_t*) nogil
        CUresult (*cuGraphInstantiateWithFlags)(CUgraphExec*, CUgraph, unsigned long long) nogil
        CUresult (*cuGraphExecDestroy)(CUgraphExec) nogil
        CUresult (*cuGraphLaunch)(CUgraphExec, CUstream) nogil
        CUresult (*cuUserObjectCreate)(CUuserObject*, void*, CUhostFn, unsigned int,
                                       unsigned int) nogil
        CUresult (*cuUserObjectRelease)(CUuserObject, unsigned int) nogil
        CUresult (*cuGraphRetainUserObject)(CUgraph, CUuserObject, unsigned int, unsigned int) nogil

    ctypedef struct DriverEntry:
        const char* name
        int version
        size_t offset

    const DriverEntry* driver_entries
    int DRIVER_ENTRY_COUNT

    ctypedef struct OlderEntry:
        const char* name
        int version
        int until
        size_t offset

    const OlderEntry* older_entries
    int OLDER_ENTRY_COUNT

    ctypedef struct DeviceAttribute:
        const char* name
        int number

    const DeviceAttribute* device_attributes
    int DEVICE_ATTRIBUTE_COUNT

# One device as C code without the interpreter sees it. Lives as long as the process.
cdef struct DeviceContext:
    const DriverTable* table
    CUcontext primary           # the device's primary context, retained
    CUdevice device
    int ordinal
    uint32_t generation         # of the process that opened it; in a fork's child it is dead
    bint is_host                # the host device: its streams understand a timeline's page
    uint64_t (*now)() noexcept nogil    # nanoseconds, on the clock of the device's calls
    bint (*clock_is_virtual)() noexcept nogil   # only calls move it; NULL: it never is
    bint frees_in_order         # the driver frees memory of cuMemAlloc in stream order
    uint64_t padding[8]         # a cache line: what is above is read at every allocation
    uint64_t calls              # driver calls made through it by arenas (atomic)
    CUstream free_stream        # for frees_in_order; idle otherwise. NULL until the first (atomic)
    uint64_t waits_begun        # waits for everything on the device, numbered from 1 (atomic)
    uint64_t waits_done         # the number of the latest that has ended (atomic)


cdef enum:
    MAX_PLACES = 65            # a device for each that a process may use, and a node of the host

# Who may touch memory that a driver call maps: the device that it is made for, the CPU if the
# memory is a node's, then peers. Only grows; an entry is complete before it is counted.
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

# Makes the device's context current for a few driver calls; every enter has its leave.
cdef CUresult context_enter(DeviceContext* context) noexcept nogil
cdef void context_leave(DeviceContext* context) noexcept nogil
# `node`: of the host's memory; -1: the device's own.
cdef void access_init(Access* access, const DeviceContext* context, int node) noexcept nogil
cdef bint access_has(const Access* access, int device) noexcept nogil
# The entry behind the last one, for a further device; counted by the caller. NULL: no room.
cdef CUmemAccessDesc* access_next(Access* access, int device) noexcept nogil
# Gives every place in the list access to mappings that lie side by side, in one call.
cdef CUresult access_apply(const DeviceContext* context, const Access* access, uint64_t address,
                           uint64_t nbytes) noexcept nogil
# Lets kernels and copies of `peer` access memory of cuMemAlloc in `context`, present and future.
cdef CUresult context_allow(DeviceContext* context, DeviceContext* peer) noexcept nogil
# While any thread captures a graph, calls that may block or allocate invalidate the capture unless
# this thread has relaxed itself. Returns the mode to restore. Every relax has its restore.
cdef CUstreamCaptureMode context_relax(const DeviceContext* context) noexcept nogil
cdef void context_restore(const DeviceContext* context, CUstreamCaptureMode before) noexcept nogil
# An attribute of an address, 4 or 8 bytes; 0 where the driver has none.
cdef CUresult pointer_attribute(DeviceContext* context, CUpointer_attribute which, uint64_t address,
                                uint64_t* value) noexcept nogil
# Does the stream capture a graph, and which capture and graph is it? Legal at any time. A stream
# that cannot be queried does not capture, like the legacy one while a stream that blocks it
# captures; `refusal` is then the driver's error, else CUDA_SUCCESS.
cdef bint stream_captures(DeviceContext* context, CUstream stream, uint64_t* capture,
                          CUgraph* graph, CUresult* refusal) noexcept nogil
# Why must the stream not be queried, waited for, or given an event? CUDA_SUCCESS: it may be;
# CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: it captures; else what the driver says of the handle.
cdef CUresult stream_refusal(DeviceContext* context, CUstream stream) noexcept nogil
cdef inline bint may_capture(DeviceContext* context, CUstream stream) noexcept nogil:
    return stream_refusal(context, stream) != CUDA_SUCCESS
# Does the refusal end with a capture? The legacy stream is refused while one lasts that it waits
# for.
cdef inline bint ends_with_capture(CUresult refusal) noexcept nogil:
    return (refusal == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
            or refusal == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
cdef inline bint context_is_dead(const DeviceContext* context) noexcept nogil:
    return process.exiting or context.generation != process.generation

# Waits that Ctrl-C ends on the main thread: the exception is raised, and the work goes on. Memory
# that the device may still use then must be alive and have no other owner: queue nothing before
# such a wait that only the wait's end makes safe.
cdef int synchronize_stream(DeviceContext* context, CUstream stream) except -1
cdef int synchronize_event(DeviceContext* context, CUevent event) except -1
# Everything queued on the device, on whatever stream. A driver before CUDA 12.5 has no query for
# that: it is waited for in the driver, and Ctrl-C comes afterwards.
cdef int synchronize_device(DeviceContext* context) except -1
# The same below the interpreter; `interrupted`: Ctrl-C ended the wait, and the exception is set.
# The device's may not be called where a capture is under way.
cdef CUresult point_wait(DeviceContext* context, Awaited what, void* point,
                         bint* interrupted) noexcept nogil
cdef CUresult device_wait(DeviceContext* context, bint* interrupted) noexcept nogil
# The device's until a time of `clock_ns`, on any thread; CUDA_ERROR_NOT_READY: not done by then. A
# driver without a query for that: at once.
cdef CUresult device_wait_until(DeviceContext* context, uint64_t until,
                                bint* interrupted) noexcept nogil
# cuCtxSynchronize of the current context, counted.
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
# Such as "CUDA_ERROR_INVALID_HANDLE".
cdef str error_name(const DriverTable* table, CUresult code)
cdef int require(const void* entry, str call, str what) except -1
# An attribute of an address; 0 where the driver does not have it, or not of this memory.
cdef uint64_t pointer_value(DriverDevice driver_device, CUpointer_attribute which,
                            uint64_t address) noexcept
cdef DriverDevice open_driver_device(const DriverTable* table, str type, int ordinal)
