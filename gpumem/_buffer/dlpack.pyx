"""DLPack capsules made and read."""

from operator import index

from cpython.object cimport PyObject, PyTypeObject
from cpython.pycapsule cimport (
    PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New, PyCapsule_SetName,
)
from cpython.ref cimport Py_DECREF, Py_INCREF, Py_XDECREF
from libc.stdint cimport int64_t, uint8_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from gpumem._support.lease cimport Lease, lease_drop

from gpumem.device import MemoryKind


cdef extern from "Python.h":
    # NULL with an exception set: checked by hand, because the owner is released first.
    PyObject* new_capsule "PyCapsule_New" (void* pointer, const char* name,
                                           void (*destructor)(PyObject*) noexcept)
    const char* name_of "PyCapsule_GetName" (PyObject* capsule)
    void* pointer_in "PyCapsule_GetPointer" (PyObject* capsule, const char* name)
    Py_ssize_t positional "PyVectorcall_NARGS" (size_t count)
    PyTypeObject* Py_TYPE(PyObject* thing)


# Static: a consumer renames the capsule to the "used_" form and keeps the pointer to the name.
cdef const char* LEGACY = "dltensor"
cdef const char* VERSIONED = "dltensor_versioned"
cdef const char* USED_LEGACY = "used_dltensor"
cdef const char* USED_VERSIONED = "used_dltensor_versioned"
cdef const char* EXCHANGE = "dlpack_exchange_api"

# ---- out -----------------------------------------------------------------------------------------

cdef inline void end_export(Export* exported) noexcept nogil:
    cdef Lease* lease = exported.lease
    if not exported.in_lease:
        free(exported)
    lease_drop(lease)       # from here on `view_room` may be another view's, or freed


cdef void delete_legacy(DLManagedTensor* managed) noexcept nogil:
    end_export(<Export*>managed)


cdef void delete_versioned(DLManagedTensorVersioned* managed) noexcept nogil:
    end_export(<Export*>managed)


# A capsule that was not consumed, or that its consumer refused, keeps its first name: its
# destructor frees it then. All other names begin with "used_".
cdef void drop_capsule(PyObject* capsule) noexcept:
    cdef const char* name = name_of(capsule)
    if name[0] != b"u":
        end_export(<Export*>pointer_in(capsule, name))


cdef Export* allocate_export(int ndim, Lease* lease) except NULL:
    cdef Export* exported = <Export*>malloc(sizeof(Export) + 2 * ndim * sizeof(int64_t))
    if exported == NULL:
        lease_drop(lease)
        raise MemoryError("out of host memory while exporting a DLPack tensor")
    return exported


cdef object dlpack_capsule(Export* exported):
    cdef PyObject* capsule = new_capsule(exported, VERSIONED if exported.versioned else LEGACY,
                                         drop_capsule)
    if capsule == NULL:
        end_export(exported)
        raise MemoryError("out of host memory while exporting a DLPack capsule")
    made = <object>capsule
    Py_DECREF(made)     # the cast took a reference of its own
    return made


cdef object dlpack_bytes(uint64_t address, uint64_t nbytes, DLDevice device, bint read_only,
                         bint versioned, Lease* lease):
    cdef Export* exported = dlpack_export(1, DL_READ_ONLY if read_only else 0, 0, versioned, lease)
    exported.tensor.data = <void*>address
    exported.tensor.device = device
    exported.tensor.dtype.code = DL_UINT
    exported.tensor.dtype.bits = 8
    exported.tensor.dtype.lanes = 1
    exported.tensor.shape[0] = nbytes
    exported.tensor.strides[0] = 1
    return dlpack_capsule(exported)


cdef bint wants_versioned(object max_version) except -1:
    try:
        major, _ = max_version
        major = int(major)
    except (TypeError, ValueError) as error:
        raise ValueError(f"max_version {max_version!r} is not a pair of integers") from error
    return major >= DLPACK_MAJOR


# ---- calls of __dlpack__ -------------------------------------------------------------------------

# The place of each argument in a call; 0: it is not passed.
cdef struct CallShape:
    PyObject* names         # of the keywords, a reference; NULL: no shape yet
    uint8_t stream, max_version, dl_device, copy

# A consumer calls with the same tuple each time: its names are compared once. The reference keeps
# others from its address. Changed with the interpreter lock.
cdef CallShape[8] known_shapes


cdef bint dlpack_read_call(PyTypeObject* owner, PyObject* const* arguments, size_t count,
                           PyObject* names, DLPackCall* call) noexcept:
    cdef CallShape* shape
    if positional(count) != 1 or Py_TYPE(arguments[0]) != owner:
        return False
    call.stream = call.max_version = call.dl_device = call.copy = <PyObject*>None
    if names == NULL:
        return True
    shape = &known_shapes[(<uintptr_t>names >> 4) % 8]
    if shape.names != names and not learn_shape(names, shape):
        return False
    if shape.stream:
        call.stream = arguments[shape.stream]
    if shape.max_version:
        call.max_version = arguments[shape.max_version]
    if shape.dl_device:
        call.dl_device = arguments[shape.dl_device]
    if shape.copy:
        call.copy = arguments[shape.copy]
    return True


