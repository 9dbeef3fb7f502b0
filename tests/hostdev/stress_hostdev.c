/* Many threads, all kinds of calls, bytes checked: to be run under sanitizers.
 *
 * Each thread makes its own small program from a seed: allocations of several kinds, a
 * cookie in each, copies between them on random streams ordered by events, and a check
 * of every cookie before its memory is freed. Two threads fork and churn streams beside
 * them. Ends with shutdown while work is queued. Prints "ok" and exits 0, or says what
 * was wrong.
 *
 * With "misuse" as third argument the device looks for misuse meanwhile, and must not
 * find any: everything here is ordered.
 *
 *   stress_hostdev [seed] [rounds] [misuse]
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "controls.h"

enum { THREADS = 4, STREAMS = 3, SLOTS = 24 };
static const size_t PAGE = (size_t)2 << 20;
static const DriverTable *cu;
static CUcontext context;
static CUstream shared_streams[STREAMS]; /* used by every thread */
static unsigned rounds = 300;

static void check(int good, const char *what, int code) {
    if (good) return;
    fprintf(stderr, "%s (%d)\n", what, code);
    exit(1);
}
static void ok(CUresult result, const char *what) { check(result == CUDA_SUCCESS, what, (int)result); }
#define OK(call) ok(cu->call, #call)

static unsigned next(unsigned *seed) {
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

typedef enum Kind { PLAIN, PINNED, POOLED, MAPPED, KINDS } Kind;
typedef struct Slot {
    CUdeviceptr pointer;
    size_t size;
    Kind kind;
    unsigned char cookie;
    CUstream stream; /* everything done to this slot is ordered there */
    CUmemGenericAllocationHandle handle;
} Slot;

static void slot_make(Slot *slot, unsigned *seed, const CUstream *streams) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    void *host_pointer;
    slot->kind = (Kind)(next(seed) % KINDS);
    slot->size = 1 + next(seed) % (slot->kind == PLAIN ? 3u << 20 : 200000u);
    slot->stream = streams[next(seed) % (2 * STREAMS)];
    slot->cookie = (unsigned char)next(seed);
    switch (slot->kind) {
    case PLAIN: OK(cuMemAlloc(&slot->pointer, slot->size)); break;
    case PINNED:
        OK(cuMemHostAlloc(&host_pointer, slot->size, 0));
        slot->pointer = (CUdeviceptr)(uintptr_t)host_pointer;
        break;
    case POOLED: OK(cuMemAllocAsync(&slot->pointer, slot->size, slot->stream)); break;
    default:
        OK(cuMemAddressReserve(&slot->pointer, 2 * PAGE, 0, 0, 0));
        OK(cuMemCreate(&slot->handle, PAGE, &prop, 0));
        OK(cuMemMap(slot->pointer, PAGE, 0, slot->handle, 0));
        OK(cuMemSetAccess(slot->pointer, PAGE, &access, 1));
    }
    OK(cuMemsetD8Async(slot->pointer, slot->cookie, slot->size, slot->stream));
}

static void slot_verify(const Slot *slot) {
    unsigned char *bytes = malloc(slot->size);
    OK(cuMemcpyDtoHAsync(bytes, slot->pointer, slot->size, slot->stream));
    for (size_t i = 0; i < slot->size; i++) check(bytes[i] == slot->cookie, "cookie", (int)slot->kind);
    free(bytes);
}

static void slot_free(Slot *slot) {
    switch (slot->kind) {
    case PLAIN: OK(cuMemFree(slot->pointer)); break;
    case PINNED: OK(cuMemFreeHost((void *)(uintptr_t)slot->pointer)); break;
    case POOLED: OK(cuMemFreeAsync(slot->pointer, slot->stream)); break;
    default:
        OK(cuMemUnmap(slot->pointer, PAGE));
        OK(cuMemRelease(slot->handle));
        OK(cuMemAddressFree(slot->pointer, 2 * PAGE));
    }
    slot->pointer = 0;
}

/* Copies one slot over another, with an event between their streams. */
static void slot_copy(Slot *to, const Slot *from, CUevent event) {
    size_t size = to->size < from->size ? to->size : from->size;
    if (to->size > from->size) return;
    OK(cuEventRecord(event, from->stream));
    OK(cuStreamWaitEvent(to->stream, event, 0));
    OK(cuMemcpyDtoDAsync(to->pointer, from->pointer, size, to->stream));
    OK(cuEventRecord(event, to->stream));
    OK(cuStreamWaitEvent(from->stream, event, 0));
    to->cookie = from->cookie;
}

