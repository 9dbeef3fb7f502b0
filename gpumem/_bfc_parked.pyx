"""Parking chunks and taking them out again; see _bfc_parked.pxd."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._bfc cimport (
    Bfc,
    CHUNK_FREE,
    CHUNK_PENDING_FREE,
    Chunk,
    SLOT_RELEASED,
    chunk_coalesce,
    chunk_free,
)
from gpumem._support.atomics cimport store32


cdef void bfc_begin_pending_free(Bfc* table, uint32_t index, uint32_t stream_slot,
                                 uint64_t epoch) noexcept nogil:
    chunk_free(table, index, stream_slot, epoch)
    store32(&table.chunks[index].state, CHUNK_PENDING_FREE)
    table.regions[table.chunks[index].region].used += 1
    table.pending_free_chunks += 1


cdef void bfc_end_pending_free(Bfc* table, uint32_t index, uint32_t stream_slot,
                               uint64_t epoch) noexcept nogil:
    # A persistent block hangs in no bin, so it has no mark: what settles is taken out of its bin.
    cdef Chunk* chunk = &table.chunks[index]
    cdef bint persistent = table.regions[chunk.region].persistent
    table.pending_free_chunks -= 1
    table.regions[chunk.region].used -= 1
    store32(&chunk.state, CHUNK_FREE)
    chunk.stream_slot = SLOT_RELEASED if persistent else stream_slot
    chunk.epoch = epoch if chunk.stream_slot != SLOT_RELEASED else 0
    if not persistent:
        chunk_coalesce(table, index)
