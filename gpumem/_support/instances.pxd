"""Types of which only gpumem makes objects."""

from cpython.object cimport PyObject, PyTypeObject

cdef extern from *:
    """
    /* Cython calls its own constructor directly; Python loses both ways to it. An object that
       __new__ made and that was never filled in would be read through null pointers. */
    static inline int gm_forbid_instantiation(PyTypeObject *type, newfunc refusal) {
        type->tp_new = refusal;
        type->tp_vectorcall = NULL;
        if (PyDict_DelItemString(type->tp_dict, "__new__") < 0)
            PyErr_Clear();
        PyType_Modified(type);
        return 0;
    }
    """
    ctypedef PyObject* (*newfunc)(PyTypeObject*, PyObject*, PyObject*) except NULL
    int gm_forbid_instantiation(PyTypeObject* type, newfunc refusal)

# Call once, at the end of the module: the type cannot be instantiated from Python any more. The
# error of `refusal` names the function that makes its objects; without it Python's own is raised.
cdef inline int forbid_instantiation(object cls, newfunc refusal=NULL) except -1:
    return gm_forbid_instantiation(<PyTypeObject*><PyObject*>cls, refusal)

cdef extern from *:
    """
    static inline destructor gm_replace_dealloc(PyTypeObject *type, destructor dealloc) {
        destructor before = type->tp_dealloc;
        type->tp_dealloc = dealloc;
        return before;
    }
    """
    ctypedef void (*destructor)(PyObject*) noexcept
    # Returns Cython's own `tp_dealloc`, which `dealloc` calls at its end. For a final type alone.
    destructor replace_dealloc "gm_replace_dealloc" (PyTypeObject* type, destructor dealloc)
