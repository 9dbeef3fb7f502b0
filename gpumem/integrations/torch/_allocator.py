"""The two modes: a replacement of PyTorch's allocator, and pools below it."""

from __future__ import annotations

import ctypes
import os
from types import ModuleType
from typing import Any, NamedTuple

from gpumem._arena.arena import Arena
from gpumem._buffer.holders import BLOCKS
from gpumem.errors import ConfigError, IntegrationError
from gpumem.integrations._common.resources import Resources
from gpumem.integrations.torch import _build, _hooks, _pinned, _rebuild, _sharing
from gpumem.integrations.torch._settings import AllocatorSettings

# ---- in place of PyTorch's allocator -------------------------------------------------------------


def require_cuda(torch: ModuleType) -> None:
    """Raise `IntegrationError` if PyTorch was built without CUDA."""
    if not hasattr(torch._C, "_cuda_customAllocator"):
        raise _not_from_gpumem("this build of it has no CUDA")


def require_gpu(torch: ModuleType) -> None:
    """Raise `IntegrationError` if PyTorch was built without CUDA, or finds no GPU.

    PyTorch queries NVML and does not initialise CUDA: the process can fork children that use it.
    """
    require_cuda(torch)
    if torch.cuda.device_count() == 0:
        raise _not_from_gpumem("it finds no GPU")


def _not_from_gpumem(why: str) -> IntegrationError:
    return IntegrationError(
        f"PyTorch cannot allocate from gpumem: {why}. Without a GPU, put single tensors into an "
        'arena: torch.from_dlpack(gpumem.zeros(shape, "float32", resource=arena))'
    )


def why_not_replace(torch: ModuleType) -> str | None:
    """Return why PyTorch's allocator cannot be replaced now; None if it can."""
    if not hasattr(torch._C, "_cuda_customAllocator"):
        return "this PyTorch was built without CUDA"
    backend = torch.cuda.get_allocator_backend()
    if backend in ("pluggable", "gpumem"):
        return f"another allocator, {backend!r}, has already replaced it"
    if torch.cuda.is_initialized():
        return "it has initialised CUDA: enable gpumem before the first tensor on a GPU"
    return None


def replace(torch: ModuleType, resources: Resources, pinned: Arena | bool) -> None:
    """Replace PyTorch's allocator until the process ends.

    `pinned` is the arena of PyTorch's pinned memory. With True an arena is made when PyTorch first
    requests pinned memory; with False PyTorch keeps its own.

    Raises
    ------
    IntegrationError
        PyTorch can no longer switch, or gpumem's allocator cannot be compiled; nothing is changed.
    ConfigError
        A resource is not an arena, or PyTorch's settings of its allocator have a memory fraction
        that is not a number from 0 to 1.
    """
    reason = why_not_replace(torch)
    if reason:
        raise IntegrationError(f"PyTorch's allocator cannot be replaced: {reason}")
    arenas = {index: arena_of(resources, index) for index in resources.given}
    # Before the compilation, which takes long.
    settings = AllocatorSettings.of_environment(os.environ, pinned=bool(pinned))
    reason = _build.why_not_compiled(torch)
    if reason:
        raise IntegrationError(f'{reason}; mode="pool" needs no compiler')
    library = _build.load(torch)
    table, fraction = ctypes.c_void_p(_hooks.table()), ctypes.c_double(settings.fraction)
    if not library.gpumem_torch_install(table, fraction):
        raise IntegrationError("PyTorch's allocator cannot be replaced: it is in use")
    _rebuild.send_to_any_process()
    BLOCKS[torch.Tensor] = block_of_tensor
    if pinned and not (pinned is True and _pinned.installed):
        _pinned.install(torch, pinned if isinstance(pinned, Arena) else None)

    def prepared(arena: Arena) -> Arena:
        settings.limit(arena)
        _sharing.prepare(arena.memory.device)
        return arena

    _hooks.set_finder(lambda index: prepared(arena_of(resources, index)))
    for index, arena in arenas.items():
        _hooks.serve(index, prepared(arena))


