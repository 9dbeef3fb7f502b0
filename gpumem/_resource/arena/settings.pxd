"""What an arena's settings mean below the interpreter, and what its memory can be backed by."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._buffer cimport MemoryResource
from gpumem._native.arena cimport ArenaCore, ArenaSettings
from gpumem._native.backing cimport Backing
from gpumem._resource.arena.debug_heap cimport Heap
from gpumem._resource.arena.source cimport Source

cdef class ArenaBase(MemoryResource):
    cdef ArenaCore* core
    cdef readonly object config         # ArenaConfig
    cdef Heap heap                      # None without debug
    cdef uint32_t default_slot          # of the default stream
    cdef Source source                  # where regions come from instead of the driver; or None
    cdef list relievers                 # of virtual tensors with a callback, weak; one for all tags

    cdef int require_outside_source(self) except -1

cdef int settings_from(object config, ArenaSettings* settings) except -1
# Is it backed by pages? Raises ConfigError where they are asked for by name and cannot be had.
cdef int warn_of_idle_settings(MemoryResource arena, object config, bint paged) except -1
cdef bint takes_pages(MemoryResource arena, object config, uint64_t limit) except *
# Why memory cannot be backed by pages that move; empty if it can.
cdef str pages_problem(object memory)
# What an arena's blocks are in regions for.
cdef str why_regions(ArenaBase arena)


# ---- Which backing serves an arena's memory ------------------------------------------------------


# `source`: None, or what takes the place of the driver.
# Raises ConfigError for a setting that the memory has no use for.
cdef int choose_backing(MemoryResource arena, object config, Source source,
                        Backing* backing) except -1
# Tells observers which resource of the process an arena's source is.
cdef void name_upstream(ArenaBase arena) noexcept
# Raises ConfigError for an arena that cannot have virtual tensors.
cdef int require_pages(MemoryResource arena, bint has_source) except -1
# Lets a further device touch an arena's memory; raises where that is not possible.
cdef int add_peer(MemoryResource arena, ArenaCore* core, object device) except -1
# Those of the settings, when the arena is made.
cdef int add_listed_peers(MemoryResource arena, ArenaCore* core, object config) except -1
# The devices that `add_peer` has added, as a tuple of Device.
cdef tuple peers_of(MemoryResource arena, const ArenaCore* core)
# Makes the backing of shareable blocks with the first of them; raises ConfigError where an arena
# has none.
cdef int require_shareable(MemoryResource arena, object config, Source source,
                           ArenaCore* core) except -1
# The same of blocks in driver allocations of their own, which other processes may have open: pages
# cannot be, and regions go back otherwise. Raises ValueError for another transport than "ipc".
cdef int require_transport(MemoryResource arena, object transport, bint shareable, Source source,
                           ArenaCore* core) except -1
# A transport registers the block at this address: its region goes back as one made for transports.
cdef int note_registration(MemoryResource arena, ArenaCore* core, uint64_t address) except -1
