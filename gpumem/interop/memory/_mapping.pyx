"""Counting references to mappings, and releasing them."""

from cpython.ref cimport Py_DECREF
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from gpumem._native.driver cimport (
    context_enter, context_is_dead, context_leave, context_relax, context_restore, CUDA_SUCCESS,
    CUresult, CUstreamCaptureMode, device_wait_until, DeviceContext,
)
from gpumem._support.atomics cimport count_add, published32
from gpumem._support.memory cimport munmap
from gpumem._support.process cimport on_fork, process_is_exiting
from gpumem._support.retired cimport retire, Retired, take_retired
from gpumem.interop.timelines._core cimport timelines_in_use


# Mappings without references, which `release_retired_mappings` ends.
cdef Retired* dropped = NULL


cdef Mapping* mapping_new(DeviceContext* context, uint64_t nbytes) noexcept nogil:
    # Zeroed: each step of an import that succeeds sets its field.
    cdef Mapping* mapping = <Mapping*>calloc(1, sizeof(Mapping))
    if mapping != NULL:
        mapping.references = 1
        mapping.context = context
        mapping.nbytes = nbytes
    return mapping


cdef void mapping_retain(Mapping* mapping) noexcept nogil:
    count_add(&mapping.references, 1)


cdef void mapping_drop(Mapping* mapping) noexcept nogil:
    if count_add(&mapping.references, -1) == 0:
        retire_mapping(mapping)


cdef bint mapping_drop_last(Mapping* mapping, CUresult* code, const char** call) noexcept nogil:
    # If the count is one, it is this reference, and no other thread can copy it. What was done
    # under the others is seen.
    if published32(<const uint32_t*>&mapping.references) > 1:
        return False
    mapping.references = 0
    code[0] = end_or_retire(mapping, call)
    return True


cdef bint mapping_holds_caller(Mapping* mapping) noexcept nogil:
    return (mapping.is_registered and not mapping.file_bytes and mapping.owner == NULL
            and timelines_in_use(mapping.context))


cdef CUresult mapping_wait(Mapping* mapping, uint64_t until, bint* interrupted) noexcept nogil:
    cdef CUstreamCaptureMode before
    cdef CUresult code
    interrupted[0] = False
    if (not mapping.was_used or context_is_dead(mapping.context)
            or timelines_in_use(mapping.context)):
        return CUDA_SUCCESS
    before = context_relax(mapping.context)
    code = device_wait_until(mapping.context, until, interrupted)
    context_restore(mapping.context, before)
    return code


cdef void release_retired_mappings() noexcept nogil:
    cdef Retired* link = take_retired(&dropped)
    cdef Mapping* mapping
    cdef const char* call = NULL
    while link != NULL:
        mapping = <Mapping*>link.thing
        link = link.next
        end_or_retire(mapping, &call)       # a failure has no caller to report to


cdef CUresult end_or_retire(Mapping* mapping, const char** call) noexcept nogil:
    # The end may wait for the device, and the device for a signal of this thread.
    if timelines_in_use(mapping.context):
        retire_mapping(mapping)
        return CUDA_SUCCESS
    return mapping_end(mapping, call)


cdef void retire_mapping(Mapping* mapping) noexcept nogil:
    # A later call ends it: that may wait for a stream, which perhaps waits for this thread.
    retire(&dropped, &mapping.end, mapping)


cdef CUresult mapping_end(Mapping* mapping, const char** call) noexcept nogil:
    # Waits for work on the device that may use it. After a failure, returned with the call's name,
    # `release_retired_mappings` tries again what the driver refused.
    cdef CUresult code = CUDA_SUCCESS
    # In a fork's child the driver's objects are the parent's; file pages were shared with it.
    if not context_is_dead(mapping.context):
        code = end_in_driver(mapping, call)
    if code != CUDA_SUCCESS:
        retire_mapping(mapping)     # the next call tries again what was refused
        return code
    if mapping.file_bytes:
        munmap(<void*>mapping.address, mapping.file_bytes)
    if mapping.owner != NULL and not process_is_exiting():
        with gil:
            Py_DECREF(<object>mapping.owner)
    free(mapping)
    return CUDA_SUCCESS


cdef CUresult end_in_driver(Mapping* mapping, const char** call) noexcept nogil:
    cdef CUresult code = context_enter(mapping.context)
    cdef CUstreamCaptureMode before
    if code != CUDA_SUCCESS:
        call[0] = "cuCtxPushCurrent"
        return code
    before = context_relax(mapping.context)
    code = release_all(mapping, call)
    context_restore(mapping.context, before)
    context_leave(mapping.context)
    return code


cdef CUresult release_all(Mapping* mapping, const char** call) noexcept nogil:
    # In the reverse order of the import. What the driver takes back is forgotten; the rest stays.
    cdef DeviceContext* context = mapping.context
    cdef CUresult code = CUDA_SUCCESS
    # Freeing a buffer waits by itself; an owner may hand its memory out again at once.
    if mapping.was_used and not mapping.buffer:
        code = called(call, "cuCtxSynchronize", context.table.cuCtxSynchronize())
    if code == CUDA_SUCCESS and mapping.buffer:
        code = called(call, "cuMemFree", context.table.cuMemFree(mapping.buffer))
        if code == CUDA_SUCCESS:
            mapping.buffer = 0
    if code == CUDA_SUCCESS and mapping.external != NULL:
        code = called(call, "cuDestroyExternalMemory",
                      context.table.cuDestroyExternalMemory(mapping.external))
        if code == CUDA_SUCCESS:
            mapping.external = NULL
    if code == CUDA_SUCCESS and mapping.is_mapped:
        code = called(call, "cuMemUnmap",
                      context.table.cuMemUnmap(mapping.address, mapping.nbytes))
        mapping.is_mapped = code != CUDA_SUCCESS
    if code == CUDA_SUCCESS and mapping.range_bytes:
        code = called(call, "cuMemAddressFree",
                      context.table.cuMemAddressFree(mapping.address, mapping.range_bytes))
        if code == CUDA_SUCCESS:
            mapping.range_bytes = 0
    if code == CUDA_SUCCESS and mapping.physical:
        code = called(call, "cuMemRelease", context.table.cuMemRelease(mapping.physical))
        if code == CUDA_SUCCESS:
            mapping.physical = 0
    if code == CUDA_SUCCESS and mapping.is_registered:
        code = called(call, "cuMemHostUnregister",
                      context.table.cuMemHostUnregister(<void*>mapping.address))
        mapping.is_registered = code != CUDA_SUCCESS
    return code


cdef inline CUresult called(const char** call, const char* name, CUresult code) noexcept nogil:
    call[0] = name
    return code


cdef void forget_after_fork() noexcept nogil:
    global dropped
    dropped = NULL              # the parent's to end


on_fork(NULL, NULL, forget_after_fork)
