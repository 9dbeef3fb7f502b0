"""Environments: allocators that sessions share, one per memory of one device.

>>> import gpumem
>>> with gpumem.Environment({"ep_factory.host.arena.max_mem": "1048576"}) as environment:
...     arena = environment.register("host")
...     arena.config.max_mem, environment.shared_allocator("host:0") is arena
(1048576, True)
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias, Unpack

from gpumem._buffer.resource import MemoryResource
from gpumem._defaults import resource_from_config
from gpumem._support.closing import Closable
from gpumem._support.forks import ForkLock
from gpumem.adaptors._adaptor import Adaptor
from gpumem.config import ArenaConfig, ArenaSettings, _parse_key
from gpumem.device import _MEMORY_NAME, Device, MemoryInfo, MemoryKind, _plain_name
from gpumem.errors import ClosedError, ConfigError, ConfigWarning, InUseError, NoAllocatorError

Memory: TypeAlias = MemoryInfo | Device | str
Settings: TypeAlias = Mapping[str, object]

Prefixed: TypeAlias = dict[tuple[str, str], list[tuple[str, object]]]

SHARED, PRIVATE = "ep_factory", "ep"  # prefixes: of an environment's allocators, of a session's
BARE = ("", "")
_ANY_DEVICE = MemoryInfo.parse("host")  # for shares of a device that are only checked


@dataclass(eq=False)  # one entry is not another with the same values
class _Entry:
    resource: MemoryResource
    made_here: bool  # so it is closed with its last reference
    references: int = 1


class Environment(Closable):
    """Allocators by memory, shared by all sessions of the environment.

    A memory is a device, its ordinal included, and a kind: ``cuda:0``, ``cuda:1`` and
    ``cuda:0/host_accessible`` are three. Safe to use from many threads.

    Parameters
    ----------
    config : Mapping, optional
        Settings of the arenas that `register` makes. ``ep_factory.<name>.arena.<field>`` applies to
        the allocators of that name: a memory's name, ``cuda:0`` or ``cuda:1/managed``, a device
        type, ``cuda`` (the own memory of every CUDA device), or the `MemoryInfo.name` that it was
        registered with; a bare ``arena.<field>`` applies to all; ``ep.<name>.arena.<field>`` to
        the private arenas of sessions. Names are matched without regard to case.

    Attributes
    ----------
    closed : bool
        Whether `close` was called.

    Raises
    ------
    ConfigError
        Unknown key, bad value, or one option given twice with different values.

    Notes
    -----
    Each registered allocator counts references: `register` and `acquire` add one, `release`
    removes one, and with the last it is unregistered. An allocator that the environment made is
    closed then, unless a buffer of it is in use, work of the device still uses its memory, or a
    registered adaptor is around it. Such a one goes on, and ends when nothing refers to it any
    more, as a dropped arena does: no call of an environment waits for the streams of its
    allocators. A resource that the caller registered stays open.

    Warns
    -----
    ConfigWarning
        An allocator is made for which only keys under the other prefix exist: they have no effect
        on it. Or keys are under a name that is neither a device's memory nor the `MemoryInfo.name`
        of one that was registered, as ``ep_factory.CUDAExecutionProvider`` without such a memory:
        when a memory is registered that no key names, at the latest by `close` or when the
        environment is dropped. So register a memory with a name of its own first.

    Examples
    --------
    >>> import gpumem
    >>> with gpumem.Environment({"ep_factory.host.arena.max_mem": 1 << 30}) as environment:
    ...     arena = environment.register("host")
    ...     with gpumem.Session("host", environment=environment) as session:
    ...         session.allocator() is arena, arena.stats().limit
    (True, 1073741824)
    """

    # Names of keys that only a `MemoryInfo.name` can match, and none has so far.
    _unclaimed: Mapping[str, str] = MappingProxyType({})

    def __init__(self, config: Settings | None = None) -> None:
        self._lock = ForkLock()
        self._entries: dict[tuple[Device, MemoryKind], _Entry] = {}
        self._replaced: list[_Entry] = []
        self._dropped: deque[MemoryResource] = deque()  # by sessions that are gone
        self._is_held = False  # the lock, by any thread
        self._settings = read_prefixes({} if config is None else config)
        self._unclaimed = {
            name: which for which, name in self._settings if which and not _MEMORY_NAME.match(name)
        }

    # ---- allocators ------------------------------------------------------------------------------

    def register(
        self,
        memory: Memory,
        config: ArenaConfig | Settings | MemoryResource | None = None,
        **settings: Unpack[ArenaSettings],
    ) -> MemoryResource:
        """Register the allocator of a memory, in place of the one that it has.

        Parameters
        ----------
        memory : MemoryInfo, Device or str
        config : ArenaConfig, Mapping or MemoryResource, optional
            Settings of the arena, or of the driver's pool (``use_cuda_mempool``), that is made; a
            mapping overrides the environment's own settings, and its keys of other memory are
            checked and left out. A resource is used as it is, and not closed; one that the memory
            has already stays, with its references. None: the environment's settings.
        **settings
            Fields of `ArenaConfig`, which override those of `config`.

        Returns
        -------
        MemoryResource
            The new allocator. The previous one is usable until its last reference is released.

        Raises
        ------
        ConfigError, TypeError, ValueError, DriverError
            The allocator cannot be made, or is of another memory; or a resource has settings
            beside it. The previous one stays.
        ClosedError
            The environment is closed, or the resource is.

        Examples
        --------
        >>> import gpumem
        >>> with gpumem.Environment() as environment, gpumem.Arena("host") as mine:
        ...     made = environment.register("host", max_mem="1MiB")
        ...     _ = environment.register("host", mine)       # in its place; `made` is closed
        ...     made.closed, environment.shared_allocator("host") is mine
        (True, True)
        """
        info = MemoryInfo.parse(memory)
        made_here = not isinstance(config, MemoryResource)
        if isinstance(config, MemoryResource):
            if settings:
                raise TypeError(f"settings {list(settings)} have no effect on {config!r}")
            if _key(config.memory) != _key(info):
                raise ConfigError(f"{config!r} is on {config.memory}: it cannot serve {info}")
            resource = config
        else:
            self._require_open()
            resource = resource_from_config(
                info, self.settings_for(info, SHARED, config, **settings), name=info.name
            )
        try:
            self._put(info, _Entry(resource, made_here))
        except ClosedError:
            if made_here:
                resource.close()
            raise
        return resource

    def _put(self, info: MemoryInfo, entry: _Entry) -> None:
        ended: list[MemoryResource] = []
        with self._alone():
            self._require_open()
            if entry.resource.closed:
                raise ClosedError(f"{entry.resource!r} is closed: expected an open resource")
            before = self._entries.get(_key(info))
            if before is not None and before.resource is entry.resource:
                return
            entry = self._again(entry)
            self._entries[_key(info)] = entry
            if before is not None:
                self._replaced.append(before)
                ended = self._drop(before)
        close_those_idle(ended)

    def _again(self, entry: _Entry) -> _Entry:
        """Return the entry of a resource that was replaced and is still held, else a new one."""
        for held in self._replaced:
            if held.resource is entry.resource:
                self._replaced.remove(held)
                held.references += 1
                return held
        return entry

    def shared_allocator(self, memory: Memory) -> MemoryResource | None:
        """Return the allocator registered for exactly this memory, its kind included, or None.

        Examples
        --------
        >>> import gpumem
        >>> with gpumem.Environment() as environment:
        ...     arena = environment.register("host")
        ...     environment.shared_allocator("host:0") is arena
        ...     environment.shared_allocator("host/managed") is None
        True
        True
        """
        entry = self._entries.get(_key(MemoryInfo.parse(memory)))
        return None if entry is None else entry.resource

    def acquire(self, memory: Memory) -> MemoryResource:
        """Return the allocator of a memory with one more reference, for `release`.

        Raises
        ------
        NoAllocatorError
            No allocator is registered.

        Examples
        --------
        >>> import gpumem
        >>> with gpumem.Environment() as environment:
        ...     arena = environment.register("host")
        ...     arena is environment.acquire("host"), environment.references(arena)
        ...     environment.release(arena)
        (True, 2)
        """
        info = MemoryInfo.parse(memory)
        with self._alone():
            entry = self._entry_of(info)
            entry.references += 1
            return entry.resource

    def release(self, allocator: Memory | MemoryResource) -> None:
        """Release one reference.

        Parameters
        ----------
        allocator : MemoryResource, MemoryInfo, Device or str
            The result of `register` or `acquire`, even if it was replaced since; or its memory, for
            the allocator that is registered now.

        Raises
        ------
        NoAllocatorError
            There is no such allocator, or no reference to it is left.

        Examples
        --------
        >>> import gpumem
        >>> environment = gpumem.Environment()
        >>> arena = environment.register("host")
        >>> environment.release(arena)       # the last reference: an arena made here is closed
        >>> arena.closed, environment.memories()
        (True, [])
        """
        with self._alone():
            ended = self._drop(self._entry_of(allocator))
        close_those_idle(ended)

    def _release_soon(self, allocator: MemoryResource) -> None:
        self._dropped.append(allocator)
        self._release_dropped()

    def _release_dropped(self) -> None:
        # This may run in a finalizer, inside another call. The holder of the lock then releases
        # the allocators at its end.
        while self._dropped and self._lock.enter_if_free():
            try:
                if self._is_held:
                    return
                with self._held():
                    pass
            finally:
                self._lock.leave()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            with self._lock, self._held():
                yield
        finally:
            self._release_dropped()

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Release allocators of dropped sessions, and keep finalizers out. Caller holds `_lock`."""
        was_held, self._is_held = self._is_held, True
        try:
            while self._dropped:
                allocator = self._dropped.popleft()
                with contextlib.suppress(NoAllocatorError):
                    # Not closed, in a finalizer: an arena ends when nothing refers to it.
                    self._drop(self._entry_of(allocator))
            yield
        finally:
            self._is_held = was_held

    def references(self, allocator: Memory | MemoryResource) -> int:
        """Return the number of references of an allocator.

        Raises
        ------
        NoAllocatorError
            There is no such allocator.
        """
        with self._alone():
            return self._entry_of(allocator).references

    def _entry_of(self, allocator: Memory | MemoryResource) -> _Entry:
        if isinstance(allocator, MemoryResource):
            entries = (*self._entries.values(), *self._replaced)
            found = next((entry for entry in entries if entry.resource is allocator), None)
        else:
            found = self._entries.get(_key(MemoryInfo.parse(allocator)))
        if found is None:
            why = "not registered in this environment: register one"
            raise NoAllocatorError(f"{allocator} is {why}")
        return found

    def _drop(self, entry: _Entry) -> list[MemoryResource]:
        """Remove a reference; return the resources to close once the lock is released."""
        if entry.references > 1:
            entry.references -= 1
            return []
        replaced = [other for other in self._replaced if other is not entry]
        entries = {key: other for key, other in self._entries.items() if other is not entry}
        is_idle = entry.made_here and not self._is_beneath(entry)
        ended = [entry.resource] if is_idle else []
        # Nothing that can fail follows: a release that lacks host memory can be repeated.
        entry.references, self._entries, self._replaced = 0, entries, replaced
        return ended

    def _is_beneath(self, ending: _Entry) -> bool:
        """Return whether an adaptor of another entry allocates blocks of an entry's resource."""
        resource = ending.resource
        entries = (*self._entries.values(), *self._replaced)
        above = [entry.resource for entry in entries if entry is not ending]
        while above:
            each = above.pop()
            if each is resource:
                return True
            above += each.upstreams if isinstance(each, Adaptor) else ()
        return False

    def memories(self) -> list[MemoryInfo]:
        """Return the memories that have an allocator."""
        return [entry.resource.memory for entry in list(self._entries.values())]

    # ---- settings --------------------------------------------------------------------------------

    def settings_for(
        self,
        memory: Memory,
        prefix: str,
        more: ArenaConfig | Settings | None = None,
        **settings: Unpack[ArenaSettings],
    ) -> ArenaConfig:
        """Return the settings of an arena of this memory: the environment's, overridden by `more`.

        Parameters
        ----------
        memory : MemoryInfo, Device or str
        prefix : {"ep_factory", "ep"}
            For a shared allocator, or for a session's private arena.
        more : ArenaConfig or Mapping, optional
            A mapping overrides the environment's settings; an ArenaConfig replaces them.
        **settings
            Fields of `ArenaConfig`, which override those of `more`.

        Raises
        ------
        ConfigError
            As `ArenaConfig.from_mapping`, or a key under a name that is not of any memory; or
            another prefix.

        Warns
        -----
        ConfigWarning
            Keys for this memory exist under the other prefix only, and no allocator that they are
            for is registered. Or no key names this memory, and there are keys under a name that no
            memory has had.

        Examples
        --------
        >>> import gpumem
        >>> environment = gpumem.Environment({"arena.max_mem": 1000, "ep.host.arena.max_mem": 2000})
        >>> [environment.settings_for(memory, "ep").max_mem for memory in ("host", "cuda:0")]
        [2000, 1000]
        """
        info = MemoryInfo.parse(memory)
        if prefix not in (SHARED, PRIVATE):
            raise ConfigError(f"invalid prefix = {prefix!r}: expected {SHARED!r} or {PRIVATE!r}")
        names = names_of(info)
        self._claim(names)
        ArenaConfig._refuse_unknown("register()", settings, ("config",))
        chosen = ArenaConfig._values(settings.items(), memory=info)
        if isinstance(more, ArenaConfig):
            return replace(more, **chosen)
        own = {} if more is None else read_prefixes(more)
        # A session's own settings, and keys that the registered allocator has, are as intended.
        if prefix == SHARED or not (own or _key(info) in self._entries):
            warn_of_other_prefix(self._settings, prefix, names)
        if not any(name in names for _, name in self._settings):
            self._warn_of_unclaimed(f"; {info} takes {_listed(names)}", stacklevel=4)
        more_of_it = named_settings(own, info, prefix)
        warn_of_other_prefix(own, prefix, names)
        shared = explicit_settings(self._settings, info, prefix)
        return ArenaConfig(**(shared | more_of_it | chosen))

    def _claim(self, names: set[str]) -> None:
        with self._alone():
            self._unclaimed = {
                name: which for name, which in self._unclaimed.items() if name not in names
            }

    def _warn_of_unclaimed(self, more: str = "", *, stacklevel: int) -> None:
        """Warn of keys under names that no memory has, once."""
        with self._alone():
            unclaimed, self._unclaimed = self._unclaimed, {}
        for name, which in unclaimed.items():
            warnings.warn(
                f"keys under {which}.{name} have no effect: no memory of that name is registered. "
                f"Expected a device's type or memory, or the name of a MemoryInfo{more}",
                ConfigWarning,
                stacklevel=stacklevel,
            )

    # ---- life ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the references of `register`. Idempotent.

        Raises
        ------
        InUseError
            A session still has a reference to an allocator; nothing is changed.

        Examples
        --------
        >>> import gpumem
        >>> environment = gpumem.Environment()
        >>> arena = environment.register("host")
        >>> session = gpumem.Session("host", environment=environment)
        >>> try:
        ...     environment.close()
        ... except gpumem.errors.InUseError:
        ...     session.close()
        ...     environment.close()
        >>> arena.closed
        True
        """
        with self._alone():
            if self._closed:
                return
            held = [
                entry.resource
                for entry in (*self._entries.values(), *self._replaced)
                if entry.references > (entry in self._entries.values())
            ]
            if held:
                raise InUseError(
                    f"{self!r} cannot be closed: sessions or acquire() use {held}; close or "
                    "release them first"
                )
            ended = [each for entry in list(self._entries.values()) for each in self._drop(entry)]
            self._closed = True
        close_those_idle(ended)
        self._warn_of_unclaimed(stacklevel=3)

    def __del__(self) -> None:
        # At Python's exit, globals that the method needs may be gone.
        if self._unclaimed:
            self._warn_of_unclaimed(stacklevel=3)

    def __repr__(self) -> str:
        memories = ", ".join(str(memory) for memory in self.memories())
        return f"<gpumem.Environment of {memories or 'nothing'}{', closed' * self._closed}>"


# ---- keys under prefixes -------------------------------------------------------------------------


def read_prefixes(config: Any) -> Prefixed:
    """Sort settings by prefix and plain name, and check every key and value."""
    if not isinstance(config, Mapping):
        kind = type(config).__name__
        raise TypeError(f"config must be a mapping or an ArenaConfig, not {kind}")
    found: Prefixed = {}
    for key, value in config.items():
        parsed = _parse_key(key)
        which = BARE
        if parsed and parsed.prefix and parsed.name:
            which = parsed.prefix, _plain_name(parsed.name)
        found.setdefault(which, []).append((key, value))
    for items in found.values():
        ArenaConfig._values(items, memory=_ANY_DEVICE)
    return found


def explicit_settings(given: Prefixed, memory: MemoryInfo, prefix: str) -> dict[str, Any]:
    """Return the fields that keys set for a memory; keys that name it override bare ones."""
    names = names_of(memory)
    named = [given.get((prefix, name), []) for name in sorted(names)]
    return ArenaConfig._values(given.get(BARE, ()), memory=memory) | ArenaConfig._values(
        (item for items in named for item in items), memory=memory
    )


def named_settings(given: Prefixed, memory: MemoryInfo, prefix: str) -> dict[str, Any]:
    """Return the fields that keys for one memory set; those of other memory are left out."""
    names = names_of(memory)
    for which, name in given:
        if which and name not in names and not _MEMORY_NAME.match(name):
            raise ConfigError(
                f"keys under {which}.{name} are not for this memory: expected {_listed(names)}"
            )
    return explicit_settings(given, memory, prefix)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def is_elsewhere(name: str, device: Device) -> bool:
    """Return whether a name in keys is of another device than this one."""
    match = _MEMORY_NAME.match(name)
    if match is None:
        return False
    return match[1].lower() != device.type or (
        match[2] is not None and int(match[2]) != device.index
    )


def without_other_devices(config: Mapping[Any, Any], device: Device) -> dict[Any, Any]:
    """Return the settings without those of other devices; the values of those are checked.

    So one mapping may hold the settings of several devices' sessions.
    """
    read_prefixes(config)
    return {
        key: value
        for key, value in config.items()
        if not (parsed := _parse_key(key)) or not is_elsewhere(parsed.name or "", device)
    }


def names_of(memory: MemoryInfo) -> set[str]:
    """Return the plain names of a memory in keys."""
    names = {str(memory)}
    if str(memory) == str(memory.device):
        names.add(memory.device.type)
    else:
        names.add(f"{memory.device.type}/{memory.kind.value}")
    if memory.name is not None:
        names.add(_plain_name(memory.name))
    return names


def warn_of_other_prefix(given: Prefixed, prefix: str, names: set[str]) -> None:
    """Warn of keys for these names if they exist under the other prefix alone."""
    other = PRIVATE if prefix == SHARED else SHARED
    under = {which for which, name in given if name in names}
    if under == {other}:
        name = min(name for which, name in given if which == other and name in names)
        owner = {SHARED: "an environment's shared allocators", PRIVATE: "sessions' private arenas"}
        warnings.warn(
            f"keys under {other}.{name} are for {owner[other]} and have no effect on {name} here, "
            f"which takes {prefix}.{name}",
            ConfigWarning,
            stacklevel=4,
        )


def close_those_idle(resources: list[MemoryResource]) -> None:
    """Close resources, unless they are in use or that would wait: those end by themselves.

    Each is closed, also where a debug heap's findings are raised by the end of another one.
    """
    with contextlib.ExitStack() as stack:
        for resource in resources:
            stack.callback(resource._close_if_idle)


def _key(memory: MemoryInfo) -> tuple[Device, MemoryKind]:
    # Alignment and name play no part.
    return memory.device, memory.kind
