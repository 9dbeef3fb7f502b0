from typing import Any

from gpumem._tensor import Tensor
from gpumem.device import Device, MemoryInfo

def from_dlpack(
    x: Any, *, device: MemoryInfo | Device | str | None = None, copy: bool | None = None
) -> Tensor: ...
def asarray(x: Any, memory: MemoryInfo | Device | str | None = None) -> Tensor: ...
