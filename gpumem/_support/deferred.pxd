"""Work that needs the interpreter, found on threads that may not have it.

The last view of a block may be dropped anywhere: on a thread of the driver, under a foreign lock.
What then has to run Python is done at once if this thread holds the interpreter lock; else it is
left here, and the main thread, or the next call of gpumem that looks, does it, oldest first.

After the interpreter has begun to end nothing is done any more. A fork's child inherits what waits:
each piece of work says for itself whether it is the child's.
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
# Does what waits. With the interpreter lock.
cdef void run_deferred() noexcept
# Tells sys.unraisablehook of an exception that nobody can be given.
cdef int report_unraisable(object error, object where) noexcept
