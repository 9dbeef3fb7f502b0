"""What an out-of-memory error tells: who holds what, what could be had, and what would help."""

import json
import pickle

import pytest
from helpers.driver import HostDriver
from helpers.graph import RELAXED, Graph

import gpumem
from gpumem import observe
from gpumem.adaptors import LimitAdaptor
from gpumem.stats import LimitInForce, OutOfMemoryReport, find_remedies

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
TIGHT = {"split_rule": "tight"}
GIVEN = {"max_mem": 4 * MIB, "initial_chunk_size_bytes": 4 * MIB}  # one region, which all share
LAG = 30_000_000  # ns


def report_of(resource, nbytes, stream=None) -> OutOfMemoryReport:
    with pytest.raises(gpumem.OutOfMemoryError) as caught:
        resource.allocate(nbytes, stream)
    assert str(caught.value) == caught.value.report.text() or caught.type is not (
        gpumem.OutOfMemoryError
    )
    return caught.value.report


# ---- what an arena knows -------------------------------------------------------------------------


def test_report_lists_bytes_in_use_by_tag_and_untagged(make_arena):
    arena = make_arena(TIGHT | {"max_mem": 4 * MIB})
    with observe.record(arena):
        with observe.tag("weights"):
            weights = [arena.allocate(MIB), arena.allocate(MIB // 2)]
        with observe.tag("caches"):
            caches = arena.allocate(MIB // 4)
        rest = arena.allocate(MIB // 8)
        report = report_of(arena, 4 * MIB)
    assert report.by_owner == {"weights": 3 * MIB // 2, "caches": MIB // 4, "untagged": MIB // 8}
    assert list(report.by_owner) == ["weights", "caches", "untagged"]
    assert report.in_use == sum(report.by_owner.values())
    assert "in use by weights 1.5 MiB, caches 256.0 KiB, untagged 128.0 KiB" in report.text()
    for buffer in (*weights, caches, rest):
        buffer.close()


def test_report_without_a_recording_omits_tags(make_arena):
    arena = make_arena(TIGHT | {"max_mem": MIB})
    with arena.allocate(MIB // 2):
        report = report_of(arena, MIB)
    assert report.by_owner == {"untagged": MIB // 2}
    assert "untagged" not in report.text()


def test_report_lists_free_bytes_by_reason(make_arena, virtual_clock, driver):
    one, two = gpumem.Stream("host"), gpumem.Stream("host")
    arena = make_arena(TIGHT | GIVEN | {"oom_wait_ms": 0})
    queued, pending, pin = (arena.allocate(n * MIB, one) for n in (1, 1, 2))
    virtual_clock.set_lag(LAG)
    driver.fill(queued, 1, one)
    driver.fill(pending, 1, two)
    pending.record_stream(two)
    queued.close()
    pending.close()
    seen = {stream: report_of(arena, 2 * MIB, stream) for stream in (one, two)}
    assert [seen[s].waiting for s in (one, two)] == [0, MIB]
    assert [seen[s].pending_free for s in (one, two)] == [MIB, MIB]
    assert [seen[s].stream for s in (one, two)] == [one.ptr, two.ptr]
    assert "1.0 MiB free, 1.0 MiB pending free on other streams" in seen[two].text()
    assert seen[two].remedies[0].startswith("wait for streams: their unfinished work holds 2.0 MiB")
    assert seen[one].remedies == ("free buffers, or raise max_mem",)
    virtual_clock.advance_clock(LAG)
    pin.close()


@pytest.mark.parametrize("how", ["freed", "recorded"])
def test_report_names_handles_that_the_driver_refuses(make_arena, host, how):
    name_of_none = 0xBAD00
    arena = make_arena(TIGHT | GIVEN)
    buffer = arena.allocate(4 * MIB, name_of_none if how == "freed" else None)
    if how == "recorded":
        buffer.record_stream(name_of_none)
    buffer.close()
    records = host.call_count("cuEventRecord")
    report = report_of(arena, 4 * MIB)
    # It is not asked again and again, as for a stream whose work may end.
    assert host.call_count("cuEventRecord") - records < 20
    assert report.refused_streams == ((name_of_none, "CUDA_ERROR_INVALID_HANDLE"),)
    assert report.remedies[0] == (
        "call reset_stream() for streams that are gone: 4.0 MiB wait for events that the driver "
        "does not record, on 0xbad00 (CUDA_ERROR_INVALID_HANDLE)"
    )
    arena.reset_stream(name_of_none)
    with arena.allocate(4 * MIB):
        assert report_of(arena, 4 * MIB).refused_streams == ()


def test_report_names_refused_handles_of_tags(make_arena):
    arena = make_arena({"max_mem": 32 * MIB, "backing": "virtual", "oom_wait_ms": 0})
    with arena.tag("weights"):
        arena.allocate(24 * MIB, 0xBAD00).close()
    report = report_of(arena, 24 * MIB)
    assert report.refused_streams == ((0xBAD00, "CUDA_ERROR_INVALID_HANDLE"),)


def test_report_does_not_name_a_stream_that_is_captured(make_arena, stream):
    arena = make_arena(TIGHT | GIVEN | {"oom_wait_ms": 0})
    buffer = arena.allocate(3 * MIB, stream)
    with Graph(HostDriver(), stream, RELAXED) as graph:
        buffer.close()
        report = report_of(arena, 3 * MIB)
    graph.destroy()
    assert report.refused_streams == ()
    assert report.remedies[0].startswith("wait for streams")


def test_report_lists_memory_in_thread_caches(make_arena):
    arena = make_arena({"max_mem": 2 * MIB})
    arena.allocate(256).close()
    report = report_of(arena, 1 << 60)  # for which nobody empties a cache
    assert report.in_use == 0
    assert report.cached == 256
    assert report.reserved == report.free + report.cached
    assert "256 B in threads' caches" in report.text()


def test_report_lists_movable_pages(make_arena):
    arena = make_arena({"backing": "virtual"})
    held = [arena.allocate(32 * MIB) for _ in range(8)]
    for buffer in held[::2]:
        buffer.close()
    report = report_of(arena, 1 << 60)
    assert report.free == report.movable >= 64 * MIB
    assert report.largest_free == 32 * MIB
    for buffer in held[1::2]:
        buffer.close()


# ---- the device ----------------------------------------------------------------------------------


def test_report_lists_device_memory_and_its_holders(make_arena, leave_room, host):
    arena, other = make_arena(TIGHT), make_arena(TIGHT)
    held = [arena.allocate(2 * MIB), other.allocate(3 * MIB)]
    before = report_of(arena, 1 << 60)
    pool = gpumem.DriverPool("host")
    held.append(pool.allocate(MIB))
    leave_room(MIB // 2)
    report = report_of(arena, 64 * MIB)
    assert report.device_total == host.capacity(0)
    assert report.device_free == MIB // 2
    assert report.held_here - before.held_here == MIB
    assert report.held_here >= arena.stats().reserved + other.stats().reserved + MIB
    assert report.held_by_others == max(
        0, report.device_total - report.device_free - report.held_here
    )
    assert "the device: 512.0 KiB of" in report.text()
    for buffer in held:
        buffer.close()


def test_report_counts_a_nested_arena_once(make_arena):
    below = make_arena(TIGHT)
    alone = report_of(below, 1 << 60).held_here
    above = make_arena(TIGHT, source=below)
    with above.allocate(MIB):
        report = report_of(below, 1 << 60)
        assert report.held_here - alone == below.stats().reserved
    above.close()


def test_idle_memory_of_another_arena_is_the_first_remedy(make_arena, leave_room):
    region = {"backing": "regions", "initial_chunk_size_bytes": 64 * MIB}
    arena, other = make_arena(TIGHT), make_arena(TIGHT | region)
    with other.allocate(8 * MIB):
        leave_room(0)
        report = report_of(arena, 16 * MIB)
    assert report.idle_elsewhere >= 32 * MIB
    assert report.remedies[0].startswith("shrink() other arenas of this process: ")


def test_report_names_what_graph_pools_hold(make_arena):
    arena, stream = make_arena({"backing": "regions", "max_mem": 64 * MIB}), gpumem.Stream("host")
    with arena.capture(stream) as pool:
        arena.allocate(40 * MIB, stream).close()
    held = pool.stats().reserved
    report = report_of(arena, 30 * MIB)
    assert report.graph_pools == held
    assert report.remedies[0].startswith("close graph pools that are not needed, which hold ")
    assert "held by graph pools: " in report.text()
    pool.close()
    assert report_of(arena, 65 * MIB).graph_pools == 0


def test_idle_memory_of_a_graph_pool_is_not_offered_to_a_shrink(make_arena):
    arena, other, stream = make_arena(TIGHT), make_arena(), gpumem.Stream("host")
    idle_before = report_of(arena, 64 << 30).idle_elsewhere  # of arenas that other tests left
    with other.capture(stream) as pool:
        other.allocate(40 * MIB, stream).close()
    other.shrink()
    held = pool.stats().reserved  # and nothing of it is in a thread's cache
    assert report_of(arena, 64 << 30).idle_elsewhere - idle_before < held
    pool.close()


def test_request_larger_than_the_device_is_reported_as_such(make_arena, host):
    host.set_capacity(0, 8 * GIB)
    report = report_of(make_arena(), 9 * GIB)
    assert report.remedies == ("host:0 has 8.0 GiB in all: take smaller blocks",)


def test_report_omits_device_memory_the_driver_does_not_give(make_arena, host):
    arena = make_arena({"max_mem": MIB})
    host.fail("cuMemGetInfo", 1, 999)
    report = report_of(arena, 2 * MIB)
    assert (report.device_total, report.device_free, report.held_by_others) == (None, None, None)
    assert "the device" not in report.text()


# ---- remedies ------------------------------------------------------------------------------------


def test_fragmentation_remedy_suggests_movable_pages(make_arena):
    arena = make_arena(TIGHT | GIVEN)
    held = [arena.allocate(MIB) for _ in range(4)]
    held[0].close()
    held[2].close()
    report = report_of(arena, 2 * MIB)
    assert (report.free, report.largest_free) == (2 * MIB, MIB)
    assert report.remedies == (
        'backing="virtual", which moves pages: enough is free here, but in pieces',
        "free buffers, or raise max_mem",
    )
    for buffer in held[1::2]:
        buffer.close()


def test_fragmentation_remedy_for_pinned_memory_suggests_no_pages(make_arena):
    arena = make_arena(TIGHT | GIVEN, memory="host/host_accessible")
    held = [arena.allocate(MIB) for _ in range(4)]
    held[0].close()
    held[2].close()
    assert report_of(arena, 2 * MIB).remedies == ("free buffers, or raise max_mem",)
    for buffer in held[1::2]:
        buffer.close()


@pytest.mark.parametrize(
    ("numbers", "reason", "remedy"),
    [
        (
            {"held_by_others": 8 * GIB},
            "driver",
            "free memory that others hold on the device, 8.0 GiB",
        ),
        ({"held_here": GIB}, "driver", "free buffers, or memory that others hold on the device"),
        ({}, "absurd", "the size exceeds the address space; check for an overflow"),
        (
            {},
            "addresses",
            "no free range of addresses is large enough, or the limit was lifted meanwhile: try "
            "again, or allocate smaller blocks",
        ),
        ({}, "copy", "host memory for a copy of the live bytes is missing; free host memory"),
        (
            {"limits": (LimitInForce("max_size", MIB, 0),)},
            "limit",
            "the block alone is larger than max_size: raise max_size",
        ),
    ],
)
def test_remedy_matches_the_numbers(numbers, reason, remedy):
    report = OutOfMemoryReport("cuda:0", 5 * MIB, 5 * MIB, **numbers)
    assert find_remedies(report, reason) == (remedy,)


@pytest.mark.parametrize("limit", [9, 21, 101])
def test_remedy_says_what_a_block_takes_in_whole_pages(make_arena, limit):
    report = report_of(make_arena({"max_mem": limit * MIB}), limit * MIB)
    pages = f"the block takes {limit + 1}.0 MiB in pages of 2.0 MiB: raise max_mem"
    assert report.remedies == (pages,)


def test_remedy_says_what_live_blocks_hold_in_place(make_arena):
    arena = make_arena({"max_mem": 64 * MIB})
    live = [arena.allocate(MIB) for _ in range(60)]
    for block in live[::2]:
        block.close()
    (remedy,) = report_of(arena, 20 * MIB).remedies
    assert remedy == (
        "free buffers, or raise max_mem: of 30.0 MiB that are free, 0 B lie in whole pages, "
        "which can move; live blocks hold the others in place"
    )
    for block in live[1::2]:
        block.close()


# ---- for programs --------------------------------------------------------------------------------


def test_report_is_plain_values_and_survives_pickle(make_arena):
    arena = make_arena({"max_mem": MIB})
    with pytest.raises(gpumem.OutOfMemoryError) as caught:
        arena.allocate(2 * MIB)
    report = caught.value.report
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain["limits"] == [{"what": "max_mem", "limit": MIB, "used": 0}]
    assert plain["requested_nbytes"] == plain["allocated_nbytes"] == 2 * MIB
    assert plain["remedies"] == list(report.remedies)
    assert pickle.loads(pickle.dumps(caught.value)).report == report


def test_report_lists_budget_levels_before_the_arenas_limit(make_arena):
    team = gpumem.Budget(8 * MIB, name="team")
    budget = gpumem.Budget(2 * MIB, parent=team, name="session")
    arena = make_arena(TIGHT | {"max_mem": 64 * MIB}, budget=budget)
    with arena.allocate(MIB):
        report = report_of(arena, 4 * MIB)
        assert report.in_use == MIB
    assert [(one.what, one.limit) for one in report.limits] == [
        ("session", 2 * MIB),
        ("team", 8 * MIB),
        ("max_mem", 64 * MIB),
    ]
    assert report.limit == 2 * MIB
    assert report.remedies == ("the request alone is larger than the limit of 'session': raise it",)
    with arena.allocate(MIB):
        report = report_of(arena, 2 * MIB)
    assert report.remedies == ("free some of what 'session' holds, or raise its limit",)


def test_block_that_is_larger_than_an_adaptors_limit_is_told_to_raise_it():
    with pytest.raises(gpumem.OutOfMemoryError, match="the block alone is larger than limit"):
        gpumem.adaptors.limit(gpumem.Arena("host"), MIB).allocate(2 * MIB)


@pytest.mark.parametrize("nbytes", [64 * MIB, 1 << 60])
def test_every_kind_of_resource_makes_a_report(nbytes):
    pool = gpumem.DriverPool("host", gpumem.PoolConfig(max_size=MIB))
    adaptor = LimitAdaptor(gpumem.Arena("host"), MIB)
    external = gpumem.ExternalAllocator(lambda n: 0, lambda p: None, memory="host")
    for resource in (pool, adaptor, external):
        report = report_of(resource, nbytes)
        assert report.memory == "host:0"
        assert report.requested_nbytes == nbytes
        assert report.allocated_nbytes >= nbytes
        assert report.remedies
        assert report.resource == resource.name
