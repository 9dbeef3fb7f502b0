/* Between the two halves of the shared library (libcuda.c, per_thread.c). */
#ifndef GPUMEM_HOSTDEV_LIBCUDA_H
#define GPUMEM_HOSTDEV_LIBCUDA_H

#include "internal.h"

/* NULL: the function has nothing to do with a default stream. */
HOST_HIDDEN void *libcuda_per_thread(const char *name, int version);
HOST_HIDDEN CUresult libcuda_stream_context(CUstream stream, CUcontext *context, void **green);
HOST_HIDDEN CUresult libcuda_capture_info(CUstream stream, CUstreamCaptureStatus *status, uint64_t *id,
                                          CUgraph *graph, const CUgraphNode **dependencies,
                                          const void **edges, size_t *count);

#endif
