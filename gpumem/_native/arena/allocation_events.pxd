"""The events of an arena, for the recorder attached to its `events`.

Each function is called only where `is_recorded(&arena.events)`, unless its comment says otherwise.
Those marked *locked* are called with the arena lock and do not wait.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.types cimport ArenaCore, Block, BlockNote
from gpumem._support.events cimport RecNoted

# A block was handed out. Also notes it beside its chunk, for snapshots.
cdef void note_allocate(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                        const Block* block) noexcept nogil
# A block is about to be freed on a stream; a stale handle makes no event.
cdef void note_free(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil
# Any event about bytes, as its kind defines them; `block`: padding included. Without `may_wait` the
# event is lost where its file would have to grow first: so with the arena lock.
cdef RecNoted note_event(ArenaCore* arena, uint32_t kind, uint64_t address, uint64_t nbytes,
                         uint64_t block, uint32_t stream_slot, bint may_wait) noexcept nogil
# The same about the chunk of a block.
cdef void note_chunk(ArenaCore* arena, uint32_t kind, uint64_t handle, uint32_t stream_slot,
                     bint may_wait) noexcept nogil
# Locked: memory came from the driver, or goes back to it. Pages are recorded by their space.
cdef void note_memory(ArenaCore* arena, uint32_t kind, uint64_t address,
                      uint64_t nbytes) noexcept nogil
# Locked, recorded or not: a region came, or goes back. One that is cut from pages is recorded page
# by page.
cdef void note_region(ArenaCore* arena, uint32_t kind, uint64_t address,
                      uint64_t nbytes) noexcept nogil

# Copies what was recorded of a chunk of the second table (`small`) or the first; False: nothing.
cdef bint block_note(const ArenaCore* arena, bint small, uint32_t index, uint32_t generation,
                     BlockNote* note) noexcept nogil
cdef void notes_free(ArenaCore* arena) noexcept nogil
