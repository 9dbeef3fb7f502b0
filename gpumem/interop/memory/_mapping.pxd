"""Mapping: what the driver and the system hold for one import, counted without the interpreter.

The ExternalMemory, and each buffer over it with its views, hold one reference each. Whoever drops
the last one leaves the mapping on a list; `mappings_reap` gives it back where waiting is allowed,
because a driver's free may wait for work that somebody has yet to signal.
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
    # What to give back, in this order; 0 or NULL: there is none.
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
# Ends a mapping that nobody refers to; waits for what the device may still do with it. Goes on
# after a failure and returns the first, with the call's name.
cdef CUresult mapping_end(Mapping* mapping, const char** call) noexcept nogil
# The last reference is given up and the mapping ended at once; False: others refer to it.
cdef bint mapping_end_last(Mapping* mapping, CUresult* code, const char** call) noexcept nogil
# Ends all that were dropped, but for those whose end might wait for a timeline's value.
cdef void mappings_reap() noexcept nogil
