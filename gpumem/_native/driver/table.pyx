"""Devices of the driver table: opening them, queries, one way to raise; and the table of CUDA.

The table of CUDA is filled by the first call that needs a CUDA device.
"""

import atexit
import functools
import os
import threading

cimport cython
from libc.stdint cimport uintptr_t
from libc.string cimport memset

from gpumem._support.atomics cimport published32, store64, sum_add
from gpumem._support.clock cimport clock_ns, sleep_ns
from gpumem._support.instances cimport forbid_instantiation
from gpumem._support.process cimport (
    expect_at_exit, process_interrupted, process_on_main_thread, raise_interrupt,
)

from gpumem._support.out_of_memory import lacking
from gpumem.errors import ClosedError, DriverError


cdef CUresult context_enter(DeviceContext* context) noexcept nogil:
    if context.generation != process.generation:
        return CUDA_ERROR_DEINITIALIZED
    return context.table.cuCtxPushCurrent(context.primary)


cdef void context_leave(DeviceContext* context) noexcept nogil:
    cdef CUcontext popped
    context.table.cuCtxPopCurrent(&popped)


cdef CUstreamCaptureMode context_relax(const DeviceContext* context) noexcept nogil:
    cdef CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED
    if context.generation == process.generation:
        context.table.cuThreadExchangeStreamCaptureMode(&mode)
    return mode


cdef void context_restore(const DeviceContext* context, CUstreamCaptureMode before) noexcept nogil:
    if context.generation == process.generation:
        context.table.cuThreadExchangeStreamCaptureMode(&before)


cdef CUresult pointer_attribute(DeviceContext* context, CUpointer_attribute which, uint64_t address,
                                uint64_t* value) noexcept nogil:
    cdef CUresult code = context_enter(context)
    value[0] = 0
    if code == CUDA_SUCCESS:
        code = context.table.cuPointerGetAttribute(value, which, address)
        context_leave(context)
    return code


cdef uint64_t pointer_value(DriverDevice driver_device, CUpointer_attribute which,
                            uint64_t address) noexcept:
    cdef uint64_t value
    cdef CUresult code = pointer_attribute(&driver_device.context, which, address, &value)
    return value if code == CUDA_SUCCESS else 0


cdef bint stream_captures(DeviceContext* context, CUstream stream, uint64_t* capture,
                          CUgraph* graph, CUresult* refusal) noexcept nogil:
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUresult code = context_enter(context)
    if code == CUDA_SUCCESS:
        code = context.table.cuStreamGetCaptureInfo(stream, &status, capture, graph, NULL, NULL)
        context_leave(context)
    refusal[0] = code
    return code == CUDA_SUCCESS and status != CU_STREAM_CAPTURE_STATUS_NONE


cdef CUresult stream_refusal(DeviceContext* context, CUstream stream) noexcept nogil:
    cdef uint64_t capture
    cdef CUgraph graph
    cdef CUresult refusal
    if stream_captures(context, stream, &capture, &graph, &refusal):
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    return refusal


# ---- access --------------------------------------------------------------------------------------

cdef void access_init(Access* access, const DeviceContext* context, int node) noexcept nogil:
    access.count = 0
    access_next(access, context.device)
    access.count = 1
    if node >= 0:
        access.places[1] = access.places[0]
        access.places[1].location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA
        access.places[1].location.id = node
        access.count = 2


