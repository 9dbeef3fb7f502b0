"""Work that was deferred to a thread that holds the interpreter lock; see deferred.pxd."""

from _thread import get_ident
# Of C: Python's own would begin with the handler, if a signal waits for it.
from _signal import getsignal, SIGINT

from libc.stdint cimport uintptr_t

from gpumem._support.process cimport process_is_exiting, process_on_main_thread
from gpumem._support.retired cimport queue_retired, retire, Retired, RetiredQueue

from gpumem._support.releases import on_release

cdef extern from "Python.h":
    ctypedef struct PyObject
    ctypedef struct PyFrameObject
    PyFrameObject* PyEval_GetFrame()
    int PyGILState_Check() nogil
    int Py_AddPendingCall(int (*function)(void*) noexcept, void* argument) nogil
    int PyErr_CheckSignals() except -1
    void PyErr_Fetch(PyObject** kind, PyObject** value, PyObject** traceback)
    void PyErr_SetInterrupt()
    void PyErr_SetObject(object kind, object value)
    void PyErr_WriteUnraisable(object where)
    void PyErr_Restore(PyObject* kind, PyObject* value, PyObject* traceback)

ctypedef void (*Function)() noexcept

# What arrived from anywhere; and, under the interpreter lock, the queue that it is appended to.
cdef Retired* arriving = NULL
cdef RetiredQueue waiting = RetiredQueue(NULL, NULL)


# ---- calls ---------------------------------------------------------------------------------------

cdef void call_soon(Function function) noexcept nogil:
    if not process_is_exiting():
        Py_AddPendingCall(call_now, <void*>function)


cdef int call_now(void* function) noexcept:
    if not process_is_exiting():
        (<Function>function)()
    return 0


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
    # The view may have been dropped while an exception was on its way.
    cdef PyObject* kind = NULL
    cdef PyObject* value = NULL
    cdef PyObject* traceback = NULL
    PyErr_Fetch(&kind, &value, &traceback)
    work.run(work)
    PyErr_Restore(kind, value, traceback)


cdef void run_deferred() noexcept:
    # One at a time: the work may come back here, and other threads may while it runs.
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
    # The end of the process cuts calls short on daemon threads: that is no news to anybody.
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
    # The next of many blocks that go at once: its function would end where it begins.
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
        return None             # where handlers run
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


cdef tuple discarded = None


cdef int note_discarded(object exporter, object error) except -1:
    global discarded
    if isinstance(error, KeyboardInterrupt):
        discarded = this_call(exporter)
    return 0


cdef int raise_discarded(object exporter) except -1:
    global discarded
    if discarded is not None:
        noted, discarded = discarded, None
        # Otherwise `__getbuffer__` was called by another, to whom it told the exception itself.
        if noted == this_call(exporter):
            raise KeyboardInterrupt
    return 0


cdef tuple this_call(object exporter):
    # The instruction of Python's that called into C.
    cdef PyObject* frame = <PyObject*>PyEval_GetFrame()
    instruction = -1 if frame == NULL else (<object>frame).f_lasti
    return get_ident(), id(exporter), <uintptr_t>frame, instruction


def _run_deferred(may_wait):
    run_deferred()


on_release("callbacks", _run_deferred)
