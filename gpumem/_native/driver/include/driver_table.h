/* One table of driver functions, which arenas call, on CUDA and on the host device.
 *
 * GM_DRIVER_FUNCTIONS is the single list. From it come the struct, the names and
 * versions that fill it from a CUDA driver (driver/table.pyx), the prototypes that the
 * host device implements (hostdev/) and the test-only shared library.
 *
 * F(name, version, parameters)
 *   name        the driver API's name without the prefix "cu"
 *   version     the CUDA version that has this signature, as cuGetProcAddress expects it
 *   parameters  exactly the driver's, so that an entry is called as the driver would be
 *
 * A NULL entry is a function that an older driver does not have: callers that do not
 * strictly need a function compare it with NULL first.
 */
#ifndef GPUMEM_DRIVER_TABLE_H
#define GPUMEM_DRIVER_TABLE_H

#include "cuda_abi.h"

#define GM_DRIVER_FUNCTIONS(F)                                                                    \
    /* start, errors, devices */                                                                  \
    F(Init, 2000, (unsigned int flags))                                                           \
    F(DriverGetVersion, 2020, (int *version))                                                     \
    F(GetErrorName, 6000, (CUresult error, const char **text))                                    \
    F(GetErrorString, 6000, (CUresult error, const char **text))                                  \
    F(DeviceGetCount, 2000, (int *count))                                                         \
    F(DeviceGet, 2000, (CUdevice *device, int ordinal))                                           \
    F(DeviceGetName, 2000, (char *name, int length, CUdevice device))                             \
    F(DeviceGetUuid, 11040, (CUuuid *uuid, CUdevice device))                                      \
    F(DeviceTotalMem, 3020, (size_t *bytes, CUdevice device))                                     \
    F(DeviceGetAttribute, 2000, (int *value, CUdevice_attribute attribute, CUdevice device))      \
    F(DeviceCanAccessPeer, 4000, (int *can, CUdevice device, CUdevice peer))                      \
    /* contexts */                                                                                \
    F(DevicePrimaryCtxRetain, 7000, (CUcontext *context, CUdevice device))                        \
    F(DevicePrimaryCtxRelease, 11000, (CUdevice device))                                          \
    F(DevicePrimaryCtxGetState, 7000, (CUdevice device, unsigned int *flags, int *active))        \
    F(CtxGetCurrent, 4000, (CUcontext *context))                                                  \
    F(CtxSetCurrent, 4000, (CUcontext context))                                                   \
    F(CtxPushCurrent, 4000, (CUcontext context))                                                  \
    F(CtxPopCurrent, 4000, (CUcontext *context))                                                  \
    F(CtxGetDevice, 2000, (CUdevice *device))                                                     \
    F(CtxSynchronize, 2000, (void))                                                               \
    F(CtxRecordEvent, 12050, (CUcontext context, CUevent event))                                  \
    F(CtxGetStreamPriorityRange, 5050, (int *least, int *greatest))                               \
    F(CtxEnablePeerAccess, 4000, (CUcontext peer, unsigned int flags))                            \
    F(CtxDisablePeerAccess, 4000, (CUcontext peer))                                               \
    /* streams */                                                                                 \
    F(StreamCreate, 2000, (CUstream *stream, unsigned int flags))                                 \
    F(StreamCreateWithPriority, 5050, (CUstream *stream, unsigned int flags, int priority))       \
    F(StreamDestroy, 4000, (CUstream stream))                                                     \
    F(StreamQuery, 2000, (CUstream stream))                                                       \
    F(StreamSynchronize, 2000, (CUstream stream))                                                 \
    F(StreamWaitEvent, 3020, (CUstream stream, CUevent event, unsigned int flags))                \
    F(StreamGetPriority, 5050, (CUstream stream, int *priority))                                  \
    F(StreamGetFlags, 5050, (CUstream stream, unsigned int *flags))                               \
    F(StreamGetCtx, 9020, (CUstream stream, CUcontext *context))                                  \
    F(StreamGetId, 12000, (CUstream stream, unsigned long long *id))                              \
    F(LaunchHostFunc, 10000, (CUstream stream, CUhostFn function, void *user_data))               \
    F(StreamWaitValue32, 11070,                                                                   \
      (CUstream stream, CUdeviceptr address, uint32_t value, unsigned int flags))                 \
    F(StreamWriteValue32, 11070,                                                                  \
      (CUstream stream, CUdeviceptr address, uint32_t value, unsigned int flags))                 \
    F(StreamWaitValue64, 11070,                                                                   \
      (CUstream stream, CUdeviceptr address, uint64_t value, unsigned int flags))                 \
    F(StreamWriteValue64, 11070,                                                                  \
      (CUstream stream, CUdeviceptr address, uint64_t value, unsigned int flags))                 \
    /* events */                                                                                  \
    F(EventCreate, 2000, (CUevent *event, unsigned int flags))                                    \
    F(EventDestroy, 4000, (CUevent event))                                                        \
    F(EventRecord, 2000, (CUevent event, CUstream stream))                                        \
    F(EventQuery, 2000, (CUevent event))                                                          \
    F(EventSynchronize, 2000, (CUevent event))                                                    \
    F(EventElapsedTime, 2000, (float *milliseconds, CUevent start, CUevent end))                  \
    /* memory */                                                                                  \
    F(MemGetInfo, 3020, (size_t *free, size_t *total))                                            \
    F(MemAlloc, 3020, (CUdeviceptr *pointer, size_t size))                                        \
    F(MemFree, 3020, (CUdeviceptr pointer))                                                       \
    F(MemGetAddressRange, 3020, (CUdeviceptr *base, size_t *size, CUdeviceptr pointer))           \
    F(MemHostAlloc, 2020, (void **pointer, size_t size, unsigned int flags))                      \
    F(MemFreeHost, 2000, (void *pointer))                                                         \
    F(MemHostGetDevicePointer, 3020, (CUdeviceptr *device, void *host, unsigned int flags))       \
    F(MemHostGetFlags, 2030, (unsigned int *flags, void *pointer))                                \
    F(MemHostRegister, 6050, (void *pointer, size_t size, unsigned int flags))                    \
    F(MemHostUnregister, 4000, (void *pointer))                                                   \
    F(MemAllocManaged, 6000, (CUdeviceptr *pointer, size_t size, unsigned int flags))             \
    F(MemAdvise, 12020,                                                                           \
      (CUdeviceptr pointer, size_t size, CUmem_advise advice, CUmemLocation location))            \
    F(MemPrefetchAsync, 12020,                                                                    \
      (CUdeviceptr pointer, size_t size, CUmemLocation location, unsigned int flags,              \
       CUstream stream))                                                                          \
    F(PointerGetAttribute, 4000,                                                                  \
      (void *data, CUpointer_attribute attribute, CUdeviceptr pointer))                           \
    F(PointerGetAttributes, 7000,                                                                 \
      (unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr pointer))    \
    F(PointerSetAttribute, 6000,                                                                  \
      (const void *value, CUpointer_attribute attribute, CUdeviceptr pointer))                    \
    /* copies and fills */                                                                        \
    F(Memcpy, 4000, (CUdeviceptr dst, CUdeviceptr src, size_t size))                              \
    F(MemcpyAsync, 4000, (CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream stream))        \
    F(MemcpyHtoD, 3020, (CUdeviceptr dst, const void *src, size_t size))                          \
    F(MemcpyDtoH, 3020, (void *dst, CUdeviceptr src, size_t size))                                \
    F(MemcpyDtoD, 3020, (CUdeviceptr dst, CUdeviceptr src, size_t size))                          \
    F(MemcpyHtoDAsync, 3020, (CUdeviceptr dst, const void *src, size_t size, CUstream stream))    \
    F(MemcpyDtoHAsync, 3020, (void *dst, CUdeviceptr src, size_t size, CUstream stream))          \
    F(MemcpyDtoDAsync, 3020, (CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream stream))    \
    F(MemcpyPeer, 4000,                                                                           \
      (CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src, CUcontext src_context,            \
       size_t size))                                                                              \
    F(MemcpyPeerAsync, 4000,                                                                      \
      (CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src, CUcontext src_context,            \
       size_t size, CUstream stream))                                                             \
    F(Memcpy2D, 3020, (const CUDA_MEMCPY2D *copy))                                                \
    F(Memcpy2DUnaligned, 3020, (const CUDA_MEMCPY2D *copy))                                       \
    F(Memcpy2DAsync, 3020, (const CUDA_MEMCPY2D *copy, CUstream stream))                          \
    F(Memcpy3D, 3020, (const CUDA_MEMCPY3D *copy))                                                \
    F(Memcpy3DAsync, 3020, (const CUDA_MEMCPY3D *copy, CUstream stream))                          \
    F(MemsetD8, 3020, (CUdeviceptr dst, unsigned char value, size_t count))                       \
    F(MemsetD8Async, 3020,                                                                        \
      (CUdeviceptr dst, unsigned char value, size_t count, CUstream stream))                      \
    F(MemsetD16Async, 3020,                                                                       \
      (CUdeviceptr dst, unsigned short value, size_t count, CUstream stream))                     \
    F(MemsetD32, 3020, (CUdeviceptr dst, unsigned int value, size_t count))                       \
    F(MemsetD32Async, 3020,                                                                       \
      (CUdeviceptr dst, unsigned int value, size_t count, CUstream stream))                       \
    F(MemsetD2D8Async, 3020,                                                                      \
      (CUdeviceptr dst, size_t pitch, unsigned char value, size_t width, size_t height,           \
       CUstream stream))                                                                          \
    /* virtual memory */                                                                          \
    F(MemAddressReserve, 10020,                                                                   \
      (CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr hint,                     \
       unsigned long long flags))                                                                 \
    F(MemAddressFree, 10020, (CUdeviceptr pointer, size_t size))                                  \
    F(MemCreate, 10020,                                                                           \
      (CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,        \
       unsigned long long flags))                                                                 \
    F(MemRelease, 10020, (CUmemGenericAllocationHandle handle))                                   \
    F(MemMap, 10020,                                                                              \
      (CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle,      \
       unsigned long long flags))                                                                 \
    F(MemUnmap, 10020, (CUdeviceptr pointer, size_t size))                                        \
    F(MemSetAccess, 10020,                                                                        \
      (CUdeviceptr pointer, size_t size, const CUmemAccessDesc *access, size_t count))            \
    F(MemGetAccess, 10020,                                                                        \
      (unsigned long long *flags, const CUmemLocation *location, CUdeviceptr pointer))            \
    F(MemExportToShareableHandle, 10020,                                                          \
      (void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,      \
       unsigned long long flags))                                                                 \
    F(MemImportFromShareableHandle, 10020,                                                        \
      (CUmemGenericAllocationHandle *handle, void *shareable, CUmemAllocationHandleType type))    \
    F(MemGetAllocationGranularity, 10020,                                                         \
      (size_t *granularity, const CUmemAllocationProp *prop,                                      \
       CUmemAllocationGranularity_flags option))                                                  \
    F(MemGetAllocationPropertiesFromHandle, 10020,                                                \
      (CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle))                           \
    F(MemRetainAllocationHandle, 11000, (CUmemGenericAllocationHandle *handle, void *address))    \
    F(MemGetHandleForAddressRange, 11070,                                                         \
      (void *handle, CUdeviceptr pointer, size_t size, CUmemRangeHandleType type,                 \
       unsigned long long flags))                                                                 \
    /* stream-ordered pools */                                                                    \
    F(MemAllocAsync, 11020, (CUdeviceptr *pointer, size_t size, CUstream stream))                 \
    F(MemFreeAsync, 11020, (CUdeviceptr pointer, CUstream stream))                                \
    F(MemAllocFromPoolAsync, 11020,                                                               \
      (CUdeviceptr *pointer, size_t size, CUmemoryPool pool, CUstream stream))                    \
    F(MemPoolCreate, 11020, (CUmemoryPool *pool, const CUmemPoolProps *props))                    \
    F(MemPoolDestroy, 11020, (CUmemoryPool pool))                                                 \
    F(MemPoolTrimTo, 11020, (CUmemoryPool pool, size_t bytes_to_keep))                            \
    F(MemPoolSetAttribute, 11020,                                                                 \
      (CUmemoryPool pool, CUmemPool_attribute attribute, void *value))                            \
    F(MemPoolGetAttribute, 11020,                                                                 \
      (CUmemoryPool pool, CUmemPool_attribute attribute, void *value))                            \
    F(MemPoolSetAccess, 11020, (CUmemoryPool pool, const CUmemAccessDesc *access, size_t count))  \
    F(MemPoolGetAccess, 11020,                                                                    \
      (CUmemAccess_flags *flags, CUmemoryPool pool, CUmemLocation *location))                     \
    F(MemPoolExportToShareableHandle, 11020,                                                      \
      (void *shareable, CUmemoryPool pool, CUmemAllocationHandleType type,                        \
       unsigned long long flags))                                                                 \
    F(MemPoolImportFromShareableHandle, 11020,                                                    \
      (CUmemoryPool *pool, void *shareable, CUmemAllocationHandleType type,                       \
       unsigned long long flags))                                                                 \
    F(MemPoolExportPointer, 11020, (CUmemPoolPtrExportData *data, CUdeviceptr pointer))           \
    F(MemPoolImportPointer, 11020,                                                                \
      (CUdeviceptr *pointer, CUmemoryPool pool, CUmemPoolPtrExportData *data))                    \
    F(DeviceGetDefaultMemPool, 11020, (CUmemoryPool *pool, CUdevice device))                      \
    F(DeviceGetMemPool, 11020, (CUmemoryPool *pool, CUdevice device))                             \
    F(DeviceSetMemPool, 11020, (CUdevice device, CUmemoryPool pool))                              \
    /* external memory and semaphores */                                                          \
    F(ImportExternalMemory, 10000,                                                                \
      (CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc))                   \
    F(ExternalMemoryGetMappedBuffer, 10000,                                                       \
      (CUdeviceptr *pointer, CUexternalMemory memory,                                             \
       const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *desc))                                             \
    F(DestroyExternalMemory, 10000, (CUexternalMemory memory))                                    \
    F(ImportExternalSemaphore, 10000,                                                             \
      (CUexternalSemaphore *semaphore, const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC *desc))          \
    F(SignalExternalSemaphoresAsync, 10000,                                                       \
      (const CUexternalSemaphore *semaphores, const CUDA_EXTERNAL_SEMAPHORE_PARAMS *params,       \
       unsigned int count, CUstream stream))                                                      \
    F(WaitExternalSemaphoresAsync, 10000,                                                         \
      (const CUexternalSemaphore *semaphores, const CUDA_EXTERNAL_SEMAPHORE_PARAMS *params,       \
       unsigned int count, CUstream stream))                                                      \
    F(DestroyExternalSemaphore, 10000, (CUexternalSemaphore semaphore))                           \
    /* capture and graphs */                                                                      \
    F(StreamBeginCapture, 10010, (CUstream stream, CUstreamCaptureMode mode))                     \
    F(StreamEndCapture, 10000, (CUstream stream, CUgraph *graph))                                 \
    F(StreamIsCapturing, 10000, (CUstream stream, CUstreamCaptureStatus *status))                 \
    F(StreamGetCaptureInfo, 11030,                                                                \
      (CUstream stream, CUstreamCaptureStatus *status, uint64_t *id, CUgraph *graph,              \
       const CUgraphNode **dependencies, size_t *count))                                          \
    F(ThreadExchangeStreamCaptureMode, 10010, (CUstreamCaptureMode *mode))                        \
    F(GraphCreate, 10000, (CUgraph *graph, unsigned int flags))                                   \
    F(GraphDestroy, 10000, (CUgraph graph))                                                       \
    F(GraphGetNodes, 10000, (CUgraph graph, CUgraphNode *nodes, size_t *count))                   \
    F(GraphInstantiateWithFlags, 11040,                                                           \
      (CUgraphExec *exec, CUgraph graph, unsigned long long flags))                               \
    F(GraphExecDestroy, 10000, (CUgraphExec exec))                                                \
    F(GraphLaunch, 10000, (CUgraphExec exec, CUstream stream))                                    \
    F(UserObjectCreate, 11030,                                                                    \
      (CUuserObject *object, void *pointer, CUhostFn destroy, unsigned int references,            \
       unsigned int flags))                                                                       \
    F(UserObjectRelease, 11030, (CUuserObject object, unsigned int count))                        \
    F(GraphRetainUserObject, 11030,                                                               \
      (CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags))

