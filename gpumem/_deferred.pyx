"""Doing what threads without the interpreter left; see _deferred.pxd."""

from gpumem._driver cimport process_is_exiting
from gpumem._support.atomics cimport pointer_swap, pointer_try

from gpumem.device import _reapers

cdef extern from "Python.h":
    ctypedef struct PyObject
    int PyGILState_Check() nogil
    int Py_AddPendingCall(int (*function)(void*) noexcept, void* argument) nogil
    void PyErr_Fetch(PyObject** kind, PyObject** value, PyObject** traceback)
    void PyErr_SetObject(object kind, object value)
    void PyErr_WriteUnraisable(object where)
    void PyErr_Restore(PyObject* kind, PyObject* value, PyObject* traceback)

# A stack without a lock, pushed to from anywhere; and, under the interpreter lock, a queue.
cdef void* arriving = NULL
cdef Deferred* oldest = NULL
cdef Deferred* newest = NULL


cdef void defer(Deferred* work) noexcept nogil:
    cdef void* seen
    if process_is_exiting():
        return
    if PyGILState_Check():
        run_now(work)
        return
    while True:
        seen = arriving
        work.next = <Deferred*>seen
        if pointer_try(&arriving, seen, work):
            break
    Py_AddPendingCall(run_pending, NULL)


cdef void run_now(Deferred* work) noexcept with gil:
    # The view may have been dropped while an exception was on its way.
    cdef PyObject* kind = NULL
    cdef PyObject* value = NULL
    cdef PyObject* traceback = NULL
    PyErr_Fetch(&kind, &value, &traceback)
    work.run(work)
    PyErr_Restore(kind, value, traceback)


cdef int run_pending(void* nothing) noexcept:
    run_deferred()
    return 0


cdef void run_deferred() noexcept:
    # One at a time: the work may come back here, and other threads may while it runs.
    cdef Deferred* work = take_oldest()
    while work != NULL:
        run_now(work)
        work = take_oldest()


cdef Deferred* take_oldest() noexcept:
    global oldest, newest
    cdef Deferred* work
    if arriving != NULL:
        collect_arrived()
    work = oldest
    if work == NULL or process_is_exiting():
        return NULL
    oldest = work.next
    if oldest == NULL:
        newest = NULL
    return work


cdef void collect_arrived() noexcept:
    """Append what arrived to the queue; the stack has the newest first."""
    global oldest, newest
    cdef Deferred* work = <Deferred*>pointer_swap(&arriving, NULL)
    cdef Deferred* last = work
    cdef Deferred* first = NULL
    cdef Deferred* after
    while work != NULL:
        after = work.next
        work.next = first
        first = work
        work = after
    if first == NULL:
        return
    if oldest == NULL:
        oldest = first
    else:
        newest.next = first
    newest = last


cdef int report_unraisable(object error, object where) noexcept:
    PyErr_SetObject(type(error), error)
    PyErr_WriteUnraisable(where)
    return 0


def reap():
    """Do the work that threads without the interpreter left."""
    run_deferred()


_reapers.append(reap)
