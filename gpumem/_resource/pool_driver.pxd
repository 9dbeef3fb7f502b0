"""The driver's calls of a DriverPool: blocks without the interpreter, pools with it.

Also figures of the memory of a device: those of the driver, and those of this process's resources.
"""

from libc.stdint cimport uint64_t

from gpumem._buffer cimport BlockLedger, LedgerBlock, MemoryResource
from gpumem._native.driver cimport (
    CUdeviceptr, CUmemoryPool, CUmemPool_attribute, CUmemPoolPtrExportData, CUresult, CUstream,
    DeviceContext, DriverDevice,
)
from gpumem._support.retired cimport Retired

cdef struct PoolCore:
    BlockLedger ledger          # first: a pointer to one is a pointer to the other
    CUmemoryPool pool           # NULL until there is one
    bint owned                  # destroy the pool with the last reference
    Retired* refused            # blocks that the driver did not free yet

cdef struct PoolBlock:
    LedgerBlock block           # first
    bint imported               # another process's

cdef inline PoolCore* pool_core(BlockLedger* ledger) noexcept nogil:
    return <PoolCore*>ledger

# Allocates in the order of the block's stream.
cdef CUresult pool_take(LedgerBlock* block) noexcept nogil
# `BlockLedger.free` and `.end`.
cdef void pool_free(LedgerBlock* block) noexcept nogil
cdef void pool_free_view(LedgerBlock* block) noexcept nogil
cdef void pool_end(BlockLedger* ledger) noexcept nogil
# Waits for the device, then frees refused blocks again; returns whether one was freed.
cdef bint pool_free_refused(PoolCore* core) noexcept nogil
# Destroys the pool if it is owned.
cdef void pool_destroy(PoolCore* core) noexcept nogil
cdef CUresult pool_destroy_native(DeviceContext* context, CUmemoryPool pool) noexcept nogil

# ConfigError where pools cannot be shared between processes.
cdef int pool_require_sharing(DriverDevice driver_device, object memory) except -1
# A new pool with a PoolConfig's settings.
cdef CUmemoryPool pool_make(DriverDevice driver_device, object config) except? NULL
# The settings of an existing pool; the driver validates the handle.
cdef object pool_config(PoolCore* core)
# Returns whether another device, by its ordinal, has access; lets it access the pool.
cdef bint pool_lets(PoolCore* core, int device) except -1
cdef int pool_let(PoolCore* core, int device) except -1
cdef uint64_t pool_attribute(PoolCore* core, CUmemPool_attribute which) except? <uint64_t>-1


# ---- Blocks of other processes' pools: opened once per process
#
# A driver returns the same address for the same pointer, and one free ends all uses; so uses are
# counted here. The caller has made the device's context current.


# One more use of the block that a note names.
cdef CUresult pool_import_pointer(DeviceContext* context, CUmemoryPool pool,
                                  CUmemPoolPtrExportData* note, CUdeviceptr* base) noexcept nogil
# One use less, after the work queued on `stream`; the last use frees the block. If the driver
# refuses, the use is still counted.
cdef CUresult pool_import_drop(DeviceContext* context, CUdeviceptr base,
                               CUstream stream) noexcept nogil

# The fields of OutOfMemoryReport about the device, as a dict. `owner` is the C struct of the
# resource that reports. Caller holds no lock: this calls the driver.
cdef dict device_figures(MemoryResource resource, DeviceContext* context, const void* owner)

# Whether another device has a way to a resource's memory. ConfigError if it is not another device
# of the same type, ValueError if no device has that name.
cdef bint peer_is_reached(MemoryResource resource, object device) except -1
cdef object no_way_between(object peer, object own)
