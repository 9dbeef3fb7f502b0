"""Devices and memories as values.

A `Device` can be made and compared without a driver; only its properties (`name`, `free_bytes`,
...) open the device. A `MemoryInfo` names one kind of memory of one device. CUDA devices come from
the installed driver, host devices from the host device.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from gpumem._native.driver import nvml
from gpumem._support.arguments import power_of_two, refuse, require
from gpumem._support.releases import release_retired
from gpumem.errors import ClosedError, ConfigError, DeviceMismatchError, DriverError

if TYPE_CHECKING:
    from gpumem._native.driver.table import DriverDevice

__all__ = [
    "Capability",
    "CopyDecision",
    "Device",
    "DriverStatus",
    "MemoryInfo",
    "MemoryKind",
    "can_access",
    "default_device",
    "devices",
    "driver_status",
    "set_host_device_count",
]
__dir__ = __all__.copy

_TYPES = ("cuda", "host")
_MAX_DIGITS = 4  # of a device's index


@dataclass(frozen=True)
class Capability:
    """Whether something is supported and, if not, why; its truth value is the answer.

    Attributes
    ----------
    supported : bool
    reason : str
        Why not; empty if it is supported.

    Examples
    --------
    >>> import gpumem
    >>> answer = gpumem.Capability(False, "the driver has no cuMemPoolCreate")
    >>> answer.reason if not answer else "supported"
    'the driver has no cuMemPoolCreate'
    """

    supported: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.supported


class MemoryKind(enum.Enum):
    """Which processors can access a memory, and how.

    Examples
    --------
    >>> from gpumem import MemoryInfo, MemoryKind
    >>> MemoryInfo("cuda:0").kind, MemoryInfo("host").kind
    (<MemoryKind.DEVICE: 'device'>, <MemoryKind.HOST: 'host'>)
    >>> str(MemoryInfo("cuda:1", MemoryKind.MANAGED))
    'cuda:1/managed'
    """

    DEVICE = "device"
    """A GPU's own memory; the CPU cannot read it."""
    HOST_ACCESSIBLE = "host_accessible"
    """Pinned host memory, mapped into a GPU: both read and write it. Also named ``"pinned"``."""
    MANAGED = "managed"
    """Migrates between CPU and GPU on demand."""
    HOST = "host"
    """Ordinary host memory."""


