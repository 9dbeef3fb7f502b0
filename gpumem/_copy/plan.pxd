"""Strided copies: rows of adjacent bytes, boxes of rows, and their driver calls. No object.

A `Rows` is one copy after all dimensions that are adjacent on both sides were merged. A `Box` is
the part of it that one driver call copies, a `Cut` divides it into pieces of bounded size.
"""

from libc.stdint cimport int64_t, uint64_t, uint8_t

from gpumem._native.driver cimport CUresult, CUstream, DeviceContext

cdef enum:
    MAX_DIMS = 64               # NumPy's own limit since 2.0
    MAX_PITCH = 0x7fffffff      # bytes between rows that a driver's 2-D copy accepts

cdef enum End:
    END_TO          # the destination
    END_ORIGIN      # the source

# One dimension outside the rows.
cdef struct Dim:
    int64_t length
    int64_t to              # bytes from one index to the next, in the destination
    int64_t origin          # and in the source
    int64_t index           # the current one of `rows_next`; 0 at first

# `width` bytes are adjacent on both sides. Outer dimensions come first, and the leading end's
# strides, in bytes, only fall and are never negative; the other end's may be anything.
cdef struct Rows:
    uint64_t to
    uint64_t origin
    uint64_t width
    int ndim
    Dim dims[MAX_DIMS]

# The dimensions of a Rows that one driver call covers; -1: none.
cdef struct Box:
    int height
    int depth
    int64_t calls           # for all of the copy; at most INT64_MAX

# False: nothing to copy, the shape has a zero.
cdef bint rows_make(Rows* rows, uint64_t to, const int64_t* to_strides, uint64_t origin,
                    const int64_t* origin_strides, int ndim, const int64_t* shape,
                    int64_t itemsize, End leader) noexcept nogil
# Changes the leading end; the copy stays the same.
cdef void rows_lead(Rows* rows, End leader) noexcept nogil
# Addresses of the lowest byte of one end, and of the byte after its highest.
cdef void rows_reach(const Rows* rows, End end, uint64_t* low, uint64_t* high) noexcept nogil
cdef uint64_t rows_bytes(const Rows* rows) noexcept nogil
# Replaces one end by adjacent bytes at `address`, in the order of the dimensions.
cdef void rows_pack(Rows* rows, End end, uint64_t address) noexcept nogil
# The box that needs the fewest calls.
cdef Box rows_box(const Rows* rows) noexcept nogil
# Moves both addresses to the next index of the dimensions outside the box; False after the last.
cdef bint rows_next(Rows* rows, Box box) noexcept nogil

# How a copy is cut into pieces of at most `max_bytes`: runs of `step` indices of one dimension, for
# each index of the dimensions outside it. The bytes of a row count as a dimension.
cdef struct Cut:
    int dim
    int64_t step
    int64_t per_run         # pieces in one run of that dimension
    int64_t count           # pieces in all

cdef Cut rows_cut(const Rows* rows, uint64_t max_bytes) noexcept nogil
cdef void rows_piece(const Rows* rows, Cut cut, int64_t number, Rows* piece) noexcept nogil
# By the CPU, in the calling thread.
cdef void rows_move(const Rows* rows) noexcept nogil

# ---- driver calls --------------------------------------------------------------------------------

# The result of the last driver call, and the call's name. A failed copy may have moved some of the
# bytes.
cdef struct CallResult:
    CUresult code
    const char* call

cdef inline CallResult call_result(CUresult code, const char* call) noexcept nogil:
    cdef CallResult result
    result.code = code
    result.call = call
    return result

# The devices of both ends of a copy between peers.
cdef struct Peers:
    DeviceContext* to
    DeviceContext* origin

# Queued on a stream of `context`, which is current. The box is that of the rows, or one row where
# there are `peers`: a peer copy has one dimension. NULL: both ends are reachable from `context`.
cdef CallResult rows_queue(DeviceContext* context, CUstream stream, const Rows* rows, Box box,
                           const Peers* peers) noexcept nogil
# Fills `count` adjacent elements with one value, queued on a stream of `context`, which is current.
cdef CallResult fill_queue(DeviceContext* context, CUstream stream, uint64_t address,
                           const uint8_t* value, size_t itemsize, int64_t count) noexcept nogil
# Copies the first row to all others: `rows` are of one memory, as both ends of a copy.
cdef CallResult spread_queue(DeviceContext* context, CUstream stream,
                             const Rows* rows) noexcept nogil
# Whether a fill is one call, which copies nothing.
cdef bint fill_is_word(uint64_t address, const uint8_t* value, size_t itemsize) noexcept nogil
# The same, by the CPU at once.
cdef void fill_by_cpu(uint8_t* address, const uint8_t* value, size_t itemsize,
                      int64_t count) noexcept nogil
