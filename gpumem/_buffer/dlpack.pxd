"""DLPack: the interchange structs, capsules out and capsules in, the table of the C exchange API.

Layout facts of dmlc/dlpack's dlpack.h 1.3 (and of the unversioned struct before 1.0). The export
shape is the one that no consumer breaks on: `data` is the real address, `byte_offset` is 0,
`strides` is never NULL, no stride is negative, the deleter is a static C function that needs
no interpreter lock.
"""

from cpython.long cimport PyLong_AsLongAndOverflow
from cpython.object cimport PyObject, PyTypeObject
from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t, uint8_t

from gpumem._support.lease cimport Lease, lease_view_room

cdef enum:
    DLPACK_MAJOR = 1
    DLPACK_NEWEST_MINOR = 3     # the newest that is read, and that of the exchange table

cdef enum DLDeviceType:
    DL_CPU = 1
    DL_CUDA = 2
    DL_CUDA_HOST = 3
    DL_CUDA_MANAGED = 13

cdef enum DLTypeCode:
    DL_INT = 0
    DL_UINT = 1
    DL_FLOAT = 2
    DL_BFLOAT = 4
    DL_COMPLEX = 5
    DL_BOOL = 6
    DL_FLOAT8_E3M4 = 7          # from 1.1 on, to DL_FLOAT8_E8M0FNU
    DL_FLOAT8_E4M3 = 8
    DL_FLOAT8_E4M3B11FNUZ = 9
    DL_FLOAT8_E4M3FN = 10
    DL_FLOAT8_E4M3FNUZ = 11
    DL_FLOAT8_E5M2 = 12
    DL_FLOAT8_E5M2FNUZ = 13
    DL_FLOAT8_E8M0FNU = 14

cdef enum DLFlags:
    DL_READ_ONLY = 1
    DL_IS_COPIED = 2

cdef struct DLDevice:
    int32_t device_type
    int32_t device_id

cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct DLTensor:
    void* data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t* shape
    int64_t* strides        # in elements
    uint64_t byte_offset

cdef struct DLManagedTensor:
    DLTensor dl_tensor
    void* manager_ctx
    void (*deleter)(DLManagedTensor*) noexcept nogil

cdef struct DLPackVersion:
    uint32_t major
    uint32_t minor

cdef struct DLManagedTensorVersioned:
    DLPackVersion version
    void* manager_ctx
    void (*deleter)(DLManagedTensorVersioned*) noexcept nogil
    uint64_t flags
    DLTensor dl_tensor

# ---- out -----------------------------------------------------------------------------------------

cdef union Managed:
    DLManagedTensor legacy
    DLManagedTensorVersioned versioned

# One block of memory: the managed struct first, so that its address is the block's; the numbers of
# shape and strides follow.
cdef struct Export:
    Managed managed
    DLTensor* tensor        # inside `managed`
    bint versioned
    bint in_lease           # the block is `view_room` of the lease, which frees it
    Lease* lease            # keeps the memory; NULL: there is none

cdef enum:
    LEASE_RANK = 4          # dimensions for which a lease has room

# Makes an export. The caller then sets data, device and dtype of `tensor`, and `ndim` numbers each
# of shape and strides. It owns one lease, also when it fails; that may end on any thread, without
# the interpreter lock. `minor`: the oldest 1.x that has all fields used.
cdef inline Export* dlpack_export(int ndim, uint64_t flags, uint32_t minor, bint versioned,
                                  Lease* lease) except NULL:
    cdef Export* exported = NULL
    # One view at a time is the usual case, and needs no memory of its own.
    if lease != NULL and ndim <= LEASE_RANK:
        exported = <Export*>lease_view_room(
            lease, sizeof(Export) + 2 * LEASE_RANK * sizeof(int64_t))
    cdef bint in_lease = exported != NULL
    if not in_lease:
        exported = allocate_export(ndim, lease)
    exported.lease = lease
    exported.in_lease = in_lease
    exported.versioned = versioned
    if versioned:
        exported.tensor = &exported.managed.versioned.dl_tensor
        exported.managed.versioned.version.major = DLPACK_MAJOR
        exported.managed.versioned.version.minor = minor
        exported.managed.versioned.manager_ctx = NULL
        exported.managed.versioned.deleter = delete_versioned
        exported.managed.versioned.flags = flags
    else:
        exported.tensor = &exported.managed.legacy.dl_tensor
        exported.managed.legacy.manager_ctx = NULL
        exported.managed.legacy.deleter = delete_legacy
    exported.tensor.ndim = ndim
    exported.tensor.shape = <int64_t*>(exported + 1)
    exported.tensor.strides = exported.tensor.shape + ndim
    exported.tensor.byte_offset = 0
    return exported


