"""Reports without a browser: figures, policies, columns, addresses, files, the command."""

import base64
import json
import pickle
import zlib

import numpy as np
import pytest
from helpers.runs import MIB, small_run, told_run
from helpers.torch_snapshots import entry, snapshot_file

import gpumem
from gpumem import observe
from gpumem.cli import main
from gpumem.errors import ConfigError, InUseError, TraceError
from gpumem.replay import replay
from gpumem.replay.caching_model import caching_allocator_reserved, plain_driver_reserved
from gpumem.replay.policies import place, policies
from gpumem.report import blocks as blocks_module
from gpumem.report import data as data_module
from gpumem.report import write_report
from gpumem.report.blocks import blocks_of, draw_together, owners_of
from gpumem.report.data import column, recorded_policy, run_data
from gpumem.traces import Curve, Details, Trace, load_trace


def unpack(packed):
    """Read a column as the page does."""
    stored = np.frombuffer(zlib.decompress(base64.b64decode(packed["data"])), packed["type"])
    values = stored.astype(np.int64) * packed["unit"]
    return (np.cumsum(values) if packed["rising"] else values).tolist()


def random_run(rng, allocs=300):
    """Make a run in which numbers are given out again, and some blocks are never freed."""
    action, block, size, stream, live, free = [], [], [], [], {}, []
    for _ in range(allocs):
        while live and rng.random() < 0.45:
            number = rng.choice(list(live))
            action.append(2)
            block.append(number)
            size.append(live.pop(number))
            stream.append(number % 3)
            free.append(number)
        number = free.pop() if free and rng.random() < 0.5 else len(live) + len(free)
        action.append(0)
        block.append(number)
        live[number] = rng.choice([0, 1, 300, 70_000, 5 * MIB])
        size.append(live[number])
        stream.append(number % 3)
    return Trace(action, block, size, stream, list(range(len(action))), name="random")


# --------------------------------------------------------------------------------- what a run was


def test_report_has_the_main_figures(tmp_path):
    report = write_report(small_run(), tmp_path / "page.html")
    assert report.path.stat().st_size == report.nbytes
    assert repr(report).startswith(
        f"<gpumem.report.Report {str(report.path)!r}: 5 events, at most "
    )
    assert f"<td>{report.path}</td>" in report._repr_html_()
    assert (report.events, report.allocations, report.streams) == (5, 3, 2)
    assert report.peak_live_bytes == 7 * MIB
    assert (report.live_at_end_blocks, report.live_at_end_bytes) == (1, 2 * MIB)
    assert [each["name"] for each in report.policies] == [
        "gpumem, pages that move",
        "gpumem, regions split tightly",
        "PyTorch-like caching",
        "plain driver calls",
    ]
    assert all(each["peak_reserved_bytes"] >= 7 * MIB for each in report.policies)


def test_policies_reserve_what_replay_and_models_reserve():
    trace = load_trace("multistream_train")
    found = {each.name: each for each in policies(trace)}
    for name, config in (
        ("gpumem, pages that move", {"backing": "virtual"}),
        ("gpumem, regions split tightly", {"backing": "regions", "split_rule": "tight"}),
    ):
        assert found[name].held.peak == replay(trace, "host", config=config).peak_reserved_bytes
    assert found["PyTorch-like caching"].held.peak == caching_allocator_reserved(trace)
    assert found["plain driver calls"].held.peak == plain_driver_reserved(trace)
    for each in found.values():
        assert (each.held.by_event(trace.events) >= trace.live_bytes()).all(), each.name


def test_replayed_live_blocks_never_overlap(rng):
    trace = random_run(rng)
    blocks = blocks_of(trace)
    address = place(trace).address[blocks.allocation].astype(np.int64)
    live = {}
    for number, is_alloc in zip(blocks.block.tolist(), blocks.is_alloc.tolist(), strict=True):
        if not is_alloc:
            del live[number]
            continue
        begin, end = int(address[number]), int(address[number] + blocks.size[number])
        assert begin
        assert all(end <= a or begin >= b for a, b in live.values())
        live[number] = begin, end


