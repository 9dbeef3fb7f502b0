"""The two modes: a replacement of PyTorch's allocator, and pools below it."""

from __future__ import annotations

import ctypes
import os
from types import ModuleType
from typing import Any, NamedTuple

from gpumem._core import Arena
from gpumem.device import MemoryKind
from gpumem.errors import ConfigError, IntegrationError
from gpumem.integrations._resources import Resources
from gpumem.integrations.torch import _build, _hooks, _sharing
from gpumem.integrations.torch._settings import AllocatorSettings
from gpumem.integrations.torch._statistics import Statistics

__all__ = [
    "Pool",
    "Replacement",
    "Routing",
    "make_pools",
    "replace",
    "why_not_replace",
]

# PyTorch's setter of each hook. gpumem refuses a version without a needed one; without one of the
# others, the feature of that hook is missing.
_SETTERS = {
    "reset": "set_reset_fn",
    "memory_fraction": "set_memory_fraction_fn",
    "base_alloc": "set_base_alloc_fn",
    "record_stream": "set_record_stream_fn",
    "begin_pool": "set_begin_allocate_to_pool",
    "end_pool": "set_end_allocate_to_pool_fn",
    "release_pool": "set_release_pool",
}
_NEEDED = frozenset({"record_stream", "begin_pool", "end_pool", "release_pool"})
_UNUSED = frozenset({"set_init_fn"})  # arenas are made at their first use


# ---- in place of PyTorch's allocator -------------------------------------------------------------


class Replacement(NamedTuple):
    """The allocator that replaces PyTorch's own, until the process ends."""

    why_pluggable: str | None
    """Why it could not be compiled; None: it is `allocator.cpp`."""
    allocator: Any = None
    """PyTorch's object around the hooks, which must outlive every block."""
    hooks: tuple[str, ...] = ()
    """The hooks of the installed PyTorch that are set."""
    unknown: tuple[str, ...] = ()
    """Setters of the installed PyTorch that gpumem does not support."""
    serves_pinned: bool = False
    """Whether PyTorch's pinned memory comes from gpumem too."""


def require_cuda(torch: ModuleType) -> None:
    """Raise `IntegrationError` if PyTorch was built without CUDA."""
    if not hasattr(torch._C, "_cuda_customAllocator"):
        raise _not_from_gpumem("this build of it has no CUDA")


def require_gpu(torch: ModuleType) -> None:
    """Raise `IntegrationError` if PyTorch was built without CUDA, or finds no GPU.

    PyTorch asks NVML: CUDA is not initialised, so that the process can fork children that use it.
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


def replace(
    torch: ModuleType, resources: Resources, pinned: Arena | bool | None = None
) -> Replacement:
    """Replace PyTorch's allocator by gpumem's until the process ends.

    By the one that is compiled for the installed PyTorch; where that is impossible, by hooks of the
    pluggable one. `pinned`: the arena of PyTorch's pinned memory; True: one that is made when some
    is first asked for; False: PyTorch keeps its own; None: True where the allocator is compiled.

    Raises
    ------
    IntegrationError
        PyTorch can no longer switch, or lacks a needed hook, or pinned memory is asked for and
        nothing can be compiled; nothing is changed.
    ConfigError
        A resource is not an arena, or PyTorch's settings of its allocator ask for a memory fraction
        that is none.
    """
    reason = why_not_replace(torch)
    if reason:
        raise IntegrationError(f"PyTorch's allocator cannot be replaced: {reason}")
    arenas = {index: arena_of(resources, index) for index in resources.given}
    AllocatorSettings.check(os.environ)  # before the compilation, which takes long
    try:
        library = _build.load(torch)
    except (OSError, RuntimeError) as error:
        if pinned:
            raise IntegrationError(
                f"PyTorch's pinned memory needs gpumem's compiled allocator: {error}"
            ) from error
        settings = AllocatorSettings.of_environment(os.environ)
        replaced = _plug(torch, str(error))
    else:
        pinned = True if pinned is None else pinned
        settings = AllocatorSettings.of_environment(os.environ, pinned=bool(pinned))
        replaced = Replacement(None, serves_pinned=bool(pinned))
        table, fraction = ctypes.c_void_p(_hooks.table()), ctypes.c_double(settings.fraction)
        if not library.gpumem_torch_install(table, fraction):
            raise IntegrationError("PyTorch's allocator cannot be replaced: it is in use")
        if pinned:
            library.gpumem_torch_install_pinned(table)

    def find(index: int) -> Arena:
        if index == _hooks.PINNED:
            return pinned if isinstance(pinned, Arena) else pinned_arena(torch)
        arena = arena_of(resources, index)
        settings.limit(arena)
        if replaced.why_pluggable:
            _hooks.introduce([*_hooks.arenas().values(), arena])
        else:
            _sharing.prepare(arena.memory.device)
        return arena

    _hooks.set_finder(find)
    for index, arena in arenas.items():
        settings.limit(arena)
        _hooks.serve(index, arena)
    if replaced.why_pluggable:
        # PyTorch does not tell a pluggable allocator which devices access which.
        _hooks.introduce(list(arenas.values()))
    else:
        for arena in arenas.values():
            _sharing.prepare(arena.memory.device)
    return replaced


def require_pinned(pinned: object) -> None:
    """Raise `ConfigError` if it is not an arena of a GPU's pinned memory."""
    if (
        isinstance(pinned, Arena)
        and pinned.memory.device.type == "cuda"
        and pinned.memory.kind is MemoryKind.HOST_ACCESSIBLE
    ):
        return
    raise ConfigError(
        f'invalid pinned = {pinned!r}: expected a bool, or an arena of memory "cuda:N/pinned"'
    )


