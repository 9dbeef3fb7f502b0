"""What a class that users derive from MemoryResource does for one block: its two methods."""

from libc.stdint cimport uint64_t

# TypeError for a class that neither overrides `base.allocate` nor has both methods.
cdef int require_raw_methods(object cls, object base) except -1
# Calls allocate_raw; raises what it raises, or TypeError and ValueError for what is no address at
# a multiple of the memory's alignment.
cdef uint64_t user_allocate(object resource, uint64_t size, object stream) except 0
# Calls deallocate_raw; what it raises goes to sys.unraisablehook.
cdef int user_deallocate(object resource, uint64_t address, uint64_t size,
                         object stream) noexcept
