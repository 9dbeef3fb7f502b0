"""The state of this process: whether it is ending, and how often it was forked on its way here."""

from libc.stdint cimport uint32_t

# What every finalizer checks first. `exiting` is set when the interpreter begins to end;
# `generation` counts forks on the way from the first process to this one.
cdef struct ProcessState:
    int exiting
    uint32_t generation

cdef ProcessState process

cdef bint process_is_exiting() noexcept nogil
cdef bint process_on_main_thread() noexcept nogil

# Runs Python's handlers of the signals that came, Ctrl-C's for one, from a long wait. True: one
# raised, and the exception is set; the wait ends as if it had not begun, and `raise_interrupt`
# hands the exception on. Takes the interpreter lock: no lock of ours may be held. Python runs
# handlers on the main thread alone: elsewhere False, for the price of two calls of the kernel.
cdef bint process_interrupted() noexcept nogil
cdef extern from *:
    """
    static inline int gm_exception_is_set(void) { return -1; }
    """
    int raise_interrupt "gm_exception_is_set"() except -1

# Registers functions to run around every fork; NULL for none. Those in the child run on its only
# thread, in the order of registration, when `generation` has risen. Another thread of the parent
# may have held any lock and have been inside the driver: they initialise their locks anew, and
# forget what is the parent's without releasing it.
cdef int on_fork(void (*before)() noexcept nogil, void (*in_parent)() noexcept nogil,
                 void (*in_child)() noexcept nogil) except -1