def block_of_tensor(tensor: Any) -> tuple[int, int]:
    """Return address and bytes of a tensor's memory on a GPU; address 0: it has none there."""
    try:
        if tensor.is_cuda:
            storage = tensor.untyped_storage()
            return storage.data_ptr(), storage.nbytes()
    except RuntimeError:
        pass  # a subclass without storage
    return 0, 0


def arena_of(resources: Resources, index: int) -> Arena:
    """Return the arena of a device; it allocates without the interpreter lock."""
    resource = resources.of(index)
    if not isinstance(resource, Arena):
        raise ConfigError(
            f"invalid resource = {resource!r} for cuda:{index}: PyTorch allocates without "
            "the interpreter lock; expected a gpumem.Arena"
        )
    return resource


# ---- beneath PyTorch's allocator -----------------------------------------------------------------


class Pool(NamedTuple):
    """A pool of PyTorch with segments from an arena."""

    arena: Arena
    memory: Any
    """The ``torch.cuda.MemPool``; its end frees the segments that hold no tensor."""


class Routing:
    """The pools from which PyTorch's own allocator allocates; none at first.

    It applies to every thread. Graph captures suspend it: their allocations belong to the graph and
    come from the pools that PyTorch makes for it.
    """

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._graph = torch.cuda.graphs.CUDAGraph
        self._own = (self._graph.capture_begin, self._graph.capture_end)
        self._captures = 0
        self.pools: dict[int, Pool] = {}

    def switch(self, pools: dict[int, Pool]) -> None:
        """Use other pools from now on; without one PyTorch takes memory from the driver."""
        if self._captures == 0:
            self._end()
        self.pools = pools
        for index, pool in pools.items():
            _hooks.serve(index, pool.arena)
        # PyTorch's own allocator copies between devices, and does not notify its pools.
        _hooks.introduce([pool.arena for pool in pools.values()])
        if self._captures == 0:
            self._begin()
        self._graph.capture_begin, self._graph.capture_end = (
            self._suspended_by_captures() if pools else self._own
        )

    def _suspended_by_captures(self) -> tuple[Any, Any]:
        routing = self
        begin, end = self._own

        def capture_begin(graph: Any, *arguments: Any, **options: Any) -> None:
            routing._captures += 1
            if routing._captures == 1:
                routing._end()
            try:
                begin(graph, *arguments, **options)
            except BaseException:
                routing._resume()
                raise

        def capture_end(graph: Any) -> None:
            try:
                end(graph)
            finally:
                routing._resume()

        return capture_begin, capture_end

    def _resume(self) -> None:
        self._captures -= 1
        if self._captures == 0:
            self._begin()

    def _begin(self) -> None:
        for index, pool in self.pools.items():
            self._torch._C._cuda_beginAllocateToPool(index, pool.memory.id)

    def _end(self) -> None:
        for index, pool in self.pools.items():
            self._torch._C._cuda_endAllocateToPool(index, pool.memory.id)
            self._torch._C._cuda_releasePool(index, pool.memory.id)


# PyTorch's objects around those functions are kept: segments may be freed through them later.
_kept: list[Any] = []


def make_pools(torch: ModuleType, resources: Resources) -> dict[int, Pool]:
    """Make the pools from which PyTorch's allocator takes its segments.

    They are for the devices of the given resources; without any, for PyTorch's current device.

    Raises
    ------
    IntegrationError
        PyTorch was built without CUDA, or lacks a needed function.
    ConfigError
        A resource is not an arena.
    """
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise IntegrationError(
            "PyTorch cannot take a pool's memory from gpumem: its allocator is "
            f"{backend!r}, and only 'native' has such pools"
        )
    indices = sorted(resources.given) or [torch.cuda.current_device()]
    arenas = {index: arena_of(resources, index) for index in indices}
    allocator = torch._C._cuda_customAllocator(*_hooks.segment_functions())
    _kept.append(allocator)
    pools = {}
    for index, arena in arenas.items():
        with torch.cuda.device(index):
            pools[index] = Pool(arena, torch.cuda.MemPool(allocator))
    return pools
