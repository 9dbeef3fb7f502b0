/* Functions of the CUDA runtime that the driver has not, and kernels. */
#include "null.h"

#include <stdio.h>
#include <string.h>

enum { /* numbers of attributes */
    MAX_THREADS_PER_BLOCK = 1,
    MAX_THREADS_PER_MULTIPROCESSOR = 39,
    MAJOR = 75,
    MINOR = 76,
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
    MAX_BLOCKS_PER_MULTIPROCESSOR = 106,
    REGISTERS = 32 /* of a thread, of any kernel */
};

static int attribute(int number) { return null.attributes[number]; }

/* ---- properties ---- */

/* The fields of cudaDeviceProp to the last that is filled in, in their order. BOTH and ONLY_12 are
 * called with type, name, number of elements and the attribute that holds the value, or 0. */
#define PROPERTIES(BOTH, ONLY_12)                                                                  \
    BOTH(char, name, 256, 0) BOTH(char, uuid, 16, 0) BOTH(char, luid, 8, 0)                        \
    BOTH(int, luid_mask, 1, 0) BOTH(size_t, total, 1, 0) BOTH(size_t, shared_per_block, 1, 8)      \
    BOTH(int, registers_per_block, 1, 12) BOTH(int, warp, 1, 10) BOTH(size_t, pitch, 1, 11)        \
    BOTH(int, threads_per_block, 1, 1) BOTH(int, block_x, 1, 2) BOTH(int, block_y, 1, 3)           \
    BOTH(int, block_z, 1, 4) BOTH(int, grid_x, 1, 5) BOTH(int, grid_y, 1, 6)                       \
    BOTH(int, grid_z, 1, 7) ONLY_12(int, clock, 1, 13) BOTH(size_t, constants, 1, 9)               \
    BOTH(int, major, 1, 75) BOTH(int, minor, 1, 76) BOTH(size_t, texture_alignment, 1, 14)         \
    BOTH(size_t, texture_pitch, 1, 51) ONLY_12(int, overlap, 1, 15)                                \
    BOTH(int, multiprocessors, 1, 16) ONLY_12(int, kernel_timeout, 1, 17)                          \
    BOTH(int, integrated, 1, 18) BOTH(int, maps_host, 1, 19) ONLY_12(int, compute_mode, 1, 20)     \
    BOTH(int, texture_1d, 2, 0) ONLY_12(int, texture_1d_linear, 1, 0) BOTH(int, textures, 37, 0)   \
    BOTH(size_t, surface_alignment, 1, 30) BOTH(int, concurrent_kernels, 1, 31)                    \
    BOTH(int, ecc, 1, 32) BOTH(int, pci_bus, 1, 0) BOTH(int, pci_device, 1, 34)                    \
    BOTH(int, pci_domain, 1, 50) BOTH(int, tcc, 1, 35) BOTH(int, engines, 1, 40)                   \
    BOTH(int, unified_addressing, 1, 41) ONLY_12(int, memory_clock, 1, 36)                         \
    BOTH(int, bus_width, 1, 37) BOTH(int, l2, 1, 38) BOTH(int, persisting_l2, 1, 108)              \
    BOTH(int, threads_per_multiprocessor, 1, 39) BOTH(int, priorities, 1, 78)                      \
    BOTH(int, global_l1, 1, 79) BOTH(int, local_l1, 1, 80)                                         \
    BOTH(size_t, shared_per_multiprocessor, 1, 81) BOTH(int, registers_per_multiprocessor, 1, 82)  \
    BOTH(int, managed, 1, 83) BOTH(int, multi_gpu, 2, 84) BOTH(int, native_atomics, 1, 86)         \
    ONLY_12(int, double_ratio, 1, 87) BOTH(int, pageable, 1, 88)                                   \
    BOTH(int, concurrent_managed, 1, 89) BOTH(int, preemption, 1, 90)                              \
    BOTH(int, host_pointers, 1, 91) BOTH(int, cooperative, 1, 95)                                  \
    ONLY_12(int, cooperative_multi, 1, 96) BOTH(size_t, shared_per_block_optin, 1, 97)             \
    BOTH(int, host_page_tables, 1, 100) BOTH(int, direct_managed, 1, 101)                          \
    BOTH(int, blocks_per_multiprocessor, 1, 106) BOTH(int, window, 1, 109)                         \
    BOTH(size_t, reserved_shared, 1, 111) BOTH(int, host_register, 1, 99)                          \
    BOTH(int, sparse_arrays, 1, 112) BOTH(int, host_register_read_only, 1, 113)                    \
    BOTH(int, timeline, 1, 114) BOTH(int, pools, 1, 115) BOTH(int, rdma, 1, 116)                   \
    BOTH(int, rdma_flush, 1, 117) BOTH(int, rdma_order, 1, 118)                                    \
    BOTH(int, pool_handles, 1, 119) BOTH(int, deferred_arrays, 1, 121)                             \
    BOTH(int, ipc_events, 1, 125) BOTH(int, clusters, 1, 120) BOTH(int, function_pointers, 1, 129)

#define FIELD(type, name, count, number) type name[count];
#define NO_FIELD(type, name, count, number)
#define FILL(type, name, count, number) \
    if (number) to->name[0] = (type)attribute(number);
#define NO_FILL(type, name, count, number)

typedef struct Properties12 {
    PROPERTIES(FIELD, FIELD)
} Properties12;

