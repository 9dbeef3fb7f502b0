"""Types whose objects only gpumem makes."""

from cpython.object cimport PyObject, PyTypeObject

cdef extern from *:
    """
    /* Cython calls its own constructor directly; Python loses both ways to it. An object that
       __new__ made and that was never filled in would be read through null pointers. */
    static inline int gm_forbid_instantiation(PyTypeObject *type) {
        type->tp_new = NULL;
        type->tp_vectorcall = NULL;
        if (PyDict_DelItemString(type->tp_dict, "__new__") < 0)
            PyErr_Clear();
        PyType_Modified(type);
        return 0;
    }
    """
    int gm_forbid_instantiation(PyTypeObject* type)

# Call once, where the module ends: the type cannot be instantiated from Python any more.
cdef inline int forbid_instantiation(object cls) except -1:
    return gm_forbid_instantiation(<PyTypeObject*><PyObject*>cls)