cdef bint access_has(const Access* access, int device) noexcept nogil:
    cdef uint32_t i
    for i in range(published32(&access.count)):
        if (access.places[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE
                and access.places[i].location.id == device):
            return True
    return False


cdef CUmemAccessDesc* access_next(Access* access, int device) noexcept nogil:
    cdef CUmemAccessDesc* place = &access.places[access.count]
    if access.count == MAX_PLACES:
        return NULL
    place.location.type = CU_MEM_LOCATION_TYPE_DEVICE
    place.location.id = device
    place.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return place


cdef CUresult access_apply(const DeviceContext* context, const Access* access, uint64_t address,
                           uint64_t nbytes) noexcept nogil:
    return context.table.cuMemSetAccess(address, nbytes, access.places, access.count)


cdef CUresult context_allow(DeviceContext* context, DeviceContext* peer) noexcept nogil:
    cdef CUstreamCaptureMode mode
    cdef CUresult code = context_enter(peer)
    if code != CUDA_SUCCESS:
        return code
    mode = context_relax(peer)
    code = context.table.cuCtxEnablePeerAccess(context.primary, 0)
    context_restore(peer, mode)
    context_leave(peer)
    # Another library enabled it.
    return CUDA_SUCCESS if code == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED else code


# ---- waits ---------------------------------------------------------------------------------------
#
# Python runs handlers of signals between its own steps, so a thread inside of a driver's wait does
# not see Ctrl-C. The main thread therefore queries the driver until the work is done, and looks for
# signals after each slice. Other threads, which handle no signals, wait in the driver. Both end
# with the driver's own wait: pools release memory when it returns.

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef enum:
    SPIN = 2000000              # ns of queries without a pause: short waits end at once
    MAX_PAUSE = 1000000         # ns; a pause is a 128th of the wait so far
    SLICE = 50000000            # ns


cdef int synchronize_stream(DeviceContext* context, CUstream stream) except -1:
    return wait_for(context, AWAIT_STREAM, stream, "cuStreamSynchronize")


cdef int synchronize_event(DeviceContext* context, CUevent event) except -1:
    return wait_for(context, AWAIT_EVENT, event, "cuEventSynchronize")


cdef int wait_for(DeviceContext* context, Awaited what, void* point, str call) except -1:
    cdef bint interrupted
    cdef CUresult code
    with nogil:
        code = point_wait(context, what, point, &interrupted)
    if interrupted:
        return raise_interrupt()
    return check(context.table, code, call)


cdef int synchronize_device(DeviceContext* context) except -1:
    cdef bint interrupted = False
    cdef CUresult code
    with nogil:
        code = device_wait(context, &interrupted)
    if interrupted:
        return raise_interrupt()
    return check(context.table, code, "cuCtxSynchronize")


cdef CUresult device_wait(DeviceContext* context, bint* interrupted) noexcept nogil:
    cdef CUevent event = NULL
    cdef CUresult code = context_enter(context)
    if code != CUDA_SUCCESS:
        return code
    if context.table.cuCtxRecordEvent == NULL or not waits_in_slices(context):
        code = context_synchronize(context)
    else:
        code = context.table.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING)
        if code == CUDA_SUCCESS:
            code = context.table.cuCtxRecordEvent(context.primary, event)
            if code == CUDA_SUCCESS:
                code = point_wait(context, AWAIT_EVENT, event, interrupted)
            context.table.cuEventDestroy(event)
        # A driver's pool releases memory only after this call (seen on an H200). It returns at
        # once unless other threads have queued more.
        if code == CUDA_SUCCESS and not interrupted[0]:
            code = context_synchronize(context)
    context_leave(context)
    return code


cdef CUresult device_wait_until(DeviceContext* context, uint64_t until,
                                bint* interrupted) noexcept nogil:
    cdef uint64_t begin = clock_ns()
    cdef CUevent event = NULL
    cdef CUresult code
    interrupted[0] = False
    if context.table.cuCtxRecordEvent == NULL:
        return CUDA_SUCCESS
    code = context_enter(context)
    if code != CUDA_SUCCESS:
        return code
    code = context.table.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING)
    if code == CUDA_SUCCESS:
        code = context.table.cuCtxRecordEvent(context.primary, event)
        while code == CUDA_SUCCESS and is_unfinished(context, AWAIT_EVENT, event):
            if not finishes_soon(context, AWAIT_EVENT, event, begin, until):
                interrupted[0] = process_interrupted()
                if interrupted[0] or clock_ns() >= until:
                    code = CUDA_ERROR_NOT_READY
        context.table.cuEventDestroy(event)
    context_leave(context)
    return code


cdef CUresult context_synchronize(DeviceContext* context) noexcept nogil:
    # A wait that began after a moment, and has ended, has seen the end of all work queued before
    # that moment.
    cdef uint64_t number = sum_add(&context.waits_begun, 1)
    cdef CUresult code = context.table.cuCtxSynchronize()
    if code == CUDA_SUCCESS:
        store64(&context.waits_done, number)
    return code


cdef CUresult point_wait(DeviceContext* context, Awaited what, void* point,
                         bint* interrupted) noexcept nogil:
    cdef uint64_t begin = clock_ns()
    cdef CUresult code = context_enter(context)
    interrupted[0] = False
    if code != CUDA_SUCCESS:
        return code
    while is_unfinished(context, what, point) and waits_in_slices(context):
        if (not finishes_soon(context, what, point, begin, <uint64_t>-1)
                and process_interrupted()):
            interrupted[0] = True
            context_leave(context)
            return CUDA_ERROR_NOT_READY
    if what == AWAIT_STREAM:
        code = context.table.cuStreamSynchronize(<CUstream>point)
    else:
        code = context.table.cuEventSynchronize(<CUevent>point)
    context_leave(context)
    return code


