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
    check, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS, CUresult,
    CUstream, CUstreamCaptureStatus, DriverDevice, Place, place_enter, place_leave,
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
    cdef DriverDevice place = driving_place(dst, src, stream)
    cdef Buffer bound = bound_elsewhere(dst, src, place)
    way.stream = own_stream(dst if dst.home.place is place else src)    # if none is given
    if stream is not None:
        stream_handle(stream, place, &way.stream)
    if not rows_make(&rows, to.address, to.strides, origin.address, origin.strides, ndim, shape,
                     itemsize, END_TO):
        return 0
    if stream is None and is_cpus(dst) and is_cpus(src):
        return copy_by_cpu(dst, src, &rows)
    way.waits = stream is None and (is_plain(dst) or is_plain(src))
    way.to_is_passing = to.is_passing
    if bound is not None:
        return copy_beside(dst, src, place, &way, &rows, bound)
    return copy_rows(dst, src, place, &way, &rows)


cdef int copy_beside(Buffer dst, Buffer src, DriverDevice place, Way* way, const Rows* rows,
                     Buffer bound) except -1:
    """Copy on the own stream of the end that is bound to its device, as a part of another's."""
    cdef CUstream asked = way.stream
    order_read(bound, asked, place)         # that end's stream comes after the stream asked for
    way.stream = own_stream(bound)
    try:
        return copy_rows(dst, src, bound.home.place, way, rows)
    finally:
        order_stream(bound, asked, place)


cdef int copy_rows(Buffer dst, Buffer src, DriverDevice place, Way* way,
                   const Rows* rows) except -1:
    look_at(way, place, dst, src, rows)
    if not way.to_known and not way.origin_known:
        wait_for_stream(&place.place, way.stream)
        return copy_by_cpu(dst, src, rows)
    if way.to_known and way.origin_known:
        return copy_known(dst, src, place, way, rows)
    return copy_half_known(dst, src, place, way, rows)


# ---- whose work it is ----------------------------------------------------------------------------

cdef DriverDevice driving_place(Buffer dst, Buffer src, object stream):
    """Return the device whose stream it is: the stream's, else a GPU's, the destination's first."""
    cdef DriverDevice place = dst.home.place
    cdef DriverDevice other = src.home.place
    if isinstance(stream, Stream) and (<Stream>stream).place is not place:
        if (<Stream>stream).place is other or (is_cpus(dst) and is_cpus(src)):
            return (<Stream>stream).place
    if place.type == "host" and other.type == "cuda":
        return other
    if stream is None and place.type == other.type and is_devices(src) and not is_devices(dst):
        return other
    return place


cdef Buffer bound_elsewhere(Buffer dst, Buffer src, DriverDevice place):
    """Return the end that the driver reaches from another device than `place` only, or None.

    Between two such memories it copies from anywhere, knowing whose each of them is.
    """
    cdef bint dst_is_bound = is_devices(dst) and dst.home.place.type == place.type
    cdef bint src_is_bound = is_devices(src) and src.home.place.type == place.type
    if dst_is_bound and src_is_bound and dst.home.place is not src.home.place:
        return None
    if dst_is_bound and dst.home.place is not place:
        return dst
    if src_is_bound and src.home.place is not place:
        return src
    return None


cdef bint is_cpus(Buffer buffer):
    return buffer.home.memory.kind is MemoryKind.HOST


cdef bint is_plain(Buffer buffer):
    """Tell whether it is an array of the CPU's that somebody else made, pinned or not."""
    return is_cpus(buffer) and buffer.home.is_foreign


cdef int look_at(Way* way, DriverDevice place, Buffer dst, Buffer src, const Rows* rows) except -1:
    cdef uint64_t low, high
    rows_reach(rows, END_TO, &low, &high)
    way.to_known = is_known(dst, place, low, high)
    rows_reach(rows, END_ORIGIN, &low, &high)
    way.origin_known = is_known(src, place, low, high)
    way.between_devices = (dst.home.place is not src.home.place
                           and is_devices(dst) and is_devices(src)
                           and way.to_known and way.origin_known)
    return 0


cdef bint is_devices(Buffer buffer):
    """Tell whether it is memory that only its own device reaches without help."""
    return (buffer.home.memory.kind is MemoryKind.DEVICE
            or (is_cpus(buffer) and not buffer.home.is_foreign))


cdef bint is_known(Buffer buffer, DriverDevice place, uint64_t low, uint64_t high) except -1:
    """Tell whether the device's driver reaches the bytes itself, as it does what it pinned."""
    cdef CUresult code
    if buffer.home.place.type == place.type and not is_plain(buffer):
        return True
    # CPU memory that was perhaps pinned by somebody: asked at both ends.
    with nogil:
        code = place_enter(&place.place)
        if code == CUDA_SUCCESS:
            code = ask_memory_type(&place.place, low)
            if code == CUDA_SUCCESS:
                code = ask_memory_type(&place.place, high - 1)
            place_leave(&place.place)
    return code == CUDA_SUCCESS


cdef CUresult ask_memory_type(Place* place, uint64_t address) noexcept nogil:
    cdef unsigned int memory_type = 0
    return place.table.cuPointerGetAttribute(&memory_type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                             address)


# ---- by the CPU ----------------------------------------------------------------------------------

cdef int copy_by_cpu(Buffer dst, Buffer src, const Rows* rows) except -1:
    order_host(src)
    order_host_writing(dst)
    with nogil:
        rows_move_together(rows)
    return 0


# ---- by the driver -------------------------------------------------------------------------------

