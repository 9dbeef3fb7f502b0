"""Waiting, joining, remembering; see _order.pxd."""

from libc.stdint cimport uint32_t, uintptr_t

from gpumem._buffer cimport Buffer
from gpumem._driver cimport (
    CU_EVENT_DISABLE_TIMING,
    CUDA_SUCCESS,
    CUevent,
    CUresult,
    CUstream,
    Place,
    check,
    place_enter,
    place_is_dead,
    place_leave,
)

from gpumem.errors import ClosedError

cdef enum:
    LEGACY_STREAM = 1
    PER_THREAD_STREAM = 2       # of whichever thread asks


cdef inline CUstream normal(CUstream stream) noexcept nogil:
    return stream if stream != NULL else <CUstream><uintptr_t>LEGACY_STREAM


cdef CUstream own_stream(Buffer buffer) noexcept:
    return normal(<CUstream><uintptr_t>buffer.home.stream_at(buffer.slot))


cdef int order_host_slowly(Buffer buffer) except -1:
    # Counted before the wait: what another thread queues meanwhile is waited for the next time.
    cdef uint32_t seen = buffer.queued
    require_alive(&buffer.home.place.place)
    wait_for_stream(&buffer.home.place.place, own_stream(buffer))
    if buffer.awaited <= seen:
        buffer.awaited = seen + 1
    return 0


cdef int order_stream(Buffer buffer, CUstream stream) except -1:
    return follow(buffer, stream, own_stream(buffer))


cdef int order_read(Buffer buffer, CUstream stream) except -1:
    return follow(buffer, own_stream(buffer), stream)


cdef int order_written(Buffer buffer, CUstream stream) except -1:
    buffer.queued += 1
    return follow(buffer, own_stream(buffer), stream)


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


cdef int follow(Buffer buffer, CUstream later, CUstream earlier) except -1:
    """Let `later` wait, on the device, for what `earlier` has queued so far."""
    cdef Place* place = &buffer.home.place.place
    cdef CUresult code
    later = normal(later)
    earlier = normal(earlier)
    if buffer.block_bytes == 0 or (later == earlier
                                   and later != <CUstream><uintptr_t>PER_THREAD_STREAM):
        return 0
    require_alive(place)
    if earlier == <CUstream><uintptr_t>PER_THREAD_STREAM:
        # Perhaps another thread's: the legacy stream comes after all of those.
        earlier = <CUstream><uintptr_t>LEGACY_STREAM
    with nogil:
        code = place_enter(place)
        if code == CUDA_SUCCESS:
            code = follow_here(place, later, earlier)
            place_leave(place)
    check(place.table, code, "cuStreamWaitEvent")
    return 0


cdef CUresult follow_here(Place* place, CUstream later, CUstream earlier) noexcept nogil:
    cdef CUevent event
    cdef CUresult code = place.table.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING)
    if code != CUDA_SUCCESS:
        return code
    code = place.table.cuEventRecord(event, earlier)
    if code == CUDA_SUCCESS:
        code = place.table.cuStreamWaitEvent(later, event, 0)
    place.table.cuEventDestroy(event)       # it ends when nothing waits for it any more
    return code


cdef int require_alive(Place* place) except -1:
    if place_is_dead(place):
        raise ClosedError("this memory belongs to the parent process, or the interpreter is ending")
    return 0
