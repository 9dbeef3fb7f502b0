"""Memory of a user's source under an arena: Python callables, C functions, another resource."""

from libc.stdint cimport uint64_t

from gpumem._buffer cimport MemoryResource
from gpumem._native.arena.api cimport ArenaCore
from gpumem._native.backing cimport Backing
from gpumem._native.driver cimport CUresult, DeviceContext, DriverDevice

ctypedef void* (*AllocateFunction)(size_t nbytes) noexcept nogil
ctypedef void (*FreeFunction)(void* address, size_t nbytes) noexcept nogil

# Called with the arena's grow lock held, so by one thread at a time.
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
    cdef int take(self, uint64_t size, uint64_t* address) except -1
    cdef int give(self, uint64_t address, uint64_t size) noexcept
    # Is the calling thread inside a callable of this source, which its arena waits for?
    cdef bint is_inside(self) except -1
    # Raises GpumemError then.
    cdef int require_outside(self) except -1

# Reads the argument `source`; raises TypeError or ConfigError.
cdef Source make_source(MemoryResource arena, object config, object given)
cdef void source_init(Backing* backing, DeviceContext* context) noexcept
# The arena's backing refers to its source until the arena is closed or gone.
cdef void source_keep(Backing* backing, Source source) noexcept
# The exception of this thread's latest call of the arena's source, once; None: it did not raise.
cdef object source_error(ArenaCore* core)
