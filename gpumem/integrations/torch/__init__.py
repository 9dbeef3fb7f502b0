"""PyTorch on gpumem's memory.

There are two modes; ``mode="auto"`` selects the first that is possible:

``"full"``
    gpumem replaces PyTorch's caching allocator, by one that is compiled for the installed PyTorch:
    at its first use, which takes half a minute, or before by ``python -m gpumem.integrations.torch
    build``. Every block comes from the arena, with pages that move, reuse across streams, `shrink`
    and budgets. It needs a C++ compiler and CUDA's headers, unless a build from elsewhere lies in
    the user's cache folder. It is possible only before PyTorch has initialised CUDA, and for the
    rest of the process: PyTorch cannot switch back.
``"pool"``
    PyTorch's caching allocator stays and allocates its segments, of 2 MiB, 20 MiB and more, from
    the arena, through a ``torch.cuda.MemPool``. Statistics, snapshots and errors stay PyTorch's. It
    rounds, caches and fragments inside the segments as before, and frees no segment before it is
    disabled. Can be disabled at any time, and needs no compiler.

Under ``"full"``:

- ``record_stream`` is honoured, ``empty_cache`` waits for queued work and then calls the arenas'
  `shrink`, ``set_per_process_memory_fraction`` bounds them, CUDA graphs capture into graph pools.
- Out of memory raises ``torch.OutOfMemoryError``. The text is PyTorch's own ("CUDA out of memory.
  Tried to allocate ..."), for which programs search, and the arena's report.
- ``memory_stats``, ``memory_summary``, memory history, snapshots, ``torch.cuda.MemPool`` and the
  pools of ``torch.compile(mode="reduce-overhead")`` work as with PyTorch's allocator. Under
  ``small_pool`` are the blocks that an arena keeps in its range for small ones. A MemPool takes its
  memory next to the arena, under the same limit, or from an allocator of its own.
- Copies between GPUs and kernels that read another GPU's memory work as with PyTorch's allocator:
  an arena gives a GPU access to its memory once PyTorch requests it (see `ArenaConfig.peers`; with
  "none" PyTorch's copies to that arena raise RuntimeError).

- PyTorch's pinned memory, of ``tensor.pin_memory()`` and of a DataLoader, comes from an arena too,
  unless ``enable(pinned=False)`` leaves it to PyTorch.

A process should capture graphs with ``torch.cuda.graph`` or similar functions, which name the pool
of a capture.

Examples
--------
>>> from gpumem.integrations import torch as gpumem_torch
>>> gpumem_torch.status().mode is None      # PyTorch has its own memory
True
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import ModuleType

from gpumem import integrations
from gpumem._arena.arena import Arena
from gpumem._support.signatures import published
from gpumem._support.sizes import is_share, share_of, whole_bytes
from gpumem.device import Device
from gpumem.errors import ConfigError, ConfigWarning
from gpumem.integrations._common.resources import ResourceLike, Resources
from gpumem.integrations._common.switch import Framework, Setting, Switch, Using
from gpumem.integrations._common.versions import import_framework
from gpumem.integrations.torch import _allocator, _build, _hooks, _phases, _pinned
from gpumem.integrations.torch._allocator import Pool, Routing, make_pools
from gpumem.integrations.torch._offload import Offload, context
from gpumem.integrations.torch._offload.mover import Mover
from gpumem.integrations.torch._offload.report import Moves, OffloadReport

__all__ = [
    "Moves",
    "Offload",
    "OffloadReport",
    "TorchStatus",
    "disable",
    "enable",
    "enable_pinned",
    "offload",
    "record_phases",
    "status",
    "using",
]
__dir__ = published(globals())

MODES = ("auto", "full", "pool")


@dataclass(frozen=True)
class TorchStatus(integrations.Status):
    """Which memory PyTorch uses now, and how.

    Attributes
    ----------
    enabled, resources
        As of `gpumem.integrations.Status`.
    mode : {"full", "pool"} or None
        None: PyTorch uses its own allocator.
    pinned : Arena or None
        The arena of PyTorch's pinned memory; None: PyTorch has its own, or has requested none yet.
    """

    mode: str | None
    pinned: Arena | None


class Torch(Framework):
    """Switches PyTorch, in either mode."""

    name = "PyTorch"

    def __init__(self) -> None:
        self.is_replaced = False
        self.serves_pinned = False
        self.routing: Routing | None = None

    def attach(self, setting: Setting) -> dict[int, Pool]:
        torch = import_torch()
        _allocator.require_gpu(torch)
        if setting.option("mode") == "full":
            pinned = setting.option("pinned")
            pinned = True if pinned is None else pinned
            _allocator.replace(torch, setting.resources, pinned)
            self.is_replaced, self.serves_pinned = True, bool(pinned)
            return {}
        if self.routing is None:
            self.routing = Routing(torch)
        pools = make_pools(torch, setting.resources)
        before = self.routing.pools
        self.routing.switch(pools)
        return before

    def restore(self, before: dict[int, Pool]) -> None:
        if self.routing is not None:
            self.routing.switch(before)

    def why_not_restorable(self) -> str | None:
        if not self.is_replaced:
            return None
        return "its allocator was replaced for good: PyTorch cannot switch back"

    def mode(self, requested: str) -> str:
        """Return "full" or "pool" for a requested mode."""
        if requested not in MODES:
            raise ConfigError(f"invalid mode = {requested!r}: expected {', '.join(MODES)}")
        # Imported before the decision: under `gpumem run` the import enables gpumem.
        torch = import_torch()
        if requested != "auto":
            return requested
        if self.is_replaced:
            return "full"
        if _allocator.why_not_replace(torch):
            return "pool"
        reason = torch.cuda.device_count() and _build.why_not_compiled(torch)
        if reason:
            warnings.warn(
                f'PyTorch is switched by mode="pool": {reason}', ConfigWarning, stacklevel=4
            )
        return "pool" if reason else "full"


_torch = Torch()
_switch = Switch(_torch)


def import_torch() -> ModuleType:
    """Import PyTorch, or raise if it is missing or too old."""
    return import_framework("PyTorch", "torch", "2.11", install="pip install 'torch>=2.11'")


def enable(
    resource: ResourceLike = None, *, mode: str = "auto", pinned: Arena | bool | None = None
) -> None:
    """Let PyTorch allocate its GPU memory from gpumem, in the whole process.

    Parameters
    ----------
    resource : Arena, iterable or mapping of them, optional
        The arena of each device. None means the default resource of each device, or with
        ``mode="pool"`` of PyTorch's current device only; where PyTorch's allocator is replaced
        already, by `gpumem run` or an earlier call, it means the arenas that serve it.
    mode : {"auto", "full", "pool"}
        Replace PyTorch's allocator, or serve it; see the module's description. "auto" is "full"
        until PyTorch has initialised CUDA. Where gpumem's allocator cannot be compiled, it is
        "pool", and a `ConfigWarning` says why.
    pinned : Arena or bool, optional
        Under "full", where PyTorch's pinned memory comes from: an arena of pinned memory; with True
        the default resource of the current device's pinned memory, from the first use on, or the
        choice of an earlier `enable_pinned`; with False PyTorch's own. None means the choice of an
        earlier call, else True.

    Raises
    ------
    MissingFrameworkError
        PyTorch is not installed.
    IntegrationError
        PyTorch is older than 2.11, was built without CUDA, or cannot switch now; or gpumem's
        allocator cannot be compiled and `mode` is "full". Nothing is changed.
    ConfigError
        `mode` is invalid, a resource is not an arena on a GPU, or `pinned` is not an arena of a
        GPU's pinned memory, or is wanted under "pool".
    """
    _switch.enable(_setting(resource, mode, pinned))


def disable() -> None:
    """Let PyTorch use its own memory again; its tensors stay valid.

    Raises
    ------
    IntegrationError
        Under ``mode="full"``: PyTorch cannot switch back.
    """
    _switch.disable()


def enable_pinned(
    resource: Arena | None = None, *, limit: int | str | None = None, beyond: str = "error"
) -> None:
    """Let PyTorch allocate pinned memory from gpumem, and leave its GPU memory as it is.

    That is the memory of ``tensor.pin_memory()``, ``pin_memory=True`` and a DataLoader that pins.
    It can be called at any time; tensors that were pinned before keep their memory. PyTorch cannot
    switch back. A further call changes the arena, the limit and `beyond`.

    Parameters
    ----------
    resource : Arena, optional
        An arena of memory ``"cuda:N/pinned"``. None means the one in use; at first the default
        resource of the current device's pinned memory, which CuPy and Numba use, too.
    limit : int or str, optional
        Bytes that the arena may hold, such as ``"16GiB"``, at least 1, or a share of the host's
        memory, ``"25%"``; as `Arena.set_limit`. None leaves the arena's limit. The memory that the
        machine and the process's control groups have left is a limit in any case.
    beyond : {"error", "unpinned"}
        A request that is refused raises ``torch.OutOfMemoryError``, or gets memory that is not
        pinned: then copies of it are slower, and wait.

    Raises
    ------
    MissingFrameworkError
        PyTorch is not installed.
    IntegrationError
        PyTorch is older than 2.11, was built without CUDA or finds no GPU; or gpumem's allocator
        cannot be compiled. Nothing is changed.
    ConfigError
        `resource` is not an arena of a GPU's pinned memory, or `limit` or `beyond` is invalid.
    """
    if beyond not in ("error", "unpinned"):
        raise ConfigError(f"invalid beyond = {beyond!r}: expected 'error' or 'unpinned'")
    nbytes = _limit_of(limit, Device("host"))
    arena = None if resource is None else _pinned.require_pinned(resource)
    torch = import_torch()
    _allocator.require_gpu(torch)
    _pinned.install(torch, arena, limit=nbytes, unpinned=beyond == "unpinned")


def using(
    resource: ResourceLike = None, *, mode: str = "auto", pinned: Arena | bool | None = None
) -> Using:
    """Return a context manager in which PyTorch allocates its GPU memory from gpumem.

    Parameters are those of `enable`. It can be entered once, and applies to the whole process. With
    ``mode="full"`` its end raises `IntegrationError`, and gpumem stays enabled.
    """
    return Using(_switch, _setting(resource, mode, pinned))


def offload(
    limit: int | str | None = None, *, to: str = "host", min_bytes: int | str = "1MiB"
) -> Offload:
    """Return a context in which tensors that autograd saves move to pinned memory and back.

    Enter it around each forward pass; the backward pass may lie outside. It applies to the thread
    that enters it, and to the GPU that is current now. Parameters and buffers never move. The first
    step moves by an estimate. Later ones move few storages that keep the GPU's memory below the
    limit; none move where all fit. PyTorch's pinned memory comes from gpumem from then on, as by
    `enable_pinned`; the limit of that is the host's. Contexts with the same arguments share what
    they have learned, and their report.

    Parameters
    ----------
    limit : int or str, optional
        Bytes that PyTorch may allocate on the GPU, such as ``"70GiB"``, at least 1, or a share of
        the GPU's memory, ``"80%"``. None means the limit of PyTorch's arena, else the memory that
        is free now and that PyTorch holds.
    to : {"host"}
        Where tensors move.
    min_bytes : int or str
        Smaller storages stay, at least 1.

    Returns
    -------
    Offload
        A context manager. Its ``report()`` returns the bytes that have moved, by module; ``str()``
        of that is one line.

    Raises
    ------
    MissingFrameworkError
        PyTorch is not installed.
    IntegrationError
        PyTorch is older than 2.11, was built without CUDA or finds no GPU; a CUDA graph is captured
        now; or gpumem's allocator cannot be compiled. Nothing is changed. A tensor that would have
        to move during a capture raises it, too.
    ConfigError
        An argument is invalid.
    TypeError
        A limit or a size is neither an integer nor a text with a unit.
    """
    if to != "host":
        raise ConfigError(f"invalid to = {to!r}: expected 'host'")
    _limit_of(limit, Device("host"))  # refused before PyTorch is imported
    least = whole_bytes("min_bytes", min_bytes)
    if least < 1:
        raise ConfigError(f"invalid min_bytes = {min_bytes!r}: expected at least 1 byte")
    torch = import_torch()
    _allocator.require_gpu(torch)
    device = torch.cuda.current_device()
    nbytes = _limit_of(limit, Device(f"cuda:{device}"))
    arena = _arena_of(device)
    mover = Mover(torch, device, sees_peaks=status().mode == "full")
    mover.require_no_capture()
    if not _pinned.installed:
        enable_pinned()
    return context(torch, mover, nbytes, _free_bytes(torch, device, arena), least)


def _limit_of(limit: int | str | None, device: Device) -> int:
    """Return the bytes of a limit, which may be a share of a device's memory; 0 for None."""
    if limit is None:
        return 0
    if is_share(limit):
        return share_of("limit", str(limit), device.total_bytes)
    nbytes = whole_bytes("limit", limit, accepts_none=True)
    if nbytes < 1:
        raise ConfigError(f"invalid limit = {limit!r}: expected at least 1 byte, or None")
    return nbytes