/* Functions that changed their signature, as drivers older than the version above have them.
 *
 * F(name, version, until, parameters)
 *   until  the driver version that has the later signature; from there on the entry is NULL
 */
#define GM_OLDER_FUNCTIONS(F)                                                                     \
    F(MemAdvise, 8000, 12020,                                                                     \
      (CUdeviceptr pointer, size_t size, CUmem_advise advice, CUdevice device))                   \
    F(MemPrefetchAsync, 8000, 12020,                                                              \
      (CUdeviceptr pointer, size_t size, CUdevice device, CUstream stream))

#define GM_ENTRY_FIELD(name, version, parameters) CUresult(*cu##name) parameters;
#define GM_OLDER_FIELD(name, version, until, parameters) CUresult(*cu##name##_v1) parameters;
typedef struct DriverTable {
    GM_DRIVER_FUNCTIONS(GM_ENTRY_FIELD)
    GM_OLDER_FUNCTIONS(GM_OLDER_FIELD)
} DriverTable;
#undef GM_ENTRY_FIELD
#undef GM_OLDER_FIELD

/* For filling a table by name: the entry's place in the struct, its name and version. */
typedef struct DriverEntry {
    const char *name; /* "cuMemAlloc" */
    int version;      /* 3020 */
    size_t offset;    /* of the entry in DriverTable, bytes */
} DriverEntry;

