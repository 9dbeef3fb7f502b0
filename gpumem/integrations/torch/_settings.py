"""PyTorch's settings of its allocator, where gpumem's is in its place.

They come as one text, ``per_process_memory_fraction:0.5,roundup_power2_divisions:[256:1,>:4]``, in
the first of `VARIABLES` that is set. A key is honoured, or an arena fulfils it anyway, or it
belongs to PyTorch's allocator of pinned memory, which reads it as ever where it stays; every other
one is named in one warning.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import NamedTuple

from gpumem._arena.arena import Arena
from gpumem.errors import ConfigError, ConfigWarning

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_FRACTION = "per_process_memory_fraction"
_PINNED = "pinned_"  # how keys of PyTorch's allocator of pinned memory begin
# Values that every arena fulfils: its pages grow in place, no lock is held while the
# driver allocates, and pinned memory is made by several threads. None: any value.
_FULFILLED: dict[str, frozenset[str] | None] = {
    "backend": frozenset({"native"}),
    "expandable_segments": None,
    "release_lock_on_cudamalloc": None,
    "graph_capture_record_stream_reuse": frozenset({"False"}),
    "pinned_use_cuda_host_register": None,
    "pinned_num_register_threads": None,
    "pinned_use_background_threads": None,
}
_KEY = re.compile(r"\s*(\w+)\s*:\s*(\[[^\]]*\]|[^,]*?)\s*(?:,|$)")


class AllocatorSettings(NamedTuple):
    """The settings that a text has.

    Attributes
    ----------
    fraction : float
        Share of each device's memory that its arena may hold, 0 to 1.
    unused : tuple of str
        Keys without effect over an arena, in the order of the text.
    """

    fraction: float = 1.0
    unused: tuple[str, ...] = ()

    @classmethod
    def of_environment(
        cls, environment: Mapping[str, str], *, pinned: bool = False
    ) -> AllocatorSettings:
        """Read the variable; keys without effect are named in one `ConfigWarning`.

        `pinned`: whether an arena serves PyTorch's pinned memory.

        Raises
        ------
        ConfigError
            The memory fraction is not a number from 0 to 1.
        """
        name = next((name for name in VARIABLES if name in environment), VARIABLES[-1])
        found = cls.of_text(environment.get(name, ""), pinned=pinned)
        if found.unused:
            warnings.warn(
                f"{name}: {', '.join(found.unused)} has no effect over gpumem: arenas do not round "
                "sizes, and move their free pages together",
                ConfigWarning,
                stacklevel=2,
            )
        return found

    @classmethod
    def of_text(cls, text: str, *, pinned: bool = False) -> AllocatorSettings:
        """Read the text; PyTorch itself refuses one that is malformed.

        `pinned`: whether an arena serves PyTorch's pinned memory.

        Raises
        ------
        ConfigError
            The memory fraction is not a number from 0 to 1.

        Examples
        --------
        >>> AllocatorSettings.of_text("max_split_size_mb:64,per_process_memory_fraction:0.5")
        AllocatorSettings(fraction=0.5, unused=('max_split_size_mb',))
        """
        given = dict(_KEY.findall(text))
        fraction = _fraction(given.pop(_FRACTION, "1"))
        unused = (key for key, value in given.items() if _is_unused(key, value, pinned))
        return cls(fraction, tuple(unused))

    def limit(self, arena: Arena) -> None:
        """Let an arena hold no more than the fraction of its device, nor than its own limit."""
        if self.fraction == 1.0:
            return
        limit = int(self.fraction * arena.memory.device.total_bytes)
        arena.set_limit(max(1, min(limit, arena.config.max_mem or limit)))  # 0 is unlimited


def _is_unused(key: str, value: str, pinned: bool) -> bool:
    if key.startswith(_PINNED) and not pinned:
        return False
    fulfilled = _FULFILLED.get(key, frozenset())
    return fulfilled is not None and value not in fulfilled


def _fraction(text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1.0
    if not 0.0 <= fraction <= 1.0:
        raise ConfigError(f"invalid {_FRACTION} = {text!r}: expected a number from 0 to 1")
    return fraction
