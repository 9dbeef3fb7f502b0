"""Waiting and signalling; see _timeline_queue.pxd."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from gpumem._driver cimport (
    CU_STREAM_CAPTURE_STATUS_NONE,
    CU_STREAM_NON_BLOCKING,
    CU_STREAM_WAIT_VALUE_GEQ,
    CUDA_ERROR_NOT_READY,
    CUDA_ERROR_NOT_SUPPORTED,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    CUDA_EXTERNAL_SEMAPHORE_PARAMS,
    CUDA_SUCCESS,
    CUstream,
    CUstreamCaptureStatus,
    Place,
    place_enter,
    place_leave,
)
from gpumem._support.atomics cimport load64, store64
from gpumem._support.lock cimport lock_acquire, lock_release
from gpumem.interop._timeline_core cimport (
    CORE_DESERTED,
    CORE_DRIVER,
    CORE_LATE,
    CORE_NOT_ABOVE,
    CORE_OK,
    Link,
    Outcome,
    TimelineCore,
    Use,
    core_idle,
    core_link,
    core_link_memory,
    core_link_page,
    core_list,
    timeline_claim,
    timeline_deserted,
    timeline_is_polled,
    timeline_look,
    timeline_move,
    timeline_now,
    timeline_pending,
    timeline_poison,
    timeline_poll,
    timeline_signal,
    timeline_value,
    timeline_wait,
    use_for,
    use_record,
)

cdef extern from "<unistd.h>" nogil:
    int usleep(unsigned int microseconds)

cdef enum:
    FIRST_PAUSE_US = 10         # between two questions to a device
    LONGEST_PAUSE_US = 500

cdef bint memory_operations_everywhere = False


cdef void rehearse_memory_operations(bint on) noexcept nogil:
    global memory_operations_everywhere
    memory_operations_everywhere = on


# ---- on a stream -------------------------------------------------------------------------------

cdef int core_enqueue_wait(TimelineCore* core, Place* place, CUstream stream, uint64_t value,
                           Outcome* out) noexcept nogil:
    cdef int status = CORE_LATE
    cdef Link* link = NULL
    cdef Use* used = NULL
    if core.page != NULL:
        status = timeline_look(core.page, value)
    if status != CORE_LATE:
        return status
    lock_acquire(&core.lock)
    status = begin(core, place, stream, &link, &used, out)
    if status == CORE_OK:
        status = queue_wait(link, stream, value, out)
        use_record(used)
        place_leave(place)
    lock_release(&core.lock)
    return status


cdef int core_enqueue_signal(TimelineCore* core, Place* place, CUstream stream, uint64_t value,
                             Outcome* out) noexcept nogil:
    cdef int status
    cdef Link* link = NULL
    cdef Use* used = NULL
    lock_acquire(&core.lock)
    status = begin(core, place, stream, &link, &used, out)
    if status == CORE_OK:
        status = claim(core, value, out)
        if status == CORE_OK:
            status = queue_signal(core, link, used, value, out)
            if status != CORE_OK:
                unclaim(core, value, out)
        place_leave(place)
    lock_release(&core.lock)
    return status


cdef int begin(TimelineCore* core, Place* place, CUstream stream, Link** link, Use** used,
               Outcome* out) noexcept nogil:
    """Enter the place and see that nothing but the operation itself can fail; on CORE_OK the
    caller leaves it."""
    cdef int status
    core_list(core)
    out.call = b"cuCtxPushCurrent"
    out.code = place_enter(place)
    if out.code != CUDA_SUCCESS:
        return CORE_DRIVER
    status = refuse_capture(place, stream, out)
    if status == CORE_OK:
        status = link_of(core, place, link, out)
    if status == CORE_OK:
        out.call = b"cuEventCreate"
        used[0] = use_for(core, place, stream, &out.code)
        if used[0] == NULL:
            status = CORE_DRIVER
    if status != CORE_OK:
        place_leave(place)
    return status


cdef int refuse_capture(Place* place, CUstream stream, Outcome* out) noexcept nogil:
    # A graph would signal the same value at each of its launches.
    cdef CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE
    if place.table.cuStreamIsCapturing == NULL:
        return CORE_OK
    out.call = b"cuStreamIsCapturing"
    out.code = place.table.cuStreamIsCapturing(stream, &capturing)
    if out.code == CUDA_SUCCESS and capturing != CU_STREAM_CAPTURE_STATUS_NONE:
        out.code = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    return CORE_OK if out.code == CUDA_SUCCESS else CORE_DRIVER


cdef int link_of(TimelineCore* core, Place* place, Link** link, Outcome* out) noexcept nogil:
    link[0] = core_link(core, place)
    if link[0] != NULL:
        return CORE_OK
    if place.is_host and not memory_operations_everywhere:
        return core_link_page(core, place, link, out)
    out.call = b"cuStreamWaitValue64"
    out.code = CUDA_ERROR_NOT_SUPPORTED
    if place.table.cuStreamWaitValue64 == NULL or place.table.cuStreamWriteValue64 == NULL:
        return CORE_DRIVER
    return core_link_memory(core, place, link, out)


cdef int queue_wait(Link* link, CUstream stream, uint64_t value, Outcome* out) noexcept nogil:
    cdef CUDA_EXTERNAL_SEMAPHORE_PARAMS params
    if link.alias != NULL:
        out.call = b"cuStreamWaitValue64"
        out.code = link.place.table.cuStreamWaitValue64(stream, link.address, value,
                                                        CU_STREAM_WAIT_VALUE_GEQ)
    else:
        memset(&params, 0, sizeof(params))
        params.params.fence.value = value
        out.call = b"cuWaitExternalSemaphoresAsync"
        out.code = link.place.table.cuWaitExternalSemaphoresAsync(&link.semaphore, &params, 1,
                                                                  stream)
    return CORE_OK if out.code == CUDA_SUCCESS else CORE_DRIVER


cdef int queue_signal(TimelineCore* core, Link* link, Use* used, uint64_t value,
                      Outcome* out) noexcept nogil:
    """Queue the signal, behind the one before it; `out.known` is that one's value."""
    cdef int status = CORE_OK
    if comes_behind(core, link, used, out.known):
        status = queue_wait(link, used.stream, out.known, out)
    if status == CORE_OK:
        status = queue_store(core, link, used.stream, value, out)
    use_record(used)
    if status == CORE_OK:
        core.signaller = used
        store64(&core.queued, value)
    return status


