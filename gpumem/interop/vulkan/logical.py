"""A logical device with one queue: made here or the application's, and what is submitted to it.

Every submission signals a timeline of the logical device's own. What a submission uses, command
buffers and dropped buffers, is given back when that timeline has passed it: nothing waits for it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import inf
from typing import Any

from gpumem._support.closing import close_after_body
from gpumem.device import Device
from gpumem.errors import ClosedError, ConfigError, DriverError, InUseError
from gpumem.interop.vulkan.calls import call, library, struct_array, typed_handle
from gpumem.interop.vulkan.matching import (
    PhysicalDevice,
    make_instance,
    physical_device_for,
    require_same,
)

__all__ = ["EXTENSIONS", "LogicalDevice", "SemaphoreOperation"]

EXTENSIONS = (
    "VK_KHR_external_memory_fd",
    "VK_KHR_external_semaphore_fd",
    "VK_EXT_external_memory_host",
)
_SLICE = 0.1  # seconds of a wait until signals are handled
_TIMEOUT = 2  # VkResult


@dataclass(frozen=True)
class SemaphoreOperation:
    """A submission's wait or signal: which semaphore, which value."""

    semaphore: Any
    value: int


class LogicalDevice:
    """Handles, a queue with its lock, and submissions in order."""

    def __init__(
        self,
        device: Device | str,
        instance: Any = None,
        physical_device: Any = None,
        logical_device: Any = None,
        queue: Any = None,
        queue_family: int | None = None,
    ) -> None:
        self.device = Device(device)
        self._closed = True
        self.lock = threading.RLock()
        self._process = os.getpid()
        self._children = 0
        self._dropped: deque[Callable[[], None]] = deque()  # finalizers append, without the lock
        self._submitted = 0
        self._flying: deque[tuple[int, Callable[[], None]]] = deque()
        self._idle_commands: list[Any] = []
        self._owned: list[Callable[[], None]] = []  # what close() destroys, last first
        given = (physical_device, logical_device, queue, queue_family)
        adopts = any(each is not None for each in given)
        if adopts and any(each is None for each in (instance, *given)):
            raise ConfigError(
                "instance, physical_device, logical_device, queue and queue_family go together"
            )
        try:
            if instance is None:
                instance = self._make_instance()
            self._instance = typed_handle("VkInstance", instance)
            if adopts:
                self._adopt(physical_device, logical_device, queue, queue_family)
            else:
                self._make_device()
            self._make_submissions()
        except BaseException:
            self._destroy()
            raise
        self._closed = False

    # ---- its parts -------------------------------------------------------------------------------

    def _make_instance(self) -> Any:
        instance = make_instance()
        self._owned.append(lambda: call("vkDestroyInstance", instance, None))
        return instance

    def _make_device(self) -> None:
        self._found = physical_device_for(self.device, self._instance)
        self._family = queue_family_of(self._found.handle)
        self._logical = logical = make_device(self._found.handle, self._family)
        self._owned.append(lambda: call("vkDestroyDevice", logical, None))
        self._queue = call("vkGetDeviceQueue", logical, self._family, 0)

    def _adopt(self, physical: Any, logical: Any, queue: Any, family: Any) -> None:
        self._found = require_same(typed_handle("VkPhysicalDevice", physical), self.device)
        self._logical = typed_handle("VkDevice", logical)
        self._queue = typed_handle("VkQueue", queue)
        self._family = family

    def _make_submissions(self) -> None:
        vk, logical = library(), self._logical
        flags = (
            vk.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT
            | vk.VK_COMMAND_POOL_CREATE_TRANSIENT_BIT
        )
        info = vk.VkCommandPoolCreateInfo(flags=flags, queueFamilyIndex=self._family)
        self._pool = pool = call("vkCreateCommandPool", logical, info, None)
        self._owned.append(lambda: call("vkDestroyCommandPool", logical, pool, None))
        self._progress = progress = make_timeline(logical, 0)
        self._owned.append(lambda: call("vkDestroySemaphore", logical, progress, None))

    # A closed device's handles are gone: using one is a ClosedError here, not a crash in Vulkan.

    @property
    def instance(self) -> Any:
        """The VkInstance."""
        self.require_open()
        return self._instance

    @property
    def physical(self) -> PhysicalDevice:
        """The physical device and its identity."""
        self.require_open()
        return self._found

    @property
    def physical_device(self) -> Any:
        """The VkPhysicalDevice."""
        return self.physical.handle

    @property
    def logical_device(self) -> Any:
        """The VkDevice."""
        self.require_open()
        return self._logical

    @property
    def queue(self) -> Any:
        """The VkQueue; hold `lock` to submit to it."""
        self.require_open()
        return self._queue

    @property
    def queue_family(self) -> int:
        """The index of the queue's family."""
        return self._family

    # ---- submissions -----------------------------------------------------------------------------

    def submit(
        self,
        record: Callable[[Any], None] | None = None,
        *,
        wait: Iterable[SemaphoreOperation] = (),
        signal: Iterable[SemaphoreOperation] = (),
    ) -> int:
        """Queue commands behind what was submitted before; returns the submission's number."""
        with self.lock:
            self.require_open()
            self._collect(self.completed())
            commands = None if record is None else self._record(record)
            number = self._submitted + 1
            done = SemaphoreOperation(self._progress, number)
            try:
                self._queue_submit(commands, tuple(wait), (*signal, done))
            except BaseException:
                if commands is not None:
                    self._idle_commands.append(commands)
                raise
            self._submitted = number
            if commands is not None:
                self._flying.append((number, lambda: self._idle_commands.append(commands)))
            return number

    def _record(self, record: Callable[[Any], None]) -> Any:
        vk = library()
        commands = self._idle_commands.pop() if self._idle_commands else self._new_commands()
        try:
            call(
                "vkBeginCommandBuffer",
                commands,
                vk.VkCommandBufferBeginInfo(flags=vk.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT),
            )
            record(commands)
            call("vkEndCommandBuffer", commands)
        except BaseException:
            self._idle_commands.append(commands)  # beginning it again resets it
            raise
        return commands

    def _new_commands(self) -> Any:
        vk = library()
        info = vk.VkCommandBufferAllocateInfo(
            commandPool=self._pool,
            level=vk.VK_COMMAND_BUFFER_LEVEL_PRIMARY,
            commandBufferCount=1,
        )
        return call("vkAllocateCommandBuffers", self.logical_device, info)[0]

    def _queue_submit(
        self,
        commands: Any,
        wait: tuple[SemaphoreOperation, ...],
        signal: tuple[SemaphoreOperation, ...],
    ) -> None:
        vk = library()
        values = vk.VkTimelineSemaphoreSubmitInfo(
            pWaitSemaphoreValues=[each.value for each in wait] or None,
            pSignalSemaphoreValues=[each.value for each in signal],
        )
        everything = [vk.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT] * len(wait)
        work = vk.VkSubmitInfo(
            pNext=values,
            pWaitSemaphores=[each.semaphore for each in wait] or None,
            pWaitDstStageMask=everything or None,
            pCommandBuffers=None if commands is None else [commands],
            pSignalSemaphores=[each.semaphore for each in signal],
        )
        call("vkQueueSubmit", self.queue, 1, struct_array("VkSubmitInfo", work), None)

    def completed(self) -> int:
        """Return the number of the last submission that is done."""
        return int(call("vkGetSemaphoreCounterValue", self.logical_device, self._progress))

    def synchronize(self) -> None:
        """Wait until everything that was submitted here has finished; Ctrl-C ends the wait.

        Raises
        ------
        DriverError
            The device is lost.
        """
        with self.lock:
            self.require_open()
            last = self._submitted
        wait_for(self.logical_device, self._progress, last)
        with self.lock:
            self._collect(last)

    # ---- what it made ----------------------------------------------------------------------------

    @contextmanager
    def making_child(self) -> Iterator[ExitStack]:
        """Count a buffer or timeline that is being made here; what a failure leaves is undone."""
        with self.lock:
            self.require_open()
            self._children += 1
            self._collect(self.completed())
        with ExitStack() as undo:
            undo.callback(self.retire_child, lambda: None)
            yield undo
            undo.pop_all()

    def retire_child(self, destroy: Callable[[], None]) -> None:
        """Destroy a buffer or timeline once what was submitted so far is done; never waits.

        A finalizer calls it, which may run while this thread holds the lock.
        """
        self._dropped.append(destroy)

    def collect(self) -> None:
        """Destroy what was dropped and is not in use by unfinished work any more; never waits."""
        if self._closed or self._process != os.getpid():
            return
        with self.lock:
            self._collect(self.completed())

    def _collect(self, completed: int) -> None:
        while self._dropped:
            self._flying.append((self._submitted, self._dropped.popleft()))
            self._children -= 1
        while self._flying and self._flying[0][0] <= completed:
            self._flying.popleft()[1]()

    def require_open(self) -> None:
        """Raise ClosedError after `close`, and in a forked child: its threads are the parent's."""
        if self._closed:
            raise ClosedError(f"this Vulkan device of {self.device} is closed")
        if self._process != os.getpid():
            raise ClosedError(f"this Vulkan device of {self.device} belongs to the parent process")

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Wait for what was submitted and destroy what was made here. Idempotent.

        A submission that waits for a timeline's value has finished when it was signalled: signal
        it before. Ctrl-C ends the wait, and the device stays open. So it does at the end of a
        ``with`` statement that an exception leaves while work is unfinished.

        Raises
        ------
        InUseError
            There are buffers or timelines of this device still; nothing is changed.
        DriverError
            The device was lost. It is closed nevertheless.
        """
        if self._closed or self._process != os.getpid():
            return
        with self.lock:
            self._collect(self.completed())
            if self._children:
                raise InUseError(
                    f"{self!r} has {self._children} buffers and timelines in use; close them first"
                )
        lost = None
        try:
            self.synchronize()
        except DriverError as error:  # it runs nothing more
            lost = error
        with self.lock:
            self._closed = True
            self._collect(self._submitted)
            self._destroy()
        if lost is not None:
            raise lost

    def _destroy(self) -> None:
        while self._owned:
            self._owned.pop()()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # After an error nothing may be left that would signal what was submitted.
        close_after_body(self.close if error is None else self._close_if_idle, error)

    def __del__(self) -> None:
        if not sys.is_finalizing() and not getattr(self, "_closed", True):
            with suppress(InUseError):
                self._close_if_idle()

    def _close_if_idle(self) -> None:
        """Close it where that does not wait; what is at work is left to the process's end."""
        if self._closed or self._process != os.getpid():
            return
        if self.completed() == self._submitted:
            self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<gpumem.interop.vulkan.{type(self).__name__} of {self.device}{state}>"


