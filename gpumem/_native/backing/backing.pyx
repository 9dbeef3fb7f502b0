"""Backings: device, managed and pinned memory, physical handles and files in memory."""

from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset
from posix.unistd cimport close

from gpumem._native.driver cimport (
    Access, access_apply, access_init, context_enter, context_leave,
    CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID,
    CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, CU_MEM_ALLOCATION_TYPE_PINNED,
    CU_MEM_ATTACH_GLOBAL, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_LOCATION_TYPE_DEVICE,
    CU_MEM_LOCATION_TYPE_HOST, CU_MEM_LOCATION_TYPE_HOST_NUMA, CU_MEMHOSTALLOC_DEVICEMAP,
    CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE,
    CU_STREAM_NON_BLOCKING, CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS,
    CUdevice_attribute, CUdeviceptr, CUmem_advise, CUmemAccessDesc, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUmemLocation, CUresult, CUstream, DeviceContext, note_call,
)
from gpumem._support.atomics cimport pointer_try, published_pointer, store64
from gpumem._support.memory cimport MAP_FAILED, MAP_SHARED, mmap, munmap, PROT_READ, PROT_WRITE


# ---- one driver allocation per region: device and managed memory ---------------------------------

cdef enum:
    QUANTUM = 256


cdef void backing_init(Backing* backing, DeviceContext* context) noexcept nogil:
    memset(backing, 0, sizeof(Backing))
    backing.context = context
    backing.granule = QUANTUM
    backing.node = -1
    backing.reserve = device_reserve
    backing.release = device_release if context.frees_in_order else memory_release
    backing.waits = not context.frees_in_order
    backing.call = "cuMemAlloc"


cdef bint backing_frees_in_order(const Backing* backing) noexcept nogil:
    return backing.release == device_release


cdef CUresult device_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef CUdeviceptr pointer = 0
    cdef CUresult code = self.context.table.cuMemAlloc(&pointer, size)
    address[0] = pointer
    return backing_note(self, "cuMemAlloc", code)


cdef CUresult device_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    cdef CUstream stream = NULL
    cdef CUresult code = free_stream_of(self, &stream)
    if code == CUDA_SUCCESS:
        code = backing_note(self, "cuMemFreeAsync",
                            self.context.table.cuMemFreeAsync(address, stream))
    # After this wait other programs can allocate the memory. Its result does not matter: the free
    # is queued, and the region is the driver's.
    if code == CUDA_SUCCESS:
        self.context.table.cuStreamSynchronize(stream)
    return code


cdef CUresult free_stream_of(Backing* self, CUstream* stream) noexcept nogil:
    # There is one for each device, made when first needed. Like the context it is never destroyed.
    cdef DeviceContext* context = self.context
    cdef CUstream made = NULL
    cdef CUresult code
    stream[0] = <CUstream>published_pointer(&context.free_stream)
    if stream[0] != NULL:
        return CUDA_SUCCESS
    code = backing_note(self, "cuStreamCreate",
                        context.table.cuStreamCreate(&made, CU_STREAM_NON_BLOCKING))
    if code != CUDA_SUCCESS:
        return code
    if not pointer_try(<void**>&context.free_stream, NULL, made):
        context.table.cuStreamDestroy(made)         # another thread was faster
    stream[0] = <CUstream>published_pointer(&context.free_stream)
    return CUDA_SUCCESS


cdef CUresult memory_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    return backing_note(self, "cuMemFree", self.context.table.cuMemFree(address))


cdef CUresult host_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    # Portable: pinned in every device's context. Mapped: the device may use it as well.
    cdef void* pointer = NULL
    cdef CUresult code = self.context.table.cuMemHostAlloc(
        &pointer, size, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP)
    address[0] = <uint64_t>pointer
    return backing_note(self, "cuMemHostAlloc", code)


cdef CUresult host_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    return backing_note(self, "cuMemFreeHost", self.context.table.cuMemFreeHost(<void*>address))


