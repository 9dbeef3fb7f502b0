"""`VulkanDevice`: Vulkan's side of a gpumem Device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, TypeAlias

from gpumem.device import Capability, Device
from gpumem.errors import AlignmentError, InvalidDescriptorError
from gpumem.interop.vulkan.calls import call, library, struct_array
from gpumem.interop.vulkan.matching import make_instance, physical_device_for
from gpumem.interop.vulkan.memory import BufferDevice, VulkanBuffer
from gpumem.interop.vulkan.timelines import TimelineDevice, VulkanTimeline

__all__ = ["VulkanDevice", "availability"]

Point: TypeAlias = tuple[VulkanTimeline, int]


def availability(device: Device | str) -> Capability:
    """Tell whether Vulkan can share memory with a device and, if not, why. Never raises."""
    try:
        where = Device(device)
        instance = make_instance()
        try:
            physical_device_for(where, instance)
        finally:
            call("vkDestroyInstance", instance, None)
    except Exception as error:
        return Capability(False, str(error))
    return Capability(True)


class VulkanDevice(BufferDevice, TimelineDevice):
    """Vulkan on the physical device that is a gpumem Device, with one queue.

    What it makes is plain Vulkan: `VulkanBuffer.handle` and the others are the package's own
    handles, for an application's own pipelines. It makes what it is not given.

    Parameters
    ----------
    device : Device or str
        A CUDA device is found by its UUID. A host device takes lavapipe.
    instance : VkInstance, optional
        The application's, of Vulkan 1.2 or later.
    physical_device, logical_device, queue, queue_family : optional
        The application's, all together and with their instance: handles of the package `vulkan`,
        or integers as other bindings give them. The logical device has timeline semaphores and
        the extensions `EXTENSIONS`, as far as they are used. They stay the application's; the
        queue is used under this object's `lock`, which the application's submissions take, too.

    Raises
    ------
    ImportError
        The package `vulkan` or Vulkan's loader is not installed.
    DeviceMismatchError
        No Vulkan device, or not the given one, is this device; the message lists the devices.
    ConfigError
        Only some of the handles that go together are given.
    DriverError
        Vulkan refused.

    Notes
    -----
    A timeline that Vulkan signals orders its work before the work that waits. Transfers of a
    buffer between queue families, from and to ``VK_QUEUE_FAMILY_EXTERNAL``, belong into the
    application's barriers; `fill` and `copy` leave them out, which drivers of NVIDIA and lavapipe
    allow.

    Examples
    --------
    >>> from gpumem.interop import Importer, vulkan
    >>> if vulkan.availability("host"):
    ...     with vulkan.VulkanDevice("host") as device, device.allocate(1 << 20) as buffer:
    ...         importer = Importer.for_device("host")
    ...         memory = importer.import_memory(buffer.descriptor(), consume=True)
    ...         _ = device.fill(buffer, 0x40490FDB)
    ...         device.synchronize()
    ...         assert memory.tensor(1 << 18, "float32").numpy()[-1] > 3.14
    """

    def run(
        self,
        record: Callable[[Any], None] | None = None,
        *,
        wait: Point | Iterable[Point] = (),
        signal: Point | Iterable[Point] = (),
    ) -> int:
        """Submit commands; the CPU waits for nothing.

        Parameters
        ----------
        record : callable, optional
            ``record(commands)`` records them into a VkCommandBuffer. It must not submit.
        wait, signal : (VulkanTimeline, int) or several of them
            What the commands wait for, and what they signal when they are done.

        Returns
        -------
        int
            The submission's number.

        Raises
        ------
        NonMonotonicError
            A value to signal is not above those that its timeline has or will have.
        DriverError
            Vulkan refused; the timelines are as they were.
        """
        with self.lock, ExitStack() as claims:
            waits = [timeline.waiting(value) for timeline, value in _points(wait, "wait")]
            signals = [
                claims.enter_context(timeline.claim(value))
                for timeline, value in _points(signal, "signal")
            ]
            return self.submit(record, wait=waits, signal=signals)

    def fill(
        self,
        buffer: VulkanBuffer,
        word: int,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        wait: Point | Iterable[Point] = (),
        signal: Point | Iterable[Point] = (),
    ) -> int:
        """Write a 32-bit word over a buffer, or over part of it; as `run`.

        Raises
        ------
        AlignmentError
            `offset` or `nbytes` is not a multiple of 4.
        OutOfBoundsError
            The part reaches beyond the buffer.
        """
        size = buffer.nbytes // 4 * 4 - offset if nbytes is None else nbytes
        buffer.require_range(offset, size, "fill")
        for name, value in (("offset", offset), ("nbytes", size)):
            if value % 4:
                raise AlignmentError(f"fill: {name} {value} is not a multiple of 4")
        if isinstance(word, bool) or not isinstance(word, int) or not 0 <= word < 1 << 32:
            raise InvalidDescriptorError(f"fill: word {word!r} is not from 0 to 2**32 - 1")

        def record(commands: Any) -> None:
            if size:
                call("vkCmdFillBuffer", commands, buffer.handle, offset, size, word)

        return self.run(_between_barriers(record), wait=wait, signal=signal)

    def copy(
        self,
        destination: VulkanBuffer,
        source: VulkanBuffer,
        *,
        nbytes: int | None = None,
        destination_offset: int = 0,
        source_offset: int = 0,
        wait: Point | Iterable[Point] = (),
        signal: Point | Iterable[Point] = (),
    ) -> int:
        """Copy bytes of one buffer into another; as `run`.

        `nbytes` None is what the source has from its offset on.

        Raises
        ------
        OutOfBoundsError
            It would reach beyond one of them.
        """
        size = source.nbytes - source_offset if nbytes is None else nbytes
        source.require_range(source_offset, size, "copy's source")
        destination.require_range(destination_offset, size, "copy's destination")

        def record(commands: Any) -> None:
            part = library().VkBufferCopy(
                srcOffset=source_offset, dstOffset=destination_offset, size=size
            )
            if size:
                parts = struct_array("VkBufferCopy", part)
                call("vkCmdCopyBuffer", commands, source.handle, destination.handle, 1, parts)

        return self.run(_between_barriers(record), wait=wait, signal=signal)


def _points(given: Any, what: str) -> list[Point]:
    """Return points as a list; one alone is a pair of a timeline and a number."""
    points = list(given)
    if points and isinstance(points[0], VulkanTimeline):
        points = [tuple(points)]
    for each in points:
        if not (isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], VulkanTimeline)):
            raise TypeError(f"{what}: {each!r} is not a pair of a VulkanTimeline and a value")
    return points


def _between_barriers(record: Callable[[Any], None]) -> Callable[[Any], None]:
    """Record commands behind earlier writes of the queue and before all later reads."""

    def recorded(commands: Any) -> None:
        vk = library()
        _barrier(commands, vk.VK_ACCESS_MEMORY_WRITE_BIT, vk.VK_ACCESS_TRANSFER_WRITE_BIT)
        record(commands)
        _barrier(commands, vk.VK_ACCESS_TRANSFER_WRITE_BIT, vk.VK_ACCESS_HOST_READ_BIT)

    return recorded


def _barrier(commands: Any, before: int, after: int) -> None:
    vk = library()
    everything = vk.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT
    behind = everything | vk.VK_PIPELINE_STAGE_HOST_BIT
    access = vk.VkMemoryBarrier(
        srcAccessMask=before, dstAccessMask=after | vk.VK_ACCESS_MEMORY_READ_BIT
    )
    barriers = struct_array("VkMemoryBarrier", access)
    call("vkCmdPipelineBarrier", commands, everything, behind, 0, 1, barriers, 0, None, 0, None)
