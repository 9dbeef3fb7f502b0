"""GPU libraries in their own words: make, take and write arrays, work on streams of their own."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import pytest

import gpumem

# Else it takes most of the GPU's memory, and the tests beside it have none.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

DTYPES = ("?", "i1", "u1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16")


class OnlyCudaArray:
    """Shows nothing of an array but its CUDA array interface of this moment."""

    def __init__(self, array):
        self._array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__


class Unordered:
    """A DLPack producer that is asked for no order, whatever its consumer wants."""

    def __init__(self, array):
        self._array = array

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, *, stream=None, **options):
        return self._array.__dlpack__(stream=-1, **options)


class Library:
    """What the tests ask of each; `assign` and `take` work on the current stream, see `on`."""

    dtypes = DTYPES
    writes = True  # its arrays may be written
    strides = True
    protocols = ("dlpack", "cuda_array_interface")

    def take(self, tensor, protocol="dlpack"):
        """See a tensor through a protocol."""
        if protocol == "dlpack":
            return self.take_dlpack(tensor)
        return self.take_cuda_array(OnlyCudaArray(tensor))

    def give(self, array, protocol="dlpack"):
        """Let gpumem see an array through a protocol."""
        if protocol == "dlpack":
            return gpumem.from_dlpack(array)
        return gpumem.asarray(OnlyCudaArray(array))

    @staticmethod
    def done(stream):
        """Tell whether a stream's work has finished."""
        return gpumem.Stream.from_handle("cuda:0", stream_handle(stream)).query()


def stream_handle(stream):
    from gpumem._buffer.stream import _native_handle

    return _native_handle(stream)


class Torch(Library):
    # Its __cuda_array_interface__ is of version 2, without a stream, and it reads nobody's.
    ordered = ("dlpack",)

    def __init__(self):
        self.torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def array(self, values, stream=None):
        array = self.torch.as_tensor(values, device="cuda")
        self.torch.cuda.synchronize()
        return array

    def take_dlpack(self, tensor):
        return self.torch.from_dlpack(tensor)

    def take_cuda_array(self, tensor):
        return self.torch.as_tensor(tensor, device="cuda")

    def address(self, array):
        return array.data_ptr()

    def fetch(self, array):
        self.torch.cuda.synchronize()
        return array.cpu().numpy()

    def assign(self, target, source):
        target.copy_(source, non_blocking=True)

    def increase(self, array):
        array.add_(1)

    def stream(self):
        return self.torch.cuda.Stream()

    def on(self, stream):
        return self.torch.cuda.stream(stream)

    def used_bytes(self):
        return self.torch.cuda.memory_allocated()


class CuPy(Library):
    ordered = ("dlpack", "cuda_array_interface")

    def __init__(self):
        self.cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

    def array(self, values, stream=None):
        array = self.cupy.asarray(values)
        self.cupy.cuda.Device().synchronize()
        return array

    def take_dlpack(self, tensor):
        return self.cupy.from_dlpack(tensor)

    def take_cuda_array(self, tensor):
        return self.cupy.asarray(tensor)

    def address(self, array):
        return array.data.ptr

    def fetch(self, array):
        self.cupy.cuda.Device().synchronize()
        return self.cupy.asnumpy(array)

    def assign(self, target, source):
        target[...] = source

    def increase(self, array):
        array += 1

    def stream(self):
        return self.cupy.cuda.Stream(non_blocking=True)

    def on(self, stream):
        return stream

    def used_bytes(self):
        return self.cupy.get_default_memory_pool().used_bytes()


class Numba(Library):
    protocols = ("cuda_array_interface",)
    ordered = ("cuda_array_interface",)

    def __init__(self):
        self.cuda = pytest.importorskip("numba.cuda", reason="Numba's CUDA part is not installed")
        if not self.cuda.is_available():
            pytest.skip("Numba finds no CUDA device that it can use")
        self.current = 0

    def array(self, values, stream=0):
        """An array says, as a producer, that its work is on the stream that it was made for."""
        array = self.cuda.device_array(values.shape, values.dtype, stream=stream)
        array.copy_to_device(np.ascontiguousarray(values))
        self.cuda.synchronize()
        return array

    def take_cuda_array(self, tensor):
        return self.cuda.as_cuda_array(tensor)

    def address(self, array):
        return int(array.__cuda_array_interface__["data"][0])

    def fetch(self, array):
        self.cuda.synchronize()
        return array.copy_to_host()

    def assign(self, target, source):
        target.copy_to_device(source, stream=self.current)

    def stream(self):
        return self.cuda.stream()

    @contextlib.contextmanager
    def on(self, stream):
        self.current = stream
        try:
            yield
        finally:
            self.current = 0


class Jax(Library):
    """Its arrays never change, and its streams are its own."""

    dtypes = ("?", "i1", "u1", "i2", "i4", "f2", "f4", "c8")  # the others only if asked for
    writes = False
    strides = False
    protocols = ("dlpack",)
    ordered = ()

    def __init__(self):
        self.jax = pytest.importorskip("jax", reason="JAX is not installed")
        if self.jax.default_backend() != "gpu":
            pytest.skip("JAX finds no GPU")
        self.increased = self.jax.jit(lambda array: array + 1)

    def array(self, values, stream=None):
        return self.jax.block_until_ready(self.jax.numpy.asarray(values))

    def take_dlpack(self, tensor):
        return self.jax.dlpack.from_dlpack(tensor)

    def address(self, array):
        return array.unsafe_buffer_pointer()

    def fetch(self, array):
        return np.asarray(array)


LIBRARIES = {"torch": Torch, "cupy": CuPy, "numba": Numba, "jax": Jax}
EVERY_WAY = [(name, way) for name, library in LIBRARIES.items() for way in library.protocols]
ORDERED = [(name, way) for name, library in LIBRARIES.items() for way in library.ordered]
