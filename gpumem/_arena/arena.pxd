"""The arena, as other compiled modules see it."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena.debug_heap cimport Heap
from gpumem._buffer cimport Buffer, MemoryResource, Stream
from gpumem._native.arena.api cimport ArenaCore, Block

# Where a block lies: in a region with others; in a region of its own; in memory that other
# processes may map; in memory that transports can register.
cdef enum Region:
    REGION_OF_MANY
    OWN_REGION
    SHARED_REGION
    TRANSPORT_REGION

cdef class Arena(MemoryResource):
    cdef ArenaCore* core
    cdef readonly object config         # ArenaConfig
    cdef Heap heap                      # None without a debug heap
    cdef object source                  # of its regions, instead of the driver; or None
    cdef uint32_t default_slot          # of the default stream
    cdef bint default_per_thread        # each thread has its own default stream: look the slot up
    cdef bint looks_up_default          # the same, or a raw handle that was reset: name it again
    cdef bint obtains_slowly            # looks_up_default, or `extra` is not 0
    cdef uint64_t extra                 # bytes that align a block as its memory requires
    cdef Stream last_stream             # named last, while it has its slot; a Stream of gpumem
    cdef uint32_t last_slot
    cdef list stale                     # released stream objects, until no call is under way
    cdef list pressure_tensors          # weak, virtual tensors with a callback; shared by tags
    cdef uint64_t collects_from         # `clock_ns` from which a refusal collects garbage
    cdef object captures                # Captures; None until a graph is captured
    cdef dict tags                      # name -> Tag; None until one is opened
    cdef object sleep_file              # the SleepFile that holds the bytes; None: none

    cdef void set_default_lookup(self, bint needed) noexcept
    # Allocates `asked` bytes and `extra` for their alignment. Returns ARENA_OK, ARENA_CAPTURING or
    # ARENA_TAGGED; raises for every other status.
    cdef int take(self, uint64_t asked, uint64_t extra, uint32_t slot, Region region,
                  Block* block) except -1
    cdef int take_slow(self, uint64_t nbytes, uint32_t slot, Region region,
                       Block* block) except -1

# Allocates for work on a stream of another library; `stream` keeps that stream. Unlike `allocate`
# it queries whether the stream captures also if the arena has a free block.
cdef Buffer arena_take_on(Arena arena, uint64_t nbytes, Stream stream)
# The same for the device's legacy default stream, which cannot capture.
cdef Buffer arena_take_on_legacy(Arena arena, uint64_t nbytes)
# Raises the debug heap's report for a free of an address that is not allocated.
cdef int arena_bad_free(Arena arena, uint64_t address) except -1
# The arena's default stream, as an argument for arenas of its tags.
cdef object default_stream_of(Arena arena)
