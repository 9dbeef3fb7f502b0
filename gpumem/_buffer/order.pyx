"""The order of accesses to a buffer; see order.pxd."""

from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from gpumem._buffer.buffer cimport Buffer, require_open
from gpumem._buffer.stream cimport is_capturing, Stream, stream_follow
from gpumem._native.driver cimport (
    check, context_enter, context_is_dead, context_leave, CUDA_SUCCESS, CUresult, CUstream,
    DeviceContext, DriverDevice, synchronize_device, synchronize_stream,
)
from gpumem._support.streams cimport LEGACY_STREAM, PER_THREAD_STREAM

from gpumem.device import Device
from gpumem.errors import ClosedError


cdef inline CUstream normal(CUstream stream) noexcept nogil:
    return stream if stream != NULL else <CUstream><uintptr_t>LEGACY_STREAM


cdef CUstream own_stream(Buffer buffer) noexcept:
    return normal(<CUstream><uintptr_t>buffer.home.stream_at(buffer.slot))


cdef int order_host_slowly(Buffer buffer) except -1:
    # Counted before the wait: what another thread queues meanwhile is waited for the next time.
    cdef uint32_t seen = buffer.queued
    require_open(buffer)    # first: nothing is worth a wait if the memory is not there
    require_alive(&buffer.home.driver_device.context)
    buffer.home.before_cpu(buffer)
    wait_for_stream(&buffer.home.driver_device.context, own_stream(buffer))
    for use in uses_of(buffer):
        (<QueuedUse>use).event.synchronize()
    forget_done(buffer)
    buffer.being_read = False
    if buffer.awaited <= seen:
        buffer.awaited = seen + 1
    return 0


cdef int order_stream(Buffer buffer, CUstream stream, DriverDevice driver_device=None) except -1:
    cdef DriverDevice own = buffer.home.driver_device
    if buffer.block_bytes == 0:
        return 0
    buffer.home.before_stream(buffer, stream, driver_device or own)
    for use in uses_of(buffer):
        follow_use(use, driver_device or own, normal(stream))
    if driver_device is not None and driver_device.type != own.type:
        # The CPU waits below. Nothing is queued yet, so that Ctrl-C may end that wait.
        wait_for_stream(&own.context, own_stream(buffer))
    return follow(driver_device or own, stream, own, own_stream(buffer))


cdef int order_read(Buffer buffer, CUstream stream, DriverDevice driver_device=None) except -1:
    cdef DriverDevice own = buffer.home.driver_device
    if buffer.block_bytes == 0:
        return 0
    buffer.being_read = True
    return join(buffer, driver_device or own, stream)


cdef int order_written(Buffer buffer, CUstream stream, DriverDevice driver_device=None) except -1:
    cdef DriverDevice own = buffer.home.driver_device
    if buffer.block_bytes == 0:
        return 0
    buffer.queued += 1
    return join(buffer, driver_device or own, stream)


cdef int join(Buffer buffer, DriverDevice driver_device, CUstream stream) except -1:
    # What is queued for the buffer from now on comes after what `stream` has.
    if buffer.home.queued_uses is not None:
        return note_use(buffer, driver_device, normal(stream))
    return follow(buffer.home.driver_device, own_stream(buffer), driver_device, stream)


cdef int order_before(Buffer dst, Buffer src, CUstream stream,
                      DriverDevice driver_device) except -1:
    # Of two that share a stream each may have more to wait for, such as its producer.
    order_stream(src, stream, driver_device)
    if are_together(dst, src):
        return dst.home.before_stream(dst, stream, driver_device)
    return order_stream(dst, stream, driver_device)


cdef int order_after(Buffer dst, Buffer src, CUstream stream, DriverDevice driver_device) except -1:
    src.being_read = True
    order_written(dst, stream, driver_device)
    if not are_together(dst, src):
        order_read(src, stream, driver_device)
    return 0


cdef bint are_together(Buffer a, Buffer b) noexcept:
    return (a.home.driver_device is b.home.driver_device and own_stream(a) == own_stream(b)
            and a.home.queued_uses is None and b.home.queued_uses is None and a.block_bytes != 0)


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


# ---- Memory without a stream ---------------------------------------------------------------------

cdef list uses_of(Buffer buffer):
    # Two tensors over the same bytes are two buffers, with one list.
    cdef uint64_t low = buffer.address
    cdef uint64_t high = low + buffer.requested_bytes
    if not buffer.home.queued_uses:
        return []
    return [use for use in buffer.home.queued_uses
            if (<QueuedUse>use).low < high and (<QueuedUse>use).high > low]


cdef int note_use(Buffer buffer, DriverDevice driver_device, CUstream stream) except -1:
    cdef QueuedUse use = QueuedUse.__new__(QueuedUse)
    # A graph under capture has done nothing yet: its launch has to be ordered by the caller.
    if is_capturing(driver_device, stream):
        return 0
    use.low = buffer.address
    use.high = use.low + buffer.requested_bytes
    use.driver_device = driver_device
    use.stream = stream
    device = Device(f"{driver_device.type}:{driver_device.ordinal}")
    use.event = Stream.from_handle(device, <uintptr_t>stream).record()
    forget_done(buffer)
    buffer.home.queued_uses.append(use)
    return 0


cdef int forget_done(Buffer buffer) except -1:
    # What is done orders nothing any more.
    if buffer.home.queued_uses:
        buffer.home.queued_uses = [use for use in buffer.home.queued_uses
                                   if not (<QueuedUse>use).event.query()]
    return 0


cdef int follow_use(QueuedUse use, DriverDevice driver_device, CUstream stream) except -1:
    cdef CUresult code
    if (use.driver_device is driver_device and use.stream == stream
            and stream != <CUstream><uintptr_t>PER_THREAD_STREAM):
        return 0
    require_alive(&driver_device.context)
    if use.driver_device.type != driver_device.type:
        use.event.synchronize()
        return 0
    if is_capturing(driver_device, stream):
        return 0
    with nogil:
        code = context_enter(&driver_device.context)
        if code == CUDA_SUCCESS:
            code = driver_device.context.table.cuStreamWaitEvent(stream, use.event.handle, 0)
            context_leave(&driver_device.context)
    check(driver_device.context.table, code, "cuStreamWaitEvent")
    return 0


cdef int require_alive(DeviceContext* context) except -1:
    if context_is_dead(context):
        raise ClosedError("this memory belongs to the parent process, or the interpreter is ending")
    return 0
