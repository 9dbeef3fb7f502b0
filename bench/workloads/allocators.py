"""The allocator of a process beneath PyTorch, which can be chosen once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Peaks:
    """Highest bytes since the last reset: held from the device, and requested by tensors.

    Requested bytes do not depend on the allocator, so PyTorch's own count serves all;
    `requested` is None where PyTorch does not count.
    """

    reserved: int
    requested: int | None


class Allocator(ABC):
    @abstractmethod
    def peaks(self) -> Peaks: ...

    @abstractmethod
    def reset_peaks(self) -> None: ...


class Cpu(Allocator):
    """A machine without a GPU: nothing to choose, nothing counted."""

    def peaks(self) -> Peaks:
        return Peaks(0, None)

    def reset_peaks(self) -> None:
        pass


class Native(Allocator):
    """PyTorch's own, with PYTORCH_ALLOC_CONF of the environment."""

    def __init__(self, limit: int, index: int) -> None:
        if limit:
            total = torch.cuda.get_device_properties(index).total_memory
            torch.cuda.set_per_process_memory_fraction(limit / total, index)

    def peaks(self) -> Peaks:
        stats = torch.cuda.memory_stats()
        return Peaks(stats["reserved_bytes.all.peak"], stats["requested_bytes.all.peak"])

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats()


class Full(Allocator):
    """An arena in place of PyTorch's allocator."""

    def __init__(self, limit: int, index: int) -> None:
        self.arena = enabled("full", limit, index)

    def peaks(self) -> Peaks:
        """Return PyTorch's statistics, which count pools of graphs, too."""
        return Peaks(torch.cuda.memory_stats()["reserved_bytes.all.peak"], None)

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats()


class Pool(Allocator):
    """PyTorch's allocator over an arena, through a ``torch.cuda.MemPool``."""

    def __init__(self, limit: int, index: int) -> None:
        self.native = Native(limit, index)
        self.arena = enabled("pool", limit, index)

    def peaks(self) -> Peaks:
        """Add PyTorch's memory and that of the arena which PyTorch does not have."""
        native, arena = self.native.peaks(), self.arena.stats()
        above = max(0, arena.max_reserved - arena.max_in_use)
        return Peaks(native.reserved + above, native.requested)

    def reset_peaks(self) -> None:
        self.native.reset_peaks()
        self.arena.reset_peaks()


def enabled(mode: str, limit: int, index: int) -> Any:
    import gpumem
    from gpumem.integrations import torch as integration

    arena = gpumem.Arena(f"cuda:{index}", {"max_mem": limit})
    integration.enable(arena, mode=mode)
    return arena


def install(configuration: str, device: torch.device, limit: int = 0) -> Allocator:
    """Choose the allocator of this process; `limit` bytes, 0 for no limit."""
    if device.type == "cpu":
        return Cpu()
    made: dict[str, type[Full | Pool | Native]] = {"full": Full, "pool": Pool}
    index = device.index or 0
    allocator = made.get(configuration, Native)(limit, index)
    torch.cuda.set_device(index)  # after the allocator was chosen: this initialises CUDA
    return allocator


def is_exhaustion(error: BaseException) -> bool:
    """Tell an allocation that found no memory from every other failure.

    Beneath a replaced allocator PyTorch knows no better than RuntimeError, of which the text is
    all there is to go by.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
