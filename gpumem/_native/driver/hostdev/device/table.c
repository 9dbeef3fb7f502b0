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

#define ERROR(name, text) {CUDA_##name, "CUDA_" #name, text}
static const ErrorText errors[] = {
    ERROR(SUCCESS, "no error"),
    ERROR(ERROR_INVALID_VALUE, "invalid argument"),
    ERROR(ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR(ERROR_NOT_INITIALIZED, "initialization error"),
    ERROR(ERROR_DEINITIALIZED, "driver shutting down"),
    ERROR(ERROR_STUB_LIBRARY, "CUDA driver is a stub library"),
    ERROR(ERROR_CALL_REQUIRES_NEWER_DRIVER, "this call requires a newer CUDA driver"),
    ERROR(ERROR_DEVICE_UNAVAILABLE, "CUDA-capable device(s) is/are busy or unavailable"),
    ERROR(ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    ERROR(ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ERROR(ERROR_INVALID_CONTEXT, "invalid device context"),
    ERROR(ERROR_MAP_FAILED, "mapping of buffer object failed"),
    ERROR(ERROR_UNMAP_FAILED, "unmapping of buffer object failed"),
    ERROR(ERROR_ALREADY_MAPPED, "resource already mapped"),
    ERROR(ERROR_NOT_MAPPED, "resource not mapped"),
    ERROR(ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these two devices"),
    ERROR(ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
    ERROR(ERROR_INVALID_HANDLE, "invalid resource handle"),
    ERROR(ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    ERROR(ERROR_NOT_FOUND, "named symbol not found"),
    ERROR(ERROR_NOT_READY, "device not ready"),
    ERROR(ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ERROR(ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled"),
    ERROR(ERROR_PEER_ACCESS_NOT_ENABLED, "peer access has not been enabled"),
    ERROR(ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    ERROR(ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped"),
    ERROR(ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region"),
    ERROR(ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    ERROR(ERROR_NOT_PERMITTED, "operation not permitted"),
    ERROR(ERROR_NOT_SUPPORTED, "operation not supported"),
    ERROR(ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    ERROR(ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
    ERROR(ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences"),
    ERROR(ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
    ERROR(ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    ERROR(ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"),
    ERROR(ERROR_STREAM_CAPTURE_IMPLICIT, "operation would make the legacy stream depend on a capturing blocking stream"),
    ERROR(ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream"),
    ERROR(ERROR_STREAM_CAPTURE_WRONG_THREAD, "attempt to terminate a thread-local capture sequence from another thread"),
    ERROR(ERROR_TIMEOUT, "wait operation timed out"),
    ERROR(ERROR_UNKNOWN, "unknown error"),
};
#undef ERROR

static const ErrorText *error_find(CUresult error) {
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
        if (errors[i].error == error) return &errors[i];
    return NULL;
}

/* Both answer at any time, before cuInit, after shutdown and in a host function. */
CUresult host_cuGetErrorName(CUresult error, const char **text) {
    (void)host_enter(HOST_CALL_GetErrorName);
    if (!text) return CUDA_ERROR_INVALID_VALUE;
    const ErrorText *found = error_find(error);
    *text = found ? found->name : NULL;
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult host_cuGetErrorString(CUresult error, const char **text) {
    (void)host_enter(HOST_CALL_GetErrorString);
    if (!text) return CUDA_ERROR_INVALID_VALUE;
    const ErrorText *found = error_find(error);
    *text = found ? found->text : NULL;
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
