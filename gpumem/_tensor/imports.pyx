"""Tensors over memory of other libraries: DLPack and its C API, the CUDA array interface, NumPy."""

cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, INT64_MAX, int64_t, uint32_t, UINT64_MAX, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from gpumem._buffer cimport (
    BorrowedMemory, Buffer, buffer_of, DL_CPU, DL_CUDA, DL_CUDA_HOST, DL_CUDA_MANAGED, DL_READ_ONLY,
    DLDevice, DLManagedTensorVersioned, dlpack_delete, DLPACK_MAJOR, DLPACK_NEWEST_MINOR,
    dlpack_peek, dlpack_take, DLTensor, exchange_table, Incoming, incoming_versioned, order_settled,
    order_written, require_open, set_error, stream_handle,
)
from gpumem._native.driver cimport (
    context_is_dead, context_leave, CU_MEMORYTYPE_DEVICE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CUpointer_attribute,
    CUstream, device_enter, DeviceContext, DriverDevice, pointer_value,
)
from gpumem._support.memory cimport require_memory
from gpumem._support.process cimport interrupt_again, process_is_exiting
from gpumem._support.streams cimport LEGACY_STREAM
from gpumem._tensor.export cimport export_order
from gpumem._tensor.layout cimport (
    element_named, element_of, ElementType, Layout, layout_c_strides, layout_extent, layout_size,
    MAX_RANK, numpy, shape_from,
)
from gpumem._tensor.tensor cimport (
    serving, Tensor, tensor_allocate, tensor_describe, tensor_export, tensor_find_words,
    tensor_flags, tensor_new, tensor_to, tensor_whole,
)

from gpumem._support.arguments import require
from gpumem.device import _count, _open_any, Device, driver_status, MemoryInfo, MemoryKind


cdef object host_info = None     # MemoryInfo("host"), made at the first use
_VERSION = (DLPACK_MAJOR, DLPACK_NEWEST_MINOR)
_OURS = (DL_CPU, DL_CUDA, DL_CUDA_HOST, DL_CUDA_MANAGED)


def from_dlpack(x, *, device=None, copy=None, stream=None):
    """Return a tensor over the memory of a DLPack producer: NumPy, PyTorch, CuPy, JAX, ...

    The tensor and its views keep the producer's memory. The producer orders its pending work before
    the stream that the tensor belongs to. Work of gpumem on other streams is ordered around that
    stream, too: name one where the legacy default stream has other work to do.
    The CPU's memory belongs to no stream unless one is named: only what gpumem does with the same
    bytes later comes after a copy.

    Parameters
    ----------
    x : object with ``__dlpack__`` and ``__dlpack_device__``
        Of a Tensor or Buffer of gpumem the result is a view.
    device : MemoryInfo, Device or str, optional
        Where the elements are wanted; None: where they are.
    copy : bool, optional
        None: only if `device` needs it. True: always. False: never.
    stream : stream, optional
        What the tensor belongs to, of the producer's device; None is its legacy default stream, or
        for memory of the CPU no stream.

    Returns
    -------
    Tensor
        Read-only if the producer's memory is, as that of JAX's arrays.

    Raises
    ------
    TypeError
        `x` is not a DLPack producer, `copy` or `stream` is invalid.
    ValueError
        `stream` is of another device than the producer's memory, or `x` is gpumem's own, which
        belongs to a stream already.
    BufferError
        The producer raises it; its dtype, device or version is not supported; its description is
        invalid; or ``copy=False`` and a copy is needed. The producer keeps its memory.

    Examples
    --------
    >>> import gpumem, numpy
    >>> array = numpy.arange(3)
    >>> gpumem.from_dlpack(array).ptr == array.ctypes.data
    True
    """
    cdef Tensor tensor
    if copy is not None:
        require("copy", copy, bool, "True, False or None")
    target = None if device is None else MemoryInfo.parse(device)
    if isinstance(x, (Tensor, Buffer)):
        require_no_stream(stream, x)
        tensor = tensor_whole(x) if isinstance(x, Tensor) else tensor_of_bytes(x)
    else:
        tensor = tensor_of_capsule(_capsule_from(x, target, stream), stream, x)
    # The capsule is consumed: even if this fails, the tensor above releases the memory.
    if target is not None or copy:
        return tensor_to(tensor, target or tensor.memory, None, copy)
    return tensor


