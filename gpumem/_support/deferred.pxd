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
# `expect_at_exit` was given, when the process began to end. Ctrl-C's is not reported: see below.
cdef int report_unraisable(object error, object where) noexcept
# Calls a function of users that frees something, and reports what it raises. An exception may be
# on its way: it stays. A Ctrl-C that another such function was given does not cut this one short.
cdef int call_unraisable(object function, tuple arguments, object where) noexcept
# Ctrl-C's exception cannot reach a caller from here, or would as another error: its handler is
# going to run again, on the main thread, at the end of the call into C at the latest. False: it is
# another exception, or Python does not handle that signal. With the interpreter lock.
cdef bint interrupt_again(object error) noexcept
# NumPy discards what `__getbuffer__` raises, and in the same call asks `__array__` of that object,
# whose exceptions it passes on: Ctrl-C's is noted in the one and raised anew in the other.
cdef int note_discarded(object exporter, object error) except -1
cdef int raise_discarded(object exporter) except -1
cdef int expect_at_exit(object kind) except -1
