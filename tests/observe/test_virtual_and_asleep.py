"""What recordings, snapshots and reports show of virtual tensors and of sleeping memory."""

import threading

from helpers.driver import HostDriver
from helpers.graph import Graph

import gpumem
from gpumem import observe
from gpumem.observe import snapshot
from gpumem.replay import replay

MIB = 1 << 20


def held_by(events):
    """Bytes that the events say the driver has given."""
    change = {"reserve": 1, "release": -1}
    return sum(change.get(event.action, 0) * event.nbytes for event in events)


def rows_of(arena, committed=0):
    return arena.virtual((64, MIB), "uint8", committed=committed, step=2)


def test_committed_rows_are_recorded_as_blocks_until_their_release(arena):
    with observe.record(arena) as recording:
        rows = rows_of(arena)
        with observe.tag("cache"):
            rows.commit(5)
        rows.commit(8)
        rows.release(0, 2)
    told = [
        (e.action, e.nbytes // MIB, e.tag or e.framework)
        for e in recording.events()
        if e.action in ("alloc", "free")
    ]
    assert told == [
        *[("alloc", 2, "cache")] * 3,
        ("alloc", 2, "virtual tensors"),
        ("free", 2, "virtual tensors"),
    ]
    assert held_by(recording.events()) == arena.stats().reserved == 6 * MIB


def test_recording_and_report_count_rows_that_were_committed_before(tmp_path, arena):
    rows = rows_of(arena, 8)
    with observe.record(arena, path=tmp_path / "events.rec"):
        block = arena.allocate(4 * MIB)
        rows.release(0, 4)
        rows.commit(10)
    (trace,) = gpumem.traces.load_traces(tmp_path / "events.rec")
    assert trace.peak_requested == 14 * MIB
    assert int(trace.live_bytes()[-1]) == 14 * MIB
    assert arena.report(tmp_path / "page.html").peak_live_bytes == 14 * MIB
    block.close()


def test_recorded_rows_are_replayed(tmp_path, arena):
    with observe.record(arena, path=tmp_path / "events.rec"):
        rows = rows_of(arena, 6)
        rows.release(0, 6)
    result = replay(tmp_path / "events.rec", "host")
    assert (result.peak_requested_bytes, result.failed_allocs) == (6 * MIB, 0)


def test_snapshot_shows_pages_in_use_of_virtual_tensors(arena):
    block = arena.allocate(4 * MIB)
    rows = rows_of(arena, 4)
    (found,) = snapshot(arena).resources
    shown = [each for each in found.live if found.regions[each.region].kind == "virtual"]
    assert [(each.address, each.nbytes, each.owner) for each in shown] == [
        (rows.ptr + at * MIB, 2 * MIB, "virtual tensors") for at in (0, 2)
    ]
    assert found.by_owner() == {"virtual tensors": 4 * MIB, "untagged": 4 * MIB}
    assert found.counts["in_use"] == arena.stats().in_use == 8 * MIB
    assert int(found.pages["nbytes"].sum()) == found.counts["reserved"] == arena.stats().reserved
    rows.release(0, 4)
    assert snapshot(arena).resources[0].by_owner() == {"untagged": 4 * MIB}
    block.close()


def test_snapshots_are_whole_while_another_thread_commits_and_releases(arena):
    rows = rows_of(arena)
    ends = threading.Event()

    def work():
        while not ends.is_set():
            rows.commit(16)
            rows.release(0, 16)
            with rows_of(arena, 2):
                pass

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(200):
            (found,) = snapshot(arena).resources
            assert found.counts["in_use"] == sum(each.allocated_nbytes for each in found.live)
            assert all(each.nbytes == 2 * MIB for each in found.live)
    finally:
        ends.set()
        thread.join()


def test_sleep_releases_and_wake_reserves_what_is_recorded(make_arena):
    arena, stream, driver = make_arena(), gpumem.Stream("host"), HostDriver()
    with observe.record() as recording:
        with arena.capture(stream) as pool, Graph(driver, stream):
            captured = arena.allocate(4 * MIB, stream)
        block, freed = arena.allocate(8 * MIB), arena.allocate(8 * MIB)
        rows = rows_of(arena, 4)
        assert held_by(recording.events()) == arena.stats().reserved + pool.stats().reserved
        arena.sleep()
        assert held_by(recording.events()) == 0
        freed.close()
        arena.wake()
        assert held_by(recording.events()) == arena.stats().reserved + pool.stats().reserved
    memory = [e for e in recording.events() if e.action in ("release", "reserve")]
    assert {e.action for e in memory if e.stream == 1} == {"release", "reserve"}
    assert {e.stream for e in memory} == {0, 1}
    rows.release(0, 4)
    for each in (captured, block):
        each.close()


def test_snapshot_of_a_sleeping_arena_has_its_blocks_and_no_memory(arena):
    block, rows = arena.allocate(8 * MIB), rows_of(arena, 4)
    arena.sleep()
    (found,) = snapshot(arena).resources
    assert found.counts["reserved"] == arena.stats().reserved == 0
    assert len(found.pages) == 0
    assert found.counts["in_use"] == arena.stats().in_use == 12 * MIB
    arena.wake()
    (found,) = snapshot(arena).resources
    assert int(found.pages["nbytes"].sum()) == found.counts["reserved"] == 12 * MIB
    rows.release(0, 4)
    block.close()


def test_report_counts_what_sleeps_as_live_and_not_as_held(make_arena, tmp_path):
    trains, infers = make_arena(name="trains"), make_arena(name="infers")
    with observe.record() as recording:
        weights = trains.allocate(64 * MIB)
        trains.sleep()
        cache = infers.allocate(64 * MIB)
    report = recording.report(tmp_path / "page.html")
    (recorded,) = [each for each in report.policies if each["name"] == "as recorded"]
    assert recorded["peak_reserved_bytes"] == 64 * MIB
    assert recorded["how"] == "recorded"
    assert report.peak_live_bytes == 128 * MIB
    trains.wake()
    weights.close()
    cache.close()