def pinned_arena(torch: ModuleType) -> Arena:
    """Make an arena of pinned memory for PyTorch, whose regions have the sizes of its blocks."""
    memory = f"cuda:{torch.cuda.current_device()}/pinned"
    return Arena(memory, {"extend_strategy": "same_as_requested"}, name="PyTorch's pinned memory")


# ---- the pluggable allocator, where ours cannot be compiled --------------------------------------


def _plug(torch: ModuleType, reason: str) -> Replacement:
    addresses = _hooks.addresses()
    allocator = torch._C._cuda_customAllocator(addresses["alloc"], addresses["free"])
    hooks = _set_hooks(torch, allocator, addresses)
    try:
        torch.cuda.memory.change_current_allocator(torch.cuda.memory._CUDAAllocator(allocator))
    except RuntimeError as error:
        raise IntegrationError(f"PyTorch's allocator cannot be replaced: {error}") from error
    Statistics(torch).install()
    setters = {name for name in dir(allocator) if name.startswith("set_")}
    unknown = tuple(sorted(setters - {*_SETTERS.values(), *_UNUSED}))
    return Replacement(reason, allocator, hooks, unknown)


def _set_hooks(torch: ModuleType, allocator: Any, addresses: dict[str, int]) -> tuple[str, ...]:
    found = {hook: setter for hook, setter in _SETTERS.items() if hasattr(allocator, setter)}
    missing = sorted(_SETTERS[hook] for hook in _NEEDED - found.keys())
    if missing:
        raise IntegrationError(
            f"PyTorch {torch.__version__} has no {', '.join(missing)}, without which memory could "
            "be reused while streams or graphs use it; PyTorch 2.9 and later have them"
        )
    for hook, setter in found.items():
        getattr(allocator, setter)(addresses[hook])
    return tuple(found)


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
    """A pool of PyTorch whose segments come from an arena."""

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
        # PyTorch's own allocator copies between devices, and tells its pools nothing of it.
        _hooks.introduce([pool.arena for pool in pools.values()])
        if self._captures == 0:
            self._begin()
        self._graph.capture_begin, self._graph.capture_end = (
            self._stepping_aside() if pools else self._own
        )

    def _stepping_aside(self) -> tuple[Any, Any]:
        routing = self
        begin, end = self._own

        def capture_begin(graph: Any, *arguments: Any, **options: Any) -> None:
            routing._step_aside()
            try:
                begin(graph, *arguments, **options)
            except BaseException:
                routing._step_back()
                raise

        def capture_end(graph: Any) -> None:
            try:
                end(graph)
            finally:
                routing._step_back()

        return capture_begin, capture_end

    def _step_aside(self) -> None:
        self._captures += 1
        if self._captures == 1:
            self._end()

    def _step_back(self) -> None:
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


# PyTorch's objects around the segment hooks, kept because blocks may be freed through them later.
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
    _require_pools(torch)
    indices = sorted(resources.given) or [torch.cuda.current_device()]
    arenas = {index: arena_of(resources, index) for index in indices}
    addresses = _hooks.addresses()
    allocator = torch._C._cuda_customAllocator(addresses["alloc_segment"], addresses["free"])
    _kept.append(allocator)
    pools = {}
    for index, arena in arenas.items():
        with torch.cuda.device(index):
            pools[index] = Pool(arena, torch.cuda.MemPool(allocator))
    return pools


def _require_pools(torch: ModuleType) -> None:
    if torch.cuda.get_allocator_backend() != "native":
        raise IntegrationError(
            "PyTorch cannot take a pool's memory from gpumem: its allocator is "
            f"{torch.cuda.get_allocator_backend()!r}, and only 'native' has such pools"
        )
    needed = ("_cuda_beginAllocateToPool", "_cuda_endAllocateToPool", "_cuda_releasePool")
    missing = [name for name in needed if not hasattr(torch._C, name)]
    if missing or not hasattr(torch.cuda, "MemPool"):
        raise IntegrationError(
            f"PyTorch {torch.__version__} cannot take a pool's memory from gpumem: it has no "
            f"{', '.join(missing) or 'torch.cuda.MemPool'}; PyTorch 2.9 and later have it"
        )
