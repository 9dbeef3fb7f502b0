/* The driver's functions, and those of the runtime that have the same arguments.
 *
 * Functions that only succeed are in functions.h, copies and fills in memory.c.
 */
#include "null.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A function of the driver has the parameters that driver_table.h states. */
#define PROTOTYPE(name, version, parameters) EXPORT CUresult cu##name parameters;
GM_DRIVER_FUNCTIONS(PROTOTYPE)

/* A function of the runtime with the same parameters, or with further ones, which are ignored. */
#define RUNTIME(name, driver) EXPORT __typeof__(driver) name __attribute__((alias(#driver)));

/* ---- handles, and functions by name ---- */

/* They lie below all addresses that a process has, so that to read one of them is a fault. */
void *new_handle(void) {
    static _Atomic uintptr_t last = 4096;
    return (void *)(last += 8);
}

static CUresult capture_info(CUstream stream, CUstreamCaptureStatus *status, uint64_t *id,
                             CUgraph *graph, const CUgraphNode **nodes, const void **edges,
                             size_t *count);

CUresult find_function(const char *name, int version, void **function) {
    static void *self = NULL;
    Dl_info info;
    if (!name || !function) return CUDA_ERROR_INVALID_VALUE;
    if (!self && dladdr((void *)find_function, &info))
        self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    *function = NULL;
    if (!strcmp(name, "cuStreamGetCaptureInfo") && version >= 12030)
        *function = (void *)capture_info;
    else if (self && !strncmp(name, "cu", 2))
        *function = dlsym(self, name);
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                                    int *status);
EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags);

CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    (void)flags;
    /* The function has five parameters since CUDA 12. */
    if (name && !strcmp(name, "cuGetProcAddress") && version >= 12000) name = "cuGetProcAddress_v2";
    return find_function(name, version, function);
}

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                             int *status) {
    CUresult code = cuGetProcAddress(name, function, version, flags);
    if (status) *status = code == CUDA_SUCCESS ? 0 : 1; /* found; not found */
    return code;
}

/* ---- errors, devices ---- */

typedef struct ErrorText {
    int error;
    const char *name, *text;
} ErrorText;

#define ERROR_ROW(name, number, text) {number, "CUDA_" #name, text},
static const ErrorText errors[] = {GM_ERRORS(ERROR_ROW)};

const char *error_text(int error, bool describe) {
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
        if (errors[i].error == error) return describe ? errors[i].text : errors[i].name;
    return NULL;
}

