"""Resources written in Python, as users write them; the end of an arena."""

from __future__ import annotations

import ctypes
import time

import gpumem


class Plain(gpumem.MemoryResource):
    """Blocks of the C library's; remembers every call."""

    def __init__(self, memory="host", *, alignment=256, max_nbytes=1 << 62, **more):
        info = gpumem.MemoryInfo.parse(memory)
        super().__init__(gpumem.MemoryInfo(info.device, info.kind, alignment=alignment), **more)
        self.max_nbytes = max_nbytes
        self.blocks = {}
        self.taken = []
        self.returned = []

    def allocate_raw(self, nbytes, stream):
        if nbytes > self.max_nbytes:
            raise MemoryError("too much")
        block = ctypes.create_string_buffer(nbytes + self.memory.alignment)
        address = -(-ctypes.addressof(block) // self.memory.alignment) * self.memory.alignment
        self.blocks[address] = block
        self.taken.append((address, nbytes, stream))
        return address

    def deallocate_raw(self, ptr, nbytes, stream):
        del self.blocks[ptr]
        self.returned.append((ptr, nbytes, stream))


class Over(gpumem.MemoryResource):
    """Blocks of another resource, freed in the order of the given stream."""

    def __init__(self, resource):
        super().__init__(resource.memory)
        self.resource, self.blocks = resource, {}

    def allocate_raw(self, nbytes, stream):
        block = self.resource.allocate(nbytes, stream)
        self.blocks[block.ptr] = block
        return block.ptr

    def deallocate_raw(self, ptr, nbytes, stream):
        self.blocks.pop(ptr).close(stream)


class Answers(Plain):
    """Gives what it is told to, an exception included."""

    def __init__(self, answer=None, refusal=None):
        super().__init__()
        self.answer = answer
        self.refusal = refusal

    def allocate_raw(self, nbytes, stream):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return super().allocate_raw(nbytes, stream) if self.answer is Plain else self.answer

    def deallocate_raw(self, ptr, nbytes, stream):
        if self.refusal is not None:
            raise self.refusal
        if ptr in self.blocks:
            super().deallocate_raw(ptr, nbytes, stream)
        else:
            self.returned.append((ptr, nbytes, stream))


def close_when_unused(arena: gpumem.Arena, patience_s: float = 60) -> None:
    """Close an arena once the threads that end copies and graphs have let go of its blocks."""
    end = time.monotonic() + patience_s
    while not arena.closed:
        try:
            arena.close()
        except gpumem.errors.InUseError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)