cdef bint learn_shape(PyObject* names, CallShape* shape) noexcept:
    cdef CallShape found
    cdef PyObject* before = shape.names
    cdef uint8_t at = 0
    memset(&found, 0, sizeof(found))
    for name in <tuple>names:
        at += 1
        if type(name) is not str:       # a subclass compares as it likes
            return False
        if name == "stream":
            found.stream = at
        elif name == "max_version":
            found.max_version = at
        elif name == "dl_device":
            found.dl_device = at
        elif name == "copy":
            found.copy = at
        else:
            return False
    found.names = names
    Py_INCREF(<object>names)
    shape[0] = found
    Py_XDECREF(before)
    return True


cdef DLDevice dlpack_device_of(object memory) except *:
    # Host memory is exported as CPU memory, also when it is pinned: most consumers refuse others.
    cdef DLDevice device
    device.device_id = 0
    if memory.kind is MemoryKind.DEVICE:
        device.device_type = DL_CUDA
        device.device_id = memory.device.index
    elif memory.kind is MemoryKind.MANAGED:
        device.device_type = DL_CUDA_MANAGED
    else:
        device.device_type = DL_CPU
    return device


cdef DLDevice dlpack_device_from(object pair) except *:
    """Read DLPack's (device type, device id); ValueError for anything but a pair of integers."""
    cdef DLDevice device
    try:
        device_type, device_id = pair
        device.device_type = index(device_type)
        device.device_id = index(device_id)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"DLPack device {pair!r} is not a pair of integers (type, id)") from error
    return device


cdef int dlpack_check_stream(DLDevice device, object stream) except -1:
    """Refuse a consumer's stream that the protocol does not have for the device."""
    if stream is None:
        return 0
    if device.device_type in (DL_CPU, DL_CUDA_HOST):
        if stream != -1:
            raise BufferError(f"stream {stream!r} has no meaning for host memory")
    elif (isinstance(stream, bool) or not isinstance(stream, int) or stream == 0
            or not -1 <= stream < 1 << 64):
        raise ValueError(f"stream {stream!r} is not None, -1 or a stream handle above 0")
    return 0


cdef bint same_device(DLDevice a, DLDevice b) noexcept nogil:
    return a.device_type == b.device_type and a.device_id == b.device_id


# ---- in ------------------------------------------------------------------------------------------

cdef int dlpack_peek(object capsule, Incoming* incoming) except -1:
    cdef DLManagedTensorVersioned* modern
    if PyCapsule_IsValid(capsule, VERSIONED):
        modern = <DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, VERSIONED)
        incoming_versioned(modern, incoming)
        if modern.version.major != DLPACK_MAJOR:
            # No field after the version may be read; the capsule's own destructor frees it.
            raise BufferError(f"DLPack {modern.version.major}.{modern.version.minor} is not "
                              f"supported: expected {DLPACK_MAJOR}.x or the unversioned struct "
                              "before it")
    elif PyCapsule_IsValid(capsule, LEGACY):
        incoming.managed = PyCapsule_GetPointer(capsule, LEGACY)
        incoming.versioned = False
        incoming.flags = 0
        incoming.tensor = &(<DLManagedTensor*>incoming.managed).dl_tensor
    elif PyCapsule_IsValid(capsule, USED_VERSIONED) or PyCapsule_IsValid(capsule, USED_LEGACY):
        raise BufferError("this DLPack capsule was already consumed")
    else:
        raise BufferError(f"{capsule!r} is not a DLPack capsule")
    return 0


cdef void incoming_versioned(DLManagedTensorVersioned* managed, Incoming* incoming) noexcept nogil:
    incoming.managed = managed
    incoming.versioned = True
    incoming.flags = managed.flags
    incoming.tensor = &managed.dl_tensor


cdef int dlpack_take(object capsule, const Incoming* incoming) except -1:
    PyCapsule_SetName(capsule, USED_VERSIONED if incoming.versioned else USED_LEGACY)
    return 0


cdef void dlpack_delete(void* managed, bint versioned) noexcept nogil:
    # A NULL deleter means that the producer needs no call.
    cdef DLManagedTensorVersioned* modern
    cdef DLManagedTensor* legacy
    if versioned:
        modern = <DLManagedTensorVersioned*>managed
        if modern.deleter != NULL:
            modern.deleter(modern)
    else:
        legacy = <DLManagedTensor*>managed
        if legacy.deleter != NULL:
            legacy.deleter(legacy)


# ---- the C exchange API --------------------------------------------------------------------------

cdef object exchange_capsule():
    return PyCapsule_New(&exchange_table, EXCHANGE, NULL)
