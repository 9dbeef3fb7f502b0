"""The classes that users touch, as other compiled modules see them."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena_types cimport ArenaCore, Block, Lease
from gpumem._dlpack cimport DLDevice
from gpumem._driver cimport DriverDevice

cdef class Arena:
    cdef ArenaCore* core
    cdef DriverDevice place
    cdef readonly object memory         # MemoryInfo
    cdef readonly object config         # ArenaConfig
    cdef readonly str name
    cdef uint32_t default_slot          # of the default stream
    cdef dict streams                   # slot -> Stream, kept alive while marks may name it
    cdef bint cpu_can_read              # blocks are host-accessible
    cdef DLDevice dl_device             # what DLPack calls the memory
    cdef object __weakref__

    cdef int slot_of(self, object stream, uint32_t* slot) except -1
    cdef int take(self, uint64_t asked, uint64_t extra, uint32_t slot, bint persistent,
                  Block* block) except -1

cdef class Buffer:
    cdef readonly Arena resource
    cdef uint64_t address
    cdef uint64_t requested_bytes
    cdef uint64_t handle                # of the block; meaningless for an empty buffer
    cdef uint64_t block_bytes           # bytes of the block; 0: empty buffer
    cdef uint32_t slot                  # stream it is freed on
    cdef bint is_closed
    cdef Lease* lease                   # NULL until something shares the memory
