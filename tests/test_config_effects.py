"""Every key of every config class has an effect on every memory, or is refused, or warned of."""

from __future__ import annotations

import ctypes
import gc
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
from helpers.driver import HostDriver
from helpers.waiting import wait_until

import gpumem
from gpumem import ArenaConfig, DriverPool, MemoryResource, PoolConfig
from gpumem._testing import host_device
from gpumem.errors import ConfigError, ConfigWarning

KIB, MIB = 1 << 10, 1 << 20

# ---- what can be seen of a resource --------------------------------------------------------------


def growth(arena: Any) -> list[int]:
    """Return how much the arena holds after each block, and after a shrink."""
    held, sizes = [], []
    for nbytes in (256, MIB, 5 * MIB, *[3 * MIB] * 16):
        held.append(arena.allocate(nbytes))
        sizes.append(arena.stats().reserved)
    held.clear()
    arena.shrink()
    held.append(arena.allocate(256))
    return [*sizes, arena.stats().reserved]


def block_in_a_larger_one(arena: Any) -> int:
    arena.allocate(8 * MIB).close()
    return arena.allocate(6 * MIB).allocated_nbytes


def refusal(arena: Any) -> tuple[int, bool]:
    try:
        arena.allocate(64 * MIB).close()
    except gpumem.OutOfMemoryError:
        return arena.stats().limit, True
    return arena.stats().limit, False


def kept_when_free(arena: Any) -> int:
    arena.allocate(MIB).close()
    return arena.stats().reserved


def reuse_across_streams(arena: Any) -> bool:
    """Return whether another stream gets memory whose work has not finished."""
    if is_pool(arena):
        return of_the_pool("reuse_allow_internal_dependencies")(arena)
    one, other = gpumem.Stream("host"), gpumem.Stream("host")
    first = arena.allocate(4 * MIB, one)
    address = first.ptr
    with HostDriver().block(one):
        first.close()
        same = arena.allocate(4 * MIB, other).ptr == address
    one.synchronize()
    other.synchronize()
    return same


def polls_when_full(arena: Any) -> int:
    """Return how often events are queried before memory that another stream holds is given up."""
    one, other = gpumem.Stream("host"), gpumem.Stream("host")
    arena.allocate(8 * MIB, one).close()
    keeps, first = arena.allocate(MIB, one), arena.allocate(6 * MIB, one)  # one region
    arena.set_limit(arena.stats().reserved)
    before = host_device.call_count("cuEventQuery")
    with HostDriver().block(one):
        first.close()
        with pytest.raises(gpumem.OutOfMemoryError):
            arena.allocate(6 * MIB, other)
        polls = host_device.call_count("cuEventQuery") - before
    one.synchronize()
    keeps.close()
    return polls


def fits_after_garbage(arena: Any) -> bool:
    """Return whether a block fits once the memory that a reference cycle holds is freed."""
    garbage: list[object] = [arena.allocate(6 * MIB)]
    garbage.append(garbage)
    arena.set_limit(arena.stats().reserved)
    del garbage
    try:
        arena.allocate(6 * MIB).close()
    except gpumem.OutOfMemoryError:
        return False
    finally:
        gc.collect()
    return True


def moves(arena: Any) -> tuple[int, int, int]:
    """Return what happens when small free places together would hold a block."""
    blocks = [arena.allocate(2 * MIB) for _ in range(40)]
    del blocks[::2]
    large = arena.allocate(24 * MIB)
    stats = arena.stats()
    large.close()
    return stats.pages_moved, stats.moves_refused, stats.reserved


def pinned_anew(arena: Any) -> int:
    """Return how often host memory is registered when an arena that slept sleeps again."""
    block = arena.allocate(4 * MIB)
    arena.sleep()
    arena.wake()
    before = host_device.call_count("cuMemHostRegister")
    arena.sleep()
    made = host_device.call_count("cuMemHostRegister") - before
    arena.wake()
    block.close()
    return made


def is_pool(resource: Any) -> bool:
    return isinstance(resource, DriverPool)


