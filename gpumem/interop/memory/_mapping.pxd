"""What the driver and the system have of one import, with a count of references.

The ExternalMemory, and each buffer over it with its views, have one reference each. Dropping the
last one only puts the mapping on a list, because a driver's free may wait for work that has yet to
be signalled; `release_retired_mappings` ends it where waiting is allowed.
"""

from cpython.object cimport PyObject
from libc.stdint cimport int32_t, uint64_t

from gpumem._native.driver cimport (
    CUdeviceptr, CUexternalMemory, CUmemGenericAllocationHandle, CUresult, DeviceContext,
)
from gpumem._support.retired cimport Retired

cdef struct Mapping:
    int32_t references      # atomic
    DeviceContext* context
    CUdeviceptr address     # of the allocation's first byte
    uint64_t nbytes         # of the allocation
    # What to release, in this order; 0 or NULL: nothing.
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

# With one reference; NULL: no host memory.
cdef Mapping* mapping_new(DeviceContext* context, uint64_t nbytes) noexcept nogil
cdef void mapping_retain(Mapping* mapping) noexcept nogil
# On any thread, in any finalizer.
cdef void mapping_drop(Mapping* mapping) noexcept nogil
# Whether the end would be put off while it must not be: the pages are the caller's, who may free
# them then, and a stream that waits for a timeline may still use them.
cdef bint mapping_holds_caller(Mapping* mapping) noexcept nogil
# Waits until nothing queued on the device can use it any more, no longer than until a time of
# `clock_ns`; where its end would be put off, at once. CUDA_ERROR_NOT_READY: not by then.
# `interrupted`: by Ctrl-C, and the exception is set.
cdef CUresult mapping_wait(Mapping* mapping, uint64_t until, bint* interrupted) noexcept nogil
# Drops the last reference. Ends the mapping at once, and returns as `mapping_end` does, unless that
# might wait for a timeline's value. False: there are other references.
cdef bint mapping_drop_last(Mapping* mapping, CUresult* code, const char** call) noexcept nogil
# Ends all that were dropped, but for those whose end might wait for a timeline's value.
cdef void release_retired_mappings() noexcept nogil
