"""ExternalMemory: memory of another API or process as tensors and arenas, and its imports."""

import errno
import os
import time

cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.errno cimport errno as c_errno
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from gpumem._buffer cimport (
    BorrowedMemory, Buffer, buffer_of, MemoryResource, order_settled, Stream,
)
from gpumem._native.driver cimport (
    check, context_enter, context_is_dead, context_leave, context_relax, context_restore,
    CU_MEM_ACCESS_FLAGS_PROT_READ, CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_LOCATION_TYPE_DEVICE,
    CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_READ_ONLY,
    CUDA_ERROR_NOT_READY, CUDA_EXTERNAL_MEMORY_BUFFER_DESC, CUDA_EXTERNAL_MEMORY_DEDICATED,
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC, CUDA_SUCCESS, CUdeviceptr, CUexternalMemory,
    CUexternalMemoryHandleType, CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle,
    CUresult, CUstream, CUstreamCaptureMode, device_wait_until, DeviceContext, DriverDevice,
)
from gpumem._resource cimport Handle
from gpumem._support.atomics cimport count_add, count_now, published32
from gpumem._support.memory cimport MAP_FAILED, MAP_SHARED, mmap, munmap, PROT_READ, PROT_WRITE
from gpumem._support.process cimport on_fork, process_is_exiting, raise_interrupt
from gpumem._support.retired cimport retire, Retired, take_retired
from gpumem._tensor cimport element_of, ElementType, MAX_RANK, Tensor, tensor_new
from gpumem.interop.timelines._core cimport timelines_in_use

from gpumem._copy.copy import wait_for_releases
from gpumem._arena.arena import Arena
from gpumem._support.closing import close_after_body
from gpumem._support.releases import on_release
from gpumem._support.sizes import exact_size, format_size
from gpumem.config import ArenaConfig
from gpumem.device import Device, MemoryInfo, MemoryKind
from gpumem.errors import (
    AlignmentError, BadHandleError, ClosedError, ConfigError, DeviceMismatchError, InUseError,
    InvalidDescriptorError,
)
from gpumem.interop.descriptors import seconds_of
from gpumem.interop.memory.placement import place_tensor, point_of, Slices


cdef enum:
    MAX_SECONDS = 1000000000       # of a clock


cdef struct Mapping:
    int32_t references      # atomic
    DeviceContext* context
    CUdeviceptr address     # of the allocation's first byte
    uint64_t nbytes         # of the allocation
    # The fields from here to `file_bytes` are released in this order; 0 or NULL: nothing.
    CUdeviceptr buffer              # a mapped buffer, to be freed
    CUexternalMemory external
    uint64_t range_bytes            # virtual memory: the addresses from `address` on
    bint is_mapped                  # and they hold `physical`
    CUmemGenericAllocationHandle physical
    bint is_registered              # host pages from `address` on are known to the driver
    uint64_t file_bytes             # and are a file's, mapped here
    bint was_used                   # work on the device may still touch it
    PyObject* owner                 # counted
    Retired end


# A buffer over imported memory keeps these, and releases them at its end.
cdef struct KeptMapping:
    Mapping* mapping
    PyObject* ready         # counted; NULL: nothing to wait for


# ---- Buffers over imported memory ----------------------------------------------------------------

@cython.final
cdef class ImportedMemory(BorrowedMemory):
    """The resource of buffers over imported memory. It allocates nothing.

    The end of a mapping waits for the whole device, so no stream has to be recorded.
    """

    def __init__(self, memory, read_only, stream=None):     # the base's is for those that allocate
        self.borrow(memory, f"memory imported on {memory}", stream, True, release_kept)
        self.is_read_only = read_only

    cdef int before_cpu(self, Buffer buffer) except -1:
        cdef KeptMapping* kept = <KeptMapping*><uintptr_t>buffer.handle
        # The producer may still write. Each access waits for it: that costs next to nothing once
        # the value is reached.
        if kept != NULL and kept.ready != NULL:
            (<object>kept.ready).wait()
        return 0

    cdef int before_stream(self, Buffer buffer, CUstream stream,
                           DriverDevice driver_device) except -1:
        cdef KeptMapping* kept = <KeptMapping*><uintptr_t>buffer.handle
        if kept == NULL or kept.ready == NULL:
            return 0
        # The wait is queued on the device; the CPU goes on. If only the point's device can wait
        # for the point, the wait is queued on this object's own stream.
        device = self.memory.device
        if driver_device is not self.driver_device:
            if getattr((<object>kept.ready).timeline, "device", None) is None:
                device = Device(f"{driver_device.type}:{driver_device.ordinal}")
            else:
                stream = self.own
        (<object>kept.ready).enqueue_wait(Stream.from_handle(device, <uintptr_t>stream))
        return 0


