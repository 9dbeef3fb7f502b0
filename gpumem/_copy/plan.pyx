"""Merging, boxing and cutting strided copies."""

from libc.stdint cimport INT64_MAX, int64_t, uint64_t, uint8_t, uintptr_t
from libc.string cimport memcpy, memmove


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
            add_dim(rows, shape[i], to_strides[i], origin_strides[i], leader)
    sort_dims(rows, leader)
    merge_dims(rows)
    return True


cdef inline const int64_t* ends_strides(const Rows* rows, End end) noexcept nogil:
    return &rows.to_strides[0] if end == END_TO else &rows.origin_strides[0]


cdef void add_dim(Rows* rows, int64_t length, int64_t to, int64_t origin,
                  End leader) noexcept nogil:
    # A dimension that the leading end walks backwards is walked from its other end by both.
    cdef int n = rows.ndim
    if (to if leader == END_TO else origin) < 0:
        rows.to += (length - 1) * to
        rows.origin += (length - 1) * origin
        to = -to
        origin = -origin
    rows.shape[n] = length
    rows.to_strides[n] = to
    rows.origin_strides[n] = origin
    rows.ndim = n + 1


cdef bint is_outside(const Rows* rows, int a, int b, End leader) noexcept nogil:
    # By the leader's strides; the other end decides where the leader's are equal (0, say).
    cdef const int64_t* first = ends_strides(rows, leader)
    cdef const int64_t* second = ends_strides(rows, END_ORIGIN if leader == END_TO else END_TO)
    if first[a] != first[b]:
        return first[a] > first[b]
    return second[a] > second[b]


cdef void sort_dims(Rows* rows, End leader) noexcept nogil:
    # By insertion: there are few dimensions, mostly in order already.
    cdef int i, j
    for i in range(1, rows.ndim):
        j = i
        while j > 0 and is_outside(rows, j, j - 1, leader):
            swap(&rows.shape[j], &rows.shape[j - 1])
            swap(&rows.to_strides[j], &rows.to_strides[j - 1])
            swap(&rows.origin_strides[j], &rows.origin_strides[j - 1])
            j -= 1


cdef inline void swap(int64_t* a, int64_t* b) noexcept nogil:
    cdef int64_t kept = a[0]
    a[0] = b[0]
    b[0] = kept


cdef void merge_dims(Rows* rows) noexcept nogil:
    # From the inside. First the dimensions that continue the row on both sides become part of it;
    # then neighbours that together step evenly on both sides become one dimension. The merged
    # dimensions collect at the arrays' ends, and move to their beginnings at last.
    cdef int read, inner
    cdef int64_t width = rows.width
    while (rows.ndim > 0 and rows.to_strides[rows.ndim - 1] == width
           and rows.origin_strides[rows.ndim - 1] == width):
        rows.ndim -= 1
        width *= rows.shape[rows.ndim]
    rows.width = width
    if rows.ndim == 0:
        return
    inner = rows.ndim - 1
    for read in range(rows.ndim - 2, -1, -1):
        if (rows.to_strides[read] == rows.shape[inner] * rows.to_strides[inner]
                and rows.origin_strides[read] == rows.shape[inner] * rows.origin_strides[inner]):
            rows.shape[inner] *= rows.shape[read]
        else:
            inner -= 1
            rows.shape[inner] = rows.shape[read]
            rows.to_strides[inner] = rows.to_strides[read]
            rows.origin_strides[inner] = rows.origin_strides[read]
    rows.ndim -= inner
    memmove(rows.shape, rows.shape + inner, rows.ndim * sizeof(int64_t))
    memmove(rows.to_strides, rows.to_strides + inner, rows.ndim * sizeof(int64_t))
    memmove(rows.origin_strides, rows.origin_strides + inner, rows.ndim * sizeof(int64_t))


cdef void rows_lead(const Rows* rows, End leader, Rows* led) noexcept nogil:
    cdef int i
    led.to = rows.to
    led.origin = rows.origin
    led.width = rows.width
    led.ndim = 0
    for i in range(rows.ndim):
        add_dim(led, rows.shape[i], rows.to_strides[i], rows.origin_strides[i], leader)
    sort_dims(led, leader)
    merge_dims(led)


cdef void rows_reach(const Rows* rows, End end, uint64_t* low, uint64_t* high) noexcept nogil:
    # The end that does not lead may have negative strides.
    cdef const int64_t* strides = ends_strides(rows, end)
    cdef int i
    low[0] = rows.to if end == END_TO else rows.origin
    high[0] = low[0] + rows.width
    for i in range(rows.ndim):
        if strides[i] < 0:
            low[0] += (rows.shape[i] - 1) * strides[i]
        else:
            high[0] += (rows.shape[i] - 1) * strides[i]


cdef uint64_t rows_bytes(const Rows* rows) noexcept nogil:
    cdef uint64_t total = rows.width
    cdef int i
    for i in range(rows.ndim):
        total *= rows.shape[i]
    return total


cdef void rows_pack(Rows* rows, End end, uint64_t address) noexcept nogil:
    cdef int64_t* strides = <int64_t*>ends_strides(rows, end)
    cdef int64_t step = rows.width
    cdef int i
    for i in range(rows.ndim - 1, -1, -1):
        strides[i] = step
        step *= rows.shape[i]
    if end == END_TO:
        rows.to = address
    else:
        rows.origin = address
    merge_dims(rows)        # more may be adjacent on both sides now


# ---- Boxes ---------------------------------------------------------------------------------------

# A box is `width` x `shape[height]` x `shape[depth]` bytes. Its rows must not overlap, and its
# slices must be whole rows apart, on both sides: that is what pitched copies can express.

