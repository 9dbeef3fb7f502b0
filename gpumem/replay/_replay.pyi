import numpy as np
from numpy.typing import NDArray

from gpumem._buffer.stream import Stream
from gpumem._core import Arena

def run(
    arena: Arena,
    streams: list[Stream],
    action: NDArray[np.int8],
    block: NDArray[np.int32],
    size: NDArray[np.int64],
    stream: NDArray[np.int16],
    time_us: NDArray[np.int64],
    blocks: int,
    virtual_clock: bool,
) -> tuple[int, int, int, int]: ...
