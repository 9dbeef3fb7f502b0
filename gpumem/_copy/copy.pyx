"""Choosing how bytes move: by the CPU, by the driver, or by both through pinned memory."""

from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

from gpumem._buffer cimport (
    Buffer, buffer_share, drop_share, order_after, order_before, order_host, order_host_writing,
    order_read, order_stream, order_written, own_stream, Stream, stream_handle, wait_for_stream,
)
from gpumem._copy.driver cimport Answer, answer, rows_queue, rows_queue_peer
from gpumem._copy.plan cimport (
    Box, End, END_ORIGIN, END_TO, Rows, rows_box, rows_bytes, rows_lead, rows_make, rows_pack,
    rows_reach,
)
from gpumem._copy.staged cimport (
    CrewJob, job_leave, jobs_left_wait, Ring, ring_bytes, ring_for, ring_memory, rows_move_together,
    rows_stage,
)
from gpumem._native.driver cimport (
    check, context_enter, context_leave, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS, CUresult, CUstream, CUstreamCaptureStatus,
    DeviceContext, DriverDevice,
)

from gpumem._support.releases import on_release
from gpumem.device import MemoryKind
from gpumem.errors import DriverError


cdef enum:
    # Bytes between pageable memory and a device from which several threads and a ring of pinned
    # memory are faster than the driver's own staging (bench/results/copies.md).
    STAGED_FROM = 4 << 20
    # Driver calls for one copy. Beyond, the CPU packs: a call costs microseconds, and what needs
    # so many is scattered in pieces that the device's copy engine is slow at too.
    MOST_CALLS = 128

cdef uint64_t staged_from = STAGED_FROM

# A copy under way: what is decided about it before anything is queued.
cdef struct Way:
    CUstream stream
    bint to_known           # the driver reaches the destination itself
    bint origin_known
    bint between_devices    # each of them the other's peer
    bint waits              # no stream was named, and an end's users know of none to wait for
    bint to_is_passing


cdef int copy_elements(Buffer dst, const Side* to, Buffer src, const Side* origin, int ndim,
                       const int64_t* shape, int64_t itemsize, object stream) except -1:
    cdef Rows rows
    cdef Way way
    cdef DriverDevice driver_device = driving_device(dst, src, stream)
    cdef Buffer bound = bound_elsewhere(dst, src, driver_device)
    # if none is given
    way.stream = own_stream(dst if dst.home.driver_device is driver_device else src)
    if stream is not None:
        stream_handle(stream, driver_device, &way.stream)
    if not rows_make(&rows, to.address, to.strides, origin.address, origin.strides, ndim, shape,
                     itemsize, END_TO):
        return 0
    if stream is None and is_cpus(dst) and is_cpus(src):
        return copy_by_cpu(dst, src, &rows)
    way.waits = stream is None and (is_plain(dst) or is_plain(src))
    way.to_is_passing = to.is_passing
    if bound is not None:
        return copy_beside(dst, src, driver_device, &way, &rows, bound)
    return copy_rows(dst, src, driver_device, &way, &rows)


cdef int copy_beside(Buffer dst, Buffer src, DriverDevice driver_device, Way* way, const Rows* rows,
                     Buffer bound) except -1:
    """Copy on the own stream of the end that is bound to its device, as a part of another's."""
    cdef CUstream asked = way.stream
    order_read(bound, asked, driver_device)  # that end's stream comes after the stream asked for
    way.stream = own_stream(bound)
    try:
        return copy_rows(dst, src, bound.home.driver_device, way, rows)
    finally:
        order_stream(bound, asked, driver_device)


cdef int copy_rows(Buffer dst, Buffer src, DriverDevice driver_device, Way* way,
                   const Rows* rows) except -1:
    look_at(way, driver_device, dst, src, rows)
    if not way.to_known and not way.origin_known:
        wait_for_stream(&driver_device.context, way.stream)
        return copy_by_cpu(dst, src, rows)
    if way.to_known and way.origin_known:
        return copy_known(dst, src, driver_device, way, rows)
    return copy_half_known(dst, src, driver_device, way, rows)