cdef inline bint is_pitch(const Rows* rows, int64_t stride) noexcept nogil:
    return <int64_t>rows.width <= stride <= MOST_PITCH


cdef inline bint is_height(const Rows* rows, int dim) noexcept nogil:
    return is_pitch(rows, rows.to_strides[dim]) and is_pitch(rows, rows.origin_strides[dim])


cdef inline bint is_slice(int64_t stride, int64_t pitch, int64_t height) noexcept nogil:
    return stride % pitch == 0 and stride // pitch >= height


cdef inline bint is_depth(const Rows* rows, int height, int dim) noexcept nogil:
    return (is_slice(rows.to_strides[dim], rows.to_strides[height], rows.shape[height])
            and is_slice(rows.origin_strides[dim], rows.origin_strides[height],
                         rows.shape[height]))


cdef Box rows_box(const Rows* rows) noexcept nogil:
    cdef Box box
    cdef int64_t most = 1
    cdef int64_t inside
    cdef int height, depth, i
    box.height = -1
    box.depth = -1
    box.calls = 1
    # Of all pairs of dimensions, the one that covers the most rows; a height alone is a 2-D copy.
    for height in range(rows.ndim):
        if not is_height(rows, height):
            continue
        if rows.shape[height] > most:
            most = rows.shape[height]
            box.height = height
            box.depth = -1
        for depth in range(rows.ndim):
            inside = rows.shape[height] * rows.shape[depth]
            if depth != height and inside > most and is_depth(rows, height, depth):
                most = inside
                box.height = height
                box.depth = depth
    # One call for each index of the other dimensions.
    for i in range(rows.ndim):
        if i != box.height and i != box.depth:
            if box.calls > INT64_MAX // rows.shape[i]:
                box.calls = INT64_MAX
                return box
            box.calls *= rows.shape[i]
    return box


cdef bint rows_next(Rows* rows, Box box, int64_t* index) noexcept nogil:
    # Like an odometer: a dimension that has run through returns to 0, and the next outer one steps.
    cdef int i
    for i in range(rows.ndim - 1, -1, -1):
        if i == box.height or i == box.depth:
            continue
        index[i] += 1
        rows.to += rows.to_strides[i]
        rows.origin += rows.origin_strides[i]
        if index[i] < rows.shape[i]:
            return True
        rows.to -= index[i] * rows.to_strides[i]
        rows.origin -= index[i] * rows.origin_strides[i]
        index[i] = 0
    return False


# ---- Pieces --------------------------------------------------------------------------------------

cdef Cut rows_cut(const Rows* rows, uint64_t most_bytes) noexcept nogil:
    # The outermost dimension of which one index still fits, so that pieces are more than half full.
    cdef Cut cut
    cdef uint64_t inside = rows.width
    cdef int64_t length
    cdef int i
    if rows.width > most_bytes:     # a single row is too long: cut it by bytes
        cut.dim = rows.ndim
        cut.step = most_bytes
        length = rows.width
    else:
        cut.dim = rows.ndim - 1
        while cut.dim > 0 and inside * rows.shape[cut.dim] <= most_bytes:
            inside *= rows.shape[cut.dim]
            cut.dim -= 1
        if cut.dim < 0:             # one row, and it fits
            cut.dim = 0
            cut.step = rows.width
            length = rows.width
        else:
            length = rows.shape[cut.dim]
            cut.step = min(length, <int64_t>(most_bytes // inside))
    cut.per_run = (length + cut.step - 1) // cut.step
    cut.count = cut.per_run
    for i in range(min(cut.dim, rows.ndim)):
        cut.count *= rows.shape[i]
    return cut


cdef void rows_piece(const Rows* rows, Cut cut, int64_t number, Rows* piece) noexcept nogil:
    # Pieces are numbered along the cut dimension first, then through those outside it.
    cdef int64_t run = number // cut.per_run
    cdef int64_t begin = number % cut.per_run * cut.step
    cdef int64_t index
    cdef int i
    piece[0] = rows[0]
    for i in range(min(cut.dim, rows.ndim) - 1, -1, -1):
        index = run % rows.shape[i]
        run //= rows.shape[i]
        piece.to += index * rows.to_strides[i]
        piece.origin += index * rows.origin_strides[i]
    if cut.dim == rows.ndim:        # part of a row
        piece.to += begin
        piece.origin += begin
        piece.width = min(cut.step, <int64_t>rows.width - begin)
        piece.ndim = 0
        return
    piece.to += begin * rows.to_strides[cut.dim]
    piece.origin += begin * rows.origin_strides[cut.dim]
    piece.ndim = rows.ndim - cut.dim
    for i in range(piece.ndim):
        piece.shape[i] = rows.shape[cut.dim + i]
        piece.to_strides[i] = rows.to_strides[cut.dim + i]
        piece.origin_strides[i] = rows.origin_strides[cut.dim + i]
    piece.shape[0] = min(cut.step, rows.shape[cut.dim] - begin)


# ---- By the CPU ----------------------------------------------------------------------------------

cdef void rows_move(const Rows* rows) noexcept nogil:
    cdef Rows left
    cdef Box line                   # the innermost dimension, which one loop walks
    cdef int64_t index[MOST_DIMS]
    cdef int i
    if rows.ndim == 0:
        memmove(<void*><uintptr_t>rows.to, <const void*><uintptr_t>rows.origin, rows.width)
        return
    left = rows[0]
    line.height = rows.ndim - 1
    line.depth = -1
    for i in range(rows.ndim):
        index[i] = 0
    while True:
        move_line(<uint8_t*><uintptr_t>left.to, <const uint8_t*><uintptr_t>left.origin,
                  left.shape[line.height], left.to_strides[line.height],
                  left.origin_strides[line.height], left.width)
        if not rows_next(&left, line, index):
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