static void *worker(void *argument) {
    unsigned seed = *(unsigned *)argument;
    Slot slots[SLOTS];
    CUstream streams[2 * STREAMS];
    CUevent event;
    memset(slots, 0, sizeof slots);
    OK(cuCtxSetCurrent(context));
    OK(cuEventCreate(&event, seed % 2 ? CU_EVENT_DISABLE_TIMING : 0));
    for (int i = 0; i < STREAMS; i++) {
        streams[i] = shared_streams[i];
        OK(cuStreamCreate(&streams[STREAMS + i], seed >> i & 1));
    }
    for (unsigned round = 0; round < rounds; round++) {
        Slot *slot = &slots[next(&seed) % SLOTS], *other = &slots[next(&seed) % SLOTS];
        if (!slot->pointer) slot_make(slot, &seed, streams);
        else if (next(&seed) % 3 == 0 && other->pointer && other != slot) slot_copy(slot, other, event);
        else {
            slot_verify(slot);
            slot_free(slot);
        }
    }
    for (int i = 0; i < SLOTS; i++)
        if (slots[i].pointer) {
            slot_verify(&slots[i]);
            slot_free(&slots[i]);
        }
    for (int i = 0; i < STREAMS; i++) OK(cuStreamDestroy(streams[STREAMS + i]));
    OK(cuEventDestroy(event));
    return NULL;
}

/* Streams that come and go, the default streams, and questions about other people's things. */
static void *churner(void *argument) {
    unsigned seed = *(unsigned *)argument;
    CUdeviceptr pointer;
    OK(cuCtxSetCurrent(context));
    OK(cuMemAlloc(&pointer, 64));
    for (unsigned round = 0; round < rounds; round++) {
        CUstream stream;
        CUevent event;
        size_t free_bytes, total;
        OK(cuStreamCreate(&stream, next(&seed) & 1));
        OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        OK(cuMemsetD8Async(pointer, 1, 32, stream));
        OK(cuEventRecord(event, stream));
        OK(cuMemsetD8Async(pointer + 32, 2, 32, next(&seed) & 1 ? CU_STREAM_LEGACY : CU_STREAM_PER_THREAD));
        OK(cuStreamDestroy(stream));
        OK(cuEventSynchronize(event));
        OK(cuEventDestroy(event));
        OK(cuMemGetInfo(&free_bytes, &total));
        check(cu->cuStreamQuery(stream) == CUDA_ERROR_INVALID_HANDLE, "stale stream", 0);
        check(cu->cuStreamQuery((CUstream)(uintptr_t)next(&seed)) != CUDA_SUCCESS || 1, "junk", 0);
    }
    OK(cuMemFree(pointer));
    return NULL;
}

int main(int count, char **arguments) {
    unsigned seed = count > 1 ? (unsigned)atoi(arguments[1]) : 1;
    pthread_t threads[THREADS + 1];
    unsigned seeds[THREADS + 1];
    HostdevLive live;
    if (count > 2) rounds = (unsigned)atoi(arguments[2]);
    cu = hostdev_table();
    hostdev_find_misuse(count > 3 && strcmp(arguments[3], "misuse") == 0);
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    for (int i = 0; i < STREAMS; i++) OK(cuStreamCreate(&shared_streams[i], i & 1));
    for (int i = 0; i <= THREADS; i++) {
        seeds[i] = seed * 977u + (unsigned)i;
        pthread_create(&threads[i], NULL, i < THREADS ? worker : churner, &seeds[i]);
    }
    for (int i = 0; i <= THREADS; i++) pthread_join(threads[i], NULL);
    OK(cuCtxSynchronize());
    for (int i = 0; i < STREAMS; i++) OK(cuStreamDestroy(shared_streams[i]));
    hostdev_live(&live);
    check(live.streams == 0, "streams left", (int)live.streams);
    check(live.events == 0, "events left", (int)live.events);
    check(live.handles == 0, "handles left", (int)live.handles);
    check(live.mappings == 0, "mappings left", (int)live.mappings);
    check(hostdev_used(0) == 0, "bytes left", 0);
    for (int kind = 0; kind < HOSTDEV_MISUSE_KINDS; kind++)
        check(hostdev_misuse_count(kind) == 0, hostdev_misuse_report(), kind);
    CUdeviceptr pointer;
    CUstream stream;
    OK(cuMemAlloc(&pointer, 64));
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuStreamWaitValue64(stream, pointer, 1, CU_STREAM_WAIT_VALUE_GEQ));
    for (int i = 0; i < 100; i++) OK(cuMemsetD8Async(pointer + 32, 1, 1, stream));
    hostdev_shutdown();
    hostdev_live(&live);
    check(live.workers == 0, "workers left", (int)live.workers);
    puts("ok");
    return 0;
}
