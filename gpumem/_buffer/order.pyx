"""The order of accesses to a buffer; see order.pxd."""

from libc.stdint cimport uint32_t, uintptr_t

from gpumem._buffer.buffer cimport Buffer
from gpumem._buffer.stream cimport stream_follow
from gpumem._native.driver cimport (
    check, context_enter, context_is_dead, context_leave, CUDA_SUCCESS, CUresult, CUstream,
    DeviceContext, DriverDevice, synchronize_device, synchronize_stream,
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
    require_alive(&buffer.home.driver_device.context)
    buffer.home.before_cpu(buffer)
    wait_for_stream(&buffer.home.driver_device.context, own_stream(buffer))
    buffer.being_read = False
    if buffer.awaited <= seen:
        buffer.awaited = seen + 1
    return 0


cdef int order_stream(Buffer buffer, CUstream stream, DriverDevice driver_device=None) except -1:
    cdef DriverDevice own = buffer.home.driver_device
    if buffer.block_bytes == 0:
        return 0
    # A resource may add a wait to a stream of its own device only: another device's stream waits
    # behind the buffer's own.
    buffer.home.before_stream(buffer, stream if driver_device is None or driver_device is own
                              else own_stream(buffer))
    if driver_device is not None and driver_device.type != own.type:
        # The CPU waits below. Nothing is queued yet, so that Ctrl-C may end that wait.
        wait_for_stream(&own.context, own_stream(buffer))
    return follow(driver_device or own, stream, own, own_stream(buffer))


cdef int order_read(Buffer buffer, CUstream stream, DriverDevice driver_device=None) except -1:
    cdef DriverDevice own = buffer.home.driver_device
    if buffer.block_bytes == 0:
        return 0
    buffer.being_read = True
    return follow(own, own_stream(buffer), driver_device or own, stream)


cdef int order_written(Buffer buffer, CUstream stream, DriverDevice driver_device=None) except -1:
    cdef DriverDevice own = buffer.home.driver_device
    if buffer.block_bytes == 0:
        return 0
    buffer.queued += 1
    return follow(own, own_stream(buffer), driver_device or own, stream)


cdef int order_before(Buffer dst, Buffer src, CUstream stream,
                      DriverDevice driver_device) except -1:
    order_stream(src, stream, driver_device)
    if not are_together(dst, src):
        order_stream(dst, stream, driver_device)
    return 0


cdef int order_after(Buffer dst, Buffer src, CUstream stream, DriverDevice driver_device) except -1:
    src.being_read = True
    order_written(dst, stream, driver_device)
    if not are_together(dst, src):
        order_read(src, stream, driver_device)
    return 0


cdef bint are_together(Buffer a, Buffer b) noexcept:
    return (a.home.driver_device is b.home.driver_device and own_stream(a) == own_stream(b)
            and a.block_bytes != 0)


cdef void order_settled(Buffer buffer) noexcept:
    buffer.awaited = buffer.queued + 1


cdef int wait_for_stream(DeviceContext* context, CUstream stream) except -1:
    # Another thread's default stream has no handle here: wait for the whole device.
    if stream == <CUstream><uintptr_t>PER_THREAD_STREAM:
        return synchronize_device(context)
    return synchronize_stream(context, stream)


cdef int finish_stream(DeviceContext* context, CUstream stream) except -1:
    cdef CUresult code
    with nogil:
        code = context_enter(context)
        if code == CUDA_SUCCESS:
            if stream == <CUstream><uintptr_t>PER_THREAD_STREAM:
                code = context.table.cuCtxSynchronize()
            else:
                code = context.table.cuStreamSynchronize(stream)
            context_leave(context)
    check(context.table, code, "cuStreamSynchronize")
    return 0


cdef int follow(DriverDevice later_device, CUstream later, DriverDevice earlier_device,
                CUstream earlier) except -1:
    """Make the stream `later` wait, on the device, for all work queued on `earlier` so far."""
    cdef CUresult code
    later = normal(later)
    earlier = normal(earlier)
    if (later_device is earlier_device and later == earlier
            and later != <CUstream><uintptr_t>PER_THREAD_STREAM):
        return 0
    require_alive(&later_device.context)
    require_alive(&earlier_device.context)
    if later_device.type != earlier_device.type:
        return finish_stream(&earlier_device.context, earlier)
    if earlier == <CUstream><uintptr_t>PER_THREAD_STREAM:
        # Perhaps another thread's: the legacy stream comes after all of those.
        earlier = <CUstream><uintptr_t>LEGACY_STREAM
    with nogil:
        code = context_enter(&earlier_device.context)
        if code == CUDA_SUCCESS:
            code = stream_follow(&earlier_device.context, earlier, &later_device.context, later)
            context_leave(&earlier_device.context)
    check(later_device.context.table, code, "cuStreamWaitEvent")
    return 0


cdef int require_alive(DeviceContext* context) except -1:
    if context_is_dead(context):
        raise ClosedError("this memory belongs to the parent process, or the interpreter is ending")
    return 0
