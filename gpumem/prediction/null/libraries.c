/* Functions of cuBLAS, cuDNN and NCCL that have outputs on the host. */
#include "null.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- cuBLAS ---- */

typedef struct Heuristic { /* a way to multiply matrices */
    uint64_t algorithm[8];
    size_t workspace; /* PyTorch does not read it: it allocates a constant workspace */
    int status;
    float waves;
    int reserved[4];
} Heuristic;

SIMPLE(cublasGetMathMode, (void *handle, int *mode), *mode = 0)
SIMPLE(cublasGetPointerMode_v2, (void *handle, int *mode), *mode = 0)
SIMPLE(cublasLtMatmulAlgoGetHeuristic,
       (void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
        int requested, Heuristic *results, int *count),
       memset(results, 0, sizeof *results); *count = requested > 0 ? 1 : 0)

/* ---- cuDNN: sizes ---- */

static void assume_none(size_t *size) {
    *size = 0;
    null_report(NULL_ASSUMED, "workspaces of cuDNN's batch normalization are not counted", NULL,
                0);
}

SIMPLE(cudnnGetStream, (void *handle, void **stream), *stream = NULL)
SIMPLE(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize,
       (void *handle, int mode, int operation, void *x, void *z, void *y, void *parameters,
        void *activation, size_t *size),
       assume_none(size))
SIMPLE(cudnnGetBatchNormalizationBackwardExWorkspaceSize,
       (void *handle, int mode, int operation, void *x, void *y, void *dy, void *dz, void *dx,
        void *parameters, void *activation, size_t *size),
       assume_none(size))
SIMPLE(cudnnGetBatchNormalizationTrainingExReserveSpaceSize,
       (void *handle, int mode, int operation, void *activation, void *x, size_t *size),
       assume_none(size))

/* ---- cuDNN: its backend is NVIDIA's ----
 *
 * Its heuristics choose engines and state their workspaces by the properties of a GPU, which they
 * are given here in place of a handle. A plan is not built, which would compile its kernels.
 */

typedef void *Descriptor;

enum { TYPE_HANDLE = 0, TYPE_INT64 = 3, TYPE_DESCRIPTOR = 15, TYPE_CHAR = 24 };
enum { CONVOLUTION = 1, DEVICE = 38 }; /* types of descriptors */
enum {                /* attributes */
    HEURISTICS_GRAPH = 201,
    HEURISTICS_DEVICE = 204,
    CONFIG_WORKSPACE = 303,
    PLAN_CONFIG = 401,
    PLAN_WORKSPACE = 402,
    ENGINE_GRAPH = 1300,
    ENGINE_DEVICE = 1307,
    DEVICE_JSON = 2702
};

/* Calls a function of the cuDNN that PyTorch has loaded. Its CUDA runtime asks for tables of the
 * driver that it can do without, so that refusals are not reported. */
