"""Shapes and strides as numbers: no object, no exception. Strides are in bytes."""

from libc.stdint cimport int64_t, uint64_t

cdef enum:
    MAX_RANK = 64       # NumPy's own limit since 2.0

cdef struct Layout:
    int ndim
    int64_t shape[MAX_RANK]
    int64_t strides[MAX_RANK]

# Elements of a shape; -1 if more bytes than any machine addresses.
cdef int64_t layout_size(int ndim, const int64_t* shape, int64_t itemsize) noexcept nogil
cdef void layout_c_strides(int ndim, const int64_t* shape, int64_t itemsize,
                           int64_t* strides) noexcept nogil
cdef bint layout_is_c(int ndim, const int64_t* shape, const int64_t* strides,
                      int64_t itemsize) noexcept nogil
cdef bint layout_is_f(int ndim, const int64_t* shape, const int64_t* strides,
                      int64_t itemsize) noexcept nogil
# Bytes below and above the first element that a tensor reaches; False if they overflow.
cdef bint layout_extent(int ndim, const int64_t* shape, const int64_t* strides, int64_t itemsize,
                        int64_t* low, int64_t* high) noexcept nogil
# Strides of `to_shape` over the same bytes in the same order; False if there are none.
cdef bint layout_reshape(int ndim, const int64_t* shape, const int64_t* strides, int64_t itemsize,
                         int to_ndim, const int64_t* to_shape, int64_t* to_strides) noexcept nogil