cdef void release_kept(void* owner) noexcept nogil:
    cdef KeptMapping* kept = <KeptMapping*>owner
    # This thread may not hold the interpreter lock: a DLPack consumer drops its lease anywhere.
    if kept.ready != NULL and not process_is_exiting():
        with gil:
            Py_DECREF(<object>kept.ready)
    mapping_drop(kept.mapping)
    free(kept)


cdef Buffer buffer_over(ExternalMemory memory, MemoryResource home, uint64_t address,
                        uint64_t nbytes):
    # It has no block until all that can fail is done.
    cdef Buffer buffer = buffer_of(home, address, nbytes, 0, 0, 0)
    # The caller may have run other code since it looked; until the memory is retained none runs.
    cdef Mapping* mapping = require_open(memory)
    cdef KeptMapping* kept = <KeptMapping*>malloc(sizeof(KeptMapping))
    if kept == NULL:
        raise MemoryError("out of host memory while creating a buffer over imported memory")
    # The current point: a later `set_ready` is for later buffers.
    kept.mapping = mapping
    kept.ready = NULL
    if memory.ready is not None:
        Py_INCREF(memory.ready)
        kept.ready = <PyObject*>memory.ready
    mapping_retain(mapping)
    # Block bytes are not 0 now: an empty buffer keeps the mapping, too.
    buffer.handle = <uintptr_t>kept
    buffer.block_bytes = nbytes or 1
    if memory.ready is None:
        order_settled(buffer)               # the caller has ordered earlier work
    return buffer


# ---- ExternalMemory ------------------------------------------------------------------------------