def test_replayed_reserved_bytes_change_at_their_event():
    trace = Trace([0, 1, 0, 2, 0], [0, 0, 1, 0, 2], [5, 5, 1 << 30, 5, 3 << 30], [0] * 5, [0] * 5)
    held = place(trace, {"backing": "regions"}).held
    assert held.at.tolist() == [0, 2, 4]
    assert held.by_event(5).tolist()[1::2] == held.nbytes.tolist()[:2]


def test_each_free_matches_the_latest_allocation_of_its_number(rng):
    trace = random_run(rng)
    blocks = blocks_of(trace)
    assert trace.live_bytes()[blocks.moving].max() == trace.peak_requested
    open_blocks, ordinal = {}, -1
    expected = []
    for action, number, size in zip(trace.action, trace.block, trace.size, strict=True):
        if size and action == 0:
            ordinal += 1
            open_blocks[number] = ordinal
        if size:
            expected.append(open_blocks[number])
    assert blocks.block.tolist() == expected
    assert np.flatnonzero(~blocks.freed).size == len(
        {b for b in expected if expected.count(b) == 1}
    )


def test_page_columns_reproduce_the_run(rng):
    trace = random_run(rng)
    columns = run_data(trace, [])["columns"]
    sizes, live, begun = unpack(columns["size"]), [], 0
    held = 0
    for back in unpack(columns["back"]):
        held += sizes[begun] if back == 0 else -sizes[begun - back]
        begun += back == 0
        live.append(held)
    blocks = blocks_of(trace)
    assert live == trace.live_bytes()[blocks.moving].tolist()
    assert unpack(columns["time"]) == trace.time_us[blocks.moving].tolist()
    assert unpack(columns["stream"]) == trace.stream[blocks.moving[blocks.is_alloc]].tolist()


def test_smallest_of_too_many_blocks_are_only_in_the_sums(rng, monkeypatch):
    monkeypatch.setattr(data_module, "MAX_BLOCKS", 40)
    trace = random_run(rng)
    data = run_data(trace, [])
    blocks = blocks_of(trace)
    sizes = unpack(data["columns"]["size"])
    assert len(sizes) == 40
    assert sorted(sizes) == sorted(blocks.size.tolist())[-40:]
    shown = blocks.largest(40)[blocks.block]
    held = np.cumsum(np.where(blocks.is_alloc, 1, -1)[shown] * blocks.size[blocks.block][shown])
    total = held + unpack(data["columns"]["rest"])
    assert total.tolist() == trace.live_bytes()[blocks.moving][shown].tolist()


def test_smallest_of_too_many_owners_are_grouped(monkeypatch):
    monkeypatch.setattr(blocks_module, "MAX_OWNERS", 3)
    sizes = np.array([100, 7, 300, 9, 200])
    details = Details(np.zeros(5, np.uint64), np.arange(5), tuple("abcde"), ("default",))
    trace = Trace([0] * 5, range(5), sizes, [0] * 5, [0] * 5, details=details)
    owner, names, named = owners_of(trace, blocks_of(trace))
    assert named
    assert [names[o] for o in owner] == ["3 others", "3 others", "c", "3 others", "e"]


def test_blocks_of_too_many_sizes_are_grouped_by_powers_of_two(monkeypatch):
    monkeypatch.setattr(blocks_module, "MAX_OWNERS", 10)
    sizes = range(256, 268)
    trace = Trace([0] * 12, range(12), sizes, [0] * 12, [0] * 12)
    owner, names, named = owners_of(trace, blocks_of(trace))
    assert not named
    assert {names[o] for o in owner} == {"256 to 512 bytes"}


# ------------------------------------------------------------------------------ what a log told


