"""Element types: one object per dtype, with what every protocol calls it."""

from libc.stdint cimport int64_t, uint32_t

from gpumem._dlpack cimport DLDataType

cdef class ElementType:
    cdef readonly object dtype      # numpy.dtype
    cdef int64_t itemsize           # bytes
    cdef int shift                  # log2 of itemsize, where DLPack has a name
    cdef DLDataType dl              # bits 0: DLPack has no name for it
    cdef uint32_t dl_minor          # the oldest DLPack 1.x that has it
    cdef bytes format               # of the buffer protocol; None: it has none
    cdef object typestr             # of __cuda_array_interface__; None: it has none

# The module: imported at the first tensor, because it takes its time and starts threads.
cdef object numpy()
# Of anything NumPy takes for a dtype, and the names of ml_dtypes.
cdef ElementType element_of(object dtype)
# Of what a DLPack producer says; BufferError for what cannot be held.
cdef ElementType element_named(DLDataType named)
