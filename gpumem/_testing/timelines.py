"""Timelines of the host device that behave as a GPU's do."""

from gpumem.interop.timelines._timeline import _hide_values as hide_values
from gpumem.interop.timelines._timeline import (
    _rehearse_memory_operations as rehearse_memory_operations,
)

__all__ = ["hide_values", "rehearse_memory_operations"]
