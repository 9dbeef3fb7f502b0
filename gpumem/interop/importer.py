"""Importers: one for each device that can take memory and timelines from outside."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from gpumem._support.closing import Closable
from gpumem.device import Device
from gpumem.interop.descriptors import (
    InteropCapability,
    MemoryDescriptor,
    MemoryHandleType,
    SemaphoreDescriptor,
    SemaphoreType,
)
from gpumem.interop.memory._external_memory import ExternalMemory
from gpumem.interop.memory.kinds import import_memory, memory_capability
from gpumem.interop.timelines._timeline import Timeline
from gpumem.interop.timelines.semaphores import import_semaphore, semaphore_capability

_lock = threading.Lock()
_factories: dict[str, Callable[[Device], ImporterLike | None]] = {}


class Importer(Closable):
    """Imports memory and timelines on one device. Safe to use from many threads.

    It holds no driver object: memory and timelines that it imported stay valid after it is closed.

    Parameters
    ----------
    device : Device or str

    Attributes
    ----------
    device : Device
    closed : bool
        Whether `close` was called.

    Examples
    --------
    >>> from gpumem.interop import Importer, MemoryHandleType
    >>> importer = Importer.for_device("host")
    >>> bool(importer.can_import_memory(MemoryHandleType.MEMFD))
    True
    >>> importer.can_import_memory(MemoryHandleType.D3D12_HEAP).reason
    'NT handles exist on Windows, and gpumem runs on Linux'
    """

    def __init__(self, device: Device | str) -> None:
        self.device = Device(device)

    @classmethod
    def for_device(cls, device: Device | str) -> Importer | ImporterLike | None:
        """Return an importer for a device, or None if the device cannot import at all.

        `unavailable_reason` gives the reason. A well-formed device never raises.

        Examples
        --------
        >>> from gpumem.interop import Importer
        >>> Importer.for_device("host").device
        Device("host:0")
        """
        where = Device(device)
        factory = _factories.get(where.type)
        if factory is not None:
            return factory(where)
        return None if cls.unavailable_reason(where) else cls(where)

    @staticmethod
    def unavailable_reason(device: Device | str) -> str:
        """Return why a device has no importer, or an empty string if it has one.

        Examples
        --------
        >>> from gpumem.interop import Importer
        >>> Importer.unavailable_reason("host")      # the host has one
        ''
        """
        where = Device(device)
        factory = _factories.get(where.type)
        if factory is not None:
            declines = factory(where) is None
            return "the registered importer does not support this device" if declines else ""
        able = where.capabilities["external_memory"]
        return "" if able else able.reason

    @staticmethod
    def register(device_type: str, factory: Callable[[Device], ImporterLike | None] | None) -> None:
        """Let a factory make the importers that `for_device` returns for a type of device.

        Parameters
        ----------
        device_type : str
            ``"cuda"`` or ``"host"``.
        factory : callable or None
            Takes a Device and returns an importer, or None if that device cannot import. None
            restores gpumem's own `Importer` for the type.

        Raises
        ------
        ValueError
            Unknown type of device.
        TypeError
            The factory is not callable.

        Examples
        --------
        >>> from gpumem.interop import Importer
        >>> Importer.register("host", lambda device: None)       # no host device can import
        >>> Importer.for_device("host"), Importer.unavailable_reason("host")
        (None, 'the registered importer does not support this device')
        >>> Importer.register("host", None)
        """
        if device_type not in ("cuda", "host"):
            raise ValueError(f'unknown type of device {device_type!r}: expected "cuda" or "host"')
        if factory is not None and not callable(factory):
            raise TypeError(f"factory {factory!r} is not callable")
        with _lock:
            if factory is None:
                _factories.pop(device_type, None)
            else:
                _factories[device_type] = factory

    def can_import_memory(self, handle_type: MemoryHandleType) -> InteropCapability:
        """Return whether memory can be imported by this kind of handle, and why not.

        Raises
        ------
        TypeError
            `handle_type` is not a MemoryHandleType. No MemoryHandleType raises.
        """
        return memory_capability(self.device, handle_type)

    def import_memory(
        self, descriptor: MemoryDescriptor, *, consume: bool = False
    ) -> ExternalMemory:
        """Map the whole of an allocation that another API or process made.

        Parameters
        ----------
        descriptor : MemoryDescriptor
        consume : bool
            Take ownership of the descriptor's handle and close it after the import has succeeded.
            False: the caller keeps the handle and may close it after this call. After an error the
            caller owns it in both cases, still open.

        Returns
        -------
        ExternalMemory

        Raises
        ------
        UnsupportedHandleTypeError
            The device cannot import this kind; the message is the capability's reason.
        InvalidDescriptorError
            `consume` with a name or an address, or a `dedicated` or `offset` that the capability
            does not allow.
        AlignmentError
            A HOST_ALLOCATION that does not begin at a page.
        BadHandleError
            The descriptor is not open, of another kind, or its file is too small.
        DeviceMismatchError
            The memory belongs to another device.
        DriverError
            The driver refused.
        ClosedError
            The importer is closed.
        """
        self._require_open()
        return import_memory(self.device, descriptor, consume=consume)

    def can_import_semaphore(self, type: SemaphoreType) -> InteropCapability:
        """Return whether timelines can be imported by this kind of handle, and why not.

        Raises
        ------
        TypeError
            `type` is not a SemaphoreType. No SemaphoreType raises.
        """
        return semaphore_capability(self.device, type)

    def import_semaphore(
        self, descriptor: SemaphoreDescriptor, *, consume: bool = False
    ) -> Timeline:
        """Import a timeline that another API or process made.

        Parameters
        ----------
        descriptor : SemaphoreDescriptor
        consume : bool
            As for `import_memory`.

        Returns
        -------
        Timeline
            A HostTimeline of this device if the handle is of one.

        Raises
        ------
        UnsupportedHandleTypeError
            The device cannot import this kind; the message is the capability's reason.
        InvalidDescriptorError
            `consume` with a name.
        BadHandleError
            The descriptor is not open, or is of another kind.
        DeviceMismatchError
            The timeline belongs to another device.
        DriverError
            The driver refused.
        ClosedError
            The importer is closed.
        """
        self._require_open()
        return import_semaphore(self.device, descriptor, consume)

    def close(self) -> None:
        """Import nothing any more. Idempotent; imported memory and timelines stay valid."""
        self._closed = True

    def __repr__(self) -> str:
        return f"<gpumem.interop.Importer of {self.device}{', closed' if self._closed else ''}>"


class ImporterLike(Protocol):
    """An importer made by a factory of `Importer.register`; `Importer` documents the methods."""

    def can_import_memory(self, handle_type: MemoryHandleType) -> InteropCapability:
        """Return whether a type of memory handles can be imported."""

    def can_import_semaphore(self, type: SemaphoreType) -> InteropCapability:
        """Return whether a type of semaphores can be imported."""

    def import_memory(self, descriptor: MemoryDescriptor, *, consume: bool = False) -> object:
        """Import memory that another API or process has exported."""

    def import_semaphore(self, descriptor: SemaphoreDescriptor, *, consume: bool = False) -> object:
        """Import a semaphore that another API or process has exported."""
