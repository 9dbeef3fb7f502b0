"""DLPack capsules: the interchange structs, and one way to make them.

Layout facts of dmlc/dlpack's dlpack.h 1.0 (and of the unversioned struct before it). The export
shape is the one that no consumer breaks on: `data` is the real address, `byte_offset` is 0,
`strides` is never NULL, no stride is negative, the deleter is a static C function that needs
no interpreter lock.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef enum:
    DLPACK_MAJOR = 1
    DLPACK_MINOR = 0

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

# Who keeps the memory: called exactly once per capsule, from any thread, without the GIL.
ctypedef void (*owner_release)(void* owner) noexcept nogil

# Makes a capsule over a description; takes over one reference of `owner` if it succeeds, else
# (an exception is set) leaves it with the caller. shape and strides are copied.
cdef object dlpack_capsule(const DLTensor* tensor, uint64_t flags, bint versioned,
                           void* owner, owner_release release)
cdef bint dlpack_wants_versioned(object max_version) except -1
