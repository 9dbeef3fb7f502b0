"""GPU memory in Python: seen, predicted, limited, and shared between libraries.

Importing it requires no driver, no GPU and no framework: the host is a device too. Names that few
programs use, and the packages in it (`gpumem.observe`, `gpumem.planning`, ...), are imported on
their first use.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

try:
    from gpumem._arena.arena import Arena
except ModuleNotFoundError as _missing:
    if _missing.name != "gpumem._arena.arena":
        raise
    raise ImportError(
        f"{__path__[0]} is source that was not compiled: run `pip install -e .` beside it, or "
        "start Python in another folder to import the installed gpumem"
    ) from None
from gpumem import _live as _live  # publishes counters if GPUMEM_TOP=1
from gpumem import config as config
from gpumem import device as device
from gpumem import errors as errors
from gpumem._arena.graph_pool import GraphPool
from gpumem._budget import Budget, Reservation
from gpumem._buffer.buffer import Buffer
from gpumem._buffer.resource import MemoryResource
from gpumem._buffer.stream import Event, Stream
from gpumem._defaults import get_default_resource, set_default_resource, using_resource
from gpumem._resource.external import ExternalAllocator
from gpumem._resource.handle import Handle
from gpumem._resource.pool import DriverPool
from gpumem._support.signatures import published
from gpumem._support.version import VERSION
from gpumem._tensor import (
    Tensor,
    VirtualTensor,
    asarray,
    copy,
    empty,
    empty_like,
    from_dlpack,
    full,
    ones,
    zeros,
    zeros_like,
)
from gpumem.config import ArenaConfig, PoolConfig
from gpumem.device import (
    Capability,
    CopyDecision,
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

__version__ = VERSION

_MODULES = ("config", "device", "errors")
_PACKAGES = (
    "accounting",
    "adaptors",
    "debugging",
    "integrations",
    "interop",
    "observe",
    "planning",
    "prediction",
    "replay",
    "report",
    "session",
    "stats",
    "traces",
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
    "CopyOut",
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
    "VirtualTensor",
    "asarray",
    "can_access",
    "copy",
    "default_device",
    "devices",
    "driver_status",
    "empty",
    "empty_like",
    "from_dlpack",
    "full",
    "get_default_resource",
    "get_include",
    "ones",
    "predict",
    "set_default_resource",
    "using_resource",
    "vary",
    "zeros",
    "zeros_like",
]


def get_include() -> str:
    """Return the folder of gpumem.h, for a C compiler; see `gpumem.integrations.c`.

    Examples
    --------
    >>> import gpumem, pathlib
    >>> (pathlib.Path(gpumem.get_include()) / "gpumem.h").exists()
    True
    """
    return str(Path(__file__).parent / "include")


published(globals())

if TYPE_CHECKING:
    # A checker knows an attribute only if a line here names it; `_PACKAGES` serves it at run time.
    from gpumem import accounting as accounting
    from gpumem import adaptors as adaptors
    from gpumem import debugging as debugging
    from gpumem import integrations as integrations
    from gpumem import interop as interop
    from gpumem import observe as observe
    from gpumem import planning as planning
    from gpumem import prediction as prediction
    from gpumem import replay as replay
    from gpumem import report as report
    from gpumem import session as session
    from gpumem import stats as stats
    from gpumem import traces as traces
    from gpumem._support.environment import vary
    from gpumem._tensor.copy_out import CopyOut
    from gpumem.prediction import predict
    from gpumem.session import Environment, RunContext, Session, SessionOptions
    from gpumem.stats import BlockInfo, PoolStats, ShrinkReport, Stats
else:
    # Names that are imported on their first use, by module.
    _LATER = {
        "gpumem._support.environment": ("vary",),
        "gpumem._tensor.copy_out": ("CopyOut",),
        "gpumem.prediction": ("predict",),
        "gpumem.session": ("Environment", "RunContext", "Session", "SessionOptions"),
        "gpumem.stats": ("BlockInfo", "PoolStats", "ShrinkReport", "Stats"),
    }

    def __getattr__(name: str) -> object:
        if name in _PACKAGES:
            return import_module(f"{__name__}.{name}")
        for module, names in _LATER.items():
            if name in names:
                globals()[name] = found = getattr(import_module(module), name)
                published(globals())
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*__all__, *_MODULES, *_PACKAGES, "__version__"})