typedef struct Properties13 {
    PROPERTIES(FIELD, NO_FIELD)
} Properties13;

#define DEFINE_PROPERTIES(function, Struct, ONLY_12)                    \
    EXPORT int function(Struct *to, int device);                        \
    int function(Struct *to, int device) {                              \
        if (device < 0 || device >= null.count) return 101; /* device */ \
        memset(to, 0, sizeof *to);                                      \
        memcpy(to->name, null.name, sizeof to->name);                   \
        memset(to->uuid, device + 1, sizeof to->uuid);                  \
        to->total[0] = null.total;                                      \
        to->pci_bus[0] = device + 1;                                    \
        PROPERTIES(FILL, ONLY_12)                                       \
        return 0;                                                       \
    }

DEFINE_PROPERTIES(cudaGetDeviceProperties_v2, Properties12, FILL) /* its name in CUDA 12 */
DEFINE_PROPERTIES(cudaGetDeviceProperties, Properties13, NO_FILL)

/* ---- devices, errors, entry points ---- */

SIMPLE(cudaDeviceGetPCIBusId, (char *text, int length, int device),
       snprintf(text, (size_t)length, "0000:%02x:00.0", device + 1))
SIMPLE(cudaGetLastError, (void), ) /* the call that failed has returned the error */
SIMPLE(cudaPeekAtLastError, (void), )

EXPORT int cudaSetDevice(int device) { return set_device(device) == CUDA_SUCCESS ? 0 : 101; }

EXPORT const char *cudaGetErrorName(int error) { return error_text(error, false); }
EXPORT const char *cudaGetErrorString(int error) { return error_text(error, true); }

EXPORT int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned int version,
                                            uint64_t flags, int *status) {
    int code = find_function(name, (int)version, function);
    if (status) *status = code ? 1 : 0; /* not found; found */
    return code;
}

EXPORT int cudaGetDriverEntryPoint(const char *name, void **function, uint64_t flags, int *status) {
    return cudaGetDriverEntryPointByVersion(name, function, 12000, flags, status);
}

/* ---- memory and streams ---- */

typedef struct PointerAttributes {
    int type; /* 0 unknown, 1 host, 2 device */
    int device;
    void *on_device, *on_host;
} PointerAttributes;

EXPORT int cudaPointerGetAttributes(PointerAttributes *attributes, void *address) {
    Range range;
    *attributes = (PointerAttributes){0};
    if (!range_find((uintptr_t)address, &range)) return 0;
    bool is_host = range.kind == RANGE_HOST;
    attributes->type = is_host ? 1 : 2;
    attributes->device = is_host ? 0 : range.device;
    attributes->on_device = address;
    attributes->on_host = is_host ? address : NULL;
    return 0;
}

/* Of a variable in a kernel's code. */
SIMPLE(cudaGetSymbolAddress, (void **address, const void *symbol), *address = new_handle())
SIMPLE(cudaStreamAddCallback, (void *stream, void (*function)(void *, int, void *), void *data),
       function(stream, 0, data))
/* CUDA 13 added the edges before the count. */
SIMPLE(cudaGraphNodeGetDependencies, (void *node, void *nodes, size_t *third, size_t *fourth),
       *(null.cuda < 13000 ? third : fourth) = 0)

/* ---- kernels ---- */

typedef struct Size3 {
    unsigned int x, y, z;
} Size3;

typedef struct FunctionAttributes {
    size_t shared, constants, local;
    int max_threads, registers, ptx, binary, cache_mode, max_dynamic_shared;
} FunctionAttributes;

EXPORT void **__cudaRegisterFatBinary(void *code) {
    static void *handle;
    return &handle;
}

EXPORT int __cudaPopCallConfiguration(Size3 *grid, Size3 *block, size_t *shared, void **stream) {
    *grid = *block = (Size3){1, 1, 1};
    *shared = 0;
    *stream = NULL;
    return 0;
}

SIMPLE(__cudaGetKernel, (void **kernel, void *function), *kernel = function)

EXPORT int cudaFuncGetAttributes(FunctionAttributes *attributes, const void *function) {
    int version = 10 * attribute(MAJOR) + attribute(MINOR);
    memset(attributes, 0, sizeof *attributes);
    attributes->max_threads = attribute(MAX_THREADS_PER_BLOCK);
    attributes->registers = REGISTERS;
    attributes->ptx = attributes->binary = version;
    attributes->max_dynamic_shared = attribute(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    return 0;
}

SIMPLE(cuFuncGetAttribute, (int *value, int number, void *function),
       *value = number == 0 ? attribute(MAX_THREADS_PER_BLOCK) : number == 4 ? REGISTERS : 0)
SIMPLE(cuOccupancyMaxActiveClusters, (int *count), *count = 16)
SAME(cuOccupancyMaxPotentialClusterSize, cuOccupancyMaxActiveClusters)

EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, void *function, int threads) {
    int most = attribute(MAX_BLOCKS_PER_MULTIPROCESSOR);
    int fitting = attribute(MAX_THREADS_PER_MULTIPROCESSOR) / (threads > 0 ? threads : 1);
    *count = fitting < most ? fitting : most;
    return 0;
}

SAME(cudaOccupancyMaxActiveBlocksPerMultiprocessor, cuOccupancyMaxActiveBlocksPerMultiprocessor)
SAME(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
     cuOccupancyMaxActiveBlocksPerMultiprocessor)