cdef int copy_known(Buffer dst, Buffer src, DriverDevice place, const Way* way,
                    const Rows* rows) except -1:
    cdef Box box = rows_box(rows)
    if way.between_devices:
        box.height = box.depth = -1
        box.calls = rows_bytes(rows) // rows.width
    if box.calls <= MOST_CALLS:
        return queue_copy(dst, src, place, way, rows, box)
    if dst.home.cpu_can_read and src.home.cpu_can_read:
        wait_for_stream(&place.place, way.stream)
        return copy_by_cpu(dst, src, rows)
    if dst.home.cpu_can_read:
        return copy_staged(dst, src, place, way, rows, END_ORIGIN)
    if src.home.cpu_can_read:
        return copy_staged(dst, src, place, way, rows, END_TO)
    return copy_repacked(dst, src, place, way, rows)


cdef int queue_copy(Buffer dst, Buffer src, DriverDevice place, const Way* way, const Rows* rows,
                    Box box) except -1:
    cdef Answer said
    order_before(dst, src, way.stream, place)
    with nogil:
        said = entered(&place.place)
        if said.code == CUDA_SUCCESS:
            if way.between_devices:
                said = rows_queue_peer(&place.place, way.stream, rows, &dst.home.place.place,
                                       &src.home.place.place)
            else:
                said = rows_queue(&place.place, way.stream, rows, box)
            place_leave(&place.place)
    # Also after a refusal: what was queued before it runs.
    if way.waits:
        wait_for_stream(&place.place, way.stream)
    else:
        join(dst, src, place, way)
    return check(place.place.table, said.code, said.call.decode())


cdef int join(Buffer dst, Buffer src, DriverDevice place, const Way* way) except -1:
    """Let both buffers' streams come after the copy, and keep others' memory until then."""
    # What somebody pinned has no stream of the GPU's: who pinned it waits for the copy's.
    cdef bint to_hears = not (way.to_is_passing and is_pinned_elsewhere(dst, place))
    cdef bint origin_hears = not is_pinned_elsewhere(src, place)
    try:
        if to_hears and origin_hears:
            order_after(dst, src, way.stream, place)
        elif to_hears:
            order_written(dst, way.stream, place)
        elif origin_hears:
            order_read(src, way.stream, place)
    except DriverError:
        wait_for_stream(&place.place, way.stream)       # as good, and slower
        return 0
    # gpumem's own memory is freed in the order of its stream; others hear of our end at once.
    if src.home.is_foreign:
        hold_until_done(src, place, way.stream)
    if dst.home.is_foreign:
        hold_until_done(dst, place, way.stream)
    return 0


cdef bint is_pinned_elsewhere(Buffer buffer, DriverDevice place):
    return is_plain(buffer) and buffer.home.place.type != place.type


cdef inline Answer entered(Place* place) noexcept nogil:
    return answer(place_enter(place), "cuCtxPushCurrent")


# ---- from and to memory that the driver does not know --------------------------------------------

cdef int copy_half_known(Buffer dst, Buffer src, DriverDevice place, const Way* way,
                         const Rows* rows) except -1:
    cdef Box box = rows_box(rows)
    cdef End device = END_TO if way.to_known else END_ORIGIN
    cdef Answer said
    if rows_bytes(rows) >= staged_from or box.calls > MOST_CALLS:
        return copy_staged(dst, src, place, way, rows, device)
    order_ends(dst, src, place, way, device)
    with nogil:
        said = entered(&place.place)
        if said.code == CUDA_SUCCESS:
            said = rows_queue(&place.place, way.stream, rows, box)
            place_leave(&place.place)
    # The driver has read such a source when its call returns; for the rest, the CPU waits.
    if device == END_TO:
        join(dst, src, place, way)
    else:
        wait_for_stream(&place.place, way.stream)
    return check(place.place.table, said.code, said.call.decode())


cdef int order_ends(Buffer dst, Buffer src, DriverDevice place, const Way* way,
                    End device) except -1:
    """Wait for the CPU's end here, and for the device's on the stream."""
    if device == END_TO:
        order_host(src)
        return order_stream(dst, way.stream, place)
    order_host_writing(dst)
    return order_stream(src, way.stream, place)


# ---- by both, through pinned memory --------------------------------------------------------------

cdef int copy_staged(Buffer dst, Buffer src, DriverDevice place, const Way* way,
                     const Rows* rows, End device) except -1:
    order_ends(dst, src, place, way, device)
    return stage(place, way.stream, rows, device)


cdef int copy_repacked(Buffer dst, Buffer src, DriverDevice place, const Way* way,
                       const Rows* rows) except -1:
    """Between two layouts that no few boxes cover: the CPU packs the elements in between."""
    cdef uint64_t nbytes = rows_bytes(rows)
    cdef void* packed = malloc(nbytes)
    cdef DriverDevice source = src.home.place
    cdef DriverDevice target = dst.home.place
    cdef Rows half
    if packed == NULL:
        raise MemoryError(f"no host memory for {nbytes} bytes between two layouts")
    try:
        # Each half on its end's own stream; the first is over, with all that the stream asked for
        # had queued, when the second begins.
        order_read(src, way.stream, place)
        half = rows[0]
        rows_pack(&half, END_TO, <uintptr_t>packed)
        stage(source, own_stream(src), &half, END_ORIGIN)
        half = rows[0]
        rows_pack(&half, END_ORIGIN, <uintptr_t>packed)
        stage(target, own_stream(dst), &half, END_TO)
    finally:
        free(packed)
    return 0


cdef int stage(DriverDevice place, CUstream stream, const Rows* rows, End device) except -1:
    cdef Ring ring = ring_for(rows_bytes(rows))
    cdef Buffer memory = ring_memory(place, ring_bytes(ring))
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
        said = entered(&place.place)
        if said.code == CUDA_SUCCESS:
            said = rows_stage(&place.place, stream, &led, device, ring)
            place_leave(&place.place)
    free(plain)
    return check(place.place.table, said.code, said.call.decode())


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
