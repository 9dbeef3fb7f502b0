"""Waiting, joining, remembering."""

from libc.stdint cimport uint32_t, uintptr_t

from gpumem._buffer.buffer cimport Buffer
from gpumem._native.driver cimport (
    check, CU_EVENT_DISABLE_TIMING, CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS, CUevent, CUresult,
    CUstream, CUstreamCaptureStatus, DriverDevice, Place, place_enter, place_is_dead, place_leave,
)
from gpumem._support.streams cimport LEGACY_STREAM, PER_THREAD_STREAM

from gpumem.errors import ClosedError


cdef inline CUstream normal(CUstream stream) noexcept nogil:
    return stream if stream != NULL else <CUstream><uintptr_t>LEGACY_STREAM


cdef CUstream own_stream(Buffer buffer) noexcept:
    return normal(<CUstream><uintptr_t>buffer.home.stream_at(buffer.slot))


cdef int order_host_slowly(Buffer buffer) except -1:
    # Counted before the wait: what another thread queues meanwhile is waited for the next time.
    cdef uint32_t seen = buffer.queued
    require_alive(&buffer.home.place.place)
    buffer.home.before_cpu(buffer)
    buffer.being_read = False
    wait_for_stream(&buffer.home.place.place, own_stream(buffer))
    if buffer.awaited <= seen:
        buffer.awaited = seen + 1
    return 0


cdef int order_stream(Buffer buffer, CUstream stream, DriverDevice place=None) except -1:
    cdef DriverDevice own = buffer.home.place
    if buffer.block_bytes == 0:
        return 0
    # What the resource's own device knows how to wait for, another's stream waits for behind it.
    buffer.home.before_stream(buffer, stream if place is None or place is own
                              else own_stream(buffer))
    return follow(place or own, stream, own, own_stream(buffer))


cdef int order_read(Buffer buffer, CUstream stream, DriverDevice place=None) except -1:
    cdef DriverDevice own = buffer.home.place
    if buffer.block_bytes == 0:
        return 0
    buffer.being_read = True
    return follow(own, own_stream(buffer), place or own, stream)


cdef int order_written(Buffer buffer, CUstream stream, DriverDevice place=None) except -1:
    cdef DriverDevice own = buffer.home.place
    if buffer.block_bytes == 0:
        return 0
    buffer.queued += 1
    return follow(own, own_stream(buffer), place or own, stream)


cdef int order_before(Buffer dst, Buffer src, CUstream stream, DriverDevice place) except -1:
    order_stream(src, stream, place)
    if not are_together(dst, src):
        order_stream(dst, stream, place)
    return 0


cdef int order_after(Buffer dst, Buffer src, CUstream stream, DriverDevice place) except -1:
    src.being_read = True
    order_written(dst, stream, place)
    if not are_together(dst, src):
        order_read(src, stream, place)
    return 0


cdef bint are_together(Buffer a, Buffer b) noexcept:
    return (a.home.place is b.home.place and own_stream(a) == own_stream(b)
            and a.block_bytes != 0)


cdef void order_settled(Buffer buffer) noexcept:
    buffer.awaited = buffer.queued + 1


cdef int wait_for_stream(Place* place, CUstream stream) except -1:
    cdef CUresult code
    with nogil:
        code = place_enter(place)
        if code == CUDA_SUCCESS:
            # Another thread's default stream has no handle here: wait for the whole device.
            if stream == <CUstream><uintptr_t>PER_THREAD_STREAM:
                code = place.table.cuCtxSynchronize()
            else:
                code = place.table.cuStreamSynchronize(stream)
            place_leave(place)
    check(place.table, code, "cuStreamSynchronize")
    return 0


cdef int follow(DriverDevice later_place, CUstream later, DriverDevice earlier_place,
                CUstream earlier) except -1:
    """Let `later` wait, on the device, for what `earlier` has queued so far."""
    cdef CUresult code
    later = normal(later)
    earlier = normal(earlier)
    if (later_place is earlier_place and later == earlier
            and later != <CUstream><uintptr_t>PER_THREAD_STREAM):
        return 0
    require_alive(&later_place.place)
    require_alive(&earlier_place.place)
    if later_place.type != earlier_place.type:
        return wait_for_stream(&earlier_place.place, earlier)
    if earlier == <CUstream><uintptr_t>PER_THREAD_STREAM:
        # Perhaps another thread's: the legacy stream comes after all of those.
        earlier = <CUstream><uintptr_t>LEGACY_STREAM
    with nogil:
        code = place_enter(&earlier_place.place)
        if code == CUDA_SUCCESS:
            code = follow_here(&earlier_place.place, earlier, &later_place.place, later)
            place_leave(&earlier_place.place)
    check(later_place.place.table, code, "cuStreamWaitEvent")
    return 0


cdef CUresult follow_here(Place* here, CUstream earlier, Place* there,
                          CUstream later) noexcept nogil:
    cdef CUevent event
    cdef CUresult code
    # A graph cannot wait for what is outside of it, nor that for a graph that has yet to be
    # launched: who launches it sees to that.
    if is_capturing(here, earlier) != is_capturing(there, later):
        return CUDA_SUCCESS
    code = here.table.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING)
    if code != CUDA_SUCCESS:
        return code
    code = here.table.cuEventRecord(event, earlier)
    if code == CUDA_SUCCESS and there != here:
        code = place_enter(there)
    if code == CUDA_SUCCESS:
        code = there.table.cuStreamWaitEvent(later, event, 0)
        if there != here:
            place_leave(there)
    here.table.cuEventDestroy(event)        # it ends when nothing waits for it any more
    return code


cdef bint is_capturing(Place* place, CUstream stream) noexcept nogil:
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    if place.table.cuStreamIsCapturing != NULL and place_enter(place) == CUDA_SUCCESS:
        place.table.cuStreamIsCapturing(stream, &status)
        place_leave(place)
    return status != CU_STREAM_CAPTURE_STATUS_NONE


cdef int require_alive(Place* place) except -1:
    if place_is_dead(place):
        raise ClosedError("this memory belongs to the parent process, or the interpreter is ending")
    return 0
