"""Choosing how a copy or a fill is made: by the CPU, the driver, or both through pinned memory."""

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint64_t, uint8_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from gpumem._buffer cimport (
    access_begin, access_end, BorrowedMemory, Buffer, buffer_share, drop_share, finish_stream,
    has_uses, host_may_read, host_may_write, is_capturing, order_after, order_before, order_host,
    order_host_slowly, order_host_writing, order_read, order_stream, order_written, own_stream,
    Stream, stream_handle, stream_is_capturing, wait_for_stream,
)
from gpumem._copy.plan cimport (
    Box, call_result, CallResult, End, END_ORIGIN, END_TO, fill_by_cpu, fill_is_word, fill_queue,
    Peers, Rows, rows_box, rows_bytes, rows_lead, rows_make, rows_move, rows_pack, rows_queue,
    rows_reach, spread_queue,
)
from gpumem._copy.staged cimport (
    detach_job, Ring, ring_bytes, ring_for, ring_memory, rows_move_together, rows_stage,
    wait_for_detached_jobs, WorkJob,
)
from gpumem._native.driver cimport (
    check, context_enter, context_leave, CU_MEMORYTYPE_HOST, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUhostFn, CUresult, CUstream, DeviceContext,
    DriverDevice, pointer_value,
)
from gpumem._support.lease cimport Lease
from gpumem._support.streams cimport PER_THREAD_STREAM

from gpumem._support.releases import on_release
from gpumem._support.sizes import format_size
from gpumem.device import MemoryKind
from gpumem.errors import DriverError


cdef enum:
    # Bytes between pageable memory and a device from which several threads and a ring of pinned
    # memory are faster than the driver's own staging (bench/results/copies.md).
    STAGED_FROM = 4 << 20
    # Driver calls for one copy. Above that the CPU packs: a call costs microseconds, and the
    # device's copy engine is slow with many small pieces, too.
    MAX_CALLS = 128
    # Bytes between host memories up to which copying takes no longer than queuing the copy
    # (bench/results/copies.md).
    AT_ONCE = 1 << 18

cdef uint64_t staged_from = STAGED_FROM

# One copy, and the decisions about it before work is queued.
cdef struct Route:
    const Rows* rows
    CUstream stream
    PyObject* named         # the caller's object of that stream; None if it is a buffer's own
    bint to_reachable       # the driver reaches the destination itself
    bint origin_reachable
    bint by_peer_copy       # the device that copies has no access to one of the `peers`
    Peers peers
    bint waits              # no stream was given, and users of an end have no stream to wait for
    bint to_is_temporary


cdef int copy_elements(Buffer dst, const Side* to, Buffer src, const Side* origin, int ndim,
                       const int64_t* shape, int64_t itemsize, object stream) except -1:
    cdef Lease* read
    cdef Lease* written = access_begin(dst)
    try:
        read = access_begin(src)
        try:
            return copy_accessed(dst, to, src, origin, ndim, shape, itemsize, stream)
        finally:
            access_end(src, read)
    finally:
        access_end(dst, written)


cdef int copy_accessed(Buffer dst, const Side* to, Buffer src, const Side* origin, int ndim,
                       const int64_t* shape, int64_t itemsize, object stream) except -1:
    cdef Rows rows
    cdef Route route
    cdef DriverDevice driver_device = copying_device(dst, src, stream)
    cdef Buffer bound = bound_elsewhere(dst, src, driver_device)
    route.stream = copying_stream(dst, src, driver_device, stream)
    route.named = <PyObject*>stream
    if not rows_make(&rows, to.address, to.strides, origin.address, origin.strides, ndim, shape,
                     itemsize, END_TO):
        return 0
    if stream is None and is_cpus(dst) and is_cpus(src):
        return copy_by_cpu(dst, src, &rows)
    route.rows = &rows
    route.waits = stream is None and (is_plain(dst) or is_plain(src))
    route.to_is_temporary = to.is_temporary
    if bound is not None:
        return copy_on_own_stream(dst, src, driver_device, &route, bound)
    return copy_rows(dst, src, driver_device, &route)


