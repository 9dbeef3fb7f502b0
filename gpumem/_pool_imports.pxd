"""Blocks of other processes' pools: opened once per process, however often they are asked for.

A driver gives the same address for the same pointer, and one free ends it for everyone; so uses
are counted here. All functions want the device's context current.
"""

from gpumem._driver cimport (
    CUdeviceptr,
    CUmemoryPool,
    CUmemPoolPtrExportData,
    CUresult,
    CUstream,
    Place,
)

# One more use of the block that a note names.
cdef CUresult pool_import_pointer(Place* place, CUmemoryPool pool, CUmemPoolPtrExportData* note,
                                  CUdeviceptr* base) noexcept nogil
# One use less, behind what is queued on `stream`; the last gives the block back. If the driver
# refuses, the use is still there.
cdef CUresult pool_import_drop(Place* place, CUdeviceptr base, CUstream stream) noexcept nogil
