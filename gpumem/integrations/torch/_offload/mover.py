"""Copies between a GPU and pinned memory on a stream of their own, ordered by events."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from gpumem import observe
from gpumem.errors import IntegrationError
from gpumem.integrations.torch import _hooks
from gpumem.integrations.torch._offload.host import HostMemory, Piece


class Mover:
    """Copies the storages of one GPU, all on one stream: what is brought back was copied before.

    Tensors are of bytes and span whole storages. Calls have the device's current stream. It
    `sees_peaks` of any time if PyTorch's memory comes from an arena.
    """

    def __init__(self, torch: ModuleType, device: int, *, sees_peaks: bool = False) -> None:
        self._torch = torch
        self.sees_peaks = sees_peaks
        self.device = torch.device("cuda", device)
        self._stream = torch.cuda.Stream(device)
        self._highest = 0  # bytes at the peak that `allocated` has seen since the last `live`
        self._current: tuple[Any, Any] = (None, None)  # PyTorch's numbers of a stream, and it
        self.host = HostMemory(self._pinned)

    def live(self) -> tuple[int, int, int]:
        """Return the bytes that PyTorch has allocated, the highest there were, and those between.

        The highest is that since the last call if the mover `sees_peaks`. Those between are free
        bytes of memory that cannot be released, since other blocks lie in it.
        """
        if self.sees_peaks:
            now = self.allocated()
            highest, self._highest = self._highest, 0
            return now, highest, 0
        found = self._torch.cuda.memory_stats_as_nested_dict(self.device)
        if not found:
            return 0, 0, 0
        allocated = found["allocated_bytes"]["all"]
        between = found["inactive_split_bytes"]["all"]["current"]
        return allocated["current"], allocated["peak"], between

    def allocated(self) -> int:
        """Return the bytes that PyTorch has allocated from an arena now."""
        now, highest = _hooks.live_bytes(self.device.index)
        self._highest = max(self._highest, highest)
        return now

    def require_no_capture(self) -> None:
        """Raise `IntegrationError` while a CUDA graph is captured."""
        if self._torch.cuda.is_current_stream_capturing():
            raise IntegrationError(
                "offload() cannot move tensors while a CUDA graph is captured: a replay would not "
                "move them again; capture outside offload()"
            )

    def current_stream(self) -> Any:
        numbers = self._torch._C._cuda_getCurrentStream(self.device.index)
        known, stream = self._current  # at once, as another thread may change both
        if numbers != known:
            stream = self._torch.cuda.current_stream(self.device.index)
            self._current = numbers, stream
        return stream

    def copy_out(self, pieces: list[Piece], flat: Any, first: int, last: int, stream: Any) -> Any:
        """Copy bytes to the host after what a stream has queued; returns the copy's end."""
        self._stream.wait_stream(stream)
        with self._stream:
            for begin, end, view in self.host.views(pieces, first, last):
                view.copy_(flat[begin:end], non_blocking=True)
        return self._stream.record_event()

    def note_use(self, tensor: Any, stream: Any) -> None:
        """Let nothing reuse the block, which may be freed soon, before a stream is done."""
        tensor.record_stream(stream)

    def release(self, flat: Any, event: Any, stream: Any) -> None:
        """Let the stream of a storage wait for its copy; then its block may be freed at once."""
        stream.wait_event(event)
        flat.record_stream(stream)

    def bring(
        self, pieces: list[Piece], nbytes: int, first: int, last: int, *, at_once: bool
    ) -> tuple[Any, Any, Any]:
        """Start a copy back; returns the GPU's tensor, the end of the copy and its stream.

        `at_once`: where memory is out, the request is refused; nothing is freed or collected.
        """
        current = self.current_stream()
        flat = self._allocate(nbytes, at_once, device=self.device)
        self._stream.wait_stream(current)
        with self._stream:
            for begin, end, view in self.host.views(pieces, first, last):
                flat[begin:end].copy_(view, non_blocking=True)
        return flat, self._stream.record_event(), current

    def wait(self, flat: Any, event: Any, stream: Any) -> tuple[Any, Any]:
        """Let the current stream wait for a copy; returns the times before and after."""
        current = self.current_stream()
        times = [self._torch.cuda.Event(enable_timing=True) for _ in range(2)]
        times[0].record(current)
        current.wait_event(event)
        times[1].record(current)
        if current != stream:
            flat.record_stream(current)
        return times[0], times[1]

    def drop(self, event: Any, stream: Any) -> None:
        """Let a block's stream wait for a copy into it that nobody needs any more."""
        stream.wait_event(event)

    def _pinned(self, nbytes: int) -> Any:
        try:
            found = self._allocate(nbytes, True, device="cpu", pin_memory=True)
        except self._torch.OutOfMemoryError:
            return None
        return found if found.is_pinned() else None

    def _allocate(self, nbytes: int, at_once: bool, **where: Any) -> Any:
        _hooks.refuse_at_once(at_once)
        try:
            with observe.tag("offload"):
                return self._torch.empty(nbytes, dtype=self._torch.uint8, **where)
        finally:
            _hooks.refuse_at_once(False)
