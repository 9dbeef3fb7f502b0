"""Tensor: typed, strided elements in a buffer."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from gpumem._buffer cimport (
    Buffer, DL_CPU, DL_READ_ONLY, DLDevice, DLTensor, Export, MemoryResource, order_host,
    ResourceBase,
)
from gpumem._tensor.layout cimport ElementType

cdef enum:
    INLINE_RANK = 4

# Immutable after it was made: views of the same bytes are new tensors over the same Buffer.
cdef class Tensor:
    cdef readonly Buffer buffer
    cdef ElementType element
    cdef uint64_t address           # of the element with index 0 everywhere
    cdef int64_t count              # elements
    cdef int64_t* lengths           # the shape
    cdef int64_t* steps             # the strides, in bytes
    cdef int64_t* dl_steps          # the strides, in elements; once `is_described`
    cdef int32_t rank
    cdef bint is_read_only
    cdef bint is_described          # it was checked that DLPack can describe it
    cdef DLDevice dl_device         # its device for DLPack consumers
    cdef int64_t inline_numbers[3 * INLINE_RANK]    # the three, if they fit
    cdef object __weakref__

# A tensor without elements yet: the caller fills in lengths, steps and count at once, before
# anything that may run the collector.
cdef Tensor tensor_new(Buffer buffer, ElementType element, uint64_t address, int ndim)
# Adjacent elements in C order, in a new buffer of the resource.
cdef Tensor tensor_allocate(MemoryResource resource, ElementType element, int ndim,
                            const int64_t* shape, object stream, object shareable,
                            uint64_t alignment)
# The alignment that a memory named by a caller asks for; 0: that of every block is enough.
cdef uint64_t alignment_named(object memory) except? 1
# The same in a buffer that there is, which has room for the `count` elements.
cdef Tensor tensor_within(Buffer buffer, ElementType element, int64_t offset, int ndim,
                          const int64_t* shape, int64_t count)
cdef Tensor tensor_copy(Tensor source, MemoryResource resource, object stream, uint64_t alignment)
# Called before gpumem itself reads or writes elements: keeps their memory until the result is
# dropped. ValueError: they are rows of a virtual tensor that are not committed.
cdef object hold_elements(Tensor tensor)
# Copies the elements of one tensor into another of the same shape and element type.
cdef int tensor_move(Tensor dst, Tensor src, object stream, bint dst_is_temporary) except -1
# The resource that allocates more memory of the tensor's kind.
cdef MemoryResource resource_beside(Tensor tensor)
# BufferError if DLPack cannot describe it; called before any of the next two.
cdef inline int tensor_find_words(Tensor tensor) except -1:
    return 0 if tensor.is_described else find_words(tensor)


cdef int find_words(Tensor tensor) except -1
# Describes it for DLPack on `device`, without shape and strides.
cdef inline void tensor_describe(Tensor tensor, DLDevice device, DLTensor* described) noexcept:
    described.data = <void*>(tensor.address if tensor.count else 0)
    described.device = device
    described.dtype = tensor.element.dl


# An export of it, complete.
cdef Export* tensor_export(Tensor tensor, DLDevice device, uint64_t flags,
                           bint versioned) except NULL
cdef inline uint64_t tensor_flags(Tensor tensor) noexcept:
    return DL_READ_ONLY if tensor.is_read_only else 0

# The default resource of a memory; None is the default device's memory. `_defaults` chooses it.
cdef MemoryResource serving(object memory)
# Views: another layout over the same buffer; the same layout.
cdef Tensor tensor_view(Tensor base, ElementType element, uint64_t address, int ndim,
                        const int64_t* lengths, const int64_t* steps)
cdef Tensor tensor_whole(Tensor base)
# The elements where they are, or copied to another memory, by the rules of Tensor.to.
cdef Tensor tensor_to(Tensor tensor, object memory, object stream, object copy)
