"""What lives on a logical device: destroyed once nothing that was submitted can use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Self, TypeVar

from gpumem.errors import ClosedError
from gpumem.interop.vulkan.logical import LogicalDevice

__all__ = ["Child"]

_Device = TypeVar("_Device", bound=LogicalDevice)


class Child(Generic[_Device]):
    """A buffer or a timeline, counted by its device from `LogicalDevice.making_child` on."""

    _logical: _Device | None = None
    _destroy: Callable[[], None]

    def _live_on(self, logical: _Device, destroy: Callable[[], None]) -> None:
        self._destroy = destroy
        self._logical = logical

    def _open(self) -> _Device:
        """Return the device, if both are open."""
        if self._logical is None:
            raise ClosedError(f"this {type(self).__name__} is closed")
        self._logical.require_open()
        return self._logical

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._logical is None

    def close(self) -> None:
        """Destroy it once what was submitted before has finished; does not wait. Idempotent."""
        logical = self._retire()
        if logical is not None:
            logical.collect()

    def _retire(self) -> _Device | None:
        logical, self._logical = self._logical, None
        if logical is not None:
            logical.retire_child(self._destroy)
            del self._destroy
        return logical

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._retire()