cdef int copy_on_own_stream(Buffer dst, Buffer src, DriverDevice driver_device, Route* route,
                            Buffer bound) except -1:
    # Copies on the own stream of the end that is bound to its device, ordered around the requested
    # stream.
    cdef CUstream requested = route.stream
    # That end's stream is ordered after the requested stream here, and before its later work below.
    order_read(bound, requested, driver_device)
    route.stream = own_stream(bound)
    route.named = <PyObject*>None
    try:
        return copy_rows(dst, src, bound.home.driver_device, route)
    finally:
        order_stream(bound, requested, driver_device)


cdef int copy_rows(Buffer dst, Buffer src, DriverDevice driver_device, Route* route) except -1:
    find_ends(route, driver_device, dst, src)
    if (is_hosts(dst, route.to_reachable, driver_device)
            and is_hosts(src, route.origin_reachable, driver_device)):
        # Pageable memory is written when this returns, and a large source there is not duplicated.
        if (route.waits or not route.to_reachable
                or (not route.origin_reachable and rows_bytes(route.rows) >= staged_from)):
            wait_for_stream(&driver_device.context, route.stream)
            return copy_by_cpu(dst, src, route.rows)
        return copy_in_turn(dst, src, driver_device, route)
    if route.to_reachable and route.origin_reachable:
        return copy_by_driver(dst, src, driver_device, route)
    return copy_with_pageable(dst, src, driver_device, route)


# ---- Which device copies, and which ends it reaches ----------------------------------------------

cdef DriverDevice copying_device(Buffer dst, Buffer src, object stream):
    # Returns the device that copies: the stream's, else a GPU, the destination's first.
    cdef DriverDevice driver_device = dst.home.driver_device
    cdef DriverDevice other = src.home.driver_device
    if isinstance(stream, Stream) and (<Stream>stream).driver_device is not driver_device:
        if (<Stream>stream).driver_device is other or (is_cpus(dst) and is_cpus(src)):
            return (<Stream>stream).driver_device
    if driver_device.type == "host" and other.type == "cuda":
        return other
    if (stream is None and driver_device.type == other.type
            and is_devices(src) and not is_devices(dst)):
        return other
    return driver_device


cdef CUstream copying_stream(Buffer dst, Buffer src, DriverDevice driver_device,
                             object stream) except? NULL:
    cdef CUstream handle = own_stream(dst if dst.home.driver_device is driver_device else src)
    if stream is not None:
        stream_handle(stream, driver_device, &handle)
    return handle


cdef int refuse_captured(Buffer dst, Buffer src, object stream) except -1:
    cdef DriverDevice driver_device = copying_device(dst, src, stream)
    cdef CUstream handle = copying_stream(dst, src, driver_device, stream)
    if stream is None and is_cpus(dst) and is_cpus(src):
        return 0        # without a stream
    if is_capturing(driver_device, handle):
        wait_for_stream(&driver_device.context, handle)     # refused: it is captured
    return 0


cdef Buffer bound_elsewhere(Buffer dst, Buffer src, DriverDevice driver_device):
    # Returns the end that the driver reaches only from another device than `driver_device`, or
    # None. Between two such memories the driver copies from any device: the addresses identify
    # them.
    cdef bint dst_is_bound = is_devices(dst) and dst.home.driver_device.type == driver_device.type
    cdef bint src_is_bound = is_devices(src) and src.home.driver_device.type == driver_device.type
    if dst_is_bound and src_is_bound and dst.home.driver_device is not src.home.driver_device:
        return None
    if dst_is_bound and dst.home.driver_device is not driver_device:
        return dst
    if src_is_bound and src.home.driver_device is not driver_device:
        return src
    return None


cdef bint is_cpus(Buffer buffer):
    return buffer.home.memory.kind is MemoryKind.HOST


cdef bint is_plain(Buffer buffer):
    # Returns whether it is host memory that gpumem did not allocate, pinned or not.
    return is_cpus(buffer) and buffer.home.is_foreign


