"""Pages of the host, made by several threads; see _backing_pages.pxd.

The kernel clears a page when it is first touched, one core at a few GB/s: for pinned memory
that is most of the time. Here as many threads as help share the clearing. The kernel is asked to
make pages (MADV_POPULATE_WRITE), because it then answers that it has none; where it cannot be
asked, each page is touched.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._support.atomics cimport store32, sum_add
from gpumem._support.memory cimport (
    MAP_ANONYMOUS,
    MAP_FAILED,
    MAP_PRIVATE,
    PROT_READ,
    PROT_WRITE,
    madvise,
    mmap,
    munmap,
)

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

    /* Bytes that the kernel could hand out without swapping; 0: it does not tell. */
    static inline uint64_t gm_available(void) {
        char line[128];
        unsigned long long kib = 0;
        FILE *file = fopen("/proc/meminfo", "re");
        while (file && fgets(line, sizeof line, file))
            if (sscanf(line, "MemAvailable: %llu", &kib) == 1) break;
        if (file) fclose(file);
        return (uint64_t)kib << 10;
    }

    /* A wish: where the kernel refuses, the pages come from wherever they are. */
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
    uint64_t gm_available() noexcept nogil
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
    cdef uint64_t page = getpagesize()
    return (nbytes + page - 1) // page * page


cdef uint64_t pages_map(uint64_t nbytes, int node) noexcept nogil:
    cdef Fill fill
    cdef uint64_t available = gm_available()
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


cdef void pages_unmap(uint64_t address, uint64_t nbytes) noexcept nogil:
    munmap(<void*>address, nbytes)


cdef bint pages_exist(uint64_t address, uint64_t nbytes) noexcept nogil:
    # The kernel looks at its list of mappings, not at pages.
    cdef uint64_t page = getpagesize()
    cdef uint64_t first = address // page * page
    return msync(<void*>first, address + nbytes - first, MS_ASYNC) == 0


cdef char* map_aligned(uint64_t nbytes) noexcept nogil:
    # Takes more addresses than needed and gives the ends back.
    cdef uint64_t whole = nbytes + HUGE_PAGE
    cdef void* raw = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    cdef uint64_t start, base
    if raw == MAP_FAILED:
        return NULL
    start = <uint64_t>raw
    base = (start + HUGE_PAGE - 1) & ~<uint64_t>(HUGE_PAGE - 1)
    if base > start:
        munmap(raw, base - start)
    munmap(<void*>(base + nbytes), start + whole - base - nbytes)
    return <char*>base


cdef void run_threads(Fill* fill) noexcept nogil:
    # A thread that cannot be had is done without.
    cdef pthread_t[MAX_THREADS] threads
    cdef uint64_t wanted = fill.nbytes // BYTES_PER_THREAD + 1
    cdef int count = 0
    cdef int i
    wanted = min(wanted, <uint64_t>MAX_THREADS, <uint64_t>gm_cpu_count())
    while count < <int>wanted - 1:
        if gm_thread_start(&threads[count], make_pages, fill) != 0:
            break
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
