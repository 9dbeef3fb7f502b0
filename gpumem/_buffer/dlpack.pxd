"""DLPack: the interchange structs, capsules out and capsules in, the table of the C exchange API.

Layout facts of dmlc/dlpack's dlpack.h 1.3 (and of the unversioned struct before 1.0). The export
shape is the one that no consumer breaks on: `data` is the real address, `byte_offset` is 0,
`strides` is never NULL, no stride is negative, the deleter is a static C function that needs
no interpreter lock.
"""

from cpython.long cimport PyLong_AsLongAndOverflow
from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t, uint8_t

from gpumem._support.lease cimport Lease

cdef enum:
    DLPACK_MAJOR = 1
    DLPACK_NEWEST_MINOR = 3     # of what is read, and of the exchange table

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
    Lease* lease            # keeps the memory; NULL: there is none

# An export that the caller fills in, at `tensor`: data, device and dtype, and `ndim` numbers each
# of shape and strides. Takes over one lease, also when it fails; it may end on any thread, without
# the interpreter lock. `minor`: the oldest 1.x that has all fields used.
cdef Export* dlpack_export(int ndim, uint64_t flags, uint32_t minor, bint versioned,
                           Lease* lease) except NULL
# Owns the export, until a consumer takes it.
cdef object dlpack_capsule(Export* exported)
# A capsule over bytes: one dimension of uint8. Takes over one claim of the lease.
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

# What DLPack calls the device of a MemoryInfo.
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
