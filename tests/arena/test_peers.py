"""Peers: which other devices may access an arena's memory, and from when on."""

from __future__ import annotations

import textwrap

import pytest
from helpers import child

# Devices, and whether a fill by one of them reaches a block: as a kernel, it needs access.
START = """
import itertools, random, threading, warnings
import gpumem, numpy as np
from gpumem._testing import host_device
from gpumem.errors import ConfigError, DriverError, PeerAccessError
from helpers.driver import HostDriver
gpumem.device.set_host_device_count({count})
MIB = 1 << 20
devices = [f"host:{{i}}" for i in range({count})]
drivers = [HostDriver(each) for each in devices]
streams = [gpumem.Stream(each) for each in devices]
DENIED = 1

def reaches(device, block, value=7):
    refused = drivers[device].refusal("cuMemsetD8Async", block.ptr, value, block.nbytes,
                                      streams[device].ptr)
    streams[device].synchronize()
    assert refused in (0, DENIED), refused
    return refused == 0 and bool((np.frombuffer(block, np.uint8) == value).all())

def peers(arena):
    return [str(each) for each in arena.peers]
"""


def run(script, count=2):
    child.run_quietly(START.format(count=count) + textwrap.dedent(script))


# ---- on use --------------------------------------------------------------------------------------


def test_copy_between_devices_gives_the_one_that_copies_access_to_the_other_once():
    run("""
        here, there = (gpumem.Arena(each) for each in devices)
        src = gpumem.full(3 * MIB, 7, "u1", resource=here)
        dst = gpumem.zeros(3 * MIB, "u1", resource=there)
        assert peers(here) == peers(there) == []
        gpumem.copy(dst, src, streams[1])
        assert (dst.numpy() == 7).all()
        assert (peers(here), peers(there)) == (["host:1"], [])
        assert reaches(1, src.buffer, 9) and not reaches(0, dst.buffer)
        host_device.reset_counts()
        for stream in (None, streams[1]):
            gpumem.copy(dst, src, stream)
            assert (dst.numpy() == 9).all()
            gpumem.copy(src, dst, streams[1])
        assert host_device.call_count("cuMemSetAccess") == 0
        gpumem.copy(dst, src, streams[0])
        assert (peers(here), peers(there)) == (["host:1"], ["host:0"])
    """)


def test_without_copies_between_devices_no_access_is_asked_for():
    run("""
        arenas = [gpumem.Arena(each) for each in devices]
        host_device.reset_counts()
        for arena, stream in zip(arenas, streams):
            a, b = (gpumem.zeros(MIB, "u1", resource=arena) for _ in range(2))
            gpumem.copy(a, b, stream)
            gpumem.copy(a, np.ones(MIB, "u1"), stream)
            stream.synchronize()
        for call in ("cuDeviceCanAccessPeer", "cuCtxEnablePeerAccess"):
            assert host_device.call_count(call) == 0
        assert not any(peers(each) for each in arenas)
    """)


@pytest.mark.parametrize("peers", ["none", ["host:0", "host:2"]])
def test_copies_give_no_access_where_the_settings_do_not_say_on_use(peers):
    run(
        f"""
        given = {peers!r}
        here, there = (gpumem.Arena(each, {{"peers": given}}) for each in devices[:2])
        src = gpumem.full(MIB, 7, "u1", resource=here)
        dst = gpumem.zeros(MIB, "u1", resource=there)
        gpumem.copy(dst, src, streams[1])
        assert (dst.numpy() == 7).all()
        assert "host:1" not in peers(here)
        assert not reaches(1, src.buffer)
        here.enable_peer("host:1")
        assert reaches(1, src.buffer)
        """,
        count=3,
    )


def test_listed_peers_have_access_from_the_start_and_the_arenas_own_device_is_left_out():
    run(
        """
        arena = gpumem.Arena("host:1", {"peers": devices})
        assert peers(arena) == ["host:0", "host:2", "host:3"]
        host_device.reset_counts()
        block = arena.allocate(5 * MIB)
        assert host_device.call_count("cuMemSetAccess") == 1
        assert all(reaches(device, block) for device in range(4))
        """,
        count=4,
    )