class Device:
    """One device: ``Device("cuda:0")``, ``Device("cuda")``, ``Device("host")``.

    A value: equal and hashable by type and index, picklable, and independent of a driver or GPU.
    Its properties raise DriverError if the device does not respond.

    Parameters
    ----------
    name : str or Device
        ``"cuda"``, ``"cuda:1"``, ``"host"``, ``"host:0"``; the index defaults to 0. A
        ``torch.device`` of type "cuda" is taken as its name, wherever a device or a memory is.

    Raises
    ------
    ValueError
        For any other name.

    Examples
    --------
    >>> import gpumem
    >>> gpumem.Device("host") == gpumem.Device("host:0")
    True
    """

    __slots__ = ("_index", "_type")

    def __init__(self, name: str | Device) -> None:
        name = _name_of(name)
        kind, colon, index = (
            str(name).partition(":") if isinstance(name, str | Device) else ("",) * 3
        )
        digits = index if colon else "0"
        is_index = digits.isdecimal() and digits.isascii() and len(digits) <= _MAX_DIGITS
        if kind not in _TYPES or not is_index:
            raise ValueError(f"unknown device {name!r}: {_accepted(kind)}")
        self._type = kind
        self._index = int(digits)

    @property
    def type(self) -> str:
        """``"cuda"`` or ``"host"``."""
        return self._type

    @property
    def index(self) -> int:
        """Ordinal among the devices of its type."""
        return self._index

    @property
    def name(self) -> str:
        """The driver's name for it, such as ``"NVIDIA H200"``."""
        return self._open().name()

    @property
    def uuid(self) -> str:
        """The identity of the physical device, as 32 hexadecimal digits; makes no context."""
        uuid: bytes = _provider_of(self).device_uuid(self._index)
        return uuid.hex()

    @property
    def total_bytes(self) -> int:
        """Bytes of memory the device has."""
        return self._open().memory_info()[1]

    @property
    def free_bytes(self) -> int:
        """Free bytes now, as the driver counts them."""
        release_retired()
        return self._open().memory_info()[0]

    @property
    def capabilities(self) -> Mapping[str, Capability]:
        """Capabilities of the device, each with the reason if it is missing.

        A look-up raises no error but ClosedError, once the process ends, and MemoryError.
        """
        return _Capabilities(self)

    def shares_memory_with(self, other: MemoryInfo | Device | str) -> bool:
        """Return the same for the device's own memory as `MemoryInfo.shares_memory_with`."""
        return MemoryInfo(self).shares_memory_with(other)

    def synchronize(self) -> None:
        """Wait until all work queued on the device has finished.

        Examples
        --------
        >>> import gpumem
        >>> gpumem.zeros(1000, "int8", memory="host").buffer.closed
        False
        >>> gpumem.Device("host").synchronize()      # the fill above is done
        """
        self._open().synchronize()

    def _open(self) -> DriverDevice:
        return _open_device(self)

    def _is_open(self) -> bool:
        """Return whether this process has opened it, which makes a context on a GPU."""
        return self in _opened

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Device):
            return NotImplemented
        return (self._type, self._index) == (other._type, other._index)

    def __hash__(self) -> int:
        return hash((self._type, self._index))

    def __str__(self) -> str:
        return f"{self._type}:{self._index}"

    def __repr__(self) -> str:
        return f'Device("{self}")'

    def __reduce__(self) -> tuple[Any, ...]:
        return (Device, (str(self),))


def _name_of(given: Any) -> Any:
    """Return the name of PyTorch's ``torch.device`` of a GPU; any other value unchanged."""
    if isinstance(given, str | Device) or getattr(given, "type", None) != "cuda":
        return given
    index = getattr(given, "index", -1)
    return "cuda" if index is None else f"cuda:{index}"


def _accepted(kind: str) -> str:
    """Return the accepted names of a device, for the error of an unknown one."""
    if kind == "cpu":
        return "'cpu' is called 'host' here"
    if kind == "gpu":
        return "'gpu' is called 'cuda' here"
    return 'expected "cuda", "cuda:N", "host" or "host:N"'


_MAX_ALIGNMENT = 1 << 30


