"""Properties of GPUs, as their drivers state them: the one table of `gpumem predict`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpumem._support.arguments import require
from gpumem.errors import ConfigError

__all__ = ["Gpu", "gpu", "names"]
__dir__ = __all__.copy

# Attributes by the driver's number (CUdevice_attribute), alike on all GPUs of the table.
_COMMON = {
    1: 1024,  # threads of a block; 2 to 4: its dimensions; 5 to 7: those of a grid
    **{2: 1024, 3: 1024, 4: 64, 5: 2147483647, 6: 65535, 7: 65535},
    8: 49152,  # bytes of shared memory of a block; 9: of constants; 10: threads of a warp
    **{9: 65536, 10: 32, 11: 2147483647, 12: 65536, 14: 512, 15: 1, 19: 1, 30: 512, 31: 1},
    **{32: 1, 40: 3, 41: 1, 51: 32, 78: 1, 79: 1, 80: 1, 82: 65536, 83: 1, 87: 2, 89: 1, 90: 1},
    **{91: 1, 95: 1, 96: 1, 99: 1, 111: 1024, 112: 1, 114: 1, 115: 1, 119: 1, 121: 1, 122: 1},
    **{13: 1_980_000, 36: 2_619_000},  # clocks in kHz; nothing depends on them
    102: 1,  # physical handles that are mapped to reserved addresses; 103: shared by descriptor
    **{103: 1, 109: 134213632, 125: 1, 129: 1, 134: -1},
}


@dataclass(frozen=True)
class Gpu:
    """The properties that an allocator and PyTorch's choices depend on.

    Attributes
    ----------
    name : str
        The driver's name for it.
    memory_mib : int
        MiB, as PyTorch states them on such a GPU.
    capability : tuple of int
        Compute capability: major and minor version.
    multiprocessors : int
    cache_mib : int
        MiB of the second-level cache.
    shared_kib : int
        KiB of shared memory of a multiprocessor; a block can have 1 KiB less.
    threads, blocks : int
        Threads and blocks that a multiprocessor can hold.
    bus : int
        Bits of the memory's bus.
    compared : bool
        Whether predictions for it were compared with runs on it.
    context : int
        Bytes that a process holds outside of its allocators: an estimate.
    """

    name: str
    memory_mib: int
    capability: tuple[int, int]
    multiprocessors: int
    cache_mib: int
    shared_kib: int
    threads: int
    blocks: int
    bus: int
    compared: bool = False
    context: int = 600 << 20

    @property
    def memory(self) -> int:
        """Bytes of memory."""
        return self.memory_mib << 20

    def attributes(self) -> dict[int, int]:
        """Return all attributes by the driver's number."""
        return {
            **_COMMON,
            16: self.multiprocessors,
            37: self.bus,
            38: self.cache_mib << 20,
            39: self.threads,
            75: self.capability[0],
            76: self.capability[1],
            81: self.shared_kib << 10,
            97: (self.shared_kib - 1) << 10,
            106: self.blocks,
            108: (self.cache_mib << 20) // 8 * 5,
            120: int(self.capability[0] >= 9),
        }


_GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", 81_080, (9, 0), 132, 50, 228, 2048, 32, 5120),
    "h200": Gpu("NVIDIA H200", 143_156, (9, 0), 132, 60, 228, 2048, 32, 6144, True),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 81_152, (8, 0), 108, 40, 164, 2048, 32, 5120),
    "a100-40gb": Gpu("NVIDIA A100-SXM4-40GB", 40_438, (8, 0), 108, 40, 164, 2048, 32, 5120),
    "b200": Gpu("NVIDIA B200", 182_630, (10, 0), 148, 126, 228, 2048, 32, 8192),
    "l40s": Gpu("NVIDIA L40S", 45_486, (8, 9), 142, 96, 100, 1536, 24, 384),
    "l4": Gpu("NVIDIA L4", 22_559, (8, 9), 58, 48, 100, 1536, 24, 192),
    "a10g": Gpu("NVIDIA A10G", 22_589, (8, 6), 80, 6, 100, 1536, 16, 384),
    "t4": Gpu("Tesla T4", 14_909, (7, 5), 40, 4, 64, 1024, 16, 256),
    "3090": Gpu("NVIDIA GeForce RTX 3090", 24_248, (8, 6), 82, 6, 100, 1536, 16, 384),
    "4090": Gpu("NVIDIA GeForce RTX 4090", 24_084, (8, 9), 128, 72, 100, 1536, 24, 384),
    "5090": Gpu("NVIDIA GeForce RTX 5090", 32_123, (12, 0), 170, 96, 100, 1536, 24, 512),
}


def names() -> list[str]:
    """Return the names of the GPUs in the table."""
    return list(_GPUS)


def gpu(name: str = "h100", memory: int | None = None) -> Gpu:
    """Return the properties of a GPU.

    Parameters
    ----------
    name : str
        One of `names`, in any case.
    memory : int, optional
        Bytes of memory that it shall have instead of its own.

    Raises
    ------
    ConfigError
        There is no such GPU in the table, or `memory` has no room for a process.

    Examples
    --------
    >>> from gpumem.prediction.gpus import gpu
    >>> gpu("H100").multiprocessors
    132
    """
    require("name", name, str, "a str")
    require("memory", memory, (int, type(None)), "bytes, or None")
    found = _GPUS.get(name.lower())
    if found is None:
        raise ConfigError(f"unknown GPU {name!r}: expected one of {', '.join(_GPUS)}")
    if memory is None:
        return found
    if memory <= found.context:
        raise ConfigError(
            f"invalid memory = {memory}: expected more than the {found.context} bytes that a "
            "process holds outside of its allocators"
        )
    return replace(found, memory_mib=memory >> 20)
