/* The host device as libcuda.so.1, for cuda-python; never installed.
 *
 * cuda-python asks cuGetProcAddress for every function by name and version and calls
 * what it gets. A name is answered only where the version asked for has the signature
 * that the table has; everything else is "not found", which callers tolerate.
 */
#include "libcuda.h"

#include <string.h>

typedef enum ProcResult { PROC_FOUND, PROC_NOT_FOUND, PROC_TOO_NEW } ProcResult;

/* ---- signatures that changed after the table's ---- */

static CUresult context_device_v13(CUdevice *device, CUcontext context) {
    Context *found;
    if (!context) return host_cuCtxGetDevice(device);
    ENTER(CtxGetDevice);
    if (!device) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(host_context_of(context, &found));
    *device = found->device;
    return CUDA_SUCCESS;
}

static CUresult context_synchronize_v13(CUcontext context) {
    Context *found;
    if (!context) return host_cuCtxSynchronize();
    ENTER(CtxSynchronize);
    HOST_TRY(host_context_of(context, &found));
    return host_context_wait(found);
}

CUresult libcuda_stream_context(CUstream stream, CUcontext *context, void **green) {
    if (green) *green = NULL; /* none of the host device's streams belongs to a green one */
    return host_cuStreamGetCtx(stream, context);
}

CUresult libcuda_capture_info(CUstream stream, CUstreamCaptureStatus *status, uint64_t *id, CUgraph *graph,
                              const CUgraphNode **dependencies, const void **edges, size_t *count) {
    enum { MOST = 1024 };
    static const uint64_t plain[MOST]; /* every edge is a plain one: eight zero bytes */
    CUresult result = host_cuStreamGetCaptureInfo(stream, status, id, graph, dependencies, count);
    bool some = result == CUDA_SUCCESS && count && *count > 0 && *count <= MOST;
    if (edges) *edges = some ? plain : NULL;
    return result;
}

typedef struct LaterForm {
    const char *name;
    int version;    /* from here on the signature is another */
    void *function; /* NULL: not there in that form */
} LaterForm;

static const LaterForm later_forms[] = {
    {"cuCtxGetDevice", 13000, (void *)context_device_v13},
    {"cuCtxSynchronize", 13000, (void *)context_synchronize_v13},
    {"cuStreamGetCtx", 12050, (void *)libcuda_stream_context},
    {"cuStreamGetCaptureInfo", 12030, (void *)libcuda_capture_info},
};

static const LaterForm *later_form(const char *name, int version) {
    for (size_t i = 0; i < sizeof later_forms / sizeof later_forms[0]; i++)
        if (strcmp(later_forms[i].name, name) == 0 && version >= later_forms[i].version)
            return &later_forms[i];
    return NULL;
}

static void *entry_find(const char *name, int version, bool per_thread) {
    void *own = per_thread ? libcuda_per_thread(name, version) : NULL;
    const LaterForm *later = later_form(name, version);
    if (!own && later) return later->function;
    for (int i = 0; i < DRIVER_ENTRY_COUNT; i++) {
        void *function;
        if (strcmp(driver_entries[i].name, name) != 0) continue;
        memcpy(&function, (const char *)hostdev_table() + driver_entries[i].offset, sizeof function);
        if (driver_entries[i].version > version) return NULL;
        return own ? own : function;
    }
    return NULL;
}

/* ---- exported ---- */

HOSTDEV_API CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags);
HOSTDEV_API CUresult cuGetProcAddress_v2(const char *name, void **function, int version,
                                         uint64_t flags, ProcResult *status);

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                             ProcResult *status) {
    enum { LEGACY = 1, PER_THREAD = 2 }; /* which default stream the null stream is; 0: legacy */
    if (!name || !function || flags > PER_THREAD) return CUDA_ERROR_INVALID_VALUE;
    if (strcmp(name, "cuGetProcAddress") == 0)
        *function = version >= 12000 ? (void *)cuGetProcAddress_v2 : (void *)cuGetProcAddress;
    else
        *function = entry_find(name, version, flags == PER_THREAD);
    if (status) *status = *function ? PROC_FOUND : PROC_NOT_FOUND;
    if (*function || status) return CUDA_SUCCESS;
    return CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
