"""Options of a session: typed fields, their string keys, and the valid combinations."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self, TypedDict

from gpumem._buffer.resource import MemoryResource
from gpumem._buffer.stream import Stream, _native_handle
from gpumem._support.arguments import refuse_keywords, unknown
from gpumem._support.texts import shown, visible
from gpumem.config import ArenaConfig, _applies, _bad, _boolean, _enter_once, _parse_key
from gpumem.device import Device, _plain_name
from gpumem.errors import ConfigError
from gpumem.session.environment import is_elsewhere, read_prefixes

if TYPE_CHECKING:
    from gpumem._buffer.stream import _StreamLike

_LEGACY_HANDLES = (0, 1)
_CALLBACKS = ("alloc", "free", "empty_cache")
_EXTERNAL = "gpu_external_"  # before a callback in a key
_OF_ARENA = {  # settings that are typed without "arena", for errors; the last as ONNX Runtime's
    **{each.name: each.name for each in fields(ArenaConfig)},
    "gpu_mem_limit": "max_mem",
    "arena_extend_strategy": "extend_strategy",
    "enable_cpu_mem_arena": "enable",
}
_PARTITION = "gpumem.planning.partition(settings=...)"
_MEANT = {
    **{name: f"arena.{field}" for name, field in _OF_ARENA.items()},
    "layer_assignment_settings": _PARTITION,
    "name_based_layer_assignment": _PARTITION,
    "strict_workspace_verification": _PARTITION,
    "enable_static_workspace_preallocation": "gpumem.planning.plan_memory(settings=...)",
}
_MEANT_KEYWORDS = {name: f'arena={{"{field}": ...}}' for name, field in _OF_ARENA.items()}


class SessionSettings(TypedDict, total=False):
    """Keywords of `Session` and `SessionOptions` for type checkers and editors."""

    user_compute_stream: _StreamLike | str
    has_user_compute_stream: bool | None
    do_copy_in_default_stream: bool
    use_ep_level_unified_stream: bool
    external_allocator: MemoryResource | tuple[Any, ...] | Mapping[str, Any] | None
    enable_cuda_graph: bool
    arena: ArenaConfig | Mapping[str, object] | None
    private_arena: bool


@dataclass(frozen=True)
class SessionOptions:
    """How a session uses streams and memory. Fields that contradict each other are refused.

    Attributes
    ----------
    user_compute_stream : stream, optional
        The caller's stream, on which everything runs; the session does not destroy it. As text
        its handle, decimal or ``0x...``. Forces the unified stream.
    has_user_compute_stream : bool
        Whether there is one; None: if `user_compute_stream` is not None. The handle 0, the legacy
        default stream, requires True.
    do_copy_in_default_stream : bool
        Queue copies on the compute stream; False: on a separate stream.
    use_ep_level_unified_stream : bool
        One stream for everything, so that two runs at a time are refused. A user's stream and an
        external allocator force it: then this is True.
    external_allocator : MemoryResource, tuple or Mapping, optional
        Serves the device's memory of this session alone: an `ExternalAllocator`; or its arguments
        ``(alloc, free)`` or ``(alloc, free, empty_cache)``; or a mapping of those names. Forces the
        unified stream.
    enable_cuda_graph : bool
        Capture runs and replay them, see `Session.run`: tensors that the session makes keep
        their addresses from run to run, runs do not overlap, and one on a stream that the caller
        captures does not wait. Not with the driver's pool: a graph cannot retain its blocks.
    arena : ArenaConfig or Mapping, optional
        Required settings of the arena of the device's memory.
    private_arena : bool
        Make an arena for this session alone, with the settings in `arena`.

    Raises
    ------
    ConfigError
        A value is invalid, or two do not go together: a flag without a stream, a stream or 0
        without the flag, half-given callbacks, a user's stream or settings of an arena with an
        external allocator, the legacy default stream with graph capture, a unified stream with
        copies on another.

    Examples
    --------
    >>> from gpumem import SessionOptions
    >>> SessionOptions.from_mapping({"ep.host.use_ep_level_unified_stream": "1"}).unified_stream
    True
    """

    user_compute_stream: _StreamLike = None
    has_user_compute_stream: bool | None = None  # a bool once made
    do_copy_in_default_stream: bool = True
    use_ep_level_unified_stream: bool = False
    external_allocator: Any = None
    enable_cuda_graph: bool = False
    arena: ArenaConfig | Mapping[str, object] | None = None
    private_arena: bool = False
    # Settings of the arena under ep.<name>, which a session reads with its environment's.
    _arena_keys: Mapping[str, object] = field(default_factory=dict, repr=False, kw_only=True)

    @classmethod
    def _of_keywords(cls, given: Mapping[str, Any]) -> Self:
        """Return the options that were passed to `Session` as keywords."""
        refused = [name for name in given if name not in _FIELDS]
        own = ("device", "options", "environment")
        refuse_keywords("Session()", refused, (*own, *_FIELDS), _MEANT_KEYWORDS)
        return cls(**given)

    def __post_init__(self) -> None:
        for name in _BOOLEANS:
            object.__setattr__(self, name, _boolean(name, getattr(self, name)))
        self._settle_stream()
        object.__setattr__(self, "external_allocator", _allocator(self.external_allocator))
        if self.arena is not None and not isinstance(self.arena, ArenaConfig | Mapping):
            raise _bad("arena", self.arena, "an ArenaConfig or a mapping")
        if isinstance(self.arena, Mapping):
            read_prefixes(self.arena)
        self._require_no_conflict()
        object.__setattr__(self, "use_ep_level_unified_stream", self.unified_stream)

    def _settle_stream(self) -> None:
        stream, flag = self.user_compute_stream, self.has_user_compute_stream
        if isinstance(stream, str):
            stream = _handle("user_compute_stream", stream)
            object.__setattr__(self, "user_compute_stream", stream)
        if stream is not None and not isinstance(stream, int | Stream):
            _native_handle(stream)  # TypeError of what is no stream of any library
        if isinstance(stream, int) and not _is_handle(stream):
            raise _bad("user_compute_stream", stream, "a stream, or a handle from 0 to 2**64 - 1")
        given = stream is not None
        if flag is None:
            if isinstance(stream, int) and stream == 0:
                raise ConfigError(
                    "invalid user_compute_stream = 0 without has_user_compute_stream = True: "
                    "it is the legacy default stream"
                )
            flag = given
        flag = _boolean("has_user_compute_stream", flag)
        if flag and not given:
            raise ConfigError(
                "invalid has_user_compute_stream = True without user_compute_stream: "
                "expected a stream or a handle (0 is the legacy default stream)"
            )
        if given and not flag:
            raise ConfigError(
                f"invalid has_user_compute_stream = False with user_compute_stream = "
                f"{stream!r}: expected True, or no stream"
            )
        object.__setattr__(self, "has_user_compute_stream", flag)

    def _require_no_conflict(self) -> None:
        if self.external_allocator is not None:
            if self.has_user_compute_stream:
                raise ConfigError(
                    "external_allocator cannot be combined with user_compute_stream = "
                    f"{self.user_compute_stream!r}: expected one of the two"
                )
            if self.arena is not None or self._arena_keys or self.private_arena:
                raise ConfigError(
                    "arena and private_arena have no effect with external_allocator, which serves "
                    "the memory: expected one of the two"
                )
        captured = self.enable_cuda_graph and self.has_user_compute_stream
        if captured and _native_handle(self.user_compute_stream) in _LEGACY_HANDLES:
            raise ConfigError(
                f"invalid user_compute_stream = {self.user_compute_stream!r} with "
                "enable_cuda_graph: the legacy default stream cannot be captured"
            )
        if not self.do_copy_in_default_stream and self.unified_stream:
            raise ConfigError(
                "invalid do_copy_in_default_stream = False with a unified stream "
                f"({self._why_unified()}): expected True, since there is one stream for everything"
            )

    @property
    def unified_stream(self) -> bool:
        """Whether one stream serves everything, by an option or forced by another one."""
        return bool(self._why_unified())

    def _why_unified(self) -> str:
        """Return the reason for the unified stream; empty without one."""
        if self.has_user_compute_stream:
            return "forced by user_compute_stream"
        if self.external_allocator is not None:
            return "forced by external_allocator"
        return "use_ep_level_unified_stream = True" if self.use_ep_level_unified_stream else ""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object], name: str | None = None) -> Self:
        """Read string keys: ``<option>`` or ``ep.<name>.<option>``, and settings of an arena.

        Parameters
        ----------
        mapping : Mapping[str, object]
            Values as text or as the field's own type. The external allocator's parts may stand
            under ``gpu_external_alloc``, ``gpu_external_free`` and ``gpu_external_empty_cache``,
            addresses as text; an arena's settings under ``arena.<field>``, bare or prefixed.
        name : str, optional
            Take ``ep.<name>.`` for this name only, as `ArenaConfig.from_mapping`; None takes any.

        Raises
        ------
        TypeError
            `mapping` is not a mapping.
        ConfigError
            Unknown key, invalid value, one option given twice with different values, or options
            that contradict each other.
        """
        names = () if name is None else (name,)
        return cls(**cls._values(_require_mapping(mapping).items(), names))

    @classmethod
    def _for_memory(
        cls, mapping: Mapping[str, object], device: Device, names: Collection[str]
    ) -> Self:
        """Read the keys of one device; those of other devices are checked and left out."""
        own: list[tuple[str, object]] = []
        others: dict[str, list[tuple[str, object]]] = {}
        for key, value in _require_mapping(mapping).items():
            parsed = _parse_key(key)
            name = _plain_name(parsed.name) if parsed and parsed.name else None
            if name is not None and is_elsewhere(name, device):
                others.setdefault(name, []).append((key, value))
                continue
            # An arena's keys are compared with its own name, which a shared arena may have.
            if name is not None and name not in names and _option_of(key)[0] is not None:
                accepted = ", ".join(sorted(names))
                raise ConfigError(f"key {key!r} is for {name!r}: expected {accepted}")
            own.append((key, value))
        for items in others.values():
            cls._values(items)
        return cls(**cls._values(own))

    @classmethod
    def _values(
        cls, items: Iterable[tuple[str, object]], names: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return the fields that the keys set."""
        values: dict[str, Any] = {}
        arena_keys: dict[str, object] = {}
        given: dict[str, str] = {}
        for key, value in items:
            option, name = _option_of(key)
            if option is None:
                arena_keys[key] = value
                continue
            parsed = _parse(key, option, value)
            if _applies(key, name, names):
                text = f"{visible(key)} = {shown(value)}"
                _enter_once(values, given, option, parsed, text)
        if callbacks := {part: values.pop(part) for part in _CALLBACKS if part in values}:
            if "external_allocator" in values:
                raise ConfigError("external_allocator is given twice: as itself and in parts")
            values["external_allocator"] = callbacks
        if arena_keys and "arena" in values:
            raise ConfigError("arena is given twice: as itself and in parts")
        read_prefixes(arena_keys)
        return values | {"_arena_keys": arena_keys}


