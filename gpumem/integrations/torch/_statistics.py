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
from gpumem.stats import Stats

__all__ = ["Statistics"]

_UNUSED = Stats(*[0] * 16)  # of a device that no arena serves yet


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
        """Replace the functions from now on."""
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

    # ---- the functions of torch._C ---------------------------------------------------------------

    def stats(self, device: int) -> dict[str, Any]:
        """Return the dict of ``torch.cuda.memory_stats_as_nested_dict``."""
        arena = _hooks.arenas().get(device)
        counts = _hooks.counts(device)
        since = self._since.get(device, dict.fromkeys(counts, 0))
        now = {key: value - since[key] for key, value in counts.items()}
        live = counts["allocs"] - counts["frees"]
        blocks = _figures(live, live, now["allocs"], now["frees"])
        live = counts["allocated"] - counts["freed"]
        nbytes = _figures(live, counts["peak"], now["allocated"], now["freed"])
        held = _UNUSED if arena is None else arena.stats()
        idle = held.reserved - held.in_use
        return {
            "num_alloc_retries": 0,
            "num_ooms": now["failures"],
            "num_sync_all_streams": 0,
            "num_device_alloc": held.num_extensions,
            "num_device_free": held.num_shrinkages,
            "max_split_size": -1,
            "oversize_allocations": _figures(),
            "oversize_segments": _figures(),
            "allocation": _pooled(blocks),
            "active": _pooled(blocks),
            "segment": _pooled(_figures(held.num_regions, held.num_regions)),
            "inactive_split": _pooled(_figures()),
            "allocated_bytes": _pooled(nbytes),
            "active_bytes": _pooled(nbytes),
            "requested_bytes": _pooled(nbytes),
            "reserved_bytes": _pooled(_figures(held.reserved, held.max_reserved)),
            "inactive_split_bytes": _pooled(_figures(idle, idle)),
        }

    def reset_peak(self, device: int) -> None:
        """Set the peaks of PyTorch's bytes and of the arena's to the present values."""
        _hooks.reset_peak(device)
        arena = _hooks.arenas().get(device)
        if arena is not None:
            arena.reset_peaks()

    def reset_accumulated(self, device: int) -> None:
        """Count from 0 again whatever only rises."""
        self._since[device] = _hooks.counts(device)

    def set_fraction(self, fraction: float, device: int) -> None:
        """Limit the device's arena to a fraction of the device's memory."""
        before = self._before["_cuda_setMemoryFraction"]
        before(fraction, device)
        self._fractions[device] = fraction

    def fraction(self, device: int) -> float:
        """Return the fraction that was set; 1.0 if none was."""
        return self._fractions.get(device, 1.0)

    def snapshot(self, *_asked: Any) -> dict[str, Any]:
        """Return every region and block of the arenas in the form of PyTorch's snapshots."""
        segments = [
            segment
            for device, arena in sorted(_hooks.arenas().items())
            for segment in segments_of(device, arena.snapshot().resources[0].iter_blocks())
        ]
        return snapshot_of(segments, [[] for _ in range(self._torch.cuda.device_count())])


def _figures(current: int = 0, peak: int = 0, allocated: int = 0, freed: int = 0) -> dict[str, int]:
    return {"current": current, "peak": peak, "allocated": allocated, "freed": freed}


def _pooled(figures: dict[str, int]) -> dict[str, dict[str, int]]:
    return {"all": dict(figures), "small_pool": _figures(), "large_pool": _figures()}
