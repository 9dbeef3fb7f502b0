"""The state of this process: whether it is ending, and how often it was forked on its way here."""

from libc.stdint cimport uint32_t

# What every finalizer checks first. `exiting` is set when the interpreter begins to end;
# `generation` counts forks on the way from the first process to this one.
cdef struct ProcessState:
    int exiting
    uint32_t generation

cdef ProcessState process

cdef bint process_is_exiting() noexcept nogil

# Registers functions to run around every fork; NULL for none. Those in the child run on its only
# thread, in the order of registration, when `generation` has risen. Another thread of the parent
# may have held any lock and have been inside the driver: they initialise their locks anew, and
# forget what is the parent's without releasing it.
cdef int on_fork(void (*before)() noexcept nogil, void (*in_parent)() noexcept nogil,
                 void (*in_child)() noexcept nogil) except -1