cdef int find_ends(Route* route, DriverDevice driver_device, Buffer dst, Buffer src) except -1:
    cdef uint64_t low, high
    rows_reach(route.rows, END_TO, &low, &high)
    route.to_reachable = is_reachable(dst, driver_device, low, high)
    rows_reach(route.rows, END_ORIGIN, &low, &high)
    route.origin_reachable = is_reachable(src, driver_device, low, high)
    route.by_peer_copy = False
    route.peers = Peers(&dst.home.driver_device.context, &src.home.driver_device.context)
    return 0


cdef bint is_devices(Buffer buffer):
    # Returns whether only its own device reaches the memory directly.
    return (buffer.home.memory.kind is MemoryKind.DEVICE
            or (is_cpus(buffer) and not isinstance(buffer.home, BorrowedMemory)))


cdef bint is_reachable(Buffer buffer, DriverDevice driver_device, uint64_t low,
                       uint64_t high) except -1:
    # Returns whether the device's driver reaches the bytes itself, like pinned memory.
    if buffer.home.driver_device.type == driver_device.type and not is_plain(buffer):
        return True
    # Another library may have pinned host memory: its first and its last byte are queried.
    return memory_type(driver_device, low) != 0 and memory_type(driver_device, high - 1) != 0


cdef bint is_hosts(Buffer buffer, bint is_reachable, DriverDevice driver_device):
    # Returns whether the driver treats it as memory of the host: pageable, pinned or registered. It
    # also does so for a host device's memory that another process or a node's processors map.
    if not is_reachable or buffer.home.memory.kind is MemoryKind.HOST_ACCESSIBLE:
        return True
    return is_cpus(buffer) and memory_type(driver_device, buffer.address) == CU_MEMORYTYPE_HOST


cdef inline uint64_t memory_type(DriverDevice driver_device, uint64_t address) noexcept:
    # 0: the driver does not know the address.
    return pointer_value(driver_device, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)


# ---- By the CPU ----------------------------------------------------------------------------------

cdef int copy_by_cpu(Buffer dst, Buffer src, const Rows* rows) except -1:
    order_host(src)
    order_host_writing(dst)
    with nogil:
        rows_move_together(rows)
    return 0


# ---- By the CPU, in the order of a stream --------------------------------------------------------
#
# A driver's copy from host memory to host memory blocks its caller until the stream has reached it.
# So the stream calls a function that copies. That function calls neither the driver nor the
# interpreter, and cannot fail: all checks are made, and all memory is allocated, before it is
# queued.

cdef struct QueuedCopy:
    Rows rows                   # the source's bytes follow, if they were copied at the call


cdef int copy_in_turn(Buffer dst, Buffer src, DriverDevice driver_device,
                      const Route* route) except -1:
    cdef Box box
    cdef QueuedCopy* queued
    cdef CUresult code
    if is_capturing(driver_device, route.stream):
        # A graph may run any number of times, and owns no copy that the CPU makes.
        box = rows_box(route.rows)
        if box.calls <= MAX_CALLS:
            return queue_copy(dst, src, driver_device, route, box)
        return wait_for_stream(&driver_device.context, route.stream)    # refused: it is captured
    if route.waits:
        wait_for_stream(&driver_device.context, route.stream)
        return copy_by_cpu(dst, src, route.rows)
    if (rows_bytes(route.rows) <= AT_ONCE and host_may_read(src) and host_may_write(dst)
            and is_idle(&driver_device.context, route.stream)
            and is_idle_beside(dst, driver_device, route.stream)
            and is_idle_beside(src, driver_device, route.stream)):
        return copy_by_cpu(dst, src, route.rows)
    if route.origin_reachable:
        order_before(dst, src, route.stream, driver_device)
    else:
        order_ends(dst, src, driver_device, route, END_TO)
    queued = queued_copy(route)
    with nogil:
        code = queue_call(&driver_device.context, route.stream, run_queued_copy, queued)
    if code != CUDA_SUCCESS:
        free(queued)
        return check(driver_device.context.table, code, "cuLaunchHostFunc")
    return join(dst, src if route.origin_reachable else None, driver_device, route, True)


