"""An arena's functions as CuPy's CFunctionAllocator calls them.

CuPy passes a number of its choice, a size and a device, and no stream: the functions ask CuPy for
the current stream, by the C function that it exports. A failure is a C++ exception, since CuPy
takes a null pointer for a block. So they are C++, compiled at the first use; they include nothing
of CuPy.
"""

from __future__ import annotations

import ctypes
from typing import Any

from gpumem._arena.arena import Arena
from gpumem.integrations._common.compiled import load, over_gpumem_h
from gpumem.integrations.c._calls import address_of, capsule_of

SOURCE = """\
#include <gpumem.h>

#include <new>
#include <stdexcept>
#include <string>

namespace {
struct Given {
    gpumem_arena *arena;
    std::intptr_t (*stream)(int device); /* CuPy's: that of the calling thread */
    int device;
};
class OutOfMemory : public std::bad_alloc {
    const char *what() const noexcept override { return "gpumem: out of memory"; }
};
} // namespace

extern "C" void *gpumem_cupy_malloc(void *param, std::size_t nbytes, int device) {
    Given const &given = *static_cast<Given *>(param);
    if (device != given.device)
        throw std::invalid_argument("gpumem: device " + std::to_string(device) +
                                    " is current in CuPy, and the arena is of device " +
                                    std::to_string(given.device));
    void *stream = reinterpret_cast<void *>(given.stream(device)), *address;
    int status = given.arena->calls->allocate(given.arena, nbytes, 0, stream, &address);
    if (status == GPUMEM_OUT_OF_MEMORY) throw OutOfMemory();
    if (status != GPUMEM_OK)
        throw std::runtime_error(std::string("gpumem: ") + given.arena->calls->text(status));
    return address;
}

extern "C" void gpumem_cupy_free(void *param, void *address, int) noexcept {
    gpumem_arena *arena = static_cast<Given *>(param)->arena;
    arena->calls->deallocate(arena, address);
}
"""


class _Given(ctypes.Structure):
    _fields_ = (
        ("arena", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("device", ctypes.c_int),
    )


class Functions:
    """The arguments of CFunctionAllocator: three addresses, and this object as their owner.

    Parameters
    ----------
    arena : Arena
    stream : int
        Address of ``intptr_t (*)(int device)``, which returns the current stream.

    Attributes
    ----------
    param, malloc, free : int
        Of the arena, for both functions; of the functions.

    Raises
    ------
    RuntimeError, OSError
        They cannot be compiled or loaded.
    ConfigError, ClosedError
        The arena's memory has an alignment above 256, or it is closed.
    """

    def __init__(self, arena: Arena, stream: int) -> None:
        library = load(over_gpumem_h("cupy", SOURCE))
        self._capsule = capsule_of(arena, "cupy", captures=True)
        self._given = _Given(address_of(self._capsule), stream, arena.memory.device.index)
        self.param = ctypes.addressof(self._given)
        self.malloc = _address(library.gpumem_cupy_malloc)
        self.free = _address(library.gpumem_cupy_free)


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