def asarray(x, memory=None, *, stream=None):
    """Return a tensor of an array-like object, without a copy where that is possible.

    Parameters
    ----------
    x : object
        A Tensor; a NumPy array of any dtype; a DLPack producer; an object with
        ``__cuda_array_interface__`` or the buffer protocol; else what ``numpy.asarray`` takes.
    memory : MemoryInfo, Device or str, optional
        Where the elements are wanted, by the rules of `Tensor.to`; None: where they are.
    stream : stream, optional
        What a tensor over the memory of `x` belongs to; see `from_dlpack`. None is also the stream
        that a ``__cuda_array_interface__`` names.

    Returns
    -------
    Tensor
        Keeps `x`, or its memory.

    Raises
    ------
    TypeError
        Elements are Python objects.
    ValueError, BufferError
        As `from_dlpack`.

    Examples
    --------
    >>> import gpumem
    >>> gpumem.asarray([1, 2, 3]).shape
    (3,)
    """
    cdef Tensor tensor = tensor_seeing(x, stream)
    if tensor is None:
        tensor = tensor_of_ndarray(numpy().asarray(x), stream)
    return tensor if memory is None else tensor_to(tensor, memory, None, None)


cdef Tensor tensor_seeing(object x, object stream=None):
    if isinstance(x, Tensor):
        require_no_stream(stream, x)
        return x
    if isinstance(x, numpy().ndarray):
        return tensor_of_ndarray(x, stream)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return from_dlpack(x, stream=stream)
    described = getattr(x, "__cuda_array_interface__", None)
    if described is not None:
        return tensor_of_cuda_array(x, described, stream)
    try:
        x = memoryview(x)
    except TypeError:
        return None                 # numbers, lists
    return tensor_of_ndarray(numpy().asarray(x), stream)


cdef int require_no_stream(object stream, object x) except -1:
    if stream is not None:
        raise ValueError(f"invalid stream = {stream!r}: {x!r} belongs to a stream already")
    return 0


# ---- DLPack --------------------------------------------------------------------------------------

def _capsule_from(x, target, stream):
    """Return a producer's capsule; producers from before DLPack 1.0 are supported."""
    try:
        give, where = x.__dlpack__, x.__dlpack_device__
    except AttributeError:
        raise TypeError(f"{type(x).__name__} is not a DLPack producer: it lacks __dlpack__ or "
                        "__dlpack_device__") from None
    # A producer on a device that gpumem cannot open may copy to the CPU itself.
    device_type, ordinal = where()
    if device_type not in _OURS and target is not None and target.device.type == "host":
        return give(max_version=_VERSION, dl_device=(DL_CPU, 0))
    if device_type == DL_CUDA:
        return _given_on(ordinal, give, stream)
    return _given(give)


def _given_on(ordinal, give, stream):
    """Call it with the producer's device current, which a default stream's handle refers to."""
    cdef DriverDevice driver_device
    cdef CUstream handle = <CUstream><uintptr_t>LEGACY_STREAM
    if not driver_status().available or not 0 <= ordinal < _count("cuda"):
        return _given(give, stream=1)       # the result is rejected later
    driver_device = Device(f"cuda:{ordinal}")._open()
    if stream is not None:
        stream_handle(stream, driver_device, &handle)
    device_enter(&driver_device.context, "cuCtxPushCurrent")
    try:
        return _given(give, stream=<uintptr_t>handle or LEGACY_STREAM)
    finally:
        context_leave(&driver_device.context)


def _given(give, **order):
    try:
        return give(max_version=_VERSION, **order)
    except TypeError as error:
        # Before DLPack 1.0 there was no max_version. Any other TypeError is raised again.
        try:
            return give(**order)
        except TypeError:
            raise error from None


cdef Tensor tensor_of_capsule(object capsule, object stream, object producer):
    cdef Incoming incoming
    cdef Tensor tensor
    # The capsule is marked as used only after the tensor owns the memory.
    dlpack_peek(capsule, &incoming)
    tensor = tensor_of_incoming(&incoming, stream)
    dlpack_take(capsule, &incoming)
    # A capsule from before DLPack 1.0 has no flag for it.
    if not incoming.versioned and _is_immutable(producer):
        tensor.is_read_only = True
    return tensor


