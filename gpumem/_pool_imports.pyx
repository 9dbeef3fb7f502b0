"""Counting the uses of other processes' blocks; see _pool_imports.pxd."""

from libc.stdint cimport uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy

from gpumem._driver cimport (
    CU_EVENT_DISABLE_TIMING,
    CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_SUCCESS,
    CUdeviceptr,
    CUevent,
    CUmemoryPool,
    CUmemPoolPtrExportData,
    CUresult,
    CUstream,
    Place,
)
from gpumem._support.lock cimport Lock, lock_acquire, lock_init, lock_release
from gpumem._support.process cimport on_fork

cdef struct Import:
    Place* place
    CUdeviceptr base
    CUmemPoolPtrExportData note
    uint32_t uses
    CUevent ended           # behind every use that ended; made for the second use
    Import* next

# Held across driver calls, so that nobody opens a block while its last use ends.
cdef Lock lock
cdef Import* imports = NULL

lock_init(&lock)


cdef CUresult pool_import_pointer(Place* place, CUmemoryPool pool, CUmemPoolPtrExportData* note,
                                  CUdeviceptr* base) noexcept nogil:
    cdef Import* found
    cdef CUresult code = CUDA_SUCCESS
    lock_acquire(&lock)
    found = imports
    while found != NULL and (found.place != place
                             or memcmp(&found.note, note, sizeof(found.note)) != 0):
        found = found.next
    if found == NULL:
        code = open_import(place, pool, note, &found)
    elif found.ended == NULL:
        code = place.table.cuEventCreate(&found.ended, CU_EVENT_DISABLE_TIMING)
    if code == CUDA_SUCCESS:
        found.uses += 1
        base[0] = found.base
    lock_release(&lock)
    return code


cdef CUresult open_import(Place* place, CUmemoryPool pool, CUmemPoolPtrExportData* note,
                          Import** out) noexcept nogil:
    global imports
    cdef Import* made = <Import*>calloc(1, sizeof(Import))
    cdef CUresult code
    if made == NULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    code = place.table.cuMemPoolImportPointer(&made.base, pool, note)
    if code != CUDA_SUCCESS:
        free(made)
        return code
    made.place = place
    memcpy(&made.note, note, sizeof(made.note))
    made.next = imports
    imports = made
    out[0] = made
    return CUDA_SUCCESS


cdef CUresult pool_import_drop(Place* place, CUdeviceptr base, CUstream stream) noexcept nogil:
    cdef Import** at = &imports
    cdef Import* found
    cdef CUresult code = CUDA_SUCCESS
    lock_acquire(&lock)
    while at[0] != NULL and (at[0].place != place or at[0].base != base):
        at = &at[0].next
    found = at[0]
    if found == NULL:
        code = CUDA_ERROR_INVALID_VALUE
    elif found.uses > 1:
        code = end_use(found, stream)
    else:
        code = end_last_use(found, stream)
        if code == CUDA_SUCCESS:
            at[0] = found.next
            free(found)
    lock_release(&lock)
    return code


cdef CUresult end_use(Import* used, CUstream stream) noexcept nogil:
    # One event for all: this stream waits for those that ended before, then records it anew.
    cdef CUresult code = used.place.table.cuStreamWaitEvent(stream, used.ended, 0)
    if code == CUDA_SUCCESS:
        code = used.place.table.cuEventRecord(used.ended, stream)
    if code == CUDA_SUCCESS:
        used.uses -= 1
    return code


cdef CUresult end_last_use(Import* used, CUstream stream) noexcept nogil:
    cdef CUresult code = CUDA_SUCCESS
    if used.ended != NULL:
        code = used.place.table.cuStreamWaitEvent(stream, used.ended, 0)
    if code == CUDA_SUCCESS:
        code = used.place.table.cuMemFreeAsync(used.base, stream)
    if code == CUDA_SUCCESS and used.ended != NULL:
        used.place.table.cuEventDestroy(used.ended)
    return code


cdef void forget_after_fork() noexcept nogil:
    # A fork's child cannot use its parent's blocks.
    global imports
    imports = NULL
    lock_init(&lock)


on_fork(NULL, NULL, forget_after_fork)