cdef Export* allocate_export(int ndim, Lease* lease) except NULL
cdef void delete_legacy(DLManagedTensor* managed) noexcept nogil
cdef void delete_versioned(DLManagedTensorVersioned* managed) noexcept nogil

# Owns the export, until a consumer takes it.
cdef object dlpack_capsule(Export* exported)
# A capsule over bytes: one dimension of uint8. It owns one claim of the lease.
cdef object dlpack_bytes(uint64_t address, uint64_t nbytes, DLDevice device, bint read_only,
                         bint versioned, Lease* lease)

# Whether a consumer's max_version admits the versioned struct; ValueError for anything but a pair.
cdef inline bint dlpack_wants_versioned(object max_version) except -1:
    cdef int overflow
    if max_version is None:
        return False
    if type(max_version) is tuple and len(<tuple>max_version) == 2:
        newest = (<tuple>max_version)[0]
        if type(newest) is int:     # as every consumer writes it
            return PyLong_AsLongAndOverflow(newest, &overflow) >= DLPACK_MAJOR or overflow > 0
    return wants_versioned(max_version)


cdef bint wants_versioned(object max_version) except -1

# ---- calls of __dlpack__ -------------------------------------------------------------------------

cdef extern from *:
    """
    /* The method is called through `quick` from now on; returns its own way. */
    static inline vectorcallfunc gm_call_first(PyObject *method, vectorcallfunc quick) {
        vectorcallfunc *slot =
            (vectorcallfunc *)((char *)method + Py_TYPE(method)->tp_vectorcall_offset);
        vectorcallfunc general = *slot;
        *slot = quick;
        return general;
    }
    """
    ctypedef object (*vectorcall "vectorcallfunc")(PyObject* method, PyObject* const* arguments,
                                                   size_t count, PyObject* names)
    vectorcall call_first "gm_call_first" (object method, vectorcall quick)

# The arguments of a call, borrowed; None for an argument that was not passed.
cdef struct DLPackCall:
    PyObject* stream
    PyObject* max_version
    PyObject* dl_device
    PyObject* copy

# Reads a call of a method of `owner`. False: it is not a usual one, and is left to Cython, which
# also raises for invalid arguments.
cdef bint dlpack_read_call(PyTypeObject* owner, PyObject* const* arguments, size_t count,
                           PyObject* names, DLPackCall* call) noexcept

# DLPack's device of a MemoryInfo.
cdef DLDevice dlpack_device_of(object memory) except *
cdef DLDevice dlpack_device_from(object pair) except *
cdef int dlpack_check_stream(DLDevice device, object stream) except -1
cdef bint same_device(DLDevice a, DLDevice b) noexcept nogil

# ---- in ------------------------------------------------------------------------------------------

# A producer's managed tensor, of either kind.
cdef struct Incoming:
    void* managed
    bint versioned
    uint64_t flags
    DLTensor* tensor

# Reads a capsule without consuming it; BufferError for anything but DLPack 1.x or older.
cdef int dlpack_peek(object capsule, Incoming* incoming) except -1
cdef void incoming_versioned(DLManagedTensorVersioned* managed, Incoming* incoming) noexcept nogil
# Marks the capsule as consumed: the deleter is the caller's to call, once.
cdef int dlpack_take(object capsule, const Incoming* incoming) except -1
cdef void dlpack_delete(void* managed, bint versioned) noexcept nogil

# ---- the C exchange API --------------------------------------------------------------------------

ctypedef void (*set_error)(void* context, const char* kind, const char* message) noexcept nogil

cdef struct DLPackExchangeAPI:
    DLPackVersion version
    void* prev_api
    int (*managed_tensor_allocator)(DLTensor* prototype, DLManagedTensorVersioned** out,
                                    void* error_context, set_error error) noexcept nogil
    int (*managed_tensor_from_py_object_no_sync)(void* tensor,
                                                 DLManagedTensorVersioned** out) except -1
    int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned* managed,
                                               void** out) except -1
    int (*dltensor_from_py_object_no_sync)(void* tensor, DLTensor* out) except -1
    int (*current_work_stream)(int device_type, int32_t device_id, void** out) noexcept nogil

# One table for the life of the process; _exchange fills it in.
cdef DLPackExchangeAPI exchange_table
cdef object exchange_capsule()
