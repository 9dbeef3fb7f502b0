"""The C functions of CuPy's CFunctionAllocator, called as it calls them; it needs no CuPy."""

import ctypes
import gc
import weakref

import pytest
from helpers.driver import HostDriver
from helpers.marks import NEEDS_CXX

import gpumem
from gpumem.integrations._common import compiled
from gpumem.integrations.cupy._functions import Functions

pytestmark = NEEDS_CXX

CALLER = """\
#include <cstdio>
#include <exception>
#include <new>
/* As CuPy: a C++ exception becomes an error in Python. 1: memory is out, 2: another one. */
extern "C" int call_malloc(void *(*malloc)(void *, size_t, int), void *param, size_t nbytes,
                           int device, void **block, char *said) {
    try {
        *block = malloc(param, nbytes, device);
        return 0;
    } catch (std::bad_alloc const &error) {
        std::snprintf(said, 256, "%s", error.what());
        return 1;
    } catch (std::exception const &error) {
        std::snprintf(said, 256, "%s", error.what());
        return 2;
    }
}
"""


class Caller:
    """CFunctionAllocator over an arena, with a stream that tests choose."""

    def __init__(self, arena, folder):
        self.current = gpumem.Stream("host")
        # CuPy's function for the current stream.
        self._stream = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int)(
            lambda device: self.current.ptr
        )
        address = ctypes.cast(self._stream, ctypes.c_void_p).value
        self.functions = Functions(arena, address)
        self.library = compiled.load(compiled.Recipe("caller", CALLER))

    def malloc(self, nbytes, device=0):
        block, said = ctypes.c_void_p(), ctypes.create_string_buffer(256)
        failed = self.library.call_malloc(
            ctypes.c_void_p(self.functions.malloc),
            ctypes.c_void_p(self.functions.param),
            ctypes.c_size_t(nbytes),
            device,
            ctypes.byref(block),
            said,
        )
        if failed:
            raise (MemoryError if failed == 1 else RuntimeError)(said.value.decode())
        return block.value

    def free(self, address):
        free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        free(self.functions.free)(self.functions.param, address, 0)


@pytest.fixture
def arena():
    return gpumem.Arena("host", oom_wait_ms=0)


@pytest.fixture
def caller(arena, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Caller(arena, tmp_path)


def test_block_is_the_arenas_for_cupys_current_stream(caller, arena):
    first, second = caller.current, gpumem.Stream("host")
    address = caller.malloc(1000)
    assert arena.stats().requested_in_use == 1000
    with HostDriver().block(first):
        caller.free(address)
        caller.current = second
        assert caller.malloc(1000) != address
        caller.current = first
        assert caller.malloc(1000) == address


def test_failures_are_exceptions_that_cupy_raises(caller, arena):
    arena.set_limit(4 << 20)
    with pytest.raises(MemoryError, match="gpumem: out of memory"):
        caller.malloc(8 << 20)
    with pytest.raises(RuntimeError, match=r"device 1 is current in CuPy, .* of device 0"):
        caller.malloc(1000, device=1)
    arena.close()
    with pytest.raises(RuntimeError, match="gpumem: the arena is closed"):
        caller.malloc(1000)


def test_functions_keep_the_arena_alive():
    arena = gpumem.Arena("host")
    functions, alive = Functions(arena, 0), weakref.ref(arena)
    del arena
    gc.collect()
    assert alive() is not None
    del functions
    gc.collect()
    assert alive() is None
