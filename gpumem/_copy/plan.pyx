"""Merging, boxing and cutting strided copies; choosing the driver's copy function, and fills."""

from libc.stdint cimport INT64_MAX, int64_t, uint32_t, uint64_t, uint8_t, uintptr_t
from libc.string cimport memcpy, memmove, memset

from gpumem._native.driver cimport (
    CU_MEMORYTYPE_UNIFIED, CUDA_MEMCPY2D, CUDA_MEMCPY3D, CUDA_SUCCESS, CUstream, DeviceContext,
)


# ---- Rows ----------------------------------------------------------------------------------------

cdef bint rows_make(Rows* rows, uint64_t to, const int64_t* to_strides, uint64_t origin,
                    const int64_t* origin_strides, int ndim, const int64_t* shape,
                    int64_t itemsize, End leader) noexcept nogil:
    cdef int i
    rows.to = to
    rows.origin = origin
    rows.width = itemsize
    rows.ndim = 0
    for i in range(ndim):
        if shape[i] == 0:
            return False
        if shape[i] != 1:           # the stride of a dimension of one element is arbitrary
            rows.dims[rows.ndim] = Dim(shape[i], to_strides[i], origin_strides[i], 0)
            rows.ndim += 1
    rows_lead(rows, leader)
    return True


cdef void rows_lead(Rows* rows, End leader) noexcept nogil:
    cdef Dim* dim
    cdef int i
    for i in range(rows.ndim):
        dim = &rows.dims[i]
        # If the leading end walks a dimension backwards, both ends walk it from its other end.
        if step_of(dim, leader) < 0:
            rows.to += (dim.length - 1) * dim.to
            rows.origin += (dim.length - 1) * dim.origin
            dim.to = -dim.to
            dim.origin = -dim.origin
    # Sorted first: only neighbours merge.
    sort_dims(rows, leader)
    merge_dims(rows)


cdef inline int64_t step_of(const Dim* dim, End end) noexcept nogil:
    return dim.to if end == END_TO else dim.origin


cdef void sort_dims(Rows* rows, End leader) noexcept nogil:
    # Insertion sort: there are few dimensions, mostly in order already.
    cdef Dim moved
    cdef int i, j
    for i in range(1, rows.ndim):
        moved = rows.dims[i]
        j = i
        while j > 0 and is_outside(&moved, &rows.dims[j - 1], leader):
            rows.dims[j] = rows.dims[j - 1]
            j -= 1
        rows.dims[j] = moved


cdef bint is_outside(const Dim* a, const Dim* b, End leader) noexcept nogil:
    # Compares the leader's strides; the other end decides if these are equal, such as 0.
    cdef End other = END_ORIGIN if leader == END_TO else END_TO
    if step_of(a, leader) != step_of(b, leader):
        return step_of(a, leader) > step_of(b, leader)
    return step_of(a, other) > step_of(b, other)


cdef void merge_dims(Rows* rows) noexcept nogil:
    # From the inside. First the dimensions that continue the row on both sides become part of it;
    # then neighbours that together step evenly on both sides become one dimension. The merged
    # dimensions collect at the array's end, and move to its beginning at last.
    cdef int read, last
    cdef Dim* outer
    cdef Dim* inner
    cdef int64_t width = rows.width
    while (rows.ndim > 0 and rows.dims[rows.ndim - 1].to == width
           and rows.dims[rows.ndim - 1].origin == width):
        rows.ndim -= 1
        width *= rows.dims[rows.ndim].length
    rows.width = width
    last = rows.ndim - 1
    for read in range(rows.ndim - 2, -1, -1):
        outer = &rows.dims[read]
        inner = &rows.dims[last]
        if outer.to == inner.length * inner.to and outer.origin == inner.length * inner.origin:
            inner.length *= outer.length
        else:
            last -= 1
            rows.dims[last] = outer[0]
    if last > 0:
        rows.ndim -= last
        memmove(rows.dims, &rows.dims[last], rows.ndim * sizeof(Dim))


cdef void rows_reach(const Rows* rows, End end, uint64_t* low, uint64_t* high) noexcept nogil:
    # The end that does not lead may have negative strides.
    cdef int64_t distance
    cdef int i
    low[0] = rows.to if end == END_TO else rows.origin
    high[0] = low[0] + rows.width
    for i in range(rows.ndim):
        distance = (rows.dims[i].length - 1) * step_of(&rows.dims[i], end)
        if distance < 0:
            low[0] += distance
        else:
            high[0] += distance