def backing(arena: Any) -> str:
    return arena.backing


def of_the_pool(name: str) -> Callable[[Any], Any]:
    """Return what the driver says of the pool."""
    return lambda pool: getattr(DriverPool("host", handle=pool.handle).config, name)


def kept_by_a_shrink(pool: Any) -> int:
    stream = gpumem.Stream("host")
    pool.allocate(64 * MIB, stream).close()
    wait_until(stream.query)  # a synchronisation would release what is above the threshold
    pool.shrink()
    return pool.stats().reserved


def can_be_exported(pool: Any) -> bool:
    try:
        pool.export_handle().close()
    except ConfigError:
        return False
    return True


# ---- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """Two values of a key, the second not the default, and what differs between them."""

    one: Any
    other: Any
    seen: Callable[[Any], Any]


ARENA = {
    "extend_strategy": Key("next_power_of_two", "same_as_requested", growth),
    "initial_chunk_size_bytes": Key(MIB, 8 * MIB, growth),
    "max_dead_bytes_per_chunk": Key(128 * MIB, MIB, block_in_a_larger_one),
    "initial_growth_chunk_size_bytes": Key(2 * MIB, 16 * MIB, growth),
    "max_power_of_two_extend_bytes": Key(1 << 30, 4 * MIB, growth),
    "max_mem": Key(0, 32 * MIB, refusal),
    "use_cuda_mempool": Key(False, True, is_pool),
    "cuda_mempool_release_threshold": Key(0, MIB, of_the_pool("release_threshold")),
    "cuda_mempool_bytes_to_keep_on_shrink": Key(0, 64 * MIB, kept_by_a_shrink),
    "backing": Key("regions", "virtual", backing),
    "split_rule": Key("tight", "ort", block_in_a_larger_one),
    "stream_reuse": Key("completed", "wait", reuse_across_streams),
    "page_move_threshold": Key(1000, 0, moves),
    "page_move_budget": Key(0, 1, moves),
    "oom_wait_ms": Key(20, 0, polls_when_full),
    "oom_collect_ms": Key(20, 0, fits_after_garbage),
    "sleep_keep_bytes": Key(0, 64 * MIB, pinned_anew),
    "numa_node": Key(None, 0, growth),
    "enable": Key(True, False, kept_when_free),
}
POOL = {
    "release_threshold": Key(0, MIB, of_the_pool("release_threshold")),
    "bytes_to_keep_on_shrink": Key(0, 64 * MIB, kept_by_a_shrink),
    "max_size": Key(0, 32 * MIB, refusal),
    "shareable": Key(False, True, can_be_exported),
    **{
        name: Key(True, False, of_the_pool(name))
        for name in (
            "reuse_follow_event_dependencies",
            "reuse_allow_opportunistic",
            "reuse_allow_internal_dependencies",
        )
    },
}


@dataclass(frozen=True)
class Where:
    """A memory with settings, and the keys that have no effect there."""

    memory: str
    settings: dict[str, Any]
    warned: set[str]
    refused: set[str]
    source: bool = False


