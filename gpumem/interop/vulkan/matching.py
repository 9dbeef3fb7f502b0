"""Which physical device of Vulkan is a gpumem Device: by identity, never by name or by order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpumem.device import Device
from gpumem.errors import DeviceMismatchError
from gpumem.interop.vulkan.calls import call, library

__all__ = [
    "PhysicalDevice",
    "make_instance",
    "physical_device_for",
    "physical_devices",
    "require_same",
]


@dataclass(frozen=True)
class PhysicalDevice:
    """One of Vulkan's devices and its identity.

    Attributes
    ----------
    handle : VkPhysicalDevice
    name : str
    uuid : str
        ``deviceUUID`` as 32 hexadecimal digits.
    is_lavapipe : bool
        Mesa's software Vulkan: its memory is the CPU's.
    """

    handle: Any
    name: str
    uuid: str
    is_lavapipe: bool

    def is_of(self, device: Device) -> bool:
        """Tell whether it shares memory with a gpumem Device.

        A CUDA device's own is the one with its UUID. The host device's memory is the CPU's, and
        so is that of every lavapipe.
        """
        return self.is_lavapipe if device.type == "host" else self.uuid == device.uuid

    def __str__(self) -> str:
        return f"{self.name} ({self.uuid})"


def make_instance() -> Any:
    """Return a VkInstance of Vulkan 1.2, without layers or extensions."""
    vk = library()
    application = vk.VkApplicationInfo(
        pApplicationName="gpumem", apiVersion=vk.VK_MAKE_VERSION(1, 2, 0)
    )
    return call("vkCreateInstance", vk.VkInstanceCreateInfo(pApplicationInfo=application), None)


def physical_devices(instance: Any) -> list[PhysicalDevice]:
    """Return what an instance lists."""
    return [identify(each) for each in call("vkEnumeratePhysicalDevices", instance)]


def identify(handle: Any) -> PhysicalDevice:
    """Return a physical device with its identity."""
    vk = library()
    identity = vk.VkPhysicalDeviceIDProperties()
    driver = vk.VkPhysicalDeviceDriverProperties(pNext=identity)
    info = vk.VkPhysicalDeviceProperties2(pNext=driver)
    call("vkGetPhysicalDeviceProperties2", handle, info)
    return PhysicalDevice(
        handle,
        vk.ffi.string(info.properties.deviceName).decode(),
        bytes(identity.deviceUUID).hex(),
        driver.driverID == vk.VK_DRIVER_ID_MESA_LLVMPIPE,
    )


def physical_device_for(device: Device | str, instance: Any) -> PhysicalDevice:
    """Return the physical device that shares memory with a gpumem Device.

    Parameters
    ----------
    device : Device or str
        A host device takes lavapipe, Mesa's software Vulkan.
    instance : VkInstance
        Of Vulkan 1.2 or later.

    Raises
    ------
    DeviceMismatchError
        There is none; the message lists the devices.
    """
    where = Device(device)
    found = physical_devices(instance)
    for each in found:
        if each.is_of(where):
            return each
    there = ", ".join(map(str, found)) or "none"
    raise DeviceMismatchError(f"no Vulkan device {_wanted(where)}; there: {there}")


def require_same(handle: Any, device: Device) -> PhysicalDevice:
    """Return an application's physical device, if it shares memory with `device`."""
    chosen = identify(handle)
    if not chosen.is_of(device):
        raise DeviceMismatchError(f"the Vulkan device {chosen} is not one that {_wanted(device)}")
    return chosen


def _wanted(device: Device) -> str:
    if device.type == "host":
        return f"is Mesa's software Vulkan, as {device} takes"
    return f"has the UUID {device.uuid} of {device}"
