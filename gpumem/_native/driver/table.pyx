"""The driver table's devices: open, ask, fail in one way."""

from libc.string cimport strcmp

from gpumem._support.clock cimport clock_ns

from gpumem.errors import DriverError


cdef CUresult place_enter(Place* place) noexcept nogil:
    if place.generation != process.generation:
        return CUDA_ERROR_DEINITIALIZED
    return place.table.cuCtxPushCurrent(place.context)


cdef void place_leave(Place* place) noexcept nogil:
    cdef CUcontext popped
    place.table.cuCtxPopCurrent(&popped)


cdef CUstreamCaptureMode place_relax(const Place* place) noexcept nogil:
    cdef CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED
    if place.generation == process.generation:
        place.table.cuThreadExchangeStreamCaptureMode(&mode)
    return mode


cdef void place_restore(const Place* place, CUstreamCaptureMode before) noexcept nogil:
    if place.generation == process.generation:
        place.table.cuThreadExchangeStreamCaptureMode(&before)


cdef CUresult pointer_attribute(Place* place, CUpointer_attribute which, uint64_t address,
                                uint64_t* value) noexcept nogil:
    cdef CUresult code = place_enter(place)
    value[0] = 0
    if code == CUDA_SUCCESS:
        code = place.table.cuPointerGetAttribute(value, which, address)
        place_leave(place)
    return code


cdef bint stream_captures(Place* place, CUstream stream, uint64_t* capture, CUgraph* graph,
                          bint* unknown) noexcept nogil:
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUresult code = place_enter(place)
    if code == CUDA_SUCCESS:
        code = place.table.cuStreamGetCaptureInfo(stream, &status, capture, graph, NULL, NULL)
        place_leave(place)
    unknown[0] = code != CUDA_SUCCESS
    return code == CUDA_SUCCESS and status != CU_STREAM_CAPTURE_STATUS_NONE


# ---- failure -----------------------------------------------------------------------------------

cdef int check(const DriverTable* table, CUresult code, str call) except -1:
    """Raise DriverError unless `code` is success."""
    cdef const char* name = NULL
    cdef const char* text = NULL
    if code == CUDA_SUCCESS:
        return 0
    if table.cuGetErrorName == NULL or table.cuGetErrorName(code, &name) != CUDA_SUCCESS:
        name = b"an unknown code"
    if table.cuGetErrorString == NULL or table.cuGetErrorString(code, &text) != CUDA_SUCCESS:
        text = b""
    raise DriverError(call, <int>code, name.decode(), text.decode())


cdef int require(const void* entry, str call, str what) except -1:
    """Raise DriverError if the driver has no such function."""
    if entry == NULL:
        raise DriverError(call, <int>CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED",
                          f"{what} needs {call}, which this driver does not have")
    return 0


# ---- devices -----------------------------------------------------------------------------------

cdef DriverDevice open_place(const DriverTable* table, str type, int ordinal):
    """Open one device of a filled and initialised table; retains its primary context."""
    cdef DriverDevice opened = DriverDevice.__new__(DriverDevice)
    cdef CUdevice device
    cdef CUcontext context
    opened.type = type
    opened.ordinal = ordinal
    opened.place.table = table
    opened.place.ordinal = ordinal
    opened.place.generation = process.generation
    opened.place.now = clock_ns
    opened.place.is_host = type == "host"
    check(table, table.cuDeviceGet(&device, ordinal), "cuDeviceGet")
    opened.place.device = device
    with nogil:
        code = table.cuDevicePrimaryCtxRetain(&context, device)
    check(table, code, "cuDevicePrimaryCtxRetain")
    opened.place.context = context
    return opened


cdef dict attribute_numbers = {     # of those that Python code names
    "CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY":
        CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY,
    "CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY": CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY,
    "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM":
        CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
    "CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED":
        CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED,
    "CU_DEVICE_ATTRIBUTE_INTEGRATED": CU_DEVICE_ATTRIBUTE_INTEGRATED,
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED":
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED":
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    "CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED":
        CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED,
    "CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED":
        CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
    "CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES":
        CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES,
    "CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS":
        CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
    "CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED": CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
}


cdef class DriverDevice:
    """One opened device: the questions that a Device answers from it."""

    @property
    def dead(self):
        """Whether it belongs to the parent of a fork, or the interpreter is ending."""
        return bool(place_is_dead(&self.place))

    def name(self):
        """Return the driver's name for it."""
        cdef char text[256]
        check(self.place.table,
              self.place.table.cuDeviceGetName(text, sizeof(text), self.place.device),
              "cuDeviceGetName")
        return (<bytes>text).decode()

    def uuid(self):
        """Return the 16 bytes that name the physical device."""
        cdef CUuuid uuid
        check(self.place.table, self.place.table.cuDeviceGetUuid(&uuid, self.place.device),
              "cuDeviceGetUuid")
        return (<char*>uuid.bytes)[:16]

    def memory_info(self):
        """Return (free, total) in bytes, as the driver sees them now."""
        cdef size_t free_bytes = 0
        cdef size_t total_bytes = 0
        cdef CUresult code
        with nogil:
            code = place_enter(&self.place)
            if code == CUDA_SUCCESS:
                code = self.place.table.cuMemGetInfo(&free_bytes, &total_bytes)
                place_leave(&self.place)
        check(self.place.table, code, "cuMemGetInfo")
        return free_bytes, total_bytes

    def attribute(self, int number):
        """Return a device attribute; 0 where the driver does not know it."""
        cdef int value = 0
        code = self.place.table.cuDeviceGetAttribute(&value, <CUdevice_attribute>number,
                                                     self.place.device)
        return value if code == CUDA_SUCCESS else 0

    def named_attribute(self, str name):
        """Return the attribute of that name, such as "CU_DEVICE_ATTRIBUTE_INTEGRATED"."""
        return self.attribute(attribute_numbers[name])

    def has(self, str name):
        """Whether the table has an entry of that name, such as "cuMemCreate"."""
        cdef int i
        cdef bytes wanted = name.encode()
        for i in range(DRIVER_ENTRY_COUNT):
            if strcmp(driver_entries[i].name, wanted) == 0:
                return (<void**>(<char*>self.place.table + driver_entries[i].offset))[0] != NULL
        return False

    def version(self):
        """Return the CUDA version that the driver speaks, such as 13000."""
        cdef int version = 0
        check(self.place.table, self.place.table.cuDriverGetVersion(&version),
              "cuDriverGetVersion")
        return version

    def synchronize(self):
        """Wait until everything queued on the device has finished."""
        cdef CUresult code
        with nogil:
            code = place_enter(&self.place)
            if code == CUDA_SUCCESS:
                code = self.place.table.cuCtxSynchronize()
                place_leave(&self.place)
        check(self.place.table, code, "cuCtxSynchronize")


def driver_entry_names():
    """Return (name, version) of every function in the driver table."""
    return [(driver_entries[i].name.decode(), driver_entries[i].version)
            for i in range(DRIVER_ENTRY_COUNT)]
