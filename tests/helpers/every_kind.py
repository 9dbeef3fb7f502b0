"""One resource of every kind, made anew for each test."""

from __future__ import annotations

import gpumem

from .resources import Plain


def external():
    arena = gpumem.Arena("host")
    held = {}

    def alloc(nbytes):
        buffer = arena.allocate(nbytes)
        held[buffer.ptr] = buffer
        return buffer.ptr

    return gpumem.ExternalAllocator(alloc, lambda ptr: held.pop(ptr).close(), memory="host")


RESOURCES = {
    "arena": lambda: gpumem.Arena("host", {"backing": "regions"}),
    "paged arena": lambda: gpumem.Arena("host", {"backing": "virtual"}),
    "passed through": lambda: gpumem.Arena("host", {"enable": False}),
    "pinned": lambda: gpumem.Arena("host/host_accessible"),
    "pool": lambda: gpumem.DriverPool("host"),
    "external": external,
    "user": lambda: Plain(alignment=1, name="plain", max_nbytes=1 << 20),
    "adaptor": lambda: gpumem.adaptors.limit(gpumem.adaptors.track(gpumem.Arena("host")), 1 << 20),
}