cdef bint comes_behind(TimelineCore* core, Link* link, Use* used, uint64_t known) noexcept nogil:
    """Tell whether a signal that is still queued elsewhere could take this one's value back."""
    if core.signaller == used or known == 0:
        return False
    if core.page == NULL:
        return core.signaller != NULL
    # The host device's signals only raise the page.
    return link.alias != NULL and timeline_value(core.page) < known


cdef int queue_store(TimelineCore* core, Link* link, CUstream stream, uint64_t value,
                     Outcome* out) noexcept nogil:
    cdef CUDA_EXTERNAL_SEMAPHORE_PARAMS params
    if link.alias != NULL:
        timeline_poll(core.page)        # before the store: who waits has to know
        out.call = b"cuStreamWriteValue64"
        out.code = link.place.table.cuStreamWriteValue64(stream, link.address, value, 0)
    else:
        memset(&params, 0, sizeof(params))
        params.params.fence.value = value
        out.call = b"cuSignalExternalSemaphoresAsync"
        out.code = link.place.table.cuSignalExternalSemaphoresAsync(&link.semaphore, &params, 1,
                                                                    stream)
    return CORE_OK if out.code == CUDA_SUCCESS else CORE_DRIVER


# ---- values ------------------------------------------------------------------------------------

cdef int claim(TimelineCore* core, uint64_t value, Outcome* out) noexcept nogil:
    """Make the value the highest, for every thread and process; the lock is held."""
    cdef bint mine
    if core.page != NULL:
        mine = timeline_claim(core.page, value, &out.known)
    else:
        out.known = core.pending
        mine = value > core.pending
    if mine:
        store64(&core.pending, value)
    return CORE_OK if mine else CORE_NOT_ABOVE


cdef void unclaim(TimelineCore* core, uint64_t value, Outcome* out) noexcept nogil:
    store64(&core.pending, out.known)
    # If another process has built upon it, its streams may wait for what will not come.
    if core.page != NULL and not timeline_move(core.page, value, out.known):
        timeline_poison(core.page)