cdef QueuedCopy* queued_copy(const Route* route) except NULL:
    # A pageable source may change when the call has returned: its bytes are copied now.
    cdef uint64_t taken = 0 if route.origin_reachable else rows_bytes(route.rows)
    cdef QueuedCopy* queued = <QueuedCopy*>malloc(sizeof(QueuedCopy) + taken)
    cdef uintptr_t behind = <uintptr_t>queued + sizeof(QueuedCopy)
    cdef Rows rows
    if queued == NULL:
        raise MemoryError(f"out of host memory while queuing a copy of {format_size(taken)}")
    queued.rows = route.rows[0]
    if taken:
        rows = route.rows[0]
        rows_pack(&rows, END_TO, behind)
        rows_pack(&queued.rows, END_ORIGIN, behind)
        with nogil:
            rows_move(&rows)
    return queued


cdef void run_queued_copy(void* queued) noexcept nogil:
    rows_move_together(&(<QueuedCopy*>queued).rows)
    free(queued)


cdef bint is_idle_beside(Buffer buffer, DriverDevice driver_device, CUstream stream) noexcept:
    # Returns whether the buffer's own stream is idle, too, including work of its user.
    cdef DriverDevice own = buffer.home.driver_device
    if has_uses(buffer):
        return False
    return ((own is driver_device and own_stream(buffer) == stream)
            or is_idle(&own.context, own_stream(buffer)))


cdef bint is_idle(DeviceContext* context, CUstream stream) noexcept:
    cdef CUresult code
    # It may be another thread's default stream, which has no handle here.
    if stream == <CUstream><uintptr_t>PER_THREAD_STREAM:
        return False
    with nogil:
        code = context_enter(context)
        if code == CUDA_SUCCESS:
            code = context.table.cuStreamQuery(stream)
            context_leave(context)
    # On an error the stream is not idle: the call that queues the copy reports the error.
    return code == CUDA_SUCCESS


cdef CUresult queue_call(DeviceContext* context, CUstream stream, CUhostFn function,
                         void* work) noexcept nogil:
    cdef CUresult code = context_enter(context)
    if code == CUDA_SUCCESS:
        code = context.table.cuLaunchHostFunc(stream, function, work)
        context_leave(context)
    return code


# ---- By the driver -------------------------------------------------------------------------------

cdef int copy_by_driver(Buffer dst, Buffer src, DriverDevice driver_device,
                        Route* route) except -1:
    cdef Box box = rows_box(route.rows)
    if not ensure_access(dst, src, driver_device):
        route.by_peer_copy = True
        box.height = box.depth = -1
        box.calls = rows_bytes(route.rows) // route.rows.width
    if box.calls <= MAX_CALLS:
        return queue_copy(dst, src, driver_device, route, box)
    if dst.home.cpu_can_read and src.home.cpu_can_read:
        return copy_in_turn(dst, src, driver_device, route)
    if dst.home.cpu_can_read:
        return copy_staged(dst, src, driver_device, route, END_ORIGIN)
    if src.home.cpu_can_read:
        return copy_staged(dst, src, driver_device, route, END_TO)
    return copy_repacked(dst, src, driver_device, route)


cdef bint ensure_access(Buffer dst, Buffer src, DriverDevice driver_device) except -1:
    # Lets the device that copies access the other one's memory; returns whether it reaches both
    # ends. The driver sends a copy in pieces, one for each page, and is slower between them in a
    # peer copy than in one with access (bench/results/several_gpus.md).
    if (dst.home.driver_device is src.home.driver_device
            or not is_devices(dst) or not is_devices(src)):
        return True
    if driver_device is src.home.driver_device:
        return dst.home.let_access(driver_device)
    return (src.home.let_access(dst.home.driver_device)
            and driver_device is dst.home.driver_device)


