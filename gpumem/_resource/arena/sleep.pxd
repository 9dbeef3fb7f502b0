"""Sleeping: an arena that gives its memory back and keeps its addresses."""

from gpumem._resource.arena.reports cimport ArenaBase

cdef class SleepingArena(ArenaBase):
    pass