@cython.final
cdef class ExternalMemory:
    """Memory that another API or process allocated, mapped whole; made by `Importer.import_memory`.

    Tensors in it are addresses in one mapping, so they may overlap and see each other's writes.
    Each tensor and view keeps the mapping. After the last of them and this object are gone, the
    next call that imports or closes something, or that queries the device's free bytes, releases
    it: a release may have to wait for work on the device, which a finalizer must not.

    Attributes
    ----------
    descriptor : MemoryDescriptor
        Describes the import; its handle may be closed by now.
    memory : MemoryInfo
        Memory of the mapping here: the device's own, HOST_ACCESSIBLE or HOST.
    ready : TimelinePoint or None
        The point that `set_ready` set last.

    Examples
    --------
    >>> import os
    >>> from gpumem.interop import MemoryDescriptor, MemoryHandleType, Importer
    >>> fd = os.memfd_create("pixels")
    >>> os.truncate(fd, 4096)
    >>> importer = Importer.for_device("host")
    >>> memory = importer.import_memory(MemoryDescriptor(fd, MemoryHandleType.MEMFD, 4096),
    ...                                 consume=True)
    >>> tensor = memory.tensor((3, 4), "float32", offset=256)
    >>> tensor.numpy()[...] = 7
    >>> tensor.nbytes, memory.exports
    (48, 1)
    """

    cdef Mapping* mapping               # with one reference of this object; NULL: closed
    cdef MemoryResource home            # of the buffers over it
    cdef readonly object descriptor
    cdef readonly object memory
    cdef readonly object ready
    cdef object __weakref__

    def __init__(self):
        raise TypeError("an ExternalMemory is made by Importer.import_memory()")

    def __dealloc__(self):
        # Tensors keep the mapping by references of their own.
        if self.mapping != NULL:
            mapping_drop(self.mapping)

    @property
    def size(self):
        """Bytes of the whole allocation."""
        return self.descriptor.size

    @property
    def offset(self):
        """Bytes of the allocation before the described memory."""
        return self.descriptor.offset

    @property
    def nbytes(self):
        """Bytes of the described memory: size - offset."""
        return self.descriptor.nbytes

    @property
    def read_only(self):
        """Whether this process may only read it."""
        return self.descriptor.read_only

    @property
    def device(self):
        """The Device that it was imported on."""
        return self.memory.device

    @property
    def host_accessible(self):
        """Whether the CPU reads and writes it in place."""
        return self.memory.host_accessible

    @property
    def ptr(self):
        """Address of the first described byte."""
        return require_open(self).address + <uint64_t>self.descriptor.offset

    @property
    def closed(self):
        """Whether `close` was called."""
        return self.mapping == NULL

    @property
    def exports(self):
        """Number of tensors, views and arenas that keep the mapping."""
        return 0 if self.mapping == NULL else count_now(&self.mapping.references) - 1

    def tensor(self, shape, dtype, *, offset=0, strides=None, row_pitch=None, read_only=None,
               stream=None):
        """Return a tensor in the memory, without a copy.

        Parameters
        ----------
        shape : int or sequence of int
        dtype : dtype
            NumPy's, or bfloat16 and the 8-bit floats of ml_dtypes.
        offset : int
            Bytes from the start of the memory, which is `descriptor.offset` after the start of the
            allocation.
        strides : sequence of int, optional
            Bytes, one for each dimension, not negative; None: C order.
        row_pitch : int, optional
            Instead of `strides`: bytes from one row to the next, where the last dimension is a row
            and all others follow each other by rows.
        read_only : bool, optional
            None: as the memory; False is an error in read-only memory.
        stream : stream, optional
            The stream that the tensor belongs to: copies on other streams are ordered with it. None
            is no stream: copies come after the work on the device's legacy default stream, and only
            gpumem's own later use of the same bytes comes after them. A copy from memory that a
            producer has yet to write holds up the stream of the copy, and no other.

        Returns
        -------
        Tensor
            Reading or exporting it waits for the point that `set_ready` set before.

        Raises
        ------
        InvalidDescriptorError
            A malformed shape, dtype, stride, offset, or `row_pitch` smaller than a row.
        OutOfBoundsError
            It would reach past the end of the allocation.
        AlignmentError
            Its address, a stride or the pitch is not a multiple of the dtype's alignment.
        TypeError, ValueError
            `stream` is not a stream, or is one of another device.
        ClosedError
            The memory is closed, or belongs to the parent of a fork.
        """
        cdef Mapping* mapping = require_open(self)
        cdef MemoryResource home = self.home
        cdef ElementType element
        cdef Tensor tensor
        cdef uint64_t address = mapping.address + <uint64_t>self.descriptor.offset
        cdef int64_t lengths[MAX_RANK]
        cdef int64_t steps[MAX_RANK]
        cdef int rank
        # Every malformed argument is one type of error, whichever check finds it.
        try:
            element = element_of(dtype)
        except TypeError as error:
            raise InvalidDescriptorError(str(error)) from None
        layout = place_tensor(self.descriptor, address, shape, element.dtype, offset, strides,
                              row_pitch, read_only, MAX_RANK)
        address += <uint64_t>layout.offset
        rank = len(layout.shape)
        if stream is not None:
            home = ImportedMemory(self.memory, self.home.is_read_only, stream)
        for i, (length, step) in enumerate(zip(layout.shape, layout.strides, strict=True)):
            lengths[i] = length
            steps[i] = step
        # The buffer is just as large as the tensor, so that views cannot leave its bounds.
        tensor = tensor_new(buffer_over(self, home, address, layout.extent), element, address, rank)
        memcpy(tensor.lengths, lengths, rank * sizeof(int64_t))
        memcpy(tensor.steps, steps, rank * sizeof(int64_t))
        tensor.count = layout.count
        tensor.is_read_only = layout.read_only
        return tensor

    def set_ready(self, timeline, value=None, *, timeout=None):
        """Set the point of a timeline at which the producer's writes are done.

        Later tensors wait for it: a consumer's stream on the device, the CPU when it takes a view.
        Existing tensors keep their point.

        Parameters
        ----------
        timeline : Timeline, TimelinePoint or None
            None: later tensors do not wait.
        value : int, optional
            The value that the producer signals; not with a TimelinePoint.
        timeout : float, optional
            Longest wait of the CPU in seconds; None: unlimited.

        Raises
        ------
        TypeError, ValueError
            Not a timeline, or an invalid value or timeout; or one of these without a timeline.
        DeviceMismatchError
            The timeline belongs to another device.
        ClosedError
            The memory is closed.
        """
        require_open(self)
        self.ready = point_of(self.device, timeline, value, timeout)

    def resource(self, config=None, *, grow=None, name=None):
        """Return an arena that sub-allocates in the memory.

        Parameters
        ----------
        config : ArenaConfig or Mapping, optional
            As for `Arena`. Without `grow`, ``max_mem`` is at most the size of the memory.
        grow : callable, optional
            ``grow(nbytes)`` is called when the arena is full. It returns another ExternalMemory of
            the same kind with at least `nbytes`, or None: it is then called with smaller
            sizes, down to the request. It must not call the arena.
        name : str, optional

        Returns
        -------
        Arena
            It keeps the memory and all that `grow` returned; close it before the memory.

        Raises
        ------
        ConfigError
            The memory is read-only, or smaller than 256 bytes; a setting is invalid.
        ClosedError
            The memory is closed, or belongs to the parent of a fork.

        Examples
        --------
        >>> import os
        >>> from gpumem.interop import MemoryDescriptor, MemoryHandleType, Importer
        >>> fd = os.memfd_create("heap")
        >>> os.truncate(fd, 1 << 20)
        >>> memory = Importer.for_device("host").import_memory(
        ...     MemoryDescriptor(fd, MemoryHandleType.MEMFD, 1 << 20), consume=True)
        >>> arena = memory.resource()
        >>> with arena.allocate(1000) as buffer:
        ...     memory.ptr <= buffer.ptr < memory.ptr + memory.nbytes
        True
        """
        title = name or f"arena in imported memory at {require_open(self).address:#x}"
        if self.read_only:
            raise ConfigError("an arena cannot allocate in read-only memory")
        # Each region of the arena keeps its memory by a buffer over it.
        slices = Slices(self, grow, keeper)
        settings = ArenaConfig._given(config, {}, self.memory)
        # Other users of the memory may write all of it, so there are no guards.
        return Arena(self.memory, slices.settings(settings), source=slices, debug_heap=False,
                     name=title)

    def close(self, *, timeout=None):
        """Release the mapping, after the device's work that is queued now. Idempotent.

        Waits for that work. While a stream of the device waits for a timeline, it does not, since
        the caller may have to signal the value: a later call of gpumem releases the mapping then.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait until it is not in use, and, by queries which Ctrl-C ends, for that
            work: not while a graph is captured on the device, as for `Device.synchronize`. None: 0
            for the uses, and as long as the work takes. A driver before CUDA 12.5 cannot be
            queried, and is waited for.

        Raises
        ------
        InUseError
            There are exports; or a stream waits for a timeline, and the memory is a
            HOST_ALLOCATION without an owner, which its user may free next; or the work was not done
            within `timeout`. Nothing is changed.
        TypeError, ValueError
            `timeout` is not a number of seconds from 0 on, nor None.
        DriverError
            A release failed. The memory is closed nevertheless; the next call that imports or
            closes something tries again.
        """
        cdef CUresult code = CUDA_SUCCESS
        cdef const char* call = "cuCtxPushCurrent"
        cdef Mapping* mapping
        cdef bint interrupted = False
        cdef uint64_t until
        seconds = 0 if timeout is None else seconds_of(timeout)
        # Polled: the last export may end on a thread without the interpreter lock.
        deadline = time.monotonic() + seconds
        while (self.mapping != NULL and (self.exports or mapping_holds_caller(self.mapping))
                and time.monotonic() < deadline):
            time.sleep(0.001)
        mapping = self.mapping      # NULL: closed, before or by another thread during the wait
        if mapping != NULL and timeout is not None and not self.exports:
            # Queries, because the driver's own wait, which its release begins with, has no bound.
            until = <uint64_t>(min(max(deadline, 0), MAX_SECONDS) * 1e9)
            mapping_retain(mapping)         # another thread may close it during the wait
            with nogil:
                code = mapping_wait(mapping, until, &interrupted)
                mapping_drop(mapping)
            if interrupted:
                raise_interrupt()
        if self.exports:
            wait_for_releases()             # a copy that is done may not have released it yet
        if self.mapping == NULL:
            return
        if self.exports:
            raise InUseError(f"{self!r} is in use by {self.exports} tensors, views or arenas; "
                             "drop them first")
        if mapping_holds_caller(mapping):
            raise InUseError(f"{self!r} may be in use by a stream of {self.device} that waits for "
                             "a timeline: synchronize the stream first, or import the memory with "
                             "owner=, which keeps it until then")
        if code == CUDA_ERROR_NOT_READY:
            raise InUseError(f"{self!r} may be in use by work on {self.device}, which was not done "
                             f"within {timeout} s")
        # From here on the memory is closed, even if the driver refuses a step of the release.
        self.mapping = NULL
        with nogil:
            mapping_drop_last(mapping, &code, &call)
            release_retired_mappings()
        if code != CUDA_SUCCESS:
            check(self.home.driver_device.context.table, code, call.decode())

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        # The frames of the error that leaves the block often keep tensors.
        if error is not None and self.exports:
            mapping_drop(self.mapping)      # released with the last export
            self.mapping = NULL
        close_after_body(self.close, error)

    def __repr__(self):
        state = ", closed" if self.mapping == NULL else ""
        return (f"<gpumem.interop.ExternalMemory {self.descriptor.handle_type.name} of "
                f"{format_size(self.nbytes)} in {self.memory}{state}>")