# ---- what has access -----------------------------------------------------------------------------


def test_peer_reaches_what_there_is_and_what_comes_later():
    run(
        """
        arena = gpumem.Arena("host:0")
        def make():
            return [arena.allocate(80 * MIB), arena.allocate(1000), arena.allocate_persistent(MIB)]
        blocks = make()
        assert not any(reaches(1, each) for each in blocks)
        arena.enable_peer("host:1")
        blocks += make()
        assert all(reaches(1, each) for each in blocks)
        assert not any(reaches(2, each) for each in blocks)
        arena.enable_peer(gpumem.Device("host:2"))
        assert peers(arena) == ["host:1", "host:2"]
        assert all(reaches(device, each) for each in blocks for device in range(3))
        """,
        count=3,
    )


def test_every_view_keeps_its_peers_while_pages_move():
    run(
        """
        seed = random.randrange(1 << 32)
        rng = random.Random(seed)
        arena = gpumem.Arena("host:0", {"page_move_threshold": 0, "page_move_budget": 1})
        blocks = []
        for step in range(300):
            if step in (60, 150):
                arena.enable_peer(f"host:{1 + (step > 100)}")
            while blocks and rng.random() < 0.45:
                blocks.pop(rng.randrange(len(blocks))).close()
            blocks.append(arena.allocate(rng.choice([1000, 2 * MIB, 5 * MIB, 17 * MIB])))
            device = rng.randrange(3)
            for block in rng.sample(blocks, min(2, len(blocks))):
                expected = device == 0 or f"host:{device}" in peers(arena)
                assert reaches(device, block) == expected, (seed, step)
        arena.check_invariants()
        assert arena.stats().pages_moved > 5, seed
        """,
        count=3,
    )


def test_access_survives_a_suspended_arena_and_can_be_given_to_it():
    run(
        """
        arena = gpumem.Arena("host:0")
        blocks = [arena.allocate(5 * MIB), arena.allocate_persistent(MIB)]
        arena.enable_peer("host:1")
        arena.sleep()
        arena.enable_peer("host:2")
        arena.wake()
        assert all(reaches(device, each) for each in blocks for device in (1, 2))
        """,
        count=3,
    )


def test_regions_are_reached_through_the_peers_context():
    run("""
        arena = gpumem.Arena("host:0", {"backing": "regions"})
        block = arena.allocate(MIB)
        arena.enable_peer("host:1")
        arena.enable_peer("host:1")
        assert host_device.call_count("cuCtxEnablePeerAccess") == 1
        assert peers(arena) == ["host:1"]
        again = gpumem.Arena("host:0", {"backing": "regions"})
        again.enable_peer("host:1")         # the driver says: enabled already
        assert peers(again) == ["host:1"]
    """)


def test_transports_of_a_block_name_the_peers_that_have_access():
    run(
        """
        arena = gpumem.Arena("host:0")
        block = arena.allocate(1000)
        assert block.transports().peers == ()
        arena.enable_peer("host:2")
        assert list(map(str, block.transports().peers)) == ["host:2"]
        """,
        count=3,
    )


def test_blocks_for_transports_beside_pages_are_reached_through_the_peers_context():
    run(
        """
        def enabled():
            return host_device.call_count("cuCtxEnablePeerAccess")
        arena = gpumem.Arena("host:0")
        arena.enable_peer("host:1")
        assert enabled() == 0
        block = arena.allocate(MIB, transport="ipc")
        assert enabled() == 1
        arena.allocate(MIB, transport="ipc")
        arena.enable_peer("host:1")
        assert enabled() == 1
        arena.enable_peer("host:2")
        assert enabled() == 2
        """,
        count=3,
    )


def test_pages_need_no_context_of_the_peer():
    run("""
        arena = gpumem.Arena("host:0", {"peers": ["host:1"]})
        assert host_device.call_count("cuCtxEnablePeerAccess") == 0
    """)


