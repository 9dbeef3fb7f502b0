from collections.abc import Callable
from typing import Any, SupportsIndex, final

from gpumem._buffer.buffer import Buffer
from gpumem.errors import OutOfMemoryError
from gpumem.integrations._common.resources import Resources

@final
class Where:
    def __init__(
        self,
        get_device_id: Callable[[], int],
        get_stream: Callable[[int], Any],
        capsules: tuple[object, object] | None = None,
    ) -> None: ...
    @property
    def compiled(self) -> bool: ...
    @property
    def stream_address(self) -> int: ...

@final
class Maker:
    def __init__(self, memory_type: Any, pointer_type: Any) -> None: ...
    @property
    def fills_in(self) -> bool: ...

@final
class CupyAllocator:
    resources: Resources
    def __init__(
        self,
        resources: Resources,
        where: Where,
        maker: Maker,
        no_memory: Callable[[OutOfMemoryError], Exception],
    ) -> None: ...
    def malloc(self, size: SupportsIndex) -> Any: ...

@final
class PinnedBlock:
    buffer: Buffer
    def __init__(self, buffer: Buffer) -> None: ...
    @property
    def ptr(self) -> int: ...
    @property
    def size(self) -> int: ...
