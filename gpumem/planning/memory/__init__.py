"""Offsets of a graph's values in one block per memory: found, proven by a replay, and used."""

from gpumem.planning.memory.memory_plan import MemoryBlock, MemoryPlan, Place, plan_memory

__all__ = ["MemoryBlock", "MemoryPlan", "Place", "plan_memory"]