cdef int queue_copy(Buffer dst, Buffer src, DriverDevice driver_device, const Route* route,
                    Box box) except -1:
    cdef CallResult result
    order_before(dst, src, route.stream, driver_device)
    if route.waits:
        wait_for_stream(&driver_device.context, route.stream)
    result = queue_rows(&driver_device.context, route, box)
    # This also runs after a failure, because the calls before the failed one are queued.
    if route.waits:
        finish_stream(&driver_device.context, route.stream)
    else:
        join(dst, src, driver_device, route, False)
    return check(driver_device.context.table, result.code, result.call.decode())


cdef CallResult queue_rows(DeviceContext* context, const Route* route, Box box) noexcept:
    cdef CallResult result
    with nogil:
        result = entered(context)
        if result.code == CUDA_SUCCESS:
            result = rows_queue(context, route.stream, route.rows, box,
                                &route.peers if route.by_peer_copy else NULL)
            context_leave(context)
    return result


cdef inline CallResult entered(DeviceContext* context) noexcept nogil:
    return call_result(context_enter(context), "cuCtxPushCurrent")


cdef int join(Buffer dst, Buffer src, DriverDevice driver_device, const Route* route,
              bint by_cpu) except -1:
    # Orders both buffers' streams after the copy, and keeps other owners' memory until it is done.
    # None is a source that was copied already. Memory that another library pinned has no stream
    # here: the caller waits for the copy's stream.
    cdef bint order_to = not (route.to_is_temporary and is_pinned_elsewhere(dst, driver_device))
    cdef bint order_origin = src is not None and not is_pinned_elsewhere(src, driver_device)
    try:
        if order_to and order_origin:
            order_after(dst, src, route.stream, driver_device, <object>route.named)
        elif order_to:
            order_written(dst, route.stream, driver_device, <object>route.named)
        elif order_origin:
            order_read(src, route.stream, driver_device, <object>route.named)
    except DriverError as refusal:
        return wait_instead(driver_device, route.stream, refusal)
    if src is not None and is_freed_early(src, driver_device, by_cpu):
        keep_until_done(src, driver_device, route.stream)
    if is_freed_early(dst, driver_device, by_cpu):
        keep_until_done(dst, driver_device, route.stream)
    return 0


cdef bint is_freed_early(Buffer buffer, DriverDevice driver_device, bint by_cpu):
    # Returns whether the memory may be freed before the copy is done. An arena frees in stream
    # order, and the end of imported memory waits for its own device. Another owner frees at once;
    # so may the origin of a resource with a ledger, which only orders the driver's copies.
    return (buffer.home.is_foreign or (by_cpu and buffer.home.ledger != NULL)
            or (buffer.home.is_streamless and buffer.home.driver_device is not driver_device))


cdef int wait_instead(DriverDevice driver_device, CUstream stream, object refusal) except -1:
    # A wait makes the same order, but slower. A stream that captures cannot be waited for.
    try:
        return finish_stream(&driver_device.context, stream)
    except DriverError:
        raise refusal from None


cdef bint is_pinned_elsewhere(Buffer buffer, DriverDevice driver_device):
    return is_plain(buffer) and buffer.home.driver_device.type != driver_device.type


# ---- From and to pageable memory -----------------------------------------------------------------

cdef int copy_with_pageable(Buffer dst, Buffer src, DriverDevice driver_device,
                            const Route* route) except -1:
    cdef Box box = rows_box(route.rows)
    cdef End device = END_TO if route.to_reachable else END_ORIGIN
    cdef CallResult result
    if rows_bytes(route.rows) >= staged_from or box.calls > MAX_CALLS:
        return copy_staged(dst, src, driver_device, route, device)
    # Without a stream the caller keeps a source only until this returns, but a graph reads it
    # later.
    if route.waits and is_capturing(driver_device, route.stream):
        wait_for_stream(&driver_device.context, route.stream)   # refused: it is captured
    order_ends(dst, src, driver_device, route, device)
    # A pageable source was read when the driver's call returns; for a destination the CPU waits.
    if device == END_ORIGIN:
        wait_for_stream(&driver_device.context, route.stream)
    result = queue_rows(&driver_device.context, route, box)
    if device == END_TO:
        join(dst, None, driver_device, route, False)
    else:
        finish_stream(&driver_device.context, route.stream)
    return check(driver_device.context.table, result.code, result.call.decode())


