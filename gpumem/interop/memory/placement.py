"""Users of imported memory: tensors at an offset, points that they wait for, regions of an arena.

Every bound is checked here, in Python's integers, which do not overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from gpumem._support.sizes import exact_size
from gpumem.config import ArenaConfig
from gpumem.device import Device
from gpumem.errors import (
    AlignmentError,
    ConfigError,
    DeviceMismatchError,
    InvalidDescriptorError,
    OutOfBoundsError,
)
from gpumem.interop.descriptors import MAX_BYTES, MemoryDescriptor, number_of, seconds_of

QUANTUM = 256  # bytes; the alignment of an arena's regions


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor that fits: shape, strides in bytes, and its bytes in the memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    extent: int
    count: int
    read_only: bool


def place_tensor(
    memory: MemoryDescriptor,
    address: int,
    shape: int | Sequence[int],
    dtype: Any,
    offset: int,
    strides: Sequence[int] | None,
    row_pitch: int | None,
    read_only: bool | None,
    max_dimensions: int,
) -> PlacedTensor:
    """Check a tensor against the memory that begins at `address`, and lay it out.

    Raises
    ------
    InvalidDescriptorError, OutOfBoundsError, AlignmentError
        As `ExternalMemory.tensor`.
    """
    lengths = _shape(shape, max_dimensions)
    start = number_of(offset, "offset")
    if strides is not None and row_pitch is not None:
        raise InvalidDescriptorError("strides and row_pitch cannot be combined")
    if strides is not None:
        steps = _strides(strides, len(lengths))
    else:
        steps = _rows(lengths, dtype.itemsize, row_pitch)
    count = prod(lengths)
    reach = sum((length - 1) * step for length, step in zip(lengths, steps, strict=True))
    extent = dtype.itemsize + reach if count else 0
    if memory.offset + start + extent > memory.size:
        raise OutOfBoundsError(
            f"a tensor of {exact_size(extent)} at offset {start} of the memory, which begins at "
            f"offset {memory.offset} of its allocation, reaches past the allocation's "
            f"{memory.size} bytes",
            size=memory.size,
            memory_offset=memory.offset,
            tensor_offset=start,
            extent=extent,
        )
    if count * dtype.itemsize > MAX_BYTES or max(steps, default=0) > MAX_BYTES:
        raise InvalidDescriptorError(
            f"shape {lengths} with strides {steps} counts more than 2**63 - 1 bytes"
        )
    require_aligned(address + start, lengths, steps, dtype)
    return PlacedTensor(lengths, steps, start, extent, count, _access(memory.read_only, read_only))


def _shape(shape: Any, max_dimensions: int) -> tuple[int, ...]:
    given = (shape,) if hasattr(shape, "__index__") else shape
    lengths = _numbers(given, "shape", "a length of the shape")
    if len(lengths) > max_dimensions:
        raise InvalidDescriptorError(
            f"shape {shape!r} has {len(lengths)} dimensions; at most {max_dimensions} are supported"
        )
    return lengths


def _strides(strides: Any, dimensions: int) -> tuple[int, ...]:
    steps = _numbers(strides, "strides", "a stride")
    if len(steps) != dimensions:
        raise InvalidDescriptorError(
            f"strides {steps} has {len(steps)} numbers for {dimensions} dimensions"
        )
    return steps


def _numbers(given: Any, name: str, one: str) -> tuple[int, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidDescriptorError(f"{name} {given!r} is not a sequence of integers")
    return tuple(number_of(each, one) for each in given)


def _rows(lengths: tuple[int, ...], itemsize: int, pitch: int | None) -> tuple[int, ...]:
    """Lay out in C order, where a step from row to row takes `pitch` bytes."""
    steps = []
    step = itemsize
    for dimension, length in enumerate(reversed(lengths)):
        if dimension == 1 and pitch is not None:
            row = step
            step = number_of(pitch, "row_pitch")
            if step < row:
                raise InvalidDescriptorError(f"row_pitch {step} is less than a row's {row} bytes")
        steps.append(step)
        step *= max(length, 1)
    if pitch is not None and len(lengths) < 2:
        raise InvalidDescriptorError(
            f"row_pitch {pitch!r} needs at least two dimensions; shape is {lengths}"
        )
    return tuple(reversed(steps))


def require_aligned(
    address: int, lengths: tuple[int, ...], steps: tuple[int, ...], dtype: Any
) -> None:
    """Raise AlignmentError unless every element is at a multiple of its alignment."""
    size = dtype.alignment
    if address % size:
        raise AlignmentError(f"address {address:#x} is not a multiple of {dtype}'s {size} bytes")
    for length, step in zip(lengths, steps, strict=True):
        if length > 1 and step % size:
            raise AlignmentError(f"stride {step} is not a multiple of {dtype}'s {size} bytes")


def _access(memory_read_only: bool, requested: bool | None) -> bool:
    if requested is None:
        return memory_read_only
    if not isinstance(requested, bool):
        raise InvalidDescriptorError(f"read_only {requested!r} is not True, False or None")
    if memory_read_only and not requested:
        raise InvalidDescriptorError("invalid read_only = False: the memory is read-only")
    return requested


# ---- points that tensors wait for ----------------------------------------------------------------


def point_of(device: Device, timeline: Any, value: int | None, timeout: float | None) -> Any:
    """Return the point that tensors on a device wait for, with wait() and enqueue_wait(stream)."""
    if timeline is None:
        if value is not None or timeout is not None:
            raise ValueError(
                f"invalid value = {value!r} and timeout = {timeout!r} without a timeline: expected "
                "None"
            )
        return None
    point = timeline
    if value is not None:
        if not hasattr(timeline, "point"):
            raise TypeError(f"{timeline!r} is not a timeline; a point already has its value")
        point = timeline.point(value)
    elif not hasattr(timeline, "enqueue_wait") or not hasattr(timeline, "timeline"):
        raise TypeError(f"{timeline!r} is not a point of a timeline; a timeline needs a value")
    belongs = getattr(point.timeline, "device", None)
    if belongs is not None and belongs != device:
        raise DeviceMismatchError(f"the timeline belongs to {belongs}, and the memory to {device}")
    return point if timeout is None else _BoundedPoint(point, seconds_of(timeout))


class _BoundedPoint:
    """A point for which the CPU waits no longer than a timeout."""

    def __init__(self, point: Any, timeout: float) -> None:
        self.timeline, self.value = point.timeline, point.value
        self.enqueue_wait = point.enqueue_wait
        self._point, self._timeout = point, timeout

    def wait(self) -> None:
        """Wait as long as allowed."""
        self._point.wait(self._timeout)


# ---- memory of an arena --------------------------------------------------------------------------


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
        self._regions: dict[int, Any] = {}  # address of a region -> the buffer that keeps it
        self._start: int = -(-memory.ptr // QUANTUM) * QUANTUM
        end = memory.ptr + memory.nbytes
        self.room = max(0, (end - self._start) // QUANTUM * QUANTUM)
        if self.room == 0:
            raise ConfigError(
                f"imported memory of {exact_size(memory.nbytes)} at {memory.ptr:#x} is too small: "
                f"expected at least {QUANTUM} bytes at a multiple of {QUANTUM}"
            )

    def settings(self, config: ArenaConfig) -> ArenaConfig:
        """Return the arena's settings: the whole memory is its first region."""
        if self._grow is None and (config.max_mem == 0 or config.max_mem > self.room):
            config = replace(config, max_mem=self.room)
        if config.extend_strategy == "same_as_requested":  # a first size has no effect there
            return config
        return replace(config, initial_chunk_size_bytes=self.room)

    def allocate(self, nbytes: int) -> int | None:
        """Return a region of the memory, or of another one that `grow` returns."""
        if nbytes <= self.room and self._start not in self._regions:
            self._regions[self._start] = self._keep(self._first)
            return self._start
        memory = None if self._grow is None else self._grow(nbytes)
        if memory is None:
            return None
        if memory.memory != self._first.memory or memory.nbytes < nbytes or memory.read_only:
            raise ValueError(
                f"grow({nbytes}) returned {memory!r}: expected writable memory of "
                f"{self._first.memory} with at least that many bytes"
            )
        address: int = memory.ptr
        if address in self._regions or address == self._start:
            raise ValueError(f"grow({nbytes}) returned {memory!r}, which the arena already has")
        self._regions[address] = self._keep(memory)
        return address

    def free(self, address: int, nbytes: int) -> None:
        """Release a region."""
        self._regions.pop(address).close()
