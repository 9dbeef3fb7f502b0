from gpumem._arena.arena import Arena
from gpumem._buffer.stream import Stream
from gpumem.traces import Trace

def run(
    arena: Arena, streams: list[Stream], trace: Trace, virtual_clock: bool
) -> tuple[int, int, int, int, int]: ...
