"""Backings of an arena: one struct of functions, with their data.

A backing reserves and releases whole regions, by `backing_reserve` and `backing_release`. Caller
holds `grow_lock`, and neither the arena lock nor the interpreter lock; the functions may call the
driver and may block. Addresses are multiples of 256. A refusal changes nothing. A region is
released when no work that the arena knows of uses it any more: its memory may then have another
owner. Where the driver has no other free, `waits`, the release waits for all work of the device.

There are backings of plain driver blocks and managed memory, of pinned host pages, of physical
handles of a NUMA node or to be shared, and of files in memory to be shared. A user's callback may
provide regions, too (_arena/open).
"""

from libc.stdint cimport uint64_t

from gpumem._native.driver cimport (
    Access, CUmem_advise, CUmemAccessDesc, CUresult, CUstream, DeviceContext,
)

# A region with a release that needs more than its address.
cdef struct Mapped:
    Mapped* next
    uint64_t address
    uint64_t nbytes         # of the mapping; at least the region's
    uint64_t memory         # the physical handle, 0 once released; or the file's descriptor
    bint asleep             # the addresses are reserved, and nothing is mapped there

cdef struct Backing:
    # The device's context is current, except for a source.
    CUresult (*reserve)(Backing* self, uint64_t size, uint64_t* address) noexcept nogil
    CUresult (*release)(Backing* self, uint64_t address, uint64_t size) noexcept nogil
    # Called with the arena's last reference: frees the backing's own objects. May be NULL.
    void (*forget)(Backing* self) noexcept nogil
    const char* call        # the driver call that reserves, or the latest that failed
    DeviceContext* context
    const Access* access    # the arena's: the places that may access mapped memory
    uint64_t calls          # driver calls made by this backing
    uint64_t granule        # bytes, a power of two; regions are multiples of it
    int node                # host memory: the NUMA node; -1: the device's nearest
    bint waits              # a release waits for all work on the device
    bint exportable         # physical handles and files are made to be given to other processes
    bint has_files          # `Mapped.memory` is a descriptor
    bint has_handles        # `Mapped.memory` is a physical handle, mapped by the driver
    Mapped* mapped
    uint64_t mapped_bytes   # the sum of these mappings
    void* source            # the argument of a source's functions

cdef CUresult backing_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil
cdef CUresult backing_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil
# Sets one device's access to every region that is a physical handle; stops where the driver
# refuses. The arena's context is current.
cdef CUresult backing_set_access(Backing* self, const CUmemAccessDesc* place) noexcept nogil

# Plain blocks by cuMemAlloc: a GPU's own memory, or ordinary memory on the host device. All other
# backings begin with it. Blocks are freed in stream order, on a stream that has no other work:
# cuMemFree would wait for every stream, and other threads' calls would wait for it.
cdef void backing_init(Backing* backing, DeviceContext* context) noexcept nogil
cdef bint backing_frees_in_order(const Backing* backing) noexcept nogil
# The same, with a list of its regions, which are freed by cuMemFree: for an arena that has other
# regions, too.
cdef void listed_init(Backing* backing, DeviceContext* context) noexcept nogil
cdef Mapped* mapped_add(Backing* self, uint64_t address, uint64_t nbytes,
                        uint64_t memory) noexcept nogil
# The mapping that an address lies in; NULL: none.
cdef Mapped* mapped_around(const Backing* self, uint64_t address) noexcept nogil


# ---- Managed memory: regions that migrate, and calls that steer them -----------------------------


cdef enum:
    HOST_PAGE = 4096            # bytes
    HOST_SIDE = -1              # in place of a device's ordinal: the CPU

cdef void managed_init(Backing* backing, DeviceContext* context) noexcept nogil
# Hints, by the signature that the driver has. `where`: a device's ordinal, or HOST_SIDE.
cdef CUresult managed_advise(DeviceContext* context, uint64_t address, uint64_t nbytes,
                             CUmem_advise advice, int where) noexcept nogil
cdef CUresult managed_prefetch(DeviceContext* context, uint64_t address, uint64_t nbytes, int where,
                               CUstream stream) noexcept nogil

# ---- Pinned host memory: pages made by several threads, then registered with the driver ----------

cdef extern from "mappings.h" nogil:
    # Is every page of a range mapped in this process?
    bint pages_exist(uint64_t address, size_t nbytes)

cdef extern from "host_pages.h" nogil:
    # Pages that several threads make while the caller uses those that are made.
    ctypedef struct HostPages:
        pass
    # Bytes that the caller has not taken.
    size_t host_pages_left(const HostPages* pages)
    void host_pages_end(HostPages* pages)

cdef void pinned_init(Backing* backing, DeviceContext* context) noexcept nogil
# For the owner of several regions of `nbytes` in all: begins to make their pages, until
# `host_pages_end`; without effect where the driver makes them. Each region is taken when it is
# needed, in place of a reservation, and released as one. The device's context is current.
cdef void pinned_begin(Backing* self, HostPages* pages, uint64_t nbytes) noexcept nogil
cdef CUresult pinned_take(Backing* self, HostPages* pages, uint64_t size,
                          uint64_t* address) noexcept nogil

# ---- Regions of one physical handle each, mapped once, and of one file in memory each ------------

cdef enum:
    THE_DEVICE = -1             # in place of a node

# A physical handle of the device's memory, or of a node's. The device's context is current.
cdef CUresult memory_create(const DeviceContext* context, int node, bint exportable,
                            uint64_t nbytes, uint64_t* memory) noexcept nogil
cdef void numa_init(Backing* backing, DeviceContext* context, int node) noexcept nogil
# Makes the smallest memory of a node and releases it. A refusal names the call that refused.
cdef CUresult numa_try(DeviceContext* context, int node, const char** call) noexcept nogil
# Memory of the device, or of a node, that can be exported. Regions are cleared: another process may
# have used the memory before.
cdef void shared_init(Backing* backing, DeviceContext* context, int node) noexcept nogil
# Makes a new descriptor of the region's memory.
cdef CUresult memory_export(DeviceContext* context, uint64_t memory, int* fd) noexcept nogil


# ---- Regions of host memory that other processes may be given: a file in memory for each ---------


cdef void file_init(Backing* backing, DeviceContext* context) noexcept nogil