cdef int order_ends(Buffer dst, Buffer src, DriverDevice driver_device, const Route* route,
                    End device) except -1:
    # Waits for the CPU's end here, and for the device's on the stream.
    if device == END_TO:
        order_host(src)
        return order_stream(dst, route.stream, driver_device)
    order_host_writing(dst)
    return order_stream(src, route.stream, driver_device)


# ---- By both, through pinned memory --------------------------------------------------------------

cdef int copy_staged(Buffer dst, Buffer src, DriverDevice driver_device, const Route* route,
                     End device) except -1:
    order_ends(dst, src, driver_device, route, device)
    return stage(driver_device, route.stream, route.rows, device)


cdef int copy_repacked(Buffer dst, Buffer src, DriverDevice driver_device,
                       const Route* route) except -1:
    # Copies between two layouts that need too many boxes, through packed elements on the host.
    cdef uint64_t nbytes = rows_bytes(route.rows)
    cdef void* packed = malloc(nbytes)
    cdef DriverDevice source = src.home.driver_device
    cdef DriverDevice target = dst.home.driver_device
    cdef Rows half
    if packed == NULL:
        raise MemoryError(f"out of host memory while repacking {format_size(nbytes)}")
    try:
        # Each half is on its end's own stream. The first half is ordered after the requested
        # stream, and is done when the second begins.
        order_read(src, route.stream, driver_device)
        order_stream(src, own_stream(src))
        half = route.rows[0]
        rows_pack(&half, END_TO, <uintptr_t>packed)
        stage(source, own_stream(src), &half, END_ORIGIN)
        order_stream(dst, own_stream(dst))
        half = route.rows[0]
        rows_pack(&half, END_ORIGIN, <uintptr_t>packed)
        stage(target, own_stream(dst), &half, END_TO)
    finally:
        free(packed)
    return 0


cdef int stage(DriverDevice driver_device, CUstream stream, const Rows* rows, End device) except -1:
    cdef Ring ring = ring_for(rows_bytes(rows))
    cdef Buffer memory = ring_memory(driver_device, ring_bytes(ring))
    cdef void* plain = NULL
    cdef CallResult result
    cdef Rows led = rows[0]
    rows_lead(&led, device)
    wait_for_stream(&driver_device.context, stream)
    if memory is not None:
        ring.address = memory.address
    else:
        # Without a ring of pinned memory the driver stages through its own: slower, also correct.
        plain = malloc(ring_bytes(ring))
        if plain == NULL:
            raise MemoryError(f"out of host memory while staging {format_size(ring_bytes(ring))}")
        ring.address = <uintptr_t>plain
    with nogil:
        result = entered(&driver_device.context)
        if result.code == CUDA_SUCCESS:
            result = rows_stage(&driver_device.context, stream, &led, device, ring)
            context_leave(&driver_device.context)
    free(plain)
    return check(driver_device.context.table, result.code, result.call.decode())


# ---- Filling with one value ----------------------------------------------------------------------

cdef struct QueuedFill:
    uint64_t address
    int64_t count
    size_t itemsize             # the element's bytes follow


cdef int fill_elements(Buffer dst, uint64_t address, int64_t count, bytes element,
                       object stream) except -1:
    cdef size_t itemsize = len(element)
    cdef const uint8_t* value = element
    cdef Lease* written
    if count == 0:
        return 0
    written = access_begin(dst)
    try:
        if stream is not None or not is_cpus(dst):
            return queue_fill(dst, address, value, itemsize, count, stream)
        # Host memory without a stream is filled without a driver call before this returns.
        order_host_writing(dst)
        with nogil:
            fill_by_cpu(<uint8_t*><uintptr_t>address, value, itemsize, count)
        return 0
    finally:
        access_end(dst, written)