@dataclass(frozen=True)
class MemoryInfo:
    """One kind of memory of one device.

    Attributes
    ----------
    device : Device
        For HOST_ACCESSIBLE memory the accelerator that reaches it, not the host.
    kind : MemoryKind
        Defaults to HOST on the host device and to DEVICE elsewhere.
    alignment : int
        Bytes; a power of two up to 2**30. Plays no part in compatibility.
    name : str, optional
        Name used in error messages and reports.

    Examples
    --------
    >>> import gpumem
    >>> gpumem.MemoryInfo.parse("cuda:0/host_accessible").kind
    <MemoryKind.HOST_ACCESSIBLE: 'host_accessible'>
    """

    device: Device
    kind: MemoryKind = None  # type: ignore[assignment]  # filled in below
    alignment: int = field(default=256, kw_only=True)
    name: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        device = self.device if isinstance(self.device, Device) else Device(self.device)
        object.__setattr__(self, "device", device)
        kind = self.kind
        if kind is None:
            kind = MemoryKind.HOST if device.type == "host" else MemoryKind.DEVICE
        elif not isinstance(kind, MemoryKind):
            kind = _kind_named(kind)
        object.__setattr__(self, "kind", kind)
        if device.type == "cuda" and kind is MemoryKind.HOST:
            raise ValueError(
                f"{device} has no HOST memory: expected DEVICE, HOST_ACCESSIBLE or MANAGED"
            )
        if device.type == "host" and kind is MemoryKind.DEVICE:
            # The host device's own memory is host memory.
            object.__setattr__(self, "kind", MemoryKind.HOST)
        object.__setattr__(self, "alignment", _checked_alignment(self.alignment))
        require("name", self.name, (str, type(None)), "a str or None")

    @classmethod
    def parse(cls, memory: MemoryInfo | Device | str) -> MemoryInfo:
        """Make a MemoryInfo of a MemoryInfo, a Device, or a name such as ``"cuda:0/managed"``.

        Raises
        ------
        ValueError
            The name is neither a device nor ``device/kind``.
        """
        if isinstance(memory, MemoryInfo):
            return memory
        memory = _name_of(memory)
        if isinstance(memory, Device):
            return cls(memory)
        if not isinstance(memory, str):
            raise TypeError(
                f"memory must be a MemoryInfo, a Device or a name, not {type(memory).__name__}"
            )
        device, _, kind = memory.partition("/")
        if "/" in memory and not kind:
            raise ValueError(f"unknown memory {memory!r}: the kind after '/' is missing")
        return cls(Device(device), _kind_named(kind) if kind else None)  # type: ignore[arg-type]

    def _total_bytes(self) -> int:
        """Return the bytes of which "80%" is a share: for pinned memory those of the host."""
        is_pinned = self.kind is MemoryKind.HOST_ACCESSIBLE
        return Device("host" if is_pinned else self.device).total_bytes

    @property
    def host_accessible(self) -> bool:
        """Whether the CPU can read and write it through an ordinary pointer."""
        return self.kind is not MemoryKind.DEVICE

    def shares_memory_with(self, other: MemoryInfo | Device | str) -> bool:
        """Return whether two memories are one, so that no copy between them is needed.

        That is so for equal memory; for CPU memory and other CPU memory, or HOST_ACCESSIBLE or
        MANAGED memory of any device; for HOST_ACCESSIBLE or MANAGED and DEVICE of the same device.
        Alignment plays no part. `can_access` returns whether a device can dereference the memory.

        Examples
        --------
        >>> from gpumem import Device, MemoryInfo
        >>> MemoryInfo.parse("host").shares_memory_with("cuda:0/host_accessible")
        True
        >>> Device("cuda:0").shares_memory_with("cuda:0/managed")
        True
        >>> Device("cuda:0").shares_memory_with("cuda:1")
        False
        """
        what = MemoryInfo.parse(other)
        if (self.device, self.kind) == (what.device, what.kind):
            return True
        if MemoryKind.HOST in (self.kind, what.kind):
            return self.host_accessible and what.host_accessible
        return self.device == what.device and MemoryKind.DEVICE in (self.kind, what.kind)

    def __str__(self) -> str:
        default = MemoryKind.HOST if self.device.type == "host" else MemoryKind.DEVICE
        return str(self.device) if self.kind is default else f"{self.device}/{self.kind.value}"


def _checked_alignment(given: object) -> int:
    if isinstance(given, bool) or not hasattr(type(given), "__index__"):
        refuse("alignment", given, "a power of two from 1 to 2**30")
    return power_of_two("alignment", given, _MAX_ALIGNMENT, "2**30")


_KINDS = "|".join(kind.value for kind in MemoryKind)
_OWN_KINDS = ("", "device", "host")  # of a device's own memory, in a name
# Names of memory in keys of settings: group 1 is the type, 2 the ordinal, 3 the kind.
_MEMORY_NAME = re.compile(rf"(cuda|host)(?::([0-9]{{1,4}}))?(?:/({_KINDS}))?\Z", re.IGNORECASE)


def _plain_name(name: str) -> str:
    """Return a name in keys as its memory is written, in lower case: "host:0" for "HOST:00"."""
    match = _MEMORY_NAME.match(name)
    if match is None:
        return name.lower()
    ordinal = "" if match[2] is None else f":{int(match[2])}"
    kind = (match[3] or "").lower()
    return match[1].lower() + ordinal + (f"/{kind}" if kind not in _OWN_KINDS else "")


