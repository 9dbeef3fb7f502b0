"""The memory of virtual tensors: spans of an arena, charged and counted as its blocks are.

A page that is released may be in use by queued work. So a release is stamped, as the free of a
block is, with the running epoch of every stream that was named for the span, and its pages leave
once all of them have ended; nothing waits. Until then a commit takes them back as they are.

A span without references is not visible to a user any more; the arena's next call that may block
gives its pages and addresses back, once its work is done.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.types cimport ArenaCore, ArenaSpan
from gpumem._support.lease cimport Uses

# With the grow lock: memory for pages [first, last), of which those up to `spare` come into use.
cdef int span_take(ArenaSpan* span, uint32_t first, uint32_t spare, uint32_t last) noexcept nogil
# Pages [first, last) leave, and spare ones wherever they are; those of [spare, spare_end) become or
# stay spare. Gives back what can go at once.
cdef int span_release(ArenaSpan* span, uint32_t first, uint32_t last, uint32_t spare,
                      uint32_t spare_end) noexcept nogil

# With the grow lock: lets spare pages leave, and gives back those whose work is done; the bytes.
cdef uint64_t spans_trim(ArenaCore* arena) noexcept nogil
# With the grow lock: records events behind releases, and gives back the pages whose work is done.
cdef void spans_poll(ArenaCore* arena) noexcept nogil
# The same without events: only what is known to be done, and spans that have ended.
cdef void spans_sweep(ArenaCore* arena) noexcept nogil
# With the arena lock: the next release, of room for every stream of the span, behind what is queued
# on them now.
cdef void span_stamp(ArenaSpan* span, Uses* uses) noexcept nogil
# With the grow lock: after a sleep or a wake.
cdef void spans_settle(ArenaCore* arena) noexcept nogil
# The arena is not used any more.
cdef void spans_forget(ArenaCore* arena) noexcept nogil