def test_graph_pools_have_their_arenas_peers():
    run(
        """
        arena = gpumem.Arena("host:0", {"peers": ["host:1"]})
        with arena.capture(streams[0]) as pool:
            early = arena.allocate(1000, streams[0])
        assert peers(early.resource) == ["host:1"]
        arena.enable_peer("host:2")
        assert peers(early.resource) == ["host:1", "host:2"]
        assert reaches(2, early)
        with arena.capture(streams[0], pool=pool), arena.tag("later"):
            later = arena.allocate(1000, streams[0])
        assert peers(later.resource) == ["host:1", "host:2"]
        assert reaches(1, later)
        assert host_device.call_count("cuCtxEnablePeerAccess") == 0  # a handle each, as pages are
        """,
        count=3,
    )


def test_graph_pools_have_the_peers_that_copies_give_their_arena():
    run("""
        here, there = (gpumem.Arena(each) for each in devices)
        with here.capture(streams[0]):
            captured = here.allocate(1000, streams[0])
        src = gpumem.full(3 * MIB, 7, "u1", resource=here)
        dst = gpumem.zeros(3 * MIB, "u1", resource=there)
        gpumem.copy(dst, src, streams[1])
        assert peers(here) == peers(captured.resource) == ["host:1"]
        assert reaches(1, captured)
        """)


def test_peer_of_an_arena_reaches_all_that_a_graph_may_use():
    """Pages of a graph pool keep the places that they moved away from."""
    run("""
        arena = gpumem.Arena("host:0")
        places, live = set(), []
        chance = random.Random(0)
        with arena.capture(streams[0]) as pool:
            for _ in range(400):
                if live and chance.random() < 0.5:
                    live.pop(chance.randrange(len(live))).close()
                else:
                    nbytes = int(2 ** chance.uniform(18, 25))
                    live.append(arena.allocate(nbytes, streams[0]))
                    places.add(live[-1].ptr)
        assert pool.stats().pages_moved > 40
        arena.enable_peer("host:1")
        for _ in range(2):
            for place in places:
                drivers[1].call("cuMemsetD8Async", place, 7, MIB // 4, streams[1].ptr)
            streams[1].synchronize()
            arena.sleep()
            arena.wake()
    """)


def test_peers_that_are_the_arenas_own_device_alone_give_a_warning():
    run("""
        for memory in ("host:0", "host:0/managed"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                gpumem.Arena(memory, {"peers": ["host:0"]})
            (told,) = caught
            assert told.category is gpumem.errors.ConfigWarning
            why = "own device" if memory == "host:0" else "every device reaches it"
            assert "peers = 'host:0' has no effect" in str(told.message)
            assert why in str(told.message)
    """)


def test_pinned_memory_has_no_list_of_devices():
    run("""
        for kind in ("host_accessible", "managed"):
            arena = gpumem.Arena(f"host:0/{kind}")
            arena.enable_peer("host:1")
            assert arena.peers == ()
            assert reaches(1, arena.allocate(1000))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                gpumem.Arena(f"host:0/{kind}", {"peers": "host:1"})
            assert "every device reaches it" in str(caught[-1].message)
    """)


def test_memory_of_a_node_is_given_to_peers():
    run("""
        arena = gpumem.Arena("host:0/host_accessible", {"numa_node": 0})
        def make():
            return [arena.allocate(1000), arena.allocate(8 * MIB),
                    arena.allocate(1, shareable=True)]
        blocks = make()
        assert not any(reaches(1, each) for each in blocks)
        arena.enable_peer("host:1")
        blocks += make()
        assert all(reaches(1, each) for each in blocks)
    """)


# ---- refusals ------------------------------------------------------------------------------------


def test_devices_without_a_way_between_them_are_refused_and_copies_work():
    run("""
        host_device.separate(0, 1, True)
        here, there = (gpumem.Arena(each) for each in devices)
        src = gpumem.full(3 * MIB, 7, "u1", resource=here)
        try:
            here.enable_peer("host:1")
        except PeerAccessError as error:
            assert "host:1 cannot access the memory of host:0" in str(error)
        else:
            raise AssertionError("no error")
        dst = gpumem.zeros(3 * MIB, "u1", resource=there)
        gpumem.copy(dst, src, streams[0])
        assert (dst.numpy() == 7).all()
        assert peers(here) == peers(there) == []
        host_device.separate(0, 1, False)
        here.enable_peer("host:1")
        assert reaches(1, src.buffer)
    """)


