"""The registry of default resources, one per memory, and what `using_resource` puts before it."""

import os
from contextlib import contextmanager
from contextvars import ContextVar

from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF

from gpumem._buffer cimport MemoryResource
from gpumem._core cimport Arena

from gpumem.device import default_device, MemoryInfo


cdef extern from "Python.h":
    int PyContextVar_Get(object variable, PyObject* default, PyObject** value) except -1

cdef enum:
    MOST_ANSWERS = 256

# In this context: the resources of the using_resource blocks that are open, the innermost last.
cdef tuple nothing_used = ()
_using = ContextVar("gpumem_using_resource", default=nothing_used)

# (device, kind) -> resource; which of them are arenas that nobody asked for; and the answers to
# what callers wrote for a memory, None included.
cdef dict registered = {}
cdef set made_here = set()
cdef dict answers = {}

# The answer given last, found by identity: most callers write the same memory each time.
cdef object last_asked = None
cdef MemoryResource last_answer = None


cdef MemoryResource serving(object memory):
    """Return the resource that serves a memory now; None is the default device's."""
    cdef PyObject* value = NULL
    PyContextVar_Get(_using, NULL, &value)
    used = <object>value
    Py_DECREF(used)         # the cast took a reference of its own
    if used is not nothing_used:
        found = _used_for(used, memory)
        if found is not None:
            return <MemoryResource>found
    if memory is last_asked and last_answer is not None:
        return last_answer
    return look_up(memory)


cdef MemoryResource look_up(object memory):
    global last_asked, last_answer
    try:
        found = answers.get(memory)
    except TypeError:       # not hashable: no memory either, which parsing says
        found = None
    if found is None:
        found = _registered_for(memory)
        if len(answers) >= MOST_ANSWERS:
            answers.clear()
        answers[memory] = found
    last_asked, last_answer = memory, found
    return last_answer


cdef void forget_answers():
    global last_asked, last_answer
    answers.clear()
    last_asked, last_answer = None, None


def _used_for(used, memory):
    if memory is None:
        return used[len(used) - 1]      # this file is compiled without wraparound
    key = _key_of(memory)
    return next((each for each in reversed(used) if _key_of(each.memory) == key), None)


def _registered_for(memory):
    key = _key_of(default_device() if memory is None else memory)
    found = registered.get(key)
    if found is not None:
        return found
    made = Arena(MemoryInfo(*key))
    if registered.setdefault(key, made) is made:    # else another thread was faster
        made_here.add(key)
    return registered[key]


def _key_of(memory):
    # Alignment and name play no part.
    info = MemoryInfo.parse(memory)
    return info.device, info.kind


def get_default_resource(memory=None):
    """Return the resource that serves allocations on `memory` that name none.

    That of the innermost `using_resource` for this memory; else what `set_default_resource`
    registered; else an `Arena` with default settings, made at the first use and kept.

    Parameters
    ----------
    memory : MemoryInfo, Device or str, optional
        None is the memory of `default_device`, or of the innermost `using_resource`.

    Returns
    -------
    MemoryResource

    Raises
    ------
    ValueError, TypeError
        `memory` names none, or none that is here.

    Examples
    --------
    >>> import gpumem
    >>> gpumem.get_default_resource("host") is gpumem.get_default_resource("host:0")
    True
    """
    return serving(memory)


def set_default_resource(memory, resource):
    """Let a resource serve what names none on a memory, in every thread and from now on.

    Buffers that another resource handed out stay its own.

    Parameters
    ----------
    memory : MemoryInfo, Device or str
        The memory served; its alignment and name play no part.
    resource : MemoryResource or None
        Of that memory. None: an `Arena` of gpumem's own again, made at the next use.

    Raises
    ------
    ValueError
        The resource is of another memory.
    TypeError
        It is not a resource.

    Examples
    --------
    >>> import gpumem
    >>> gpumem.set_default_resource("host", gpumem.Arena("host", {"max_mem": 1 << 30}))
    >>> gpumem.set_default_resource("host", None)
    """
    key = _key_of(memory)
    if resource is not None:
        _require_resource(resource)
        if _key_of(resource.memory) != key:
            raise ValueError(f"{resource!r} is on {resource.memory}: it cannot serve "
                             f"{MemoryInfo(*key)}")
    made_here.discard(key)
    if resource is None:
        registered.pop(key, None)
    else:
        registered[key] = resource
    forget_answers()


@contextmanager
def using_resource(resource):
    """Let a resource serve what names none on its memory, inside a ``with`` block.

    Holds for the context of this thread or asynchronous task alone. The innermost block of a
    memory counts; where no memory is named either, the innermost block of all.

    Parameters
    ----------
    resource : MemoryResource

    Raises
    ------
    TypeError
        It is not a resource.

    Examples
    --------
    >>> import gpumem
    >>> with gpumem.using_resource(gpumem.Arena("host")) as arena:
    ...     gpumem.empty(10, "float32").buffer.resource is arena
    True
    """
    _require_resource(resource)
    token = _using.set((*_using.get(), resource))
    try:
        yield resource
    finally:
        _using.reset(token)


def _require_resource(resource):
    if not isinstance(resource, MemoryResource):
        raise TypeError(f"{resource!r} is not a MemoryResource")


def _forget_the_parents():
    # Arenas are dead in a fork's child. What was made here is made anew; what somebody
    # registered stays, and says that it belongs to the parent.
    for key in made_here:
        registered.pop(key, None)
    made_here.clear()
    forget_answers()


os.register_at_fork(after_in_child=_forget_the_parents)
