"""Internal state of arenas and other resources."""

from gpumem._arena.arena import release_retired_arenas as release_retired
from gpumem._testing.host_device import (
    block_handle,
    free_block,
    saved_move_time,
    spend_move_time,
    stream_slots,
)

__all__ = [
    "block_handle",
    "free_block",
    "release_retired",
    "saved_move_time",
    "spend_move_time",
    "stream_slots",
]
