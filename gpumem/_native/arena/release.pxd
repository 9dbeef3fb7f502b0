"""Release of memory to the driver. Caller holds `grow_lock`, not `lock`, unless a comment says
otherwise.
"""

from libc.stdint cimport uint64_t

from gpumem._native.arena.types cimport ArenaCore
from gpumem._native.pages cimport Plan, Space

# Releases memory that holds no used block and has no unfinished work; returns the bytes. Regions
# for which the driver waits stay: see release_waiting. With 2 `tries` it tries those again that the
# driver refused to release.
cdef uint64_t release_idle(ArenaCore* arena, int tries) noexcept nogil
# The same of the arenas that share this one's limit: its tags, or its parent and the other tags.
cdef uint64_t release_idle_beside(ArenaCore* arena) noexcept nogil
# Both, before an allocation that a limit or the driver refused grows once more.
cdef uint64_t release_all_idle(ArenaCore* arena) noexcept nogil
# Releases the regions of persistent blocks that were freed. `with_wait`: also those for which the
# driver waits.
cdef uint64_t release_retired(ArenaCore* arena, bint with_wait) noexcept nogil
# Releases idle regions, persistent ones too, for which the driver waits until the device is idle,
# without a bound: in the last step of an allocation, in `shrink` and in `close`.
cdef uint64_t release_waiting(ArenaCore* arena) noexcept nogil
# Returns whether there is such a region.
cdef bint has_waiting(ArenaCore* arena) noexcept nogil
# Releases one idle region, persistent or not; 0: there is none. `with_wait`: also one for which the
# driver waits.
cdef uint64_t release_one(ArenaCore* arena, bint persistent, bint with_wait) noexcept nogil
# Releases idle regions of at least `nbytes` in all, as few bytes as one region of that size allows.
# The driver waits for the device.
cdef void release_regions(ArenaCore* arena, uint64_t nbytes) noexcept nogil
# Releases the memory of a region that is in no table; False: the driver refused.
cdef bint release_memory_of(ArenaCore* arena, uint64_t address, uint64_t size) noexcept nogil
# Releases every page of a paged arena that is idle and has no queued work; returns the bytes.
cdef uint64_t trim_pages(ArenaCore* arena) noexcept nogil
# Releases idle pages of the other range before a plan of this range makes pages above the share of
# this live peak.
cdef void release_in_other_range(ArenaCore* arena, const Space* space, Plan* plan,
                                 uint64_t peak) noexcept nogil
# The graphs of a graph pool have ended: from here on its pages can be released as any other page.
# Caller holds no lock.
cdef void give_up_views(ArenaCore* arena) noexcept nogil

# Releases idle pages for memory that was made for lack of time to move pages, once there is time
# again: at each growth, the longest idle first, down to the share of the live peak.
cdef void release_overdraft(ArenaCore* arena) noexcept nogil