def _means(name: str, memory: str) -> bool | None:
    """Return whether a name in keys means a memory: a type stands for any ordinal, or for 0.

    None unless both are names of memory.
    """
    given, meant = _MEMORY_NAME.match(name), _MEMORY_NAME.match(memory)
    if given is None or meant is None:
        return None
    kinds = [(each[3] or "").lower() for each in (given, meant)]
    return (
        given[1].lower() == meant[1].lower()
        and (given[2] is None or int(given[2]) == int(meant[2] or 0))
        and (kinds[0] == kinds[1] or (kinds[0] in _OWN_KINDS and kinds[1] in _OWN_KINDS))
    )


def _kind_named(name: object) -> MemoryKind:
    for kind in MemoryKind:
        if kind.value == name:
            return kind
    if name == "pinned":
        return MemoryKind.HOST_ACCESSIBLE
    names = (*(kind.value for kind in MemoryKind), "pinned")
    accepted = ", ".join(f'"{each}"' for each in names)
    raise ValueError(f"unknown memory kind {name!r}: expected {accepted}")


# ---- access --------------------------------------------------------------------------------------


def can_access(reader: Device | str, memory: MemoryInfo | Device | str) -> bool:
    """Return whether `reader` may dereference `memory`.

    The CPU (a host device) reads all memory except DEVICE memory; a GPU reads its own memory, and
    HOST_ACCESSIBLE and MANAGED memory with its index.

    Examples
    --------
    >>> from gpumem import can_access
    >>> can_access("host", "cuda:0/managed"), can_access("host", "cuda:0")
    (True, False)
    >>> can_access("cuda:0", "cuda:0/host_accessible"), can_access("cuda:0", "host")
    (True, False)
    """
    device, info = Device(reader), MemoryInfo.parse(memory)
    return info.host_accessible if device.type == "host" else info.device == device


# ---- existing devices ----------------------------------------------------------------------------

_opened: dict[Device, DriverDevice] = {}
_of_parents: list[DriverDevice] = []  # after a fork: devices that the parent's arenas still use


def _open_device(device: Device) -> DriverDevice:
    known = _opened.get(device)
    if known is not None and not known.dead:
        return known
    opened: DriverDevice = _provider_of(device).open_device(device.index)
    if device.type == "cuda":
        nvml.load()
    current = _opened.get(device)
    if current is not None and not current.dead:
        return current  # another thread was faster: a device is opened once, streams rely on it
    if known is not None:
        _of_parents.append(known)
    _opened[device] = opened
    return opened


def _provider_of(device: Device) -> Any:
    """Return the module of a device's driver; raise ValueError unless the device exists."""
    provider = _provider(device.type)
    reason = provider.load()
    count = provider.device_count()
    if device.index >= count:
        only = f"the only {device.type} device is '{device.type}:0'"
        several = f"there are {count} {device.type} devices, which are counted from 0"
        why = reason or (only if count == 1 else several)
        if count == 0:
            why += '; without a GPU use "host"'
        raise ValueError(f"unknown device {str(device)!r}: {why}")
    return provider


def _open_any(device_type: str) -> DriverDevice:
    """Open a device of a type, to query the driver about an address of any of them.

    An open device is preferred, because opening a GPU makes a context, which uses its memory.
    """
    for device, opened in list(_opened.items()):
        if device.type == device_type and not opened.dead:
            return opened
    return _open_device(Device(device_type))


_providers: dict[str, Any] = {}  # by type; an error's text may need one, and imports nothing


def _provider(device_type: str) -> Any:
    if device_type not in _providers:
        if device_type == "cuda":
            from gpumem._native.driver import table as found
        else:
            from gpumem._native.driver import host as found  # type: ignore[no-redef]
        _providers[device_type] = found
    return _providers[device_type]


