"""Parking chunks and taking them out again; see _bfc_parked.pxd."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._bfc cimport (
    Bfc,
    CHUNK_FREE,
    CHUNK_PARKED,
    Chunk,
    LANE_RELEASED,
    chunk_coalesce,
    chunk_unuse,
)
from gpumem._support.atomics cimport store32


cdef void bfc_park(Bfc* table, uint32_t index, uint32_t lane, uint64_t epoch) noexcept nogil:
    chunk_unuse(table, index, lane, epoch)
    store32(&table.chunks[index].state, CHUNK_PARKED)
    table.regions[table.chunks[index].region].used += 1
    table.parked_chunks += 1


cdef void bfc_unpark(Bfc* table, uint32_t index, uint32_t lane, uint64_t epoch) noexcept nogil:
    # A persistent block hangs in no bin, so it has no mark: what settles is taken out of its bin.
    cdef Chunk* chunk = &table.chunks[index]
    cdef bint persistent = table.regions[chunk.region].persistent
    table.parked_chunks -= 1
    table.regions[chunk.region].used -= 1
    store32(&chunk.state, CHUNK_FREE)
    chunk.lane = LANE_RELEASED if persistent else lane
    chunk.epoch = epoch if chunk.lane != LANE_RELEASED else 0
    if not persistent:
        chunk_coalesce(table, index)