# ---- whose work it is ----------------------------------------------------------------------------

cdef DriverDevice driving_device(Buffer dst, Buffer src, object stream):
    """Return the device whose stream it is: the stream's, else a GPU's, the destination's first."""
    cdef DriverDevice driver_device = dst.home.driver_device
    cdef DriverDevice other = src.home.driver_device
    if isinstance(stream, Stream) and (<Stream>stream).driver_device is not driver_device:
        if (<Stream>stream).driver_device is other or (is_cpus(dst) and is_cpus(src)):
            return (<Stream>stream).driver_device
    if driver_device.type == "host" and other.type == "cuda":
        return other
    if (stream is None and driver_device.type == other.type and is_devices(src)
            and not is_devices(dst)):
        return other
    return driver_device


cdef Buffer bound_elsewhere(Buffer dst, Buffer src, DriverDevice driver_device):
    """Return the end that the driver reaches only from another device than this one, or None.

    Between two such memories it copies from anywhere, knowing whose each of them is.
    """
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
    """Tell whether it is an array of the CPU's that somebody else made, pinned or not."""
    return is_cpus(buffer) and buffer.home.is_foreign


cdef int look_at(Way* way, DriverDevice driver_device, Buffer dst, Buffer src,
                 const Rows* rows) except -1:
    cdef uint64_t low, high
    rows_reach(rows, END_TO, &low, &high)
    way.to_known = is_known(dst, driver_device, low, high)
    rows_reach(rows, END_ORIGIN, &low, &high)
    way.origin_known = is_known(src, driver_device, low, high)
    way.between_devices = (dst.home.driver_device is not src.home.driver_device
                           and is_devices(dst) and is_devices(src)
                           and way.to_known and way.origin_known)
    return 0


cdef bint is_devices(Buffer buffer):
    """Tell whether it is memory that only its own device reaches without help."""
    return (buffer.home.memory.kind is MemoryKind.DEVICE
            or (is_cpus(buffer) and not buffer.home.is_foreign))


cdef bint is_known(Buffer buffer, DriverDevice driver_device, uint64_t low,
                   uint64_t high) except -1:
    """Tell whether the device's driver reaches the bytes itself, as it does what it pinned."""
    cdef CUresult code
    if buffer.home.driver_device.type == driver_device.type and not is_plain(buffer):
        return True
    # CPU memory that was perhaps pinned by somebody: asked at both ends.
    with nogil:
        code = context_enter(&driver_device.context)
        if code == CUDA_SUCCESS:
            code = ask_memory_type(&driver_device.context, low)
            if code == CUDA_SUCCESS:
                code = ask_memory_type(&driver_device.context, high - 1)
            context_leave(&driver_device.context)
    return code == CUDA_SUCCESS


cdef CUresult ask_memory_type(DeviceContext* context, uint64_t address) noexcept nogil:
    cdef unsigned int memory_type = 0
    return context.table.cuPointerGetAttribute(&memory_type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                               address)


# ---- by the CPU ----------------------------------------------------------------------------------

cdef int copy_by_cpu(Buffer dst, Buffer src, const Rows* rows) except -1:
    order_host(src)
    order_host_writing(dst)
    with nogil:
        rows_move_together(rows)
    return 0


# ---- by the driver -------------------------------------------------------------------------------

cdef int copy_known(Buffer dst, Buffer src, DriverDevice driver_device, const Way* way,
                    const Rows* rows) except -1:
    cdef Box box = rows_box(rows)
    if way.between_devices:
        box.height = box.depth = -1
        box.calls = rows_bytes(rows) // rows.width
    if box.calls <= MOST_CALLS:
        return queue_copy(dst, src, driver_device, way, rows, box)
    if dst.home.cpu_can_read and src.home.cpu_can_read:
        wait_for_stream(&driver_device.context, way.stream)
        return copy_by_cpu(dst, src, rows)
    if dst.home.cpu_can_read:
        return copy_staged(dst, src, driver_device, way, rows, END_ORIGIN)
    if src.home.cpu_can_read:
        return copy_staged(dst, src, driver_device, way, rows, END_TO)
    return copy_repacked(dst, src, driver_device, way, rows)


