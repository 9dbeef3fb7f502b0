"""Settings of arenas and pools: typed fields and their string keys.

A number of bytes may be a text with a unit, ``"512MiB"`` or ``"2GB"``. A limit that is passed with
a memory, as to `Arena`, may be a share of the device's whole memory, ``"80%"``. A mapping may name
a field bare (``max_mem``), as ``arena.max_mem``, or under a prefix of ONNX Runtime's style,
``ep.<name>.arena.max_mem`` (a session's) or ``ep_factory.<name>.arena.max_mem`` (an environment's).
Nothing is ignored: an unknown key, a malformed or out-of-range value, or an option with two
different values is a ConfigError naming key, value and accepted range. A valid setting that has no
effect on an object causes a ConfigWarning when the object is made; one that requests another kind
of object is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    SupportsIndex,
    TypeAlias,
    TypedDict,
    Unpack,
)

from gpumem._support.arguments import (
    is_integer,
    refuse_keywords,
    require,
    unknown,
    whole_number,
)
from gpumem._support.signatures import ClassSignature
from gpumem._support.sizes import (
    MAX_BYTES,
    is_share,
    is_size_with_unit,
    nearly_a_size,
    parse_size,
    share_of,
)
from gpumem._support.texts import shown, visible
from gpumem.device import Device, MemoryInfo, _means
from gpumem.errors import ConfigError

__all__ = ["ArenaConfig", "ArenaSettings", "PoolConfig", "PoolSettings"]
__dir__ = __all__.copy

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
MAX_UNSIGNED = (1 << 64) - 1
MAX_NODE = 1023

_LIMITS = ("limit", "max_mem", "max_memory", "max_size", "memory_limit", "nbytes", "size")
_PAGED_FROM = 8 * MIB
_PAGE = 2 * MIB

Parser: TypeAlias = Callable[[str, object], Any]
_Bytes: TypeAlias = SupportsIndex | str

# Compiled at the first use, and kept by `re`.
_KEY = r"(?s)(?:(ep_factory|ep)\.([^.]+)\.)?(arena\.)?(.+)"
_FRACTION = r"[0-9]{1,4}(\.[0-9]{1,24})?(e-[0-9]{1,3})?"


class _Key(NamedTuple):
    """A string key of a setting: ``[ep.<name>.|ep_factory.<name>.][arena.]<setting>``."""

    prefix: str | None  # "ep" or "ep_factory"
    name: str | None
    of_arena: bool
    setting: str


def _parse_key(key: object) -> _Key | None:
    """Read a key of any mapping of settings; None if it does not have this form."""
    match = re.fullmatch(_KEY, key) if isinstance(key, str) else None
    return _Key(match[1], match[2], match[3] is not None, match[4]) if match else None


def _integer(low: int, high: int) -> Callable[[str, object], int]:
    def parse(key: str, value: object) -> int:
        number = whole_number(value)
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,20}", value):
            number = int(value)
        if number is None or not low <= number <= high:
            raise _bad(key, value, f"an integer from {low} to {high}")
        return number

    return parse


def _size(low: int, high: int) -> Callable[[str, object], int]:
    integer = _integer(low, high)

    def parse(key: str, value: object) -> int:
        try:
            if isinstance(value, str) and is_size_with_unit(value):
                value = parse_size(value)
            return integer(key, value)
        except ConfigError:
            if better := nearly_a_size(value):
                raise ConfigError(f"invalid {visible(key)} = {shown(value)}: {better}") from None
            accepted = f'an integer from {low} to {high}, or a size in whole bytes such as "512MiB"'
            raise _bad(key, value, accepted) from None

    return parse


def _choice(**spellings: str) -> Callable[[str, object], str]:
    def parse(key: str, value: object) -> str:
        text = str(value) if isinstance(value, str) or is_integer(value, 0, 9) else None
        for name, alias in spellings.items():
            if text and text in (name, alias):
                return name
        accepted = ", ".join(f'"{name}"' for name in spellings)
        numbers = ", ".join(f'"{alias}"' for alias in spellings.values() if alias)
        raise _bad(key, value, f"one of {accepted}" + (f" (or {numbers})" if numbers else ""))

    return parse


def _boolean(key: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("0", "1", "true", "false"):
        return value.lower() in ("1", "true")
    raise _bad(key, value, "true or false (1 or 0)")


def _optional(parse: Parser, none: str, accepted: str) -> Parser:
    """Return a parser of values that may also be None, written as `none`."""

    def parse_or_none(key: str, value: object) -> Any:
        if value is None or value == none:
            return None
        try:
            return parse(key, value)
        except ConfigError:
            raise _bad(key, value, f'{accepted}, or "{none}"') from None

    return parse_or_none


def _limit(key: str, value: object) -> int:
    """Read a limit of bytes. None is no limit, as for a budget; as text that is 0."""
    if is_share(value):
        raise _bad(key, value, "bytes; Arena and DriverPool, which have a memory, take percentages")
    return 0 if value is None else _size(0, MAX_BYTES)(key, value)


def _share(high: int) -> Callable[[str, object], float]:
    def parse(key: str, value: object) -> float:
        if isinstance(value, str) and re.fullmatch(_FRACTION, value):
            value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:
            raise _bad(key, value, f"a number from 0 to {high}")
        return float(value)

    return parse


def _peers(key: str, value: object) -> str | tuple[Device, ...]:
    """Read "on_use", "none", or devices: an iterable, or as text with spaces between them."""
    if value in ("on_use", "none") and isinstance(value, str):
        return value
    devices = value.split() if isinstance(value, str) else value
    try:
        # A text without a name comes from an unset variable; it is not a list of devices.
        if isinstance(devices, Device) or not isinstance(devices, Iterable):
            raise TypeError
        if isinstance(value, str) and not devices:
            raise ValueError
        return tuple(dict.fromkeys(Device(each) for each in devices)) or "none"
    except (TypeError, ValueError):
        accepted = '"on_use", "none", or devices such as ["cuda:1"]'
        raise _bad(key, value, accepted) from None


def _bad(key: str, value: object, accepted: str) -> ConfigError:
    return ConfigError(f"invalid {visible(key)} = {shown(value, 200)}: expected {accepted}")


def _enter_once(
    values: dict[str, Any], given: dict[str, str], name: str, value: object, text: str
) -> None:
    """Enter a value and its text under its name; refuse a second, different value."""
    if name in values and values[name] != value:
        raise ConfigError(f"{name} is given twice with different values: {given[name]} and {text}")
    values[name], given[name] = value, text


def _applies(key: object, target: str | None, names: Collection[str]) -> bool:
    """Return whether a key under a name applies to an object of these names; without names, True.

    A key under a name that is neither one of them nor of any memory is refused.
    """
    if target is None or not names or target.lower() in (name.lower() for name in names):
        return True
    applies = {_means(target, name) for name in names}
    if applies == {None}:
        raise ConfigError(f"key {key!r} is for {target!r}, not for {' or '.join(map(repr, names))}")
    return True in applies


def _setting(default: Any, parse: Parser) -> Any:
    """Describe a field of `_Settings`: its default, and the function that checks a value."""
    return field(default=default, metadata={"parse": parse})


@dataclass(frozen=True)
class _Settings:
    """Fields made by `_setting`, and the string keys that name them."""

    _OF: ClassVar[str]
    _ALIASES: ClassVar[Mapping[str, str]] = {}
    _MEANT: ClassVar[Mapping[str, str]] = {}  # other libraries' names -> fields, for errors
    _LIMIT: ClassVar[str] = ""  # the field that limits bytes
    _NONE: ClassVar[str] = "nearest"  # how None is written; of ArenaConfig's numa_node
    _IMPLIED: ClassVar[dict[str, Parser]] = {}  # keys with one possible value

    __signature__: ClassVar[Any] = ClassSignature()  # `__new__` would hide it

    def __new__(cls, *_: Any, **given: Any) -> Self:
        cls._refuse_unknown(f"{cls.__name__}()", given)
        return super().__new__(cls)

    @classmethod
    def _refuse_unknown(
        cls, callee: str, given: Iterable[str], keywords: Collection[str] = ()
    ) -> None:
        names = (*keywords, *cls._parsers())
        refuse_keywords(callee, (name for name in given if name not in names), names, cls._MEANT)

    def __post_init__(self) -> None:
        for name, parse in self._parsers().items():
            object.__setattr__(self, name, parse(name, getattr(self, name)))

    @classmethod
    def _parsers(cls) -> dict[str, Parser]:
        return {each.name: each.metadata["parse"] for each in fields(cls)}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object], name: str | None = None) -> Self:
        """Read string keys, in any of the accepted spellings.

        Parameters
        ----------
        mapping : Mapping[str, object]
            Keys as above; values as text or as the field's own type.
        name : str, optional
            Read prefixed keys for this name only, in any case: a memory's name, such as ``cuda:1``,
            to which ``cuda`` also applies, or any other. Keys of another memory are checked and
            left out, so one mapping may hold the settings of several; other names are an error,
            because nothing is ignored silently. None reads keys under any name, as if they had
            none; two names with two values are then one option with two values. An object that is
            made from a mapping for a memory reads the keys of that memory.

        Raises
        ------
        TypeError
            `mapping` is not a mapping.
        ConfigError
            Unknown key, bad value, or one option given twice with different values.
        """
        return cls(**cls._values(cls._items_of(mapping), () if name is None else (name,)))

    @classmethod
    def _given(
        cls,
        config: Self | Mapping[str, object] | None,
        settings: Mapping[str, object],
        memory: MemoryInfo,
        keywords: Collection[str] = (),
    ) -> Self:
        """Return `config` with the settings that were passed to a constructor as keywords.

        They replace those of an object; a mapping may not have another value for one of them. Of a
        mapping only the keys of this memory apply. `keywords` are the constructor's other keywords,
        for the error of an unknown one.
        """
        cls._refuse_unknown(cls._OF, settings, keywords)
        if is_share(settings.get(cls._LIMIT)):
            settings = {**settings, **cls._values(settings.items(), memory=memory)}
        if isinstance(config, cls):
            return replace(config, **settings) if settings else config
        if config is None:
            return cls(**settings)
        names = [str(memory)] if memory.name is None else [str(memory), memory.name]
        items = [*cls._items_of(config), *settings.items()]
        return cls(**cls._values(items, names, memory))

    @classmethod
    def _items_of(cls, mapping: object) -> Iterable[tuple[object, object]]:
        if not isinstance(mapping, Mapping):
            kind = type(mapping).__name__
            limit = cls._LIMIT
            is_bytes = isinstance(mapping, str) or is_integer(mapping, 0, MAX_BYTES)
            raise TypeError(
                f"{cls._OF} takes {cls.__name__} or a mapping, not {kind}"
                + (f"; for a limit: {limit}={shown(mapping)}" if limit and is_bytes else "")
            )
        return mapping.items()

    @classmethod
    def from_text(cls, text: str, name: str | None = None) -> Self:
        """Read the text of `to_text`: ``key=value`` pairs with commas between them.

        Parameters
        ----------
        text : str
            Such as ``"max_mem=1048576,stream_reuse=wait"``; keys in any accepted spelling.
        name : str, optional
            As `from_mapping`.

        Raises
        ------
        ConfigError
            As `from_mapping`, or a part is not ``key=value``.
        """
        require("text", text, str, "a str")
        parts = [part.partition("=") for part in text.split(",")] if text else []
        for key, equals, value in parts:
            if not equals:
                raise ConfigError(f"invalid {key + value!r}: expected key=value")
        items = ((key, value) for key, _, value in parts)
        return cls(**cls._values(items, () if name is None else (name,)))

    @classmethod
    def _values(
        cls,
        items: Iterable[tuple[object, object]],
        names: Collection[str] = (),
        memory: MemoryInfo | None = None,
    ) -> dict[str, Any]:
        """Return the fields that the keys set for these names; without names, all of them.

        A limit may be a share of the device of `memory`.
        """
        parsers = cls._parsers() | cls._IMPLIED
        values: dict[str, Any] = {}
        given: dict[str, str] = {}
        for key, text in items:
            field, target = cls._field_of(key)
            if memory is not None and field == cls._LIMIT and is_share(text):
                text = share_of(str(key), str(text), memory._total_bytes())
            value = parsers[field](str(key), text)
            if _applies(key, target, names):
                _enter_once(values, given, field, value, f"{visible(str(key))} = {shown(text)}")
        return {field: value for field, value in values.items() if field not in cls._IMPLIED}

    @classmethod
    def _field_of(cls, key: object) -> tuple[str, str | None]:
        """Return the field of a key, and the name in its prefix."""
        parsed = _parse_key(key)
        field = cls._ALIASES.get(parsed.setting, parsed.setting) if parsed else ""
        if parsed is None or field not in cls._parsers() | cls._IMPLIED:
            raise ConfigError(unknown("key", key, cls._OF, cls._parsers(), cls._MEANT))
        return field, parsed.name

    def to_mapping(self) -> dict[str, str]:
        """Return the settings as text under ``arena.`` keys; `from_mapping` reads them back."""
        return {f"arena.{name}": self._text_of(name) for name in self._parsers()}

    def to_text(self) -> str:
        """Return all settings in one string; `from_text` reads it back."""
        return ",".join(f"{name}={self._text_of(name)}" for name in self._parsers())

    def _text_of(self, name: str) -> str:
        value = getattr(self, name)
        if value is None:
            return self._NONE
        if isinstance(value, tuple):
            return " ".join(map(str, value))
        return str(int(value)) if isinstance(value, bool) else str(value)


def _must_be_true(key: str, value: object) -> bool:
    if not _boolean(key, value):
        raise _bad(key, value, "true for a pool")
    return True


def _suits_limit(nbytes: int) -> bool:
    """Whether pages suit a limit: they cannot use the bytes above a whole number of pages."""
    return nbytes >= _PAGED_FROM and nbytes % _PAGE <= nbytes // 6


class _OfBacking(str):
    """A split rule that was not set, so that the backing decides it."""

    __slots__ = ()


class ArenaSettings(TypedDict, total=False):
    """Keywords of `Arena` and `ArenaConfig` for type checkers and editors."""

    extend_strategy: Literal["next_power_of_two", "same_as_requested"]
    initial_chunk_size_bytes: _Bytes
    max_dead_bytes_per_chunk: _Bytes
    initial_growth_chunk_size_bytes: _Bytes
    max_power_of_two_extend_bytes: _Bytes
    max_mem: _Bytes | None
    use_cuda_mempool: bool
    cuda_mempool_release_threshold: _Bytes
    cuda_mempool_bytes_to_keep_on_shrink: _Bytes
    backing: Literal["auto", "regions", "virtual"]
    split_rule: Literal["tight", "ort"]
    stream_reuse: Literal["completed", "wait", "never"]
    page_move_threshold: float
    page_move_budget: float
    oom_wait_ms: SupportsIndex
    oom_collect_ms: SupportsIndex
    numa_node: SupportsIndex | None
    peers: Literal["on_use", "none"] | Iterable[Device | str]
    sleep_keep_bytes: _Bytes
    enable: bool


@dataclass(frozen=True)
class ArenaConfig(_Settings):
    """How an arena grows, splits and shares.

    Attributes
    ----------
    extend_strategy : {"next_power_of_two", "same_as_requested"}
        Size of the next region: doubled, or exactly the size of the block.
    initial_chunk_size_bytes : int
        Bytes of the first region.
    max_dead_bytes_per_chunk : int
        With the "ort" split rule only: bytes that may stay unused in a block before it is split.
    initial_growth_chunk_size_bytes : int
        Bytes of the next region after a shrink.
    max_power_of_two_extend_bytes : int
        Largest region of doubling.
    max_mem : int
        Bytes the arena may hold from the device; 0 or None is unlimited, and reads as 0. Where a
        memory is passed as well, as to `Arena`, also a share of the device's whole memory, such as
        ``"80%"``; for pinned memory, of the host's.
    use_cuda_mempool : bool
        True: the driver's stream-ordered pool serves the memory. `MemoryResource.from_config` makes
        a `DriverPool` then, with `max_mem` as its limit and `stream_reuse` as its reuse policies;
        the other fields apply to the arena that replaces it if the device has no pools, and cause a
        ConfigWarning if it has. An `Arena` refuses it.
    cuda_mempool_release_threshold, cuda_mempool_bytes_to_keep_on_shrink : int
        Bytes, 0 to 2**64 - 1; as `PoolConfig`. Only with use_cuda_mempool.
    backing : {"auto", "regions", "virtual"}
        Source of the bytes. "regions": one driver allocation per region. "virtual": reserved
        address ranges in which physical pages are mapped, and moved, on demand. "auto": "virtual"
        for a device's own memory if the device supports it, unless `max_mem` is below 8 MiB
        or more than a sixth of it is left over by whole pages of 2 MiB, or a setting applies to
        regions only: growth fields other than the defaults, or the "ort" split rule. For pinned
        memory "auto" makes exact regions, with the same exceptions but for `max_mem`: each block
        above 1 MiB has one of its own size, smaller blocks share theirs.
    split_rule : {"tight", "ort"}
        "tight", the default unless `backing` is "regions": always split off the rest of a block.
        "ort", the default with "regions": split only if the rest is as large as the block or above
        max_dead_bytes_per_chunk, as ONNX Runtime does.
    stream_reuse : {"completed", "wait", "never"}
        When a block that another stream has freed is reusable: once that stream's work has
        completed; at once, with a wait of the new stream on the device; or after ``reset_stream``.
    page_move_threshold : float
        With "virtual": reserved memory may exceed the highest use by this share; above it idle
        pages move, and new ones are made only if none is idle, or if the time for moves is used
        up, see page_move_budget. 0 moves always, a large number never. With exact regions: idle
        regions, and bytes that blocks leave unused in theirs, may exceed the highest use by this
        share; a growth first releases idle regions above it, or above a limit. While a stream
        works, none is released, and the share is 1. 0 releases all that the highest use did not
        need.
    page_move_budget : float
        With "virtual": share of the time, 0 to 1, that the driver may spend on moving pages and on
        releasing those made while it was used up. Up to 100 ms of it accumulate; making pages
        adds the time that it takes, up to 1 s in all. If it is overdrawn, new pages are made
        instead: up to the square of (time overdrawn / 800 ms) of the highest use, at least 16 MiB;
        with 0 up to max_mem. Above that, and at max_mem, pages move regardless. Once half of the
        100 ms is saved up again, each growth releases idle pages for those, the longest idle first.
        0: none moves, and none is released by a growth. 1 is no bound.
    oom_wait_ms : int
        Milliseconds, up to an hour, that an allocation waits for other streams' work as the last
        step before `OutOfMemoryError`. Bounded, because that work may itself wait for the calling
        thread. 0: no wait. With stream_reuse="never" only for streams that were recorded for
        blocks, or that hold an idle region by unfinished work. Ctrl-C ends it. Idle regions are
        released to the driver when their work is done. The driver's free of pinned and managed
        memory, and of blocks for a transport, waits for everything queued on the device: only an
        allocation of such memory releases such memory, when every stream that an arena has blocks
        of has ended its work; with 0 only `Arena.shrink` does.
    oom_collect_ms : int
        Milliseconds, up to an hour, that a refused allocation waits for Python's interpreter lock,
        for one full garbage collection before `OutOfMemoryError`. A thread that holds the lock,
        such as that of every `Arena.allocate`, does not wait. The error names the freed bytes and
        the reference cycles that held them. A collection that freed nothing is not repeated for
        nine times as long as it took. 0: no collection.
    numa_node : int, optional
        Host memory of this NUMA node, for the CPU and the device: of "host" and HOST_ACCESSIBLE
        memory only. None (as text "nearest") leaves it to the driver; pinned memory prefers the
        device's node.
    peers : {"on_use", "none"} or sequence of Device
        Which other devices may access the memory. "on_use": those that do, from the first of
        gpumem's or PyTorch's copies between the two, or `Arena.enable_peer`. A sequence of devices
        or their names (as text with spaces between them): these, from the start, and others by
        `Arena.enable_peer`; the arena's own is left out. "none": only by `Arena.enable_peer`. Each
        peer costs the driver about as much again for each page that is mapped or moved.
    sleep_keep_bytes : int
        Bytes of pinned host memory that each tag keeps at most when it wakes, so that its next
        `Arena.sleep` need not make them. No tag keeps more than the host has available besides,
        and `Arena.shrink` releases all of them. 0: none.
    enable : bool
        False: every call calls the driver.

    Examples
    --------
    >>> from gpumem import ArenaConfig
    >>> ArenaConfig.from_mapping({"arena.max_mem": "1048576"}).max_mem
    1048576
    """

    extend_strategy: Literal["next_power_of_two", "same_as_requested"] = _setting(
        "next_power_of_two", _choice(next_power_of_two="0", same_as_requested="1")
    )
    initial_chunk_size_bytes: int = _setting(MIB, _size(1, MAX_BYTES))
    max_dead_bytes_per_chunk: int = _setting(128 * MIB, _size(1, MAX_BYTES))
    initial_growth_chunk_size_bytes: int = _setting(2 * MIB, _size(1, MAX_BYTES))
    max_power_of_two_extend_bytes: int = _setting(GIB, _size(1, MAX_BYTES))
    max_mem: int = _setting(0, _limit)
    use_cuda_mempool: bool = _setting(False, _boolean)
    cuda_mempool_release_threshold: int = _setting(0, _size(0, MAX_UNSIGNED))
    cuda_mempool_bytes_to_keep_on_shrink: int = _setting(0, _size(0, MAX_UNSIGNED))
    backing: Literal["auto", "regions", "virtual"] = _setting(
        "auto", _choice(auto="", regions="", virtual="")
    )
    split_rule: Literal["tight", "ort"] = _setting(
        None, _choice(tight="", ort="")
    )  # None: `_OfBacking`
    stream_reuse: Literal["completed", "wait", "never"] = _setting(
        "completed", _choice(completed="", wait="", never="")
    )
    page_move_threshold: float = _setting(0.0075, _share(1000))
    page_move_budget: float = _setting(0.01, _share(1))
    oom_wait_ms: int = _setting(1000, _integer(0, 3_600_000))
    oom_collect_ms: int = _setting(1000, _integer(0, 3_600_000))
    numa_node: int | None = _setting(
        None, _optional(_integer(0, MAX_NODE), "nearest", f"a NUMA node from 0 to {MAX_NODE}")
    )
    peers: str | tuple[Device, ...] = _setting("on_use", _peers)
    sleep_keep_bytes: int = _setting(MAX_BYTES, _size(0, MAX_BYTES))
    enable: bool = _setting(True, _boolean)

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[ArenaSettings]) -> None: ...

    _OF: ClassVar[str] = "an arena"
    _LIMIT: ClassVar[str] = "max_mem"
    _MEANT: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("gpu_mem_limit", *_LIMITS), "max_mem"),
        "soft_limit": "budget=Budget(..., soft=...)",
    }

    def __post_init__(self) -> None:
        # A rule that the backing decided follows it: `dataclasses.replace` passes it on.
        follows = self.split_rule is None or isinstance(self.split_rule, _OfBacking)
        if follows:
            object.__setattr__(self, "split_rule", "tight")
        super().__post_init__()
        if follows:
            rule = _OfBacking("ort" if self.backing == "regions" else "tight")
            object.__setattr__(self, "split_rule", rule)

    @property
    def suits_pages(self) -> bool:
        """Whether "auto" may use pages: the limit holds enough, and no setting requires regions."""
        return not self._for_regions

    @property
    def _suits_exact_regions(self) -> bool:
        """Whether large blocks of pinned memory have regions of their own sizes."""
        return self.backing == "auto" and self.enable and not self._growth_fields

    @property
    def _growth_fields(self) -> list[str]:
        """The settings of how regions grow that are not the defaults."""
        # The class attributes are the defaults; making an object of settings would take longer.
        growth = ("extend_strategy", *_DOUBLING_FIELDS)
        unusual = [name for name in growth if getattr(self, name) != getattr(ArenaConfig, name)]
        return unusual if self.split_rule == "tight" else [*unusual, "split_rule"]

    @property
    def _for_regions(self) -> str:
        """The setting for which "auto" uses regions; empty if there is none."""
        unusual = self._growth_fields
        if self.max_mem and not _suits_limit(self.max_mem):
            unusual.append("max_mem")
        return f"{unusual[0]} = {getattr(self, unusual[0])!r}" if unusual else ""

    def _require_arena(self) -> None:
        """Raise ConfigError if these settings are for a driver's pool."""
        if self.use_cuda_mempool:
            raise ConfigError(
                "invalid use_cuda_mempool = True for an Arena: "
                "MemoryResource.from_config(memory, config) makes a DriverPool"
            )
        for name in _POOL_FIELDS:
            if value := getattr(self, name):
                raise ConfigError(
                    f"{name} = {value} has no effect without use_cuda_mempool: "
                    "expected 0, or use_cuda_mempool = true"
                )

    def _without_effect(self, *, paged: bool, exact: bool = False) -> dict[str, str]:
        """Return the settings other than the defaults that an arena does not use, and why.

        Parameters
        ----------
        paged, exact : bool
            Whether the arena's memory is pages, and whether its large blocks have exact regions.
        """
        usual = ArenaConfig(backing=self.backing)
        given = {name for name in self._parsers() if getattr(self, name) != getattr(usual, name)}
        if not self.enable:
            why = "enable = False sends every call to the driver"
            given |= {"backing"} if self.backing == "virtual" else set()
            # Unfinished work may still use freed blocks, and cycles may hold others.
            given -= {"oom_wait_ms", "oom_collect_ms"}
            return dict.fromkeys((name for name in _POLICY_FIELDS if name in given), why)
        found: dict[str, str] = {}
        if self.split_rule == "tight":
            found["max_dead_bytes_per_chunk"] = 'it applies to split_rule = "ort"'
        if self.extend_strategy == "same_as_requested":
            found |= dict.fromkeys(_DOUBLING_FIELDS, 'it applies to "next_power_of_two"')
        if paged:
            why = "the memory is pages, and it applies to regions"
            found |= dict.fromkeys(("extend_strategy", *_DOUBLING_FIELDS), why)
        else:
            why = "the memory is regions, and it applies to pages"
            found |= dict.fromkeys(("page_move_budget", "sleep_keep_bytes"), why)
            found |= {} if exact else {"page_move_threshold": why}
        return {name: why for name, why in found.items() if name in given}

    def _of_graph_pool(self, backing: Literal["auto", "regions", "virtual"]) -> ArenaConfig:
        """Return the settings of a graph pool of an arena so backed, under its limit."""
        usual, paged = ArenaConfig(), backing == "virtual"
        return replace(
            self,
            backing=backing,
            split_rule="tight",
            enable=True,
            stream_reuse="never",
            max_mem=0,
            oom_wait_ms=0,
            page_move_threshold=(self if paged else usual).page_move_threshold,
            page_move_budget=1.0 if paged else usual.page_move_budget,
            sleep_keep_bytes=usual.sleep_keep_bytes,
            peers="on_use" if self.peers == "on_use" else "none",
        )

    def _without_effect_on_pool(self) -> list[str]:
        """Return the settings other than the defaults that a driver's pool does not use."""
        usual = ArenaConfig()
        names = (*_POLICY_FIELDS, "numa_node", "peers")
        given = [name for name in names if getattr(self, name) != getattr(usual, name)]
        if self.split_rule == ArenaConfig(backing=self.backing).split_rule:
            given = [name for name in given if name != "split_rule"]  # the backing decided it
        return [name for name in given if name != "stream_reuse"]

    def _without_pool(self) -> ArenaConfig:
        """Return the settings of the arena that replaces a pool."""
        cleared: dict[str, Any] = dict.fromkeys(("use_cuda_mempool", *_POOL_FIELDS), 0)
        return replace(self, **cleared)


