from typing import final

from gpumem._buffer.buffer import MemoryResource
from gpumem._buffer.stream import Stream

class Upstream:
    resource: MemoryResource
    stream: Stream
    buffers: dict[int, object]
    def __init__(self, resource: MemoryResource) -> None: ...
    def allocate(self, nbytes: int) -> int: ...
    def free(self, address: int, nbytes: int) -> None: ...

@final
class Source:
    def what_is_wrong(self, given: int, size: int) -> str: ...
    def give_unusable(self, address: int, size: int) -> None: ...
