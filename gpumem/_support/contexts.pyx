"""`with` blocks that Python's context keeps; see contexts.pxd."""

from contextlib import ContextDecorator
from contextvars import ContextVar

cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from libc.stdint cimport int32_t, uint64_t

from gpumem._support.atomics cimport count64_add, count_add, count_now, load64
from gpumem._support.interpreter cimport PyGILState_Check
from gpumem._support.process cimport process_is_exiting

from gpumem.errors import GpumemError


cdef extern from "Python.h":
    ctypedef struct PyThreadState:
        uint64_t id
        uint64_t context_ver    # counts the switches of its context
    PyThreadState* PyGILState_GetThisThreadState() noexcept nogil
    int PyContextVar_Get(object variable, PyObject* default, PyObject** value) except -1
    object PyContextVar_Set(object variable, object value)

cdef extern from *:
    """
    /* Of this module alone, as thread-local storage is: the tags that were read last. */
    static __thread struct {
        uint64_t thread, version, dropped;
        const void *tags;
    } gm_known;
    static __thread int gm_foreign_locks;
    """
    ctypedef struct Known:
        uint64_t thread         # id of the thread's state; 0: nothing was read
        uint64_t version        # of its context
        uint64_t dropped        # `dropped_links` then
        const void* tags
    Known gm_known
    int gm_foreign_locks

# The innermost tag or label; None: none.
tags = ContextVar("gpumem_tags", default=None)

cdef object tag_variable = tags
cdef object decorate = ContextDecorator.__call__
cdef int32_t living_links = 0       # 0: no tag is open in any context
cdef uint64_t dropped_links = 0     # so far: one that was read may be among them


# `read_tags`, called where the thread has the interpreter lock already.
cdef const OpenLink* (*read_here)(PyThreadState* thread) noexcept nogil
read_here = <const OpenLink* (*)(PyThreadState*) noexcept nogil>read_tags


cdef const OpenLink* open_tags(bint may_wait) noexcept nogil:
    cdef PyThreadState* thread
    if not count_now(&living_links):
        return NULL
    thread = PyGILState_GetThisThreadState()
    if thread == NULL:
        return NULL
    if PyGILState_Check():
        return read_here(thread)
    if (gm_known.thread == thread.id and gm_known.version == thread.context_ver
            and gm_known.dropped == load64(&dropped_links)):
        return <const OpenLink*>gm_known.tags
    if not may_wait or gm_foreign_locks or process_is_exiting():
        return NULL
    with gil:
        return read_tags(thread)


cdef const OpenLink* read_tags(PyThreadState* thread) noexcept:
    cdef PyObject* value = NULL
    cdef const OpenLink* found = NULL
    gm_known.thread = 0
    PyContextVar_Get(tag_variable, NULL, &value)
    if type(<object>value) is Link:
        found = &(<Link>value).link
    Py_DECREF(<object>value)        # the context has another reference
    gm_known.version = thread.context_ver
    gm_known.dropped = load64(&dropped_links)
    gm_known.tags = found
    gm_known.thread = thread.id
    return found


cdef uint16_t innermost_label(bint may_wait) noexcept nogil:
    cdef const OpenLink* link = open_tags(may_wait)
    while link != NULL and (link.tag.is_over or not link.tag.label):
        link = link.outer
    return 0 if link == NULL else link.tag.label


cdef Opened opened_tag(const void* arena):
    cdef Link link = link_of(tag_variable)
    while link is not None and (link.opened.tag.arena != arena or link.opened.tag.is_over):
        link = link.outer
    return None if link is None else link.opened


cdef void begin_foreign_lock() noexcept nogil:
    global gm_foreign_locks
    gm_foreign_locks += 1


cdef void end_foreign_lock() noexcept nogil:
    global gm_foreign_locks
    gm_foreign_locks -= 1


def opened_values(variable):
    """Return what the open blocks of a variable yield, the innermost first."""
    cdef Link link = variable.get()
    found = []
    while link is not None:
        if not link.opened.tag.is_over:
            found.append(link.opened.value)
        link = link.outer
    return found


cdef class Opened:
    """The object that a block opens."""

    def __init__(self, value=None, label=0):
        self.value = value
        self.tag.label = label


@cython.final
@cython.trashcan(True)
cdef class Link:
    """An open block of a context, and the next outer one."""

    def __cinit__(self, Opened opened not None, outer):
        self.opened, self.outer = opened, outer
        self.link.tag = &opened.tag
        self.link.outer = NULL if self.outer is None else &self.outer.link
        count_add(&living_links, 1)

    def __dealloc__(self):
        count64_add(&dropped_links, 1)
        count_add(&living_links, -1)


@cython.final
@cython.no_gc_clear     # `__dealloc__` needs `opened`
cdef class ContextBlock:
    """A `with` block, or decorator, that belongs to the context it is entered in.

    Its entry and its exit run no Python code, so that Ctrl-C comes before or after them; and an
    exit cannot fail for lack of memory.

    Parameters
    ----------
    variable : ContextVar
        It holds the innermost block, a `Link`.
    opened : Opened
        Of this block alone.
    name : str
        The block, in the texts of errors.
    again : functools.partial
        The call that made it, and that makes another one.
    """

    def __init__(self, variable, Opened opened not None, str name not None, again):
        self.variable, self.opened, self.name, self.again = variable, opened, name, again

    def __dealloc__(self):
        # Its frame ended between an entry and the exit, or a generator is dropped.
        if self.is_entered and not self.is_left:
            self.opened.tag.is_over = True
            self.leave()

    def __enter__(self):
        if self.is_entered:
            raise GpumemError(f"{self.name} was entered before: call "
                              f"{self.again.func.__name__}() for each use")
        link = Link(self.opened, link_of(self.variable))
        self.is_entered = True
        try:
            set_link(self.variable, link)
        except MemoryError:
            # Python may have set the value all the same.
            self.opened.tag.is_over = True
            self.leave()
            raise
        return self.opened.value

    def __exit__(self, *exception):
        if not self.is_entered or self.is_left:
            raise GpumemError(f"{self.name} is not entered")
        if not self.leave():
            raise GpumemError(f"{self.name} was entered by another thread, or in another context, "
                              "which keeps it: leave it there")

    cdef bint leave(self) noexcept:
        # False: this context does not have it.
        try:
            set_link(self.variable, without(link_of(self.variable), self.opened))
        except MemoryError:
            self.opened.tag.is_over = True
        except LookupError:
            return False
        self.is_left = True
        return True

    def __call__(self, function):
        return decorate(self, function)

    def _recreate_cm(self):
        return self.again()


cdef Link link_of(object variable):
    cdef PyObject* value = NULL
    PyContextVar_Get(variable, NULL, &value)
    found = <object>value
    Py_DECREF(found)        # the cast took a reference of its own
    return found


cdef int set_link(object variable, Link link) except -1:
    # Python does not count a new value as a switch.
    gm_known.thread = 0
    PyContextVar_Set(variable, link)
    if variable is tag_variable:
        read_tags(PyGILState_GetThisThreadState())
    return 0


cdef Link without(Link link, Opened opened):
    # Generators may leave blocks in another order than the reverse of that of entering.
    cdef Opened each
    inner = []
    while link is not None and link.opened is not opened:
        inner.append(link.opened)
        link = link.outer
    if link is None:
        raise LookupError
    link = link.outer
    for each in reversed(inner):
        if not each.tag.is_over:
            link = Link(each, link)
    return link