def _require_mapping(mapping: Any) -> Mapping[str, object]:
    if not isinstance(mapping, Mapping):
        kind = type(mapping).__name__
        raise TypeError(f"a session takes SessionOptions or a mapping, not {kind}")
    return mapping


_BOOLEANS = (
    "do_copy_in_default_stream",
    "use_ep_level_unified_stream",
    "enable_cuda_graph",
    "private_arena",
)


def _option_of(key: object) -> tuple[str | None, str | None]:
    """Return the option or the callback of a key, None for a setting of an arena; and its name."""
    parsed = _parse_key(key)
    if parsed and parsed.of_arena:
        return None, None
    if parsed and parsed.prefix != "ep_factory":
        callback = parsed.setting.removeprefix(_EXTERNAL)
        if parsed.setting in _FIELDS or (callback != parsed.setting and callback in _CALLBACKS):
            return callback, parsed.name
    accepted = (*_FIELDS, *(_EXTERNAL + part for part in _CALLBACKS), "arena.<field>")
    raise ConfigError(unknown("key", key, "a session", accepted, _MEANT))


def _parse(key: str, option: str, value: object) -> Any:
    if option in _BOOLEANS or option == "has_user_compute_stream":
        return _boolean(key, value)
    if isinstance(value, str) and (option == "user_compute_stream" or option in _CALLBACKS):
        return _handle(key, value)
    return value