cdef int queue_copy(Buffer dst, Buffer src, DriverDevice driver_device, const Way* way,
                    const Rows* rows, Box box) except -1:
    cdef Answer said
    order_before(dst, src, way.stream, driver_device)
    with nogil:
        said = entered(&driver_device.context)
        if said.code == CUDA_SUCCESS:
            if way.between_devices:
                said = rows_queue_peer(&driver_device.context, way.stream, rows,
                                       &dst.home.driver_device.context,
                                       &src.home.driver_device.context)
            else:
                said = rows_queue(&driver_device.context, way.stream, rows, box)
            context_leave(&driver_device.context)
    # Also after a refusal: what was queued before it runs.
    if way.waits:
        wait_for_stream(&driver_device.context, way.stream)
    else:
        join(dst, src, driver_device, way)
    return check(driver_device.context.table, said.code, said.call.decode())


cdef int join(Buffer dst, Buffer src, DriverDevice driver_device, const Way* way) except -1:
    """Let both buffers' streams come after the copy, and keep others' memory until then."""
    # What somebody pinned has no stream of the GPU's: who pinned it waits for the copy's.
    cdef bint to_hears = not (way.to_is_passing and is_pinned_elsewhere(dst, driver_device))
    cdef bint origin_hears = not is_pinned_elsewhere(src, driver_device)
    try:
        if to_hears and origin_hears:
            order_after(dst, src, way.stream, driver_device)
        elif to_hears:
            order_written(dst, way.stream, driver_device)
        elif origin_hears:
            order_read(src, way.stream, driver_device)
    except DriverError:
        wait_for_stream(&driver_device.context, way.stream)  # as good, and slower
        return 0
    # gpumem's own memory is freed in the order of its stream; others hear of our end at once.
    if src.home.is_foreign:
        hold_until_done(src, driver_device, way.stream)
    if dst.home.is_foreign:
        hold_until_done(dst, driver_device, way.stream)
    return 0


cdef bint is_pinned_elsewhere(Buffer buffer, DriverDevice driver_device):
    return is_plain(buffer) and buffer.home.driver_device.type != driver_device.type


cdef inline Answer entered(DeviceContext* context) noexcept nogil:
    return answer(context_enter(context), "cuCtxPushCurrent")


# ---- from and to memory that the driver does not know --------------------------------------------

cdef int copy_half_known(Buffer dst, Buffer src, DriverDevice driver_device, const Way* way,
                         const Rows* rows) except -1:
    cdef Box box = rows_box(rows)
    cdef End device = END_TO if way.to_known else END_ORIGIN
    cdef Answer said
    if rows_bytes(rows) >= staged_from or box.calls > MOST_CALLS:
        return copy_staged(dst, src, driver_device, way, rows, device)
    order_ends(dst, src, driver_device, way, device)
    with nogil:
        said = entered(&driver_device.context)
        if said.code == CUDA_SUCCESS:
            said = rows_queue(&driver_device.context, way.stream, rows, box)
            context_leave(&driver_device.context)
    # The driver has read such a source when its call returns; for the rest, the CPU waits.
    if device == END_TO:
        join(dst, src, driver_device, way)
    else:
        wait_for_stream(&driver_device.context, way.stream)
    return check(driver_device.context.table, said.code, said.call.decode())


cdef int order_ends(Buffer dst, Buffer src, DriverDevice driver_device, const Way* way,
                    End device) except -1:
    """Wait for the CPU's end here, and for the device's on the stream."""
    if device == END_TO:
        order_host(src)
        return order_stream(dst, way.stream, driver_device)
    order_host_writing(dst)
    return order_stream(src, way.stream, driver_device)


# ---- by both, through pinned memory --------------------------------------------------------------

