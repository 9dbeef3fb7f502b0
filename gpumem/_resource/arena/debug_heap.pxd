"""Python's side of an arena's debug heap: stacks, reports, who is told and when.

What is found below the interpreter waits there. A call of the arena that may raise takes it, raises
or tells; where no such call comes, the interpreter is asked to do so between two of its own steps.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena cimport ArenaCore, Block, DebugHeap

cdef class Heap:
    cdef DebugHeap* heap            # a reference
    cdef readonly object options    # DebugHeapOptions
    cdef str arena                  # names, for reports
    cdef str memory
    cdef object owner               # weak reference to the Arena
    cdef uint32_t generation        # of the process that made it
    cdef uint64_t lost              # reports that were not kept, and nobody knows yet

    # Raises, warns or calls, as the options say, for everything found so far.
    cdef int tell(self) except -1
    # Before an allocation: looks at what was freed, tells, and notes this thread's stack.
    cdef int before(self, ArenaCore* core) except -1
    # Behind it, whatever became of it.
    cdef void after(self) noexcept
    # Of an aligned block: its user has so many bytes from an address on. Raises, with the block
    # given back, if the driver refuses.
    cdef int narrow(self, ArenaCore* core, const Block* block, uint64_t nbytes,
                    uint32_t slot) except -1
    # An address was freed that nobody has out: tells what any heap knows of it.
    cdef int bad_free(self, uint64_t address) except -1
    # Looks at every block; `wait`: once all work of the device is done.
    cdef tuple check(self, ArenaCore* core, bint wait)
    cdef list outstanding(self)
    # The live blocks in some lines, for the message of a close that is refused.
    cdef str live_text(self)

# A debug heap for a new arena; None without `debug`.
cdef Heap make_heap(ArenaCore* core, object debug, object arena)
