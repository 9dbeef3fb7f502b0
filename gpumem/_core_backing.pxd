"""Which backing serves an arena's memory."""

from gpumem._backing cimport Backing
from gpumem._buffer cimport MemoryResource
from gpumem._core_source cimport Source

# `source`: None, or what takes the place of the driver.
# Raises ConfigError for a setting that the memory has no use for.
cdef int choose_backing(MemoryResource arena, object config, Source source,
                        Backing* backing) except -1
# Why an arena has no shareable blocks; empty if it has. Where they come from.
cdef str why_not_shareable(MemoryResource arena, object config, Source source)
cdef int shareable_init(MemoryResource arena, object config, Backing* backing) except -1