def test_reserved_bytes_of_a_log_cover_its_blocks():
    details = Details(
        address=np.zeros(1, np.uint64),
        owner=np.zeros(1, np.int32),
        owners=("",),
        streams=("default",),
        held=Curve(np.array([1]), np.array([64])),
    )
    trace = Trace([0, 2], [0, 0], [100, 100], [0, 0], [0, 1], details=details)
    policy = recorded_policy(trace)
    assert policy.how == "at least"
    assert policy.held.by_event(2).tolist() == [100, 164]
    held = Curve(np.array([0]), np.array([128]))
    enough = Details(details.address, details.owner, ("",), ("default",), held)
    told = recorded_policy(Trace([0, 2], [0, 0], [100, 100], [0, 0], [0, 1], details=enough))
    assert (told.how, told.held.peak) == ("recorded", 128)


def test_recording_report_has_addresses_owners_reserved_and_failures(tmp_path):
    arena = gpumem.Arena("host", {"max_mem": 64 * MIB})
    with observe.record(arena, tmp_path / "events") as recording:
        with observe.tag("weights"):
            kept = arena.allocate(MIB)
        with pytest.raises(gpumem.OutOfMemoryError):
            arena.allocate(100 * MIB)
    trace = recording.trace()
    assert trace.details.address.tolist() == [kept.ptr]
    assert [trace.details.owners[o] for o in trace.details.owner] == ["weights"]
    assert trace.details.held.peak == arena.stats().reserved
    assert [(at, each.nbytes) for at, each in trace.details.refusals] == [(1, 100 * MIB)]
    assert trace.meta["failed_allocs"] == 1
    report = recording.report(tmp_path / "page.html")
    assert report.failed_allocs == 1
    assert report.policies[0]["peak_reserved_bytes"] == arena.stats().reserved
    kept.close()


