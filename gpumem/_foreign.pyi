from typing import final

from gpumem._buffer import MemoryResource
from gpumem.device import Device, MemoryInfo

@final
class ForeignMemory(MemoryResource):
    def __init__(self, memory: MemoryInfo | Device | str) -> None: ...