OF_REGIONS = {
    "extend_strategy",
    "initial_chunk_size_bytes",
    "initial_growth_chunk_size_bytes",
    "max_power_of_two_extend_bytes",
}
OF_PAGES = {"page_move_threshold", "page_move_budget", "sleep_keep_bytes"}
OF_ORT = {"max_dead_bytes_per_chunk"}
OF_POOLS = {"cuda_mempool_release_threshold", "cuda_mempool_bytes_to_keep_on_shrink"}
NO_POOL = {"use_cuda_mempool"}
OF_WAITS = {"oom_wait_ms", "oom_collect_ms"}
OF_POLICY = OF_REGIONS | OF_PAGES | OF_ORT | OF_WAITS | {"split_rule", "stream_reuse"}
REGIONS = {"backing": "regions"}
WHERE = {
    "pages": Where("host", {"backing": "virtual"}, OF_REGIONS | OF_ORT, OF_POOLS | {"numa_node"}),
    "pages, ort": Where(
        "host", {"backing": "virtual", "split_rule": "ort"}, OF_REGIONS, OF_POOLS | {"numa_node"}
    ),
    "regions": Where("host", REGIONS, OF_PAGES, OF_POOLS),
    "regions, tight": Where("host", REGIONS | {"split_rule": "tight"}, OF_PAGES | OF_ORT, OF_POOLS),
    "regions as requested": Where(
        "host",
        REGIONS | {"extend_strategy": "same_as_requested"},
        OF_PAGES | OF_REGIONS - {"extend_strategy"},
        OF_POOLS,
    ),
    "pinned": Where("host/host_accessible", REGIONS, OF_PAGES, OF_POOLS | NO_POOL | {"backing"}),
    "managed": Where(
        "host/managed", REGIONS, OF_PAGES, OF_POOLS | NO_POOL | {"backing", "numa_node"}
    ),
    "node": Where("host", REGIONS | {"numa_node": 0}, OF_PAGES, OF_POOLS | {"backing"}),
    "source": Where(
        "host", REGIONS, OF_PAGES, OF_POOLS | NO_POOL | {"backing", "numa_node"}, source=True
    ),
    "disabled": Where(
        "host", {"enable": False}, (OF_POLICY | {"backing"}) - OF_WAITS, OF_POOLS | NO_POOL
    ),
    "pool": Where(
        "host",
        {"use_cuda_mempool": True},
        (OF_POLICY | {"backing", "numa_node"}) - {"stream_reuse"},
        {"enable"},
    ),
}


class Malloc:
    """A source whose regions are the C library's."""

    def __init__(self) -> None:
        self.regions: dict[int, Any] = {}

    def allocate(self, nbytes: int) -> int:
        memory = ctypes.create_string_buffer(nbytes + 256)
        address = -(-ctypes.addressof(memory) // 256) * 256
        self.regions[address] = memory
        return address

    def free(self, address: int, nbytes: int) -> None:
        del self.regions[address]


def made(where: Where, settings: dict[str, Any]) -> MemoryResource:
    if where.source:
        return gpumem.Arena(where.memory, settings, source=Malloc())
    return MemoryResource.from_config(where.memory, settings)


def outcome(make: Callable[[Any], MemoryResource], name: str, key: Key) -> str:
    """Return "refused", "warned", "effect" or, which is wrong, "silent"."""
    seen = []
    for value in (key.other, key.one):
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always", ConfigWarning)
            try:
                resource = make(value)
            except ConfigError as error:
                named = name in str(error) or "use_cuda_mempool" in str(error)
                return "refused" if named else f"refused without its name: {error}"
        if any(str(each.message).startswith(f"{name} = ") for each in given):
            resource.close()
            return "warned"
        with resource:
            seen.append(key.seen(resource))
    return "effect" if seen[0] != seen[1] else "silent"


@pytest.mark.parametrize(
    ("name", "where"),
    list(itertools.product(ARENA, WHERE)),
    ids=lambda value: value.replace(" ", "_"),
)
def test_key_of_an_arena_has_an_effect_or_is_named(name, where, host):
    place, key = WHERE[where], ARENA[name]
    if name in place.settings and name != "backing":
        place = Where(place.memory, dict(place.settings), place.warned, place.refused, place.source)
        del place.settings[name]

    def make(value: Any) -> MemoryResource:
        return made(place, place.settings | {name: value})

    expected = "effect"
    if name in place.warned:
        expected = "warned"
    elif name in place.refused:
        expected = "refused"
    assert outcome(make, name, key) == expected


@pytest.mark.parametrize("name", POOL)
def test_key_of_a_pool_has_an_effect(name):
    assert outcome(lambda value: DriverPool("host", {name: value}), name, POOL[name]) == "effect"


def test_tables_hold_every_key():
    # Peers need several devices: tests/arena/test_peers.py.
    assert set(ARENA) | {"peers"} == {each.name for each in fields(ArenaConfig)}
    assert set(POOL) == {each.name for each in fields(PoolConfig)}
