"""Vulkan's timeline semaphores, and a bridge where a driver does not export them."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import vulkan as vk

from gpumem.errors import TimelineTimeout
from gpumem.interop import Handle, SemaphoreDescriptor, SemaphoreType

if TYPE_CHECKING:
    from vulkan_device import VulkanDevice

OPAQUE_FD = vk.VK_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_FD_BIT
POLL_SECONDS = 0.05  # until a bridge checks whether it is to stop


class SharedTimeline:
    """A timeline semaphore of Vulkan that begins at 0.

    Attributes
    ----------
    handle : VkSemaphore
    exportable : bool
        Whether the driver exports it. Lavapipe does not: use a `Bridge`.
    """

    def __init__(self, device: VulkanDevice) -> None:
        self.device = device
        timeline = vk.VK_SEMAPHORE_TYPE_TIMELINE
        kind = vk.VkSemaphoreTypeCreateInfo(semaphoreType=timeline)
        asked = vk.VkPhysicalDeviceExternalSemaphoreInfo(pNext=kind, handleType=OPAQUE_FD)
        found = vk.vkGetPhysicalDeviceExternalSemaphoreProperties(device.physical, asked)
        exportable = vk.VK_EXTERNAL_SEMAPHORE_FEATURE_EXPORTABLE_BIT
        self.exportable = bool(found.externalSemaphoreFeatures & exportable)
        export = vk.VkExportSemaphoreCreateInfo(handleTypes=OPAQUE_FD) if self.exportable else None
        kind = vk.VkSemaphoreTypeCreateInfo(pNext=export, semaphoreType=timeline)
        info = vk.VkSemaphoreCreateInfo(pNext=kind)
        self.handle = vk.vkCreateSemaphore(device.logical, info, None)

    def descriptor(self) -> SemaphoreDescriptor:
        """Export it: a new descriptor at each call, owned by the result's handle."""
        kind = SemaphoreType.TIMELINE_OPAQUE_FD
        export = vk.vkGetDeviceProcAddr(self.device.logical, "vkGetSemaphoreFdKHR")
        info = vk.VkSemaphoreGetFdInfoKHR(semaphore=self.handle, handleType=OPAQUE_FD)
        handle = Handle(export(self.device.logical, info), kind=kind)
        return SemaphoreDescriptor(handle, kind, device_uuid=self.device.device.uuid)

    def value(self) -> int:
        """Return the value now."""
        return int(vk.vkGetSemaphoreCounterValue(self.device.logical, self.handle))

    def wait(self, value: int, timeout: float = 60) -> None:
        """Let the CPU wait until the value is at least `value`, for `timeout` seconds at most."""
        info = vk.VkSemaphoreWaitInfo(pSemaphores=[self.handle], pValues=[value])
        try:
            vk.vkWaitSemaphores(self.device.logical, info, int(timeout * 1e9))
        except vk.VkTimeout:
            raise TimelineTimeout(f"{value} was not reached in {timeout} s") from None

    def signal(self, value: int) -> None:
        """Set the value from the CPU. It must be above the value now and below queued ones."""
        info = vk.VkSemaphoreSignalInfo(semaphore=self.handle, value=value)
        vk.vkSignalSemaphore(self.device.logical, info)

    def close(self) -> None:
        """Wait for the queue, and destroy it. Idempotent."""
        if self.handle is not None:
            vk.vkQueueWaitIdle(self.device.queue)
            vk.vkDestroySemaphore(self.device.logical, self.handle, None)
            self.handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Bridge:
    """Passes a timeline's values on to another one, from a thread that waits for each.

    It joins a timeline that has no descriptor and a `HostTimeline` of gpumem, in one process and
    in one direction: only the bridge signals the target. If the target cannot follow, it is
    poisoned where it can be, and `close` raises.

    Parameters
    ----------
    source, target : SharedTimeline or HostTimeline
        Not closed before the bridge is.
    """

    def __init__(self, source: Any, target: Any) -> None:
        self._source, self._target = source, target
        self._error: Exception | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bridge", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        passed = 0
        try:
            while not self._stopping.is_set():
                with suppress(TimelineTimeout):
                    self._source.wait(passed + 1, POLL_SECONDS)
                    passed = self._source.value()
                    self._target.signal(passed)
        except Exception as error:
            self._error = error
            if hasattr(self._target, "poison"):
                self._target.poison()

    def close(self) -> None:
        """Stop passing on, and raise the error that ended the bridge before, if there is one."""
        self._stopping.set()
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
