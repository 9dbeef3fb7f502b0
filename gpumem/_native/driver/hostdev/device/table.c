/* The table that callers hold, and the names of errors. */
#include "internal.h"

#define HOST_FIELD(name, version, parameters) .cu##name = host_cu##name,
static const DriverTable table = {GM_DRIVER_FUNCTIONS(HOST_FIELD)};
#undef HOST_FIELD

const DriverTable *hostdev_table(void) {
    host_setup();
    return &table;
}

typedef struct ErrorText {
    CUresult error;
    const char *name, *text;
} ErrorText;

#define ERROR_ROW(name, number, text) {CUDA_##name, "CUDA_" #name, text},
static const ErrorText errors[] = {GM_ERRORS(ERROR_ROW)};
#undef ERROR_ROW

static CUresult error_text(CUresult error, bool describe, const char **text) {
    if (!text) return CUDA_ERROR_INVALID_VALUE;
    *text = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
        if (errors[i].error == error) *text = describe ? errors[i].text : errors[i].name;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Both may be called at any time: before cuInit, after shutdown and in a host function. */
CUresult host_cuGetErrorName(CUresult error, const char **text) {
    (void)host_enter(HOST_CALL_GetErrorName);
    return error_text(error, false, text);
}

CUresult host_cuGetErrorString(CUresult error, const char **text) {
    (void)host_enter(HOST_CALL_GetErrorString);
    return error_text(error, true, text);
}
