"""`with` blocks that Python's context keeps: tags, labels and default resources.

A context variable holds the innermost open block; each links to the next outer one. Links do not
change, since copies of the context share them. An asynchronous task and a call of `Context.run`
have a context of their own; a thread begins with an empty one.

An allocator reads the tags of its thread without the interpreter lock where it can. It remembers
for each thread the last tags that were read with it, and which state of the context that was:
Python counts every switch. Where that has changed, it takes the interpreter lock for a moment.
"""

from libc.stdint cimport uint16_t

# Of tags and labels. Within `_support` nothing is known of the arenas.
cdef struct OpenTag:
    void* arena         # ArenaCore: requests to it; NULL: a label alone
    void* tagged        # come from here; `arena` itself: untagged
    uint16_t label      # of events
    bint is_over        # its block has ended, and a context that still has it ignores it

cdef struct OpenLink:
    const OpenTag* tag
    const OpenLink* outer

# The tags that the calling thread's context has open, the innermost first; NULL: none. A thread
# that Python does not know has none. Without `may_wait` the interpreter lock is not waited for:
# NULL where it would be needed.
cdef const OpenLink* open_tags(bint may_wait) noexcept nogil
# The label of the innermost of them that has one; 0: none.
cdef uint16_t innermost_label(bint may_wait) noexcept nogil
# Between the two the calling thread holds a lock of another library, for which threads with the
# interpreter lock may wait: `open_tags` does not wait.
cdef void begin_foreign_lock() noexcept nogil
cdef void end_foreign_lock() noexcept nogil

# The object that a block opens; for one entry of one block.
cdef class Opened:
    cdef OpenTag tag
    cdef readonly object value          # what the block yields

# The innermost open tag of an arena; None: it has none. With the interpreter lock.
cdef Opened opened_tag(const void* arena)

# One link of a variable.
cdef class Link:
    cdef Opened opened
    cdef Link outer
    cdef OpenLink link

# A `with` block. It is open from its entry to its exit, or until it is dropped.
cdef class ContextBlock:
    cdef object variable
    cdef Opened opened
    cdef readonly str name
    cdef object again                   # makes another one, for a decorated function
    cdef bint is_entered
    cdef bint is_left
    cdef bint leave(self) noexcept
