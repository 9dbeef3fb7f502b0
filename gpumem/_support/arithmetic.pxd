"""Types refuse arithmetic with an error of their own.

Only the slots are set: type checkers, and programs that look for methods, would find arithmetic if
the class had methods.
"""

from cpython.object cimport PyObject, PyTypeObject

cdef extern from *:
    """
    static inline int gm_refuse_arithmetic(PyTypeObject *type, binaryfunc refusal) {
        PyNumberMethods *number = type->tp_as_number;
        number->nb_add = number->nb_subtract = number->nb_multiply = refusal;
        number->nb_true_divide = number->nb_floor_divide = number->nb_remainder = refusal;
        number->nb_matrix_multiply = refusal;
        PyType_Modified(type);
        return 0;
    }
    """
    ctypedef PyObject* (*binaryfunc)(PyObject* left, PyObject* right) except NULL
    int gm_refuse_arithmetic(PyTypeObject* type, binaryfunc refusal)

# Call once, for a type with other methods of numbers, such as __int__.
cdef inline int refuse_arithmetic(object cls, binaryfunc refusal) except -1:
    return gm_refuse_arithmetic(<PyTypeObject*><PyObject*>cls, refusal)
