/* The part of the CUDA driver API's binary interface that gpumem uses.
 *
 * Declared here, so that building needs no CUDA toolkit and one build serves every
 * driver of CUDA 12 and 13. These are layout facts: tests/source/test_driver_abi.py compiles
 * each size, offset and value against cuda.h wherever a header is found.
 *
 * Only the host device and the driver table include this file; it must never be
 * included together with cuda.h (the test compares the two through separate objects).
 */
#ifndef GPUMEM_CUDA_ABI_H
#define GPUMEM_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

/* ---- handles: opaque to us on CUDA, our own structs on the host device ---- */
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmemPoolHandle_st *CUmemoryPool;
typedef struct CUextMemory_st *CUexternalMemory;
typedef struct CUextSemaphore_st *CUexternalSemaphore;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUuserObject_st *CUuserObject;
typedef struct CUarray_st *CUarray;
typedef void (*CUhostFn)(void *user_data);

#define CU_STREAM_LEGACY ((CUstream)0x1)
#define CU_STREAM_PER_THREAD ((CUstream)0x2)

typedef struct CUuuid_st {
    char bytes[16];
} CUuuid;

/* ---- status codes: E(name without CUDA_, number, the driver's description) ---- */
#define GM_ERRORS(E)                                                                              \
    E(SUCCESS, 0, "no error")                                                                     \
    E(ERROR_INVALID_VALUE, 1, "invalid argument")                                                 \
    E(ERROR_OUT_OF_MEMORY, 2, "out of memory")                                                    \
    E(ERROR_NOT_INITIALIZED, 3, "initialization error")                                           \
    E(ERROR_DEINITIALIZED, 4, "driver shutting down")                                             \
    E(ERROR_STUB_LIBRARY, 34, "CUDA driver is a stub library")                                    \
    E(ERROR_CALL_REQUIRES_NEWER_DRIVER, 36, "this call requires a newer CUDA driver")             \
    E(ERROR_DEVICE_UNAVAILABLE, 46, "CUDA-capable device(s) is/are busy or unavailable")          \
    E(ERROR_NO_DEVICE, 100, "no CUDA-capable device is detected")                                 \
    E(ERROR_INVALID_DEVICE, 101, "invalid device ordinal")                                        \
    E(ERROR_INVALID_CONTEXT, 201, "invalid device context")                                       \
    E(ERROR_MAP_FAILED, 205, "mapping of buffer object failed")                                   \
    E(ERROR_UNMAP_FAILED, 206, "unmapping of buffer object failed")                               \
    E(ERROR_ALREADY_MAPPED, 208, "resource already mapped")                                       \
    E(ERROR_NOT_MAPPED, 211, "resource not mapped")                                               \
    E(ERROR_PEER_ACCESS_UNSUPPORTED, 217,                                                         \
      "peer access is not supported between these two devices")                                   \
    E(ERROR_OPERATING_SYSTEM, 304, "OS call failed or operation not supported on this OS")        \
    E(ERROR_INVALID_HANDLE, 400, "invalid resource handle")                                       \
    E(ERROR_ILLEGAL_STATE, 401, "the operation cannot be performed in the present state")         \
    E(ERROR_NOT_FOUND, 500, "named symbol not found")                                             \
    E(ERROR_NOT_READY, 600, "device not ready")                                                   \
    E(ERROR_ILLEGAL_ADDRESS, 700, "an illegal memory access was encountered")                     \
    E(ERROR_PEER_ACCESS_ALREADY_ENABLED, 704, "peer access is already enabled")                   \
    E(ERROR_PEER_ACCESS_NOT_ENABLED, 705, "peer access has not been enabled")                     \
    E(ERROR_CONTEXT_IS_DESTROYED, 709, "context is destroyed")                                    \
    E(ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712,                                                  \
      "part or all of the requested memory range is already mapped")                              \
    E(ERROR_HOST_MEMORY_NOT_REGISTERED, 713,                                                      \
      "pointer does not correspond to a registered memory region")                                \
    E(ERROR_LAUNCH_FAILED, 719, "unspecified launch failure")                                     \
    E(ERROR_NOT_PERMITTED, 800, "operation not permitted")                                        \
    E(ERROR_NOT_SUPPORTED, 801, "operation not supported")                                        \
    E(ERROR_STREAM_CAPTURE_UNSUPPORTED, 900, "operation not permitted when stream is capturing")  \
    E(ERROR_STREAM_CAPTURE_INVALIDATED, 901,                                                      \
      "operation failed due to a previous error during capture")                                  \
    E(ERROR_STREAM_CAPTURE_MERGE, 902,                                                            \
      "operation would result in a merge of separate capture sequences")                          \
    E(ERROR_STREAM_CAPTURE_UNMATCHED, 903,                                                        \
      "capture was not ended in the same stream as it began")                                     \
    E(ERROR_STREAM_CAPTURE_UNJOINED, 904, "capturing stream has unjoined work")                   \
    E(ERROR_STREAM_CAPTURE_ISOLATION, 905,                                                        \
      "dependency created on uncaptured work in another stream")                                  \
    E(ERROR_STREAM_CAPTURE_IMPLICIT, 906,                                                         \
      "operation would make the legacy stream depend on a capturing blocking stream")             \
    E(ERROR_CAPTURED_EVENT, 907,                                                                  \
      "operation not permitted on an event last recorded in a capturing stream")                  \
    E(ERROR_STREAM_CAPTURE_WRONG_THREAD, 908,                                                     \
      "attempt to terminate a thread-local capture sequence from another thread")                 \
    E(ERROR_TIMEOUT, 909, "wait operation timed out")                                             \
    E(ERROR_UNKNOWN, 999, "unknown error")

