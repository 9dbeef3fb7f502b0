"""Stacks and segments in traces, from every format that has them; a trace of each memory."""

import numpy as np
import pytest
from helpers.torch_snapshots import entry, snapshot_file

import gpumem
from gpumem import observe
from gpumem._events.events import _SLOT, ALLOC, HEADER_BYTES, MOVE, RESERVE
from gpumem.errors import TraceError
from gpumem.traces import load_trace, load_traces
from gpumem.traces.builder import SegmentLog, TraceBuilder

MIB = 1 << 20


def rows_of(segments):
    columns = segments.address, segments.nbytes, segments.begin, segments.end
    return list(zip(*(column.tolist() for column in columns), strict=True))


# ------------------------------------------------------------------------------------------ stacks


def test_builder_keeps_each_stack_once():
    builder = TraceBuilder()
    first, same = (("a.py", 1, "f"),), (("a.py", 1, "f"),)
    for place, frames in enumerate((first, same, (), (("b.py", 2, "g"), *first))):
        builder.alloc("line", place * 512, 512, 0, place, "", frames)
    details = builder.trace("run", {}).details
    assert details.stacks == (first, (("b.py", 2, "g"), *first))
    assert details.stack.tolist() == [0, 0, -1, 1]


def test_log_without_stacks_has_none():
    builder = TraceBuilder()
    builder.alloc("line", 0, 512, 0, 0)
    details = builder.trace("run", {}).details
    assert details.stack is None
    assert details.stacks == ()


def test_recording_gives_the_stack_of_each_allocation(tmp_path, arena):

    def first_caller():
        return arena.allocate(1000)

    def second_caller():
        return arena.allocate(1000)

    with observe.record(arena, tmp_path / "events", stacks=1.0):
        kept = [first_caller(), second_caller(), first_caller()]
    details = load_trace(tmp_path / "events").details
    names = [[name for _, _, name in details.stacks[number]] for number in details.stack.tolist()]
    assert [any("first_caller" in name for name in each) for each in names] == [True, False, True]
    assert [any("second_caller" in name for name in each) for each in names] == [False, True, False]
    del kept


def test_snapshots_give_the_stack_of_each_block(tmp_path, arena):

    def caller():
        return arena.allocate(MIB)

    with observe.record(arena, stacks=1.0):
        kept = caller()
        snapshot = arena.snapshot()
    snapshot.save(tmp_path / "moment.json")
    snapshot.save(tmp_path / "moment.pickle")
    for name in ("moment.json", "moment.pickle"):
        details = load_trace(tmp_path / name).details
        (stack,) = details.stacks
        assert any("caller" in function for _, _, function in stack), name
        assert details.segments.nbytes.sum() >= MIB, name
    del kept


def test_torch_snapshot_gives_stacks_also_native_ones(tmp_path):
    frames = [
        {"filename": "??", "line": 0, "name": "at::empty"},
        {"filename": "/job/train.py", "line": 7, "name": "step"},
        {"filename": 5, "line": 1, "name": "broken"},
    ]
    path = snapshot_file(tmp_path / "s.pickle", [entry("alloc", 512, 64, frames=frames)])
    details = load_trace(path).details
    assert details.stacks == ((("??", 0, "at::empty"), ("/job/train.py", 7, "step")),)
    assert details.owners == ("step (/job/train.py:7)",)


# ---------------------------------------------------------------------------------------- segments


def test_segment_that_is_released_in_part_goes_on_on_both_sides():
    log = SegmentLog()
    log.begin(0, 100, 0)
    log.begin(200, 50, 1)
    log.end(40, 20, 2)
    log.end(500, 10, 3)  # begun before the log
    log.end(0, 1000, 4)
    assert rows_of(log.columns()) == [
        (0, 100, 0, 2),
        (200, 50, 1, 4),
        (0, 40, 2, 4),
        (60, 40, 2, 4),
    ]


def test_segments_of_random_changes_cover_what_is_mapped(rng):
    log, mapped = SegmentLog(), np.zeros(300, bool)
    for event in range(200):
        at, nbytes = rng.randrange(280), rng.randrange(1, 20)
        begins = rng.random() < 0.5
        (log.begin if begins else log.end)(at, nbytes, event)
        mapped[at : at + nbytes] = begins
        found = np.zeros(300, int)
        for place, size, _, end in rows_of(log.columns()) if log.columns() else ():
            if end < 0:
                found[place : place + size] += 1
        assert (found == mapped).all(), event


def test_torch_snapshot_gives_segments_with_borders(tmp_path):
    path = snapshot_file(
        tmp_path / "s.pickle",
        [
            entry("segment_map", 1 << 20, 2 * MIB),
            entry("alloc", 1 << 20, 64),
            entry("segment_unmap", (1 << 20) + MIB, MIB),
            entry("segment_alloc", 1 << 30, MIB),
            entry("free_completed", 1 << 20, 64),
            entry("segment_free", 1 << 30, MIB),
        ],
    )
    assert rows_of(load_trace(path).details.segments) == [
        (1 << 20, 2 * MIB, 0, 1),
        (1 << 20, MIB, 1, -1),
        (1 << 30, MIB, 1, 2),
    ]


