"""Frameworks with several places for their settings, such as devices or environment variables."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from gpumem.device import devices
from gpumem.errors import IntegrationError
from gpumem.integrations._common.resources import Resources
from gpumem.integrations._common.switch import Framework, Setting
from gpumem.integrations._common.versions import require_gpu


class Places(Framework):
    """A framework that is switched by a value at each of several places, all or none."""

    @abstractmethod
    def wanted(self, setting: Setting) -> Mapping[Any, Any]:
        """Return the values for a setting, by place; raise if the framework cannot have them."""

    @abstractmethod
    def get(self, place: Any) -> Any:
        """Return the value at a place."""

    @abstractmethod
    def put(self, place: Any, value: Any) -> None:
        """Set the value at a place."""

    def attach(self, setting: Setting) -> dict[Any, Any]:
        """Set the values for a setting, and return the earlier ones."""
        after = self.wanted(setting)
        before = {place: self.get(place) for place in after}
        self._put_all(after)
        return before

    def restore(self, before: dict[Any, Any]) -> None:
        """Set the earlier values."""
        self._put_all(before)

    def replace(self, before: dict[Any, Any], setting: Setting) -> dict[Any, Any]:
        """Switch to another setting; places that it leaves out are restored."""
        met = self.attach(setting)
        self._put_all({place: each for place, each in before.items() if place not in met})
        return {place: before.get(place, each) for place, each in met.items()}

    def _put_all(self, after: Mapping[Any, Any]) -> None:
        done: dict[Any, Any] = {}
        try:
            for place, value in after.items():
                met = self.get(place)
                self.put(place, value)
                done[place] = met
        except BaseException:
            for place, value in done.items():
                self.put(place, value)
            raise


class PerDevice(Places):
    """A framework with a source of memory for each device: given ones are switched, or all."""

    device_type = "cuda"

    @abstractmethod
    def over(self, resources: Resources, index: int) -> Any:
        """Make a source over gpumem; it may make the default resource later."""

    def wanted(self, setting: Setting) -> dict[int, Any]:
        """Return a source for each device."""
        resources = setting.resources
        chosen = list(resources.given) or [
            each.index for each in devices() if each.type == self.device_type
        ]
        if not chosen:
            require_gpu(self.name)
            raise IntegrationError(f"{self.name} cannot be switched: no CUDA device is usable")
        return {index: self.over(resources, index) for index in chosen}
