"""The choice of a backing; see _core_backing.pxd."""

from gpumem._backing cimport Backing, backing_init
from gpumem._backing_managed cimport managed_init
from gpumem._backing_pinned cimport pinned_init
from gpumem._buffer cimport MemoryResource
from gpumem._driver cimport Place

from gpumem.device import MemoryKind


cdef int choose_backing(MemoryResource arena, Backing* backing) except -1:
    cdef Place* place = &arena.place.place
    if arena.memory.kind is MemoryKind.HOST_ACCESSIBLE:
        pinned_init(backing, place)
    elif arena.memory.kind is MemoryKind.MANAGED:
        managed_init(backing, place)
    else:
        backing_init(backing, place)
    return 0