cdef ExternalMemory external_memory(object wanted, object memory, Mapping* mapping):
    # Takes over the one reference to the mapping.
    cdef ExternalMemory made
    try:
        made = ExternalMemory.__new__(ExternalMemory)
        made.home = home_of(memory, wanted.descriptor.read_only)
    except BaseException:
        mapping_drop(mapping)
        raise
    mapping.was_used = True         # from now on
    made.descriptor = wanted.descriptor
    made.memory = made.home.memory
    made.mapping = mapping
    return made


cdef Mapping* require_open(ExternalMemory memory) except NULL:
    if memory.mapping == NULL:
        raise ClosedError("this imported memory is closed")
    # Pages of a file are shared with a forked child, a device's memory is not.
    if context_is_dead(memory.mapping.context) and not memory.mapping.file_bytes:
        raise ClosedError("this imported memory belongs to the parent process")
    return memory.mapping


# (memory, read-only) -> the resource of its buffers; replaced in a forked child
cdef dict homes = {}


cdef MemoryResource home_of(object memory, bint read_only):
    # One for all imports of a memory: it has no state of its own.
    cdef MemoryResource known = homes.get((str(memory), read_only))
    if known is None or context_is_dead(&known.driver_device.context):
        known = ImportedMemory(memory, read_only)
        homes[str(memory), read_only] = known
    return known