def _is_immutable(producer):
    # Of a GPU's arrays JAX says so in no protocol.
    if type(producer).__module__.partition(".")[0] in ("jax", "jaxlib"):
        return True
    try:
        return memoryview(producer).readonly
    except Exception:
        return False


cdef Tensor tensor_of_incoming(const Incoming* incoming, object stream=None):
    cdef const DLTensor* described = incoming.tensor
    cdef ElementType element = element_named(described.dtype)
    cdef Layout layout
    cdef uint64_t address = <uintptr_t>described.data
    cdef ForeignOwner* owner
    cdef Tensor tensor
    if described.byte_offset > UINT64_MAX - address:
        raise BufferError(f"DLPack tensor's byte_offset {described.byte_offset} overflows the "
                          "address space")
    read_layout(described, element.itemsize, &layout)
    tensor = tensor_over(memory_of_device(described.device, address),
                         address + described.byte_offset, element, &layout, None, stream)
    tensor.is_read_only = (incoming.flags & DL_READ_ONLY) != 0
    # CPU memory has no stream: its producer was done when it returned the capsule.
    if described.device.device_type == DL_CPU:
        order_settled(tensor.buffer)
    # The owner is set last: after a failure the memory is still the producer's.
    owner = <ForeignOwner*>tensor.buffer.handle
    owner.managed = incoming.managed
    owner.versioned = incoming.versioned
    return tensor


cdef int read_shape(const DLTensor* described, int64_t itemsize, Layout* layout) except -1:
    cdef int i
    if not 0 <= described.ndim <= MAX_RANK:
        raise BufferError(f"DLPack tensor has {described.ndim} dimensions; at most {MAX_RANK} are "
                          "supported")
    if described.ndim and described.shape == NULL:
        raise BufferError(f"DLPack tensor has {described.ndim} dimensions but no shape")
    layout.ndim = described.ndim
    for i in range(layout.ndim):
        layout.shape[i] = described.shape[i]
        if layout.shape[i] < 0:
            raise BufferError(f"DLPack tensor has {layout.shape[i]} elements in dimension {i}")
    if layout_size(layout.ndim, layout.shape, itemsize) < 0:
        raise BufferError("DLPack tensor has more than 2**63 - 1 bytes")
    # No strides mean C order.
    layout_c_strides(layout.ndim, layout.shape, itemsize, layout.strides)
    return 0


cdef int read_layout(const DLTensor* described, int64_t itemsize, Layout* layout) except -1:
    cdef int i
    read_shape(described, itemsize, layout)
    if described.strides == NULL:
        return 0
    for i in range(layout.ndim):
        if layout.shape[i] > 1:         # else it has no meaning, and producers write anything
            if not -INT64_MAX // itemsize <= described.strides[i] <= INT64_MAX // itemsize:
                raise BufferError(f"DLPack tensor's stride {described.strides[i]} overflows the "
                                  "address space")
            layout.strides[i] = described.strides[i] * itemsize
    return 0


cdef Tensor tensor_over(object memory, uint64_t address, ElementType element,
                        const Layout* layout, object owner, object stream):
    # Makes a tensor over another library's memory; BufferError if the description is impossible.
    cdef int64_t size = layout_size(layout.ndim, layout.shape, element.itemsize)
    cdef int64_t low = 0
    cdef int64_t high = 0
    cdef bint possible = layout_extent(layout.ndim, layout.shape, layout.strides,
                                       element.itemsize, &low, &high)
    cdef Tensor tensor
    # Without elements neither the address nor the strides have a meaning.
    if size == 0:
        low = high = 0
    elif address == 0:
        raise BufferError(f"array has {size} elements but a null data pointer")
    elif not possible or <uint64_t>(-low) > address or <uint64_t>high > UINT64_MAX - address:
        raise BufferError("array's extent overflows the address space")
    tensor = tensor_new(foreign_buffer(memory, address + low, high - low, owner, stream), element,
                        address, layout.ndim)
    memcpy(tensor.lengths, layout.shape, layout.ndim * sizeof(int64_t))
    memcpy(tensor.steps, layout.strides, layout.ndim * sizeof(int64_t))
    tensor.count = size
    return tensor


