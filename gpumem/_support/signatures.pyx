"""Names and signatures of public objects, for errors, help, editors and documentation tools."""

cimport cython
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF

cdef extern from *:
    """
    /* A compiled type keeps its module in this name. Python changes it for its own classes only. */
    static inline void gm_name_type(PyTypeObject *type, const char *name) {
        type->tp_name = name;
        PyType_Modified(type);
    }
    """
    void gm_name_type(PyTypeObject* type, const char* name)


def published(dict module not None):
    """Name the objects in a module's `__all__` after it, and return its `__dir__`.

    Objects that have a public module keep it. A private base class is named after the package.
    """
    cdef str name = module["__name__"]
    cdef list found = [module[each] for each in module["__all__"] if each in module]
    for each in found:
        if callable(each):
            name_after(each, name)
    for each in found:
        for base in each.__mro__ if isinstance(each, type) else ():
            name_after(base, "gpumem")
    return module["__all__"].copy


cdef int name_after(object member, str name) except -1:
    if not (getattr(member, "__module__", None) or "").startswith("gpumem.") \
            or "._" not in member.__module__:
        return 0
    try:
        member.__module__ = name
    except TypeError:   # a compiled type
        full = f"{name}.{member.__name__}".encode()
        Py_INCREF(full)     # as long as the type
        gm_name_type(<PyTypeObject*><PyObject*>member, full)
    return 0


@cython.final
cdef class ClassSignature:
    """The ``__signature__`` of a compiled class and of its subclasses: that of ``__init__``.

    Python finds the signature of a compiled method, but not that of a compiled class. As a
    descriptor it reads the subclass's own ``__init__``, compiled or not. The fields of `settings`,
    a class of settings, stand in place of ``**settings``, so that editors complete them.
    """

    cdef object settings

    def __cinit__(self, settings=None):
        self.settings = settings

    def __get__(self, instance, owner):
        import inspect

        if instance is not None:
            raise AttributeError("__signature__ belongs to the class, not to its objects")
        made = inspect.signature(vars(owner).get("__init__") or owner.__init__)
        parameters = [*made.parameters.values()][1:]
        if self.settings is not None:
            parameters[-1:] = [
                each.replace(kind=each.KEYWORD_ONLY, annotation=each.empty)
                for each in inspect.signature(self.settings).parameters.values()
                if not each.name.startswith("_")
            ]
        return made.replace(parameters=parameters)