def test_refused_access_leaves_the_arena_as_it_was():
    run("""
        INVALID = 1
        for call in itertools.count(1):
            arena = gpumem.Arena("host:0")
            blocks = [arena.allocate(80 * MIB), arena.allocate(1000),
                      arena.allocate_persistent(MIB)]
            host_device.fail("cuMemSetAccess", call, INVALID)
            try:
                arena.enable_peer("host:1")
            except DriverError as error:
                assert error.call == "cuMemSetAccess"
            else:
                break
            assert peers(arena) == []
            assert not any(reaches(1, each) for each in blocks), call
            blocks.append(arena.allocate(40 * MIB))
            arena.enable_peer("host:1")
            assert all(reaches(1, each) for each in blocks)
            arena.check_invariants()
        assert call > 3
        host_device.clear_faults()
    """)


def test_refused_access_does_not_fail_a_copy():
    run("""
        here, there = (gpumem.Arena(each) for each in devices)
        src = gpumem.full(MIB, 7, "u1", resource=here)
        dst = gpumem.zeros(MIB, "u1", resource=there)
        host_device.fail("cuMemSetAccess", 1, 2)
        gpumem.copy(dst, src, streams[1])
        assert (dst.numpy() == 7).all() and peers(here) == []
        gpumem.copy(dst, src, streams[1])
        assert peers(here) == ["host:1"]
    """)


def test_refused_growth_with_peers_leaves_the_arena_as_it_was():
    run("""
        arena = gpumem.Arena("host:0", {"peers": ["host:1"]})
        before = arena.allocate(5 * MIB)
        host_device.fail("cuMemSetAccess", 1, 1)
        try:
            arena.allocate(90 * MIB)
        except DriverError:
            pass
        else:
            raise AssertionError("no error")
        arena.check_invariants()
        assert all(reaches(1, each) for each in (before, arena.allocate(90 * MIB)))
    """)


@pytest.mark.parametrize("peer", ["host:0", "cuda:0"])
def test_own_device_and_other_types_are_no_peers(peer):
    run(f"""
        arena = gpumem.Arena("host:0")
        try:
            arena.enable_peer({peer!r})
        except ConfigError as error:
            assert "expected another host device" in str(error)
        else:
            raise AssertionError("no error")
    """)


def test_unknown_devices_and_closed_arenas_are_refused():
    run("""
        arena = gpumem.Arena("host:0")
        for wrong in ("host:2", "nothing"):
            try:
                arena.enable_peer(wrong)
            except ValueError:
                continue
            raise AssertionError(wrong)
        arena.close()
        try:
            arena.enable_peer("host:1")
        except gpumem.errors.ClosedError:
            pass
        else:
            raise AssertionError("no error")
    """)


# ---- threads -------------------------------------------------------------------------------------


def test_peers_join_while_other_threads_allocate_and_pages_move():
    run(
        """
        arena = gpumem.Arena("host:0", {"page_move_threshold": 0, "page_move_budget": 1})
        seed = random.randrange(1 << 32)
        failed, kept = [], []

        def work(number):
            rng = random.Random(seed + number)
            blocks = []
            try:
                for _ in range(150):
                    while blocks and rng.random() < 0.5:
                        blocks.pop(rng.randrange(len(blocks))).close()
                    blocks.append(arena.allocate(rng.choice([1000, 2 * MIB, 9 * MIB])))
            except BaseException as error:
                failed.append(error)
            kept.extend(blocks)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for peer in devices[1:]:
            arena.enable_peer(peer)
        for thread in threads:
            thread.join()
        assert not failed, (seed, failed)
        assert peers(arena) == devices[1:]
        assert all(reaches(device, each) for each in kept for device in range(4)), seed
        arena.check_invariants()
        """,
        count=4,
    )
