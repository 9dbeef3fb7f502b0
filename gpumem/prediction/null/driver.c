/* The driver's functions, and those of the runtime that have the same arguments.
 *
 * Functions that only succeed are in functions.h, allocations and copies in memory.c. Arguments
 * that have no effect here are named and not used.
 */
#include "null.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A function of the driver has the parameters that driver_table.h states. */
#define PROTOTYPE(name, version, parameters) EXPORT CUresult cu##name parameters;
GM_DRIVER_FUNCTIONS(PROTOTYPE)

/* A function that has one effect, and succeeds. */
#define EFFECT(name, parameters, effect) \
    CUresult name parameters {           \
        effect;                          \
        return CUDA_SUCCESS;             \
    }

/* The same for a device, which must be there. */
#define OF_DEVICE(name, parameters, effect)                       \
    CUresult name parameters {                                    \
        if (!is_present(device)) return CUDA_ERROR_INVALID_VALUE; \
        effect;                                                   \
        return CUDA_SUCCESS;                                      \
    }

static bool is_present(int device) { return device >= 0 && device < null.count; }

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
        *function = (void *)capture_info; /* since then with edges */
    else if (!strcmp(name, "cuGetProcAddress") && version >= 12000)
        *function = dlsym(self, "cuGetProcAddress_v2");
    else if (!strncmp(name, "cu", 2))
        *function = dlsym(self, name);
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return find_function(name, version, function);
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                                    int *status) {
    CUresult code = find_function(name, version, function);
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
    return "unrecognized error code";
}

EFFECT(cuGetErrorName, (CUresult error, const char **text), *text = error_text(error, false))
EFFECT(cuGetErrorString, (CUresult error, const char **text), *text = error_text(error, true))
EFFECT(cuDriverGetVersion, (int *version), *version = null.cuda)
EFFECT(cuDeviceGetCount, (int *count), *count = null.count)

