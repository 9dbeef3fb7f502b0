/* Measures the costs of the host device, in the units of its goals. Prints one figure a line.
 *
 *   gcc -std=c11 -D_GNU_SOURCE -O2 -fvisibility=hidden \
 *       $(find gpumem -name '*.h' -printf '-I%h\n' | sort -u) \
 *       $(find gpumem/_native/driver/hostdev -name '*.c') \
 *       bench/native/hostdev.c -lpthread -o build/hostdev && build/hostdev
 *
 * Each figure is the median of seven rounds, then the smallest and the largest of them.
 * The time of the kernel alone is measured in the same run, between them.
 * The machine should be otherwise idle.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "controls.h"

static const DriverTable *cu;

static double seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void ok(CUresult result, const char *what) {
    if (result == CUDA_SUCCESS) return;
    fprintf(stderr, "%s: error %d\n", what, (int)result);
    exit(1);
}
#define OK(call) ok(cu->call, #call)

typedef double (*Round)(void);

enum { ROUNDS = 7 };

static int in_order(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static void report(const char *what, const char *unit, Round round) {
    double values[ROUNDS];
    for (int i = 0; i < ROUNDS; i++) values[i] = round();
    qsort(values, ROUNDS, sizeof values[0], in_order);
    printf("%-44s %10.3f %-5s (%.3f .. %.3f)\n", what, values[ROUNDS / 2], unit, values[0],
           values[ROUNDS - 1]);
}

static CUstream stream;
static CUevent event;
static CUdeviceptr small, large;
static void *pinned, *plain;
static const size_t LARGE = (size_t)256 << 20;

static void gate(void *data) {
    while (!__atomic_load_n((int *)data, __ATOMIC_ACQUIRE)) {
    }
}

static double submit_busy(void) {
    enum { N = 20000 };
    int open = 0;
    OK(cuLaunchHostFunc(stream, gate, &open));
    double start = seconds();
    for (int i = 0; i < N; i++) OK(cuMemsetD8Async(small, 1, 1, stream));
    double took = seconds() - start;
    __atomic_store_n(&open, 1, __ATOMIC_RELEASE);
    OK(cuStreamSynchronize(stream));
    return took / N * 1e6;
}

static double submit_flowing(void) {
    enum { N = 100000 };
    double start = seconds();
    for (int i = 0; i < N; i++) OK(cuMemsetD8Async(small, 1, 1, stream));
    double took = seconds() - start;
    OK(cuStreamSynchronize(stream));
    return took / N * 1e6;
}

static double submit_and_synchronize(void) {
    enum { N = 5000 };
    double start = seconds();
    for (int i = 0; i < N; i++) {
        OK(cuMemsetD8Async(small, 1, 1, stream));
        OK(cuStreamSynchronize(stream));
    }
    return (seconds() - start) / N * 1e6;
}

/* The worker has gone to sleep in between: a wake-up there and a wake-up back. */
static double submit_and_synchronize_cold(void) {
    enum { N = 300 };
    double total = 0;
    for (int i = 0; i < N; i++) {
        struct timespec pause = {0, 500000};
        nanosleep(&pause, NULL);
        double start = seconds();
        OK(cuMemsetD8Async(small, 1, 1, stream));
        OK(cuStreamSynchronize(stream));
        total += seconds() - start;
    }
    return total / N * 1e6;
}

static double event_record_query(void) {
    enum { N = 200000 };
    double start = seconds();
    for (int i = 0; i < N; i++) {
        OK(cuEventRecord(event, stream));
        OK(cuEventQuery(event));
    }
    return (seconds() - start) / N * 1e9;
}

static double copy_pinned(void) {
    double start = seconds();
    OK(cuMemcpyHtoDAsync(large, pinned, LARGE, stream));
    OK(cuStreamSynchronize(stream));
    return (double)LARGE / (seconds() - start) / 1e9;
}