def test_report_of_a_running_recording_is_refused(tmp_path, arena):
    with observe.record(arena) as recording:
        arena.allocate(1).close()
        with pytest.raises(InUseError, match="still runs"):
            recording.report(tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_torch_snapshot_report_has_source_lines_segments_and_failures(tmp_path):
    frames = [
        {"filename": "at::empty", "name": "empty", "line": 0},
        {"filename": "/x/torch/nn/linear.py", "name": "forward", "line": 9},
        {"filename": "train.py", "name": "step", "line": 3},
    ]
    entries = [
        entry("segment_alloc", 4096, 2 * MIB),
        entry("alloc", 4096, 1000, frames=frames),
        entry("oom", 4096, 1 << 40),
        entry("alloc", 8192, 500, frames=frames[:2]),
        entry("free_completed", 8192, 500),
        entry("segment_free", 4096, 2 * MIB),
    ]
    path = snapshot_file(tmp_path / "snapshot.pickle", entries)
    details = load_trace(path).details
    assert details.owners == ("step (train.py:3)", "forward (/x/torch/nn/linear.py:9)")
    assert details.address.tolist() == [4096, 8192]
    assert [(at, each.nbytes) for at, each in details.refusals] == [(1, 1 << 40)]
    assert details.held.by_event(3).tolist() == [2 * MIB] * 3
    assert write_report(path, tmp_path / "page.html").policies[0]["how"] == "recorded"


def test_snapshot_in_pytorchs_form_is_accepted(tmp_path, capsys, arena):
    with arena.allocate(1000), arena.allocate(MIB):
        path = tmp_path / "now.pickle"
        path.write_bytes(pickle.dumps(arena.snapshot().to_torch()))
    report = write_report(path, tmp_path / "page.html")
    assert (report.live_at_end_blocks, report.live_at_end_bytes) == (2, MIB + 1000)
    assert main(["report", str(path), "-o", str(tmp_path / "page.html")]) == 0
    assert "peak live" in capsys.readouterr().out


# ------------------------------------------------------------------- recordings that lost events


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_overflowed_ring_begins_with_what_is_live(tmp_path, stopped, alone):
    others = [
        block.nbytes
        for found in observe.snapshot().resources
        for block in found.live
        if found.memory == "host:0" and not found.upstreams and not alone
    ]
    arena = gpumem.Arena("host")
    older = arena.allocate(100 * MIB)
    recording = observe.record(arena if alone else None, capacity=64)
    with observe.tag("weights"):
        kept = arena.allocate(60 * MIB)
    going = arena.allocate(MIB)
    for _ in range(5000):
        arena.allocate(512).close()
    going.close()
    trace = None if stopped else recording.trace()
    with pytest.warns(RuntimeWarning, match="oldest events"):
        recording.stop()
    trace = trace or recording.trace()
    assert trace.peak_requested == 161 * MIB + 512 + sum(others)
    assert trace.live_bytes()[-1] == 160 * MIB + sum(others)
    assert recording.lost > 9000
    names = [trace.details.owners[owner] for owner in trace.details.owner]
    begun = len(others) + 4  # the ring's first event frees one of 512 bytes
    assert sorted(trace.size[:begun].tolist()) == sorted([512, MIB, 60 * MIB, 100 * MIB, *others])
    assert names[trace.size.tolist().index(60 * MIB)] == "weights"
    report = write_report(trace, tmp_path / "page.html")
    assert report.peak_live_bytes == 161 * MIB + 512 + sum(others)
    assert report.live_at_end_bytes == 160 * MIB + sum(others)
    assert report.lost_events == recording.lost
    assert f"; {recording.lost:,} lost, perhaps with a higher peak>" in repr(report)
    assert f"begins with the {begun} blocks live then" in report.notice
    assert report.notice in (tmp_path / "page.html").read_text()
    older.close()
    kept.close()


def test_ring_without_lost_events_has_no_notice(tmp_path, arena):
    older = arena.allocate(MIB)
    with observe.record(arena) as recording:
        arena.allocate(512).close()
    report = recording.report(tmp_path / "page.html")
    assert (report.lost_events, report.notice, report.peak_live_bytes) == (0, "", 512)
    older.close()


def test_report_of_a_torn_file_says_so(tmp_path, capsys, arena):
    path = tmp_path / "events"
    with observe.record(arena, path):
        for _ in range(20):
            arena.allocate(512).close()
    data = bytearray(path.read_bytes())
    whole = write_report(path, tmp_path / "page.html")
    assert (whole.lost_events, whole.notice) == (0, "")
    path.write_bytes(data[:-7])
    cut = write_report(path, tmp_path / "page.html")
    assert cut.lost_events == 1
    assert cut.notice.startswith("The file is torn, 1 event was not whole")
    path.write_bytes(data[: -2 * 48])  # between two events
    assert write_report(path, tmp_path / "page.html").notice.startswith(
        "The file is torn, 2 events"
    )
    data[-10 * 48 + 40] = 0  # begun and never finished
    path.write_bytes(data)
    assert write_report(path, tmp_path / "page.html").lost_events == 1
    capsys.readouterr()
    assert main(["report", str(path), "-o", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().err.startswith("notice: The file is torn, 1 event was not whole")
    assert main(["report", str(path), "-o", str(tmp_path / "page.html"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["lost_events"] == 1
    assert told["notice"]


def test_rmm_log_report_has_addresses_and_threads(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(
        "Thread,Time,Action,Pointer,Size,Stream\n7,00:00:00.1,allocate,0x1000,256,0x0\n"
        "8,00:00:00.2,allocate,0x2000,512,0x2\n8,00:00:00.3,allocate failure,(nil),99,0x0\n"
    )
    details = load_trace(path).details
    assert details.owners == ("thread 7", "thread 8")
    assert details.address.tolist() == [0x1000, 0x2000]
    assert details.streams == ("default", "per-thread default")
    assert [(at, each.nbytes) for at, each in details.refusals] == [(2, 99)]
    assert write_report(path, tmp_path / "page.html").failed_allocs == 1


def used(address, nbytes, stream=0, **more):
    sizes = {"nbytes": nbytes, "allocated_nbytes": -(-nbytes // 256) * 256}
    place = {"address": address, "region": 0, "stream": stream, "generation": 0}
    return {"state": "used", **place, **sizes, **more}


def resource_of(key, name, *blocks, upstreams=()):
    facts = {"kind": "user", "parent": None, "backing": None, "limit": 0, "held_ns": 0}
    lists = {"upstreams": [*upstreams], "regions": [], "pages": [], "blocks": [*blocks]}
    counts = {"reserved": 8 * MIB}
    return {"key": key, "name": name, "memory": "cuda:0", "counts": counts, **facts, **lists}


BLOCKS = (
    used(4096, 512) | {"state": "free"},
    used(8192, 500, stream=7, age_ns=2_000_000, tag="optimizer", stack=0),
    used(12288, MIB, age_ns=5_000_000, stack=0),
    used(1 << 30, 1),
)
SNAPSHOT = {
    "format": "gpumem.snapshot",
    "version": 1,
    "time": 10**18,
    "process": 1,
    "stacks": [[["train.py", 3, "step"]]],
    "resources": [resource_of(1, "weights", *BLOCKS), resource_of(2, "limit", upstreams=[1])],
}


def test_snapshot_report_allocates_blocks_oldest_first(tmp_path):
    path = tmp_path / "moment.json"
    path.write_text(json.dumps(SNAPSHOT))
    trace = load_trace(path)
    assert trace.size.tolist() == [MIB, 1, 500]
    assert trace.time_us.tolist() == [0, 0, 3000]
    assert trace.details.address.tolist() == [12288, 1 << 30, 8192]
    owners = [trace.details.owners[owner] for owner in trace.details.owner]
    assert owners == ["step (train.py:3)", "weights", "optimizer"]
    data = run_data(trace, [recorded_policy(trace)])
    assert (data["moment"], data["endedUs"]) == (True, 5000)
    report = write_report(path, tmp_path / "page.html")
    assert report.policies[0]["peak_reserved_bytes"] == 8 * MIB
    assert report.live_at_end_blocks == 3


def test_arena_report_shows_current_use(tmp_path):
    arena = gpumem.Arena("host", name="weights")
    with pytest.raises(TraceError, match="nothing in use"):
        arena.report(tmp_path / "page.html")
    assert not list(tmp_path.iterdir())
    with observe.record(arena), observe.tag("layer 1"):
        first = arena.allocate(MIB)
    second = arena.allocate(3000)
    report = arena.report(tmp_path / "page.html")
    assert report.peak_live_bytes == MIB + 3000
    assert report.live_at_end_blocks == 2
    assert report.policies[0]["peak_reserved_bytes"] == arena.stats().reserved
    arena.snapshot().save(tmp_path / "moment.json")
    trace = load_trace(tmp_path / "moment.json")
    owners = [trace.details.owners[owner] for owner in trace.details.owner]
    assert dict(zip(trace.details.address.tolist(), owners, strict=True)) == {
        first.ptr: "layer 1",
        second.ptr: "weights",
    }
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "x"}, "its format is not"),
        ({"version": 2}, "a snapshot of version 2"),
        ({"resources": []}, "nothing in use"),
        ({"resources": [{"upstreams": []}]}, "KeyError"),
        ({"stacks": []}, "ValueError: stack is 0"),
    ],
)
def test_report_of_an_invalid_snapshot_is_refused(tmp_path, change, words):
    path = tmp_path / "moment.json"
    path.write_text(json.dumps(SNAPSHOT | change))
    with pytest.raises(TraceError, match=words):
        load_trace(path)
    path.write_text("{")
    with pytest.raises(TraceError, match="not a snapshot"):
        load_trace(path)


def test_report_of_more_than_a_replay_can_place_is_refused(tmp_path, capsys):
    path = tmp_path / "moment.json"
    resource = resource_of(1, "weights", used(1 << 40, 63 << 40))
    path.write_text(json.dumps(SNAPSHOT | {"resources": [resource]}))
    words = "could not allocate 1 of 1 blocks: the trace needs 63.0 TiB at once"
    with pytest.raises(TraceError, match=words):
        write_report(path, tmp_path / "page.html")
    assert main(["report", str(path), "-o", str(tmp_path / "page.html")]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


# ------------------------------------------------------------------------- columns and addresses


@pytest.mark.parametrize(
    ("values", "width", "unit"),
    [
        ([], "u1", 1),
        ([0, 0], "u1", 1),
        ([1, 255], "u1", 1),
        ([1, 256], "u2", 1),
        ([1, 1 << 16], "u4", 1),
        ([3, 1 << 32], "f8", 1),
        ([1 << 40, 3 << 40], "u1", 1 << 40),
        ([0, 1 << 53], "u1", 1 << 53),
    ],
)
def test_column_uses_the_narrowest_type(values, width, unit):
    packed = column(values)
    assert (packed["type"], packed["unit"], packed["length"]) == (width, unit, len(values))
    assert unpack(packed) == values


def test_column_refuses_numbers_out_of_range():
    for values in ([-1], [(1 << 53) + 1]):
        with pytest.raises(TraceError, match="a page shows numbers from 0 to"):
            column(values)
    with pytest.raises(ValueError, match="never decreases"):
        column([2, 1], rising=True)


def test_wide_address_gaps_are_closed_and_narrow_ones_stay():
    far, near = (1 << 64) - 4096, 10 * MIB
    address = np.array([far, 0x1000, 0x1000 + near + MIB, 0x1000], np.uint64)
    drawn = draw_together(address, np.array([8192, near, 512, near]))
    assert drawn.offset[1] == drawn.offset[3] == 0
    assert drawn.offset[2] == near + MIB
    assert drawn.offset[0] == near + MIB + 512 + 2 * MIB
    assert [base for base, _, _ in drawn.ranges] == [0x1000, far]


# -------------------------------------------------------------------------------- the command


def run(capsys, *arguments):
    code = main([str(each) for each in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_report_command_writes_the_page_and_prints_one_object(tmp_path, capsys):
    page = tmp_path / "page.html"
    code, out, err = run(capsys, "report", "multistream_train", "-o", page, "--json")
    told = json.loads(out)
    assert (code, err) == (0, "")
    assert told["path"] == str(page)
    assert told["nbytes"] == page.stat().st_size
    assert told["peak_live_bytes"] == load_trace("multistream_train").peak_requested
    assert len(told["policies"]) == 4


def test_report_command_prints_readable_sizes(tmp_path, capsys):
    code, out, _ = run(capsys, "report", "multistream_train", "-o", tmp_path / "page.html")
    assert code == 0
    assert "3.2 GiB" in out
    assert "PyTorch-like caching" in out


def test_report_command_names_the_page_after_the_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "report", "multistream_train")[0] == 0
    assert (tmp_path / "multistream_train.html").exists()


def test_report_command_distinguishes_bad_input_from_write_failures(tmp_path, capsys):
    code, out, err = run(capsys, "report", "nope", "-o", tmp_path / "page.html", "--json")
    assert (code, out) == (2, "")
    assert err.startswith("gpumem: nope: no such file")
    code, out, err = run(capsys, "report", "multistream_train", "-o", tmp_path / "no" / "page.html")
    assert (code, out) == (1, "")
    assert "cannot be written" in err
    assert not list(tmp_path.iterdir())


def test_failed_page_write_leaves_the_old_page_and_no_temporary_file(tmp_path):
    taken = tmp_path / "page.html"
    taken.mkdir()
    with pytest.raises(OSError, match=r"page\.html"):
        write_report(small_run(), taken)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_failed_page_write_names_the_page_and_no_temporary_file(tmp_path):
    page = tmp_path / "no" / "page.html"
    with pytest.raises(FileNotFoundError) as caught:
        write_report(small_run(), page)
    assert caught.value.filename == str(page)
    assert ".part" not in str(caught.value)


def test_report_that_would_replace_a_source_is_refused(tmp_path, capsys, arena):
    file, link = tmp_path / "run.rec", tmp_path / "link"
    with observe.record(arena, file) as recording:
        arena.allocate(1000).close()
    link.symlink_to(file)
    written = file.read_bytes()
    for refused in (
        lambda: write_report(["multistream_train", link], file),
        lambda: recording.report(link),
    ):
        with pytest.raises(ConfigError, match="expected another file than"):
            refused()
    code, _, err = run(capsys, "report", file, "-o", file)
    assert code == 2
    assert "expected another file than a source" in err
    assert file.read_bytes() == written


def test_report_rejects_a_title_or_path_of_another_type_before_it_reads():
    with pytest.raises(TypeError, match="invalid title = 5: expected a str or None"):
        write_report("nope", "page.html", title=5)
    with pytest.raises(TypeError, match="PathLike"):
        write_report("nope", 5)


def test_report_rejects_an_unsupported_source():
    with pytest.raises(TraceError, match="no such file"):
        write_report("nope", "page.html")


# ------------------------------------------------------------------------------------ several runs


def test_report_of_several_sources_lists_their_figures(tmp_path):
    report = write_report([small_run(), told_run()], tmp_path / "page.html")
    assert [run.name for run in report.runs] == ["small run", "told"]
    assert (report.name, report.events) == ("small run", 5)
    assert "<td>2</td>" in report._repr_html_()
    assert json.loads(json.dumps(report.as_dict()))["runs"][1]["peak_live_bytes"] == 7 * MIB


def test_report_of_no_source_is_refused(tmp_path):
    with pytest.raises(TraceError, match="at least one source"):
        write_report([], tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", [1, -1, 0.0, "cuda:0"])
def test_trace_has_no_device_but_the_first(tmp_path, device):
    with pytest.raises(TraceError, match=rf"^small run: device is {device!r}, expected 0\.\.0$"):
        write_report(small_run(), tmp_path / "page.html", device=device)
    assert not list(tmp_path.iterdir())
    assert len(write_report(small_run(), tmp_path / "page.html", device=0).runs) == 1


def test_recording_report_shows_every_memory(tmp_path):
    arenas = [gpumem.Arena("host"), gpumem.Arena("host/host_accessible")]
    memories = sorted({str(arena.memory) for arena in arenas})
    with observe.record(None, tmp_path / "run.events") as recording:
        kept = [arena.allocate(MIB) for arena in arenas]
    report = recording.report(tmp_path / "page.html")
    assert len(report.runs) == len(memories)
    assert len(write_report(tmp_path / "run.events", tmp_path / "page.html").runs) == len(memories)
    only = write_report(tmp_path / "run.events", tmp_path / "page.html", device=0)
    assert len(only.runs) == 1
    del kept


def test_report_command_takes_several_files(tmp_path, capsys):
    out = tmp_path / "both.html"
    assert main(["report", "multistream_train", "gpt2_varlen_train", "-o", str(out)]) == 0
    assert "2 runs are on the page" in capsys.readouterr().out
    assert main(["report", "multistream_train", "nope", "-o", str(out), "--json"]) != 0
    assert "nope" in capsys.readouterr().err


def test_page_data_holds_stacks_once_and_segments():
    data = run_data(told_run(), [])
    assert data["frames"][2] == ["/lib/torch/nn.py", 9, "call"]
    assert len(data["frames"]) == 4  # main is in both stacks
    columns = {name: unpack(column) for name, column in data["columns"].items()}
    assert columns["stack"] == [1, 2, 0]
    assert columns["stackSizes"] == [2, 3]
    assert [data["frames"][n][2] for n in columns["stackFrames"]] == [
        *("load", "main"),
        *("call", "forward", "main"),
    ]
    assert columns["segmentSize"] == [8 * MIB, 4 * MIB]
    assert columns["segmentBegin"] == [0, 2]
    assert columns["segmentEnd"] == [5, 5]


def test_replayed_page_has_segments_that_hold_its_blocks():
    trace = load_trace("multistream_train")
    placed = place(trace, {"backing": "regions"})
    begin = placed.segments.address.astype(object)
    end = begin + placed.segments.nbytes
    blocks = blocks_of(trace)
    address = placed.address[blocks.allocation].astype(object)
    for at, nbytes in zip(address[::97], blocks.size[::97].tolist(), strict=True):
        assert any(a <= at and at + nbytes <= b for a, b in zip(begin, end, strict=True))


@pytest.mark.parametrize("path", ["", ".", "folder", "none/page.html"])
def test_page_that_cannot_be_written_is_refused_before_a_source_is_read(
    tmp_path, monkeypatch, path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    told = []
    with pytest.raises((IsADirectoryError, FileNotFoundError)):
        write_report(small_run(), path, doing=told.append)
    assert told == []
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]