#define GM_ERROR_VALUE(name, number, text) CUDA_##name = number,
typedef enum cudaError_enum { GM_ERRORS(GM_ERROR_VALUE) } CUresult;
#undef GM_ERROR_VALUE

/* ---- devices and contexts ---- */
/* A(name without CU_DEVICE_ATTRIBUTE_, number) */
#define GM_DEVICE_ATTRIBUTES(A)                                                                   \
    A(CLOCK_RATE, 13)                                                                             \
    A(MULTIPROCESSOR_COUNT, 16)                                                                   \
    A(INTEGRATED, 18)                                                                             \
    A(CAN_MAP_HOST_MEMORY, 19)                                                                    \
    A(PCI_BUS_ID, 33)                                                                             \
    A(ASYNC_ENGINE_COUNT, 40)                                                                     \
    A(UNIFIED_ADDRESSING, 41)                                                                     \
    A(COMPUTE_CAPABILITY_MAJOR, 75)                                                               \
    A(STREAM_PRIORITIES_SUPPORTED, 78)                                                            \
    A(MANAGED_MEMORY, 83)                                                                         \
    A(CONCURRENT_MANAGED_ACCESS, 89)                                                              \
    A(CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 91)                                                \
    A(HOST_REGISTER_SUPPORTED, 99)                                                                \
    A(VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 102)                                                   \
    A(HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 103)                                           \
    A(GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 110)                                               \
    A(READ_ONLY_HOST_REGISTER_SUPPORTED, 113)                                                     \
    A(TIMELINE_SEMAPHORE_INTEROP_SUPPORTED, 114)                                                  \
    A(MEMORY_POOLS_SUPPORTED, 115)                                                                \
    A(GPU_DIRECT_RDMA_SUPPORTED, 116)                                                             \
    A(MEMPOOL_SUPPORTED_HANDLE_TYPES, 119)                                                        \
    A(CAN_USE_64_BIT_STREAM_MEM_OPS, 122)                                                         \
    A(DMA_BUF_SUPPORTED, 124)                                                                     \
    A(IPC_EVENT_SUPPORTED, 125)                                                                   \
    A(HANDLE_TYPE_FABRIC_SUPPORTED, 128)                                                          \
    A(HOST_NUMA_ID, 134)

#define GM_ATTRIBUTE_VALUE(name, number) CU_DEVICE_ATTRIBUTE_##name = number,
typedef enum CUdevice_attribute_enum { GM_DEVICE_ATTRIBUTES(GM_ATTRIBUTE_VALUE) } CUdevice_attribute;
#undef GM_ATTRIBUTE_VALUE

/* ---- streams and events ---- */
enum {
    CU_STREAM_DEFAULT = 0,
    CU_STREAM_NON_BLOCKING = 1,
    CU_EVENT_BLOCKING_SYNC = 1,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_EVENT_INTERPROCESS = 4,
    CU_STREAM_WAIT_VALUE_GEQ = 0,
    CU_STREAM_WAIT_VALUE_EQ = 1,
    CU_STREAM_WAIT_VALUE_AND = 2,
    CU_STREAM_WAIT_VALUE_NOR = 3,
    CU_STREAM_WAIT_VALUE_FLUSH = 1 << 30,
    CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER = 1
};

