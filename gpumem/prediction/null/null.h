/* The null CUDA: functions of CUDA and of its libraries that compute nothing.
 *
 * PyTorch runs on them as on a GPU. Device memory is reserved address space that nothing touches,
 * so that allocators see addresses, sizes and a limit. Kernels are dropped. A copy to the host
 * writes zeros and is reported, because a program that reads them reads a stand-in.
 *
 * The library is loaded before PyTorch, with its symbols global: the dynamic linker then binds
 * PyTorch's calls to it and not to NVIDIA's libraries. They are loaded, and cuDNN alone is called:
 * it states workspaces without a GPU. A function is of one of three kinds:
 *   implemented   it writes every output that it has;
 *   harmless      it has no output on the host, and succeeds (functions.h);
 *   refused       its outputs are unknown: it fails as "not supported", and is reported by name.
 * Of cuSOLVER, cuSPARSE, cuFFT and cuSPARSELt only the function that makes a handle is defined. It
 * refuses, so that no other function of these libraries can be called.
 *
 * No function waits.
 */
#ifndef GPUMEM_NULL_H
#define GPUMEM_NULL_H

#include "driver_table.h"

#include <pthread.h>
#include <stdbool.h>

#define EXPORT __attribute__((visibility("default")))

/* A function that has one effect, and succeeds. */
#define SIMPLE(name, parameters, effect) \
    EXPORT int name parameters {         \
        effect;                          \
        return 0;                        \
    }

/* A function with the parameters of another one, or with further ones, which are ignored. */
#define SAME(name, as) EXPORT __typeof__(as) name __attribute__((alias(#as)));

/* ---- control: how prediction/ sets the device and listens ---- */

enum { MAX_DEVICES = 16, MAX_ATTRIBUTES = 160, MAX_FRAMES = 48 };

typedef struct NullDevice { /* all devices are alike */
    int count;
    int cuda;         /* CUDA version that the driver and the runtime state: 13000 */
    uint64_t total;   /* bytes */
    uint64_t context; /* bytes that a context takes of them */
    char name[256];
    int attributes[MAX_ATTRIBUTES]; /* by number of the driver's CUdevice_attribute */
} NullDevice;

typedef enum NullKind {
    NULL_READ = 0,    /* device memory was copied to the host, which sees zeros */
    NULL_REFUSED = 1, /* a function was refused */
    NULL_ASSUMED = 2, /* a function wrote a value that a GPU may not write */
} NullKind;

/* `name` is a function of CUDA, or a text about an assumption; `to` the host memory of a read, which
 * the listener may fill, and `bytes` its size; `frames` return addresses of the calling thread,
 * innermost first. */
typedef void (*NullListener)(int kind, const char *name, void *to, uint64_t bytes,
                             void *const *frames, int frame_count);

extern NullDevice null;

EXPORT void null_configure(const NullDevice *device);
EXPORT void null_listen(NullListener listener);
EXPORT void null_memory(int device, uint64_t *used, uint64_t *peak);
/* Returns the names of the harmless or the refused functions; NULL ends them. */
EXPORT const char *const *null_functions(int is_refused);

EXPORT void null_report(NullKind kind, const char *name, void *to, uint64_t bytes);
/* Returns the status "not supported" of the function's library. */
EXPORT int null_refuse(const char *name);
extern __thread bool is_quiet; /* this thread's refusals are not reported */

/* ---- memory.c ---- */

typedef struct Physical { /* memory of cuMemCreate; it is used while it has a claim */
    size_t size;
    int device;
    int claims; /* one of the handle, and one of each mapping */
} Physical;

typedef enum RangeKind { RANGE_DEVICE, RANGE_RESERVED, RANGE_MAPPED, RANGE_HOST } RangeKind;

typedef struct Range {
    uintptr_t base;
    size_t size;
    RangeKind kind;
    int device;
    Physical *physical; /* of a mapping */
} Range;

enum { NULL_GRANULE = 2 << 20 }; /* bytes; the least that a driver maps */

bool is_device(const void *address);
bool range_find(uintptr_t address, Range *found);
/* Rank 0 sends the memory there to the other ranks. */
void memory_broadcast(const void *address);

/* ---- driver.c ---- */

void *new_handle(void); /* a number that nothing may dereference */
int current_device(void);
CUresult set_device(int device);
CUresult find_function(const char *name, int version, void **function);
const char *error_text(int error, bool describe);

#endif
