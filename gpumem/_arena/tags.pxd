"""Tags of an arena: which of them sleep, and in which order."""

from libc.stdint cimport uint64_t

from gpumem._arena.arena cimport Arena

# The memory of one tag: a child of the arena that has the tag.
cdef class Tag:
    cdef str asleep                     # "keep", "drop" or "stay"
    cdef Arena arena

# The block in which this context's allocations have a tag. A new tag is opened.
cdef object tagged_as(Arena arena, object name, object asleep)
# The arena of the calling context's tag; None: it has none open.
cdef Arena arena_of_tag(Arena arena)
# (name, arena) of these tags, in the order of opening; the untagged blocks first. None: all.
cdef list named_tags(Arena arena, object tags)
# The arenas of all tags, in that order.
cdef list arenas_of_tags(Arena arena)
# Raises InUseError if a block or a virtual tensor with any tag is in use.
cdef int require_idle_tags(Arena arena) except -1
# Brings open arenas into this state, in which nothing is allocated in them, and adds them to
# `held`. Threads that want to change them, too, get an InUseError: none waits for another. A
# failure opens all of `held` again.
cdef int hold(list arenas, int state, list held) except -1
# Opens those again that are still in this state, and empties the list.
cdef int let_go(list held, int state) except -1
# Closes an arena if no block and no unfinished work uses it.
cdef int close_if_idle(Arena arena) except -1
# `Arena.sleep` and `Arena.wake`. The first returns the bytes that were released to the device.
cdef uint64_t put_to_sleep(Arena arena, object tags, object to, object registered) except? 0
cdef int wake_tags(Arena arena, object tags) except -1