CUresult cuGetErrorName(CUresult error, const char **text) {
    *text = error_text(error, false);
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error_text(error, true);
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static bool is_present(int device) { return device >= 0 && device < null.count; }

CUresult cuInit(unsigned int flags) {
    (void)flags;
    return null.count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDriverGetVersion(int *version) {
    *version = null.cuda;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    *count = null.count;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return is_present(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    snprintf(name, (size_t)length, "%s", null.name);
    return is_present(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    memset(uuid, device + 1, sizeof *uuid);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    *bytes = null.total;
    return is_present(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    bool known = (int)attribute > 0 && (int)attribute < MAX_ATTRIBUTES;
    if (!value || !known || !is_present(device)) return CUDA_ERROR_INVALID_VALUE;
    *value = null.attributes[attribute];
    if (attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) *value = device + 1;
    return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    *can = device != peer;
    return is_present(device) && is_present(peer) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

RUNTIME(cudaDriverGetVersion, cuDriverGetVersion)
RUNTIME(cudaRuntimeGetVersion, cuDriverGetVersion)
RUNTIME(cudaGetDeviceCount, cuDeviceGetCount)
RUNTIME(cudaDeviceGetAttribute, cuDeviceGetAttribute)
RUNTIME(cudaDeviceCanAccessPeer, cuDeviceCanAccessPeer)

/* ---- contexts: one for each device, and a stack of them for each thread ---- */

static char contexts[MAX_DEVICES];
static _Atomic bool is_active[MAX_DEVICES];
static __thread int stack[64] = {0}, depth = 0;

static CUcontext context_of(int device) { return (CUcontext)&contexts[device]; }

int current_device(void) { return stack[depth]; }

CUresult set_device(int device) {
    if (!is_present(device)) return CUDA_ERROR_INVALID_VALUE;
    is_active[device] = true;
    stack[depth] = device;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    if (!is_present(device)) return CUDA_ERROR_INVALID_VALUE;
    is_active[device] = true;
    *context = context_of(device);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
    if (!is_present(device)) return CUDA_ERROR_INVALID_VALUE;
    *flags = 0;
    *active = is_active[device];
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = context_of(current_device());
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    return context ? set_device((int)((char *)context - contexts)) : CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
    if (depth + 1 >= (int)(sizeof stack / sizeof stack[0])) return CUDA_ERROR_OUT_OF_MEMORY;
    stack[depth + 1] = stack[depth];
    depth++;
    return cuCtxSetCurrent(context);
}

CUresult cuCtxPopCurrent(CUcontext *context) {
    if (depth == 0) return CUDA_ERROR_INVALID_VALUE;
    if (context) *context = context_of(current_device());
    depth--;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = current_device();
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
}

RUNTIME(cudaGetDevice, cuCtxGetDevice)
RUNTIME(cudaDeviceGetStreamPriorityRange, cuCtxGetStreamPriorityRange)

/* ---- streams and events: work is finished once it is queued ---- */

/* Blocks that another stream uses are reusable at once, and on a GPU once its work has ended. */
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    (void)stream, (void)event, (void)flags;
    null_report(NULL_ASSUMED, "work on several streams is taken as finished at once", 0);
    return CUDA_SUCCESS;
}

RUNTIME(cudaStreamWaitEvent, cuStreamWaitEvent)

typedef struct Stream {
    int priority;
    unsigned int flags;
    CUstreamCaptureStatus status;
    uint64_t capture;   /* number of the last capture */
    void *graph;        /* that it captures into */
} Stream;

static Stream *stream_of(CUstream stream) {
    static Stream defaults[3]; /* of handles 0, 1 and 2 */
    return (uintptr_t)stream < 3 ? &defaults[(uintptr_t)stream] : (Stream *)stream;
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
    Stream *made = calloc(1, sizeof *made);
    if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
    made->flags = flags;
    made->priority = priority;
    *stream = (CUstream)made;
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
    return cuStreamCreateWithPriority(stream, flags, 0);
}

EXPORT int cudaStreamCreate(CUstream *stream);
int cudaStreamCreate(CUstream *stream) { return cuStreamCreate(stream, 0); }

CUresult cuStreamDestroy(CUstream stream) {
    if ((uintptr_t)stream >= 3) free(stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamGetPriority(CUstream stream, int *priority) {
    *priority = stream_of(stream)->priority;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetFlags(CUstream stream, unsigned int *flags) {
    *flags = stream_of(stream)->flags;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetId(CUstream stream, unsigned long long *id) {
    *id = (uintptr_t)stream;
    return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *user_data) {
    if (stream_of(stream)->status == CU_STREAM_CAPTURE_STATUS_NONE) function(user_data);
    return CUDA_SUCCESS;
}

RUNTIME(cudaStreamCreateWithFlags, cuStreamCreate)
RUNTIME(cudaStreamCreateWithPriority, cuStreamCreateWithPriority)
RUNTIME(cudaStreamDestroy, cuStreamDestroy)
RUNTIME(cudaStreamGetPriority, cuStreamGetPriority)
RUNTIME(cudaLaunchHostFunc, cuLaunchHostFunc)

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
    (void)start, (void)end;
    *milliseconds = 1;
    null_report(NULL_ASSUMED, "times of events are invented", 0);
    return CUDA_SUCCESS;
}

RUNTIME(cudaEventElapsedTime, cuEventElapsedTime)

/* ---- capture: a graph has no nodes that can be seen ---- */

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
    static _Atomic uint64_t captures;
    Stream *captured = stream_of(stream);
    (void)mode;
    captured->status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    captured->capture = ++captures;
    captured->graph = new_handle();
    return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    Stream *captured = stream_of(stream);
    if (captured->status == CU_STREAM_CAPTURE_STATUS_NONE) return CUDA_ERROR_ILLEGAL_STATE;
    captured->status = CU_STREAM_CAPTURE_STATUS_NONE;
    *graph = captured->graph;
    return CUDA_SUCCESS;
}

static CUresult capture_info(CUstream stream, CUstreamCaptureStatus *status, uint64_t *id,
                             CUgraph *graph, const CUgraphNode **nodes, const void **edges,
                             size_t *count) {
    const Stream *captured = stream_of(stream);
    if (status) *status = captured->status;
    if (id) *id = captured->capture;
    if (graph) *graph = captured->status ? captured->graph : NULL;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus *status, uint64_t *id,
                                CUgraph *graph, const CUgraphNode **nodes, size_t *count) {
    return capture_info(stream, status, id, graph, nodes, NULL, count);
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    *status = stream_of(stream)->status;
    return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    static __thread CUstreamCaptureMode current = CU_STREAM_CAPTURE_MODE_GLOBAL;
    CUstreamCaptureMode before = current;
    current = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
    (void)graph;
    if (nodes) nodes[0] = new_handle();
    *count = 1; /* of an empty graph PyTorch warns */
    return CUDA_SUCCESS;
}

RUNTIME(cudaStreamBeginCapture, cuStreamBeginCapture)
RUNTIME(cudaStreamEndCapture, cuStreamEndCapture)
RUNTIME(cudaStreamIsCapturing, cuStreamIsCapturing)
RUNTIME(cudaStreamGetCaptureInfo, capture_info)
RUNTIME(cudaStreamGetCaptureInfo_v3, capture_info)
RUNTIME(cudaStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo)
RUNTIME(cudaThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode)
RUNTIME(cudaGraphGetNodes, cuGraphGetNodes)

/* ---- memory ---- */

CUresult cuMemGetInfo(size_t *free_bytes, size_t *total) {
    memory_info(current_device(), free_bytes, total);
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *pointer, size_t size) {
    return memory_allocate((uintptr_t *)pointer, size, current_device());
}

CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t size, CUstream stream) {
    (void)stream;
    return cuMemAlloc(pointer, size);
}

CUresult cuMemFree(CUdeviceptr pointer) { return memory_free(pointer); }

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
    (void)stream;
    return cuMemFree(pointer);
}

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
    Range range;
    if (!range_find(pointer, &range)) return CUDA_ERROR_INVALID_VALUE;
    if (base) *base = range.base;
    if (size) *size = range.size;
    return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void **pointer, size_t size, unsigned int flags) {
    (void)flags;
    return host_allocate(pointer, size);
}

CUresult cuMemFreeHost(void *pointer) { return host_free(pointer); }

CUresult cuMemHostRegister(void *pointer, size_t size, unsigned int flags) {
    (void)flags;
    return host_register(pointer, size);
}

CUresult cuMemHostUnregister(void *pointer) { return host_free(pointer); }

CUresult cuMemHostGetDevicePointer(CUdeviceptr *device, void *host, unsigned int flags) {
    (void)flags;
    *device = (uintptr_t)host;
    return CUDA_SUCCESS;
}

RUNTIME(cudaMemGetInfo, cuMemGetInfo)
RUNTIME(cudaMalloc, cuMemAlloc)
RUNTIME(cudaMallocAsync, cuMemAllocAsync)
RUNTIME(cudaFree, cuMemFree)
RUNTIME(cudaFreeAsync, cuMemFreeAsync)
RUNTIME(cudaHostAlloc, cuMemHostAlloc)
RUNTIME(cudaFreeHost, cuMemFreeHost)
RUNTIME(cudaHostRegister, cuMemHostRegister)
RUNTIME(cudaHostUnregister, cuMemHostUnregister)

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    Range range;
    if (!range_find(pointer, &range)) return CUDA_ERROR_INVALID_VALUE;
    bool is_host = range.kind == RANGE_HOST;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)data = context_of(is_host ? 0 : range.device);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned int *)data = is_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)data = pointer;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        *(CUdeviceptr *)data = is_host ? pointer : 0;
        return is_host ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned char *)data = 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = is_host ? 0 : range.device;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)data = range.base;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)data = range.size;
        return CUDA_SUCCESS;
    default:
        return (CUresult)null_refuse("cuPointerGetAttribute");
    }
}

CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
    (void)flags;
    return memory_reserve((uintptr_t *)pointer, size, alignment, hint);
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
    return memory_unreserve(pointer, size);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                     const CUmemAllocationProp *prop, unsigned long long flags) {
    (void)flags;
    if (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE || !is_present(prop->location.id))
        return CUDA_ERROR_INVALID_VALUE;
    return physical_create((Physical **)handle, size, prop->location.id);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    return physical_drop((Physical *)handle);
}

CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
    (void)flags;
    return offset ? CUDA_ERROR_INVALID_VALUE : memory_map(pointer, size, (Physical *)handle);
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) { return memory_unmap(pointer, size); }

CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *access,
                        size_t count) {
    Range range;
    (void)size, (void)access, (void)count;
    bool mapped = range_find(pointer, &range) && range.kind == RANGE_MAPPED;
    return mapped ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                       CUmemAllocationGranularity_flags option) {
    (void)prop, (void)option;
    *granularity = NULL_GRANULE;
    return CUDA_SUCCESS;
}

/* ---- NVML: the devices' number and handles; it is found as libnvidia-ml.so.1 ---- */

EXPORT int nvmlInit(void), nvmlInit_v2(void), nvmlInitWithFlags(void);
EXPORT int nvmlDeviceGetCount(unsigned int *count), nvmlDeviceGetCount_v2(unsigned int *count);
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device);

int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(void) { return 0; }

int nvmlDeviceGetCount(unsigned int *count) {
    *count = (unsigned int)null.count;
    return 0;
}

int nvmlDeviceGetCount_v2(unsigned int *count) { return nvmlDeviceGetCount(count); }

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
    (void)id;
    *device = new_handle();
    return 0;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned int *count, void *infos);

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned int *count, void *infos) {
    (void)device, (void)infos;
    *count = 0; /* for the text of an out-of-memory error */
    return 0;
}

/* PyTorch asks for these under its allocator's lock, so they are refused without a report. */
#define NOT_SUPPORTED(name) \
    EXPORT int name(void);  \
    int name(void) { return 3; }
NOT_SUPPORTED(nvmlDeviceGetGpuFabricInfoV)
NOT_SUPPORTED(nvmlDeviceGetNvLinkRemoteDeviceType)
NOT_SUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
NOT_SUPPORTED(nvmlSystemGetCudaDriverVersion_v2)
