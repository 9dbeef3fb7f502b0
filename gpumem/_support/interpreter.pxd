"""The interpreter lock, for code that may or may not hold it."""

cdef extern from "Python.h":
    ctypedef struct PyInterpreterState:
        pass
    ctypedef struct PyThreadState:
        pass
    PyInterpreterState* PyInterpreterState_Main() noexcept nogil
    PyThreadState* PyThreadState_New(PyInterpreterState* interpreter) noexcept nogil
    PyThreadState* PyEval_SaveThread() noexcept nogil
    void PyEval_RestoreThread(PyThreadState* state) noexcept nogil
    int PyGILState_Check() noexcept nogil

# Whether this build of Python has one: then no other thread runs Python between two lines. It is a
# constant.
cdef extern from *:
    """
    #ifdef Py_GIL_DISABLED
    #define GPUMEM_HAS_INTERPRETER_LOCK 0
    #else
    #define GPUMEM_HAS_INTERPRETER_LOCK 1
    #endif
    """
    const bint HAS_INTERPRETER_LOCK "GPUMEM_HAS_INTERPRETER_LOCK"

# Releases the interpreter lock, if this thread holds it, around a wait that another thread of
# Python may have to end. NULL: it was not held.
cdef inline PyThreadState* interpreter_release() noexcept nogil:
    return PyEval_SaveThread() if PyGILState_Check() else NULL

# Caller holds no lock that a thread with the interpreter lock may wait for.
cdef inline void interpreter_restore(PyThreadState* state) noexcept nogil:
    if state != NULL:
        PyEval_RestoreThread(state)

# Gives a thread of C, which takes the interpreter lock again and again, a thread state for good.
# Else each time makes one, under a lock of the interpreter's that Python 3.11 does not release in
# the child of a fork: a child forked in that moment would wait for ever.
cdef inline void interpreter_know_thread() noexcept nogil:
    PyThreadState_New(PyInterpreterState_Main())