def tensor_on_stream(Tensor tensor not None, stream):
    """Return a tensor over the same elements that belongs to another stream of its device.

    It keeps the first one. Neither stream is ordered after the other.
    """
    cdef Buffer buffer = foreign_buffer(tensor.memory, tensor.buffer.address, tensor.buffer.nbytes,
                                        tensor, stream)
    cdef Tensor made = tensor_new(buffer, tensor.element, tensor.address, tensor.rank)
    memcpy(made.lengths, tensor.lengths, tensor.rank * sizeof(int64_t))
    memcpy(made.steps, tensor.steps, tensor.rank * sizeof(int64_t))
    made.count = tensor.count
    return made


def buffer_on_stream(memory, uint64_t address, uint64_t nbytes, owner, stream):
    """Return a buffer over the bytes of a block; the caller keeps the block. It keeps `owner`."""
    return foreign_buffer(memory, address, nbytes, owner, stream)


cdef object host_memory():
    global host_info
    if host_info is None:
        host_info = MemoryInfo("host")
    return host_info


cdef object memory_of_device(DLDevice device, uint64_t address):
    if device.device_type == DL_CPU:
        return host_memory()
    if device.device_type not in _OURS or device.device_id < 0:
        raise BufferError(f"memory of DLPack device ({device.device_type}, {device.device_id}) is "
                          "not supported")
    status = driver_status()
    if device.device_type == DL_CUDA:
        if not status.available:
            raise BufferError(f"memory of CUDA device {device.device_id}: {status.reason}")
        return MemoryInfo(f"cuda:{device.device_id}")
    # Pinned and managed memory have no device number in DLPack: the address has a device.
    kind = MemoryKind.HOST_ACCESSIBLE if device.device_type == DL_CUDA_HOST else MemoryKind.MANAGED
    if not status.available:
        return MemoryInfo("host", kind)     # the host device's own, returned by a consumer
    return MemoryInfo(f"cuda:{attribute_of(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)}",
                      kind)


cdef int attribute_of(CUpointer_attribute attribute, uint64_t address) except? -1:
    # Returns CUDA's attribute of an address; 0 if CUDA did not allocate or register it.
    return <int>pointer_value(_open_any("cuda"), attribute, address)


# ---- Buffers, NumPy, the CUDA array interface ----------------------------------------------------

cdef Tensor tensor_of_bytes(Buffer buffer):
    cdef Tensor tensor = tensor_new(buffer, element_of(numpy().uint8), buffer.address, 1)
    tensor.lengths[0] = buffer.requested_bytes
    tensor.steps[0] = 1
    tensor.count = buffer.requested_bytes
    tensor.is_read_only = buffer.home.is_read_only
    return tensor


cdef Tensor tensor_of_ndarray(object array, object stream):
    cdef ElementType element = element_of(array.dtype)
    cdef Layout layout
    cdef Tensor tensor
    # NumPy's array is the owner; its address may be that of any element of its base.
    layout.ndim = shape_from(array.shape, layout.shape)
    for i, stride in enumerate(array.strides):
        layout.strides[i] = stride
    tensor = tensor_over(host_memory(), array.__array_interface__["data"][0], element, &layout,
                         array, stream)
    tensor.is_read_only = not array.flags.writeable
    order_settled(tensor.buffer)
    return tensor


cdef Tensor tensor_of_cuda_array(object x, object described, object given):
    cdef ElementType element
    cdef Layout layout
    cdef Tensor tensor
    cdef uint64_t address
    if described.get("mask") is not None:
        raise BufferError("a masked __cuda_array_interface__ is not supported")
    address, read_only = described["data"]
    element = element_of(_dtype_of_cuda_array(described))
    layout.ndim = shape_from(described["shape"], layout.shape)
    layout_c_strides(layout.ndim, layout.shape, element.itemsize, layout.strides)
    for i, stride in enumerate(described.get("strides") or ()):
        layout.strides[i] = stride
    stream = described.get("stream")
    if stream is not None and (isinstance(stream, bool) or not isinstance(stream, int)
                               or stream < 1):
        raise ValueError(f"stream {stream!r} of a __cuda_array_interface__ is neither None nor "
                         "a handle above 0")
    # The producer keeps the stream that it names as long as `x`, so the tensor may belong to it.
    if given is None and stream is not None and stream > LEGACY_STREAM:
        given = stream
    tensor = tensor_over(_memory_at(address), address, element, &layout, x, given)
    tensor.is_read_only = read_only
    if stream is not None:
        # The producer's work is on that stream: the tensor's own is ordered after it.
        order_written(tensor.buffer, <CUstream><uintptr_t><uint64_t>stream)
    return tensor


