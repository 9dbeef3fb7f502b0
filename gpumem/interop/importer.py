"""Importers: one for each device that can take memory and timelines from outside."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, Self

from gpumem.device import Device
from gpumem.errors import ClosedError
from gpumem.interop._memory import ExternalMemory
from gpumem.interop._timeline import Timeline
from gpumem.interop.descriptors import (
    Capability,
    MemoryDescriptor,
    MemoryHandleType,
    SemaphoreDescriptor,
    SemaphoreType,
)
from gpumem.interop.memories import import_memory, memory_capability
from gpumem.interop.semaphores import import_semaphore, semaphore_capability

__all__ = ["Importer", "importer_for", "importer_reason", "register_importer"]


class Importer:
    """Imports memory and timelines on one device. Safe to use from many threads.

    It holds nothing of the driver: what it imported lives on after it is closed.

    Parameters
    ----------
    device : Device or str

    Examples
    --------
    >>> from gpumem.interop import MemoryHandleType, importer_for
    >>> importer = importer_for("host")
    >>> bool(importer.can_import_memory(MemoryHandleType.MEMFD))
    True
    >>> importer.can_import_memory(MemoryHandleType.D3D12_HEAP).reason
    'NT handles exist on Windows, and gpumem runs on Linux'
    """

    def __init__(self, device: Device | str) -> None:
        self.device = Device(device)
        self._closed = False

    def can_import_memory(self, handle_type: MemoryHandleType) -> Capability:
        """Tell whether memory can be imported by this kind of handle and, if not, why.

        Raises
        ------
        TypeError
            It is no MemoryHandleType; for every one of them there is an answer.
        """
        return memory_capability(self.device, handle_type)

    def import_memory(
        self, descriptor: MemoryDescriptor, *, consume: bool = False
    ) -> ExternalMemory:
        """Map memory that somebody else allocated, the whole allocation at once.

        Parameters
        ----------
        descriptor : MemoryDescriptor
        consume : bool
            Take the descriptor's handle over: it is closed here, last of all, when everything
            succeeded. False: the handle stays the caller's, and may be closed at once after this
            call. After an error it is the caller's either way, and open.

        Returns
        -------
        ExternalMemory

        Raises
        ------
        UnsupportedHandleTypeError
            The device cannot import this kind; the message is the capability's reason.
        InvalidDescriptorError
            `consume` with a name or an address, `dedicated` or `offset` against the capability.
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

    def can_import_semaphore(self, type: SemaphoreType) -> Capability:
        """Tell whether timelines can be imported by this kind of handle and, if not, why.

        Raises
        ------
        TypeError
            It is no SemaphoreType; for every one of them there is an answer.
        """
        return semaphore_capability(self.device, type)

    def import_semaphore(
        self, descriptor: SemaphoreDescriptor, *, consume: bool = False
    ) -> Timeline:
        """Take part in a timeline that somebody else made.

        Parameters
        ----------
        descriptor : SemaphoreDescriptor
        consume : bool
            As `import_memory` takes it.

        Returns
        -------
        Timeline
            A HostTimeline of this device, if that is what the handle stands for.

        Raises
        ------
        UnsupportedHandleTypeError
            The device cannot import this kind; the message is the capability's reason.
        InvalidDescriptorError
            `consume` with a name.
        BadHandleError
            The descriptor is not open, or stands for something else.
        DeviceMismatchError
            The timeline belongs to another device.
        DriverError
            The driver refused.
        ClosedError
            The importer is closed.
        """
        self._require_open()
        return import_semaphore(self.device, descriptor, consume)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Import nothing any more. Idempotent; what was imported stays."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<gpumem.interop.Importer of {self.device}{', closed' if self._closed else ''}>"

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"this importer of {self.device} is closed")


class ImporterLike(Protocol):
    """What a factory given to `register_importer` makes; `Importer` says what each does."""

    def can_import_memory(self, handle_type: MemoryHandleType) -> Capability: ...
    def can_import_semaphore(self, type: SemaphoreType) -> Capability: ...
    def import_memory(self, descriptor: MemoryDescriptor, *, consume: bool = False) -> object: ...
    def import_semaphore(
        self, descriptor: SemaphoreDescriptor, *, consume: bool = False
    ) -> object: ...


_lock = threading.Lock()
_factories: dict[str, Callable[[Device], ImporterLike | None]] = {}


def register_importer(
    device_type: str, factory: Callable[[Device], ImporterLike | None] | None
) -> None:
    """Let a factory make the importers of a type of device.

    Parameters
    ----------
    device_type : str
        ``"cuda"`` or ``"host"``.
    factory : callable or None
        Takes a Device and returns an importer, or None if that device cannot import. None gives
        the type back to gpumem's own `Importer`.

    Raises
    ------
    ValueError
        Unknown type of device.
    TypeError
        The factory is not callable.

    Examples
    --------
    >>> register_importer("host", lambda device: None)       # no device of the type can import
    >>> importer_for("host"), importer_reason("host")
    (None, 'its registered importer declines')
    >>> register_importer("host", None)
    """
    if device_type not in ("cuda", "host"):
        raise ValueError(f'unknown type of device {device_type!r}: it takes "cuda" or "host"')
    if factory is not None and not callable(factory):
        raise TypeError(f"factory {factory!r} is not callable")
    with _lock:
        if factory is None:
            _factories.pop(device_type, None)
        else:
            _factories[device_type] = factory


def importer_for(device: Device | str) -> Importer | ImporterLike | None:
    """Return an importer for a device; None if it cannot import at all.

    `importer_reason` says why. Never raises for a well-formed device.

    Examples
    --------
    >>> importer = importer_for("host")
    >>> importer.device
    Device("host:0")
    """
    where = Device(device)
    factory = _factories.get(where.type)
    if factory is not None:
        return factory(where)
    return None if importer_reason(where) else Importer(where)


def importer_reason(device: Device | str) -> str:
    """Say why a device has no importer; empty if it has one.

    Examples
    --------
    >>> importer_reason("host")      # it has one
    ''
    """
    where = Device(device)
    factory = _factories.get(where.type)
    if factory is not None:
        return "" if factory(where) is not None else "its registered importer declines"
    able = where.capabilities["external_memory"]
    return "" if able else able.reason
