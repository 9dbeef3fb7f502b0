"""Replay recorded allocation traces on a real allocator.

`replay` runs a trace on an arena of any device and reports what it needed. `policies` also serves
it with other settings and with models of other allocators, for comparison. `gpumem.traces` reads
traces from files.
"""

from gpumem.replay.engine import ReplayResult, replay

__all__ = ["ReplayResult", "replay"]
