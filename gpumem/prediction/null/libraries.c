/* Functions of cuBLAS, cuDNN and NCCL that have outputs on the host. */
#include "null.h"

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
    null_report(NULL_ASSUMED, "workspaces of cuDNN are not counted", 0);
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

/* ---- cuDNN: descriptors of its backend, which return the attributes that were set ---- */

typedef struct Attribute {
    struct Attribute *next;
    int name;
    int64_t count;
    char values[]; /* count elements of its type */
} Attribute;

typedef struct Descriptor {
    Attribute *attributes;
} Descriptor;

enum { TYPE_BOOLEAN = 2, TYPE_INT64 = 3, TYPE_DESCRIPTOR = 15, TYPE_CHAR = 24, TYPE_FRACTION = 26 };
enum { PLAN_WORKSPACE_SIZE = 402 };

static size_t bytes_of(int type) {
    static const size_t bytes[] = {8, 4, 1, 8, 4, 8, 8, [TYPE_DESCRIPTOR] = 8, [TYPE_CHAR] = 1,
                                   [TYPE_FRACTION] = 16};
    bool listed = type >= 0 && (size_t)type < sizeof bytes / sizeof bytes[0] && bytes[type];
    return listed ? bytes[type] : 4; /* the others are enumerations */
}

EXPORT int cudnnBackendCreateDescriptor(int type, Descriptor **made) {
    *made = calloc(1, sizeof **made);
    return *made ? 0 : 2000; /* not initialized */
}

EXPORT int cudnnBackendDestroyDescriptor(Descriptor *descriptor) {
    while (descriptor && descriptor->attributes) {
        Attribute *next = descriptor->attributes->next;
        free(descriptor->attributes);
        descriptor->attributes = next;
    }
    free(descriptor);
    return 0;
}

EXPORT int cudnnBackendSetAttribute(Descriptor *descriptor, int name, int type, int64_t count,
                                    const void *values) {
    size_t size = values && count > 0 ? bytes_of(type) * (size_t)count : 0;
    Attribute *made = malloc(sizeof *made + size);
    if (!made) return 2000;
    made->next = descriptor->attributes; /* it hides an earlier one of the same name */
    made->name = name;
    made->count = count;
    if (size) memcpy(made->values, values, size);
    descriptor->attributes = made;
    return 0;
}

EXPORT int cudnnBackendGetAttribute(Descriptor *descriptor, int name, int type, int64_t room,
                                    int64_t *count, void *values) {
    const Attribute *set = descriptor->attributes;
    while (set && set->name != name) set = set->next;
    int64_t found = set ? set->count : 0;
    if (type == TYPE_DESCRIPTOR) {
        found = 1; /* the caller has made it */
    } else if (set && values) {
        int64_t copied = found < room ? found : room;
        memcpy(values, set->values, bytes_of(type) * (size_t)copied);
    } else if (room > 0 && values) { /* of a plan or an engine: it needs nothing */
        if (name == PLAN_WORKSPACE_SIZE) assume_none(values);
        memset(values, 0, bytes_of(type) * (size_t)room);
        found = type == TYPE_INT64;
    }
    if (count) *count = found;
    return 0;
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
/* The first number after those of NCCL's own operations. */
SIMPLE(ncclRedOpCreatePreMulSum, (int *operation), *operation = 5)

EXPORT int ncclCommInitRankScalable(Comm **comm, int ranks, int rank) {
    Comm *made = malloc(sizeof *made);
    if (!made) return 2; /* system error */
    *made = (Comm){ranks, rank};
    *comm = made;
    null_report(NULL_ASSUMED, "memory of NCCL is not counted", 0);
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

EXPORT int ncclMemAlloc(uintptr_t *address, size_t size) {
    return memory_allocate(address, size, current_device()) ? 1 : 0; /* unhandled CUDA error */
}

EXPORT int ncclMemFree(uintptr_t address) { return memory_free(address) ? 1 : 0; }

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