cdef int queue_fill(Buffer dst, uint64_t address, const uint8_t* value, size_t itemsize,
                    int64_t count, object stream) except -1:
    cdef DriverDevice driver_device = dst.home.driver_device
    cdef DeviceContext* context = &driver_device.context
    cdef CUstream handle = own_stream(dst)
    cdef CallResult result
    cdef bint by_cpu
    if stream is not None:
        stream_handle(stream, driver_device, &handle)
    # The fill is ordered after earlier work on the buffer's own stream, and before its later work.
    order_stream(dst, handle)
    # The driver's own copies would block here, as between host memories.
    by_cpu = (is_hosts(dst, True, driver_device) and not fill_is_word(address, value, itemsize)
              and not is_capturing(driver_device, handle))
    with nogil:
        if by_cpu:
            result = fill_in_turn(context, handle, address, value, itemsize, count)
        else:
            result = entered(context)
            if result.code == CUDA_SUCCESS:
                result = fill_queue(context, handle, address, value, itemsize, count)
                context_leave(context)
    # This also runs after a failure, because the calls before the failed one are queued.
    order_written(dst, handle, None, stream)
    if is_freed_early(dst, driver_device, by_cpu):
        keep_until_done(dst, driver_device, handle)
    return check(context.table, result.code, result.call.decode())


