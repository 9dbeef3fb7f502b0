/* Settings of the null CUDA, its reports and refusals. */
#include "null.h"

#include <execinfo.h>
#include <string.h>

NullDevice null;
static _Atomic(NullListener) listening;

void null_configure(const NullDevice *device) { null = *device; }

void null_listen(NullListener listener) { listening = listener; }

void null_report(NullKind kind, const char *name, void *to, uint64_t bytes) {
    NullListener listener = listening;
    void *frames[MAX_FRAMES];
    if (!listener) return;
    int count = kind == NULL_ASSUMED ? 0 : backtrace(frames, MAX_FRAMES);
    listener(kind, name, to, bytes, frames, count);
}

/* ---- refusals ---- */

typedef struct Status {
    const char *prefix; /* of the library's functions */
    int not_supported;
} Status;

static const Status statuses[] = {
    {"cublas", 15}, {"cudnn", 3000},  {"cusolver", 9}, {"cusparse", 10},
    {"cufft", 16},  {"nccl", 5},
};

__thread bool is_quiet;

int null_refuse(const char *name) {
    if (!is_quiet) null_report(NULL_REFUSED, name, NULL, 0);
    for (size_t i = 0; i < sizeof statuses / sizeof statuses[0]; i++)
        if (!strncmp(name, statuses[i].prefix, strlen(statuses[i].prefix)))
            return statuses[i].not_supported;
    return CUDA_ERROR_NOT_SUPPORTED;
}

/* A function of the driver that is in driver_table.h and that no other file defines. */
#define REFUSED(name, version, parameters)             \
    EXPORT __attribute__((weak)) CUresult cu##name parameters; \
    CUresult cu##name parameters { return (CUresult)null_refuse("cu" #name); }

#pragma GCC diagnostic ignored "-Wunused-parameter"
GM_DRIVER_FUNCTIONS(REFUSED)