typedef enum CUstreamCaptureStatus_enum {
    CU_STREAM_CAPTURE_STATUS_NONE = 0,
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
    CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2
} CUstreamCaptureStatus;

typedef enum CUstreamCaptureMode_enum {
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
    CU_STREAM_CAPTURE_MODE_RELAXED = 2
} CUstreamCaptureMode;

/* ---- memory: kinds, copies, pointer attributes ---- */
enum {
    CU_MEMHOSTALLOC_PORTABLE = 1,
    CU_MEMHOSTALLOC_DEVICEMAP = 2,
    CU_MEMHOSTALLOC_WRITECOMBINED = 4,
    CU_MEMHOSTREGISTER_PORTABLE = 1,
    CU_MEMHOSTREGISTER_DEVICEMAP = 2,
    CU_MEMHOSTREGISTER_IOMEMORY = 4,
    CU_MEMHOSTREGISTER_READ_ONLY = 8,
    CU_MEM_ATTACH_GLOBAL = 1,
    CU_MEM_ATTACH_HOST = 2
};

typedef enum CUmemorytype_enum {
    CU_MEMORYTYPE_HOST = 1,
    CU_MEMORYTYPE_DEVICE = 2,
    CU_MEMORYTYPE_UNIFIED = 4
} CUmemorytype;

typedef enum CUmem_advise_enum {
    CU_MEM_ADVISE_SET_READ_MOSTLY = 1,
    CU_MEM_ADVISE_UNSET_READ_MOSTLY = 2,
    CU_MEM_ADVISE_SET_PREFERRED_LOCATION = 3,
    CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION = 4,
    CU_MEM_ADVISE_SET_ACCESSED_BY = 5,
    CU_MEM_ADVISE_UNSET_ACCESSED_BY = 6
} CUmem_advise;

typedef enum CUpointer_attribute_enum {
    CU_POINTER_ATTRIBUTE_CONTEXT = 1,
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
    CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3,
    CU_POINTER_ATTRIBUTE_HOST_POINTER = 4,
    CU_POINTER_ATTRIBUTE_SYNC_MEMOPS = 6,
    CU_POINTER_ATTRIBUTE_BUFFER_ID = 7,
    CU_POINTER_ATTRIBUTE_IS_MANAGED = 8,
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10,
    CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
    CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
    CU_POINTER_ATTRIBUTE_MAPPED = 13,
    CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES = 14,
    CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE = 15,
    CU_POINTER_ATTRIBUTE_ACCESS_FLAGS = 16,
    CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE = 17
} CUpointer_attribute;

typedef struct CUDA_MEMCPY2D_st {
    size_t srcXInBytes;
    size_t srcY;
    CUmemorytype srcMemoryType;
    const void *srcHost;
    CUdeviceptr srcDevice;
    CUarray srcArray;
    size_t srcPitch;
    size_t dstXInBytes;
    size_t dstY;
    CUmemorytype dstMemoryType;
    void *dstHost;
    CUdeviceptr dstDevice;
    CUarray dstArray;
    size_t dstPitch;
    size_t WidthInBytes;
    size_t Height;
} CUDA_MEMCPY2D;

typedef struct CUDA_MEMCPY3D_st {
    size_t srcXInBytes;
    size_t srcY;
    size_t srcZ;
    size_t srcLOD;
    CUmemorytype srcMemoryType;
    const void *srcHost;
    CUdeviceptr srcDevice;
    CUarray srcArray;
    void *reserved0;
    size_t srcPitch;
    size_t srcHeight;
    size_t dstXInBytes;
    size_t dstY;
    size_t dstZ;
    size_t dstLOD;
    CUmemorytype dstMemoryType;
    void *dstHost;
    CUdeviceptr dstDevice;
    CUarray dstArray;
    void *reserved1;
    size_t dstPitch;
    size_t dstHeight;
    size_t WidthInBytes;
    size_t Height;
    size_t Depth;
} CUDA_MEMCPY3D;

/* ---- virtual memory ---- */
typedef enum CUmemLocationType_enum {
    CU_MEM_LOCATION_TYPE_DEVICE = 1,
    CU_MEM_LOCATION_TYPE_HOST = 2,
    CU_MEM_LOCATION_TYPE_HOST_NUMA = 3,
    CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT = 4
} CUmemLocationType;

typedef enum CUmemAllocationType_enum {
    CU_MEM_ALLOCATION_TYPE_PINNED = 1
} CUmemAllocationType;