def keeper(ExternalMemory memory not None):
    """Return a buffer over the whole memory, which keeps it mapped."""
    # The bytes before the descriptor's offset belong to another owner.
    cdef Mapping* mapping = require_open(memory)
    return buffer_over(memory, memory.home, mapping.address + <uint64_t>memory.descriptor.offset,
                       memory.nbytes)


def mapping_of(Buffer buffer not None):
    """Return the address and the bytes of all that is mapped for a buffer of `ImportedMemory`.

    Buffers in the same mapping have the same ones. ClosedError if the buffer is closed.
    """
    cdef KeptMapping* kept
    if buffer.is_closed:
        raise ClosedError("this buffer is closed")
    kept = <KeptMapping*><uintptr_t>buffer.handle
    return kept.mapping.address, kept.mapping.nbytes


def release_retired(bint may_wait=True):
    """Release imports that are no longer referenced; waits for work on the device."""
    if may_wait:
        with nogil:
            release_retired_mappings()


on_release("imports", release_retired)


# ---- The driver calls of each kind of import -----------------------------------------------------
#
# Each function undoes its earlier steps if a later one fails. It is passed a duplicate of the
# caller's descriptor. cuImportExternalMemory owns the descriptor once it succeeded; after any
# other call the duplicate closes it.

cdef extern from "<string.h>" nogil:
    char* strerror(int number)

cdef enum:
    PAGE = 4096                     # bytes


# ---- Memory of a graphics driver -----------------------------------------------------------------

def import_external(wanted, int driver_type, Handle file not None, start=0):
    """Import an allocation by the driver's external memory, and map it whole.

    `start` is how many bytes of the file come before the allocation.
    """
    cdef CUDA_EXTERNAL_MEMORY_HANDLE_DESC handle
    cdef uint64_t begin = start
    cdef Mapping* mapping = new_mapping(wanted, 0, None)
    cdef DeviceContext* context = mapping.context
    cdef CUDA_EXTERNAL_MEMORY_BUFFER_DESC all_of_it
    cdef CUstreamCaptureMode before
    cdef CUresult code
    cdef const char* call = "cuImportExternalMemory"
    memset(&handle, 0, sizeof(handle))
    handle.type = <CUexternalMemoryHandleType>driver_type
    handle.handle.fd = file.fd
    memset(&all_of_it, 0, sizeof(all_of_it))
    # Mapped whole, once; tensors are addresses in the mapping.
    all_of_it.offset = begin
    all_of_it.size = mapping.nbytes
    handle.size = begin + mapping.nbytes
    if wanted.dedicated:
        handle.flags = CUDA_EXTERNAL_MEMORY_DEDICATED
    with nogil:
        code = context_enter(context)
        if code == CUDA_SUCCESS:
            before = context_relax(context)
            code = context.table.cuImportExternalMemory(&mapping.external, &handle)
            if code == CUDA_SUCCESS:
                call = "cuExternalMemoryGetMappedBuffer"
                code = context.table.cuExternalMemoryGetMappedBuffer(
                    &mapping.buffer, mapping.external, &all_of_it)
            context_restore(context, before)
            context_leave(context)
    # Also if the mapping failed: the import has succeeded.
    if mapping.external != NULL:
        file.fd = -1                # the driver owns it now
    require_success(mapping, code, call)
    mapping.address = mapping.buffer
    return external_memory(wanted, wanted.memory, mapping)


# ---- Physical memory of the driver's virtual memory management -----------------------------------

