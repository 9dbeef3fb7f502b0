"""Vulkan's timeline semaphores, and a bridge where their descriptors do not exist."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from operator import index
from typing import Any, Self

from gpumem.device import Capability
from gpumem.errors import (
    DriverError,
    NonMonotonicError,
    TimelineLostError,
    TimelineTimeout,
    UnsupportedHandleTypeError,
)
from gpumem.interop.descriptors import SemaphoreDescriptor, SemaphoreType
from gpumem.interop.vulkan.calls import call, device_function, library, owned_descriptor
from gpumem.interop.vulkan.children import Child
from gpumem.interop.vulkan.logical import LogicalDevice, SemaphoreOperation, make_timeline, wait_for

__all__ = ["Bridge", "VulkanTimeline", "export_semaphore", "timeline_export"]

_EXTENSION = "VK_KHR_external_semaphore_fd"
_LARGEST = (1 << 63) - 1
_FOREVER = (1 << 64) - 1
_TIMEOUT, _DEVICE_LOST = 2, -4  # VkResult
_QUEUED = 64  # how many values are kept before one looks which were reached
_LOOK = 0.05  # seconds until a bridge looks whether it is to stop


def timeline_export(logical: LogicalDevice) -> Capability:
    """Tell whether timelines of this device can be exported and, if not, why."""
    vk = library()
    opaque = vk.VK_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_FD_BIT
    kind = vk.VkSemaphoreTypeCreateInfo(semaphoreType=vk.VK_SEMAPHORE_TYPE_TIMELINE)
    asked = vk.VkPhysicalDeviceExternalSemaphoreInfo(pNext=kind, handleType=opaque)
    said = call("vkGetPhysicalDeviceExternalSemaphoreProperties", logical.physical_device, asked)
    if not said.externalSemaphoreFeatures & vk.VK_EXTERNAL_SEMAPHORE_FEATURE_EXPORTABLE_BIT:
        return Capability(False, f"{logical.physical.name} exports no timeline as a descriptor")
    try:
        device_function(logical.logical_device, "vkGetSemaphoreFdKHR", _EXTENSION)
    except UnsupportedHandleTypeError as error:
        return Capability(False, str(error))
    return Capability(True)


def export_semaphore(logical: LogicalDevice, semaphore: Any) -> SemaphoreDescriptor:
    """Return a descriptor of a VkSemaphore; see `VulkanDevice.export_semaphore`."""
    vk = library()
    able = timeline_export(logical)
    if not able:
        raise UnsupportedHandleTypeError(able.reason)
    asked = vk.VkSemaphoreGetFdInfoKHR(
        semaphore=semaphore, handleType=vk.VK_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_FD_BIT
    )
    function = device_function(logical.logical_device, "vkGetSemaphoreFdKHR", _EXTENSION)
    number = call("vkGetSemaphoreFdKHR", logical.logical_device, asked, function=function)
    return SemaphoreDescriptor(
        owned_descriptor(number, SemaphoreType.TIMELINE_OPAQUE_FD, "the semaphore"),
        SemaphoreType.TIMELINE_OPAQUE_FD,
        device_uuid=logical.device.uuid,
    )


class VulkanTimeline(Child):
    """A timeline semaphore of Vulkan; made by `VulkanDevice.timeline`.

    Attributes
    ----------
    handle : VkSemaphore
        For submissions of the application's own.
    exportable : bool
        Whether `descriptor` gives one.
    """

    def __init__(self, logical: LogicalDevice, initial: int, exportable: bool) -> None:
        self._known = initial
        self._queued: deque[int] = deque()  # what submissions will signal, rising
        self.exportable = exportable
        logical.adopt_child()
        device = logical.logical_device
        try:
            self.handle = handle = make_timeline(device, initial, exportable=exportable)
        except BaseException:
            logical.retire_child(lambda: None)
            raise
        self._live_on(logical, lambda: call("vkDestroySemaphore", device, handle, None))

    def descriptor(self) -> SemaphoreDescriptor:
        """Export it: a descriptor of its own at each call, owned by the result's handle.

        Raises
        ------
        UnsupportedHandleTypeError
            The device cannot; lavapipe is one that cannot.
        """
        return export_semaphore(self._open(), self.handle)

    @property
    def pending(self) -> int:
        """The highest value that was signalled or queued to be signalled here."""
        return self._known

    def value(self) -> int:
        """Return the value now."""
        logical = self._open()
        with logical.lock, self._loss():
            now = int(call("vkGetSemaphoreCounterValue", logical.logical_device, self.handle))
            self._known = max(self._known, now)
            while self._queued and self._queued[0] <= now:
                self._queued.popleft()
        return now

    def wait(self, value: int, timeout: float | None = None) -> None:
        """Let the CPU wait until the value is at least `value`.

        Raises
        ------
        TimelineTimeout
            It took longer than `timeout` seconds.
        TimelineLostError
            The device is lost.
        """
        logical, number = self._open(), value_of(value)
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout {timeout!r} is not a number of seconds from 0 on")
        limit = _FOREVER if timeout is None else min(int(timeout * 1e9), _LARGEST)
        try:
            with self._loss():
                wait_for(logical.logical_device, self.handle, number, limit)
        except DriverError as error:
            if error.code != _TIMEOUT:
                raise
            raise TimelineTimeout(f"{self!r} did not reach {value} in {timeout} s") from None

    def signal(self, value: int) -> None:
        """Set the value from the CPU.

        Raises
        ------
        NonMonotonicError
            It is not above the value now, or not below those that are queued to be signalled
            here: Vulkan would lose the device.
        TimelineLostError
            The device is lost.
        """
        logical = self._open()
        with logical.lock, self._loss():
            number, now = value_of(value), self.value()
            if number <= now:
                raise NonMonotonicError(
                    f"{number} is not above {now}, the value now", value=number, known=now
                )
            if self._queued and number >= self._queued[0]:
                raise NonMonotonicError(
                    f"{number} is not below {self._queued[0]}, which is queued to be signalled",
                    value=number,
                    known=self._queued[0],
                )
            asked = library().VkSemaphoreSignalInfo(semaphore=self.handle, value=number)
            call("vkSignalSemaphore", logical.logical_device, asked)
            self._known = max(self._known, number)

    def waiting(self, value: int) -> SemaphoreOperation:
        """Return a submission's wait for a value."""
        self._open()
        return SemaphoreOperation(self.handle, value_of(value))

    @contextmanager
    def claim(self, value: int) -> Iterator[SemaphoreOperation]:
        """Note a value that is being queued, unless that fails; under the device's lock."""
        self._open()
        if len(self._queued) >= _QUEUED:
            self.value()  # forgets what has been reached
        number, before = value_of(value), self._known
        if number <= before:
            raise NonMonotonicError(
                f"{number} is not above {before}, which was signalled or queued before",
                value=number,
                known=before,
            )
        self._known = number
        self._queued.append(number)
        try:
            yield SemaphoreOperation(self.handle, number)
        except BaseException:
            self._known = before
            self._queued.pop()
            raise

    def __repr__(self) -> str:
        state = f"at least {self._known}" if self._logical is not None else "closed"
        return f"<gpumem.interop.vulkan.VulkanTimeline {state}>"

    @contextmanager
    def _loss(self) -> Iterator[None]:
        try:
            yield
        except DriverError as error:
            if error.code != _DEVICE_LOST:
                raise
            raise TimelineLostError(f"the Vulkan device of {self!r} is lost") from error


