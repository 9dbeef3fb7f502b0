"""One memory layer beneath every Python GPU library.

Importing it needs no driver, no GPU and no framework: the host is a device too. The packages in it
(`gpumem.observe`, `gpumem.planning` and their like) are imported when they are first named.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from gpumem import _live as _live  # publishes, if GPUMEM_TOP=1 asks for it
from gpumem._budget import Budget
from gpumem._buffer import Buffer, MemoryResource, set_observers
from gpumem._core import Arena
from gpumem._core_capture import GraphPool
from gpumem._external import ExternalAllocator
from gpumem._handle import Handle
from gpumem._pool import DriverPool
from gpumem._stream import Event, Stream
from gpumem.adaptors import (
    MemoryEvent,
    Outstanding,
    TrackCounts,
    annotate,
    fallback,
    limit,
    log,
    on_failure,
    track,
)
from gpumem.config import ArenaConfig, PoolConfig
from gpumem.debugging import HeapBlock, HeapOptions, HeapReport
from gpumem.device import (
    Capability,
    Device,
    DriverStatus,
    MemoryInfo,
    MemoryKind,
    can_access,
    default_device,
    devices,
    devices_are_memory_compatible,
    driver_status,
    set_host_device_count,
)
from gpumem.environment import Environment
from gpumem.errors import ConfigError, GpumemError, OutOfMemoryError
from gpumem.factory import make_resource
from gpumem.resources import (
    get_default_resource,
    set_default_resource,
    using_resource,
)
from gpumem.session import CopyDecision, RunContext, Session
from gpumem.session_options import SessionOptions
from gpumem.stats import BlockInfo, BudgetLevel, KeptRegion, PoolStats, ShrinkReport, Stats
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

_PACKAGES = ("accounting", "adaptors", "integrations", "interop", "observe", "planning", "replay")

__all__ = [
    "Arena",
    "ArenaConfig",
    "BlockInfo",
    "Budget",
    "BudgetLevel",
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
    "HeapBlock",
    "HeapOptions",
    "HeapReport",
    "KeptRegion",
    "MemoryEvent",
    "MemoryInfo",
    "MemoryKind",
    "MemoryResource",
    "OutOfMemoryError",
    "Outstanding",
    "PoolConfig",
    "PoolStats",
    "RunContext",
    "Session",
    "SessionOptions",
    "ShrinkReport",
    "Stats",
    "Stream",
    "Tensor",
    "TrackCounts",
    "annotate",
    "asarray",
    "can_access",
    "copy",
    "default_device",
    "devices",
    "devices_are_memory_compatible",
    "driver_status",
    "empty",
    "fallback",
    "from_dlpack",
    "full",
    "get_default_resource",
    "limit",
    "log",
    "make_resource",
    "on_failure",
    "set_default_resource",
    "set_host_device_count",
    "staging_arena",
    "track",
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


set_observers(_snapshot, _report)

if not TYPE_CHECKING:  # a checker would take every name for one of the module's

    def __getattr__(name: str) -> ModuleType:
        """Import a package of gpumem when it is first named."""
        if name in _PACKAGES:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