cdef int copy_staged(Buffer dst, Buffer src, DriverDevice driver_device, const Way* way,
                     const Rows* rows, End device) except -1:
    order_ends(dst, src, driver_device, way, device)
    return stage(driver_device, way.stream, rows, device)


cdef int copy_repacked(Buffer dst, Buffer src, DriverDevice driver_device, const Way* way,
                       const Rows* rows) except -1:
    """Between two layouts that no few boxes cover: the CPU packs the elements in between."""
    cdef uint64_t nbytes = rows_bytes(rows)
    cdef void* packed = malloc(nbytes)
    cdef DriverDevice source = src.home.driver_device
    cdef DriverDevice target = dst.home.driver_device
    cdef Rows half
    if packed == NULL:
        raise MemoryError(f"no host memory for {nbytes} bytes between two layouts")
    try:
        # Each half on its end's own stream; the first is over, with all that the stream asked for
        # had queued, when the second begins.
        order_read(src, way.stream, driver_device)
        half = rows[0]
        rows_pack(&half, END_TO, <uintptr_t>packed)
        stage(source, own_stream(src), &half, END_ORIGIN)
        half = rows[0]
        rows_pack(&half, END_ORIGIN, <uintptr_t>packed)
        stage(target, own_stream(dst), &half, END_TO)
    finally:
        free(packed)
    return 0


cdef int stage(DriverDevice driver_device, CUstream stream, const Rows* rows, End device) except -1:
    cdef Ring ring = ring_for(rows_bytes(rows))
    cdef Buffer memory = ring_memory(driver_device, ring_bytes(ring))
    cdef void* plain = NULL
    cdef Answer said
    cdef Rows led
    rows_lead(rows, device, &led)
    if memory is not None:
        ring.address = memory.address
    else:
        # The driver stages what it does not know itself: slower, and right all the same.
        plain = malloc(ring_bytes(ring))
        if plain == NULL:
            raise MemoryError(f"no host memory for {ring_bytes(ring)} bytes of staging")
        ring.address = <uintptr_t>plain
    with nogil:
        said = entered(&driver_device.context)
        if said.code == CUDA_SUCCESS:
            said = rows_stage(&driver_device.context, stream, &led, device, ring)
            context_leave(&driver_device.context)
    free(plain)
    return check(driver_device.context.table, said.code, said.call.decode())


def set_staged_from(int64_t nbytes):
    """Stage pageable copies from so many bytes on, for measurements; -1 is as usual."""
    global staged_from
    staged_from = nbytes if nbytes >= 0 else STAGED_FROM


# ---- Claims that a stream gives back -------------------------------------------------------------
#
# A driver's callback must not call the driver, and the owner of foreign memory may do so when it
# hears of the end, or want the interpreter lock. So the callback only hands the claim to the crew.


cdef struct Held:
    CrewJob job
    void* lease


cdef int hold_until_done(Buffer buffer, DriverDevice driver_device, CUstream stream) except -1:
    cdef Held* held = <Held*>malloc(sizeof(Held))
    cdef CUresult code
    if held == NULL:
        return wait_for_stream(&driver_device.context, stream)
    try:
        held.lease = buffer_share(buffer)
    except BaseException:
        free(held)
        wait_for_stream(&driver_device.context, stream)
        raise
    with nogil:
        code = queue_release(&driver_device.context, stream, held)
    if code != CUDA_SUCCESS:
        drop(held, 0)
        wait_for_stream(&driver_device.context, stream)
    return 0


cdef CUresult queue_release(DeviceContext* context, CUstream stream, Held* held) noexcept nogil:
    cdef CUresult code = context_enter(context)
    cdef CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE
    if code != CUDA_SUCCESS:
        return code
    if context.table.cuStreamIsCapturing != NULL:
        context.table.cuStreamIsCapturing(stream, &capturing)
    if capturing != CU_STREAM_CAPTURE_STATUS_NONE:
        drop(held, 0)       # a graph uses its memory as often as it runs: that is its maker's care
    else:
        code = context.table.cuLaunchHostFunc(stream, release, held)
    context_leave(context)
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
