"""One resource of every kind, made anew for each test."""

from __future__ import annotations

import ctypes

import gpumem


def user_resource():
    class Plain(gpumem.MemoryResource):
        def __init__(self):
            super().__init__(gpumem.MemoryInfo("host", alignment=1), name="plain")
            self.blocks = {}

        def allocate_raw(self, nbytes, stream):
            if nbytes > 1 << 20:
                raise MemoryError("too much")
            block = ctypes.create_string_buffer(nbytes)
            self.blocks[ctypes.addressof(block)] = block
            return ctypes.addressof(block)

        def deallocate_raw(self, ptr, nbytes, stream):
            del self.blocks[ptr]

    return Plain()


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
    "user": user_resource,
    "adaptor": lambda: gpumem.adaptors.limit(gpumem.adaptors.track(gpumem.Arena("host")), 1 << 20),
}
