"""Python's side of an arena's debug heap: stacks, reports, and their delivery.

Findings are collected below the interpreter. The next call of the arena that may raise delivers
them: it raises, warns or calls, as `on_error` says. Without such a call the main thread delivers
them, between two instructions of Python.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.api cimport ArenaCore, Block, DebugHeap

cdef class Heap:
    cdef DebugHeap* heap            # a reference
    cdef readonly object options    # DebugHeapOptions
    cdef str arena                  # names, for reports
    cdef str memory
    cdef object owner               # weak reference to the Arena
    cdef uint32_t generation        # of the process that made it
    cdef uint64_t lost              # number of reports that were not kept, and not mentioned yet

    # Raises, warns or calls, as the options say, for all findings so far.
    cdef int deliver(self) except -1
    # Runs before an allocation: checks freed blocks, delivers findings, and records this thread's
    # stack.
    cdef int before(self, ArenaCore* core) except -1
    # Runs after an allocation, also a failed one.
    cdef void after(self) noexcept
    # Moves the beginning of the user's bytes to an aligned address inside the block. Raises, with
    # the block freed, if the driver refuses.
    cdef int narrow(self, ArenaCore* core, const Block* block, uint64_t nbytes,
                    uint32_t slot) except -1
    # Delivers the record of any heap about an address that is not allocated.
    cdef int bad_free(self, uint64_t address) except -1
    # Checks every block; `wait`: after all work of the device is done.
    cdef tuple check(self, ArenaCore* core, bint wait)
    cdef list outstanding(self)
    # The live blocks as text lines, for the message of a refused close.
    cdef str live_text(self)

# A debug heap for a new arena; None without `debug`.
cdef Heap make_heap(ArenaCore* core, object debug, object arena)
