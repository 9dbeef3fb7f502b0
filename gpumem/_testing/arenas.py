"""What the public API does not say of an arena."""

from gpumem._core import release_retired_arenas as release_retired
from gpumem._testing.host_device import block_handle, free_block, stream_slots

__all__ = ["block_handle", "free_block", "release_retired", "stream_slots"]
