from typing import Any, final

from gpumem._buffer.buffer import Buffer
from gpumem._buffer.resource import MemoryResource
from gpumem._buffer.stream import Stream, _StreamLike
from gpumem._tensor.tensor import Tensor
from gpumem.device import Device, MemoryInfo

def from_dlpack(
    x: Any,
    *,
    device: MemoryInfo | Device | str | None = None,
    copy: bool | None = None,
    stream: _StreamLike = None,
) -> Tensor: ...
def asarray(
    x: Any, memory: MemoryInfo | Device | str | None = None, *, stream: _StreamLike = None
) -> Tensor: ...
def tensor_on_stream(tensor: Tensor, stream: Stream) -> Tensor: ...
def buffer_on_stream(
    memory: MemoryInfo, address: int, nbytes: int, owner: object, stream: Stream
) -> Buffer: ...

@final
class ForeignMemory(MemoryResource):
    def __init__(self, memory: MemoryInfo | Device | str, stream: _StreamLike = None) -> None: ...
