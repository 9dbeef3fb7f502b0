"""One memory layer beneath every Python GPU library.

Importing it needs no driver, no GPU and no framework: the host is a device too. What only some
programs use, and the packages in it (`gpumem.observe`, `gpumem.planning` and their like), is
imported when it is first named.
"""

from importlib import import_module
from typing import TYPE_CHECKING

try:
    from gpumem._core import Arena
except ModuleNotFoundError as _missing:
    if _missing.name != "gpumem._core":
        raise
    raise ImportError(
        f"{__path__[0]} is source that was not compiled: run `pip install -e .` beside it, or "
        "start Python in another folder to import the installed gpumem"
    ) from None
from gpumem import _live as _live  # publishes, if GPUMEM_TOP=1 asks for it
from gpumem import config as config
from gpumem import device as device
from gpumem import errors as errors
from gpumem import stats as stats
from gpumem._budget import Budget, Reservation
from gpumem._buffer import Buffer, MemoryResource, set_observers
from gpumem._core_capture import GraphPool
from gpumem._external import ExternalAllocator
from gpumem._handle import Handle
from gpumem._pool import DriverPool
from gpumem._stream import Event, Stream
from gpumem.config import ArenaConfig, PoolConfig
from gpumem.device import (
    Capability,
    Device,
    DriverStatus,
    MemoryInfo,
    MemoryKind,
    can_access,
    default_device,
    devices,
    driver_status,
)
from gpumem.errors import ConfigError, GpumemError, OutOfMemoryError
from gpumem.factory import resource_from_config
from gpumem.resources import (
    get_default_resource,
    set_default_resource,
    using_resource,
)
from gpumem.stats import BlockInfo, PoolStats, ShrinkReport, Stats
from gpumem.tensor import (
    Tensor,
    asarray,
    copy,
    empty,
    from_dlpack,
    full,
    staging_arena,
    zeros,
)

__version__ = "0.1.0"

_MODULES = ("config", "device", "errors", "stats")
_PACKAGES = (
    "accounting",
    "adaptors",
    "debugging",
    "integrations",
    "interop",
    "observe",
    "planning",
    "replay",
    "session",
)

__all__ = [
    "Arena",
    "ArenaConfig",
    "BlockInfo",
    "Budget",
    "Buffer",
    "Capability",
    "ConfigError",
    "CopyDecision",
    "Device",
    "DriverPool",
    "DriverStatus",
    "Environment",
    "Event",
    "ExternalAllocator",
    "GpumemError",
    "GraphPool",
    "Handle",
    "MemoryInfo",
    "MemoryKind",
    "MemoryResource",
    "OutOfMemoryError",
    "PoolConfig",
    "PoolStats",
    "Reservation",
    "RunContext",
    "Session",
    "SessionOptions",
    "ShrinkReport",
    "Stats",
    "Stream",
    "Tensor",
    "asarray",
    "can_access",
    "copy",
    "default_device",
    "devices",
    "driver_status",
    "empty",
    "from_dlpack",
    "full",
    "get_default_resource",
    "set_default_resource",
    "staging_arena",
    "using_resource",
    "zeros",
]


def _snapshot(resource: object) -> object:
    """Make a resource's snapshot; what that needs is imported with the first one."""
    from gpumem.observe.snapshots import snapshot

    return snapshot(resource)


def _report(resource: MemoryResource, path: str, title: str | None) -> object:
    """Write a page of a resource's snapshot."""
    write = import_module(f"{__name__}.observe.report").write_report
    return write(_snapshot(resource), path, title=title or resource.name)


set_observers(_snapshot, _report, resource_from_config)

if TYPE_CHECKING:
    from gpumem import debugging as debugging
    from gpumem import session as session
    from gpumem.environment import Environment
    from gpumem.session import CopyDecision, RunContext, Session
    from gpumem.session_options import SessionOptions
else:
    # What is imported when it is first named: the names, by their modules.
    _LATER = {
        "gpumem.environment": ("Environment",),
        "gpumem.session": ("CopyDecision", "RunContext", "Session"),
        "gpumem.session_options": ("SessionOptions",),
    }

    def __getattr__(name: str) -> object:
        if name in _PACKAGES:
            return import_module(f"{__name__}.{name}")
        for module, names in _LATER.items():
            if name in names:
                globals()[name] = found = getattr(import_module(module), name)
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*__all__, *_MODULES, *_PACKAGES, "__version__"})