cdef void listed_init(Backing* backing, DeviceContext* context) noexcept nogil:
    # Other processes may have a region open by a legacy handle, which only cuMemFree accepts.
    backing_init(backing, context)
    backing.reserve = listed_reserve
    backing.release = listed_release
    backing.waits = True


cdef CUresult listed_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef CUresult code = device_reserve(self, size, address)
    if code == CUDA_SUCCESS and mapped_add(self, address[0], size, 0) == NULL:
        memory_release(self, address[0], size)
        return CUDA_ERROR_OUT_OF_MEMORY
    return code


cdef CUresult listed_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    cdef CUresult code = memory_release(self, address, size)
    if code == CUDA_SUCCESS:
        free(mapped_remove(self, address))
    return code


# ---- functions of all backings -------------------------------------------------------------------

cdef CUresult backing_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    # A source is Python code, which chooses its device itself.
    cdef CUresult code
    if self.source != NULL:
        return self.reserve(self, size, address)
    code = context_enter(self.context)
    if code == CUDA_SUCCESS:
        code = self.reserve(self, size, address)
        context_leave(self.context)
    return code


cdef CUresult backing_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    cdef CUresult code
    if self.source != NULL:
        return self.release(self, address, size)
    # Refused in a fork's child: the memory is the parent's.
    code = context_enter(self.context)
    if code == CUDA_SUCCESS:
        code = self.release(self, address, size)
        context_leave(self.context)
    return code


cdef CUresult backing_set_access(Backing* self, const CUmemAccessDesc* place) noexcept nogil:
    cdef const Mapped* mapped = self.mapped
    cdef CUresult code = CUDA_SUCCESS
    if not self.has_handles:
        return CUDA_SUCCESS
    while mapped != NULL and code == CUDA_SUCCESS:
        # A mapping without a handle is being released: nothing uses it.
        if mapped.memory:
            code = backing_note(self, "cuMemSetAccess", self.context.table.cuMemSetAccess(
                mapped.address, mapped.nbytes, place, 1))
        mapped = mapped.next
    return code


cdef inline CUresult backing_note(Backing* self, const char* call, CUresult code) noexcept nogil:
    return note_call(&self.calls, &self.call, call, code)


cdef Mapped* mapped_add(Backing* self, uint64_t address, uint64_t nbytes,
                        uint64_t memory) noexcept nogil:
    cdef Mapped* mapped = <Mapped*>malloc(sizeof(Mapped))
    if mapped == NULL:
        return NULL
    mapped.next = self.mapped
    mapped.address = address
    mapped.nbytes = nbytes
    mapped.memory = memory
    mapped.asleep = False
    self.mapped = mapped
    store64(&self.mapped_bytes, self.mapped_bytes + nbytes)
    return mapped


cdef Mapped* mapped_around(const Backing* self, uint64_t address) noexcept nogil:
    cdef Mapped* mapped = self.mapped
    while mapped != NULL and not (mapped.address <= address < mapped.address + mapped.nbytes):
        mapped = mapped.next
    return mapped


cdef Mapped* mapped_remove(Backing* self, uint64_t address) noexcept nogil:
    # Removes a mapping from the list, for the caller to free; NULL: there is none.
    cdef Mapped** link = &self.mapped
    cdef Mapped* found
    while link[0] != NULL and link[0].address != address:
        link = &link[0].next
    found = link[0]
    if found != NULL:
        link[0] = found.next
        store64(&self.mapped_bytes, self.mapped_bytes - found.nbytes)
    return found


# ---- Managed memory ------------------------------------------------------------------------------
#
# The driver's functions for hints took a device until CUDA 12.1 and take a location since 12.2.
# driver/table fills one entry or the other by the driver's version: the filled one is called.


cdef void managed_init(Backing* backing, DeviceContext* context) noexcept nogil:
    backing_init(backing, context)
    backing.reserve = managed_reserve
    backing.release = memory_release        # the driver has no other free for it
    backing.waits = True
    backing.call = "cuMemAllocManaged"