cdef inline bint waits_in_slices(DeviceContext* context) noexcept nogil:
    # Queries do not move a virtual clock, and the driver's wait does.
    return process_on_main_thread() and (context.clock_is_virtual == NULL
                                         or not context.clock_is_virtual())


cdef bint finishes_soon(DeviceContext* context, Awaited what, void* point, uint64_t begin,
                        uint64_t until) noexcept nogil:
    # Returns whether the work finishes within a slice, before `until` and before a signal.
    cdef uint64_t now = clock_ns()
    cdef uint64_t end = min(now + SLICE, until)
    while now < end:
        if now - begin < SPIN:
            sched_yield()
        elif not sleep_ns(min((now - begin) // 128, <uint64_t>MAX_PAUSE)):
            return False
        if not is_unfinished(context, what, point):
            return True
        now = clock_ns()
    return False


cdef inline bint is_unfinished(DeviceContext* context, Awaited what, void* point) noexcept nogil:
    # An error counts as finished: the driver's wait returns it.
    if what == AWAIT_STREAM:
        return context.table.cuStreamQuery(<CUstream>point) == CUDA_ERROR_NOT_READY
    return context.table.cuEventQuery(<CUevent>point) == CUDA_ERROR_NOT_READY


# ---- failure -----------------------------------------------------------------------------------

cdef int check(const DriverTable* table, CUresult code, str call) except -1:
    """Raise DriverError unless `code` is success; ClosedError where the driver has shut down."""
    cdef const char* text = NULL
    if code == CUDA_SUCCESS:
        return 0
    # Seen by daemon threads while the interpreter ends, and in a fork's child: the same error as
    # that of every call that begins afterwards.
    if code == CUDA_ERROR_DEINITIALIZED:
        raise ClosedError(f"{call} did not finish: the driver is shutting down, or the device "
                          "belongs to the parent process")
    if table.cuGetErrorString == NULL or table.cuGetErrorString(code, &text) != CUDA_SUCCESS:
        text = b""
    # The system's refusals are those of limits on the process.
    name = error_name(table, code)
    lack = lacking(0) if name == "CUDA_ERROR_OPERATING_SYSTEM" else None
    raise DriverError(call, <int>code, name,
                      text.decode() + (f"; {lack[1]}" if lack else ""))


cdef int device_enter(DeviceContext* context, str call) except -1:
    return check(context.table, context_enter(context), call)


cdef int device_leave(DeviceContext* context, CUresult code, str call) except -1:
    context_leave(context)
    return check(context.table, code, call)


cdef str error_name(const DriverTable* table, CUresult code):
    cdef const char* name = NULL
    if table.cuGetErrorName == NULL or table.cuGetErrorName(code, &name) != CUDA_SUCCESS:
        return "an unknown code"
    return name.decode()


cdef int require(const void* entry, str call, str what) except -1:
    """Raise DriverError if the driver has no such function."""
    if entry == NULL:
        raise DriverError(call, <int>CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED",
                          f"{what} needs {call}, which this driver does not have")
    return 0


# The object that reports the errors that end threads; None until the process ends.
cdef object report_of_threads = None


@atexit.register
def hush_threads():
    """Report no thread any more that a ClosedError ends: daemon threads all end like that."""
    global report_of_threads
    if report_of_threads is None:
        expect_at_exit(ClosedError)
        report_of_threads = threading.excepthook
        threading.excepthook = report_unless_closed


def report_unless_closed(failed):
    if not issubclass(failed.exc_type, ClosedError):
        report_of_threads(failed)


# ---- devices -----------------------------------------------------------------------------------

cdef DriverDevice open_driver_device(const DriverTable* table, str type, int ordinal):
    """Open one device of a filled and initialised table; retains its primary context."""
    cdef DriverDevice opened = DriverDevice.__new__(DriverDevice)
    cdef CUdevice device
    cdef CUcontext context
    opened.type = type
    opened.ordinal = ordinal
    opened.context.table = table
    opened.context.ordinal = ordinal
    opened.context.generation = process.generation
    opened.context.now = clock_ns
    opened.context.clock_is_virtual = NULL
    opened.context.is_host = type == "host"
    check(table, table.cuDeviceGet(&device, ordinal), "cuDeviceGet")
    opened.context.device = device
    opened.context.frees_in_order = (
        table.cuMemFreeAsync != NULL
        and opened.attribute(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED) != 0)
    with nogil:
        code = table.cuDevicePrimaryCtxRetain(&context, device)
    check(table, code, "cuDevicePrimaryCtxRetain")
    opened.context.primary = context
    return opened


cdef bytes uuid_of_device(const DriverTable* table, int ordinal):
    """Return the 16 bytes that name a physical device; makes no context."""
    cdef CUdevice device
    cdef CUuuid uuid
    check(table, table.cuDeviceGet(&device, ordinal), "cuDeviceGet")
    check(table, table.cuDeviceGetUuid(&uuid, device), "cuDeviceGetUuid")
    return (<char*>uuid.bytes)[:16]


cdef dict entry_offsets = {
    driver_entries[i].name.decode(): driver_entries[i].offset for i in range(DRIVER_ENTRY_COUNT)
}
cdef dict attribute_numbers = {
    device_attributes[i].name.decode(): device_attributes[i].number
    for i in range(DEVICE_ATTRIBUTE_COUNT)
}


@cython.final
cdef class DriverDevice:
    """One opened device, which a `Device` queries."""

    @property
    def dead(self):
        """Whether it belongs to the parent of a fork, or the interpreter is ending."""
        return bool(context_is_dead(&self.context))

    def name(self):
        """Return the driver's name for it."""
        cdef char text[256]
        check(self.context.table,
              self.context.table.cuDeviceGetName(text, sizeof(text), self.context.device),
              "cuDeviceGetName")
        return (<bytes>text).decode()

    def memory_info(self):
        """Return (free, total) in bytes, as the driver sees them now."""
        cdef size_t free_bytes = 0
        cdef size_t total_bytes = 0
        cdef CUresult code
        with nogil:
            code = context_enter(&self.context)
            if code == CUDA_SUCCESS:
                code = self.context.table.cuMemGetInfo(&free_bytes, &total_bytes)
                context_leave(&self.context)
        check(self.context.table, code, "cuMemGetInfo")
        return free_bytes, total_bytes

    def attribute(self, int number):
        """Return a device attribute; 0 where the driver does not know it."""
        cdef int value = 0
        code = self.context.table.cuDeviceGetAttribute(&value, <CUdevice_attribute>number,
                                                       self.context.device)
        if code == CUDA_ERROR_INVALID_VALUE:
            return 0
        check(self.context.table, code, "cuDeviceGetAttribute")
        return value

    def named_attribute(self, str name):
        """Return the attribute of that name, such as "CU_DEVICE_ATTRIBUTE_INTEGRATED"."""
        return self.attribute(attribute_numbers[name])

    def is_reached_by(self, int ordinal):
        """Whether another device of the same type can access the memory of this one.

        Raises ValueError if there is no such device.
        """
        cdef CUdevice other
        cdef int able = 0
        if self.context.table.cuDeviceGet(&other, ordinal) != CUDA_SUCCESS:
            raise ValueError(f"unknown device '{self.type}:{ordinal}'")
        check(self.context.table,
              self.context.table.cuDeviceCanAccessPeer(&able, other, self.context.device),
              "cuDeviceCanAccessPeer")
        return bool(able)

    def has(self, str name):
        """Whether the table has an entry of that name, such as "cuMemCreate"."""
        offset = entry_offsets.get(name)
        return offset is not None and (<void**>(<char*>self.context.table
                                                + <size_t>offset))[0] != NULL

    def version(self):
        """Return the CUDA version of the driver, such as 13000."""
        cdef int version = 0
        check(self.context.table, self.context.table.cuDriverGetVersion(&version),
              "cuDriverGetVersion")
        return version

    def synchronize(self):
        """Wait until everything queued on the device has finished; Ctrl-C ends it early.

        A driver before CUDA 12.5 cannot be queried for that: then Ctrl-C comes afterwards.
        """
        synchronize_device(&self.context)


def driver_entry_names():
    """Return (name, version) of every function in the driver table."""
    return [(driver_entries[i].name.decode(), driver_entries[i].version)
            for i in range(DRIVER_ENTRY_COUNT)]


forbid_instantiation(DriverDevice)


# ---- the table of CUDA ---------------------------------------------------------------------------

# cuda-python is the loader: it finds libcuda (WSL included) and calls cuGetProcAddress, so that the
# library and the types of handles are those that other libraries of the process use. Functions are
# requested by name and by the CUDA version of the signature that the table declares, and only from
# a driver of at least that version, since an older one would return another signature.

cdef DriverTable cuda_table
cdef str cuda_reason = "not queried yet"
cdef int cuda_count = -1        # devices; -1: not loaded yet
cdef list cuda_missing = []
cdef int cuda_version = 0       # of the driver
# The first call fills the table; calls of other threads wait for it.
cdef object cuda_filling = threading.RLock()


def load():
    """Fill the table once; return None if CUDA is available, else the reason why it is not."""
    global cuda_reason, cuda_count
    with cuda_filling:
        if cuda_count >= 0:
            return cuda_reason
        cuda_count = 0
        try:
            cuda_reason = fill_cuda_table()
        except Exception as error:
            # The loader fails in many ways (no libcuda, a stub library, a broken install): the
            # reason is the error's own text, and CUDA is not available.
            cuda_reason = f"{type(error).__name__}: {error}".strip().replace("\n", " ")
            if type(error).__name__ == "DynamicLibNotFoundError":       # cuda-pathfinder's
                cuda_reason = "no NVIDIA driver is installed (libcuda.so.1 was not found)"
        return cuda_reason


cdef object fill_cuda_table():
    global cuda_count, cuda_version
    cdef int found = 0
    cdef int i
    cdef CUresult code
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return f"cuda-python is not installed ({error})"
    memset(&cuda_table, 0, sizeof(cuda_table))
    # 1: the legacy default stream is stream 0; 2: each thread's own is.
    flags = 2 if os.environ.get("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", "0") == "1" else 1
    find = functools.partial(_address_of, driver.cuGetProcAddress, flags)
    version = cuda_version = driver_version(find(b"cuDriverGetVersion", 2020))
    for i in range(DRIVER_ENTRY_COUNT):
        address = 0
        if driver_entries[i].version <= version:
            address = find(driver_entries[i].name, driver_entries[i].version)
        (<uintptr_t*>(<char*>&cuda_table + driver_entries[i].offset))[0] = address
        if not address:
            cuda_missing.append(driver_entries[i].name.decode())
    for i in range(OLDER_ENTRY_COUNT):
        if version < older_entries[i].until:
            address = find(older_entries[i].name, older_entries[i].version)
            (<uintptr_t*>(<char*>&cuda_table + older_entries[i].offset))[0] = address
    if cuda_table.cuInit == NULL or cuda_table.cuDeviceGetCount == NULL:
        return "the CUDA driver has no cuInit"
    with nogil:
        code = cuda_table.cuInit(0)
    if code == CUDA_ERROR_NO_DEVICE:
        return "the CUDA driver finds no GPU (CUDA_ERROR_NO_DEVICE)"
    check(&cuda_table, code, "cuInit")
    check(&cuda_table, cuda_table.cuDeviceGetCount(&found), "cuDeviceGetCount")
    if found == 0:
        return "the CUDA driver finds no GPU"
    cuda_count = found
    return None


def _address_of(get, flags, name, version):
    """Return the address of a function by its name and version; 0: the driver has none."""
    status, address, *_ = get(name, version, flags)
    return address if int(status) == 0 and address else 0


cdef int driver_version(uintptr_t address) except -1:
    # 0: the driver has no such function.
    cdef int version = 0
    if address:
        (<CUresult (*)(int*) noexcept nogil><void*>address)(&version)
    return version


def device_count():
    """Return the number of CUDA devices; 0 where CUDA is not available."""
    load()
    return cuda_count


def version():
    """Return the CUDA version of the driver, such as 13000; opens no device."""
    load()
    return cuda_version


def missing_functions():
    """Return the names of the table's functions that the driver does not have."""
    load()
    return tuple(cuda_missing)


def open_device(int ordinal):
    """Open a CUDA device; raise ValueError if there is none of that number."""
    return open_driver_device(table_with(ordinal), "cuda", ordinal)


def device_uuid(int ordinal):
    """Return the 16 bytes that name a CUDA device, or raise as `open_device` does."""
    return uuid_of_device(table_with(ordinal), ordinal)


cdef const DriverTable* table_with(int ordinal) except NULL:
    if not 0 <= ordinal < device_count():
        raise ValueError(f"unknown device 'cuda:{ordinal}'")
    return &cuda_table