class Bridge:
    """Passes a timeline's values on to another one, from a thread that waits for each.

    For a Vulkan timeline that has no descriptor and a `HostTimeline`, in one process. One way only:
    the target is signalled by nobody else. If the source is lost, or the target cannot follow, a
    target that can be poisoned is, and `close` raises.

    Parameters
    ----------
    source, target : VulkanTimeline or HostTimeline
        Not closed before the bridge is.

    Examples
    --------
    >>> from gpumem.interop import HostTimeline
    >>> from gpumem.interop.vulkan import Bridge
    >>> a, b = HostTimeline.create(), HostTimeline.create()
    >>> with Bridge(a, b):
    ...     a.signal(3)
    ...     b.wait(3, timeout=10)
    >>> b.value()
    3
    """

    def __init__(self, source: Any, target: Any) -> None:
        self._source, self._target = source, target
        self._error: Exception | None = None
        self._stopping = threading.Event()
        self._passed = source.value()
        self._thread = threading.Thread(target=self._run, name="gpumem bridge", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                with suppress(TimelineTimeout):
                    self._source.wait(self._passed + 1, _LOOK)
                    self._passed = self._source.value()
                    self._target.signal(self._passed)
        except Exception as error:
            self._error = error
            if hasattr(self._target, "poison"):
                self._target.poison()

    def close(self) -> None:
        """Stop passing on, after what the source has now. Idempotent.

        Raises
        ------
        GpumemError
            What ended the bridge before.
        """
        self._stopping.set()
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def value_of(value: int) -> int:
    """Return a timeline's value as a number."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"a timeline's value is an integer, not {value!r}")
    number = index(value)
    if not 1 <= number <= _LARGEST:
        raise NonMonotonicError(f"value {number} is not from 1 to 2**63 - 1", value=number)
    return number
