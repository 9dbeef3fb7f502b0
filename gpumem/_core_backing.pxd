"""Which backing serves an arena's memory."""

from gpumem._backing cimport Backing
from gpumem._buffer cimport MemoryResource
from gpumem._core_source cimport Source

# `source`: None, or what takes the place of the driver.
# Raises ConfigError for a setting that the memory has no use for.
cdef int choose_backing(MemoryResource arena, object config, Source source,
                        Backing* backing) except -1
