"""Work that needs the interpreter and is found on threads that may not hold its lock.

The last view of a block may be dropped anywhere: on a thread of the driver, under a foreign lock.
Work that runs Python is done at once if this thread holds the interpreter lock. Otherwise it is
queued, and the main thread or the next call of gpumem does it, the oldest first.

Once the interpreter has begun to end, no work is done. A fork's child inherits the queue: each
piece of work checks itself whether it belongs to the child.
"""

from gpumem._support.retired cimport Retired

cdef struct Deferred:
    void (*run)(Deferred* work) noexcept    # with the interpreter lock; frees what it lies in
    Retired link

# The one way back into the interpreter: calls the function with the interpreter lock, on the main
# thread, between two instructions of Python. Never once the interpreter has begun to end.
cdef void call_soon(void (*function)() noexcept) noexcept nogil
# Takes the work over. On any thread, with the interpreter lock or without.
cdef void defer(Deferred* work) noexcept nogil
# Does the queued work. With the interpreter lock.
cdef void run_deferred() noexcept
# Reports to sys.unraisablehook an exception that cannot reach a caller; none of the type that
# `expect_at_exit` was given, when the process began to end.
cdef int report_unraisable(object error, object where) noexcept
cdef int expect_at_exit(object kind) except -1