CUresult cuInit(unsigned int flags) { return null.count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return is_present(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

OF_DEVICE(cuDeviceGetName, (char *name, int length, CUdevice device),
          snprintf(name, (size_t)length, "%s", null.name))
OF_DEVICE(cuDeviceGetUuid, (CUuuid *uuid, CUdevice device), memset(uuid, device + 1, sizeof *uuid))
OF_DEVICE(cuDeviceTotalMem, (size_t *bytes, CUdevice device), *bytes = null.total)
OF_DEVICE(cuDeviceCanAccessPeer, (int *can, CUdevice device, CUdevice peer), *can = device != peer)

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    bool known = (int)attribute > 0 && (int)attribute < MAX_ATTRIBUTES;
    if (!value || !known || !is_present(device)) return CUDA_ERROR_INVALID_VALUE;
    *value = null.attributes[attribute];
    if (attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) *value = device + 1;
    return CUDA_SUCCESS;
}

SAME(cudaDriverGetVersion, cuDriverGetVersion) SAME(cudaRuntimeGetVersion, cuDriverGetVersion)
SAME(cudaGetDeviceCount, cuDeviceGetCount) SAME(cudaDeviceGetAttribute, cuDeviceGetAttribute)
SAME(cudaDeviceCanAccessPeer, cuDeviceCanAccessPeer)

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

OF_DEVICE(cuDevicePrimaryCtxRetain, (CUcontext *context, CUdevice device),
          is_active[device] = true; *context = context_of(device))
OF_DEVICE(cuDevicePrimaryCtxGetState, (CUdevice device, unsigned int *flags, int *active),
          *flags = 0; *active = is_active[device])
EFFECT(cuCtxGetCurrent, (CUcontext *context), *context = context_of(current_device()))
EFFECT(cuCtxGetDevice, (CUdevice *device), *device = current_device())

CUresult cuCtxSetCurrent(CUcontext context) {
    return context ? set_device((int)((char *)context - contexts)) : CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
    if (depth + 1 >= (int)(sizeof stack / sizeof stack[0])) return CUDA_ERROR_OUT_OF_MEMORY;
    depth++;
    return cuCtxSetCurrent(context);
}

CUresult cuCtxPopCurrent(CUcontext *context) {
    if (depth == 0) return CUDA_ERROR_INVALID_VALUE;
    if (context) *context = context_of(current_device());
    depth--;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
}

SAME(cudaGetDevice, cuCtxGetDevice)
SAME(cudaDeviceGetStreamPriorityRange, cuCtxGetStreamPriorityRange)

/* ---- streams and events ---- */

typedef struct Stream {
    int priority;
    unsigned int flags;
    CUstreamCaptureStatus status;
    uint64_t capture; /* number of the last capture */
    CUgraph graph;    /* that it captures into */
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

EXPORT int cudaStreamCreate(CUstream *stream) { return cuStreamCreate(stream, 0); }

CUresult cuStreamDestroy(CUstream stream) {
    if ((uintptr_t)stream >= 3) free(stream);
    return CUDA_SUCCESS;
}

EFFECT(cuStreamGetPriority, (CUstream stream, int *priority),
       *priority = stream_of(stream)->priority)
EFFECT(cuStreamGetFlags, (CUstream stream, unsigned int *flags), *flags = stream_of(stream)->flags)
EFFECT(cuStreamGetId, (CUstream stream, unsigned long long *id), *id = (uintptr_t)stream)

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *user_data) {
    if (stream_of(stream)->status == CU_STREAM_CAPTURE_STATUS_NONE) function(user_data);
    return CUDA_SUCCESS;
}

/* Work is finished once it is queued, but for the runtime's events in streams of the program's own:
 * they are pending until the host waits for the GPU. So PyTorch's allocator keeps a block that such
 * a stream uses at least as long as on a GPU. gpumem's asks the driver. */
enum { MAX_QUERIES = 1 << 20 }; /* then the event is over, so that a loop that asks for it ends */

typedef struct Event {
    uint64_t wait; /* number of the host's next wait when it was recorded; 0: it is over */
    int queries;
} Event;

static _Atomic uint64_t next_wait = 1;

CUresult cuEventCreate(CUevent *event, unsigned int flags) {
    *event = calloc(1, sizeof(Event));
    return *event ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuEventDestroy(CUevent event) {
    free(event);
    return CUDA_SUCCESS;
}

EXPORT int cudaEventRecord(Event *event, CUstream stream) {
    *event = (Event){(uintptr_t)stream < 3 ? 0 : next_wait, 0};
    return 0;
}

EXPORT int cudaEventQuery(Event *event) {
    bool is_over = event->wait != next_wait || ++event->queries > MAX_QUERIES;
    return is_over ? 0 : CUDA_ERROR_NOT_READY;
}

EXPORT int cudaDeviceSynchronize(void) {
    next_wait++;
    return 0;
}

EXPORT int cudaStreamWaitEvent(void) {
    null_report(NULL_ASSUMED, "memory that several streams use is in use until the host waits",
                NULL, 0);
    return 0;
}

EFFECT(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned int flags),
       null_report(NULL_ASSUMED, "work on several streams is taken as finished at once", NULL, 0))
EFFECT(cuEventElapsedTime, (float *milliseconds, CUevent start, CUevent end), *milliseconds = 1;
       null_report(NULL_ASSUMED, "times of events are invented", NULL, 0))

SAME(cudaStreamCreateWithFlags, cuStreamCreate)
SAME(cudaStreamCreateWithPriority, cuStreamCreateWithPriority)
SAME(cudaStreamDestroy, cuStreamDestroy) SAME(cudaStreamGetPriority, cuStreamGetPriority)
SAME(cudaLaunchHostFunc, cuLaunchHostFunc) SAME(cudaEventCreate, cuEventCreate)
SAME(cudaEventCreateWithFlags, cuEventCreate) SAME(cudaEventDestroy, cuEventDestroy)
SAME(cudaEventRecordWithFlags, cudaEventRecord)
SAME(cudaStreamSynchronize, cudaDeviceSynchronize)
SAME(cudaEventSynchronize, cudaDeviceSynchronize)
SAME(cudaEventElapsedTime, cuEventElapsedTime)

/* ---- capture: a graph has no nodes that can be seen ---- */

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
    static _Atomic uint64_t captures;
    Stream *captured = stream_of(stream);
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

EFFECT(cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus *status),
       *status = stream_of(stream)->status)

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
    if (nodes) nodes[0] = new_handle();
    *count = 1; /* of an empty graph PyTorch warns */
    return CUDA_SUCCESS;
}

SAME(cudaStreamBeginCapture, cuStreamBeginCapture) SAME(cudaStreamEndCapture, cuStreamEndCapture)
SAME(cudaStreamIsCapturing, cuStreamIsCapturing) SAME(cudaStreamGetCaptureInfo, capture_info)
SAME(cudaStreamGetCaptureInfo_v3, capture_info)
SAME(cudaStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo) SAME(cudaGraphGetNodes, cuGraphGetNodes)

/* ---- memory ---- */

EFFECT(cuMemHostGetDevicePointer, (CUdeviceptr *device, void *host, unsigned int flags),
       *device = (uintptr_t)host)
EFFECT(cuMemGetAllocationGranularity,
       (size_t *granularity, const CUmemAllocationProp *prop,
        CUmemAllocationGranularity_flags option),
       *granularity = NULL_GRANULE)

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    Range range;
    if (!range_find(pointer, &range)) return CUDA_ERROR_INVALID_VALUE;
    bool is_host = range.kind == RANGE_HOST;
    if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(unsigned int *)data = is_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
        *(int *)data = is_host ? 0 : range.device;
    else if (attribute == CU_POINTER_ATTRIBUTE_IS_MANAGED)
        *(unsigned char *)data = 0;
    else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER ||
             (attribute == CU_POINTER_ATTRIBUTE_HOST_POINTER && is_host))
        *(CUdeviceptr *)data = pointer;
    else
        return (CUresult)null_refuse("cuPointerGetAttribute");
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *access,
                        size_t count) {
    Range range;
    bool mapped = range_find(pointer, &range) && range.kind == RANGE_MAPPED;
    return mapped ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
