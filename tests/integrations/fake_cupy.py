"""As much of CuPy as an allocator meets, in Python: no driver, one device, any number of streams.

Written from CuPy's documentation of its allocators; tests/gpu has the real one.
"""

import threading
import types


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        self.status = status
        super().__init__(f"status {status}")

    def __reduce__(self):
        return type(self), (self.status,)


class OutOfMemoryError(MemoryError):
    def __init__(self, size, total, limit=0):
        self._size, self._total, self._limit = size, total, limit
        super().__init__(f"Out of memory allocating {size} bytes")


class UnownedMemory:
    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr, self.size, self._owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id


class PinnedMemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr = mem, mem.ptr + offset


class NullStream:
    ptr = 0


def own_allocator(nbytes):
    return ("CuPy's own", nbytes)


def own_pinned(nbytes):
    return ("CuPy's own pinned", nbytes)


def make():
    """Return {name: module} for sys.modules."""
    cupy, cuda, runtime, memory, device = (
        types.ModuleType(name)
        for name in (
            "cupy",
            "cupy.cuda",
            "cupy.cuda.runtime",
            "cupy.cuda.memory",
            "cupy.cuda.device",
        )
    )
    cupy.__version__ = "14.2.0"
    cupy.cuda = cuda
    cupy.get_default_pinned_memory_pool = lambda: types.SimpleNamespace(malloc=own_pinned)
    cuda.runtime, cuda.memory, cuda.device = runtime, memory, device
    runtime.CUDARuntimeError, runtime.is_hip = CUDARuntimeError, False
    memory.OutOfMemoryError = OutOfMemoryError
    device.get_device_id = lambda: 0
    cuda.UnownedMemory, cuda.MemoryPointer = UnownedMemory, MemoryPointer
    cuda.PinnedMemoryPointer = PinnedMemoryPointer
    cuda.stream = NullStream()
    cuda.get_current_stream = lambda device_id=-1: cuda.stream
    cuda.current = own_allocator
    cuda.pinned = own_pinned
    cuda.local = threading.local()

    def set_allocator(allocator):
        if getattr(cuda.local, "allocator", None) is not None:
            raise ValueError("inside using_allocator")
        cuda.current = allocator

    def get_allocator():
        return getattr(cuda.local, "allocator", None) or cuda.current

    def set_pinned_memory_allocator(allocator):
        cuda.pinned = allocator

    cuda.set_allocator, cuda.get_allocator = set_allocator, get_allocator
    cuda.set_pinned_memory_allocator = set_pinned_memory_allocator
    cuda.alloc = lambda nbytes: get_allocator()(nbytes)
    modules = [cupy, cuda, runtime, memory, device]
    return {module.__name__: module for module in modules} | {"cupy_backends": None}
