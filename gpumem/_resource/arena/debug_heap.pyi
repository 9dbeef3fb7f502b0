from typing import final

from gpumem.debugging import DebugHeapOptions, HeapReport

KINDS: dict[int, str]
BAD_FREES: tuple[str, ...]

@final
class Heap:
    options: DebugHeapOptions
    def __init__(self, *args: object, **kwargs: object) -> None: ...

def warn(report: HeapReport) -> None: ...
def print_report(report: HeapReport) -> None: ...
def tell_at_exit() -> None: ...
