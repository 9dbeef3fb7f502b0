# distutils: language = c++
"""The calls of virtual memory that a device's driver gets, and the same ones made again, bare.

While a `Record` is entered, the device's arenas call functions that note each call and pass it on.
`repeat` makes them again in their order: as many handles of the same sizes, mapped at the same
offsets into reservations of their own.
"""

from libc.stdint cimport uint32_t, uint64_t
from libcpp.unordered_map cimport unordered_map
from libcpp.vector cimport vector

from gpumem._native.driver cimport (
    check, context_enter, context_leave, CUDA_SUCCESS, CUdeviceptr, CUmemAccessDesc,
    CUmemAllocationProp, CUmemGenericAllocationHandle, CUresult, DriverDevice,
)
from gpumem._native.driver.table cimport DriverTable
from gpumem._support.clock cimport clock_ns

cdef enum Kind:
    RESERVE
    RESERVE_FREE
    CREATE
    RELEASE
    MAP
    UNMAP
    SET_ACCESS

cdef struct Call:
    Kind kind
    uint32_t reservation    # in the order in which they were made
    uint32_t handle         # likewise
    uint64_t offset         # bytes into the reservation
    uint64_t size           # bytes

cdef struct Reserved:
    uint64_t address
    uint64_t size
    uint64_t alignment

# One record at a time, since driver functions have no argument for it.
cdef const DriverTable* driver = NULL
cdef vector[Call] calls
cdef vector[Reserved] reservations
cdef unordered_map[uint64_t, uint32_t] handles
cdef uint32_t handle_count
cdef CUmemAllocationProp properties
cdef CUmemAccessDesc access


cdef class Record:
    """Notes the calls of one opened device, from threads that take turns."""

    cdef DriverDevice device
    cdef const DriverTable* before
    cdef DriverTable noting

    def __init__(self, DriverDevice device not None):
        self.device = device

    def __enter__(self):
        global driver, handle_count
        assert driver == NULL, "there is a record already"
        calls.clear()
        reservations.clear()
        handles.clear()
        handle_count = 0
        self.before = driver = self.device.context.table
        self.noting = driver[0]
        self.noting.cuMemAddressReserve = reserve
        self.noting.cuMemAddressFree = reserve_free
        self.noting.cuMemCreate = create
        self.noting.cuMemRelease = release
        self.noting.cuMemMap = map_handle
        self.noting.cuMemUnmap = unmap
        self.noting.cuMemSetAccess = set_access
        self.device.context.table = &self.noting
        return self

    def __exit__(self, *error):
        global driver
        self.device.context.table = self.before
        driver = NULL

    def __len__(self):
        return calls.size()

    def repeat(self, size_t first, size_t last):
        """Make the calls again, once the record has been left.

        Parameters
        ----------
        first, last : int
            The time of calls from `first` on and before `last` is taken; of the others it is not.

        Returns
        -------
        float
            Nanoseconds.
        """
        cdef vector[uint64_t] bases
        cdef vector[CUmemGenericAllocationHandle] made
        cdef uint64_t begin, spent
        bases.resize(reservations.size())
        made.resize(handle_count)
        check(self.before, context_enter(&self.device.context), "cuCtxPushCurrent")
        try:
            repeat_part(self.before, 0, first, &bases, &made)
            begin = clock_ns()
            repeat_part(self.before, first, last, &bases, &made)
            spent = clock_ns() - begin
            repeat_part(self.before, last, calls.size(), &bases, &made)
        finally:
            context_leave(&self.device.context)
        return <double>spent


cdef int repeat_part(const DriverTable* table, size_t first, size_t last, vector[uint64_t]* bases,
                     vector[CUmemGenericAllocationHandle]* made) except -1:
    cdef size_t i
    cdef CUresult result
    for i in range(first, last):
        result = repeat_call(table, &calls[i], bases, made)
        if result != CUDA_SUCCESS:
            check(table, result, "a call made again")
    return 0


