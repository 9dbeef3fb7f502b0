"""ExternalMemory: memory that somebody else allocated, mapped here."""

from gpumem._buffer cimport MemoryResource
from gpumem.interop.memory._mapping cimport Mapping

cdef class ExternalMemory:
    cdef Mapping* mapping               # NULL once it is closed
    cdef MemoryResource home            # of the buffers over it
    cdef readonly object descriptor
    cdef readonly object memory         # MemoryInfo
    cdef readonly object ready          # the point of a timeline that those who come wait for
    cdef object __weakref__

# Takes the one reference to the mapping over.
cdef ExternalMemory external_memory(object descriptor, object memory, Mapping* mapping)