cdef CUresult managed_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef CUdeviceptr pointer = 0
    cdef CUresult code = self.context.table.cuMemAllocManaged(&pointer, size, CU_MEM_ATTACH_GLOBAL)
    address[0] = pointer
    return backing_note(self, "cuMemAllocManaged", code)


cdef CUmemLocation location_of(int where) noexcept nogil:
    cdef CUmemLocation location
    location.type = CU_MEM_LOCATION_TYPE_HOST if where == HOST_SIDE else CU_MEM_LOCATION_TYPE_DEVICE
    location.id = 0 if where == HOST_SIDE else where
    return location


cdef CUresult managed_advise(DeviceContext* context, uint64_t address, uint64_t nbytes,
                             CUmem_advise advice, int where) noexcept nogil:
    # Before CUDA 12.2 the CPU is device -1, the value of HOST_SIDE.
    cdef CUresult code = context_enter(context)
    if code != CUDA_SUCCESS:
        return code
    code = CUDA_ERROR_NOT_SUPPORTED
    if context.table.cuMemAdvise != NULL:
        code = context.table.cuMemAdvise(address, nbytes, advice, location_of(where))
    elif context.table.cuMemAdvise_v1 != NULL:
        code = context.table.cuMemAdvise_v1(address, nbytes, advice, where)
    context_leave(context)
    return code


cdef CUresult managed_prefetch(DeviceContext* context, uint64_t address, uint64_t nbytes, int where,
                               CUstream stream) noexcept nogil:
    cdef CUresult code = context_enter(context)
    if code != CUDA_SUCCESS:
        return code
    code = CUDA_ERROR_NOT_SUPPORTED
    if context.table.cuMemPrefetchAsync != NULL:
        code = context.table.cuMemPrefetchAsync(address, nbytes, location_of(where), 0, stream)
    elif context.table.cuMemPrefetchAsync_v1 != NULL:
        code = context.table.cuMemPrefetchAsync_v1(address, nbytes, where, stream)
    context_leave(context)
    return code


# ---- pinned host memory --------------------------------------------------------------------------
#
# cuMemHostAlloc makes its pages one by one on one core. Pages that several cores make, in huge
# pages (host_pages.h), and that are registered afterwards are several times faster
# (bench/pinned.py), from about one huge page on. cuMemHostAlloc serves smaller regions, devices
# that cannot use the host's addresses for registered memory, and drivers that do not register it.

cdef extern from "host_pages.h" nogil:
    bint host_has_room(size_t nbytes)
    bint host_pages_begin(HostPages* pages, size_t nbytes, int node)
    char* host_pages_take(HostPages* pages, size_t nbytes)
    size_t whole_pages(size_t nbytes)

cdef enum:
    FLOOR = 2097152         # 2 MiB, a huge page: a smaller region is cuMemHostAlloc's


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
    cdef HostPages pages
    cdef CUresult code
    if size < FLOOR:
        if size > FLOOR // 2 and not host_has_room(size):
            return CUDA_ERROR_OUT_OF_MEMORY
        return host_reserve(self, size, address)
    if not host_pages_begin(&pages, size, self.node):
        return CUDA_ERROR_OUT_OF_MEMORY
    code = pinned_take(self, &pages, size, address)
    host_pages_end(&pages)
    if code == CUDA_SUCCESS or code == CUDA_ERROR_OUT_OF_MEMORY:
        return code
    return host_reserve(self, size, address)        # the driver does not register the pages


cdef void pinned_begin(Backing* self, HostPages* pages, uint64_t nbytes) noexcept nogil:
    if self.reserve == pinned_reserve and nbytes >= FLOOR:
        host_pages_begin(pages, nbytes, self.node)


cdef CUresult pinned_take(Backing* self, HostPages* pages, uint64_t size,
                          uint64_t* address) noexcept nogil:
    cdef uint64_t taken = <uint64_t>host_pages_take(pages, size)
    cdef uint64_t nbytes = whole_pages(size)
    cdef CUresult code
    if taken == 0:
        return CUDA_ERROR_OUT_OF_MEMORY
    code = pages_pin(self, taken, nbytes, 0)
    if code != CUDA_SUCCESS:
        munmap(<void*>taken, nbytes)
    address[0] = taken
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
    if mapped_around(self, address) == NULL:
        return host_release(self, address, size)
    code = backing_note(self, "cuMemHostUnregister",
                        self.context.table.cuMemHostUnregister(<void*>address))
    if code == CUDA_SUCCESS:
        mapped = mapped_remove(self, address)
        munmap(<void*>address, mapped.nbytes)
        free(mapped)
    return code


