"""Settings as mappings and texts, and environment variables."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import gpumem
from gpumem._support.sizes import parse_size
from gpumem.accounting import accountants_from_setting
from gpumem.config import ArenaConfig, PoolConfig
from gpumem.debugging import DebugHeapOptions
from gpumem.errors import ConfigError, GpumemError
from gpumem.session import Environment, SessionOptions

from .. import changes
from ..changes import MAX_BYTES
from . import Target
from .files import alive

_REASON = re.compile(r"= .*?:|[^a-z ]")  # what is left of a message without its values


def _plain(value: Any) -> Any:
    """Make values that JSON lacks, of ``{"<int>": bits}`` and the like."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"<int>": int(bits), **rest} if not rest and 0 <= bits < 100_000:
            return 1 << bits
        case {"<tuple>": list(items), **rest} if not rest:
            return tuple(map(_plain, items))
        case {"<bytes>": str(text), **rest} if not rest:
            return text.encode("utf-8", "replace")
    return {key: _plain(each) for key, each in value.items()}


def _mapping(kind: Any, value: Any) -> object:
    """Read a mapping; what was read can be written and read again."""
    made = kind.from_mapping(value)
    assert kind.from_mapping(made.to_mapping()) == made, made
    assert kind.from_text(made.to_text()) == made, made
    repr(made)
    return [key for key, old in vars(kind()).items() if getattr(made, key) != old]


def _text(kind: Any, value: Any) -> object:
    return _mapping(kind, kind.from_text(value).to_mapping()) if isinstance(value, str) else None


def _session(value: Any) -> object:
    made = SessionOptions.from_mapping(value)
    repr(made)
    SessionOptions.from_mapping(value, "host")
    return made.unified_stream, made.private_arena


def _environment_of(value: Any) -> object:
    with Environment(value) as environment:
        made = [
            environment.settings_for(memory, prefix)
            for memory in ("host", "cuda:0", "host/host_accessible")
            for prefix in ("ep", "ep_factory")
        ]
        return len(set(map(str, made)))


def _arena(value: Any) -> object:
    with gpumem.Arena("host", value) as arena:
        arena.allocate(1000).close()
        return arena.config.backing, arena.config.enable


def _name(value: Any) -> object:
    """Read names of memories and devices, which raise ValueError."""
    for read in (gpumem.MemoryInfo.parse, gpumem.Device):
        try:
            repr(read(value))
        except (ValueError, TypeError) as error:
            if not str(error).isprintable():
                raise AssertionError(repr(error)) from error
    return None


def _setting(value: Any) -> object:
    return len(accountants_from_setting(value)) if isinstance(value, str) else None


def _size(value: Any) -> object:
    return parse_size(value) > 0 if isinstance(value, str) else None


_READERS: dict[str, Callable[[Any], object]] = {
    "arena": lambda value: _mapping(ArenaConfig, value),
    "pool": lambda value: PoolConfig.from_mapping(value) and None,
    "heap": lambda value: DebugHeapOptions.from_mapping(value) and None,
    "arena_text": lambda value: _text(ArenaConfig, value),
    "session": _session,
    "environment": _environment_of,
    "make": _arena,
    "name": _name,
    "setting": _setting,
    "size": _size,
}


def _settings(data: bytes) -> object:
    """Read ``{"<reader>": value, ...}`` in JSON."""
    try:
        given = json.loads(data)
        given = {name: _plain(value) for name, value in given.items()}
    except (ValueError, RecursionError, AttributeError):
        return "not JSON"
    found = []
    for name, value in given.items():
        if name not in _READERS:
            continue
        try:
            found.append((name, str(_READERS[name](value))[:40]))
        except ConfigError as error:
            found.append((name, _REASON.sub("", str(error))[-20:]))
            if not str(error).isprintable():
                raise AssertionError(repr(error)) from error
        except TypeError as error:
            if isinstance(value, Mapping):
                raise
            found.append((name, str(error)[:20]))
    return tuple(found)


def _environment(data: bytes) -> object:
    """Make an arena with a debug heap as the variable says, and read the others as at import."""
    from gpumem import _live

    heap, _, top = data.partition(b"\n")
    try:
        os.environb[b"GPUMEM_DEBUG_HEAP"] = heap
        os.environb[b"GPUMEM_TOP"] = top if top != b"1" else b"0"
    except ValueError:  # a NUL
        return "NUL"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _live._read_environment()
        arena = gpumem.Arena("host")
        arena.allocate(1000).close()
        arena.close()
        return len(caught), heap.count(b",")
    finally:
        del os.environb[b"GPUMEM_DEBUG_HEAP"], os.environb[b"GPUMEM_TOP"]


_KEYS = (
    *ArenaConfig().to_mapping(),
    "ep.host.",
    "ep_factory.host:0.",
    "gpu_external_alloc",
    "user_compute_stream",
    "nearest",
    "0x",
)

TARGETS = (
    Target(
        "settings",
        _settings,
        (GpumemError,),
        one_line=False,
        structured=(changes.in_json, changes.in_json),
        tokens=tuple(key.encode() for key in _KEYS),
        limit_address_space=False,
        alive=alive,
    ),
    Target(
        "environment",
        _environment,
        (GpumemError,),
        max_characters=MAX_BYTES * 8,
        tokens=(
            *(f"{key}=".encode() for key in vars(DebugHeapOptions())),
            b",",
            b"warn",
            b"none",
            b"\n1",
            b"true",
        ),
        limit_address_space=False,
        alive=alive,
    ),
)