def test_recording_gives_regions_as_segments(tmp_path):
    arena = gpumem.Arena("host", {"backing": "regions"})
    with observe.record(arena, tmp_path / "events"):
        kept = arena.allocate(MIB)
        (region,) = [each for each in arena.snapshot().resources[0].regions if each.nbytes]
        address, nbytes = region.address, region.nbytes
        kept.close()
        arena.shrink()
    assert rows_of(load_trace(tmp_path / "events").details.segments) == [(address, nbytes, 0, 2)]


def recording_of_pages(path, *events):
    """Write (kind, address, bytes, stream) of an arena's events, and the block that names it."""
    arena = gpumem.Arena("host")
    with observe.record(arena, path):
        arena.allocate(MIB).close()
    data = path.read_bytes()
    slots = np.frombuffer(data, _SLOT, offset=HEADER_BYTES).copy()
    (alloc,) = slots[slots["kind"] == ALLOC]
    rows = np.repeat(slots[slots["kind"] == ALLOC], len(events))
    for row, (kind, address, nbytes, stream) in zip(rows, events, strict=True):
        row["kind"], row["address"], row["nbytes"], row["stream"] = kind, address, nbytes, stream
    names = slots[slots["kind"] == 255]
    path.write_bytes(
        data[:32]
        + bytes(8)
        + data[40:HEADER_BYTES]
        + names.tobytes()
        + rows.tobytes()
        + alloc.tobytes()
    )


@pytest.mark.parametrize("names_the_address", [True, False], ids=["", "older file"])
def test_segment_of_a_page_ends_at_the_address_that_it_left(tmp_path, names_the_address):
    """It stays where an older file does not name that address."""
    low, high = 1 << 30, 1 << 31
    left, end = (low, 0) if names_the_address else (0, -1)
    moved = [(RESERVE, low, 2 * MIB, 0), (MOVE, high, 2 * MIB, left)]
    recording_of_pages(tmp_path / "events", *moved)
    assert rows_of(load_trace(tmp_path / "events").details.segments) == [
        (low, 2 * MIB, 0, end),
        (high, 2 * MIB, 0, -1),
    ]


# ---------------------------------------------------------------------------------------- memories


def test_load_traces_gives_each_memory_and_load_trace_the_busiest(tmp_path):
    one = [entry("alloc", 512, 64, time_us=1_700_000_000_000_000)]
    two = [entry("alloc", 512, 64), entry("alloc", 1024, 64)]
    path = snapshot_file(tmp_path / "s.pickle", one, [], two)
    found = load_traces(path)
    assert [trace.meta["device"] for trace in found] == [0, 2]
    assert found[0].meta["first_us"] == 1_700_000_000_000_000
    assert load_trace(path).meta["device"] == 2
    assert [trace.meta["device"] for trace in load_traces(path, device=0)] == [0]
    with pytest.raises(TraceError, match="device is 3"):
        load_traces(path, device=3)


def test_recording_of_an_arena_has_the_blocks_of_its_tags(tmp_path, arena):
    with arena.tag("before"):
        old = arena.allocate(MIB)
    with observe.record(arena, tmp_path / "events") as recording:
        with arena.tag("before"):
            first = arena.allocate(2 * MIB)
        with arena.tag("later"):
            second = arena.allocate(3 * MIB)
        plain = arena.allocate(4 * MIB)
    trace = load_trace(tmp_path / "events")
    assert sorted(trace.size.tolist()) == [MIB, 2 * MIB, 3 * MIB, 4 * MIB]
    names = {resource.name for resource in recording.events().resources.values()}
    assert names == {"host:0", "host:0, tag before", "host:0, tag later"}
    del old, first, second, plain


def test_ring_that_lost_events_begins_with_the_blocks_of_later_tags():
    arena = gpumem.Arena("host")
    recording = observe.record(arena, capacity=8)
    with arena.tag("later"):
        kept = arena.allocate(3 * MIB)
    for _ in range(20):
        arena.allocate(512).close()
    with pytest.warns(RuntimeWarning, match="oldest events"):
        recording.stop()
    trace = recording.trace()
    assert 3 * MIB in trace.size.tolist()
    del kept


def test_snapshot_of_an_arena_has_the_memory_of_all_tags(arena):
    with arena.tag("cache"):
        tagged = arena.allocate(2 * MIB)
    plain = arena.allocate(MIB)
    snapshot = arena.snapshot()
    names = [found.name for found in snapshot.resources]
    assert names == [arena.name, f"{arena.name}, tag cache"]
    assert [block.nbytes for found in snapshot.resources for block in found.live] == [MIB, 2 * MIB]
    root, part = snapshot.resources
    assert part.parent == root.key
    assert sum(found.counts["reserved"] for found in snapshot.resources) == arena.stats().reserved
    del tagged, plain
