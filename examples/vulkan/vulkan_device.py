"""A Vulkan device with one queue, on the physical device that is a gpumem Device.

It is plain Vulkan by the package `vulkan`, and stands for the engine of an application: all that
gpumem needs of it are the descriptors that `SharedBuffer` and `SharedTimeline` export.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Self

import vulkan as vk
from shared_buffer import HostBuffer, SharedBuffer
from shared_timeline import SharedTimeline

import gpumem

EXTENSIONS = (
    "VK_KHR_external_memory_fd",
    "VK_KHR_external_semaphore_fd",
    "VK_EXT_external_memory_host",
)
Points = Sequence[tuple[SharedTimeline, int]]


def physical_device_for(device: gpumem.Device, instance: Any) -> tuple[Any, bool]:
    """Return the VkPhysicalDevice that is a gpumem Device, and whether it is lavapipe.

    A CUDA device is found by its UUID: neither names nor the order identify a device. The memory
    of lavapipe, Mesa's software Vulkan, is the CPU's, as that of the host device.
    """
    names = []
    for physical in vk.vkEnumeratePhysicalDevices(instance):
        identity = vk.VkPhysicalDeviceIDProperties()
        driver = vk.VkPhysicalDeviceDriverProperties(pNext=identity)
        info = vk.VkPhysicalDeviceProperties2(pNext=driver)
        vk.vkGetPhysicalDeviceProperties2(physical, info)
        uuid = bytes(identity.deviceUUID).hex()
        is_lavapipe = driver.driverID == vk.VK_DRIVER_ID_MESA_LLVMPIPE
        if is_lavapipe if device.type == "host" else uuid == device.uuid:
            return physical, is_lavapipe
        names.append(f"{vk.ffi.string(info.properties.deviceName).decode()} ({uuid})")
    raise LookupError(f"no Vulkan device is {device} ({device.uuid}): there are {names}")


class VulkanDevice:
    """An instance, a logical device and a queue. One thread at a time submits to it.

    Attributes
    ----------
    device : gpumem.Device
    instance, physical, logical, queue
        Vulkan's handles.
    queue_family : int
    is_lavapipe : bool
    """

    def __init__(self, device: gpumem.Device | str) -> None:
        self.device = gpumem.Device(device)
        self._submitted = 0
        self._running: deque[tuple[int, Any]] = deque()  # submissions and their commands
        self._idle: list[Any] = []  # commands to record again
        with ExitStack() as made:
            application = vk.VkApplicationInfo(apiVersion=vk.VK_MAKE_VERSION(1, 2, 0))
            info = vk.VkInstanceCreateInfo(pApplicationInfo=application)
            self.instance = vk.vkCreateInstance(info, None)
            made.callback(vk.vkDestroyInstance, self.instance, None)
            self.physical, self.is_lavapipe = physical_device_for(self.device, self.instance)
            self._make_logical()
            made.callback(vk.vkDestroyDevice, self.logical, None)
            flags = vk.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT
            pool = vk.VkCommandPoolCreateInfo(flags=flags, queueFamilyIndex=self.queue_family)
            self._pool = vk.vkCreateCommandPool(self.logical, pool, None)
            made.callback(vk.vkDestroyCommandPool, self.logical, self._pool, None)
            self._progress = made.enter_context(SharedTimeline(self))
            self._made = made.pop_all()

    def _make_logical(self) -> None:
        """Make a VkDevice with timelines, those of EXTENSIONS that there are, and one queue."""
        families = vk.vkGetPhysicalDeviceQueueFamilyProperties(self.physical)
        self.queue_family = next(
            number
            for number, family in enumerate(families)
            if family.queueFlags & vk.VK_QUEUE_COMPUTE_BIT
        )
        queue = vk.VkDeviceQueueCreateInfo(
            queueFamilyIndex=self.queue_family, queueCount=1, pQueuePriorities=[1.0]
        )
        found = vk.vkEnumerateDeviceExtensionProperties(self.physical, None)
        there = {each.extensionName for each in found}
        info = vk.VkDeviceCreateInfo(
            pNext=vk.VkPhysicalDeviceTimelineSemaphoreFeatures(timelineSemaphore=vk.VK_TRUE),
            pQueueCreateInfos=[queue],
            ppEnabledExtensionNames=[name for name in EXTENSIONS if name in there],
        )
        self.logical = vk.vkCreateDevice(self.physical, info, None)
        self.queue = vk.vkGetDeviceQueue(self.logical, self.queue_family, 0)

    def allocate(self, nbytes: int) -> SharedBuffer:
        """Make a buffer that can be exported."""
        return SharedBuffer(self, nbytes)

    def import_host(self, memory: Any) -> HostBuffer:
        """Make a buffer over memory of this process, such as an array; see `HostBuffer`."""
        return HostBuffer(self, memory)

    def timeline(self) -> SharedTimeline:
        """Make a timeline semaphore that begins at 0."""
        return SharedTimeline(self)

    # ---- submissions -----------------------------------------------------------------------------

    def run(
        self,
        record: Callable[[Any], None] | None = None,
        *,
        wait: Points = (),
        signal: Points = (),
    ) -> None:
        """Submit commands; the CPU waits for nothing.

        Parameters
        ----------
        record : callable, optional
            ``record(commands)`` records them into a VkCommandBuffer.
        wait, signal : sequence of (SharedTimeline, int)
            Points that the commands wait for, and points that they signal when they are done.
        """
        commands = [] if record is None else [self._record(record)]
        self._submitted += 1
        signal = [*signal, (self._progress, self._submitted)]
        values = vk.VkTimelineSemaphoreSubmitInfo(
            pWaitSemaphoreValues=[value for _, value in wait] or None,
            pSignalSemaphoreValues=[value for _, value in signal],
        )
        work = vk.VkSubmitInfo(
            pNext=values,
            pWaitSemaphores=[timeline.handle for timeline, _ in wait] or None,
            pWaitDstStageMask=[vk.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT] * len(wait) or None,
            pCommandBuffers=commands or None,
            pSignalSemaphores=[timeline.handle for timeline, _ in signal],
        )
        vk.vkQueueSubmit(self.queue, 1, [work], None)
        self._running.extend((self._submitted, each) for each in commands)

    def _record(self, record: Callable[[Any], None]) -> Any:
        """Record into a command buffer that no unfinished submission uses."""
        completed = self._progress.value()
        while self._running and self._running[0][0] <= completed:
            self._idle.append(self._running.popleft()[1])
        if not self._idle:
            info = vk.VkCommandBufferAllocateInfo(commandPool=self._pool, commandBufferCount=1)
            self._idle.append(vk.vkAllocateCommandBuffers(self.logical, info)[0])
        commands = self._idle.pop()
        once = vk.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT
        vk.vkBeginCommandBuffer(commands, vk.VkCommandBufferBeginInfo(flags=once))
        record(commands)
        vk.vkEndCommandBuffer(commands)
        return commands

    def fill(
        self,
        buffer: SharedBuffer | HostBuffer,
        word: int,
        *,
        wait: Points = (),
        signal: Points = (),
    ) -> None:
        """Write a 32-bit word over a buffer; as `run`."""

        def record(commands: Any) -> None:
            vk.vkCmdFillBuffer(commands, buffer.handle, 0, buffer.nbytes // 4 * 4, word)

        self.run(_between_barriers(record), wait=wait, signal=signal)

    def copy(
        self,
        destination: SharedBuffer | HostBuffer,
        source: SharedBuffer | HostBuffer,
        *,
        nbytes: int | None = None,
        destination_offset: int = 0,
        wait: Points = (),
        signal: Points = (),
    ) -> None:
        """Copy the first bytes of a buffer, all of them without `nbytes`; as `run`."""
        size = source.nbytes if nbytes is None else nbytes
        part = vk.VkBufferCopy(srcOffset=0, dstOffset=destination_offset, size=size)

        def record(commands: Any) -> None:
            vk.vkCmdCopyBuffer(commands, source.handle, destination.handle, 1, [part])

        self.run(_between_barriers(record), wait=wait, signal=signal)

    def synchronize(self) -> None:
        """Wait until everything that was submitted has finished."""
        self._progress.wait(self._submitted)

    def close(self) -> None:
        """Wait for what was submitted, and destroy the device. Its buffers are closed before."""
        self._made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _between_barriers(record: Callable[[Any], None]) -> Callable[[Any], None]:
    """Order commands after earlier writes of the queue and before all later accesses.

    Transfers of a buffer between queue families, from and to VK_QUEUE_FAMILY_EXTERNAL, are left
    out, which drivers of NVIDIA and lavapipe allow; in an application they belong here.
    """

    def recorded(commands: Any) -> None:
        _barrier(commands, vk.VK_ACCESS_MEMORY_WRITE_BIT, vk.VK_ACCESS_TRANSFER_WRITE_BIT)
        record(commands)
        _barrier(commands, vk.VK_ACCESS_TRANSFER_WRITE_BIT, vk.VK_ACCESS_HOST_READ_BIT)

    return recorded


def _barrier(commands: Any, before: int, after: int) -> None:
    stages = vk.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT
    access = vk.VkMemoryBarrier(
        srcAccessMask=before, dstAccessMask=after | vk.VK_ACCESS_MEMORY_READ_BIT
    )
    later = stages | vk.VK_PIPELINE_STAGE_HOST_BIT
    vk.vkCmdPipelineBarrier(commands, stages, later, 0, 1, [access], 0, None, 0, None)