_DOUBLING_FIELDS = (
    "initial_chunk_size_bytes",
    "initial_growth_chunk_size_bytes",
    "max_power_of_two_extend_bytes",
)
_POLICY_FIELDS = (
    "backing",
    "extend_strategy",
    "max_dead_bytes_per_chunk",
    *_DOUBLING_FIELDS,
    "split_rule",
    "stream_reuse",
    "page_move_threshold",
    "page_move_budget",
    "oom_wait_ms",
    "oom_collect_ms",
    "sleep_keep_bytes",
)
_POOL_FIELDS = ("cuda_mempool_release_threshold", "cuda_mempool_bytes_to_keep_on_shrink")


class PoolSettings(TypedDict, total=False):
    """Keywords of `DriverPool` and `PoolConfig` for type checkers and editors."""

    release_threshold: _Bytes
    bytes_to_keep_on_shrink: _Bytes
    max_size: _Bytes | None
    shareable: bool
    reuse_follow_event_dependencies: bool
    reuse_allow_opportunistic: bool
    reuse_allow_internal_dependencies: bool


@dataclass(frozen=True)
class PoolConfig(_Settings):
    """How a driver's stream-ordered pool caches and reuses.

    A mapping may also hold ``use_cuda_mempool``, which must be true.

    Attributes
    ----------
    release_threshold : int
        Bytes the pool keeps when a stream synchronises, 0 to 2**64 - 1; the driver releases memory
        above it. As a key also ``arena.cuda_mempool_release_threshold``.
    bytes_to_keep_on_shrink : int
        Bytes that ``shrink`` leaves in the pool. As a key also
        ``arena.cuda_mempool_bytes_to_keep_on_shrink``.
    max_size : int
        Bytes the pool may hold, or a share as for `ArenaConfig.max_mem`; 0 or None is the driver's
        own limit, and reads as 0. The driver may round it up.
    shareable : bool
        Its memory can be exported to other processes; decided when the pool is made.
    reuse_follow_event_dependencies : bool
        Reuse across streams that an event has ordered.
    reuse_allow_opportunistic : bool
        Reuse across streams when a free is found to be complete.
    reuse_allow_internal_dependencies : bool
        Reuse across streams by an order that the driver adds.

    Examples
    --------
    >>> from gpumem import PoolConfig
    >>> PoolConfig.from_mapping({"arena.cuda_mempool_release_threshold": "1024"}).release_threshold
    1024
    """

    release_threshold: int = _setting(0, _size(0, MAX_UNSIGNED))
    bytes_to_keep_on_shrink: int = _setting(0, _size(0, MAX_UNSIGNED))
    max_size: int = _setting(0, _limit)
    shareable: bool = _setting(False, _boolean)
    reuse_follow_event_dependencies: bool = _setting(True, _boolean)
    reuse_allow_opportunistic: bool = _setting(True, _boolean)
    reuse_allow_internal_dependencies: bool = _setting(True, _boolean)

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[PoolSettings]) -> None: ...

    _OF: ClassVar[str] = "a pool"
    _LIMIT: ClassVar[str] = "max_size"
    _MEANT: ClassVar[Mapping[str, str]] = dict.fromkeys(_LIMITS, "max_size")
    _IMPLIED: ClassVar[dict[str, Parser]] = {"use_cuda_mempool": _must_be_true}
    _ALIASES: ClassVar[Mapping[str, str]] = {
        "cuda_mempool_release_threshold": "release_threshold",
        "cuda_mempool_bytes_to_keep_on_shrink": "bytes_to_keep_on_shrink",
    }

    @classmethod
    def from_arena(cls, config: ArenaConfig) -> Self:
        """Return the settings of the pool that an arena's settings describe.

        `max_mem` becomes `max_size`. `stream_reuse` becomes the reuse policies: "completed" reuses
        blocks that an event has ordered or that are found to be free, "wait" also lets the driver
        add an order, "never" reuses no block of another stream.

        Raises
        ------
        ConfigError
            ``enable`` is False, which a pool does not support, or use_cuda_mempool is not set.
        """
        require("config", config, ArenaConfig, "an ArenaConfig")
        if not config.use_cuda_mempool:
            raise ConfigError("invalid use_cuda_mempool = False: expected True for a pool")
        if not config.enable:
            raise ConfigError(
                "invalid enable = False with use_cuda_mempool: a pool sends every call to "
                "the driver already"
            )
        return cls(
            release_threshold=config.cuda_mempool_release_threshold,
            bytes_to_keep_on_shrink=config.cuda_mempool_bytes_to_keep_on_shrink,
            max_size=config.max_mem,
            reuse_follow_event_dependencies=config.stream_reuse != "never",
            reuse_allow_opportunistic=config.stream_reuse != "never",
            reuse_allow_internal_dependencies=config.stream_reuse == "wait",
        )
