"""The driver's types, constants and table of functions, as include/driver_table.h declares them.

An entry of `DriverTable` has the signature and the meaning that the CUDA driver API gives it.
"""

from libc.stdint cimport uint64_t

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

    ctypedef struct ExternalFence:
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