def queue_family_of(physical: Any) -> int:
    """Return the first queue family that computes; every such one also copies."""
    vk = library()
    families = call("vkGetPhysicalDeviceQueueFamilyProperties", physical)
    for number, family in enumerate(families):
        if family.queueFlags & vk.VK_QUEUE_COMPUTE_BIT:
            return number
    raise ConfigError("the Vulkan device has no compute queue")


def make_device(physical: Any, queue_family: int) -> Any:
    """Return a VkDevice with timelines, those of EXTENSIONS that there are, and one queue."""
    vk = library()
    there = {
        each.extensionName for each in call("vkEnumerateDeviceExtensionProperties", physical, None)
    }
    names = [name for name in EXTENSIONS if name in there]
    queue = vk.VkDeviceQueueCreateInfo(
        queueFamilyIndex=queue_family, queueCount=1, pQueuePriorities=[1.0]
    )
    timelines = vk.VkPhysicalDeviceTimelineSemaphoreFeatures(timelineSemaphore=vk.VK_TRUE)
    info = vk.VkDeviceCreateInfo(
        pNext=timelines,
        pQueueCreateInfos=struct_array("VkDeviceQueueCreateInfo", queue),
        queueCreateInfoCount=1,
        ppEnabledExtensionNames=names,
        enabledExtensionCount=len(names),
    )
    return call("vkCreateDevice", physical, info, None)


