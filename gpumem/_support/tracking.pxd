"""Types of which Python's collector of cycles sees some objects only: those that are tracked.

`type` is another such type: it tracks classes, but not the types of C. A tracked object costs a
header of 16 bytes, and the collector's time; only what may be part of a cycle is one. The type is
declared `no_gc`, and Cython makes, ends and reuses its objects that are not tracked.
"""

from cpython.object cimport PyObject, PyTypeObject

cdef extern from "Python.h":
    # Without exceptions, unlike Cython's own declarations.
    ctypedef int (*visitproc)(PyObject*, void*) noexcept
    ctypedef int (*traverseproc)(PyObject*, visitproc, void*) noexcept
    ctypedef int (*inquiry)(PyObject*) noexcept
    ctypedef void (*destructor)(PyObject*) noexcept

cdef extern from *:
    """
    static inline int gm_take_reference(PyObject *thing, void *unused) {
        (void)unused;
        Py_INCREF(thing);
        return 0;
    }

    static inline int gm_drop_reference(PyObject *thing, void *unused) {
        (void)unused;
        Py_DECREF(thing);
        return 0;
    }

    static inline PyObject *gm_new_untracked(PyTypeObject *type, Py_ssize_t items) {
        PyObject *made = (PyObject *)PyObject_Calloc(1, type->tp_basicsize);
        (void)items;
        return made == NULL ? PyErr_NoMemory() : PyObject_Init(made, type);
    }

    static inline destructor gm_track_some(PyTypeObject *type, inquiry is_tracked,
                                           traverseproc traverse, destructor dealloc) {
        destructor untracked = type->tp_dealloc;
        type->tp_flags |= Py_TPFLAGS_HAVE_GC;
        type->tp_is_gc = is_tracked;
        type->tp_alloc = gm_new_untracked;
        type->tp_traverse = traverse;
        type->tp_dealloc = dealloc;
        PyType_Modified(type);
        return untracked;
    }

    static inline PyObject *gm_new_tracked(PyObject *pristine) {
        PyTypeObject *type = Py_TYPE(pristine);
        PyObject *made = (PyObject *)PyObject_GC_New(PyObject, type);
        if (made != NULL) {
            memcpy(made + 1, pristine + 1, type->tp_basicsize - sizeof(PyObject));
            type->tp_traverse(made, gm_take_reference, NULL);
        }
        return made;
    }

    /* Out of line, because most objects that end are not tracked. */
    __attribute__((noinline, unused))
    static void gm_dealloc_tracked(PyObject *dying, destructor end) {
        PyObject *kind, *value, *trace;
        PyObject_GC_UnTrack(dying);
        if (Py_TYPE(dying)->tp_weaklistoffset)
            PyObject_ClearWeakRefs(dying);
        PyErr_Fetch(&kind, &value, &trace);
        Py_SET_REFCNT(dying, 1);        /* what is called may take references */
        end(dying);
        Py_SET_REFCNT(dying, 0);
        PyErr_Restore(kind, value, trace);
        Py_TYPE(dying)->tp_traverse(dying, gm_drop_reference, NULL);
        PyObject_GC_Del(dying);
    }
    """
    # Once for a type, without a `tp_clear`. Returns Cython's own `tp_dealloc`, which `dealloc`
    # calls for what is not tracked; `traverse` visits every field that is an object.
    destructor track_some "gm_track_some" (
        PyTypeObject* type, inquiry is_tracked, traverseproc traverse, destructor dealloc)
    # A copy of an object that only __new__ has made; `track` it once all its fields are set.
    object new_tracked "gm_new_tracked" (object pristine)
    void track "PyObject_GC_Track" (object made)
    # `end` leaves no more to visit than the fields.
    void dealloc_tracked "gm_dealloc_tracked" (PyObject* dying, destructor end)
