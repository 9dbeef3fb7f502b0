"""Traces of allocations: what one is, and a reader of each format that holds one."""

from gpumem.traces.formats import load_trace, samples
from gpumem.traces.trace import Trace

__all__ = ["Trace", "load_trace", "samples"]
