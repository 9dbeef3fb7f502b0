"""Arenas for C and C++ in the same process: a table of functions, and nothing to link.

The header ``gpumem.h``, in the folder that `gpumem.get_include` returns, describes the functions:
allocate, free, record a stream, statistics, and a text for each status. They may be called on any
thread, with or without the interpreter lock.

Examples
--------
>>> import gpumem
>>> import gpumem.integrations.c
>>> arena = gpumem.Arena("host")
>>> capsule = gpumem.integrations.c.allocator(arena)
>>> gpumem.integrations.c.status().resources == {0: arena}
True

``examples/c_program.c`` is a program that takes the capsule.
"""

from __future__ import annotations

from gpumem._arena.arena import Arena
from gpumem._buffer.resource import MemoryResource
from gpumem._support.arguments import require
from gpumem.integrations._common.switch import Status
from gpumem.integrations.c._calls import arenas, capsule_of

__all__ = ["allocator", "status"]
__dir__ = __all__.copy


def allocator(resource: MemoryResource, *, captures: bool = False) -> object:
    """Return a capsule with the C functions of an arena.

    Parameters
    ----------
    resource : Arena
        Its memory has an alignment of at most 256.
    captures : bool
        Whether C passes streams that capture graphs. Then each allocation queries the driver for
        its stream, and a graph pool, which needs the interpreter, serves it.

    Returns
    -------
    PyCapsule
        Its name is ``"gpumem.arena"``, its pointer a ``gpumem_arena *``; ``gpumem_arena_of`` in
        gpumem.h takes it out. It keeps the arena alive, and the pointer is valid as long as it; C
        that keeps the pointer longer calls ``retain``, and ``release`` in the end.

    Raises
    ------
    TypeError
        `resource` is not an Arena, or `captures` not a bool.
    ConfigError
        Its memory has a larger alignment.
    ClosedError
        It is closed.

    Notes
    -----
    A budget's pressure callbacks run where the budget refuses. Without `captures` a stream that
    captures is refused memory where that is noticed, which it is not while the arena has a free
    block; that block may then be given to others between launches.
    """
    if not isinstance(resource, Arena):
        raise TypeError(f"invalid resource = {resource!r}: expected a gpumem.Arena")
    require("captures", captures, bool, "True or False")
    return capsule_of(resource, "c", captures)


def status() -> Status:
    """Return which arenas C has now, of each device the one that was passed to C last.

    An arena counts as long as its capsule, or a reference that C took.
    """
    held = {each.memory.device.index: each for each in arenas()}
    return Status(bool(held), held)