def import_physical(wanted, Handle file not None):
    """Import a physical allocation and map it whole."""
    cdef Mapping* mapping = new_mapping(wanted, 0, None)
    cdef CUmemAllocationProp prop
    cdef CUresult code
    cdef const char* call = "cuCtxPushCurrent"
    cdef int fd = file.fileno()
    cdef bint read_only = wanted.descriptor.read_only
    memset(&prop, 0, sizeof(prop))
    with nogil:
        code = import_physical_here(mapping, fd, read_only, &prop, &call)
    # Checked before the driver's error, which another device's memory may cause.
    if mapping.physical and prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE and (
            prop.location.id != mapping.context.device):
        mapping_free(mapping)
        raise DeviceMismatchError(f"this memory lies on device {prop.location.id}, not on "
                                  f"{wanted.device}")
    require_success(mapping, code, call)
    # Only the handle's properties say whether it is memory of the device or of a NUMA node.
    memory = wanted.memory
    if prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE:
        memory = MemoryInfo(wanted.device, MemoryKind.HOST_ACCESSIBLE)
    return external_memory(wanted, memory, mapping)


cdef CUresult import_physical_here(Mapping* mapping, int fd, bint read_only,
                                   CUmemAllocationProp* prop, const char** call) noexcept nogil:
    cdef DeviceContext* context = mapping.context
    cdef CUresult code = context_enter(context)
    cdef CUstreamCaptureMode before
    if code != CUDA_SUCCESS:
        return code
    # Relaxed: a thread that captures a stream may import memory. Each step notes what it made.
    before = context_relax(context)
    call[0] = "cuMemImportFromShareableHandle"
    code = context.table.cuMemImportFromShareableHandle(
        &mapping.physical, <void*><uintptr_t>fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    if code == CUDA_SUCCESS:
        call[0] = "cuMemGetAllocationPropertiesFromHandle"
        code = context.table.cuMemGetAllocationPropertiesFromHandle(prop, mapping.physical)
    if code == CUDA_SUCCESS:
        call[0] = "cuMemAddressReserve"
        code = context.table.cuMemAddressReserve(&mapping.address, mapping.nbytes, 0, 0, 0)
    if code == CUDA_SUCCESS:
        mapping.range_bytes = mapping.nbytes
        call[0] = "cuMemMap"
        code = context.table.cuMemMap(mapping.address, mapping.nbytes, 0, mapping.physical, 0)
    if code == CUDA_SUCCESS:
        mapping.is_mapped = True
        call[0] = "cuMemSetAccess"
        code = allow(mapping, prop, read_only)
    context_restore(context, before)
    context_leave(context)
    return code


cdef CUresult allow(Mapping* mapping, const CUmemAllocationProp* prop,
                    bint read_only) noexcept nogil:
    # In memory of a NUMA node the CPU needs access, too.
    cdef CUmemAccessDesc access[2]
    access[0].location.type = CU_MEM_LOCATION_TYPE_DEVICE
    access[0].location.id = mapping.context.device
    access[0].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    # The driver enforces it for kernels; a write is a fault of the device.
    if read_only:
        access[0].flags = CU_MEM_ACCESS_FLAGS_PROT_READ
    access[1].location = prop.location
    access[1].flags = access[0].flags
    return mapping.context.table.cuMemSetAccess(
        mapping.address, mapping.nbytes, access,
        1 if prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE else 2)


# ---- Host memory ---------------------------------------------------------------------------------

def import_file(wanted, Handle file not None):
    """Map a file in memory, shared, and make its pages known to the driver."""
    cdef Mapping* mapping
    cdef bint read_only = wanted.descriptor.read_only
    cdef void* pages
    cdef int number
    # An access past the file's end would be a SIGBUS.
    require_bytes(file, wanted.descriptor.size)
    mapping = new_mapping(wanted, 0, None)
    pages = mmap(NULL, mapping.nbytes, PROT_READ if read_only else PROT_READ | PROT_WRITE,
                 MAP_SHARED, file.fileno(), 0)
    if pages == MAP_FAILED:
        # Before the next call changes it.
        number = c_errno
        mapping_free(mapping)
        raise BadHandleError(number, f"descriptor cannot be mapped "
                             f"{'to read' if read_only else 'to write'}: "
                             f"{strerror(number).decode()}")
    mapping.address = <uintptr_t>pages
    mapping.file_bytes = mapping.nbytes
    return register(wanted, mapping)


def import_host(wanted, address, owner):
    """Make pages of this process known to the driver."""
    if address % PAGE:
        raise AlignmentError(f"address {address:#x} of a HOST_ALLOCATION is not a multiple of a "
                             f"page's {PAGE} bytes")
    return register(wanted, new_mapping(wanted, address, owner))


cdef object register(object wanted, Mapping* mapping):
    cdef DeviceContext* context = mapping.context
    cdef unsigned int flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
    cdef CUdeviceptr seen = 0
    cdef CUstreamCaptureMode before
    cdef CUresult code
    cdef const char* call = "cuMemHostRegister"
    # Pages that are mapped to read cannot be registered to be written.
    if wanted.descriptor.read_only:
        flags |= CU_MEMHOSTREGISTER_READ_ONLY
    with nogil:
        code = context_enter(context)
        if code == CUDA_SUCCESS:
            before = context_relax(context)
            code = context.table.cuMemHostRegister(<void*>mapping.address, mapping.nbytes, flags)
            # Each success is noted at once, so that a failure releases exactly the finished steps.
            mapping.is_registered = code == CUDA_SUCCESS
            if code == CUDA_SUCCESS:
                call = "cuMemHostGetDevicePointer"
                code = context.table.cuMemHostGetDevicePointer(&seen, <void*>mapping.address, 0)
            context_restore(context, before)
            context_leave(context)
    require_success(mapping, code, call)
    # A tensor has one address, for the CPU and for kernels.
    if seen != mapping.address:
        mapping_free(mapping)
        raise DeviceMismatchError(f"{wanted.device} sees these pages at another address than the "
                                  "CPU")
    return external_memory(wanted, wanted.memory, mapping)


# ---- Memory of another resource ------------------------------------------------------------------

def import_buffer(wanted, buffer):
    """Take a Buffer for the memory; it is kept until the last view is gone."""
    return external_memory(wanted, wanted.memory, new_mapping(wanted, buffer.ptr, buffer))


# ---- Steps of every import -----------------------------------------------------------------------

cdef Mapping* new_mapping(object wanted, uint64_t address, object owner) except NULL:
    # The mapping has one reference. Each step of an import that succeeds sets its field.
    cdef DriverDevice driver_device = wanted.device._open()
    cdef Mapping* mapping = <Mapping*>calloc(1, sizeof(Mapping))
    if mapping == NULL:
        raise MemoryError("out of host memory while importing memory")
    mapping.references = 1
    mapping.context = &driver_device.context
    mapping.nbytes = wanted.descriptor.size
    mapping.address = address
    if owner is not None:
        Py_INCREF(owner)
        mapping.owner = <PyObject*>owner
    return mapping


cdef void mapping_free(Mapping* mapping) noexcept:
    # Undo an import that failed, now or when that waits for no timeline.
    mapping_drop(mapping)
    with nogil:
        release_retired_mappings()


cdef int require_success(Mapping* mapping, CUresult code, const char* call) except -1:
    # Undo an import that failed, and raise.
    cdef DeviceContext* context = mapping.context
    if code == CUDA_SUCCESS:
        return 0
    mapping_free(mapping)
    return check(context.table, code, call.decode())


def require_bytes(Handle file not None, size):
    """Raise BadHandleError for a file that is smaller than described."""
    try:
        there = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise BadHandleError(error.errno, error.strerror) from None
    if there < size:
        raise BadHandleError(errno.EINVAL, f"the descriptor's file has {exact_size(there)}: fewer "
                             f"than described, {exact_size(size)}")


# ---- Mappings: objects of the driver and the system for one import -------------------------------
#
# The ExternalMemory, and each buffer over it with its views, have one reference each. Dropping the
# last one only retires the mapping, because a driver's free may wait for work that has yet to be
# signalled; `release_retired_mappings` ends it where waiting is allowed.

# Mappings without references, which `release_retired_mappings` ends.
cdef Retired* dropped = NULL


cdef void mapping_retain(Mapping* mapping) noexcept nogil:
    count_add(&mapping.references, 1)


cdef void mapping_drop(Mapping* mapping) noexcept nogil:
    # Safe on any thread, in any finalizer.
    if count_add(&mapping.references, -1) == 0:
        retire_mapping(mapping)


cdef bint mapping_drop_last(Mapping* mapping, CUresult* code, const char** call) noexcept nogil:
    # Drops the last reference and ends the mapping at once, unless that might wait for a timeline's
    # value; `code` and `call` as of `mapping_end`. False: there are other references.
    # If the count is one, it is this reference, and no other thread can copy it. Writes under the
    # other references are visible.
    if published32(<const uint32_t*>&mapping.references) > 1:
        return False
    mapping.references = 0
    code[0] = end_or_retire(mapping, call)
    return True


cdef bint mapping_holds_caller(Mapping* mapping) noexcept nogil:
    # Whether the end would be postponed although the pages are the caller's. The caller could then
    # free them while a stream that waits for a timeline may still use them.
    return (mapping.is_registered and not mapping.file_bytes and mapping.owner == NULL
            and timelines_in_use(mapping.context))


cdef CUresult mapping_wait(Mapping* mapping, uint64_t until, bint* interrupted) noexcept nogil:
    # Waits until no queued work of the device can use it, at most until a time of `clock_ns`; not
    # at all if its end would be postponed. CUDA_ERROR_NOT_READY: the time is over. `interrupted`:
    # by Ctrl-C, and the exception is set.
    cdef CUstreamCaptureMode before
    cdef CUresult code
    interrupted[0] = False
    if (not mapping.was_used or context_is_dead(mapping.context)
            or timelines_in_use(mapping.context)):
        return CUDA_SUCCESS
    before = context_relax(mapping.context)
    code = device_wait_until(mapping.context, until, interrupted)
    context_restore(mapping.context, before)
    return code


cdef void release_retired_mappings() noexcept nogil:
    cdef Retired* link = take_retired(&dropped)
    cdef Mapping* mapping
    cdef const char* call = NULL
    while link != NULL:
        mapping = <Mapping*>link.thing
        link = link.next
        end_or_retire(mapping, &call)       # a failure has no caller to report to


cdef CUresult end_or_retire(Mapping* mapping, const char** call) noexcept nogil:
    # The end may wait for the device, and the device for a signal of this thread.
    if timelines_in_use(mapping.context):
        retire_mapping(mapping)
        return CUDA_SUCCESS
    return mapping_end(mapping, call)


cdef void retire_mapping(Mapping* mapping) noexcept nogil:
    # A later call ends it: that may wait for a stream, which perhaps waits for this thread.
    retire(&dropped, &mapping.end, mapping)


cdef CUresult mapping_end(Mapping* mapping, const char** call) noexcept nogil:
    # Waits for work on the device that may use it. After a failure, returned with the call's name,
    # `release_retired_mappings` repeats the refused step.
    cdef CUresult code = CUDA_SUCCESS
    # In a fork's child the driver's objects are the parent's; file pages were shared with it.
    if not context_is_dead(mapping.context):
        code = end_in_driver(mapping, call)
    if code != CUDA_SUCCESS:
        retire_mapping(mapping)     # the next call repeats the refused step
        return code
    if mapping.file_bytes:
        munmap(<void*>mapping.address, mapping.file_bytes)
    if mapping.owner != NULL and not process_is_exiting():
        with gil:
            Py_DECREF(<object>mapping.owner)
    free(mapping)
    return CUDA_SUCCESS


cdef CUresult end_in_driver(Mapping* mapping, const char** call) noexcept nogil:
    cdef CUresult code = context_enter(mapping.context)
    cdef CUstreamCaptureMode before
    if code != CUDA_SUCCESS:
        call[0] = "cuCtxPushCurrent"
        return code
    before = context_relax(mapping.context)
    code = release_all(mapping, call)
    context_restore(mapping.context, before)
    context_leave(mapping.context)
    return code


cdef CUresult release_all(Mapping* mapping, const char** call) noexcept nogil:
    # In the reverse order of the import. A step that succeeded is noted; after a failure the
    # remaining ones are for the next call.
    cdef DeviceContext* context = mapping.context
    cdef CUresult code = CUDA_SUCCESS
    # Freeing a buffer waits by itself; an owner may allocate its memory anew at once.
    if mapping.was_used and not mapping.buffer:
        code = called(call, "cuCtxSynchronize", context.table.cuCtxSynchronize())
    if code == CUDA_SUCCESS and mapping.buffer:
        code = called(call, "cuMemFree", context.table.cuMemFree(mapping.buffer))
        if code == CUDA_SUCCESS:
            mapping.buffer = 0
    if code == CUDA_SUCCESS and mapping.external != NULL:
        code = called(call, "cuDestroyExternalMemory",
                      context.table.cuDestroyExternalMemory(mapping.external))
        if code == CUDA_SUCCESS:
            mapping.external = NULL
    if code == CUDA_SUCCESS and mapping.is_mapped:
        code = called(call, "cuMemUnmap",
                      context.table.cuMemUnmap(mapping.address, mapping.nbytes))
        mapping.is_mapped = code != CUDA_SUCCESS
    if code == CUDA_SUCCESS and mapping.range_bytes:
        code = called(call, "cuMemAddressFree",
                      context.table.cuMemAddressFree(mapping.address, mapping.range_bytes))
        if code == CUDA_SUCCESS:
            mapping.range_bytes = 0
    if code == CUDA_SUCCESS and mapping.physical:
        code = called(call, "cuMemRelease", context.table.cuMemRelease(mapping.physical))
        if code == CUDA_SUCCESS:
            mapping.physical = 0
    if code == CUDA_SUCCESS and mapping.is_registered:
        code = called(call, "cuMemHostUnregister",
                      context.table.cuMemHostUnregister(<void*>mapping.address))
        mapping.is_registered = code != CUDA_SUCCESS
    return code


cdef inline CUresult called(const char** call, const char* name, CUresult code) noexcept nogil:
    call[0] = name
    return code


cdef void forget_after_fork() noexcept nogil:
    global dropped
    dropped = NULL              # the parent ends them


on_fork(NULL, NULL, forget_after_fork)
