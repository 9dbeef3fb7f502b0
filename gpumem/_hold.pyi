from typing import final

@final
class MemoryHold:
    def __buffer__(self, flags: int, /) -> memoryview: ...