#define REAL(name, parameters, arguments)                                      \
    static int real_##name parameters {                                        \
        void *library = dlopen("libcudnn.so.9", RTLD_LAZY | RTLD_NOLOAD);      \
        int(*real) parameters = library ? dlsym(library, "cudnn" #name) : NULL; \
        if (!real) return null_refuse("cudnn" #name);                          \
        is_quiet = true;                                                       \
        int code = real arguments;                                             \
        is_quiet = false;                                                      \
        return code;                                                           \
    }

REAL(BackendCreateDescriptor, (int type, Descriptor *made), (type, made))
REAL(BackendDestroyDescriptor, (Descriptor descriptor), (descriptor))
REAL(BackendFinalize, (Descriptor descriptor), (descriptor))
REAL(BackendSetAttribute,
     (Descriptor descriptor, int name, int type, int64_t count, const void *values),
     (descriptor, name, type, count, values))
REAL(BackendGetAttribute,
     (Descriptor descriptor, int name, int type, int64_t room, int64_t *count, void *values),
     (descriptor, name, type, room, count, values))

SAME(cudnnBackendDestroyDescriptor, real_BackendDestroyDescriptor)

EXPORT int cudnnBackendCreateDescriptor(int type, Descriptor *made) {
    if (type == CONVOLUTION)
        null_report(NULL_ASSUMED,
                    "convolutions may take larger workspaces than cuDNN states without a GPU: "
                    "PyTorch's own allocator has reserved up to a quarter more",
                    NULL, 0);
    return real_BackendCreateDescriptor(type, made);
}

/* Returns the descriptor of the GPU; NULL: cuDNN does not know such a GPU. */
static Descriptor device_descriptor(void) {
    static _Atomic(Descriptor) kept;
    if (kept) return kept;
    const int *of = null.attributes; /* by the driver's number */
    char json[1024];
    Descriptor made = NULL;
    int length = snprintf(
        json, sizeof json,
        "{\"deviceName\":\"%s\",\"deviceVer\":%d,\"driverVer\":%d,\"multiProcessorCount\":%d,"
        "\"totalGlobalMem\":%llu,\"maxSharedMemoryPerBlock\":%d,"
        "\"maxSharedMemoryPerBlockOptin\":%d,\"reservedSharedMemoryPerBlock\":%d,"
        "\"regsPerBlock\":%d,\"maxRegistersPerSM\":%d,\"maxThreadsPerBlock\":%d,"
        "\"maxThreadsPerSM\":%d,\"maxCtasPerSM\":%d,\"warpSize\":%d,\"l2CacheSize\":%d,"
        "\"smClockRateKHz\":%d,\"memClockRateKHz\":%d,\"maxGridSize\":[%d,%d,%d],"
        "\"maxBlockSize\":[%d,%d,%d],\"supportCoopLaunch\":1,\"isTccDriver\":0,"
        "\"smCountOrigin\":0,\"pciDeviceId\":0,\"cudaDeviceId\":0}",
        null.name, 100 * of[75] + 10 * of[76], null.cuda, of[16], (unsigned long long)null.total,
        of[8], of[97], of[111], of[12], of[82], of[1], of[39], of[106], of[10], of[38], of[13],
        of[36], of[5], of[6], of[7], of[2], of[3], of[4]);
    int code = real_BackendCreateDescriptor(DEVICE, &made);
    if (!code) code = real_BackendSetAttribute(made, DEVICE_JSON, TYPE_CHAR, length, json);
    if (!code) code = real_BackendFinalize(made);
    return code ? NULL : (kept = made);
}

/* The plan of this thread that was configured last, and its workspace, for which PyTorch asks as
 * soon as the plan is finalized. */
static __thread Descriptor plan;
static __thread int64_t plan_workspace;

EXPORT int cudnnBackendSetAttribute(Descriptor descriptor, int name, int type, int64_t count,
                                    const void *values) {
    int code = 0, wanted = 0;
    if (type == TYPE_HANDLE) return 0;
    if (name == HEURISTICS_GRAPH) wanted = HEURISTICS_DEVICE;
    if (name == ENGINE_GRAPH) wanted = ENGINE_DEVICE;
    if (wanted) {
        Descriptor device = device_descriptor();
        if (!device) return null_refuse("cudnnBackendSetAttribute");
        code = real_BackendSetAttribute(descriptor, wanted, TYPE_DESCRIPTOR, 1, &device);
    }
    if (name == PLAN_CONFIG) {
        int64_t found;
        Descriptor config = *(const Descriptor *)values;
        plan = descriptor;
        code = real_BackendGetAttribute(config, CONFIG_WORKSPACE, TYPE_INT64, 1, &found, &plan_workspace);
    }
    return code ? code : real_BackendSetAttribute(descriptor, name, type, count, values);
}

EXPORT int cudnnBackendFinalize(Descriptor descriptor) {
    return descriptor == plan ? 0 : real_BackendFinalize(descriptor);
}

EXPORT int cudnnBackendGetAttribute(Descriptor descriptor, int name, int type, int64_t room,
                                    int64_t *count, void *values) {
    if (descriptor != plan || name != PLAN_WORKSPACE)
        return real_BackendGetAttribute(descriptor, name, type, room, count, values);
    if (count) *count = 1;
    *(int64_t *)values = plan_workspace;
    return 0;
}

/* ---- cuDNN: recurrent networks ----
 *
 * Descriptors and sizes are NVIDIA's, whose functions PyTorch calls where none is defined here. They
 * read no more of a handle than zeros, and state sizes of any GPU.
 */

EXPORT int cudnnCreate(void **handle) {
    static char zeros[1 << 20];
    *handle = zeros;
    return 0;
}

REAL(SetDropoutDescriptor,
     (Descriptor dropout, void *handle, float rate, void *states, size_t size, uint64_t seed),
     (dropout, handle, rate, states, size, seed))
REAL(GetRNNTempSpaceSizes,
     (void *handle, Descriptor rnn, int training, Descriptor data, size_t *workspace,
      size_t *reserve),
     (handle, rnn, training, data, workspace, reserve))

/* A kernel would write the states. */
EXPORT int cudnnSetDropoutDescriptor(Descriptor dropout, void *handle, float rate, void *states,
                                     size_t size, uint64_t seed) {
    return real_SetDropoutDescriptor(dropout, handle, rate, NULL, 0, seed);
}

SAME(cudnnRestoreDropoutDescriptor, cudnnSetDropoutDescriptor)

/* 24 bytes for each thread that the GPU holds, as on an H200. */
SIMPLE(cudnnDropoutGetStatesSize, (void *handle, size_t *size),
       *size = (size_t)null.attributes[16] * (size_t)null.attributes[39] * 24)

/* It states the sizes before it fails for want of a GPU. */
EXPORT int cudnnGetRNNTempSpaceSizes(void *handle, Descriptor rnn, int training, Descriptor data,
                                     size_t *workspace, size_t *reserve) {
    *workspace = 0;
    real_GetRNNTempSpaceSizes(handle, rnn, training, data, workspace, reserve);
    null_report(NULL_ASSUMED, "workspaces of recurrent layers are taken as those of an H200", NULL,
                0);
    return *workspace ? 0 : null_refuse("cudnnGetRNNTempSpaceSizes");
}

/* ---- NCCL: a communicator knows its rank and their number, and reaches none of them ---- */

typedef struct Comm {
    int ranks, rank; /* ranks 0: not known */
} Comm;

typedef struct UniqueId {
    char bytes[128];
} UniqueId;

SIMPLE(ncclGetUniqueId, (UniqueId *id), memset(id, 0, sizeof *id))
SIMPLE(ncclCommGetAsyncError, (const Comm *comm, int *error), *error = 0)
SIMPLE(ncclBcast, (const void *memory, size_t count, int type, int root),
       if (root == 0) memory_broadcast(memory))
SIMPLE(ncclBroadcast, (const void *from, void *to, size_t count, int type, int root),
       if (root == 0 && from == to) memory_broadcast(to))
/* The first number after those of NCCL's own operations. */
SIMPLE(ncclRedOpCreatePreMulSum, (int *operation), *operation = 5)

EXPORT int ncclCommInitRankScalable(Comm **comm, int ranks, int rank) {
    Comm *made = malloc(sizeof *made);
    if (!made) return 2; /* system error */
    *made = (Comm){ranks, rank};
    *comm = made;
    null_report(NULL_ASSUMED, "memory of NCCL is not counted", NULL, 0);
    return 0;
}

EXPORT int ncclCommInitRank(Comm **comm, int ranks, UniqueId id, int rank) {
    return ncclCommInitRankScalable(comm, ranks, rank);
}

SAME(ncclCommInitRankConfig, ncclCommInitRank)

EXPORT int ncclCommSplit(Comm *comm, int color, int key, Comm **made) {
    return ncclCommInitRankScalable(made, 0, 0); /* the other ranks' colors are not known */
}

EXPORT int ncclCommCount(const Comm *comm, int *count) {
    *count = comm->ranks;
    return comm->ranks ? 0 : null_refuse("ncclCommCount");
}

EXPORT int ncclCommUserRank(const Comm *comm, int *rank) {
    *rank = comm->rank;
    return comm->ranks ? 0 : null_refuse("ncclCommUserRank");
}

CUresult cuMemAlloc(uintptr_t *address, size_t size);
CUresult cuMemFree(uintptr_t address);

EXPORT int ncclMemAlloc(uintptr_t *address, size_t size) {
    return cuMemAlloc(address, size) ? 1 : 0; /* unhandled CUDA error */
}

EXPORT int ncclMemFree(uintptr_t address) { return cuMemFree(address) ? 1 : 0; }

/* ---- NVML: the devices' number and handles; it is found as libnvidia-ml.so.1 ---- */

SIMPLE(nvmlInit, (void), )
SAME(nvmlInit_v2, nvmlInit) SAME(nvmlInitWithFlags, nvmlInit)
SIMPLE(nvmlDeviceGetCount, (unsigned int *count), *count = (unsigned int)null.count)
SAME(nvmlDeviceGetCount_v2, nvmlDeviceGetCount)
SIMPLE(nvmlDeviceGetHandleByPciBusId_v2, (const char *id, void **device), *device = new_handle())
/* For the text of an out-of-memory error. */
SIMPLE(nvmlDeviceGetComputeRunningProcesses, (void *device, unsigned int *count, void *infos),
       *count = 0)

/* PyTorch asks for these under its allocator's lock, so they are refused without a report. */
EXPORT int nvmlDeviceGetGpuFabricInfoV(void) { return 3; } /* not supported */
SAME(nvmlDeviceGetNvLinkRemoteDeviceType, nvmlDeviceGetGpuFabricInfoV)
SAME(nvmlDeviceGetNvLinkRemotePciInfo_v2, nvmlDeviceGetGpuFabricInfoV)
SAME(nvmlSystemGetCudaDriverVersion_v2, nvmlDeviceGetGpuFabricInfoV)
