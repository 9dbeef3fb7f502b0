"""The events of an arena, for the recorder attached to its `events`.

Each function is called only where `arena.events.recorder` is not NULL. What is marked *locked* is
called with the arena lock and waits for nothing.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.types cimport ArenaCore, Block, BlockNote
from gpumem._native.pages cimport Plan, Space

# A block was handed out. Also remembers it by its chunk, for snapshots.
cdef void note_allocate(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                        const Block* block) noexcept nogil
# A block is about to be given back on a stream; a stale handle is no event.
cdef void note_free(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil
# The same of a block of a debug heap, by what its user knows of it.
cdef void note_free_at(ArenaCore* arena, uint64_t address, uint64_t nbytes, uint64_t block,
                       uint32_t stream_slot) noexcept nogil
# Locked: before a block becomes pending free; before it becomes free.
cdef void note_pending_free(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil
cdef void note_pending_free_end(ArenaCore* arena, uint64_t handle,
                                uint32_t stream_slot) noexcept nogil
# Nothing could be handed out: an ArenaStatus.
cdef void note_failed(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                      int status) noexcept nogil
# Locked: memory came from the driver, or goes back to it.
cdef void note_memory(ArenaCore* arena, uint32_t kind, uint64_t address,
                      uint64_t nbytes) noexcept nogil
# Locked: what a plan for pages did.
cdef void note_plan(ArenaCore* arena, const Space* space, const Plan* plan) noexcept nogil
cdef void note_shrink(ArenaCore* arena, uint64_t released) noexcept nogil
cdef void note_reset(ArenaCore* arena, uint32_t stream_slot) noexcept nogil

# What is known of a chunk of the second table (`small`) or the first; False: nothing.
cdef bint block_note(const ArenaCore* arena, bint small, uint32_t index, uint32_t generation,
                     BlockNote* note) noexcept nogil
cdef void notes_free(ArenaCore* arena) noexcept nogil