def devices() -> list[Device]:
    """Return the devices present: CUDA devices first, then host devices.

    Does not raise without a driver; `driver_status` has the reason if CUDA is missing.

    Examples
    --------
    >>> import gpumem
    >>> gpumem.devices()[-1].type       # a host device always exists
    'host'
    """
    return [Device(f"{kind}:{i}") for kind in _TYPES for i in range(_count(kind))]


def uuid_of(text: str) -> str | None:
    """Return a UUID as `Device.uuid` has it, with or without "GPU-" or "MIG-" before it.

    None if the text is something else.
    """
    try:
        return UUID(text.removeprefix("GPU-").removeprefix("MIG-")).hex
    except ValueError:
        return None


def device_of_uuid(uuid: str) -> Device:
    """Return the device of an identity.

    Raises
    ------
    DeviceMismatchError
        The device is not here.
    """
    there = devices()
    for device in there:
        if device.uuid == uuid:
            return device
    raise DeviceMismatchError(
        f"device {uuid} is not here: there are "
        f"{', '.join(f'{device} ({device.uuid})' for device in there)}"
    )


def _count(device_type: str) -> int:
    return int(_provider(device_type).device_count())


def default_device() -> Device:
    """Return cuda:0 if there are a driver and a GPU, else host:0.

    Examples
    --------
    >>> import gpumem
    >>> gpumem.default_device() == gpumem.devices()[0]
    True
    """
    return devices()[0]


def set_host_device_count(n: int) -> None:
    """Make `n` host devices, to test code for several GPUs.

    Raises
    ------
    ValueError
        `n` out of range (1 to 64).
    ConfigError
        A host device was used already.

    Examples
    --------
    >>> from gpumem.device import devices, set_host_device_count
    >>> set_host_device_count(2)         # first of all, before a host device is used
    >>> [str(device) for device in devices() if device.type == "host"]
    ['host:0', 'host:1']
    """
    from gpumem._native.driver import host as _host

    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= _host.MAX_DEVICES:
        raise ValueError(f"host device count {n!r} is not an integer from 1 to {_host.MAX_DEVICES}")
    if n == _host.device_count():
        return
    if not _host.set_device_count(n):
        raise ConfigError("the number of host devices can only be set before one is used")


@dataclass(frozen=True)
class DriverStatus:
    """Whether CUDA is available; its truth value is the answer.

    Attributes
    ----------
    available : bool
        A driver and at least one GPU were found.
    reason : str
        Why not; empty if it is available.
    version : int
        The driver's CUDA version, such as 13000; 0 if it is not available.
    missing : tuple of str
        Driver functions that gpumem can use and this driver does not have.

    Examples
    --------
    >>> import gpumem
    >>> status = gpumem.DriverStatus(False, "libcuda.so.1 cannot be opened", 0, ())
    >>> "on the GPU" if status.available else f"on the host: {status.reason}"
    'on the host: libcuda.so.1 cannot be opened'
    """

    available: bool
    reason: str
    version: int
    missing: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.available


def driver_status() -> DriverStatus:
    """Return whether CUDA is available; the first call opens the driver. Never raises.

    Examples
    --------
    >>> import gpumem
    >>> status = gpumem.driver_status()
    >>> status.available == any(device.type == "cuda" for device in gpumem.devices())
    True
    >>> bool(status.reason) is not status.available      # the reason, if it is not
    True
    """
    from gpumem._native.driver import table as _cuda

    reason = _cuda.load()
    if reason is not None:
        return DriverStatus(False, reason, 0, ())
    return DriverStatus(True, "", _cuda.version(), _cuda.missing_functions())


class CopyDecision(NamedTuple):
    """Decision about one input or output of a run.

    Attributes
    ----------
    action : {"alias", "copy"}
        The work uses the bound memory itself, or memory of the device and a copy.
    why : str
        The reason.

    Examples
    --------
    >>> import gpumem, numpy as np
    >>> with gpumem.Session("host") as session:
    ...     session.bind_input("x", np.arange(3.0))
    ...     session.copy_plan()["x"]
    CopyDecision(action='alias', why='host:0 uses host:0 as it is')
    """

    action: str
    why: str


