"""Basic indexing of a layout: integers, slices, Ellipsis, None."""

from libc.stdint cimport int64_t

from gpumem._layout cimport Layout

# Fills `result` and the offset in bytes; IndexError or TypeError for any other key.
cdef int layout_index(object key, int ndim, const int64_t* shape, const int64_t* strides,
                      Layout* result, int64_t* offset) except -1
# A shape from what users write: an integer or a sequence of them; returns its rank.
cdef int shape_from(object shape, int64_t* numbers) except -1
# The same for reshape, where one -1 stands for what is left of `size` elements.
cdef int new_shape_from(object shape, int64_t size, int64_t* numbers) except -1
