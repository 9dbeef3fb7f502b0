"""How streams of the host device wait for and signal a timeline."""

from gpumem.interop.timelines._kinds import (
    _rehearse_memory_operations as rehearse_memory_operations,
)

__all__ = ["rehearse_memory_operations"]
