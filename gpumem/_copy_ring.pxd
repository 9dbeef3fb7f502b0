"""The pinned memory that staged copies go through: one bounded arena per device."""

from gpumem._buffer cimport Buffer
from gpumem._driver cimport DriverDevice

# None: the driver gives none, or other copies have it all.
cdef Buffer ring_memory(DriverDevice place, object nbytes)
