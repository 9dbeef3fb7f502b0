"""The interpreter lock, for code that may or may not hold it."""

cdef extern from "Python.h":
    ctypedef struct PyThreadState:
        pass
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