cdef bint fill_captured(Buffer dst, const Side* to, int ndim, const int64_t* shape, bytes element,
                        object stream) except -1:
    # A copy of the element would be a node that reads it whenever the graph is launched.
    cdef DriverDevice driver_device = dst.home.driver_device
    cdef DeviceContext* context = &driver_device.context
    cdef CUstream handle = own_stream(dst)
    cdef size_t itemsize = len(element)
    cdef const uint8_t* value = element
    cdef CallResult result
    cdef Lease* written
    cdef Rows rows
    if stream is not None:
        stream_handle(stream, driver_device, &handle)
    elif is_cpus(dst):
        return False
    if not is_capturing(driver_device, handle):
        return False
    if not rows_make(&rows, to.address, to.strides, to.address, to.strides, ndim, shape, itemsize,
                     END_TO):
        return True
    if rows_box(&rows).calls > MAX_CALLS:
        wait_for_stream(context, handle)    # refused: it is captured
    written = access_begin(dst)
    try:
        order_stream(dst, handle)
        with nogil:
            result = entered(context)
            if result.code == CUDA_SUCCESS:
                result = fill_queue(context, handle, rows.to, value, itemsize,
                                    rows.width // itemsize)
                if result.code == CUDA_SUCCESS:
                    result = spread_queue(context, handle, &rows)
                context_leave(context)
        order_written(dst, handle)
    finally:
        access_end(dst, written)
    check(context.table, result.code, result.call.decode())
    return True


cdef CallResult fill_in_turn(DeviceContext* context, CUstream stream, uint64_t address,
                             const uint8_t* value, size_t itemsize, int64_t count) noexcept nogil:
    cdef QueuedFill* queued = <QueuedFill*>malloc(sizeof(QueuedFill) + itemsize)
    cdef CallResult result
    if queued == NULL:
        return call_result(CUDA_ERROR_OUT_OF_MEMORY, "malloc")
    queued[0] = QueuedFill(address, count, itemsize)
    memcpy(queued + 1, value, itemsize)
    result = call_result(queue_call(context, stream, run_queued_fill, queued), "cuLaunchHostFunc")
    if result.code != CUDA_SUCCESS:
        free(queued)
    return result


cdef void run_queued_fill(void* work) noexcept nogil:
    cdef QueuedFill* queued = <QueuedFill*>work
    fill_by_cpu(<uint8_t*><uintptr_t>queued.address, <const uint8_t*>(queued + 1),
                queued.itemsize, queued.count)
    free(queued)


# ---- Keeping other owners' memory until a copy that uses it is done ------------------------------
#
# The stream calls a function when the copy is done. That function must not call the driver, but the
# owner of the memory may do so when it is released, or take the interpreter lock. So the function
# only passes the lease to a worker thread.

cdef struct KeptLease:
    WorkJob job
    void* lease


cdef int keep_until_done(Buffer buffer, DriverDevice driver_device, CUstream stream) except -1:
    # If the lease cannot be queued, the CPU waits for the stream.
    cdef KeptLease* kept = <KeptLease*>malloc(sizeof(KeptLease))
    cdef CUresult code
    if kept == NULL:
        return finish_stream(&driver_device.context, stream)
    try:
        kept.lease = buffer_share(buffer)
    except BaseException:
        free(kept)
        finish_stream(&driver_device.context, stream)
        raise
    with nogil:
        code = queue_release(&driver_device.context, stream, kept)
    if code == CUDA_SUCCESS:
        return 0
    try:
        check(driver_device.context.table, code, "cuLaunchHostFunc")
    except DriverError as refusal:
        wait_instead(driver_device, stream, refusal)
    finally:
        end_lease(kept, 0)      # only now: until then the copy may use the memory
    return 0


cdef CUresult queue_release(DeviceContext* context, CUstream stream,
                            KeptLease* kept) noexcept nogil:
    cdef bint capturing = False
    cdef CUresult code = stream_is_capturing(context, stream, &capturing)
    if code == CUDA_SUCCESS and capturing:
        end_lease(kept, 0)      # a graph may run any number of times: the caller keeps its memory
    elif code == CUDA_SUCCESS:
        code = queue_call(context, stream, release, kept)
    return code


cdef void release(void* kept) noexcept nogil:
    detach_job(&(<KeptLease*>kept).job, kept, end_lease)


cdef void end_lease(void* kept, int64_t number) noexcept nogil:
    drop_share((<KeptLease*>kept).lease)
    free(kept)


# ---- Memory that other libraries' work uses ------------------------------------------------------

def order_behind(Buffer buffer not None, Stream stream not None):
    """Order later work of `stream` after work of a buffer's stream, and after copies that use it.

    If an arena has peers="on_use", the stream's device gets access. Between a GPU and the host
    device, which share no events, the CPU waits. A stream that is being captured cannot wait for
    one that is not: the caller orders its launch.
    """
    cdef DriverDevice own = buffer.home.driver_device
    if own is not stream.driver_device and own.type == stream.driver_device.type:
        buffer.home.let_access(stream.driver_device)
    if not is_capturing(stream.driver_device, stream.handle):
        order_stream(buffer, stream.handle, stream.driver_device)


def synchronize(Buffer buffer not None):
    """Wait for work of a buffer's stream, and for copies and fills of it on other streams."""
    order_host_slowly(buffer)


def retain_until_done(Buffer buffer not None, Stream stream not None):
    """Retain a buffer's memory until the work queued on `stream` now is done.

    This does not wait. A block of the same device is recorded by `Buffer.record_stream`; memory
    that other owners may free at once is kept by a lease, which ends on the stream.
    """
    if buffer.is_closed or buffer.block_bytes == 0:
        return
    if (not buffer.home.is_foreign and not is_users(buffer)
            and buffer.home.driver_device is stream.driver_device):
        return buffer.record_stream(stream)
    keep_until_done(buffer, stream.driver_device, stream.handle)


cdef bint is_users(Buffer buffer):
    return buffer.home.ledger != NULL and buffer.home.ledger.is_users


def wait_for_releases(bint may_wait=True):
    # Waits until the leases of completed copies have ended.
    if may_wait:
        with nogil:
            wait_for_detached_jobs()


on_release("copies", wait_for_releases)


def set_staged_from(int64_t nbytes):
    """Stage pageable copies of at least `nbytes`, for measurements; -1 restores the default."""
    global staged_from
    staged_from = nbytes if nbytes >= 0 else STAGED_FROM
