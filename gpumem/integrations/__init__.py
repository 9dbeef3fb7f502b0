"""gpumem beneath other libraries: one module for each, which imports its library only when used.

Each has ``enable(resource=None, ...)``, ``disable()``, ``using(resource=None, ...)`` and
``status()``, and they behave alike:

- They hold for the whole process, every thread included, and for what is allocated from then on;
  what was allocated before keeps its memory, and goes back to where it came from.
- `resource` is a `gpumem.MemoryResource` for its own device, several of them, or None: the default
  resource of each device, asked for when the library first wants memory there.
- ``enable`` with what is enabled already does nothing, with something else it replaces that.
  ``disable`` gives the library back what it had before the first ``enable``.
- ``using`` is a context manager. It nests, also within ``enable``, and restores what was there.
- ``status`` returns a `Status`: whether the library uses gpumem's memory, and which resources.
- A library that is missing, too old, or that cannot switch (back) now is an
  `gpumem.errors.IntegrationError` that says why, and nothing is changed.

Two names stand for the two directions, where a library has objects for them:

- ``allocator(resource)`` returns the library's own object over a gpumem resource: an allocator
  function of CuPy, a ``cuda.core.MemoryResource``, a ``rmm.mr.DeviceMemoryResource``. The caller
  passes it to the library.
- ``resource(source)`` returns a `gpumem.MemoryResource` over such an object of the library's
  (cuda.core, RMM).
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from gpumem.integrations._switch import Status

__all__ = ["Status"]

_LIBRARIES = ("cuda_core", "cupy", "jax", "numba", "rmm", "torch")

if not TYPE_CHECKING:  # a checker would take every name for one of the module's

    def __getattr__(name: str) -> ModuleType:
        """Import the module for a library when it is first named."""
        if name in _LIBRARIES:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
