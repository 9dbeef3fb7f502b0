"""Copies between a GPU and pinned memory on a stream of their own, ordered by events."""

from __future__ import annotations

from collections import deque
from types import ModuleType
from typing import Any

from gpumem import observe
from gpumem.errors import IntegrationError
from gpumem.integrations.torch._offload.host import HostMemory, Piece


class Mover:
    """Copies the storages of one GPU, all on one stream: what is brought back was copied before.

    Tensors are of bytes and span whole storages. Calls have the device's current stream. If the
    allocator `moves_pages`, its free pages serve any block.
    """

    def __init__(self, torch: ModuleType, device: int, *, moves_pages: bool = False) -> None:
        self._torch = torch
        self.moves_pages = moves_pages
        self.device = torch.device("cuda", device)
        self._stream = torch.cuda.Stream(device)
        self.host = HostMemory(self._pinned)
        self._leaving: deque[tuple[Any, int]] = deque()  # the ends of copies to the host, bytes

    def live(self) -> tuple[int, int, int]:
        """Return the bytes that PyTorch has allocated, the highest there were, and those between.

        The last are free bytes of memory that cannot be released, since other blocks lie in it.
        """
        found = self._torch.cuda.memory_stats_as_nested_dict(self.device)
        if not found:
            return 0, 0, 0
        allocated = found["allocated_bytes"]["all"]
        between = found["inactive_split_bytes"]["all"]["current"]
        return allocated["current"], allocated["peak"], between

    def require_no_capture(self) -> None:
        """Raise `IntegrationError` while a CUDA graph is captured."""
        if self._torch.cuda.is_current_stream_capturing():
            raise IntegrationError(
                "offload() cannot move tensors while a CUDA graph is captured: a replay would not "
                "move them again; capture outside offload()"
            )

    def copy_out(self, pieces: list[Piece], flat: Any, first: int, last: int) -> None:
        """Copy bytes to the host; the GPU's block may be freed at once, and is reused later."""
        self._stream.wait_stream(self._torch.cuda.current_stream(self.device))
        with self._torch.cuda.stream(self._stream):
            for begin, end, view in self.host.views(pieces, first, last):
                view.copy_(flat[begin:end], non_blocking=True)
        flat.record_stream(self._stream)
        self._leaving.append((self._stream.record_event(), last - first))

    def wait_for_room(self, room: float) -> int:
        """Wait until the copies under way hold at most `room` bytes that are free otherwise.

        Returns the bytes that they hold.
        """
        leaving = self._leaving
        held = sum(nbytes for _, nbytes in leaving)
        while leaving and (held > max(room, 0) or leaving[0][0].query()):
            event, nbytes = leaving.popleft()
            event.synchronize()
            held -= nbytes
        return held

    def bring(
        self, pieces: list[Piece], nbytes: int, first: int, last: int
    ) -> tuple[Any, Any, Any]:
        """Start a copy back; returns the GPU's tensor, the end of the copy and its stream."""
        torch = self._torch
        current = torch.cuda.current_stream(self.device)
        flat = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for begin, end, view in self.host.views(pieces, first, last):
                flat[begin:end].copy_(view, non_blocking=True)
        return flat, self._stream.record_event(), current

    def wait(self, flat: Any, event: Any, stream: Any) -> tuple[Any, Any]:
        """Let the current stream wait for a copy; returns the times before and after."""
        current = self._torch.cuda.current_stream(self.device)
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
        torch = self._torch
        try:
            with observe.tag("offload"):
                found = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except torch.OutOfMemoryError:
            return None
        return found if found.is_pinned() else None
