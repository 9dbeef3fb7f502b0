"""PyTorch's allocator of pinned memory, replaced with or without that of its GPUs."""

from __future__ import annotations

import ctypes
from types import ModuleType

from gpumem._arena.arena import Arena
from gpumem._budget import Budget
from gpumem._defaults import get_default_resource, set_default_resource
from gpumem._native.driver import table
from gpumem.device import MemoryKind
from gpumem.errors import ConfigError, IntegrationError
from gpumem.integrations.torch import _build, _hooks

installed = False
"""Whether gpumem has replaced it, which lasts until the process ends."""
node: str | None = None
"""Name of the node's budget that the arena of the first use charges."""


def install(
    torch: ModuleType, arena: Arena | None, *, limit: int = 0, unpinned: bool = False
) -> None:
    """Let PyTorch allocate pinned memory from an arena; tensors pinned before keep their memory.

    Without an arena it is the one in use, or from the first use on the default resource of the
    current device's pinned memory. `limit` is its new one in bytes; 0 leaves it. With `unpinned`,
    memory that is not pinned serves requests that are refused.

    Raises
    ------
    IntegrationError
        gpumem's allocator cannot be compiled; nothing is changed.
    """
    global installed
    reason = _build.why_not_compiled(torch)
    if reason:
        raise IntegrationError(f"PyTorch's pinned memory cannot come from gpumem: {reason}")

    def limited(found: Arena) -> Arena:
        if limit:
            found.set_limit(limit)
        return found

    def find(_: int) -> Arena:
        memory = f"cuda:{torch.cuda.current_device()}/pinned"
        if node is not None:
            set_default_resource(Arena(memory, budget=Budget(None, node=node)))
        return limited(require_pinned(get_default_resource(memory)))

    _hooks.set_finder(find, pinned=True)
    serving = _hooks.pinned() if arena is None else arena
    if serving is not None:
        _hooks.serve(_hooks.PINNED, limited(serving))
    # The first allocation would load it, which takes a tenth of a second.
    torch.cuda._lazy_call(table.load)
    _build.load(torch).gpumem_torch_install_pinned(ctypes.c_void_p(_hooks.table()), int(unpinned))
    installed = True


def require_pinned(pinned: object) -> Arena:
    """Return an arena of a GPU's pinned memory; raise `ConfigError` if it is something else."""
    if (
        isinstance(pinned, Arena)
        and pinned.memory.device.type == "cuda"
        and pinned.memory.kind is MemoryKind.HOST_ACCESSIBLE
    ):
        return pinned
    raise ConfigError(
        f'invalid pinned = {pinned!r}: expected a bool, or an arena of memory "cuda:N/pinned"'
    )