def _handle(key: str, text: str) -> int:
    """Read a handle or an address: the whole text is one number."""
    if re.fullmatch(r"0[xX][0-9a-fA-F]{1,16}|[0-9]{1,20}", text):
        number = int(text, 16 if text[:2] in ("0x", "0X") else 10)
        if _is_handle(number):
            return number
    raise _bad(key, text, "a whole number, decimal or 0x..., from 0 to 2**64 - 1")


def _is_handle(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64


def _allocator(given: Any) -> MemoryResource | tuple[Any, Any, Any] | None:
    """Return a resource as it is, and callbacks as (alloc, free, empty_cache)."""
    if given is None or isinstance(given, MemoryResource):
        return given
    if isinstance(given, Mapping):
        for name in given:
            if name not in _CALLBACKS:
                raise ConfigError(unknown("key", name, "external_allocator", _CALLBACKS))
        parts = tuple(given.get(name) for name in _CALLBACKS)
    elif isinstance(given, tuple) and len(given) in (2, 3):
        parts = (*given, None)[:3]
    else:
        raise _bad(
            "external_allocator", given, "an ExternalAllocator, or (alloc, free[, empty_cache])"
        )
    for name, part in zip(_CALLBACKS, parts, strict=True):
        missing = part is None or (isinstance(part, int) and part == 0)
        if missing and name != "empty_cache":
            raise ConfigError(
                f"external_allocator has no {name}: alloc and free are given together, "
                "with or without empty_cache"
            )
        if not missing and not callable(part) and not _is_handle(part):
            raise _bad(
                f"external_allocator's {name}", part, "a callable, or an address below 2**64"
            )
    return (parts[0], parts[1], parts[2] or None)


_FIELDS = tuple(each.name for each in fields(SessionOptions) if not each.name.startswith("_"))
