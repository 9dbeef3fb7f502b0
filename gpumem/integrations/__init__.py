"""gpumem beneath other libraries: one module for each, which imports its library only when used.

Each has ``status()``, and where the memory of the library can be switched
``enable(resource=None, ...)``, ``disable()`` and ``using(resource=None, ...)``. They behave alike:

- They apply to the whole process, every thread included, and to later allocations. Earlier
  allocations keep their memory, which is freed where it was allocated.
- `resource` is a `gpumem.MemoryResource` for its own device, several of them, or None. None means
  the default resource of each device, which is made at the first allocation on that device.
- ``enable`` with the same arguments as before does nothing; with others it replaces the setting.
  ``disable`` restores what the library used before the first ``enable``.
- ``using`` is a context manager. It can be nested, also within ``enable``, and restores the setting
  before it.
- ``status`` returns a `Status`: whether the library uses gpumem's memory, and which resources.
- They raise `gpumem.errors.IntegrationError`, with the reason, if the library is missing, is too
  old or cannot switch now; then nothing is changed.

Two names stand for the two directions, where a library has objects for them:

- ``allocator(resource)`` returns the library's own object over a gpumem resource: an allocator
  function of CuPy, a ``cuda.core.MemoryResource``, a ``rmm.mr.DeviceMemoryResource``, a capsule for
  C, an object with options for ONNX Runtime's sessions. The caller passes it to the library.
- ``resource(source)`` returns a `gpumem.MemoryResource` over such an object of the library's
  (cuda.core, RMM).

`nccl` has none of these but ``status``, since NCCL allocates no memory for users: it registers
gpumem's memory with NCCL. Nor has `memory_saver`, which has torch_memory_saver's names over gpumem
beneath PyTorch; `c` and `onnxruntime`, which have an ``allocator`` for each program in C and for
each session; or `dask`, which has a ``plugin`` that sets workers up.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from gpumem._support.signatures import published
from gpumem.integrations._common.switch import Status

__all__ = ["Status"]

_LIBRARIES = (
    "c",
    "cuda_core",
    "cupy",
    "dask",
    "jax",
    "memory_saver",
    "nccl",
    "numba",
    "onnxruntime",
    "rmm",
    "torch",
)

published(globals())

if not TYPE_CHECKING:  # else a type checker would accept every name of the module

    def __getattr__(name: str) -> ModuleType:
        """Import the module for a library when its name is first used."""
        if name in _LIBRARIES:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return [*__all__, *_LIBRARIES]