static double copy_plain_memcpy(void) {
    double start = seconds();
    memcpy((void *)(uintptr_t)large, pinned, LARGE);
    return (double)LARGE / (seconds() - start) / 1e9;
}

static double copy_pageable(void) {
    double start = seconds();
    OK(cuMemcpyHtoD(large, plain, LARGE));
    return (double)LARGE / (seconds() - start) / 1e9;
}

static double alloc_free_large(void) {
    enum { N = 2000 };
    double start = seconds();
    for (int i = 0; i < N; i++) {
        CUdeviceptr pointer;
        OK(cuMemAlloc(&pointer, 4u << 20));
        OK(cuMemFree(pointer));
    }
    return (seconds() - start) / N * 1e6;
}

static double alloc_free_small(void) {
    enum { N = 20000 };
    double start = seconds();
    for (int i = 0; i < N; i++) {
        CUdeviceptr pointer;
        OK(cuMemAlloc(&pointer, 1024));
        OK(cuMemFree(pointer));
    }
    return (seconds() - start) / N * 1e6;
}

static double stream_cycle(void) {
    enum { N = 10000 };
    double start = seconds();
    for (int i = 0; i < N; i++) {
        CUstream brief;
        OK(cuStreamCreate(&brief, CU_STREAM_NON_BLOCKING));
        OK(cuMemsetD8Async(small, 1, 1, brief));
        OK(cuStreamDestroy(brief));
    }
    OK(cuCtxSynchronize());
    return (seconds() - start) / N * 1e6;
}

static double stream_cycle_unused(void) {
    enum { N = 10000 };
    double start = seconds();
    for (int i = 0; i < N; i++) {
        CUstream brief;
        OK(cuStreamCreate(&brief, CU_STREAM_NON_BLOCKING));
        OK(cuStreamDestroy(brief));
    }
    return (seconds() - start) / N * 1e6;
}

/* ---- virtual memory: microseconds a handle of 2 MiB ---- */

enum { PAGES = 512 };
static CUmemGenericAllocationHandle handles[PAGES];
static CUdeviceptr range;
static const size_t PAGE = (size_t)2 << 20;

static double vmm_map(void) {
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    double start = seconds();
    for (size_t i = 0; i < PAGES; i++) {
        OK(cuMemMap(range + i * PAGE, PAGE, 0, handles[i], 0));
        OK(cuMemSetAccess(range + i * PAGE, PAGE, &access, 1));
    }
    double took = seconds() - start;
    for (size_t i = 0; i < PAGES; i++) OK(cuMemUnmap(range + i * PAGE, PAGE));
    return took / PAGES * 1e6;
}

static double vmm_unmap(void) {
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    for (size_t i = 0; i < PAGES; i++) {
        OK(cuMemMap(range + i * PAGE, PAGE, 0, handles[i], 0));
        OK(cuMemSetAccess(range + i * PAGE, PAGE, &access, 1));
    }
    double start = seconds();
    for (size_t i = 0; i < PAGES; i++) OK(cuMemUnmap(range + i * PAGE, PAGE));
    return (seconds() - start) / PAGES * 1e6;
}

/* The two system calls that a map with access and an unmap cannot do without. */
static int file;