#define GM_ENTRY_ROW(name, version, parameters) \
    {"cu" #name, version, offsetof(DriverTable, cu##name)},
static const DriverEntry driver_entries[] = {GM_DRIVER_FUNCTIONS(GM_ENTRY_ROW)};
#undef GM_ENTRY_ROW
enum { DRIVER_ENTRY_COUNT = (int)(sizeof driver_entries / sizeof driver_entries[0]) };

typedef struct OlderEntry {
    const char *name;
    int version, until;
    size_t offset;
} OlderEntry;

#define GM_OLDER_ROW(name, version, until, parameters) \
    {"cu" #name, version, until, offsetof(DriverTable, cu##name##_v1)},
static const OlderEntry older_entries[] = {GM_OLDER_FUNCTIONS(GM_OLDER_ROW)};
#undef GM_OLDER_ROW
enum { OLDER_ENTRY_COUNT = (int)(sizeof older_entries / sizeof older_entries[0]) };

#ifdef GM_DEVICE_ATTRIBUTES /* a test has cuda.h in place of cuda_abi.h */
typedef struct DeviceAttribute {
    const char *name; /* "CU_DEVICE_ATTRIBUTE_INTEGRATED" */
    int number;
} DeviceAttribute;

#define GM_ATTRIBUTE_ROW(name, number) {"CU_DEVICE_ATTRIBUTE_" #name, number},
static const DeviceAttribute device_attributes[] = {GM_DEVICE_ATTRIBUTES(GM_ATTRIBUTE_ROW)};
#undef GM_ATTRIBUTE_ROW
enum { DEVICE_ATTRIBUTE_COUNT = (int)(sizeof device_attributes / sizeof device_attributes[0]) };
#endif

#endif