# ---- one physical handle, or one file in memory, per region --------------------------------------

cdef enum:
    GRANULE = 2097152           # 2 MiB, the driver's for every location


cdef void numa_init(Backing* backing, DeviceContext* context, int node) noexcept nogil:
    backing_init(backing, context)
    backing.reserve = physical_reserve
    backing.release = physical_release
    backing.waits = False
    backing.call = "cuMemCreate"
    backing.granule = GRANULE
    backing.node = node
    backing.has_handles = True


cdef void shared_init(Backing* backing, DeviceContext* context, int node) noexcept nogil:
    numa_init(backing, context, node)
    backing.reserve = shared_reserve
    backing.exportable = True


cdef CUresult numa_try(DeviceContext* context, int node, const char** call) noexcept nogil:
    cdef Backing backing
    cdef Access access
    cdef uint64_t address = 0
    cdef CUresult code
    numa_init(&backing, context, node)
    access_init(&access, context, node)
    backing.access = &access
    code = backing_reserve(&backing, GRANULE, &address)
    if code == CUDA_SUCCESS:
        code = backing_release(&backing, address, GRANULE)
        if code != CUDA_SUCCESS:
            backing_release(&backing, address, GRANULE)     # once more
    call[0] = backing.call
    return code


cdef CUresult memory_create(const DeviceContext* context, int node, bint exportable,
                            uint64_t nbytes, uint64_t* memory) noexcept nogil:
    cdef CUmemAllocationProp prop
    cdef CUmemGenericAllocationHandle handle = 0
    cdef CUresult code
    memset(&prop, 0, sizeof(prop))
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA
    prop.location.id = node
    if node == THE_DEVICE:
        prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = context.device
    if exportable:
        prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    code = context.table.cuMemCreate(&handle, nbytes, &prop, 0)
    memory[0] = handle
    return code


# ---- a region: addresses, memory, mapping, access ------------------------------------------------

cdef CUresult physical_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef uint64_t nbytes = (size + GRANULE - 1) & ~<uint64_t>(GRANULE - 1)
    cdef CUdeviceptr base = 0
    cdef CUresult code = backing_note(
        self, "cuMemAddressReserve", self.context.table.cuMemAddressReserve(
            &base, nbytes, 0, 0, 0))
    if code == CUDA_SUCCESS:
        code = fill(self, base, nbytes)
        if code != CUDA_SUCCESS:
            self.context.table.cuMemAddressFree(base, nbytes)
    address[0] = base
    return code


cdef CUresult fill(Backing* self, uint64_t base, uint64_t nbytes) noexcept nogil:
    # Puts memory under reserved addresses. A refusal undoes the steps, the last one first.
    cdef uint64_t memory = 0
    cdef CUresult code = backing_note(self, "cuMemCreate", memory_create(
        self.context, self.node, self.exportable, nbytes, &memory))
    if code != CUDA_SUCCESS:
        return code
    code = backing_note(self, "cuMemMap", self.context.table.cuMemMap(base, nbytes, 0, memory, 0))
    if code == CUDA_SUCCESS:
        code = backing_note(self, "cuMemSetAccess",
                            access_apply(self.context, self.access, base, nbytes))
        if code == CUDA_SUCCESS and mapped_add(self, base, nbytes, memory) == NULL:
            code = CUDA_ERROR_OUT_OF_MEMORY
        if code != CUDA_SUCCESS:
            self.context.table.cuMemUnmap(base, nbytes)
    if code != CUDA_SUCCESS:
        self.context.table.cuMemRelease(memory)
    return code


