"""Sleeping: an arena that gives its memory back and keeps its addresses, all of it or by tags."""

from gpumem._resource.arena.reports cimport ReportingArena
from gpumem._resource.arena.settings cimport ArenaBase

cdef class SleepingArena(ReportingArena):
    cdef dict tags                      # name -> Tag; None until one is opened
    cdef dict files                     # tag -> the SleepFile that its bytes wait in

    # The arena of the calling thread's tag; None: it has none open.
    cdef ArenaBase tagged(self)

# The memory of one tag: an arena beside the one that it belongs to.
cdef class Tag:
    cdef str asleep                     # "keep", "drop" or "stay"
    cdef ArenaBase arena
