"""Exit and forks."""

import atexit


cdef extern from "<pthread.h>" nogil:
    int pthread_atfork(void (*prepare)() noexcept nogil, void (*parent)() noexcept nogil,
                       void (*child)() noexcept nogil)


cdef extern from *:
    """
    #include <sys/syscall.h>
    #include <unistd.h>

    static inline int gm_is_main_thread(void) { return syscall(SYS_gettid) == getpid(); }
    """
    bint gm_is_main_thread() noexcept nogil

cdef extern from "Python.h":
    int PyErr_CheckSignals()
    void* PyErr_Occurred()


cdef bint process_is_exiting() noexcept nogil:
    return process.exiting


cdef bint process_on_main_thread() noexcept nogil:
    # The process's first thread, or the one that a fork's child goes on with.
    return gm_is_main_thread()


cdef bint process_interrupted() noexcept nogil:
    if process.exiting or not gm_is_main_thread():
        return False
    with gil:
        # An exception that is already on its way is not replaced.
        return PyErr_Occurred() == NULL and PyErr_CheckSignals() != 0


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
