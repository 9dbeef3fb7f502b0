"""Exit and forks."""

import atexit


cdef extern from "<pthread.h>" nogil:
    int pthread_atfork(void (*prepare)() noexcept nogil, void (*parent)() noexcept nogil,
                       void (*child)() noexcept nogil)


cdef bint process_is_exiting() noexcept nogil:
    return process.exiting


cdef int on_fork(void (*before)() noexcept nogil, void (*in_parent)() noexcept nogil,
                 void (*in_child)() noexcept nogil) except -1:
    # The C library keeps the list, and runs it for every fork, Python's and others'.
    if pthread_atfork(before, in_parent, in_child) != 0:
        raise MemoryError("out of host memory while registering functions for forks")
    return 0


cdef void begin_child() noexcept nogil:
    process.generation += 1


def _begin_exit():
    """Note that the interpreter is ending: from here on finalizers leave the driver alone."""
    process.exiting = 1


process.exiting = 0
process.generation = 0
on_fork(NULL, NULL, begin_child)    # the first: all others find the new generation
atexit.register(_begin_exit)
