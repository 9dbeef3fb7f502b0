"""Regions of host memory that other processes may be given: a file in memory for each."""

from gpumem._backing cimport Backing
from gpumem._driver cimport Place

cdef void file_init(Backing* backing, Place* place) noexcept nogil
