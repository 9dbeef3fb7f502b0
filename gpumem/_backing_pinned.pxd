"""Pinned host memory: pages made by several threads, then registered with the driver."""

from gpumem._backing cimport Backing
from gpumem._driver cimport Place

cdef void pinned_init(Backing* backing, Place* place) noexcept nogil
