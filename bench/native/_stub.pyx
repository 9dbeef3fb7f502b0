"""In place of an arena beneath PyTorch: one address for every block."""

from libc.stddef cimport size_t
from libc.stdint cimport uintptr_t

cdef extern from "hooks.h":
    struct TorchCalls:
        int (*allocate)(void* hook, size_t nbytes, void* stream, void** address) noexcept nogil
        int (*release)(void* address) noexcept nogil

cdef void* only_block


cdef int allocate(void* hook, size_t nbytes, void* stream, void** address) noexcept nogil:
    address[0] = only_block
    return 0


cdef int release(void* address) noexcept nogil:
    return 0


cdef class Stub:
    """While it is entered, PyTorch's blocks all have one address, and a free does nothing."""

    cdef TorchCalls* calls
    cdef TorchCalls before

    def __init__(self, uintptr_t table, uintptr_t address):
        global only_block
        only_block = <void*>address
        self.calls = <TorchCalls*>table

    def __enter__(self):
        self.before = self.calls[0]
        self.calls.allocate = allocate
        self.calls.release = release

    def __exit__(self, *error):
        self.calls.allocate = self.before.allocate
        self.calls.release = self.before.release
