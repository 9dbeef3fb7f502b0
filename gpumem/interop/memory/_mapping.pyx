"""Counting references to mappings, and releasing them."""

from cpython.ref cimport Py_DECREF
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free

from gpumem._native.driver cimport (
    context_enter, context_is_dead, context_leave, context_relax, context_restore, CUDA_SUCCESS,
    CUresult, CUstreamCaptureMode, DeviceContext,
)
from gpumem._support.atomics cimport count_add
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
    # If the count is one, it is this reference, and no other thread can copy it.
    if mapping.references > 1:
        return False
    mapping.references = 0
    code[0] = end_or_retire(mapping, call)
    return True


cdef bint mapping_holds_caller(Mapping* mapping) noexcept nogil:
    return (mapping.is_registered and not mapping.file_bytes and mapping.owner == NULL
            and timelines_in_use(mapping.context))


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
    # Waits for work on the device that may use it. Continues after a failure and returns the first
    # one, with the call's name.
    cdef CUstreamCaptureMode before
    cdef CUresult first = CUDA_SUCCESS
    # In a fork's child the driver's objects are the parent's; file pages were shared with it.
    if not context_is_dead(mapping.context):
        first = context_enter(mapping.context)
        if first == CUDA_SUCCESS:
            before = context_relax(mapping.context)
            first = end_in_driver(mapping, call)
            context_restore(mapping.context, before)
            context_leave(mapping.context)
    if mapping.file_bytes and not mapping.is_registered:    # else the device may still reach them
        munmap(<void*>mapping.address, mapping.file_bytes)
    if mapping.owner != NULL and not mapping.is_registered and not process_is_exiting():
        with gil:
            Py_DECREF(<object>mapping.owner)
    free(mapping)
    return first


cdef CUresult end_in_driver(Mapping* mapping, const char** call) noexcept nogil:
    cdef DeviceContext* context = mapping.context
    cdef CUresult first = CUDA_SUCCESS
    # Freeing a buffer waits by itself; an owner may hand its memory out again at once.
    if mapping.was_used and not mapping.buffer:
        first = first_of(first, context.table.cuCtxSynchronize(), call, "cuCtxSynchronize")
    if mapping.buffer:
        first = first_of(first, context.table.cuMemFree(mapping.buffer), call, "cuMemFree")
    if mapping.external != NULL:
        first = first_of(first, context.table.cuDestroyExternalMemory(mapping.external), call,
                         "cuDestroyExternalMemory")
    # In the reverse order of the import: unmap, then free the addresses, then the memory.
    if mapping.is_mapped:
        first = first_of(first, context.table.cuMemUnmap(mapping.address, mapping.nbytes), call,
                         "cuMemUnmap")
    if mapping.range_bytes:
        first = first_of(first, context.table.cuMemAddressFree(mapping.address,
                                                               mapping.range_bytes),
                         call, "cuMemAddressFree")
    if mapping.physical:
        first = first_of(first, context.table.cuMemRelease(mapping.physical), call, "cuMemRelease")
    if mapping.is_registered:
        first = first_of(first, unregister(mapping), call, "cuMemHostUnregister")
    return first


cdef inline CUresult unregister(Mapping* mapping) noexcept nogil:
    # If it fails, the pages stay known to the driver, and must neither be unmapped nor freed.
    cdef CUresult code = mapping.context.table.cuMemHostUnregister(<void*>mapping.address)
    mapping.is_registered = code != CUDA_SUCCESS
    return code


cdef inline CUresult first_of(CUresult first, CUresult code, const char** call,
                              const char* name) noexcept nogil:
    if first != CUDA_SUCCESS or code == CUDA_SUCCESS:
        return first
    call[0] = name
    return code


cdef void forget_after_fork() noexcept nogil:
    global dropped
    dropped = NULL              # the parent's to end


on_fork(NULL, NULL, forget_after_fork)