def _arena_of(device: int) -> Arena | None:
    """Return the arena of PyTorch's memory on a GPU, if it is one."""
    enabled = status()
    arena = enabled.resources.get(device)
    if arena is None and enabled.mode == "full":
        arena = _hooks.arenas().get(device)
    return arena if isinstance(arena, Arena) else None


def _free_bytes(torch: ModuleType, device: int, arena: Arena | None) -> int:
    """Return the bytes that PyTorch can hold on a GPU, the ones it holds included."""
    if arena is not None and (limit := arena.limit):
        return limit
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + int(torch.cuda.memory_reserved(device))


def record_phases() -> None:
    """Let recordings hold the phases of the program and the purposes of its blocks, from now on.

    Phases are forward passes (the outermost call of a module), backward passes, steps of optimizers
    and ranges of ``record_function``. Parameters with buffers, gradients, states of optimizers and
    inputs of models are known by their storages. Reports derive the other categories, such as
    activations, from phases and lives. Under ``gpumem run --report`` it is called already. While
    nothing records it costs a fraction of a microsecond for each call of a module.

    Raises
    ------
    MissingFrameworkError
        PyTorch is not installed.
    IntegrationError
        PyTorch is older than 2.11.
    """
    _phases.follow(import_torch())


def status() -> TorchStatus:
    """Return which memory PyTorch uses now, and how."""
    now = _switch.status()
    setting = _switch.current()
    mode = None if setting is None else setting.option("mode")
    return TorchStatus(
        now.enabled,
        now.resources,
        mode=mode,
        pinned=_hooks.pinned() if _pinned.installed else None,
    )


def _setting(resource: ResourceLike, mode: str, pinned: Arena | bool | None) -> Setting:
    chosen = _torch.mode(mode)
    if pinned and chosen == "pool":
        raise ConfigError(f'invalid pinned = {pinned!r} with mode="pool": expected False')
    if not isinstance(pinned, bool | None):
        _pinned.require_pinned(pinned)
    current = _switch.current()
    resources = Resources("PyTorch", resource)
    if chosen == "pool":
        pinned = False
    elif current and _torch.is_replaced:
        # Arguments that are not given are those of an earlier call, or of `gpumem run`.
        if resource is None:
            resources = current.resources
        before = current.option("pinned")
        if pinned is None or (before is None and pinned is _torch.serves_pinned):
            pinned = before
    return setting_of(resources, chosen, pinned)


def setting_of(resources: Resources, mode: str, pinned: Arena | bool | None = None) -> Setting:
    """Return a setting for the switch."""
    return Setting(resources, (("mode", mode), ("pinned", pinned)))
