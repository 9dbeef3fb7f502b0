"""Parked chunks: freed by their owner, not yet free for anybody.

Other streams still have work on such a block. It is not handed out any more, hangs in no bin and
merges with nothing; it holds its region as a used one does.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._bfc cimport Bfc

# Used to parked.
cdef void bfc_begin_pending_free(Bfc* table, uint32_t index, uint32_t stream_slot,
                                 uint64_t epoch) noexcept nogil
# Parked to free in a stream slot; merges. A persistent block hangs in no bin.
cdef void bfc_end_pending_free(Bfc* table, uint32_t index, uint32_t stream_slot,
                               uint64_t epoch) noexcept nogil
