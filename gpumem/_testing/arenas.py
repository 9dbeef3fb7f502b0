"""What the public API does not say of an arena."""

from gpumem._core import release_retired_arenas as release_retired
from gpumem._testing.host_device import stream_slots

__all__ = ["release_retired", "stream_slots"]
