/* External semaphores: timelines in a shared page, signalled and awaited in stream order.
 *
 * The page is the one of include/timeline_page.h, and any process that maps it takes part;
 * one of zeros will do. TIMELINE_SEMAPHORE_FD waits for value >= and a signal raises it, never
 * lowers it; OPAQUE_FD is binary: a wait consumes the signal. Windows' types are refused.
 */
#include "../device/internal.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- the shared page ---- */

static bool reached(Timeline *timeline, uint64_t value) {
    uint64_t one = 1;
    if (timeline->binary) return atomic_compare_exchange_strong(&timeline->page->value, &one, 0);
    return atomic_load(&timeline->page->value) >= value;
}

static void timeline_drop(Timeline *timeline) {
    if (atomic_fetch_sub(&timeline->references, 1) > 1) return;
    munmap(timeline->page, sizeof *timeline->page);
    free(timeline);
}

/* ---- import ---- */

static Timeline *timeline_map(int file, bool binary) {
    struct stat status;
    if (file < 0 || fstat(file, &status) != 0 || (size_t)status.st_size < sizeof(TimelinePage)) return NULL;
    Timeline *timeline = malloc(sizeof *timeline);
    if (!timeline) return NULL;
    void *page = mmap(NULL, sizeof(TimelinePage), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (page == MAP_FAILED) {
        free(timeline);
        return NULL;
    }
    atomic_init(&timeline->references, 1);
    timeline->binary = binary;
    timeline->page = page;
    return timeline;
}

/* The descriptor is closed on success, since the mapping is all that is needed. */
static CUresult semaphore_import(CUexternalSemaphore *out, int file, bool binary) {
    Timeline *timeline = timeline_map(file, binary);
    if (!timeline) return CUDA_ERROR_INVALID_VALUE;
    Semaphore *semaphore = host_object_take(&host.semaphores);
    if (!semaphore) {
        timeline_drop(timeline);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&semaphore->object.lock);
    semaphore->timeline = timeline;
    *out = (CUexternalSemaphore)(uintptr_t)host_object_publish(&host.semaphores, semaphore);
    pthread_mutex_unlock(&semaphore->object.lock);
    close(file);
    return CUDA_SUCCESS;
}

CUresult host_cuImportExternalSemaphore(CUexternalSemaphore *out,
                                        const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC *desc) {
    ENTER_CONTEXT(ImportExternalSemaphore);
    if (!out || !desc || desc->flags != 0) return CUDA_ERROR_INVALID_VALUE;
    bool binary = desc->type == CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_FD;
    if (!binary && desc->type != CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD)
        return CUDA_ERROR_NOT_SUPPORTED;
    return semaphore_import(out, desc->handle.fd, binary);
}

static CUresult semaphore_timeline(CUexternalSemaphore handle, Timeline **out) {
    Semaphore *semaphore = HOST_LOCKED(semaphores, handle, CUDA_ERROR_INVALID_HANDLE);
    atomic_fetch_add(&semaphore->timeline->references, 1);
    *out = semaphore->timeline;
    pthread_mutex_unlock(&semaphore->object.lock);
    return CUDA_SUCCESS;
}

CUresult host_cuDestroyExternalSemaphore(CUexternalSemaphore handle) {
    ENTER_CONTEXT(DestroyExternalSemaphore);
    Semaphore *semaphore = HOST_LOCKED(semaphores, handle, CUDA_ERROR_INVALID_HANDLE);
    timeline_drop(semaphore->timeline);
    host_object_end(&host.semaphores, semaphore);
    return CUDA_SUCCESS;
}

/* ---- signal and wait, in a worker ---- */

typedef struct Step { /* owned by the operation that carries it */
    Timeline *timeline;
    uint64_t value;
} Step;

static void step_drop(void *data) {
    Step *step = data;
    timeline_drop(step->timeline);
    free(step);
}

static CUresult signal_run(Stream *stream, void *data) {
    Step *step = data;
    (void)stream;
    timeline_signal(step->timeline->page, step->timeline->binary ? 1 : step->value);
    step_drop(step);
    return CUDA_SUCCESS;
}

/* Wakes every MOMENT_NS to check whether it should stop. */
static void wait_parked(Stream *stream, const Step *step) {
    enum { MOMENT_NS = 5000000 };
    TimelinePage *page = step->timeline->page;
    atomic_fetch_add(&page->waiters, 1);
    while (!host_stop_requested(stream)) {
        uint32_t seen = atomic_load(&page->sequence);
        if (reached(step->timeline, step->value)) break;
        timeline_sleep(page, seen, MOMENT_NS);
    }
    atomic_fetch_sub(&page->waiters, 1);
}

static CUresult wait_run(Stream *stream, void *data) {
    Step *step = data;
    host_park(stream, PARK_VALUE, (Point){NULL, 0, 0});
    if (!reached(step->timeline, step->value)) wait_parked(stream, step);
    host_park(stream, PARK_NONE, (Point){NULL, 0, 0});
    step_drop(step);
    return CUDA_SUCCESS;
}

static CUresult step_push(Stream *stream, CUexternalSemaphore semaphore,
                          CUresult (*run)(Stream *, void *), uint64_t value) {
    Step *step = malloc(sizeof *step);
    if (!step) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = semaphore_timeline(semaphore, &step->timeline);
    if (result != CUDA_SUCCESS) {
        free(step);
        return result;
    }
    step->value = value;
    result = host_stream_push(stream, &(Op){.kind = OP_RUN, .run = {run, step_drop, step}});
    if (result != CUDA_SUCCESS) step_drop(step);
    else WATCH((run == wait_run ? host_order_loosen : host_order_publish)(stream));
    return result;
}

static CUresult steps_submit(Context *context, const CUexternalSemaphore *semaphores,
                             const CUDA_EXTERNAL_SEMAPHORE_PARAMS *params, unsigned int count,
                             CUstream handle, CUresult (*run)(Stream *, void *)) {
    Stream *stream;
    if (count > 0 && (!semaphores || !params)) return CUDA_ERROR_INVALID_VALUE;
    for (unsigned int i = 0; i < count; i++) /* all or none */
        if (!host_object_find(&host.semaphores, (uint64_t)(uintptr_t)semaphores[i]))
            return CUDA_ERROR_INVALID_HANDLE;
    HOST_TRY(host_stream_begin(context, handle, &stream));
    CUresult result = CUDA_SUCCESS;
    for (unsigned int i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = step_push(stream, semaphores[i], run, params[i].params.fence.value);
    host_stream_end(stream);
    return result;
}

CUresult host_cuSignalExternalSemaphoresAsync(const CUexternalSemaphore *semaphores,
                                              const CUDA_EXTERNAL_SEMAPHORE_PARAMS *params,
                                              unsigned int count, CUstream stream) {
    Context *context = ENTER_STREAM(SignalExternalSemaphoresAsync, stream);
    return steps_submit(context, semaphores, params, count, stream, signal_run);
}

CUresult host_cuWaitExternalSemaphoresAsync(const CUexternalSemaphore *semaphores,
                                            const CUDA_EXTERNAL_SEMAPHORE_PARAMS *params,
                                            unsigned int count, CUstream stream) {
    Context *context = ENTER_STREAM(WaitExternalSemaphoresAsync, stream);
    return steps_submit(context, semaphores, params, count, stream, wait_run);
}
