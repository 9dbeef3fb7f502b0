"""Which resource serves which device of a framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias, TypeVar

from gpumem._arena.arena import Arena
from gpumem._budget import Budget
from gpumem._buffer.resource import MemoryResource
from gpumem._defaults import get_default_resource, set_default_resource
from gpumem._support.forks import ForkLock
from gpumem.config import ArenaConfig
from gpumem.device import Device, MemoryInfo, MemoryKind
from gpumem.errors import ConfigError, OutOfMemoryError
from gpumem.integrations._common.switch import Setting

T = TypeVar("T")

ResourceLike: TypeAlias = (
    MemoryResource | Iterable[MemoryResource] | Mapping[int | str | Device, MemoryResource] | None
)
"""The values of `resource` that users pass: one, several, one by device, or None."""

REACHABLE = (MemoryKind.DEVICE, MemoryKind.MANAGED, MemoryKind.HOST_ACCESSIBLE)
"""Kinds of memory that a device's kernels can use."""


class Resources:
    """The resource of each device: the given one, else the default one, made at its first use.

    Two are equal if the same resources were given for the same devices.

    Parameters
    ----------
    framework : str
        Name used in error messages.
    given : MemoryResource, iterable or mapping of them, or None
        A mapping's keys are devices or their numbers, and must agree with the resources' own.
    kinds : tuple of MemoryKind
        Accepted kinds of memory; the default resources have the first.
    device_type : str
        "cuda", or "host" in tests without a GPU.
    config : ArenaConfig or Mapping, optional
        Settings of the arenas that are made where no resource was given; they become the default
        resources. None: those that are the default already.
    node : str, optional
        Name of the node's budget that those arenas charge; only with `config`.

    Raises
    ------
    TypeError
        A value is not a resource, or a key is not a device.
    ConfigError
        A resource of another kind of memory or device type, two of one device, or a key that
        contradicts its resource.
    """

    def __init__(
        self,
        framework: str,
        given: ResourceLike = None,
        *,
        kinds: tuple[MemoryKind, ...] = REACHABLE,
        device_type: str = "cuda",
        config: ArenaConfig | Mapping[str, object] | None = None,
        node: str | None = None,
    ) -> None:
        self.framework = framework
        self._kinds = kinds
        self.device_type = device_type
        self._config = config
        self._node = node
        self._given: dict[int, MemoryResource] = {}
        self._found: dict[int, MemoryResource] = {}
        self._lock = ForkLock()
        for key, resource in _pairs(given):
            self._add(key, resource)

    def of(self, index: int) -> MemoryResource:
        """Return the resource of a device, by its number; always the same one."""
        found = self._given.get(index)
        if found is None:  # not `or`: a resource with a length may be false
            found = self._found.get(index)
        if found is None:
            with self._lock:
                found = self._found.get(index)
                if found is None:
                    memory = self.memory_of(index)
                    if self._config is not None:
                        budget = None if self._node is None else Budget(None, node=self._node)
                        set_default_resource(Arena(memory, self._config, budget=budget))
                    found = get_default_resource(memory)
                    self._found[index] = found
        return found

    def memory_of(self, index: int) -> MemoryInfo:
        """Return the memory that serves a device, without making its default resource."""
        if index in self._given:
            return self._given[index].memory
        return MemoryInfo(Device(f"{self.device_type}:{index}"), self._kinds[0])

    @property
    def given(self) -> dict[int, MemoryResource]:
        """The resources that were given, by number of the device."""
        return dict(self._given)

    def _add(self, key: object, resource: object) -> None:
        if not isinstance(resource, MemoryResource):
            raise TypeError(
                f"invalid resource = {resource!r}: expected a gpumem.MemoryResource, "
                "several of them, or None"
            )
        memory = resource.memory
        if memory.device.type != self.device_type or memory.kind not in self._kinds:
            accepted = " or ".join(kind.name.lower() for kind in self._kinds)
            hint = ""
            if memory.device.type == "host":
                hint = (
                    "; without a GPU, make tensors by gpumem.zeros(..., resource=arena); libraries "
                    "with DLPack see the same bytes"
                )
            raise ConfigError(
                f"invalid resource = {resource!r}: {self.framework} needs {accepted} memory of a "
                f"{self.device_type} device, such as {self.device_type}:0{hint}"
            )
        index = memory.device.index
        if key is not None and _device_number(key, self.device_type) != index:
            raise ConfigError(
                f"invalid resource = {resource!r} for device {key!r}: it is of {memory}"
            )
        if index in self._given:
            raise ConfigError(
                f"invalid resource = {resource!r}: {self._given[index]!r} was given for "
                f"{memory.device} as well"
            )
        self._given[index] = resource

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Resources):
            return NotImplemented
        return (
            self.device_type == other.device_type
            and self._config == other._config
            and self._node == other._node
            and self._kinds == other._kinds
            and self._given.keys() == other._given.keys()
            and all(self._given[index] is other._given[index] for index in self._given)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Resources({self.framework!r}, {self._given!r})"


def setting_with_pinned(
    resources: Resources, pinned: bool | MemoryResource | None, *, alone: bool = False
) -> Setting:
    """Return a setting with an option "pinned": the framework's resources of pinned memory.

    The option is None if `pinned` is False, where the framework keeps its own. The option "alone"
    says that the framework keeps its memory of devices.
    """
    chosen = None
    if pinned is not False:
        chosen = Resources(
            f"{resources.framework}, for pinned memory,",
            None if pinned is True else pinned,
            kinds=(MemoryKind.HOST_ACCESSIBLE,),
            device_type=resources.device_type,
        )
    return Setting(resources, (("pinned", chosen), ("alone", alone)))


def allocated(
    allocate: Callable[[], T],
    collect: Callable[[], object],
    no_memory: Callable[[OutOfMemoryError], Exception],
) -> T:
    """Allocate; if memory is out, call `collect` and try again, then raise `no_memory`'s error.

    The allocators of CuPy and Numba do the same, because arrays may be left in reference cycles.
    """
    try:
        return allocate()
    except OutOfMemoryError:
        pass  # outside of the handler, the error keeps no frames alive
    collect()
    try:
        return allocate()
    except OutOfMemoryError as error:
        raise no_memory(error) from error


def _pairs(given: object) -> list[tuple[object, object]]:
    """Return pairs of key and resource; the key is None if none was given."""
    if given is None:
        return []
    if isinstance(given, Mapping):
        return list(given.items())
    if isinstance(given, MemoryResource | str) or not isinstance(given, Iterable):
        return [(None, given)]
    return [(None, each) for each in given]


def _device_number(key: object, device_type: str) -> int:
    if isinstance(key, int) and not isinstance(key, bool):
        return key
    if not isinstance(key, Device | str):
        raise TypeError(f"invalid device {key!r}: expected a Device, 'cuda:0' or a number")
    device = Device(key)
    return device.index if device.type == device_type else -1
