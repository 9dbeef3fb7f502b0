"""Arithmetic of shapes and strides; see _layout.pxd."""

from libc.stdint cimport int64_t

cdef extern from *:
    """
    static inline int gm_mul(int64_t a, int64_t b, int64_t *product) {
        return __builtin_mul_overflow(a, b, product);
    }
    static inline int gm_add(int64_t a, int64_t b, int64_t *sum) {
        return __builtin_add_overflow(a, b, sum);
    }
    """
    bint gm_mul(int64_t a, int64_t b, int64_t* product) noexcept nogil
    bint gm_add(int64_t a, int64_t b, int64_t* sum) noexcept nogil


cdef int64_t layout_size(int ndim, const int64_t* shape, int64_t itemsize) noexcept nogil:
    # Counts zero as one on the way, as NumPy does: (0, 2**62) is refused like (1, 2**62), so that
    # strides never overflow.
    cdef int64_t size = 1
    cdef int64_t nbytes = itemsize
    cdef int i
    for i in range(ndim):
        size *= shape[i]
        if shape[i] > 1 and gm_mul(nbytes, shape[i], &nbytes):
            return -1
    return size


cdef void layout_c_strides(int ndim, const int64_t* shape, int64_t itemsize,
                           int64_t* strides) noexcept nogil:
    cdef int64_t step = itemsize
    cdef int i
    for i in range(ndim - 1, -1, -1):
        strides[i] = step
        if shape[i] > 1:
            step *= shape[i]


cdef bint layout_is_c(int ndim, const int64_t* shape, const int64_t* strides,
                      int64_t itemsize) noexcept nogil:
    cdef int64_t step = itemsize
    cdef bint whole = True
    cdef int i
    for i in range(ndim - 1, -1, -1):
        if shape[i] == 0:
            return True
        if shape[i] != 1:
            whole = whole and strides[i] == step
            step *= shape[i]
    return whole


cdef bint layout_is_f(int ndim, const int64_t* shape, const int64_t* strides,
                      int64_t itemsize) noexcept nogil:
    cdef int64_t step = itemsize
    cdef bint whole = True
    cdef int i
    for i in range(ndim):
        if shape[i] == 0:
            return True
        if shape[i] != 1:
            whole = whole and strides[i] == step
            step *= shape[i]
    return whole


cdef bint layout_extent(int ndim, const int64_t* shape, const int64_t* strides, int64_t itemsize,
                        int64_t* low, int64_t* high) noexcept nogil:
    cdef int64_t reach
    cdef int i
    low[0] = 0
    high[0] = 0
    for i in range(ndim):
        if shape[i] == 0:
            low[0] = 0
            high[0] = 0
            return True
        if gm_mul(shape[i] - 1, strides[i], &reach):
            return False
        if gm_add(low[0] if reach < 0 else high[0], reach, low if reach < 0 else high):
            return False
    return not gm_add(high[0], itemsize, high) and high[0] - low[0] >= 0


cdef bint layout_reshape(int ndim, const int64_t* shape, const int64_t* strides, int64_t itemsize,
                         int to_ndim, const int64_t* to_shape, int64_t* to_strides) noexcept nogil:
    # Both shapes are cut into groups of dimensions with equal products; a group of the old shape
    # must be one run of equal steps, which the group of the new shape then divides anew.
    cdef int64_t old_shape[MAX_RANK]
    cdef int64_t old_strides[MAX_RANK]
    cdef int64_t old_product
    cdef int64_t new_product
    cdef int old_ndim = 0
    cdef int old_end
    cdef int new_end
    cdef int old_begin = 0
    cdef int new_begin = 0
    cdef int i
    if layout_is_c(ndim, shape, strides, itemsize):
        layout_c_strides(to_ndim, to_shape, itemsize, to_strides)
        return True
    for i in range(ndim):           # dimensions of one element say nothing
        if shape[i] != 1:
            old_shape[old_ndim] = shape[i]
            old_strides[old_ndim] = strides[i]
            old_ndim += 1
    while old_begin < old_ndim:
        old_end = old_begin + 1
        old_product = old_shape[old_begin]
        new_end = new_begin
        new_product = 1
        while new_product != old_product:
            if new_product < old_product:
                new_product *= to_shape[new_end]
                new_end += 1
            else:
                old_product *= old_shape[old_end]
                old_end += 1
        for i in range(old_begin, old_end - 1):
            if old_strides[i] != old_shape[i + 1] * old_strides[i + 1]:
                return False
        split_run(old_strides[old_end - 1], new_begin, new_end, to_shape, to_strides)
        old_begin = old_end
        new_begin = new_end
    for i in range(new_begin, to_ndim):     # trailing dimensions of one element
        to_strides[i] = itemsize
    return True


cdef inline void split_run(int64_t step, int begin, int end, const int64_t* to_shape,
                           int64_t* to_strides) noexcept nogil:
    cdef int i
    for i in range(end - 1, begin - 1, -1):
        to_strides[i] = step
        step *= to_shape[i]
