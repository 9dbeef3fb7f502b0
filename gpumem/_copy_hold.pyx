"""Claims that a stream gives back; see _copy_hold.pxd.

A driver's callback must not call the driver, and the owner of foreign memory may do so when it
hears of the end, or want the interpreter lock. So the callback only hands the claim to the crew.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc

from gpumem._buffer cimport Buffer, buffer_share, drop_share
from gpumem._copy_crew cimport CrewJob, job_leave, jobs_left_wait
from gpumem._driver cimport (
    CU_STREAM_CAPTURE_STATUS_NONE,
    CUDA_SUCCESS,
    CUresult,
    CUstream,
    CUstreamCaptureStatus,
    DriverDevice,
    Place,
    place_enter,
    place_leave,
)
from gpumem._order cimport wait_for_stream

from gpumem._support.releases import on_release

cdef struct Held:
    CrewJob job
    void* lease


cdef int hold_until_done(Buffer buffer, DriverDevice place, CUstream stream) except -1:
    cdef Held* held = <Held*>malloc(sizeof(Held))
    cdef CUresult code
    if held == NULL:
        return wait_for_stream(&place.place, stream)
    try:
        held.lease = buffer_share(buffer)
    except BaseException:
        free(held)
        wait_for_stream(&place.place, stream)
        raise
    with nogil:
        code = queue_release(&place.place, stream, held)
    if code != CUDA_SUCCESS:
        drop(held, 0)
        wait_for_stream(&place.place, stream)
    return 0


cdef CUresult queue_release(Place* place, CUstream stream, Held* held) noexcept nogil:
    cdef CUresult code = place_enter(place)
    cdef CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE
    if code != CUDA_SUCCESS:
        return code
    if place.table.cuStreamIsCapturing != NULL:
        place.table.cuStreamIsCapturing(stream, &capturing)
    if capturing != CU_STREAM_CAPTURE_STATUS_NONE:
        drop(held, 0)       # a graph uses its memory as often as it runs: that is its maker's care
    else:
        code = place.table.cuLaunchHostFunc(stream, release, held)
    place_leave(place)
    return code


cdef void release(void* held) noexcept nogil:
    job_leave(&(<Held*>held).job, held, drop)


cdef void drop(void* held, int64_t number) noexcept nogil:
    drop_share((<Held*>held).lease)
    free(held)


def wait_for_releases():
    """Wait until the claims of copies that are done have been given back."""
    with nogil:
        jobs_left_wait()


on_release("copies", wait_for_releases)
