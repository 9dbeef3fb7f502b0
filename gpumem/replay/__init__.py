"""Replay recorded allocation traces on a real allocator.

`replay` runs a trace on an arena of any device and reports memory and time. `policies` also serves
the trace with other settings and by models of other allocators, for comparison. `gpumem.traces`
reads traces from files.
"""

from gpumem.replay.engine import ReplayResult, replay

__all__ = ["ReplayResult", "replay"]
__dir__ = __all__.copy