cdef inline CUresult repeat_call(const DriverTable* table, const Call* call,
                                 vector[uint64_t]* bases,
                                 vector[CUmemGenericAllocationHandle]* made) noexcept nogil:
    cdef CUdeviceptr address
    cdef CUresult result
    if call.kind == CREATE:
        return table.cuMemCreate(&made[0][call.handle], call.size, &properties, 0)
    if call.kind == RELEASE:
        return table.cuMemRelease(made[0][call.handle])
    if call.kind == RESERVE:
        result = table.cuMemAddressReserve(&address, call.size,
                                           reservations[call.reservation].alignment, 0, 0)
        bases[0][call.reservation] = address
        return result
    address = bases[0][call.reservation] + call.offset
    if call.kind == MAP:
        return table.cuMemMap(address, call.size, 0, made[0][call.handle], 0)
    if call.kind == UNMAP:
        return table.cuMemUnmap(address, call.size)
    if call.kind == SET_ACCESS:
        return table.cuMemSetAccess(address, call.size, &access, 1)
    return table.cuMemAddressFree(address, call.size)


# ---- the entries of the table while a record is entered ------------------------------------------

cdef void note(Kind kind, uint32_t handle, uint64_t address, uint64_t size) noexcept nogil:
    # `address`: in one of the reservations; 0: the call has none.
    cdef uint32_t reservation = 0
    cdef uint64_t offset = 0
    if address:
        reservation = <uint32_t>reservations.size() - 1
        # Modulo 2**64: an address below a reservation is above its size.
        while address - reservations[reservation].address >= reservations[reservation].size:
            reservation -= 1
        offset = address - reservations[reservation].address
    calls.push_back(Call(kind, reservation, handle, offset, size))


cdef CUresult reserve(CUdeviceptr* address, size_t size, size_t alignment, CUdeviceptr near,
                      unsigned long long flags) noexcept nogil:
    cdef CUresult result = driver.cuMemAddressReserve(address, size, alignment, near, flags)
    cdef Reserved reserved
    if result == CUDA_SUCCESS:
        reserved.address = address[0]
        reserved.size = size
        reserved.alignment = alignment
        reservations.push_back(reserved)
        note(RESERVE, 0, address[0], size)
    return result


cdef CUresult reserve_free(CUdeviceptr address, size_t size) noexcept nogil:
    note(RESERVE_FREE, 0, address, size)
    return driver.cuMemAddressFree(address, size)


cdef CUresult create(CUmemGenericAllocationHandle* handle, size_t size,
                     const CUmemAllocationProp* wanted, unsigned long long flags) noexcept nogil:
    global handle_count, properties
    cdef CUresult result = driver.cuMemCreate(handle, size, wanted, flags)
    if result == CUDA_SUCCESS:
        properties = wanted[0]
        handles[<uint64_t>handle[0]] = handle_count
        note(CREATE, handle_count, 0, size)
        handle_count += 1
    return result


cdef CUresult release(CUmemGenericAllocationHandle handle) noexcept nogil:
    note(RELEASE, handles[<uint64_t>handle], 0, 0)
    return driver.cuMemRelease(handle)


cdef CUresult map_handle(CUdeviceptr address, size_t size, size_t offset,
                         CUmemGenericAllocationHandle handle,
                         unsigned long long flags) noexcept nogil:
    note(MAP, handles[<uint64_t>handle], address, size)
    return driver.cuMemMap(address, size, offset, handle, flags)


cdef CUresult unmap(CUdeviceptr address, size_t size) noexcept nogil:
    note(UNMAP, 0, address, size)
    return driver.cuMemUnmap(address, size)


cdef CUresult set_access(CUdeviceptr address, size_t size, const CUmemAccessDesc* wanted,
                         size_t count) noexcept nogil:
    global access
    access = wanted[0]
    note(SET_ACCESS, 0, address, size)
    return driver.cuMemSetAccess(address, size, wanted, count)
