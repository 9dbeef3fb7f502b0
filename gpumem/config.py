"""Settings of an arena: typed fields and the string keys that name them.

A mapping may name a field bare (``max_mem``), as ``arena.max_mem``, or under a prefix of ONNX
Runtime's style, ``ep.<name>.arena.max_mem`` (a session's) or ``ep_factory.<name>.arena.max_mem``
(an environment's). Nothing is ignored: an unknown key, a malformed or out-of-range value, or one
option given twice with different values is a ConfigError naming key, value and accepted range.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, TypeAlias

from gpumem.errors import ConfigError

__all__ = ["ArenaConfig", "PoolConfig"]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
MAX_BYTES = (1 << 63) - 1

Parser: TypeAlias = Callable[[str, object], Any]

_PREFIX = re.compile(r"(?:(ep_factory|ep)\.([^.]+)\.)?(?:arena\.)?([a-z_0-9]+)\Z", re.IGNORECASE)


def _integer(low: int, high: int) -> Callable[[str, object], int]:
    def parse(key: str, value: object) -> int:
        accepted = f"an integer from {low} to {high}"
        if isinstance(value, str):
            if not re.fullmatch(r"[0-9]{1,20}", value):
                raise _bad(key, value, accepted)
            value = int(value)
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise _bad(key, value, accepted)
        number = value.__index__()
        if not low <= number <= high:
            raise _bad(key, value, accepted)
        return int(number)

    return parse


def _choice(**spellings: str) -> Callable[[str, object], str]:
    def parse(key: str, value: object) -> str:
        text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None
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


def _share(key: str, value: object) -> float:
    accepted = "a number from 0 to 1000"
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,18})?(e-[0-9]{1,2})?", value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1000:
        raise _bad(key, value, accepted)
    return float(value)


def _bad(key: str, value: object, accepted: str) -> ConfigError:
    if isinstance(value, int) and value.bit_length() > 128:
        return ConfigError(f"{key} = a very large integer is not accepted: it takes {accepted}")
    return ConfigError(f"{key} = {value!r} is not accepted: it takes {accepted}")


@dataclass(frozen=True)
class _Settings:
    """Typed fields, each with its parser, and the string keys that name them."""

    _OF: ClassVar[str]
    _PARSERS: ClassVar[Mapping[str, Parser]]
    _ALIASES: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        for field in fields(self):
            value = self._PARSERS[field.name](field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object], name: str | None = None) -> Self:
        """Read string keys, in any of the accepted spellings.

        Parameters
        ----------
        mapping : Mapping[str, object]
            Keys as above; values as text or as the field's own type.
        name : str, optional
            Take prefixed keys for this name only (matched without regard to case); keys under
            another name are an error, since nothing is ignored silently. None takes any name.

        Raises
        ------
        ConfigError
            Unknown key, bad value, or one option given twice with different values.
        """
        given: dict[str, tuple[str, Any]] = {}
        for key, text in mapping.items():
            field = cls._field_of(key, name)
            value = cls._PARSERS[field](key, text)
            if field in given and given[field][1] != value:
                first, earlier = given[field]
                raise ConfigError(
                    f"{field} is given twice with different values: "
                    f"{first} = {earlier!r} and {key} = {text!r}"
                )
            given[field] = (key, value)
        return cls(**{field: value for field, (_, value) in given.items()})

    @classmethod
    def _field_of(cls, key: object, name: str | None) -> str:
        match = _PREFIX.match(key) if isinstance(key, str) else None
        field = cls._ALIASES.get(match.group(3), match.group(3)) if match else ""
        if match is None or field not in cls._PARSERS:
            raise ConfigError(f"unknown key {key!r}; {cls._OF} takes: {', '.join(cls._PARSERS)}")
        if name is not None and match.group(2) and match.group(2).lower() != name.lower():
            raise ConfigError(f"key {key!r} is for {match.group(2)!r}, not for {name!r}")
        return field

    def to_mapping(self) -> dict[str, str]:
        """Return the settings as text under ``arena.`` keys; `from_mapping` reads them back."""
        return {f"arena.{field.name}": _text(getattr(self, field.name)) for field in fields(self)}


@dataclass(frozen=True)
class ArenaConfig(_Settings):
    """How an arena grows, splits and shares.

    Attributes
    ----------
    extend_strategy : {"next_power_of_two", "same_as_requested"}
        Size of the next region: doubling, or exactly what the block needs.
    initial_chunk_size_bytes : int
        Bytes of the first region, 1 to 2**31 - 1.
    max_dead_bytes_per_chunk : int
        With the "ort" split rule: bytes that may stay unused in a block before it is split.
    initial_growth_chunk_size_bytes : int
        Bytes of the next region after a shrink.
    max_power_of_two_extend_bytes : int
        Where doubling stops.
    max_mem : int
        Bytes the arena may hold from the device; 0 is unlimited.
    backing : {"auto", "regions", "virtual"}
        Where the bytes come from. "regions": one driver allocation per region. "virtual": reserved
        address ranges under which physical pages are placed, and moved, as they are needed.
    split_rule : {"tight", "ort"}
        "tight": always give the rest of a block back; the default. "ort": split only if the rest
        is as large as the block or above max_dead_bytes_per_chunk, as ONNX Runtime does; the
        default where backing="regions" is asked for by name.
    stream_reuse : {"completed", "wait", "never"}
        When another stream's freed block may be taken: once its work is known to be done; at
        once, the taker's stream waiting on the device; or only after ``reset_stream``.
    page_move_threshold : float
        With "virtual": the share by which reserved memory may pass the live peak before idle pages
        move instead of new ones being made. 0 moves always, a large number never.
    enable : bool
        False: every call goes straight to the driver.

    Examples
    --------
    >>> ArenaConfig.from_mapping({"arena.max_mem": "1048576"}).max_mem
    1048576
    """

    extend_strategy: str = "next_power_of_two"
    initial_chunk_size_bytes: int = MIB
    max_dead_bytes_per_chunk: int = 128 * MIB
    initial_growth_chunk_size_bytes: int = 2 * MIB
    max_power_of_two_extend_bytes: int = GIB
    max_mem: int = 0
    backing: str = "auto"
    split_rule: str = None  # type: ignore[assignment]  # None: by the backing, filled in below
    stream_reuse: str = "completed"
    page_move_threshold: float = 0.015
    enable: bool = True

    _OF: ClassVar[str] = "an arena"
    _PARSERS: ClassVar[Mapping[str, Parser]] = {
        "extend_strategy": _choice(next_power_of_two="0", same_as_requested="1"),
        "initial_chunk_size_bytes": _integer(1, 2**31 - 1),
        "max_dead_bytes_per_chunk": _integer(1, 2**31 - 1),
        "initial_growth_chunk_size_bytes": _integer(1, 2**31 - 1),
        "max_power_of_two_extend_bytes": _integer(1, MAX_BYTES),
        "max_mem": _integer(0, MAX_BYTES),
        "backing": _choice(auto="", regions="", virtual=""),
        "page_move_threshold": _share,
        "split_rule": _choice(tight="", ort=""),
        "stream_reuse": _choice(completed="", wait="", never=""),
        "enable": _boolean,
    }

    def __post_init__(self) -> None:
        if self.split_rule is None:
            object.__setattr__(self, "split_rule", "ort" if self.backing == "regions" else "tight")
        super().__post_init__()


@dataclass(frozen=True)
class PoolConfig(_Settings):
    """How a driver's stream-ordered pool caches and reuses.

    Attributes
    ----------
    release_threshold : int
        Bytes the pool keeps when a stream synchronises; beyond it the driver takes memory back.
        As a key also ``arena.cuda_mempool_release_threshold``.
    bytes_to_keep_on_shrink : int
        Bytes that ``shrink`` leaves in the pool. As a key also
        ``arena.cuda_mempool_bytes_to_keep_on_shrink``.
    max_size : int
        Bytes the pool may hold; 0 is the driver's own limit.
    reuse_follow_event_dependencies : bool
        Reuse across streams that an event has ordered.
    reuse_allow_opportunistic : bool
        Reuse across streams when a free is found to be done.
    reuse_allow_internal_dependencies : bool
        Reuse across streams by an order that the driver adds.

    Examples
    --------
    >>> PoolConfig.from_mapping({"arena.cuda_mempool_release_threshold": "1024"}).release_threshold
    1024
    """

    release_threshold: int = 0
    bytes_to_keep_on_shrink: int = 0
    max_size: int = 0
    reuse_follow_event_dependencies: bool = True
    reuse_allow_opportunistic: bool = True
    reuse_allow_internal_dependencies: bool = True

    _OF: ClassVar[str] = "a pool"
    _ALIASES: ClassVar[Mapping[str, str]] = {
        "cuda_mempool_release_threshold": "release_threshold",
        "cuda_mempool_bytes_to_keep_on_shrink": "bytes_to_keep_on_shrink",
    }
    _PARSERS: ClassVar[Mapping[str, Parser]] = {
        "release_threshold": _integer(0, 2**64 - 1),
        "bytes_to_keep_on_shrink": _integer(0, MAX_BYTES),
        "max_size": _integer(0, MAX_BYTES),
        "reuse_follow_event_dependencies": _boolean,
        "reuse_allow_opportunistic": _boolean,
        "reuse_allow_internal_dependencies": _boolean,
    }


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
