"""DLPack's C exchange API: the five functions behind ``type(x).__dlpack_c_exchange_api__``.

None of them has to synchronise. A GPU's tensor is ordered before the legacy default stream,
which is what `current_work_stream` names; the CPU's is waited for, because it has no stream.
"""

from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t

from gpumem._buffer cimport (
    DL_CPU, DL_CUDA, DLManagedTensorVersioned, DLPACK_MAJOR, DLPACK_NEWEST_MINOR, DLTensor,
    exchange_table, Incoming, incoming_versioned, require_open, set_error,
)
from gpumem._defaults cimport serving
from gpumem._support.deferred cimport interrupt_again
from gpumem._tensor.imports cimport read_shape, tensor_of_incoming
from gpumem._tensor.layout cimport element_named, ElementType, Layout
from gpumem._tensor.tensor cimport (
    export_order, Tensor, tensor_allocate, tensor_describe, tensor_export, tensor_find_words,
    tensor_flags,
)


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
    # Borrowed: the consumer keeps the object while it reads, so there is no lease.
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
    tensor = tensor_allocate(serving(memory), element, layout.ndim, layout.shape, None, False)
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