def decide_copy(device: Device, memory: MemoryInfo) -> CopyDecision:
    """Decide whether work on a device uses a memory as it is.

    It does if the memory is one with its own memory, and it can dereference it.
    """
    own = MemoryInfo(device)
    if not own.shares_memory_with(memory):
        return CopyDecision("copy", f"{memory} and {own} do not share memory")
    if not can_access(device, memory):
        return CopyDecision("copy", f"{device} cannot access {memory}")
    return CopyDecision("alias", f"{device} uses {memory} as it is")


# Capabilities: the driver functions and the device attribute that each requires.
# Attributes are named as in CUdevice_attribute, without CU_DEVICE_ATTRIBUTE_.
_CAPABILITIES: Mapping[str, tuple[tuple[str, ...], str | None]] = {
    "allocate": (("cuMemAlloc", "cuMemFree"), None),
    "pinned": (("cuMemHostAlloc", "cuMemFreeHost"), "CAN_MAP_HOST_MEMORY"),
    "managed": (("cuMemAllocManaged",), "MANAGED_MEMORY"),
    "host_register": (("cuMemHostRegister", "cuMemHostUnregister"), "HOST_REGISTER_SUPPORTED"),
    "virtual_memory": (
        ("cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"),
        "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    ),
    "memory_pools": (
        ("cuMemPoolCreate", "cuMemAllocFromPoolAsync", "cuMemFreeAsync"),
        "MEMORY_POOLS_SUPPORTED",
    ),
    "posix_fd_handles": (
        ("cuMemExportToShareableHandle",),
        "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
    ),
    "external_memory": (("cuImportExternalMemory", "cuExternalMemoryGetMappedBuffer"), None),
    "timeline_semaphores": (("cuImportExternalSemaphore",), "TIMELINE_SEMAPHORE_INTEROP_SUPPORTED"),
    "stream_memory_operations": (
        ("cuStreamWaitValue64", "cuStreamWriteValue64"),
        "CAN_USE_64_BIT_STREAM_MEM_OPS",
    ),
    "fabric_handles": (("cuMemExportToShareableHandle",), "HANDLE_TYPE_FABRIC_SUPPORTED"),
    "legacy_ipc": ((), "IPC_EVENT_SUPPORTED"),  # the query of the CUDA documentation
    "gpu_direct_rdma": ((), "GPU_DIRECT_RDMA_SUPPORTED"),
    "gpu_direct_rdma_of_pages": ((), "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"),
    "dma_buf_export": (("cuMemGetHandleForAddressRange",), "DMA_BUF_SUPPORTED"),
    "graph_capture": (("cuStreamBeginCapture", "cuStreamGetCaptureInfo"), None),
}


class _Capabilities(Mapping[str, Capability]):
    """A device's capabilities, each queried when it is looked up."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getitem__(self, name: str) -> Capability:
        functions, attribute = _CAPABILITIES[name]
        try:
            return _query_capability(_open_device(self._device), functions, attribute)
        except (ClosedError, MemoryError):
            raise  # the driver is shutting down, so there is no answer
        except Exception as error:
            return Capability(False, str(error))

    def __iter__(self) -> Iterator[str]:
        return iter(_CAPABILITIES)

    def __len__(self) -> int:
        return len(_CAPABILITIES)

    def __repr__(self) -> str:
        return repr(dict(self))


def _query_capability(
    opened: DriverDevice, functions: tuple[str, ...], attribute: str | None
) -> Capability:
    lacking = [function for function in functions if not opened.has(function)]
    if lacking:
        return Capability(False, f"the driver has no {', '.join(lacking)}")
    if attribute is None:
        return Capability(True)
    name = f"CU_DEVICE_ATTRIBUTE_{attribute}"
    try:
        supported = opened.named_attribute(name)
    except DriverError as error:
        return Capability(False, f"{error}, asked for {name}")
    if not supported:
        return Capability(False, f"not supported by the device ({name} = 0)")
    return Capability(True)
