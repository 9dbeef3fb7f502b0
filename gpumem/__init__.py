"""One memory layer beneath every Python GPU library.

Importing it needs no driver, no GPU and no framework: the host is a device too.
"""

from gpumem import _live as _live  # publishes, if GPUMEM_TOP=1 asks for it
from gpumem._budget import Budget
from gpumem._buffer import Buffer, MemoryResource, set_snapshot
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
from gpumem.errors import (
    BudgetExceededError,
    ClosedError,
    ConcurrentRunError,
    ConfigError,
    ConfigWarning,
    DriverError,
    GpumemError,
    GraphError,
    HeapCorruptionError,
    HeapWarning,
    InUseError,
    InvalidFreeError,
    NoAllocatorError,
    OutOfMemoryError,
    PoolFallbackWarning,
    SourceError,
    SuspendedError,
)
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

__all__ = [
    "Arena",
    "ArenaConfig",
    "BlockInfo",
    "Budget",
    "BudgetExceededError",
    "BudgetLevel",
    "Buffer",
    "Capability",
    "ClosedError",
    "ConcurrentRunError",
    "ConfigError",
    "ConfigWarning",
    "CopyDecision",
    "Device",
    "DriverError",
    "DriverPool",
    "DriverStatus",
    "Environment",
    "Event",
    "ExternalAllocator",
    "GpumemError",
    "GraphError",
    "GraphPool",
    "Handle",
    "HeapBlock",
    "HeapCorruptionError",
    "HeapOptions",
    "HeapReport",
    "HeapWarning",
    "InUseError",
    "InvalidFreeError",
    "KeptRegion",
    "MemoryEvent",
    "MemoryInfo",
    "MemoryKind",
    "MemoryResource",
    "NoAllocatorError",
    "OutOfMemoryError",
    "Outstanding",
    "PoolConfig",
    "PoolFallbackWarning",
    "PoolStats",
    "RunContext",
    "Session",
    "SessionOptions",
    "ShrinkReport",
    "SourceError",
    "Stats",
    "Stream",
    "SuspendedError",
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


set_snapshot(_snapshot)
