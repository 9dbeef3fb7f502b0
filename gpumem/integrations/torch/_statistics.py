"""Memory statistics for PyTorch, while gpumem's allocator replaces PyTorch's own.

PyTorch's own functions (`torch.cuda.memory_stats`, `memory_allocated`, `max_memory_reserved`,
`memory_summary`, `memory_snapshot`, `reset_peak_memory_stats`, ...) call a few functions of
``torch._C``, which raise under a pluggable allocator. Those few are replaced here, so that
everything above them works, wherever it was imported to.

``allocated``, ``active`` and ``requested`` bytes are the requested bytes of PyTorch's live blocks;
``reserved`` bytes are the memory that the arena reserves from the device, for other libraries too
if they share it; segments are its regions. All figures are under ``all``, not under a small or a
large pool.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from gpumem.integrations.torch import _hooks
from gpumem.observe.snapshots.torch_form import segments_of, snapshot_of

__all__ = ["Statistics"]

_NOTHING = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}


class Statistics:
    """Replaces the functions of ``torch._C`` that return statistics of the allocator."""

    def __init__(self, torch: ModuleType) -> None:
        self._core = torch._C
        self._torch = torch
        self._before: dict[str, Any] = {}
        # device -> counts at the last reset of what only rises
        self._since: dict[int, dict[str, int]] = {}
        self._fractions: dict[int, float] = {}

    def install(self) -> None:
        """Answer from gpumem from now on."""
        answers: dict[str, Callable[..., Any]] = {
            "_cuda_memoryStats": self.stats,
            "_cuda_resetPeakMemoryStats": self.reset_peak,
            "_cuda_resetAccumulatedMemoryStats": self.reset_accumulated,
            "_cuda_memorySnapshot": self.snapshot,
            "_cuda_setMemoryFraction": self.set_fraction,
            "_cuda_getMemoryFraction": self.fraction,
        }
        for name, answer in answers.items():
            if hasattr(self._core, name):
                self._before[name] = getattr(self._core, name)
                setattr(self._core, name, answer)

    # ---- what torch._C answers -------------------------------------------------------------------

    def stats(self, device: int) -> dict[str, Any]:
        """Return what ``torch.cuda.memory_stats_as_nested_dict`` gives."""
        arena = _hooks.arenas().get(device)
        counts = _hooks.counts(device)
        since = self._since.get(device, dict.fromkeys(counts, 0))
        now = {key: value - since[key] for key, value in counts.items()}
        live = counts["allocated"] - counts["freed"]
        taken = {
            "current": live,
            "peak": counts["peak"],
            "allocated": now["allocated"],
            "freed": now["freed"],
        }
        blocks = {
            "current": counts["allocs"] - counts["frees"],
            "peak": counts["allocs"] - counts["frees"],
            "allocated": now["allocs"],
            "freed": now["frees"],
        }
        held = arena.stats() if arena is not None else None
        reserved = dict(_NOTHING)
        segments = dict(_NOTHING)
        if held is not None:
            reserved |= {"current": held.reserved, "peak": held.max_reserved}
            segments |= {"current": held.num_regions, "peak": held.num_regions}
        idle = reserved["current"] - held.in_use if held is not None else 0
        return {
            "num_alloc_retries": 0,
            "num_ooms": now["failures"],
            "num_sync_all_streams": 0,
            "num_device_alloc": held.num_extensions if held is not None else 0,
            "num_device_free": held.num_shrinkages if held is not None else 0,
            "max_split_size": -1,
            "oversize_allocations": dict(_NOTHING),
            "oversize_segments": dict(_NOTHING),
            "allocation": _pooled(blocks),
            "active": _pooled(blocks),
            "segment": _pooled(segments),
            "inactive_split": _pooled(_NOTHING),
            "allocated_bytes": _pooled(taken),
            "active_bytes": _pooled(taken),
            "requested_bytes": _pooled(taken),
            "reserved_bytes": _pooled(reserved),
            "inactive_split_bytes": _pooled(_NOTHING | {"current": idle, "peak": idle}),
        }

    def reset_peak(self, device: int) -> None:
        """Begin to look for the highest anew, of PyTorch's bytes and of the arena's."""
        _hooks.reset_peak(device)
        arena = _hooks.arenas().get(device)
        if arena is not None:
            arena.reset_peaks()

    def reset_accumulated(self, device: int) -> None:
        """Begin to count anew what only rises."""
        self._since[device] = _hooks.counts(device)

    def set_fraction(self, fraction: float, device: int) -> None:
        """Bound the device's arena by a fraction of the device's memory."""
        before = self._before["_cuda_setMemoryFraction"]
        before(fraction, device)
        self._fractions[device] = fraction

    def fraction(self, device: int) -> float:
        """Return the fraction that was set; 1.0 where none was."""
        return self._fractions.get(device, 1.0)

    def snapshot(self, *_asked: Any) -> dict[str, Any]:
        """Return every region and block of the arenas in the form of PyTorch's snapshots."""
        segments = [
            segment
            for device, arena in sorted(_hooks.arenas().items())
            for segment in segments_of(device, arena.snapshot().resources[0].iter_blocks())
        ]
        return snapshot_of(segments, [[] for _ in range(self._torch.cuda.device_count())])


def _pooled(figures: dict[str, int]) -> dict[str, dict[str, int]]:
    return {"all": dict(figures), "small_pool": dict(_NOTHING), "large_pool": dict(_NOTHING)}
