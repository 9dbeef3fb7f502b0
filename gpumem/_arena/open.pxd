"""Opening an arena: its settings, backing, peers, budget and source."""

from libc.stdint cimport uint64_t

from gpumem._arena.arena cimport Arena
from gpumem._native.arena.api cimport ArenaCore
from gpumem._native.bfc cimport QUANTUM
from gpumem._native.driver cimport CUresult, DriverDevice

ctypedef void* (*AllocateFunction)(size_t nbytes) noexcept nogil
ctypedef void (*FreeFunction)(void* address, size_t nbytes) noexcept nogil

# Caller holds the arena's grow lock.
cdef class Source:
    cdef object given                   # the user's argument
    cdef object allocate                # callables; None: the C functions
    cdef object free
    cdef AllocateFunction c_allocate
    cdef FreeFunction c_free
    cdef object memory                  # MemoryInfo of the arena
    cdef DriverDevice driver_device
    cdef dict held                      # address -> bytes of every region that the arena has
    cdef dict errors                    # thread -> the exception of its latest call
    cdef object caller                  # thread that is inside a callable; None: no thread

    cdef CUresult reserve(self, uint64_t size, uint64_t* address) noexcept
    cdef void release(self, uint64_t address, uint64_t size) noexcept
    cdef int request_region(self, uint64_t size, uint64_t* address) except -1
    cdef int free_region(self, uint64_t address, uint64_t size) noexcept
    # Is the calling thread inside a callable of this source, which its arena waits for?
    cdef bint is_inside(self) except -1
    # Raises GpumemError then.
    cdef int require_outside(self) except -1

# Makes the core of a new Arena from the arguments of its class.
cdef int arena_open(Arena arena, object memory, object config, tuple excess, object source,
                    object budget, object count, object debug_heap, object name,
                    dict given) except -1
# Bytes by which a block must be larger, so that an aligned part of it has the requested bytes. A
# block is a multiple of the quantum.
cdef inline uint64_t extra_for(uint64_t alignment) noexcept:
    return max(alignment, <uint64_t>QUANTUM) - QUANTUM

# "reserved" or "in_use": which bytes its budget counts.
cdef str count_of(Arena arena)
# Why memory cannot be backed by pages that move; empty if it can.
cdef str pages_problem(object memory)
# Why the arena's blocks lie in regions.
cdef str why_regions(Arena arena)
# Raises ConfigError for an arena that cannot have virtual tensors.
cdef int require_pages(Arena arena) except -1
# The Region for the arguments of `allocate`, with its backing made. Raises ValueError or
# ConfigError.
cdef int region_for(Arena arena, object shareable, object transport) except -1
# Notes that a transport registers the block at this address: its region is then released like one
# that was made for transports.
cdef int note_registration(Arena arena, uint64_t address) except -1
# Lets a further device access the arena's memory; raises where that is not possible.
cdef int add_peer(Arena arena, object device) except -1
# The same for a device that is about to use the memory; returns whether it may.
cdef bint let_peer(Arena arena, DriverDevice peer) except -1
# The devices that `add_peer` has added, as a tuple of Device.
cdef tuple peers_of(Arena arena)
# Raises GpumemError where the arena's source calls its own arena, which waits for the source.
cdef int require_outside_source(Arena arena) except -1
# The exception of this thread's latest call of the arena's source, once; None: it did not raise.
cdef object source_error(ArenaCore* core)
