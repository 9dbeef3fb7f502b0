from collections.abc import Callable
from typing import Any, SupportsIndex, final

from gpumem._buffer.resource import MemoryResource
from gpumem.errors import OutOfMemoryError
from gpumem.integrations._common.resources import Resources

@final
class Blocks:
    def __init__(self, find: Callable[[], MemoryResource]) -> None: ...
    resource: MemoryResource
    def __len__(self) -> int: ...
    def __contains__(self, address: object, /) -> bool: ...
    def allocate(self, nbytes: SupportsIndex, stream: Any) -> int: ...
    def free(self, address: int, stream: Any) -> None: ...
    def deallocate(self, address: int, nbytes: SupportsIndex, stream: Any) -> None: ...

@final
class CurrentStream:
    def __init__(
        self,
        get_device_id: Callable[[], int],
        get_stream: Callable[[int], Any],
        capsules: tuple[object, object] | None = None,
    ) -> None: ...
    compiled: bool

@final
class PointerMaker:
    def __init__(self, memory_type: Any, pointer_type: Any) -> None: ...
    fills_in: bool

@final
class CupyAllocator:
    resources: Resources
    def __init__(
        self,
        resources: Resources,
        current: CurrentStream,
        maker: PointerMaker,
        no_memory: Callable[[OutOfMemoryError], Exception],
    ) -> None: ...
    def malloc(self, size: SupportsIndex) -> Any: ...
