"""Pages without memory: given up while their arena is suspended, restored at the same addresses.

Called with the grow lock. A page that was given up has `memory` 0 and keeps its slot and place.
"""

from libc.stdint cimport uint64_t

from gpumem._driver cimport CUresult, Place
from gpumem._pages cimport Space
from gpumem._support.lock cimport Lock

# Unmaps and releases every page that has memory; stops where the driver refuses. `lock` is held
# while the books change.
cdef CUresult space_give_up(Space* space, Lock* lock, Place* place, uint64_t* calls) noexcept nogil
# Makes and maps every page that has none; `call` names what was refused. What was made stays.
cdef CUresult space_restore(Space* space, Place* place, uint64_t* calls,
                            const char** call) noexcept nogil