cdef uint64_t rows_bytes(const Rows* rows) noexcept nogil:
    # The product cannot overflow: the destination has an address for each byte, even if the source
    # repeats some of its own.
    cdef uint64_t total = rows.width
    cdef int i
    for i in range(rows.ndim):
        total *= rows.dims[i].length
    return total


cdef void rows_pack(Rows* rows, End end, uint64_t address) noexcept nogil:
    cdef int64_t step = rows.width
    cdef int i
    # In C order: the last dimension is the innermost.
    for i in range(rows.ndim - 1, -1, -1):
        if end == END_TO:
            rows.dims[i].to = step
        else:
            rows.dims[i].origin = step
        step *= rows.dims[i].length
    if end == END_TO:
        rows.to = address
    else:
        rows.origin = address
    merge_dims(rows)        # more may be adjacent on both sides now


# ---- Boxes ---------------------------------------------------------------------------------------

# A box is width x height x depth bytes. Its rows must not overlap, and its slices must be whole
# rows apart, on both sides: pitched copies can express no other boxes.

cdef inline bint is_pitch(const Rows* rows, int64_t stride) noexcept nogil:
    return <int64_t>rows.width <= stride <= MAX_PITCH


cdef inline bint is_slice(int64_t stride, int64_t pitch, int64_t height) noexcept nogil:
    return stride % pitch == 0 and stride // pitch >= height


cdef inline bint is_depth(const Dim* height, const Dim* dim) noexcept nogil:
    return (is_slice(dim.to, height.to, height.length)
            and is_slice(dim.origin, height.origin, height.length))


cdef Box rows_box(const Rows* rows) noexcept nogil:
    cdef Box box
    cdef int64_t most = 1
    cdef int64_t inside
    cdef int height, depth, i
    box.height = box.depth = -1
    box.calls = 1
    # Of all pairs of dimensions, the one that covers the most rows; a height alone is a 2-D copy.
    for height in range(rows.ndim):
        if not (is_pitch(rows, rows.dims[height].to) and is_pitch(rows, rows.dims[height].origin)):
            continue
        if rows.dims[height].length > most:
            most = rows.dims[height].length
            box.height = height
            box.depth = -1
        for depth in range(rows.ndim):
            inside = rows.dims[height].length * rows.dims[depth].length
            if (depth != height and inside > most
                    and is_depth(&rows.dims[height], &rows.dims[depth])):
                most = inside
                box.height = height
                box.depth = depth
    # One call for each index of the other dimensions.
    for i in range(rows.ndim):
        if i != box.height and i != box.depth:
            if box.calls > INT64_MAX // rows.dims[i].length:
                box.calls = INT64_MAX
                return box
            box.calls *= rows.dims[i].length
    return box


cdef bint rows_next(Rows* rows, Box box) noexcept nogil:
    # Like an odometer: a dimension that has run through returns to 0, and the next outer one steps.
    cdef Dim* dim
    cdef int i
    for i in range(rows.ndim - 1, -1, -1):
        if i == box.height or i == box.depth:
            continue
        dim = &rows.dims[i]
        dim.index += 1
        rows.to += dim.to
        rows.origin += dim.origin
        if dim.index < dim.length:
            return True
        rows.to -= dim.index * dim.to
        rows.origin -= dim.index * dim.origin
        dim.index = 0
    return False


# ---- Pieces --------------------------------------------------------------------------------------

