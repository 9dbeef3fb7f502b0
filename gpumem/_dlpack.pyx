"""Making DLPack capsules; see _dlpack.pxd for the layout and the rules of export."""

from cpython.pycapsule cimport (
    PyCapsule_GetPointer,
    PyCapsule_IsValid,
    PyCapsule_New,
)
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

# Static: a consumer renames the capsule to the "used_" form and keeps the pointer to the name.
cdef const char* LEGACY = "dltensor"
cdef const char* VERSIONED = "dltensor_versioned"

# One block of memory per capsule: the managed struct first, so that the deleter finds the rest.
cdef struct LegacyExport:
    DLManagedTensor managed
    void* owner
    owner_release release

cdef struct VersionedExport:
    DLManagedTensorVersioned managed
    void* owner
    owner_release release


cdef void delete_legacy(DLManagedTensor* managed) noexcept nogil:
    cdef LegacyExport* exported = <LegacyExport*>managed
    exported.release(exported.owner)
    free(exported)


cdef void delete_versioned(DLManagedTensorVersioned* managed) noexcept nogil:
    cdef VersionedExport* exported = <VersionedExport*>managed
    exported.release(exported.owner)
    free(exported)


# A capsule that nobody consumed, or whose consumer refused it, keeps its first name: free it then.
cdef void drop_legacy(object capsule) noexcept:
    if PyCapsule_IsValid(capsule, LEGACY):
        delete_legacy(<DLManagedTensor*>PyCapsule_GetPointer(capsule, LEGACY))


cdef void drop_versioned(object capsule) noexcept:
    if PyCapsule_IsValid(capsule, VERSIONED):
        delete_versioned(<DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, VERSIONED))


cdef inline void describe(DLTensor* target, const DLTensor* source,
                          int64_t* numbers) noexcept nogil:
    target[0] = source[0]
    target.shape = numbers
    target.strides = numbers + source.ndim
    target.byte_offset = 0
    memcpy(target.shape, source.shape, source.ndim * sizeof(int64_t))
    memcpy(target.strides, source.strides, source.ndim * sizeof(int64_t))


cdef object dlpack_capsule(const DLTensor* tensor, uint64_t flags, bint versioned,
                           void* owner, owner_release release):
    cdef size_t numbers = 2 * tensor.ndim * sizeof(int64_t)
    cdef LegacyExport* legacy
    cdef VersionedExport* modern
    if versioned:
        modern = <VersionedExport*>malloc(sizeof(VersionedExport) + numbers)
        if modern == NULL:
            raise MemoryError("no host memory for a DLPack capsule")
        describe(&modern.managed.dl_tensor, tensor, <int64_t*>(modern + 1))
        modern.managed.version.major = DLPACK_MAJOR
        modern.managed.version.minor = DLPACK_MINOR
        modern.managed.manager_ctx = NULL
        modern.managed.deleter = delete_versioned
        modern.managed.flags = flags
        modern.owner = owner
        modern.release = release
        try:
            return PyCapsule_New(modern, VERSIONED, drop_versioned)
        except BaseException:
            free(modern)
            raise
    if flags & DL_READ_ONLY:
        raise BufferError("read-only memory needs a versioned DLPack capsule: ask with "
                          "max_version=(1, 0)")
    legacy = <LegacyExport*>malloc(sizeof(LegacyExport) + numbers)
    if legacy == NULL:
        raise MemoryError("no host memory for a DLPack capsule")
    describe(&legacy.managed.dl_tensor, tensor, <int64_t*>(legacy + 1))
    legacy.managed.manager_ctx = NULL
    legacy.managed.deleter = delete_legacy
    legacy.owner = owner
    legacy.release = release
    try:
        return PyCapsule_New(legacy, LEGACY, drop_legacy)
    except BaseException:
        free(legacy)
        raise


cdef bint dlpack_wants_versioned(object max_version) except -1:
    """Tell whether a consumer's max_version admits the versioned struct."""
    if max_version is None:
        return False
    if type(max_version) is tuple and len(max_version) == 2 and type(max_version[0]) is int:
        return max_version[0] >= DLPACK_MAJOR
    try:
        major, _ = max_version
        major = int(major)
    except (TypeError, ValueError) as error:
        raise ValueError(f"max_version {max_version!r} is not a pair of integers") from error
    return major >= DLPACK_MAJOR
