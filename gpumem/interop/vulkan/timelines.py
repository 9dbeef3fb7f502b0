"""Vulkan's timeline semaphores, and a bridge where their descriptors do not exist."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

from gpumem._support.closing import close_after_body
from gpumem.device import Capability
from gpumem.errors import (
    DriverError,
    NonMonotonicError,
    TimelineLostError,
    TimelineTimeout,
    UnsupportedHandleTypeError,
)
from gpumem.interop.descriptors import SemaphoreDescriptor, SemaphoreType
from gpumem.interop.timelines._timeline import value_of
from gpumem.interop.vulkan.calls import (
    call,
    device_function,
    library,
    owned_descriptor,
    typed_handle,
)
from gpumem.interop.vulkan.children import Child
from gpumem.interop.vulkan.logical import LogicalDevice, SemaphoreOperation, make_timeline, wait_for

__all__ = ["Bridge", "TimelineDevice", "VulkanTimeline"]

_EXTENSION, _EXPORT = "VK_KHR_external_semaphore_fd", "vkGetSemaphoreFdKHR"
_TIMEOUT, _DEVICE_LOST = 2, -4  # VkResult
_QUEUED = 64  # how many values are kept before one looks which were reached
_LOOK = 0.05  # seconds until a bridge looks whether it is to stop


class TimelineDevice(LogicalDevice):
    """What a `VulkanDevice` does with timelines."""

    @property
    def can_export_timelines(self) -> Capability:
        """Whether `VulkanTimeline.descriptor` works here and, if not, why."""
        vk = library()
        opaque = vk.VK_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_FD_BIT
        kind = vk.VkSemaphoreTypeCreateInfo(semaphoreType=vk.VK_SEMAPHORE_TYPE_TIMELINE)
        info = vk.VkPhysicalDeviceExternalSemaphoreInfo(pNext=kind, handleType=opaque)
        found = call("vkGetPhysicalDeviceExternalSemaphoreProperties", self.physical_device, info)
        if not found.externalSemaphoreFeatures & vk.VK_EXTERNAL_SEMAPHORE_FEATURE_EXPORTABLE_BIT:
            return Capability(False, f"{self.physical.name} exports no timeline as a descriptor")
        try:
            device_function(self.logical_device, _EXPORT, _EXTENSION)
        except UnsupportedHandleTypeError as error:
            return Capability(False, str(error))
        return Capability(True)

    def timeline(self, initial: int = 0) -> VulkanTimeline:
        """Make a timeline semaphore, which can be exported where the device exports any.

        Parameters
        ----------
        initial : int
            Its first value, from 0.
        """
        if initial != 0:
            initial = value_of(initial)
        return VulkanTimeline(self, initial, bool(self.can_export_timelines))

    def export_semaphore(self, semaphore: Any) -> SemaphoreDescriptor:
        """Export a timeline semaphore of the application's.

        Parameters
        ----------
        semaphore : VkSemaphore
            Made with ``VkExportSemaphoreCreateInfo`` for an opaque descriptor.

        Raises
        ------
        UnsupportedHandleTypeError
            The device exports none.
        BadHandleError
            It was not made for export.
        DriverError
            Vulkan refused.
        """
        vk = library()
        able = self.can_export_timelines
        if not able:
            raise UnsupportedHandleTypeError(able.reason)
        kind = SemaphoreType.TIMELINE_OPAQUE_FD
        info = vk.VkSemaphoreGetFdInfoKHR(
            semaphore=typed_handle("VkSemaphore", semaphore),
            handleType=vk.VK_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_FD_BIT,
        )
        function = device_function(self.logical_device, _EXPORT, _EXTENSION)
        number = call(_EXPORT, self.logical_device, info, function=function)
        handle = owned_descriptor(number, kind, "the semaphore")
        return SemaphoreDescriptor(handle, kind, device_uuid=self.device.uuid)


class VulkanTimeline(Child[TimelineDevice]):
    """A timeline semaphore of Vulkan; made by `VulkanDevice.timeline`.

    Attributes
    ----------
    handle : VkSemaphore
        For submissions of the application's own.
    exportable : bool
        Whether `descriptor` gives one.
    """

    def __init__(self, device: TimelineDevice, initial: int, exportable: bool) -> None:
        self._known = initial
        self._queued: deque[int] = deque()  # what submissions will signal, rising
        self.exportable = exportable
        logical = device.logical_device
        with device.making_child():
            self.handle = handle = make_timeline(logical, initial, exportable=exportable)
        self._live_on(device, lambda: call("vkDestroySemaphore", logical, handle, None))

    def descriptor(self) -> SemaphoreDescriptor:
        """Export it: a descriptor of its own at each call, owned by the result's handle.

        Raises
        ------
        UnsupportedHandleTypeError
            The device cannot; lavapipe is one that cannot.
        """
        return self._open().export_semaphore(self.handle)

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
        """Let the CPU wait until the value is at least `value`; Ctrl-C ends the wait.

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
        try:
            with self._loss():
                wait_for(logical.logical_device, self.handle, number, timeout)
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
            info = library().VkSemaphoreSignalInfo(semaphore=self.handle, value=number)
            call("vkSignalSemaphore", logical.logical_device, info)
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
    only the bridge signals the target. If the source is lost, or the target cannot follow, a
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        close_after_body(self.close, error)
