from contextlib import AbstractContextManager
from typing import TypeVar

from gpumem._buffer.resource import MemoryResource
from gpumem.device import Device, MemoryInfo

_R = TypeVar("_R", bound=MemoryResource)

def get_default_resource(memory: MemoryInfo | Device | str | None = None) -> MemoryResource: ...
def set_default_resource(
    memory: MemoryInfo | Device | str, resource: MemoryResource | None
) -> None: ...
def using_resource(resource: _R) -> AbstractContextManager[_R]: ...
