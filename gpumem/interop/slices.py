"""Imported memory as the source of an arena: all of it first, then what the exporter gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gpumem.config import ArenaConfig
from gpumem.errors import ConfigError

__all__ = ["Slices"]

QUANTUM = 256  # bytes; what an arena's regions begin at


class Slices:
    """The source of one arena. `keep` returns a buffer over all of a memory, which keeps it."""

    def __init__(
        self,
        memory: Any,
        grow: Callable[[int], Any] | None,
        keep: Callable[[Any], Any],
    ) -> None:
        if grow is not None and not callable(grow):
            raise TypeError(f"grow {grow!r} is not callable")
        self._first, self._grow, self._keep = memory, grow, keep
        self._given: dict[int, Any] = {}  # address of a region -> what keeps its memory
        self._start: int = -(-memory.ptr // QUANTUM) * QUANTUM
        end = memory.ptr + memory.nbytes
        self.room = max(0, (end - self._start) // QUANTUM * QUANTUM)
        if self.room == 0:
            raise ConfigError(
                f"memory of {memory.nbytes} bytes at {memory.ptr:#x} holds no block: it takes "
                f"{QUANTUM} bytes at a multiple of {QUANTUM}"
            )

    def settings(self, config: ArenaConfig) -> ArenaConfig:
        """Return the arena's settings: the whole memory is its first region."""
        if self._grow is None and (config.max_mem == 0 or config.max_mem > self.room):
            config = replace(config, max_mem=self.room)
        return replace(config, initial_chunk_size_bytes=self.room)

    def allocate(self, nbytes: int) -> int | None:
        """Return a region of the memory, or of another that the exporter gives."""
        if nbytes <= self.room and self._start not in self._given:
            self._given[self._start] = self._keep(self._first)
            return self._start
        memory = None if self._grow is None else self._grow(nbytes)
        if memory is None:
            return None
        if memory.memory != self._first.memory or memory.nbytes < nbytes or memory.read_only:
            raise ValueError(
                f"grow({nbytes}) gave {memory!r}: it takes writable memory of "
                f"{self._first.memory} with at least so many bytes"
            )
        address: int = memory.ptr
        if address in self._given or address == self._start:
            raise ValueError(f"grow({nbytes}) gave {memory!r}, which the arena has already")
        self._given[address] = self._keep(memory)
        return address

    def free(self, address: int, nbytes: int) -> None:
        """Let go of a region."""
        self._given.pop(address).close()
