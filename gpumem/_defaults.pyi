from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from gpumem._arena.arena import Arena
from gpumem._buffer.resource import MemoryResource
from gpumem._resource.pool import DriverPool
from gpumem.config import ArenaConfig
from gpumem.device import Device, MemoryInfo

_R = TypeVar("_R", bound=MemoryResource)

def get_default_resource(memory: MemoryInfo | Device | str | None = None) -> MemoryResource: ...
def set_default_resource(
    memory: MemoryInfo | Device | str, resource: MemoryResource | None
) -> None: ...
def using_resource(resource: _R) -> AbstractContextManager[_R]: ...
def resource_from_config(
    memory: MemoryInfo | Device | str,
    config: ArenaConfig | Mapping[str, object] | None = None,
    **options: Any,
) -> Arena | DriverPool: ...
