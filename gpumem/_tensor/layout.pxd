"""Shapes and strides as numbers: no object, no exception. Strides are in bytes."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from gpumem._buffer cimport DLDataType

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
# Whether each step is larger than the reach of all smaller steps: then no elements share bytes.
# This holds for almost all views of an array without shared bytes.
cdef bint layout_is_nested(int ndim, const int64_t* shape, const int64_t* strides,
                           int64_t itemsize) noexcept nogil
# The bytes that a tensor reaches below and above its first element; False if they overflow.
cdef bint layout_extent(int ndim, const int64_t* shape, const int64_t* strides, int64_t itemsize,
                        int64_t* low, int64_t* high) noexcept nogil
# Strides of `to_shape` over the same bytes in the same order; False if there are none.
cdef bint layout_reshape(int ndim, const int64_t* shape, const int64_t* strides, int64_t itemsize,
                         int to_ndim, const int64_t* to_shape, int64_t* to_strides) noexcept nogil


# ---- Basic indexing of a layout: integers, slices, Ellipsis, None --------------------------------


# Fills `result` and the offset in bytes; IndexError or TypeError for any other key.
cdef int layout_index(object key, int ndim, const int64_t* shape, const int64_t* strides,
                      Layout* result, int64_t* offset) except -1
# A shape from what users write: an integer or a sequence of them; returns its rank.
cdef int shape_from(object shape, int64_t* numbers) except -1
# The same for reshape, where one -1 stands for the remaining factor of `size` elements.
cdef int new_shape_from(object shape, int64_t size, int64_t* numbers) except -1


# ---- Element types: one object per dtype, with its names in every protocol -----------------------


cdef class ElementType:
    cdef readonly object dtype      # numpy.dtype
    cdef int64_t itemsize           # bytes
    cdef int shift                  # log2 of itemsize, where DLPack has a name
    cdef DLDataType dl              # bits 0: DLPack has no name for it
    cdef uint32_t dl_minor          # the oldest DLPack 1.x that has it
    cdef bytes format               # of the buffer protocol; None: it has none
    cdef object typestr             # of __cuda_array_interface__; None: it has none

# The module, which is imported at the first tensor, because the import is slow and starts threads.
cdef object numpy()
# The element type of a dtype in any form of NumPy's, or of a name of ml_dtypes.
cdef ElementType element_of(object dtype)
# The element type of a DLPack producer's description; BufferError if no dtype describes it.
cdef ElementType element_named(DLDataType named)
