"""Streams, events and graphs, the stream of an argument, and the order of accesses to a buffer.

A buffer's own stream orders accesses of gpumem to its bytes. It waits for work queued on other
streams, so that a wait for it is a wait for that work, and a free on it is ordered last.

Two kinds of buffers are different: memory from elsewhere without a stream, and buffers of a default
stream, which has other work too. Each access that gpumem queues to them on another stream is noted
with an event, and only a later access to the same bytes waits for that event: a copy of a frame
that is still to come delays its own stream alone. The block is freed after these accesses, too.
"""

from libc.stdint cimport uint64_t

from gpumem._buffer.buffer cimport Buffer
from gpumem._native.driver cimport CUevent, CUresult, CUstream, DeviceContext, DriverDevice

cdef class Event

cdef class Stream:
    cdef readonly object device     # the Device it belongs to
    cdef DriverDevice driver_device
    cdef CUstream handle
    cdef bint owned                 # destroy it with this object
    cdef object owner               # keeps another library's stream alive
    cdef object __weakref__

cdef class Event:
    cdef readonly object device
    cdef DriverDevice driver_device
    cdef CUevent handle
    cdef object __weakref__

# The native handle of None (the legacy default stream), a Stream, an int, or any object with
# __cuda_stream__ or a framework's stream; a Stream of another device is a ValueError.
cdef int stream_handle(object stream, DriverDevice driver_device, CUstream* handle) except -1
# Makes `later` wait, on the device, for work queued on `earlier`, of the current context.
cdef CUresult stream_follow(DeviceContext* here, CUstream earlier, DeviceContext* there,
                            CUstream later) noexcept nogil
# Whether work queued on it now becomes a part of a graph.
cdef CUresult stream_is_capturing(DeviceContext* context, CUstream stream,
                                  bint* capturing) noexcept nogil
cdef bint is_capturing(DriverDevice driver_device, CUstream stream) except -1
# Whether a stream ends with its object, so that no other object may replace it.
cdef bint keeps_itself(object stream) noexcept
# The device of any library's stream object; None if it has none, like a bare handle.
cdef object device_of_stream(object stream)

# ---- the order of accesses to a buffer -----------------------------------------------------------

# Work that gpumem queued beside the own stream of the memory: its bytes, and the event after it.
cdef class QueuedUse:
    cdef uint64_t low, high
    cdef DriverDevice driver_device
    cdef CUstream stream
    cdef Event event

# Whether gpumem has queued work for the bytes that their own stream does not order.
cdef bint has_uses(Buffer buffer) noexcept

# Whether the CPU may read the bytes without a wait, as far as is known without a driver call; and
# whether it may write them: queued reads count then, too.
cdef inline bint host_may_read(Buffer buffer) noexcept:
    # The bytes may also be in use through another buffer.
    return ((buffer.awaited > buffer.written
             and (not buffer.home.queued_uses or not has_uses(buffer)))
            or buffer.block_bytes == 0)

cdef inline bint host_may_write(Buffer buffer) noexcept:
    return host_may_read(buffer) and (buffer.awaited > buffer.queued or buffer.block_bytes == 0)

# Before the CPU reads the bytes, or writes them: wait once for the work that was queued before.
cdef inline int order_host(Buffer buffer) except -1:
    return 0 if host_may_read(buffer) else order_host_slowly(buffer)

cdef inline int order_host_writing(Buffer buffer) except -1:
    return 0 if host_may_write(buffer) else order_host_slowly(buffer)

cdef int order_host_slowly(Buffer buffer) except -1
# Before the CPU has a view of the bytes. Users wait for their own work on raw bytes: a view of a
# block that gpumem has queued no work for does not wait for its stream.
cdef int order_view(Buffer buffer) except -1

# In all of these the stream is one of `driver_device`; None is the buffer's own device. Between two
# drivers, which cannot wait for each other's events, the CPU waits.

# Orders work queued on `stream` from now on after all work of the buffer's stream.
cdef int order_stream(Buffer buffer, CUstream stream, DriverDevice driver_device=*) except -1
# gpumem has queued a read, or a write, of the bytes on `stream`. If they belong to a default
# stream, which has other work too, and `named` is an object that keeps `stream`, then only later
# uses of the bytes are ordered after it, and the block is freed after it.
cdef int order_read(Buffer buffer, CUstream stream, DriverDevice driver_device=*,
                    object named=*) except -1
cdef int order_written(Buffer buffer, CUstream stream, DriverDevice driver_device=*,
                       object named=*) except -1
# Around a copy: the same for both buffers, in one step if they share a stream.
cdef int order_before(Buffer dst, Buffer src, CUstream stream, DriverDevice driver_device) except -1
cdef int order_after(Buffer dst, Buffer src, CUstream stream, DriverDevice driver_device,
                     object named) except -1
# Notes that the CPU may access the bytes at once, because their producer has waited.
cdef void order_settled(Buffer buffer) noexcept
# The handle of the buffer's own stream, 1 for the legacy default stream.
cdef CUstream own_stream(Buffer buffer) noexcept
# The CPU waits for a stream. Ctrl-C ends the first wait, before which no work is queued that needs
# the wait to be safe. The second wait is for queued work and always completes.
cdef int wait_for_stream(DeviceContext* context, CUstream stream) except -1
cdef int finish_stream(DeviceContext* context, CUstream stream) except -1
