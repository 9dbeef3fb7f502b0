"""Pinned host memory: pages made by several threads, then registered with the driver.

cuMemHostAlloc makes its pages one by one on one core. Pages made here by several cores, in huge
pages, and registered afterwards are several times faster (bench/pinned.py), from about one huge
page on. cuMemHostAlloc serves smaller regions, and devices that cannot use the host's addresses for
registered memory or whose driver does not register it.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free

from gpumem._native.backing.device cimport (
    Backing, backing_init, backing_note, host_release, host_reserve, Mapped, mapped_add,
    mapped_find, mapped_remove,
)
from gpumem._native.driver cimport (
    CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID,
    CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, CU_MEMHOSTREGISTER_DEVICEMAP,
    CU_MEMHOSTREGISTER_PORTABLE, CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS,
    CUdevice_attribute, CUdeviceptr, CUresult, DeviceContext,
)
from gpumem._support.atomics cimport store32, sum_add
from gpumem._support.memory cimport (
    madvise, MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, mmap, munmap, PROT_READ, PROT_WRITE,
)


cdef enum:
    HUGE_PAGE = 2097152         # bytes; mappings begin at a multiple of it
    FLOOR = HUGE_PAGE           # a smaller region is cuMemHostAlloc's


cdef void pinned_init(Backing* backing, DeviceContext* context) noexcept nogil:
    backing_init(backing, context)
    backing.reserve = host_reserve
    backing.release = host_release
    backing.waits = True
    backing.call = "cuMemHostAlloc"
    if not can_register(context):
        return
    backing.reserve = pinned_reserve
    backing.release = pinned_release
    backing.node = attribute(context, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, -1)


cdef bint can_register(DeviceContext* context) noexcept nogil:
    return (context.table.cuMemHostRegister != NULL and context.table.cuMemHostUnregister != NULL
            and context.table.cuMemHostGetDevicePointer != NULL
            and attribute(context, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 0)
            and attribute(context, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 0))


cdef int attribute(DeviceContext* context, CUdevice_attribute which, int otherwise) noexcept nogil:
    cdef int value = otherwise
    if context.table.cuDeviceGetAttribute(&value, which, context.device) != CUDA_SUCCESS:
        return otherwise
    return value


cdef CUresult pinned_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef CUresult code = CUDA_ERROR_NOT_SUPPORTED
    if size >= FLOOR:
        code = registered_reserve(self, size, address)
    if code == CUDA_SUCCESS or code == CUDA_ERROR_OUT_OF_MEMORY:
        return code
    return host_reserve(self, size, address)


cdef CUresult registered_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef uint64_t nbytes = pages_round(size)
    cdef uint64_t pages = pages_map(nbytes, self.node)
    cdef CUresult code
    if pages == 0:
        return CUDA_ERROR_OUT_OF_MEMORY
    code = pages_pin(self, pages, nbytes, 0)
    if code != CUDA_SUCCESS:
        munmap(<void*>pages, nbytes)
    address[0] = pages
    return code


cdef CUresult pages_pin(Backing* self, uint64_t pages, uint64_t nbytes,
                        uint64_t memory) noexcept nogil:
    cdef CUdeviceptr seen = 0
    cdef CUresult code = backing_note(
        self, "cuMemHostRegister", self.context.table.cuMemHostRegister(
            <void*>pages, nbytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP))
    if code != CUDA_SUCCESS:
        return code
    code = backing_note(self, "cuMemHostGetDevicePointer",
                        self.context.table.cuMemHostGetDevicePointer(&seen, <void*>pages, 0))
    if code == CUDA_SUCCESS and seen != pages:
        code = CUDA_ERROR_NOT_SUPPORTED     # a block has one address, for the CPU and the device
    if code == CUDA_SUCCESS and mapped_add(self, pages, nbytes, memory) == NULL:
        code = CUDA_ERROR_OUT_OF_MEMORY
    if code != CUDA_SUCCESS:
        self.context.table.cuMemHostUnregister(<void*>pages)
    return code


cdef CUresult pinned_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    # While the driver refuses, the device may still write there: pages and their record stay.
    cdef CUresult code
    cdef Mapped* mapped
    if mapped_find(self, address) == NULL:
        return host_release(self, address, size)
    code = backing_note(self, "cuMemHostUnregister",
                        self.context.table.cuMemHostUnregister(<void*>address))
    if code == CUDA_SUCCESS:
        mapped = mapped_remove(self, address)
        munmap(<void*>address, mapped.nbytes)
        free(mapped)
    return code


# ---- Pages of the host, made by several threads --------------------------------------------------
#
# The kernel clears a page when it is first touched, one core at a few GB/s: for pinned memory
# that is most of the time. Here several threads share the clearing. MADV_POPULATE_WRITE makes the
# pages, because it fails where there is no memory left; where the kernel has no such advice, each
# page is touched.


cdef extern from "meminfo.h":
    uint64_t memory_available(const char* groups) noexcept nogil
    const char* CONTROL_GROUPS

cdef extern from *:
    """
    #include <pthread.h>
    #include <sched.h>
    #include <signal.h>
    #include <stdio.h>
    #include <string.h>
    #include <errno.h>
    #include <unistd.h>
    #include <sys/mman.h>
    #include <sys/syscall.h>

    #ifndef MADV_POPULATE_WRITE
    #define MADV_POPULATE_WRITE 23
    #endif
    enum { GM_MPOL_PREFERRED = 1, GM_NODES = 1024 };

    static inline int gm_cpu_count(void) {
        cpu_set_t cpus;
        return sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
    }

    /* A preference: where the kernel refuses it, the pages come from any node. */
    static inline void gm_prefer_node(void *at, size_t nbytes, int node) {
        unsigned long mask[GM_NODES / (8 * sizeof(unsigned long))] = {0};
        if (node < 0 || node >= GM_NODES) return;
        mask[node / (8 * sizeof mask[0])] |= 1ul << (node % (8 * sizeof mask[0]));
        syscall(SYS_mbind, at, nbytes, GM_MPOL_PREFERRED, mask, (unsigned long)GM_NODES, 0u);
    }

    static inline int gm_make_pages(char *at, size_t nbytes, size_t page) {
        while (madvise(at, nbytes, MADV_POPULATE_WRITE) != 0) {
            if (errno == EINTR || errno == EAGAIN) continue;
            if (errno != EINVAL) return -1;
            for (size_t i = 0; i < nbytes; i += page) ((volatile char *)at)[i] = 0;
            return 0;
        }
        return 0;
    }

    /* Threads that run no handler of the process: signals stay with those that were there. */
    static inline int gm_thread_start(pthread_t *thread, void *(*run)(void *), void *argument) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        int failed = pthread_create(thread, NULL, run, argument);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        return failed;
    }
    """
    ctypedef struct pthread_t:
        pass
    int pthread_join(pthread_t thread, void** result) noexcept nogil
    int gm_cpu_count() noexcept nogil
    void gm_prefer_node(void* at, size_t nbytes, int node) noexcept nogil
    int gm_make_pages(char* at, size_t nbytes, size_t page) noexcept nogil
    int gm_thread_start(pthread_t* thread, void* (*run)(void*) noexcept nogil,
                        void* argument) noexcept nogil
    int getpagesize() noexcept nogil
    int msync(void* at, size_t nbytes, int flags) noexcept nogil
    enum:
        MADV_HUGEPAGE
        MADV_DONTFORK
        MS_ASYNC

cdef enum:
    MAX_THREADS = 8             # of them the caller is one; on 16 cores more gained nothing
    BYTES_PER_THREAD = 33554432     # 32 MiB: less is done before another thread has started
    PIECE = 16777216            # 16 MiB: what a thread takes at a time

# One call of pages_map, shared by its threads.
cdef struct Fill:
    char* base
    uint64_t nbytes
    uint64_t next           # offset of the next piece (atomic)
    uint64_t page
    uint32_t failed         # atomic


cdef uint64_t pages_round(uint64_t nbytes) noexcept nogil:
    # The bytes that a mapping of so many takes: whole pages, no more.
    cdef uint64_t page = getpagesize()
    return (nbytes + page - 1) // page * page


cdef uint64_t pages_map(uint64_t nbytes, int node) noexcept nogil:
    # Maps pages and makes all of them now. `node`: where they are wanted; -1: anywhere. Returns
    # their address; 0: no memory.
    cdef Fill fill
    cdef uint64_t available = memory_available(CONTROL_GROUPS)
    if available and nbytes > available:
        return 0                # the kernel would end processes to make room
    fill.base = map_aligned(nbytes)
    if fill.base == NULL:
        return 0
    madvise(fill.base, nbytes, MADV_HUGEPAGE)
    # A fork must not mark these pages copy-on-write: the parent's next write would move its data
    # away from the page that the device reads.
    madvise(fill.base, nbytes, MADV_DONTFORK)
    gm_prefer_node(fill.base, nbytes, node)
    fill.nbytes = nbytes
    fill.next = 0
    fill.page = getpagesize()
    fill.failed = 0
    run_threads(&fill)
    if fill.failed:
        munmap(fill.base, nbytes)
        return 0
    return <uint64_t>fill.base


cdef bint pages_exist(uint64_t address, uint64_t nbytes) noexcept nogil:
    # The kernel looks at its list of mappings, not at pages.
    cdef uint64_t page = getpagesize()
    cdef uint64_t first = address // page * page
    return msync(<void*>first, address + nbytes - first, MS_ASYNC) == 0


cdef char* map_aligned(uint64_t nbytes) noexcept nogil:
    # Takes more addresses than needed and gives the ends back.
    cdef uint64_t whole = nbytes + HUGE_PAGE
    cdef void* raw = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    cdef uint64_t start = <uint64_t>raw
    cdef uint64_t base
    if raw == MAP_FAILED:
        return NULL
    base = (start + HUGE_PAGE - 1) & ~<uint64_t>(HUGE_PAGE - 1)
    if base > start:
        munmap(raw, base - start)
    munmap(<void*>(base + nbytes), start + whole - base - nbytes)
    return <char*>base


cdef void run_threads(Fill* fill) noexcept nogil:
    # Where no further thread can be started, those that run do the work.
    cdef pthread_t[MAX_THREADS] threads
    cdef uint64_t wanted = min(fill.nbytes // BYTES_PER_THREAD + 1, <uint64_t>MAX_THREADS,
                               <uint64_t>gm_cpu_count())
    cdef int count = 0
    cdef int i
    while (count < <int>wanted - 1
           and gm_thread_start(&threads[count], make_pages, fill) == 0):
        count += 1
    make_pages(fill)
    for i in range(count):
        pthread_join(threads[i], NULL)


cdef void* make_pages(void* shared) noexcept nogil:
    cdef Fill* fill = <Fill*>shared
    cdef uint64_t offset = sum_add(&fill.next, PIECE) - PIECE
    while offset < fill.nbytes and not fill.failed:
        if gm_make_pages(fill.base + offset, min(<uint64_t>PIECE, fill.nbytes - offset),
                         fill.page) != 0:
            store32(&fill.failed, 1)
        offset = sum_add(&fill.next, PIECE) - PIECE
    return NULL
