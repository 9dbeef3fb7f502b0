"""Frameworks that hold one source of memory for each device."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from gpumem.device import devices
from gpumem.errors import IntegrationError
from gpumem.integrations._common.resources import Resources
from gpumem.integrations._common.switch import Framework, Setting
from gpumem.integrations._common.versions import require_gpu

__all__ = ["PerDevice"]


class PerDevice(Framework):
    """A framework with a switch for each device: those that were named are switched, or all."""

    device_type = "cuda"

    @abstractmethod
    def get(self, index: int) -> Any:
        """Return the source of a device's memory."""

    @abstractmethod
    def put(self, index: int, source: Any) -> None:
        """Set the source of a device's memory."""

    @abstractmethod
    def over(self, resources: Resources, index: int) -> Any:
        """Make a source over gpumem; it may make the default resource later."""

    def attach(self, setting: Setting) -> dict[int, Any]:
        """Set gpumem's sources, all or none, and return the earlier ones."""
        resources = setting.resources
        after = {index: self.over(resources, index) for index in self._chosen(resources)}
        before = {index: self.get(index) for index in after}
        self._put_all(after)
        return before

    def restore(self, before: dict[int, Any]) -> None:
        """Set the earlier sources, all or none."""
        self._put_all(before)

    def replace(self, before: dict[int, Any], setting: Setting) -> dict[int, Any]:
        """Switch to other devices or sources; devices that are left out are restored."""
        met = self.attach(setting)
        self._put_all({index: each for index, each in before.items() if index not in met})
        return {index: before.get(index, each) for index, each in met.items()}

    def _chosen(self, resources: Resources) -> list[int]:
        chosen = list(resources.given) or [
            each.index for each in devices() if each.type == self.device_type
        ]
        if not chosen:
            require_gpu(self.name)
            raise IntegrationError(f"{self.name} cannot be switched: no CUDA device is usable")
        return chosen

    def _put_all(self, after: dict[int, Any]) -> None:
        done: dict[int, Any] = {}
        try:
            for index, source in after.items():
                met = self.get(index)
                self.put(index, source)
                done[index] = met
        except BaseException:
            for index, source in done.items():
                self.put(index, source)
            raise
