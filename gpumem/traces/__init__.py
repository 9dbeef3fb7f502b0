"""Traces of allocations: the class of a trace, and a reader for each format that holds one.

`load_trace` and `load_traces` read a file of any known format, `samples` lists the bundled traces,
and `TraceBuilder` makes a `Trace` from a log that names blocks by address.
"""

from gpumem.traces.builder import TraceBuilder
from gpumem.traces.formats import load_trace, load_traces, samples
from gpumem.traces.trace import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    UNKNOWN_BLOCK,
    Curve,
    Details,
    Phase,
    Segments,
    Trace,
)

__all__ = [
    "ALLOC",
    "FREE_COMPLETED",
    "FREE_REQUESTED",
    "UNKNOWN_BLOCK",
    "Curve",
    "Details",
    "Phase",
    "Segments",
    "Trace",
    "TraceBuilder",
    "load_trace",
    "load_traces",
    "samples",
]
__dir__ = __all__.copy