def make_timeline(logical: Any, initial: int, *, exportable: bool = False) -> Any:
    """Return a VkSemaphore that is a timeline."""
    vk = library()
    opaque = vk.VK_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_FD_BIT
    export = vk.VkExportSemaphoreCreateInfo(handleTypes=opaque) if exportable else None
    kind = vk.VkSemaphoreTypeCreateInfo(
        pNext=export, semaphoreType=vk.VK_SEMAPHORE_TYPE_TIMELINE, initialValue=initial
    )
    return call("vkCreateSemaphore", logical, vk.VkSemaphoreCreateInfo(pNext=kind), None)


def wait_for(logical: Any, semaphore: Any, value: int, seconds: float | None = None) -> None:
    """Wait on the CPU for a timeline's value, without the interpreter lock; None: without end.

    In slices, between which Python handles signals, so that Ctrl-C ends it.

    Raises
    ------
    DriverError
        VK_TIMEOUT, or the device is lost.
    """
    vk = library()
    info = vk.VkSemaphoreWaitInfo(pSemaphores=[semaphore], pValues=[value])
    end = inf if seconds is None else time.monotonic() + seconds
    while True:
        left = max(0, min(_SLICE, end - time.monotonic()))
        try:
            call("vkWaitSemaphores", logical, info, int(left * 1e9))
            return
        except DriverError as error:
            if error.code != _TIMEOUT or left < _SLICE:
                raise