static double kernel_map(void) {
    void *at = (void *)(uintptr_t)range;
    double start = seconds();
    for (size_t i = 0; i < PAGES; i++)
        if (mmap((char *)at + i * PAGE, PAGE, PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file, (off_t)(i * PAGE)) == MAP_FAILED)
            exit(1);
    double took = seconds() - start;
    mmap(at, PAGES * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return took / PAGES * 1e6;
}

static double kernel_unmap(void) {
    char *at = (void *)(uintptr_t)range;
    for (size_t i = 0; i < PAGES; i++)
        mmap(at + i * PAGE, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file,
             (off_t)(i * PAGE));
    double start = seconds();
    for (size_t i = 0; i < PAGES; i++)
        mmap(at + i * PAGE, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return (seconds() - start) / PAGES * 1e6;
}

static double vmm_create(void) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemGenericAllocationHandle made[PAGES];
    double start = seconds();
    for (size_t i = 0; i < PAGES; i++) OK(cuMemCreate(&made[i], PAGE, &prop, 0));
    double took = seconds() - start;
    for (size_t i = 0; i < PAGES; i++) OK(cuMemRelease(made[i]));
    return took / PAGES * 1e6;
}

static void bench_vmm(void) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    if (!cu->cuMemCreate) return;
    OK(cuMemAddressReserve(&range, PAGES * PAGE, 0, 0, 0));
    for (size_t i = 0; i < PAGES; i++) OK(cuMemCreate(&handles[i], PAGE, &prop, 0));
    file = memfd_create("bench", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)(PAGES * PAGE)) != 0) exit(1);
    report("create a 2 MiB handle", "us", vmm_create);
    report("the kernel's mmap of 2 MiB of a file", "us", kernel_map);
    report("map and set access, 2 MiB handle", "us", vmm_map);
    report("the kernel's mmap of a hole over it", "us", kernel_unmap);
    report("unmap, 2 MiB handle", "us", vmm_unmap);
}

static double pool_cycle(void) {
    enum { N = 50000 };
    double start = seconds();
    for (int i = 0; i < N; i++) {
        CUdeviceptr pointer;
        OK(cuMemAllocAsync(&pointer, 1u << 20, stream));
        OK(cuMemFreeAsync(pointer, stream));
    }
    double took = seconds() - start;
    OK(cuStreamSynchronize(stream));
    return took / N * 1e6;
}

static long status_field(const char *name) { /* kB, or a count */
    char line[256];
    long value = -1;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status))
        if (strncmp(line, name, strlen(name)) == 0) value = atol(line + strlen(name));
    if (status) fclose(status);
    return value;
}

static void leaks(void) {
    HostdevLive before, after;
    stream_cycle(); /* the slots that all later ones use */
    sleep(2);       /* until workers that have nothing to do are gone */
    hostdev_live(&before);
    long threads = status_field("Threads:"), resident = status_field("VmRSS:");
    for (int i = 0; i < 3; i++) stream_cycle();
    sleep(2);
    hostdev_live(&after);
    printf("after 30 000 streams more: streams %+lld, workers %+lld, threads %+ld, resident %+ld kB\n",
           (long long)(after.streams - before.streams), (long long)(after.workers - before.workers),
           status_field("Threads:") - threads, status_field("VmRSS:") - resident);
}

int main(void) {
    CUcontext context;
    cu = hostdev_table();
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    OK(cuMemAlloc(&small, 1));
    OK(cuMemAlloc(&large, LARGE));
    OK(cuMemHostAlloc(&pinned, LARGE, 0));
    plain = malloc(LARGE);
    memset(pinned, 1, LARGE);
    memset(plain, 2, LARGE);
    copy_plain_memcpy();
    report("submit, worker busy", "us", submit_busy);
    report("submit, worker keeping up", "us", submit_flowing);
    report("submit and synchronize, back to back", "us", submit_and_synchronize);
    report("submit and synchronize, worker asleep", "us", submit_and_synchronize_cold);
    report("event record and query, idle stream", "ns", event_record_query);
    report("memcpy, 256 MiB", "GB/s", copy_plain_memcpy);
    report("copy from pinned, 256 MiB", "GB/s", copy_pinned);
    report("copy from pageable, synchronous, 256 MiB", "GB/s", copy_pageable);
    report("alloc and free, 4 MiB", "us", alloc_free_large);
    report("alloc and free, 1 KiB", "us", alloc_free_small);
    report("stream create, use, destroy (10 000)", "us", stream_cycle);
    report("stream create, destroy (10 000)", "us", stream_cycle_unused);
    bench_vmm();
    leaks();
    if (cu->cuMemAllocAsync) report("pool alloc and free, 1 MiB", "us", pool_cycle);
    hostdev_shutdown();
    return 0;
}
