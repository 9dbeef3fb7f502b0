"""The interpreter lock, for code that may or may not hold it."""

cdef extern from "Python.h":
    ctypedef struct PyThreadState:
        pass
    PyThreadState* PyEval_SaveThread() noexcept nogil
    void PyEval_RestoreThread(PyThreadState* state) noexcept nogil
    int PyGILState_Check() noexcept nogil