cdef CUresult physical_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    # After a refusal the region is whole and its record stays, to be tried again: a mapping keeps
    # its memory after the handle is released. Once unmapped the addresses are not used again.
    cdef Mapped* mapped = mapped_around(self, address)
    cdef CUresult code
    if mapped == NULL:
        return CUDA_SUCCESS
    if mapped.memory != 0:
        code = backing_note(self, "cuMemRelease", self.context.table.cuMemRelease(mapped.memory))
        if code != CUDA_SUCCESS:
            return code
        mapped.memory = 0
    if not mapped.asleep:
        code = backing_note(self, "cuMemUnmap",
                            self.context.table.cuMemUnmap(address, mapped.nbytes))
        if code != CUDA_SUCCESS:
            return code
    mapped_remove(self, address)
    self.context.table.cuMemAddressFree(address, mapped.nbytes)
    free(mapped)
    return CUDA_SUCCESS


# ---- memory to be shared -------------------------------------------------------------------------

cdef CUresult shared_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef CUresult code = physical_reserve(self, size, address)
    if code != CUDA_SUCCESS:
        return code
    code = clear(self, address[0], size)
    if code != CUDA_SUCCESS:
        physical_release(self, address[0], size)
    return code


cdef CUresult clear(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    # The stream is its own, so that it waits for no other work.
    cdef CUstream stream = NULL
    cdef CUresult code = backing_note(self, "cuStreamCreate", self.context.table.cuStreamCreate(
        &stream, CU_STREAM_NON_BLOCKING))
    if code != CUDA_SUCCESS:
        return code
    code = backing_note(self, "cuMemsetD8Async", self.context.table.cuMemsetD8Async(
        address, 0, size, stream))
    if code == CUDA_SUCCESS:
        code = backing_note(self, "cuStreamSynchronize",
                            self.context.table.cuStreamSynchronize(stream))
        if code != CUDA_SUCCESS:
            self.context.table.cuCtxSynchronize()   # the caller unmaps what is being cleared
    self.context.table.cuStreamDestroy(stream)
    return code


cdef CUresult memory_export(DeviceContext* context, uint64_t memory, int* fd) noexcept nogil:
    cdef CUresult code = context_enter(context)
    if code == CUDA_SUCCESS:
        code = context.table.cuMemExportToShareableHandle(
            fd, memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
        context_leave(context)
    return code


# ---- Files in memory, mapped and pinned ----------------------------------------------------------
#
# The kernel clears the pages. The size of a file is sealed, so that no process that gets its
# descriptor can remove a page from the others.


cdef extern from "files.h" nogil:
    int file_in_memory(const char* name, uint64_t nbytes)

cdef void file_init(Backing* backing, DeviceContext* context) noexcept nogil:
    backing_init(backing, context)
    backing.reserve = file_reserve
    backing.release = file_release
    backing.call = "cuMemHostRegister"
    backing.granule = HOST_PAGE
    backing.has_files = True
    backing.waits = True


cdef CUresult file_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef int fd = file_in_memory("gpumem", size)
    cdef void* pages = MAP_FAILED
    cdef CUresult code = CUDA_ERROR_OUT_OF_MEMORY
    if fd >= 0:
        pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
    if pages == MAP_FAILED:
        self.call = "memfd_create"
    else:
        code = pages_pin(self, <uintptr_t>pages, size, fd)
        if code != CUDA_SUCCESS:
            munmap(pages, size)
    if code != CUDA_SUCCESS:
        close(fd)
    address[0] = <uintptr_t>pages
    return code


cdef CUresult file_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    # Pages that are still registered are not unmapped.
    cdef Mapped* mapped
    cdef CUresult code = backing_note(
        self, "cuMemHostUnregister",
        self.context.table.cuMemHostUnregister(<void*><uintptr_t>address))
    if code != CUDA_SUCCESS:
        return code
    # The descriptor is closed with the mapping; other processes keep theirs.
    mapped = mapped_remove(self, address)
    if mapped != NULL:
        munmap(<void*>address, mapped.nbytes)
        close(<int>mapped.memory)
        free(mapped)
    return code
