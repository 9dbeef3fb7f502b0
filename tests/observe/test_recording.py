"""What is recorded, into rings and files, by which resources, threads and processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from helpers import child
from helpers.c_arena import CArena
from helpers.every_kind import RESOURCES
from helpers.threads import running
from helpers.waiting import wait_until

import gpumem
from gpumem import errors, observe
from gpumem._events.events import EVENT, HEADER_BYTES, LIVE, SLOT_BYTES
from gpumem.errors import ConfigError, InUseError, TraceError
from gpumem.replay import replay
from gpumem.traces import load_trace

REGIONS = {"backing": "regions"}


def told(events, *actions):
    """Return (action, bytes asked for) of events, or of some actions."""
    return [(e.action, e.nbytes) for e in events if not actions or e.action in actions]


def blocks_of(events):
    return told(events, "alloc", "free", "free_requested", "free_completed", "failure")


# ---- what is told --------------------------------------------------------------------------------


def test_ring_holds_exactly_the_events_of_the_recording(arena):
    before = arena.allocate(100)
    with observe.record(arena) as recording:
        arena.allocate(1000).close()
        before.close()
    arena.allocate(5).close()
    assert blocks_of(recording.events()) == [("alloc", 1000), ("free", 1000), ("free", 100)]


@pytest.mark.parametrize("backing", ["regions", "virtual"])
def test_reserved_less_released_bytes_are_what_the_arena_holds(make_arena, backing):
    arena = make_arena({"backing": backing, "max_mem": 64 << 20})
    change = {"reserve": 1, "release": -1}
    with observe.record(arena) as recording:

        def check():
            events = [e for e in recording.events() if e.action in change]
            assert sum(change[e.action] * e.nbytes for e in events) == arena.stats().reserved
            held: dict[int, int] = {}
            for event in events:
                if event.action == "reserve":
                    held[event.address] = event.nbytes
            return held

        blocks = [arena.allocate(size) for size in (100, 5 << 20, 300, 9 << 20)]
        blocks.append(arena.allocate_persistent(3 << 20))
        blocks.append(arena.allocate(1000, shareable=True))
        held = check()
        shared = blocks[-1].ptr
        assert held[shared] >= 1000, "memory of a shareable block is recorded as a whole"
        for block in blocks[1::2]:
            block.close()
        check()
        arena.shrink()
        check()
        with arena.allocate(20 << 20), pytest.raises(gpumem.OutOfMemoryError):
            arena.allocate(60 << 20)
        check()
        for block in blocks:
            block.close()
        arena.shrink()
        check()
        assert arena.stats().reserved == 0


def test_event_has_address_size_stream_and_thread(make_arena, stream):
    arena = make_arena(name="mine")
    with observe.record(arena) as recording:
        buffer = arena.allocate(1000, stream)
        address = buffer.ptr
        buffer.close()
    events = [e for e in recording.events() if e.action in ("alloc", "free")]
    for event in events:
        assert (event.address, event.allocated_nbytes, event.stream) == (address, 1024, stream.ptr)
        assert event.thread == threading.get_native_id()
        assert event.resource == observe.RecordedResource("host:0", "arena", "mine")
    assert 0 < events[0].time <= events[1].time < 60e9


@pytest.mark.parametrize("backing", ["regions", "virtual"])
def test_region_events_are_exact_to_the_byte(make_arena, backing):
    arena = make_arena({"backing": backing})
    with observe.record(arena) as recording:
        buffers = [arena.allocate(3 << 20) for _ in range(8)]
        persistent = arena.allocate_persistent(1 << 20)
        highest = arena.stats().max_reserved
        for buffer in (*buffers, persistent):
            buffer.close()
        released = arena.shrink().released_bytes
    records = recording.events().records
    came = records["nbytes"][records["kind"] == 6].sum()
    went = records["nbytes"][records["kind"] == 7].sum()
    assert came == highest
    assert came - went == arena.stats().reserved
    assert told(recording.events(), "shrink") == [("shrink", released)]


def test_event_is_short_as_text_and_a_table_in_a_notebook(make_arena):
    arena = make_arena(REGIONS, name="<mine>")
    with observe.record(arena) as recording:
        address = arena.allocate(1000).ptr
    event = recording.events()[-2]
    shown = f"<gpumem.observe.AllocationEvent: alloc of 1000 B at {address:#x} on host:0>"
    assert repr(event) == shown
    table = event._repr_html_()
    for text in ("alloc", "host:0 arena &lt;mine&gt;", f"{address:#x}", "1000 B", "1.0 KiB"):
        assert f"<td>{text}</td>" in table, text


def test_failure_shows_its_status_as_a_number_and_not_as_a_size(make_arena):
    arena = make_arena({**REGIONS, "max_mem": "4MiB"})
    with observe.record(arena) as recording, pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate("1GiB")
    failure = next(event for event in recording.events() if event.action == "failure")
    table = failure._repr_html_()
    assert f"<td>{failure.allocated_nbytes}</td>" in table
    assert "<td>1.0 GiB</td>" in table


def test_slice_of_events_is_events(make_arena):
    arena = make_arena(REGIONS)
    with observe.record(arena) as recording:
        arena.allocate(1000).close()
    events = recording.events()
    assert list(events[-2:]) == [events[-2], events[-1]]
    assert events[-2:].resources == events.resources


@pytest.mark.parametrize("refused", [False, True], ids=["", "calls are refused"])
def test_page_events_tell_where_every_page_is(make_arena, host, refused):
    arena = make_arena({"backing": "virtual", "page_move_threshold": 0.0, "page_move_budget": 1.0})
    rng, live, pages, moves, read = random.Random(0), [], {}, 0, 0
    with observe.record(arena) as recording:
        for step in range(400):
            if refused and step % 5 == 0:
                host.clear_faults()
                call = rng.choice(["cuMemMap", "cuMemUnmap", "cuMemSetAccess"])
                host.fail(call, rng.randrange(1, 7), 2)  # CUDA_ERROR_OUT_OF_MEMORY
            if live and rng.random() < 0.5:
                live.pop(rng.randrange(len(live))).close()
            elif rng.random() < 0.02:
                arena.shrink()
            else:
                with contextlib.suppress(gpumem.OutOfMemoryError, errors.DriverError):
                    live.append(arena.allocate(rng.randrange(1, 100 << 20)))
            events = recording.events()
            for event in events[read:]:
                if event.action == "reserve":
                    assert event.address not in pages
                elif event.action == "move":
                    assert pages.pop(event.stream) == event.nbytes
                    moves += 1
                elif event.action == "release":
                    assert pages.pop(event.address) == event.nbytes
                if event.action in ("reserve", "move"):
                    pages[event.address] = event.nbytes
            read = len(events)
            (found,) = arena.snapshot().resources
            assert pages == dict(found.pages.tolist())
    # Each move that called the driver, and those back to an address that was still mapped.
    assert moves > arena.stats().pages_moved > 0


def test_failed_allocation_is_recorded_with_its_request(make_arena):
    arena = make_arena({"max_mem": 1 << 20, **REGIONS})
    with observe.record(arena) as recording, pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(2 << 20)
    assert told(recording.events()) == [("failure", 2 << 20)]


def test_block_pending_free_has_a_later_free_completed_event(host, arena):
    host.use_virtual_clock(True)
    host.set_lag(1_000_000)
    stream, side = gpumem.Stream("host"), gpumem.Stream("host")
    with observe.record(arena) as recording:
        buffer = arena.allocate(1000, stream)
        buffer.record_stream(side)
        gpumem.zeros(10, "uint8", memory="host", stream=side)
        address = buffer.ptr
        buffer.close()
        assert told(recording.events(), "free", "free_requested", "free_completed") == [
            ("free_requested", 1000)
        ]
        host.use_virtual_clock(False)
        host.set_lag(0)
        side.synchronize()
        arena.shrink()
    [end] = [e for e in recording.events() if e.action == "free_completed"]
    assert (end.address, end.allocated_nbytes, end.stream) == (address, 1024, stream.ptr)


def test_stream_reset_is_recorded(make_arena):
    arena, stream = make_arena(), gpumem.Stream("host")
    with observe.record(arena) as recording:
        arena.allocate(1, stream).close()
        arena.reset_stream(stream)
    assert [e.stream for e in recording.events() if e.action == "reset"] == [stream.ptr]


def test_end_of_a_view_that_outlives_its_buffer_is_recorded(arena):
    with observe.record(arena) as recording:
        view = np.from_dlpack(arena.allocate(64))
        assert blocks_of(recording.events()) == [("alloc", 64)]
        del view
    assert blocks_of(recording.events()) == [("alloc", 64), ("free", 64)]


def test_recording_that_has_stopped_is_not_entered_again(arena):
    recording = gpumem.observe.record(arena)
    with recording:
        arena.allocate(10).close()
    seen = len(recording.events())
    with pytest.raises(errors.ClosedError, match="has stopped"), recording:
        arena.allocate(20).close()
    assert len(recording.events()) == seen


# ---- tags, stacks --------------------------------------------------------------------------------


def test_tags_nest_and_are_per_thread(arena):

    def other():
        with observe.tag("other"):
            entered.set()
            arena.allocate(3).close()

    entered = threading.Event()
    with observe.record(arena) as recording, observe.tag("outer"):
        with observe.tag("inner"), running(other):
            entered.wait()
            arena.allocate(1).close()
        arena.allocate(2).close()
    tags = {e.nbytes: e.tag for e in recording.events() if e.action == "alloc"}
    assert tags == {1: "inner", 2: "outer", 3: "other"}


def test_tags_left_in_any_order_leave_the_innermost_open_one(arena):

    def tag_of(nbytes):
        arena.allocate(nbytes).close()
        (event,) = (e for e in recording.events() if (e.action, e.nbytes) == ("alloc", nbytes))
        return event.tag

    for nth, order in enumerate(itertools.permutations(range(4))):
        names = ["a", "b", "a", "c"]  # the same tag may be entered twice
        contexts = [observe.tag(name) for name in names]
        with observe.record(arena) as recording:
            for context in contexts:
                context.__enter__()
            for step, left in enumerate(order):
                contexts[left].__exit__(None, None, None)
                names[left] = None
                open_now = [name for name in names if name]
                assert tag_of(1 + 4 * nth + step) == (open_now[-1] if open_now else None)


def test_tag_left_on_another_thread_is_an_error(make_arena):
    arena, tag = make_arena(), observe.tag("theirs")
    thread = threading.Thread(target=tag.__enter__)
    thread.start()
    thread.join()
    with observe.record(arena) as recording, observe.tag("ours"):
        with pytest.raises(errors.GpumemError, match="'theirs' was entered by another thread"):
            tag.__exit__(None, None, None)
        arena.allocate(1).close()
    assert [e.tag for e in recording.events() if e.action == "alloc"] == ["ours"]


@pytest.mark.parametrize(("name", "error"), [("", ValueError), (3, TypeError), (None, TypeError)])
def test_tag_must_be_text(name, error):
    with pytest.raises(error), observe.tag(name):
        pass


def test_stacks_option_records_all_or_no_stacks(tmp_path, arena):
    with observe.record(arena, tmp_path / "all", stacks=1.0):
        arena.allocate(1).close()
    with observe.record(arena, tmp_path / "none"):
        arena.allocate(1).close()
    found = {
        name: [e.stack for e in observe.read(tmp_path / name) if e.action == "alloc"]
        for name in ("all", "none")
    }
    innermost = found["all"][0][0]
    assert (innermost.filename, innermost.name) == (
        __file__,
        "test_stacks_option_records_all_or_no_stacks",
    )
    assert found["none"] == [()]


@pytest.mark.parametrize("always", [True, False])
def test_stacks_option_may_be_a_bool(always, arena):
    with observe.record(arena, stacks=always) as recording:
        arena.allocate(1000).close()
    stacks = [event.stack for event in recording.events() if event.action == "alloc"]
    assert [bool(stack) for stack in stacks] == [always]


def test_stacks_option_samples_a_fraction(arena):
    with observe.record(arena, capacity=1 << 13, stacks=0.25) as recording:
        for _ in range(2000):
            arena.allocate(1).close()
    with_stack = sum(bool(e.stack) for e in recording.events() if e.action == "alloc")
    assert 350 < with_stack < 650


def test_native_frames_precede_python_frames(arena):
    with observe.record(arena, stacks=1.0, native=True) as recording:
        arena.allocate(1).close()
    stack = next(e.stack for e in recording.events() if e.action == "alloc")
    lines = [frame.line for frame in stack]
    assert lines[0] == 0
    assert "arena.cpython" in " ".join(frame.filename for frame in stack)
    assert stack[-1].line > 0


def test_native_frames_belong_to_the_recording_that_asked_for_them(make_arena):
    one, other = make_arena(), make_arena()
    with observe.record(one, stacks=1.0, native=True) as recording:
        with pytest.raises(InUseError):
            observe.record(one, stacks=1.0)
        with observe.record(other, stacks=1.0) as plain:
            one.allocate(1).close()
            other.allocate(1).close()
    for found, has_native in ((recording, True), (plain, False)):
        (stack,) = [event.stack for event in found.events() if event.action == "alloc"]
        assert any(frame.line == 0 for frame in stack) is has_native


def test_recording_is_read_after_the_working_directory_changed(tmp_path, monkeypatch, arena):
    monkeypatch.chdir(tmp_path)
    with observe.record(arena, "run.rec") as recording:
        arena.allocate(1000).close()
    monkeypatch.chdir("/")
    assert recording.path == tmp_path / "run.rec"
    assert [event.nbytes for event in recording.events() if event.action == "alloc"] == [1000]


# ---- which resources -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", RESOURCES.values(), ids=RESOURCES)
def test_every_kind_of_resource_is_recorded(make):
    resource = make()
    with observe.record(resource) as recording, resource.allocate(500) as buffer:
        address = buffer.ptr
    events = [e for e in recording.events() if e.action in ("alloc", "free")]
    assert [(e.action, e.address, e.nbytes) for e in events] == [
        ("alloc", address, 500),
        ("free", address, 500),
    ]
    resource.allocate(5).close()
    assert len(recording.events()) == len(recording.events())


def test_graph_pool_blocks_are_recorded():
    arena, stream = gpumem.Arena("host"), gpumem.Stream("host")
    with arena.capture(stream) as pool, observe.record(pool) as recording:
        arena.allocate(100, stream).close()
    assert blocks_of(recording.events()) == [("alloc", 100), ("free", 100)]
    assert recording.events()[0].resource.kind == "graph pool"


def test_recording_without_a_resource_covers_all_and_later_ones(make_arena):
    early = make_arena(name="early")
    with observe.record() as recording:
        early.allocate(1).close()
        make_arena(name="late").allocate(2).close()
        RESOURCES["user"]().allocate(3).close()
    found = {(e.resource.name, e.nbytes) for e in recording.events() if e.action == "alloc"}
    assert found == {("early", 1), ("late", 2), ("plain", 3)}


def test_second_recording_of_a_resource_is_refused(arena):
    with observe.record(arena) as recording:
        for resource in (arena, gpumem.adaptors.track(arena), None):
            with pytest.raises(InUseError, match=r"already, .*end that one first"):
                observe.record(resource)
        arena.allocate(1).close()
    assert blocks_of(recording.events()) == [("alloc", 1), ("free", 1)]
    with observe.record(arena):
        pass


def test_recorded_resource_may_end_before_its_recording():
    arena = gpumem.Arena("host")
    recording = observe.record(arena)
    view = np.from_dlpack(arena.allocate(8))
    del arena, view
    gpumem.Arena("host").close()  # ends what was let go
    recording.stop()
    assert blocks_of(recording.events()) == [("alloc", 8), ("free", 8)]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"resource": 3}, TypeError),
        ({"resource": "host"}, TypeError),
        ({"resource": gpumem.GraphPool.__new__(gpumem.GraphPool)}, TypeError),
        ({"resource": gpumem.MemoryResource.__new__(gpumem.MemoryResource)}, TypeError),
        (
            {"resource": gpumem.adaptors.TrackAdaptor.__new__(gpumem.adaptors.TrackAdaptor)},
            TypeError,
        ),
        ({"capacity": 0}, ConfigError),
        ({"capacity": 1 << 40}, ConfigError),
        ({"capacity": 2.5}, ConfigError),
        ({"stacks": 1.5}, ConfigError),
        ({"stacks": -0.1}, ConfigError),
        ({"stacks": "all"}, ConfigError),
        ({"path": "/nowhere/at/all"}, FileNotFoundError),
    ],
)
def test_unrecordable_resource_is_refused_and_starts_nothing(arguments, error):
    with pytest.raises(error):
        observe.record(**arguments)
    with observe.record():
        pass


def test_file_that_is_not_regular_is_refused_by_its_name(arena):
    with pytest.raises(OSError, match="not a regular file: '/dev/full'"):
        observe.record(arena, "/dev/full").__enter__()


# ---- rings ---------------------------------------------------------------------------------------


def test_ring_keeps_the_newest_events_and_counts_the_lost(arena):
    recording = observe.record(arena, capacity=100)
    for size in range(1, 1001):
        arena.allocate(size).close()
    with pytest.warns(RuntimeWarning, match="has lost its 1,873 oldest events: it holds 128"):
        recording.stop()
    events = recording.events()
    assert len(events) == 128
    assert [events[127].nbytes, events[0].nbytes] == [1000, 937]
    assert recording.lost == events.lost == 2 * 1000 + 1 - 128


def test_concurrent_ring_reads_see_whole_events(arena, streams):
    done = threading.Event()

    def work(number):
        # The bytes asked for tell the stream, and the stream the thread.
        while not done.is_set():
            arena.allocate(1000 + number, streams[number]).close()

    recording = observe.record(arena, capacity=64)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    ids = {thread.native_id: n for n, thread in enumerate(threads)}
    seen = 0
    for _ in range(200):
        for event in recording.events():
            if event.action in ("alloc", "free"):
                number = event.nbytes - 1000
                assert ids[event.thread] == number
                assert event.stream == streams[number].ptr
                assert event.allocated_nbytes == 1024
                seen += 1
    done.set()
    for thread in threads:
        thread.join()
    with pytest.warns(RuntimeWarning, match="oldest events"):
        recording.stop()
    assert seen > 1000


def test_recordings_start_and_stop_while_threads_allocate(tmp_path, arena):
    done = threading.Event()

    def work():
        while not done.is_set():
            arena.allocate(1000).close()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(8):
            path = tmp_path / str(number) if number % 2 else None
            allocations = arena.stats().num_allocs
            with observe.record(arena, path, capacity=1 << 24) as recording:
                wait_until(lambda before=allocations: arena.stats().num_allocs > before + 10)
            assert recording.events().torn == 0
    finally:
        done.set()
        for thread in threads:
            thread.join()


# ---- files ---------------------------------------------------------------------------------------


def test_file_has_48_bytes_per_event(arena, tmp_path):
    with observe.record(arena, tmp_path / "events") as recording:
        for _ in range(30_000):
            arena.allocate(64).close()
    events = observe.read(tmp_path / "events")
    assert len(blocks_of(events)) == 60_000
    assert recording.lost == 0
    size = (tmp_path / "events").stat().st_size
    assert size % SLOT_BYTES == HEADER_BYTES % SLOT_BYTES
    assert size - SLOT_BYTES * 60_000 < 8192
    assert (events.process, events.torn) == (os.getpid(), 0)
    assert abs(events.began - time.time_ns()) < 600e9


def test_long_name_round_trips(tmp_path, arena):
    long = "ä" * 1000
    with observe.record(arena, tmp_path / "events"), observe.tag(long):
        arena.allocate(1).close()
    assert {e.tag for e in observe.read(tmp_path / "events")} == {long}


@pytest.mark.parametrize("cut", range(0, 2 * SLOT_BYTES, 7))
def test_torn_tail_loses_only_the_last_events(tmp_path, cut, arena):
    path = tmp_path / "events"
    with observe.record(arena, path):
        for _ in range(20):
            arena.allocate(64).close()
    whole = observe.read(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - cut])
    kept = observe.read(path)
    assert len(kept) == len(whole) - -(-cut // SLOT_BYTES)
    assert (kept.records == whole.records[: len(kept)]).all()
    assert (whole.torn, kept.torn) == (0, -(-cut // SLOT_BYTES))


def test_file_begins_with_the_blocks_that_are_live(make_arena, tmp_path):
    arena, other = make_arena(), make_arena()
    older = [arena.allocate(1000 + i) for i in range(1000)]
    hidden = other.allocate(1000)
    path = tmp_path / "events"
    with observe.record(arena, path) as recording:
        older.pop(0).close()  # its free is an event
        newer = arena.allocate(64)
    events = observe.read(path)
    actions = [event.action for event in events if event.action in ("alloc", "free")]
    assert actions == ["free", "alloc"]
    assert {(block.address, block.nbytes) for _, block in events.began_with} >= {
        (buffer.ptr, buffer.nbytes) for buffer in older
    }
    assert {resource.name for resource, _ in events.began_with} == {arena.name}
    trace = load_trace(path)
    assert trace.allocs == 1001
    assert trace.peak_requested == sum(range(1000, 2000))
    assert recording.trace().peak_requested == trace.peak_requested
    for buffer in (*older, hidden, newer):
        buffer.close()


def test_block_that_is_freed_during_a_file_has_the_owner_that_it_began_with(tmp_path, arena):
    c = CArena(arena)  # blocks keep the library that made them, recorded or not
    kept, freed = c.allocate(1000), c.allocate(1000)
    with observe.record(arena, tmp_path / "events"):
        c.deallocate(freed)
        again = arena.allocate(1000)
    trace = load_trace(tmp_path / "events")
    owners = [trace.details.owners[owner] for owner in trace.details.owner]
    assert owners == ["c", "c", arena.name]
    c.deallocate(kept)
    again.close()


def test_file_of_all_resources_begins_with_the_live_blocks_of_each(make_arena, tmp_path):
    arenas = [make_arena(), make_arena()]
    kept = [arena.allocate(100) for arena in arenas]
    with observe.record(path=tmp_path / "events"):
        pass
    events = observe.read(tmp_path / "events")
    assert {buffer.ptr for buffer in kept} <= {block.address for _, block in events.began_with}
    del kept


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[1, 2, 3, 4]",
        '["host:0", "arena", "a", [[1, 2, 3]]]',
        '["host:0", "arena", "a", [[-1, 2, 3, 4, null]]]',
        '["host:0", "arena", "a", [[1, 281474976710656, 3, 4, null]]]',
        '["host:0", "arena", "a", [[1, 2, 3, 1e400, null]]]',
        "[" * 50_000,
    ],
)
def test_invalid_live_blocks_of_a_file_are_none(make_arena, tmp_path, text):
    path = tmp_path / "events"
    with observe.record(make_arena(), path) as recording:
        recording._handle.define(LIVE, 7, text)
    assert observe.read(path).began_with == ()


def test_file_without_its_number_of_slots_is_read_as_far_as_it_goes(tmp_path, arena):
    """As of a recording that goes on or was killed, and of files from before the number."""
    path = tmp_path / "events"
    with observe.record(arena, path):
        arena.allocate(64).close()
        running = path.read_bytes()
    assert running[32:40] == bytes(8)
    data = path.read_bytes()
    slots = (len(data) - HEADER_BYTES) // SLOT_BYTES
    assert data[32:40] == slots.to_bytes(8, "little")
    path.write_bytes(data[:32] + bytes(8) + data[40:-SLOT_BYTES])
    events = observe.read(path)
    assert (len(blocks_of(events)), events.torn) == (1, 0)


def test_unfinished_slot_is_counted_and_skipped(tmp_path, arena):
    path = tmp_path / "events"
    with observe.record(arena, path):
        for _ in range(5):
            arena.allocate(64).close()
    whole = len(observe.read(path))
    data = bytearray(path.read_bytes())
    at = len(data) - 3 * SLOT_BYTES
    data[at + 40 : at + 48] = bytes(8)
    path.write_bytes(bytes(data) + bytes(1000))
    events = observe.read(path)
    assert (len(events), events.torn) == (whole - 1, 1)
    load_trace(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not begin"),
        (b"hello" * 100, "does not begin"),
        (b"gpumemEV", "torn within its header"),
        (b"gpumemEV" + (2).to_bytes(4, "little") + (48).to_bytes(4, "little") + bytes(99), "2"),
    ],
)
def test_foreign_file_is_refused_in_one_line(tmp_path, data, message):
    path = tmp_path / "events"
    path.write_bytes(data)
    with pytest.raises(errors.EventFileError, match=message):
        observe.read(path)


def named_part(what, number, text):
    """A slot that names a number."""
    data = text.encode()
    words = [255, what, *(0).to_bytes(2, "little"), *number.to_bytes(2, "little")]
    return data.ljust(40, b"\0") + bytes([*words, *len(data).to_bytes(2, "little")])


@pytest.mark.parametrize("text", ["²", "\u0661", "9" * 40, "-1", ""])
def test_thread_that_is_not_named_by_a_number_is_left_out(tmp_path, text):
    path = tmp_path / "events"
    header = b"gpumemEV" + (1).to_bytes(4, "little") + (48).to_bytes(4, "little") + bytes(80)
    path.write_bytes(header + named_part(4, 7, text) + named_part(4, 8, "12"))
    assert observe.read(path).threads == {8: 12}


@pytest.mark.parametrize("device", [None, 0])
def test_file_that_names_no_resource_is_refused_as_a_trace(tmp_path, device):
    path = tmp_path / "events"
    header = b"gpumemEV" + (1).to_bytes(4, "little") + (48).to_bytes(4, "little") + bytes(80)
    path.write_bytes(header + bytes(40) + bytes([1]) + bytes(7))
    with pytest.raises(errors.TraceError, match=r"the recording holds no allocations: no block"):
        load_trace(path, device=device)


def test_memory_with_control_characters_is_shown_escaped(tmp_path):
    path = tmp_path / "events"
    header = b"gpumemEV" + (1).to_bytes(4, "little") + (48).to_bytes(4, "little") + bytes(80)
    path.write_bytes(header + named_part(1, 7, "\x1b[2J\tarena\tcache"))
    with pytest.raises(errors.TraceError) as refused:
        load_trace(path, device=0)
    assert str(refused.value).isprintable()


def test_random_bytes_after_the_header_never_break_the_reader(tmp_path, rng):
    path = tmp_path / "events"
    header = b"gpumemEV" + (1).to_bytes(4, "little") + (48).to_bytes(4, "little") + bytes(80)
    for _ in range(50):
        path.write_bytes(header + rng.randbytes(rng.randrange(5000)))
        list(observe.read(path))


def test_second_recording_into_one_file_is_refused(make_arena, tmp_path):
    first = observe.record(make_arena(), tmp_path / "events")
    with pytest.raises(InUseError, match="another recording"):
        observe.record(make_arena(), tmp_path / "events")
    first.stop()
    with observe.record(make_arena(), tmp_path / "events"):
        pass


def test_recording_survives_a_kill(tmp_path):
    script = """
        import os, sys, threading
        import gpumem
        from gpumem import observe
        arena = gpumem.Arena("host")
        recording = observe.record(path=sys.argv[1])
        def work(number):
            with observe.tag(f"thread {number}"):
                for i in range(10**9):
                    arena.allocate(1000 + number).close()
                    if i == 10_000:
                        os.write(1, b"ready\\n")
        for number in range(3):
            threading.Thread(target=work, args=(number,), daemon=True).start()
        threading.Event().wait()
    """
    path = tmp_path / "events"
    running = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(path)], stdout=subprocess.PIPE
    )
    try:
        for _ in range(3):
            assert running.stdout.readline() == b"ready\n"
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
        running.stdout.close()
    events = observe.read(path)
    assert events.process == running.pid
    counts = {n: 0 for n in range(3)}
    for event in events:
        if event.action == "alloc":
            number = event.nbytes - 1000
            assert event.tag == f"thread {number}"
            counts[number] += 1
    assert min(counts.values()) >= 10_000
    assert events.torn <= 3
    trace = load_trace(path)
    assert trace.peak_requested <= 3 * 1002


# ---- processes -----------------------------------------------------------------------------------


def test_forked_child_does_not_write_into_its_parents_file(tmp_path):
    script = """
        import os, sys
        import gpumem
        from gpumem import observe
        path = sys.argv[1]
        arena = gpumem.Arena("host")
        with observe.record(path=path) as recording:
            arena.allocate(1).close()
            pid = os.fork()
            if pid == 0:
                assert not recording.running
                fresh = gpumem.Arena("host")
                fresh.allocate(2).close()
                with observe.record(fresh) as own:
                    fresh.allocate(3).close()
                assert [e.nbytes for e in own.events() if e.action == "alloc"] == [3]
                try:
                    observe.record(path=path)
                except gpumem.errors.InUseError:
                    pass
                else:
                    raise AssertionError
                recording.stop()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            arena.allocate(4).close()
        sizes = [e.nbytes for e in observe.read(path) if e.action == "alloc"]
        assert sizes == [1, 4], sizes
    """
    child.run_quietly(script, str(tmp_path / "events"))


def test_name_that_is_new_in_a_forked_child_is_not_written_into_its_parents_file(tmp_path):
    script = """
        import os, sys
        from pathlib import Path
        from gpumem import observe
        path = Path(sys.argv[1])
        with observe.record(path=path):
            before = path.read_bytes()
            pid = os.fork()
            if pid == 0:
                with observe.tag("the child's"):
                    pass
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            assert path.read_bytes() == before
    """
    child.run_quietly(script, str(tmp_path / "events"))


def test_process_that_exits_while_recording_leaves_a_readable_file(tmp_path):
    script = """
        import sys
        import gpumem
        from gpumem import observe
        arena = gpumem.Arena("host")
        recording = observe.record(path=sys.argv[1], stacks=1.0)
        kept = arena.allocate(7)
    """
    child.run_quietly(script, str(tmp_path / "events"))
    assert blocks_of(observe.read(tmp_path / "events"))[0] == ("alloc", 7)


# ---- replay --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backing", ["regions", "virtual"])
@pytest.mark.parametrize("into_file", [True, False])
def test_recording_replays_to_the_peaks_of_its_stats(tmp_path, backing, into_file, rng):
    config = {"backing": backing, "stream_reuse": "never"}
    if backing == "virtual":
        config["page_move_budget"] = 1.0
    path = tmp_path / "program.events" if into_file else None
    peak = live_bytes = 0
    with gpumem.Arena("host", config) as arena:
        with observe.record(arena, path, capacity=1 << 14) as recording:
            streams = [gpumem.Stream("host") for _ in range(3)]
            live = []
            for _ in range(3000):
                if live and rng.random() < 0.5:
                    buffer = live.pop(rng.randrange(len(live)))
                    live_bytes -= buffer.nbytes
                    buffer.close()
                else:
                    size = int(2 ** rng.uniform(0, 22))
                    live.append(arena.allocate(size, rng.choice(streams)))
                    live_bytes += size
                    peak = max(peak, live_bytes)
            stats = arena.stats()
        for buffer in live:
            buffer.close()
    trace = load_trace(path) if into_file else recording.trace()
    assert trace.peak_requested == peak
    result = replay(trace, "host", config=config)
    assert result.peak_requested_bytes == peak
    assert result.peak_in_use_bytes == stats.max_in_use
    assert result.peak_reserved_bytes == stats.max_reserved


def test_trace_selects_one_memory_of_several(make_arena, tmp_path):
    path = tmp_path / "events"
    pinned, host = make_arena(memory="host/host_accessible"), make_arena()
    with observe.record(path=path):
        for size in (1, 2, 3):
            host.allocate(size).close()
        pinned.allocate(100).close()
    # Resources that another test left alive are described in the file as well.
    events = observe.read(path)
    memories = sorted({one.memory for one in events.resources.values()})
    for memory, allocs in ((host.memory, 3), (pinned.memory, 1)):
        began = sum(one.memory == str(memory) for one, _ in events.began_with)
        trace = load_trace(path, device=memories.index(str(memory)))
        assert trace.allocs == allocs + began
    with pytest.raises(TraceError, match=rf"expected 0\.\.{len(memories) - 1}$"):
        load_trace(path, device=len(memories))


def test_trace_of_an_unused_memory_is_refused(tmp_path, arena):
    path = tmp_path / "events"
    with observe.record(arena, path):
        pass
    with pytest.raises(TraceError, match=f"holds no allocations in '{arena.memory}': no block"):
        load_trace(path, device=0)


def test_columns_equal_the_events(arena):
    with observe.record(arena) as recording:
        arena.allocate(10).close()
    events = recording.events()
    assert events.records.dtype == EVENT
    assert events.records["nbytes"].tolist() == [e.nbytes for e in events]
    assert not events.records.flags.writeable


def test_reprs_of_recording_and_events_count_in_words(tmp_path, arena):
    with observe.record(arena, capacity=1024) as recording:
        arena.allocate(10)
        assert repr(recording) == (
            "<gpumem.observe.Recording into memory, the last 1024 events: running>"
        )
    events = recording.events()
    assert repr(events) == f"<gpumem.observe.Events: {len(events)} events of 1 resource>"
    with observe.record(arena, tmp_path / "events") as recording:
        pass
    where = tmp_path / "events"
    assert repr(recording) == f"<gpumem.observe.Recording into {where}: stopped>"


def test_device_that_is_no_index_is_refused(tmp_path, arena):
    with observe.record(arena, tmp_path / "events") as recording:
        arena.allocate(10).close()
    for device in ("0", 0.0, True):
        with pytest.raises(TraceError, match=rf"device is {device!r}, expected 0\.\.0"):
            recording.trace(device)
        with pytest.raises(TraceError, match=rf"device is {device!r}, expected 0\.\.0"):
            load_trace(tmp_path / "events", device=device)