cdef Cut rows_cut(const Rows* rows, uint64_t max_bytes) noexcept nogil:
    # The outermost dimension of which one index still fits, so that pieces are more than half full.
    cdef Cut cut
    cdef uint64_t inside = rows.width
    cdef int64_t length
    cdef int i
    if rows.width > max_bytes:     # a single row is too long: cut it by bytes
        cut.dim = rows.ndim
        cut.step = max_bytes
        length = rows.width
    else:
        cut.dim = rows.ndim - 1
        while cut.dim > 0 and inside * rows.dims[cut.dim].length <= max_bytes:
            inside *= rows.dims[cut.dim].length
            cut.dim -= 1
        if cut.dim < 0:             # one row, and it fits
            cut.dim = 0
            cut.step = rows.width
            length = rows.width
        else:
            length = rows.dims[cut.dim].length
            cut.step = min(length, <int64_t>(max_bytes // inside))
    # The last piece of a run may be shorter; runs are not joined, so a piece is in one run.
    cut.per_run = (length + cut.step - 1) // cut.step
    cut.count = cut.per_run
    for i in range(min(cut.dim, rows.ndim)):
        cut.count *= rows.dims[i].length
    return cut


cdef void rows_piece(const Rows* rows, Cut cut, int64_t number, Rows* piece) noexcept nogil:
    # Pieces are numbered along the cut dimension first, then through those outside it.
    cdef int64_t run = number // cut.per_run
    cdef int64_t begin = number % cut.per_run * cut.step
    cdef int64_t index
    cdef int i
    piece[0] = rows[0]
    for i in range(min(cut.dim, rows.ndim) - 1, -1, -1):
        index = run % rows.dims[i].length
        run //= rows.dims[i].length
        piece.to += index * rows.dims[i].to
        piece.origin += index * rows.dims[i].origin
    if cut.dim == rows.ndim:        # part of a row
        piece.to += begin
        piece.origin += begin
        piece.width = min(cut.step, <int64_t>rows.width - begin)
        piece.ndim = 0
        return
    piece.to += begin * rows.dims[cut.dim].to
    piece.origin += begin * rows.dims[cut.dim].origin
    piece.ndim = rows.ndim - cut.dim
    memcpy(piece.dims, &rows.dims[cut.dim], piece.ndim * sizeof(Dim))
    piece.dims[0].length = min(cut.step, piece.dims[0].length - begin)


# ---- By the CPU ----------------------------------------------------------------------------------

cdef void rows_move(const Rows* rows) noexcept nogil:
    cdef Rows left
    cdef Box line                   # the innermost dimension, which one loop walks
    cdef const Dim* dim
    if rows.ndim == 0:
        memmove(<void*><uintptr_t>rows.to, <const void*><uintptr_t>rows.origin, rows.width)
        return
    left = rows[0]
    line.height = rows.ndim - 1
    line.depth = -1
    # The lengths and strides of `rows` never change; `left` has the current addresses.
    dim = &rows.dims[line.height]
    while True:
        move_line(<uint8_t*><uintptr_t>left.to, <const uint8_t*><uintptr_t>left.origin,
                  dim.length, dim.to, dim.origin, left.width)
        if not rows_next(&left, line):
            return


cdef void move_line(uint8_t* to, const uint8_t* origin, int64_t count, int64_t to_step,
                    int64_t origin_step, uint64_t width) noexcept nogil:
    # A width that is known to the compiler becomes one load and one store.
    cdef int64_t i
    if width == 4:
        for i in range(count):
            memcpy(to + i * to_step, origin + i * origin_step, 4)
    elif width == 8:
        for i in range(count):
            memcpy(to + i * to_step, origin + i * origin_step, 8)
    elif width == 2:
        for i in range(count):
            memcpy(to + i * to_step, origin + i * origin_step, 2)
    elif width == 1:
        for i in range(count):
            to[i * to_step] = origin[i * origin_step]
    elif width == 16:
        for i in range(count):
            memcpy(to + i * to_step, origin + i * origin_step, 16)
    else:
        for i in range(count):
            memcpy(to + i * to_step, origin + i * origin_step, width)


# ---- driver calls --------------------------------------------------------------------------------

cdef CallResult rows_queue(DeviceContext* context, CUstream stream, const Rows* rows, Box box,
                           const Peers* peers) noexcept nogil:
    # `left` is at the first byte of the next box; the caller's rows stay as they are.
    cdef Rows left = rows[0]
    cdef CallResult last
    while True:
        if peers != NULL:
            last = call_result(context.table.cuMemcpyPeerAsync(
                left.to, peers.to.primary, left.origin, peers.origin.primary, left.width, stream),
                "cuMemcpyPeerAsync")
        elif box.height < 0:
            last = call_result(
                context.table.cuMemcpyAsync(left.to, left.origin, left.width, stream),
                "cuMemcpyAsync")
        elif box.depth < 0:
            last = queue_2d(context, stream, &left, &left.dims[box.height])
        else:
            last = queue_3d(context, stream, &left, &left.dims[box.height], &left.dims[box.depth])
        if last.code != CUDA_SUCCESS or not rows_next(&left, box):
            return last


cdef CallResult queue_2d(DeviceContext* context, CUstream stream, const Rows* rows,
                         const Dim* height) noexcept nogil:
    # Unified means that the driver finds the memory of each end by its address.
    cdef CUDA_MEMCPY2D copy
    memset(&copy, 0, sizeof(copy))
    copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED
    copy.dstDevice = rows.to
    copy.dstPitch = height.to
    copy.srcMemoryType = CU_MEMORYTYPE_UNIFIED
    copy.srcDevice = rows.origin
    copy.srcPitch = height.origin
    copy.WidthInBytes = rows.width
    copy.Height = height.length
    return call_result(context.table.cuMemcpy2DAsync(&copy, stream), "cuMemcpy2DAsync")


cdef CallResult queue_3d(DeviceContext* context, CUstream stream, const Rows* rows,
                         const Dim* height, const Dim* depth) noexcept nogil:
    # Unified, as above. The distance of two slices is `depth` bytes, which the driver wants in
    # rows.
    cdef CUDA_MEMCPY3D copy
    memset(&copy, 0, sizeof(copy))
    copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED
    copy.dstDevice = rows.to
    copy.dstPitch = height.to
    # In rows of the pitch, not in bytes.
    copy.dstHeight = depth.to // height.to
    copy.srcMemoryType = CU_MEMORYTYPE_UNIFIED
    copy.srcDevice = rows.origin
    copy.srcPitch = height.origin
    copy.srcHeight = depth.origin // height.origin
    copy.WidthInBytes = rows.width
    copy.Height = height.length
    copy.Depth = depth.length
    return call_result(context.table.cuMemcpy3DAsync(&copy, stream), "cuMemcpy3DAsync")


# ---- filling with one value ----------------------------------------------------------------------

cdef bint fill_is_word(uint64_t address, const uint8_t* value, size_t itemsize) noexcept nogil:
    return (is_one_byte(value, itemsize)
            or ((itemsize == 2 or itemsize == 4) and address % itemsize == 0))


cdef CallResult fill_queue(DeviceContext* context, CUstream stream, uint64_t address,
                           const uint8_t* value, size_t itemsize, int64_t count) noexcept nogil:
    cdef size_t total = itemsize * count
    cdef size_t done = 0
    cdef size_t part
    cdef CallResult last
    if is_one_byte(value, itemsize):
        return queue_words(context, stream, address, value, 1, total)
    if fill_is_word(address, value, itemsize):
        return queue_words(context, stream, address, value, itemsize, count)
    # The first element word by word: a call takes its value with it, so `value` may end with this
    # call, also in a capture. Then the filled part is doubled.
    part = 4 if itemsize % 4 == 0 and address % 4 == 0 else 1
    while done < itemsize:
        last = queue_words(context, stream, address + done, value + done, part, 1)
        if last.code != CUDA_SUCCESS:
            return last
        done += part
    while done < total:
        part = min(done, total - done)
        last = call_result(context.table.cuMemcpyDtoDAsync(address + done, address, part, stream),
                           "cuMemcpyDtoDAsync")
        if last.code != CUDA_SUCCESS:
            return last
        done += part
    return last


cdef CallResult spread_queue(DeviceContext* context, CUstream stream,
                             const Rows* rows) noexcept nogil:
    # From the inside, the written part of each dimension is doubled by a copy of itself.
    cdef CallResult last = call_result(CUDA_SUCCESS, "")
    cdef Rows part = rows[0]
    cdef const Dim* dim
    cdef int64_t done
    cdef int i
    for i in range(rows.ndim - 1, -1, -1):
        dim = &rows.dims[i]
        part.ndim = rows.ndim - i
        memcpy(part.dims, dim, part.ndim * sizeof(Dim))
        done = 1
        while done < dim.length:
            part.to = rows.to + done * dim.to
            part.dims[0].length = min(done, dim.length - done)
            last = rows_queue(context, stream, &part, rows_box(&part), NULL)
            if last.code != CUDA_SUCCESS:
                return last
            done += part.dims[0].length
    return last


cdef CallResult queue_words(DeviceContext* context, CUstream stream, uint64_t address,
                            const uint8_t* value, size_t width, size_t count) noexcept nogil:
    cdef uint32_t word = 0
    memcpy(&word, value, width)
    if width == 1:
        return call_result(context.table.cuMemsetD8Async(address, word, count, stream),
                           "cuMemsetD8Async")
    if width == 2:
        return call_result(context.table.cuMemsetD16Async(address, word, count, stream),
                           "cuMemsetD16Async")
    return call_result(context.table.cuMemsetD32Async(address, word, count, stream),
                       "cuMemsetD32Async")


cdef void fill_by_cpu(uint8_t* address, const uint8_t* value, size_t itemsize,
                      int64_t count) noexcept nogil:
    cdef size_t total = itemsize * count
    cdef size_t done = itemsize
    cdef size_t part
    if is_one_byte(value, itemsize):
        memset(address, value[0], total)
        return
    # The written part is doubled: a few long copies instead of `count` short ones.
    memcpy(address, value, itemsize)
    while done < total:
        part = min(done, total - done)
        memcpy(address + done, address, part)
        done += part


cdef bint is_one_byte(const uint8_t* value, size_t itemsize) noexcept nogil:
    # Zeros of every type are then one memset.
    cdef size_t i
    for i in range(1, itemsize):
        if value[i] != value[0]:
            return False
    return True