typedef enum CUmemAllocationHandleType_enum {
    CU_MEM_HANDLE_TYPE_NONE = 0,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
    CU_MEM_HANDLE_TYPE_WIN32 = 2,
    CU_MEM_HANDLE_TYPE_FABRIC = 8
} CUmemAllocationHandleType;

typedef enum CUmemAccess_flags_enum {
    CU_MEM_ACCESS_FLAGS_PROT_NONE = 0,
    CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3
} CUmemAccess_flags;

typedef enum CUmemAllocationGranularity_flags_enum {
    CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1
} CUmemAllocationGranularity_flags;

typedef enum CUmemRangeHandleType_enum {
    CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1
} CUmemRangeHandleType;

typedef struct CUmemLocation_st {
    CUmemLocationType type;
    int id;
} CUmemLocation;

typedef struct CUmemAccessDesc_st {
    CUmemLocation location;
    CUmemAccess_flags flags;
} CUmemAccessDesc;

typedef struct CUmemAllocationProp_st {
    CUmemAllocationType type;
    CUmemAllocationHandleType requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType;
        unsigned char gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;

/* ---- stream-ordered pools ---- */
typedef enum CUmemPool_attribute_enum {
    CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES = 1,
    CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC = 2,
    CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES = 3,
    CU_MEMPOOL_ATTR_RELEASE_THRESHOLD = 4,
    CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT = 5,
    CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH = 6,
    CU_MEMPOOL_ATTR_USED_MEM_CURRENT = 7,
    CU_MEMPOOL_ATTR_USED_MEM_HIGH = 8
} CUmemPool_attribute;

typedef struct CUmemPoolProps_st {
    CUmemAllocationType allocType;
    CUmemAllocationHandleType handleTypes;
    CUmemLocation location;
    void *win32SecurityAttributes;
    size_t maxSize;
    unsigned short usage;
    unsigned char reserved[54];
} CUmemPoolProps;

typedef struct CUmemPoolPtrExportData_st {
    unsigned char reserved[64];
} CUmemPoolPtrExportData;

/* ---- external memory and semaphores ---- */
typedef enum CUexternalMemoryHandleType_enum {
    CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD = 1,
    CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_WIN32 = 2,
    CU_EXTERNAL_MEMORY_HANDLE_TYPE_D3D12_HEAP = 4,
    CU_EXTERNAL_MEMORY_HANDLE_TYPE_D3D12_RESOURCE = 5,
    CU_EXTERNAL_MEMORY_HANDLE_TYPE_DMABUF_FD = 9
} CUexternalMemoryHandleType;

typedef enum CUexternalSemaphoreHandleType_enum {
    CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_FD = 1,
    CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_D3D12_FENCE = 4,
    CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD = 9,
    CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_WIN32 = 10
} CUexternalSemaphoreHandleType;

enum { CUDA_EXTERNAL_MEMORY_DEDICATED = 1 };

typedef union GMexternalHandle {
    int fd;
    struct {
        void *handle;
        const void *name;
    } win32;
    const void *nvSciObject;
} GMexternalHandle;

typedef struct CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st {
    CUexternalMemoryHandleType type;
    GMexternalHandle handle;
    unsigned long long size;
    unsigned int flags;
    unsigned int reserved[16];
} CUDA_EXTERNAL_MEMORY_HANDLE_DESC;

typedef struct CUDA_EXTERNAL_MEMORY_BUFFER_DESC_st {
    unsigned long long offset;
    unsigned long long size;
    unsigned int flags;
    unsigned int reserved[16];
} CUDA_EXTERNAL_MEMORY_BUFFER_DESC;

typedef struct CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st {
    CUexternalSemaphoreHandleType type;
    GMexternalHandle handle;
    unsigned int flags;
    unsigned int reserved[16];
} CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC;

/* Signal and wait parameters differ in the driver by a timeout of the keyed mutex, a
 * Direct3D 11 object; they agree in size and in every field that gpumem sets. */
typedef struct CUDA_EXTERNAL_SEMAPHORE_PARAMS_st {
    struct {
        struct {
            unsigned long long value;
        } fence;
        unsigned long long nvSciSync;
        unsigned long long keyedMutex[1];
        unsigned int reserved[12];
    } params;
    unsigned int flags;
    unsigned int reserved[16];
} CUDA_EXTERNAL_SEMAPHORE_PARAMS;

#endif
