"""The process: its end, its forks, its signals, and work left to a thread of the interpreter.

The last view of a block may be dropped anywhere: on a thread of the driver, under a foreign lock.
Work that runs Python is done at once if this thread holds the interpreter lock. Otherwise it is
queued, and the main thread or the next call of gpumem does it, the oldest first.

Once the interpreter has begun to end, no work is done. A fork's child inherits the queue: each
piece of work checks whether it belongs to the child.
"""

from libc.stdint cimport int32_t, uint32_t, uint64_t

from gpumem._support.retired cimport Retired

# Every finalizer checks this first. `exiting` is set when the interpreter begins to end;
# `generation` counts the forks between the first process and this one.
cdef struct ProcessState:
    int exiting
    uint32_t generation

cdef ProcessState process

cdef bint process_is_exiting() noexcept nogil
cdef bint process_on_main_thread() noexcept nogil

# Runs Python's handlers of pending signals, such as Ctrl-C's, during a long wait. True: a handler
# raised, and the exception is set; the wait ends as if it had not begun, and `raise_interrupt`
# raises the exception. It acquires the interpreter lock: caller holds no lock of gpumem's. Python
# runs handlers only on the main thread: elsewhere it returns False after two calls of the kernel.
cdef bint process_interrupted() noexcept nogil
cdef extern from *:
    """
    static inline int gm_exception_is_set(void) { return -1; }
    """
    int raise_interrupt "gm_exception_is_set"() except -1

# Registers functions to run around every fork; NULL for none. Those in the child run on its only
# thread, in the order of registration, when `generation` has risen. Another thread of the parent
# may have held any lock and have been inside the driver: they initialise their locks again, and
# forget the parent's objects without releasing them.
cdef int on_fork(void (*before)() noexcept nogil, void (*in_parent)() noexcept nogil,
                 void (*in_child)() noexcept nogil) except -1

# ---- deferred work and exceptions without a caller -----------------------------------------------

cdef struct Deferred:
    void (*run)(Deferred* work) noexcept    # with the interpreter lock; frees what it lies in
    Retired link

# The one call into the interpreter: it calls the function with the interpreter lock, on the main
# thread, between two instructions of Python. Never once the interpreter has begun to end.
cdef void call_soon(void (*function)() noexcept) noexcept nogil
# A call that this thread waits for, but not for ever: the interpreter lock may be held by a thread
# that waits for this one. The first member of a struct from `calloc`, which the later of the two
# threads frees.
cdef struct BoundedCall:
    void (*run)(BoundedCall* call) noexcept        # with the interpreter lock
    uint32_t unclaimed      # neither thread has decided yet whether it runs
    uint32_t has_run
    int32_t owners

# Runs it on this thread if that holds the interpreter lock. Otherwise a thread of its own runs it,
# unless the lock cannot be had for `ns` nanoseconds; it may run for CALL_RUNS times as long. So
# Python code never runs under a lock of this thread, of PyTorch's or another library's. False: it
# did not run, or has not ended. In both cases the caller calls `call_drop`.
cdef bint call_within(BoundedCall* call, uint64_t ns) noexcept nogil
cdef void call_drop(BoundedCall* call) noexcept nogil
# Owns the work from here on. It may be called on any thread, with the interpreter lock or without.
cdef void defer(Deferred* work) noexcept nogil
# Does the queued work. Caller holds the interpreter lock.
cdef void run_deferred() noexcept
# Reports to sys.unraisablehook an exception that cannot reach a caller. Exceptions of the type that
# was passed to `expect_at_exit`, and Ctrl-C's (see below), are not reported.
cdef int report_unraisable(object error, object where) noexcept
# Calls a user's function that frees memory, and reports its exception. An exception that is being
# raised stays set. A Ctrl-C that ended another of these functions does not end this one.
cdef int call_unraisable(object function, tuple arguments, object where) noexcept
# Ctrl-C's exception cannot reach a caller from here, or only as another error: its handler will run
# again on the main thread, at the latest at the end of the call into C. False: it is another
# exception, or Python does not handle that signal. Caller holds the interpreter lock.
cdef bint interrupt_again(object error) noexcept
cdef int expect_at_exit(object kind) except -1
