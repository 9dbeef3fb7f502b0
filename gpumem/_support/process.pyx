"""Exit, forks, signals, and work deferred to a thread that holds the interpreter lock."""

import atexit
# The functions of C: Python's `signal` module would first run the handler of a pending signal.
from _signal import getsignal, SIGINT

from libc.stdlib cimport free

from gpumem._support.atomics cimport count_add, flag_take, publish32, published32
from gpumem._support.clock cimport clock_ns, sleep_ns
from gpumem._support.interpreter cimport PyGILState_Check
from gpumem._support.retired cimport queue_retired, retire, Retired, RetiredQueue

from gpumem._support.releases import on_release


cdef extern from "<pthread.h>" nogil:
    int pthread_atfork(void (*prepare)() noexcept nogil, void (*parent)() noexcept nogil,
                       void (*child)() noexcept nogil)

cdef extern from "threads.h" nogil:
    ctypedef struct pthread_t:
        pass
    int thread_start(pthread_t* thread, bint detached, size_t stack_bytes,
                     void* (*run)(void*) noexcept nogil, void* argument)


cdef extern from *:
    """
    #include <sys/syscall.h>
    #include <unistd.h>

    static inline int gm_is_main_thread(void) { return syscall(SYS_gettid) == getpid(); }
    """
    bint gm_is_main_thread() noexcept nogil

cdef extern from "Python.h":
    ctypedef struct PyObject
    int Py_AddPendingCall(int (*function)(void*) noexcept, void* argument) nogil
    int check_signals "PyErr_CheckSignals"()
    int PyErr_CheckSignals() except -1
    void PyErr_Fetch(PyObject** kind, PyObject** value, PyObject** traceback)
    void* PyErr_Occurred()
    void PyErr_SetInterrupt()
    void PyErr_SetObject(object kind, object value)
    void PyErr_WriteUnraisable(object where)
    void PyErr_Restore(PyObject* kind, PyObject* value, PyObject* traceback)

ctypedef void (*Function)() noexcept

# Work from any thread; and, under the interpreter lock, the queue that it is appended to.
cdef Retired* arriving = NULL
cdef RetiredQueue waiting = RetiredQueue(NULL, NULL)


cdef bint process_is_exiting() noexcept nogil:
    return process.exiting


cdef bint process_on_main_thread() noexcept nogil:
    # The main thread is the process's first one, in a fork's child the one that forked.
    return gm_is_main_thread()


cdef bint process_interrupted() noexcept nogil:
    if process.exiting or not gm_is_main_thread():
        return False
    with gil:
        # An exception that is already set is not replaced.
        return PyErr_Occurred() == NULL and check_signals() != 0


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
on_fork(NULL, NULL, begin_child)    # registered first, so that others find the new generation
atexit.register(_begin_exit)


# ---- calls ---------------------------------------------------------------------------------------

cdef void call_soon(Function function) noexcept nogil:
    if not process_is_exiting():
        Py_AddPendingCall(call_now, <void*>function)


cdef int call_now(void* function) noexcept:
    if not process_is_exiting():
        (<Function>function)()
    return 0


cdef enum:
    CALL_RUNS = 10
    CALL_POLL = 100_000         # ns


cdef bint call_within(BoundedCall* call, uint64_t ns) noexcept nogil:
    cdef pthread_t thread
    cdef uint64_t until = clock_ns() + ns
    call.owners = 2
    call.unclaimed = 1
    if PyGILState_Check():
        run_call(call)
    elif thread_start(&thread, True, 0, run_call, call) != 0:
        call_drop(call)         # the share of the thread that there is not
        return False
    # It polls: a wake-up would only speed up a refusal.
    while not published32(&call.has_run):
        if clock_ns() > until and (flag_take(&call.unclaimed)
                                   or clock_ns() > until + CALL_RUNS * ns):
            return False
        sleep_ns(CALL_POLL)
    return True


cdef void* run_call(void* given) noexcept nogil:
    cdef BoundedCall* call = <BoundedCall*>given
    run_unless_given_up(call)
    call_drop(call)
    return NULL


cdef void run_unless_given_up(BoundedCall* call) noexcept with gil:
    if not process_is_exiting() and flag_take(&call.unclaimed):
        call.run(call)
        publish32(&call.has_run, 1)


cdef void call_drop(BoundedCall* call) noexcept nogil:
    if count_add(&call.owners, -1) == 0:
        free(call)


# ---- work ----------------------------------------------------------------------------------------

cdef void defer(Deferred* work) noexcept nogil:
    if process_is_exiting():
        return
    if PyGILState_Check():
        run_now(work)
        return
    retire(&arriving, &work.link, work)
    call_soon(run_deferred)


cdef void run_now(Deferred* work) noexcept with gil:
    # The view may have been dropped while an exception was being raised.
    cdef PyObject* kind = NULL
    cdef PyObject* value = NULL
    cdef PyObject* traceback = NULL
    PyErr_Fetch(&kind, &value, &traceback)
    work.run(work)
    PyErr_Restore(kind, value, traceback)


cdef void run_deferred() noexcept:
    # Work is taken one by one: it may call this again, and so may other threads while it runs.
    cdef Deferred* work = take_oldest()
    while work != NULL:
        run_now(work)
        work = take_oldest()


cdef Deferred* take_oldest() noexcept:
    cdef Retired* link
    queue_retired(&waiting, &arriving)
    link = waiting.oldest
    if link == NULL or process_is_exiting():
        return NULL
    waiting.oldest = link.next
    return <Deferred*>link.thing


# ---- exceptions without a caller -----------------------------------------------------------------

cdef object expected_at_exit = ()
cdef bint interrupts = False    # the handler of Ctrl-C may not have run again yet


cdef int expect_at_exit(object kind) except -1:
    global expected_at_exit
    expected_at_exit = kind
    return 0


cdef int report_unraisable(object error, object where) noexcept:
    # Calls of daemon threads are ended by the end of the process, which is not an error.
    if isinstance(error, expected_at_exit) or interrupt_again(error):
        return 0
    PyErr_SetObject(type(error), error)
    PyErr_WriteUnraisable(where)
    return 0


cdef int call_unraisable(object function, tuple arguments, object where) noexcept:
    cdef PyObject* kind = NULL
    cdef PyObject* value = NULL
    cdef PyObject* traceback = NULL
    PyErr_Fetch(&kind, &value, &traceback)
    # One of many blocks that end at once: a pending Ctrl-C would end its function at the beginning.
    held = take_interrupt() if interrupts else None
    try:
        function(*arguments)
    except BaseException as error:
        report_unraisable(error, where)
    if held is not None:
        interrupt_again(held)
    PyErr_Restore(kind, value, traceback)
    return 0


cdef object take_interrupt():
    global interrupts
    if not process_on_main_thread():
        return None             # handlers run on the main thread only
    interrupts = False
    try:
        PyErr_CheckSignals()
    except KeyboardInterrupt as error:
        return error
    except BaseException as error:
        report_unraisable(error, None)
    return None


cdef bint interrupt_again(object error) noexcept:
    global interrupts
    if not isinstance(error, KeyboardInterrupt) or not callable(getsignal(SIGINT)):
        return False
    interrupts = True
    PyErr_SetInterrupt()
    return True


def _run_deferred(may_wait):
    run_deferred()


on_release("callbacks", _run_deferred)