cdef uint64_t core_pending(TimelineCore* core) noexcept nogil:
    return load64(&core.pending) if core.page == NULL else timeline_pending(core.page)


# ---- the CPU -----------------------------------------------------------------------------------

cdef int core_signal(TimelineCore* core, uint64_t value, uint64_t deadline,
                     Outcome* out) noexcept nogil:
    cdef int status
    while True:
        out.known = timeline_pending(core.page)
        if value <= out.known:
            return CORE_NOT_ABOVE
        # A device that is still to store a lower value would store it over ours.
        if timeline_is_polled(core.page) and timeline_value(core.page) < out.known:
            status = timeline_wait(core.page, out.known, deadline, 0)
            if status != CORE_OK:
                return status
        elif timeline_move(core.page, out.known, value):
            timeline_signal(core.page, value)
            return CORE_OK


cdef int core_signal_by_stream(TimelineCore* core, Place* place, uint64_t value,
                               Outcome* out) noexcept nogil:
    cdef CUstream stream
    cdef int status = open_stream(place, &stream, out)
    if status == CORE_OK:
        status = core_enqueue_signal(core, place, stream, value, out)
        close_stream(place, stream)
    return status


cdef int core_wait(TimelineCore* core, uint64_t value, uint64_t deadline, uint64_t spin,
                   Outcome* out) noexcept nogil:
    cdef int status = timeline_wait(core.page, value, deadline, spin)
    if status == CORE_LATE and value > load64(&core.queued):     # nothing of ours will bring it
        out.process = timeline_deserted(core.page)
        if out.process != 0:
            status = timeline_look(core.page, value)     # it may have signalled before it died
            if status == CORE_LATE:
                status = CORE_DESERTED
    return status


cdef int core_wait_begin(TimelineCore* core, Place* place, CUstream* stream, uint64_t value,
                         Outcome* out) noexcept nogil:
    cdef int status = open_stream(place, stream, out)
    if status == CORE_OK:
        status = core_enqueue_wait(core, place, stream[0], value, out)
        if status != CORE_OK:
            close_stream(place, stream[0])
    return status


cdef int core_wait_go_on(Place* place, CUstream stream, uint64_t deadline,
                         Outcome* out) noexcept nogil:
    cdef uint32_t pause = FIRST_PAUSE_US
    out.call = b"cuStreamQuery"
    while True:
        out.code = place_enter(place)
        if out.code == CUDA_SUCCESS:
            out.code = place.table.cuStreamQuery(stream)
            place_leave(place)
        if out.code != CUDA_ERROR_NOT_READY:
            return CORE_OK if out.code == CUDA_SUCCESS else CORE_DRIVER
        if not rest(&pause, deadline):
            return CORE_LATE


cdef void core_wait_end(Place* place, CUstream stream) noexcept nogil:
    close_stream(place, stream)


cdef int core_wait_idle(TimelineCore* core, uint64_t deadline) noexcept nogil:
    cdef uint32_t pause = FIRST_PAUSE_US
    while not core_idle(core):
        if not rest(&pause, deadline):
            return CORE_LATE
    return CORE_OK


cdef bint rest(uint32_t* pause, uint64_t deadline) noexcept nogil:
    """Sleep a little, longer each time; False: the deadline has passed."""
    if timeline_now() >= deadline:
        return False
    usleep(pause[0])
    pause[0] = min(2 * pause[0], LONGEST_PAUSE_US)
    return True


cdef int open_stream(Place* place, CUstream* stream, Outcome* out) noexcept nogil:
    out.call = b"cuStreamCreate"
    out.code = place_enter(place)
    if out.code == CUDA_SUCCESS:
        out.code = place.table.cuStreamCreate(stream, CU_STREAM_NON_BLOCKING)
        place_leave(place)
    return CORE_OK if out.code == CUDA_SUCCESS else CORE_DRIVER


cdef void close_stream(Place* place, CUstream stream) noexcept nogil:
    # What it still has to do it does; the handle ends now.
    if place_enter(place) == CUDA_SUCCESS:
        place.table.cuStreamDestroy(stream)
        place_leave(place)