def _dtype_of_cuda_array(described):
    # The typestr of a structured dtype is "V"; its fields are in `descr`.
    fields = described.get("descr")
    if fields is not None and described["typestr"][1] == "V":
        return numpy().dtype([tuple(field) for field in fields])
    return numpy().dtype(described["typestr"])


def _memory_at(address):
    status = driver_status()
    if not status.available:
        raise BufferError(f"memory of a __cuda_array_interface__: {status.reason}")
    # The interface names no device: the address has one. An empty array's address is 0.
    device = Device(f"cuda:{attribute_of(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)}")
    if attribute_of(CU_POINTER_ATTRIBUTE_IS_MANAGED, address):
        return MemoryInfo(device, MemoryKind.MANAGED)
    if address and (attribute_of(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
                    != CU_MEMORYTYPE_DEVICE):
        return MemoryInfo(device, MemoryKind.HOST_ACCESSIBLE)
    return MemoryInfo(device)


# ---- Buffers over memory of other libraries ------------------------------------------------------


# The owner of the memory: a DLPack producer's tensor, with a deleter to call, or an object.
cdef struct ForeignOwner:
    void* managed
    bint versioned
    PyObject* object
    DeviceContext* context  # NULL: the CPU's memory, which outlives a fork

# Text of a memory -> its resource; a fork's child makes new ones.
cdef dict resources = {}


@cython.final
cdef class ForeignMemory(BorrowedMemory):
    """The resource of buffers over memory that gpumem did not allocate.

    It allocates nothing. The memory's owner is released with the last such buffer or view.
    """

    def __init__(self, memory, stream=None):    # the base's is for resources that allocate
        # Producers order their work before its stream; those of the CPU's memory have none.
        self.borrow(memory, f"memory of other libraries on {memory}", stream,
                    memory.kind is MemoryKind.HOST, release_owner)
        self.is_foreign = True

    cdef int slot_of(self, object stream, uint32_t* slot) except -1:
        BorrowedMemory.slot_of(self, stream, slot)
        if slot[0] != 0:
            raise ValueError(f"invalid stream = {stream!r}: the owner of {self.name} frees it, and "
                             "accepts no stream: expected the buffer's own; keep the buffer until "
                             "other streams are done with it, or record them with the owner")
        return 0


cdef Buffer foreign_buffer(object memory, uint64_t address, uint64_t nbytes, object owner,
                           object stream):
    # One resource for all tensors of the legacy stream, and one for each that names another.
    cdef ForeignMemory resource = (resource_of(memory) if stream is None
                                   else ForeignMemory(memory, stream))
    # It has no block until all that can fail is done.
    cdef Buffer buffer = buffer_of(resource, address, nbytes, 0, 0, 0)
    cdef ForeignOwner* kept = <ForeignOwner*>calloc(1, sizeof(ForeignOwner))
    require_memory(kept != NULL, "importing a buffer")
    # Only a device's memory stays the parent's in a forked child.
    if memory.kind is not MemoryKind.HOST:
        kept.context = &resource.driver_device.context
    if owner is not None:
        Py_INCREF(owner)
        kept.object = <PyObject*>owner
    # Block bytes are not 0 now: an empty buffer has an owner, too.
    buffer.handle = <uint64_t>kept
    buffer.block_bytes = nbytes or 1
    return buffer


cdef ForeignMemory resource_of(object memory):
    cdef ForeignMemory known = resources.get(str(memory))
    # The key is the text, because the objects that users pass are equal, but seldom identical.
    if known is None or context_is_dead(&known.driver_device.context):
        known = ForeignMemory(memory)
        resources[str(memory)] = known
    return known


cdef void release_owner(void* kept) noexcept nogil:
    cdef ForeignOwner* owner = <ForeignOwner*>kept
    # In a forked child a GPU's memory stays the parent's.
    if owner.context == NULL or not context_is_dead(owner.context):
        # A deleter acquires the locks that it needs; it may be called on any thread.
        if owner.managed != NULL:
            dlpack_delete(owner.managed, owner.versioned)
        if owner.object != NULL and not process_is_exiting():
            with gil:
                Py_DECREF(<object>owner.object)
    free(owner)


# ---- DLPack's C exchange API: the five functions of `type(x).__dlpack_c_exchange_api__` ----------

# None of them has to synchronise. A GPU's tensor is ordered before the legacy default stream, which
# `current_work_stream` names; the CPU has no stream, so its tensor is waited for.

cdef int make_ready(Tensor tensor) except -1:
    # 1 is the legacy default stream, which `current_work_stream` names.
    tensor_find_words(tensor)
    return export_order(tensor.buffer, tensor.dl_device,
                        1 if tensor.dl_device.device_type == DL_CUDA else None)


cdef int from_py_object(void* given, DLManagedTensorVersioned** out) except -1:
    cdef Tensor tensor = <object>given
    make_ready(tensor)
    out[0] = &tensor_export(tensor, tensor.dl_device, tensor_flags(tensor), True).managed.versioned
    return 0


cdef int borrow_from_py_object(void* given, DLTensor* out) except -1:
    cdef Tensor tensor = <object>given
    make_ready(tensor)
    require_open(tensor.buffer)
    # The consumer keeps the object while it reads, so there is no lease.
    tensor_describe(tensor, tensor.dl_device, out)
    out.ndim = tensor.rank
    out.shape = tensor.lengths
    out.strides = tensor.dl_steps
    out.byte_offset = 0
    return 0


cdef int to_py_object(DLManagedTensorVersioned* managed, void** out) except -1:
    cdef Incoming incoming
    cdef Tensor tensor
    incoming_versioned(managed, &incoming)
    tensor = tensor_of_incoming(&incoming)
    # A new reference, which the caller owns.
    Py_INCREF(tensor)
    out[0] = <void*>tensor
    return 0


cdef int allocate(DLTensor* prototype, DLManagedTensorVersioned** out, void* context,
                  set_error report) noexcept nogil:
    with gil:
        try:
            allocate_like(prototype, out)
            return 0
        except BaseException as error:
            # C callers have no exception state: the error goes through their function.
            interrupt_again(error)
            report(context, type(error).__name__.encode(),
                   str(error).encode("utf-8", "replace"))
            return -1


cdef int allocate_like(const DLTensor* prototype, DLManagedTensorVersioned** out) except -1:
    cdef ElementType element = element_named(prototype.dtype)
    cdef Layout layout
    cdef Tensor tensor
    read_shape(prototype, element.itemsize, &layout)
    # The default resource of that memory, as `gpumem.empty` would use.
    if prototype.device.device_type == DL_CPU:
        memory = "host"
    elif prototype.device.device_type == DL_CUDA:
        memory = f"cuda:{prototype.device.device_id}"
    else:
        raise BufferError(f"cannot allocate a tensor on DLPack device "
                          f"({prototype.device.device_type}, {prototype.device.device_id})")
    tensor = tensor_allocate(serving(memory), element, layout.ndim, layout.shape, None, False, 0)
    return from_py_object(<void*>tensor, out)


cdef int current_work_stream(int device_type, int32_t device_id, void** out) noexcept nogil:
    out[0] = NULL       # the legacy default stream; nothing on the CPU
    return 0


# The type shows the table's address from the start; it is filled in at import, once.
exchange_table.version.major = DLPACK_MAJOR
exchange_table.version.minor = DLPACK_NEWEST_MINOR
exchange_table.prev_api = NULL
exchange_table.managed_tensor_allocator = allocate
exchange_table.managed_tensor_from_py_object_no_sync = from_py_object
exchange_table.managed_tensor_to_py_object_no_sync = to_py_object
exchange_table.dltensor_from_py_object_no_sync = borrow_from_py_object
exchange_table.current_work_stream = current_work_stream
